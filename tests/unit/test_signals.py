# extra: template
"""Signals set a flag for the loop, and do not change the exit code at exit (workers: test_refusals.py); ranks whose
torchrun is gone."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import utils.signals
from ranks import ROOT, marked, start, stop
from training import wait_until
from utils.signals import STOP_HANDLER

ENDS_UNDER_SIGNALS = """
import os, signal, sys
from utils.signals import catch_stop_signals
class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), numbers=(signal.SIGTERM, signal.SIGUSR1)):
        for number in numbers:
            kill(process, number)
late = Late()  # deleted with the module, after all exit handlers
catch_stop_signals()
sys.exit(75)
"""


def test_the_handlers_that_were_replaced_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    utils.signals.catch_stop_signals()
    assert signal.getsignal(signal.SIGTERM) != before
    utils.signals.restore_signals()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.guarantee("stop")
def test_a_signal_that_came_before_they_are_restored_ends_the_process():
    code = "import os; from utils.signals import catch_stop_signals, restore_signals; catch_stop_signals()"
    code += "; os.kill(os.getpid(), 15); restore_signals()"
    ended = subprocess.run(
        [sys.executable, "-c", code + "; print('goes on')"], cwd=ROOT, capture_output=True, timeout=60
    )
    assert ended.returncode == -signal.SIGTERM and not ended.stdout


def test_a_signal_sets_a_flag_and_the_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with STOP_HANDLER as signals:
        assert signals.received == ""
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):  # once: save and stop; twice: now
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_counts_for_a_run_that_begins_later_until_nobody_catches_it(monkeypatch):
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    with STOP_HANDLER:
        with STOP_HANDLER:
            pass
        gc.collect()
        os.kill(os.getpid(), signal.SIGUSR1)
        with STOP_HANDLER:
            assert STOP_HANDLER.received == "SIGUSR1" and not errors
    assert STOP_HANDLER.received == ""


def test_a_forked_process_does_not_write_signals_into_the_files_of_its_parent():
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with STOP_HANDLER:
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


# ---- ranks whose torchrun is gone ----


AGENT = """
import mmap, os, sys
from pathlib import Path
folder, *words = sys.argv[1:]
library = Path(folder, "libtorch_python.so")
library.write_bytes(b"x")
with library.open() as file:
    loaded = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
rank = os.posix_spawn(words[0], words, os.environ | variables)
os.waitpid(rank, 0)
"""  # looks like torchrun: a process that has loaded torch
ADOPTER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # a child subreaper, as systemd --user or a container's init
words = sys.argv[1:]
subprocess.run(words)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
RANK = """
import os, sys, time
from pathlib import Path
folder, when = Path(sys.argv[1]), sys.argv[2]
sys.argv[1:] = []
def agent_ends():
    parent = os.getppid()
    (folder / "ready").touch()
    while os.getppid() == parent:
        time.sleep(0.01)
if when == "before the import":
    agent_ends()
from utils.run.command_line import check_command_line
if when == "after the import":
    agent_ends()
check_command_line()
(folder / "trains").touch()
if when == "later":
    agent_ends()
    time.sleep(60)
"""
BELOW = {  # between torchrun and the rank, which may be below a command of the user (torchrun --no-python)
    "torchrun": [],
    "a shell below torchrun": ["/bin/sh", "-c", '"$@"; exit $?', "sh"],
    "a container of the rank": ["/usr/bin/unshare", *"--pid --fork --mount-proc --kill-child".split()],
    "a container of the rank, with an init": (
        ["/usr/bin/unshare", *"--pid --fork --mount-proc --kill-child sh -c".split(), '"$@"; exit $?', "sh"]
    ),
}
ABOVE = {
    "a shell": [],
    "a subreaper": [
        "/bin/sh",
        "-c",
        '"$@" &',
        "sh",
        sys.executable,
        "-c",
        ADOPTER,
    ],  # not below pytest, which has torch
    "process 1 of a container": "unshare --pid --fork --mount-proc --kill-child".split(),
    "process 1 of a container, with torchrun below it": (
        [*"unshare --pid --fork --mount-proc --kill-child sh -c".split(), '"$@"; sleep 9', "sh"]
    ),
}


def rank_of_torchrun(folder, when, above=(), below=()):
    """Start a rank below something like torchrun."""
    rank = [sys.executable, "-c", RANK, folder, when]
    return start([*above, sys.executable, "-c", AGENT, folder, *below, *rank])


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal of Linux")
@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("above", ABOVE)
def test_a_rank_of_a_live_torchrun_starts_whatever_is_around_them(tmp_path, above, below):
    if "container" in above + below and os.geteuid():
        pytest.skip("needs root")
    program = rank_of_torchrun(tmp_path, "", ABOVE[above], BELOW[below])
    try:
        wait_until((tmp_path / "trains").exists, 20)
    finally:
        for pid in marked(program):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        stop(program)


@pytest.mark.guarantee("launcher-killed")
@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal of Linux")
@pytest.mark.parametrize("when", ["before the import", "after the import", "later"])
@pytest.mark.parametrize("above", [name for name in ABOVE if name != "process 1 of a container"])
def test_a_rank_whose_torchrun_is_killed_ends_however_early_that_was(tmp_path, above, when):
    if "container" in above and os.geteuid():
        pytest.skip("needs root")
    program = rank_of_torchrun(tmp_path, when, ABOVE[above])
    try:
        wait_until((tmp_path / "ready").exists, 20)
        pids = {Path(f"/proc/{pid}/cmdline").read_text().split("\0")[2]: pid for pid in marked(program)}
        os.kill(pids[AGENT], signal.SIGKILL)
        wait_until(lambda: pids[RANK] not in marked(program), 10)
        assert (tmp_path / "trains").exists() == (when == "later")
    finally:
        for pid in marked(program):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        stop(program)
