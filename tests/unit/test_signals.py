"""Signals set a flag for the loop, and do not change the exit code at exit (workers: test_refusals.py)."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest

import utils.signals
from ranks import ROOT
from utils.signals import StopSignals

ENDS_UNDER_SIGNALS = """
import os, signal, sys
from utils.signals import hold
class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), numbers=(signal.SIGTERM, signal.SIGUSR1)):
        for number in numbers:
            kill(process, number)
late = Late()  # deleted with the module, after all exit handlers
hold()
sys.exit(75)
"""


def test_release_restores_the_handlers_that_hold_replaced():
    before = signal.getsignal(signal.SIGTERM)
    utils.signals.hold()
    assert signal.getsignal(signal.SIGTERM) != before
    utils.signals.release()
    assert signal.getsignal(signal.SIGTERM) == before
    StopSignals.held = None


def test_a_signal_sets_a_flag_and_the_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.received == ""
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):  # once: save and stop; twice: now
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_after_a_run_finds_the_socket_of_the_instance_before(monkeypatch):
    found = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    with StopSignals() as outer:
        with StopSignals():
            pass
        gc.collect()
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert outer.received == "SIGUSR1" and not found


def test_a_forked_process_does_not_write_signals_into_the_files_of_its_parent():
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with StopSignals():
        pid = os.fork()
        if not pid:
            os._exit(signal.set_wakeup_fd(-1) != -1)
        assert os.waitpid(pid, 0)[1] == 0
    assert signal.set_wakeup_fd(before) == before


def test_a_signal_during_exit_does_not_change_the_exit_code():
    """srun --kill-on-bad-exit sends SIGTERM to tasks that exit slightly after the first one."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_UNDER_SIGNALS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 75, ended.stderr


def test_before_a_fork_other_threads_have_time_to_finish(monkeypatch):
    """Needed on some CPython versions: a worker forked while a thread creates its thread state waits forever."""
    pauses = []
    monkeypatch.setattr(utils.signals.time, "sleep", pauses.append)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(pauses) == (sys.version_info < (3, 12))
