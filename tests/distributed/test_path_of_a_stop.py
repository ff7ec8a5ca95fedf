# extra: template
"""The files that a stop signal passes until the exit code: who looks for a step lost at a stop reads them all."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import train
from ranks import ROOT, run_ranks

MOST_FILES = 9
# called without a signal, too: ask for it, agree on it, act on it, and write the state "preempted"
ALWAYS = {"train.py", "utils/run/start.py", "utils/distributed/consensus.py"}
ALWAYS |= {"utils/report/reporter.py", "utils/run/run_status.py"}
FLAGS = "--dataset_size 64 --epochs 2 --batch_size 4 --num_workers 0 --save_every 0 --eval_every 0".split()


class Called:
    """For sys.setprofile: our functions that are called, from the third optimizer step on if `stops`."""

    def __init__(self, stops):
        self.functions, self._stops, self._steps = set(), stops, 0

    def __call__(self, frame, event, _):
        code = frame.f_code
        file = Path(code.co_filename)
        if event != "call" or not file.is_relative_to(ROOT) or file.relative_to(ROOT).parts[0] in ("tests", ".venv"):
            return
        self._steps += code.co_qualname == "TrainState.advance"
        if self._stops and code.co_qualname == "TrainState.advance" and self._steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if not self._stops or self._steps >= 3:
            self.functions.add((str(file.relative_to(ROOT)), code.co_qualname))


def called_in(words, stops):
    """The exit code, and the functions that were called, in all threads."""
    called = Called(stops)
    threading.setprofile(called)
    sys.setprofile(called)
    code = train.main(words)
    sys.setprofile(None)
    threading.setprofile(None)
    return code, called.functions


def functions_of_a_stop(completed, stopped):
    """Those that only a run calls that is stopped."""
    code, usual = called_in(completed, stops=False)
    assert code == 0
    code, called = called_in(stopped, stops=True)
    assert code == 75
    return sorted(called - usual)


@pytest.mark.slow
def test_a_stop_signal_passes_few_files_until_the_exit_code(runs):
    [functions] = run_ranks(1, functions_of_a_stop, runs.words("run", *FLAGS), runs.words("stopped", *FLAGS))
    path = "\n".join(map(str, functions))
    for part in ("StopSignals._record", "Checkpoints.save_and_wait"):
        assert part in path, path
    assert len({file for file, _ in functions} | ALWAYS) <= MOST_FILES, path
