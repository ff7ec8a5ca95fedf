"""A process that calls train() again, such as a notebook: an exception releases everything that a start has taken."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from pprint import pformat
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import dataloader

import train
import utils.distributed.device
import utils.report.reporter
from config import TrainingConfig
from ranks import run_ranks, slow
from tasks import Images, using
from training import STATE, TINY, difference
from utils import assembly
from utils.checkpoint import format as checkpoint
from utils.checkpoint.layouts import FileLayout
from utils.report.reporter import Reporter
from utils.report.tensorboard import TensorBoardWriter
from utils.report.validation import Validation
from utils.run import evaluate_only, start, start_decision
from utils.run.run_lock import RunLock
from utils.run.run_status import RunStatus
from utils.settings.errors import UserError
from utils.training.evaluation import Evaluation
from utils.training.state import TrainState

FLAGS = "--dataset_size 24 --num_workers 1 --epochs 2 --save_every_steps 2"
SECONDS_TO_SETTLE = 5.0  # for the kernel to show that a thread or a process has ended
BUG, INTERRUPT, REFUSED = RuntimeError("a bug of the fork"), KeyboardInterrupt(), UserError("refused")
READ = Images.__getitems__


def failing_after(calls, function, error):
    """The function, which raises the error when it is called once more than so many times."""
    left = [calls]

    @functools.wraps(function)
    def wrapper(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return function(*args, **options)

    return wrapper


@contextlib.contextmanager
def patch(place, name, error, calls=0):
    with mock.patch.object(place, name, failing_after(calls, getattr(place, name), error)):
        yield


def read_broken(self, indices):
    if torch.utils.data.get_worker_info():
        raise ValueError("a sample is broken")
    return READ(self, indices)


def read_forever(self, indices):
    if torch.utils.data.get_worker_info():
        time.sleep(600)
    return READ(self, indices)


@contextlib.contextmanager
def interrupted_while_a_worker_hangs():
    waiting = dataloader._MultiProcessingDataLoaderIter
    with mock.patch.object(Images, "__getitems__", read_forever), patch(waiting, "_next_data", INTERRUPT):
        yield


# what fails, in the order of a run
STAGES = {
    "machine": patch(utils.distributed.device, "choose_device", REFUSED),
    "groups": patch(dist, "new_group", BUG),
    "paths": patch(train, "broadcast_json", BUG),
    "ranks differ": patch(start, "check_ranks_equal", REFUSED),
    "folder in use": mock.patch.object(RunLock, "_take_file_lock", lambda self: False),
    "lock is written": patch(RunLock, "write", OSError(28, "No space left on device")),
    "folder refused": patch(start_decision, "_remove_temporary_files", REFUSED),
    "after the lock": patch(start_decision, "_remove_temporary_files", BUG),
    "folder not shared": patch(start, "check_shared_storage", REFUSED),
    "logger": patch(start, "setup_logger", BUG),
    "first status": patch(RunStatus, "mark_running", OSError(5, "Input/output error")),
    "data": patch(train.your_data, "create_dataset", ValueError("no data")),
    "model": patch(train.your_model, "create_model", BUG),
    "second loader": patch(assembly, "create_evaluation_dataloader", REFUSED),
    "first passes": patch(train.your_model, "compute_loss", BUG),
    "resume": patch(assembly, "resume_run", REFUSED),
    "begin": patch(Reporter, "start", BUG),
    "epoch": patch(train, "train_one_epoch", BUG),
    "sample in a worker": mock.patch.object(Images, "__getitems__", read_broken),
    "worker hangs": interrupted_while_a_worker_hangs(),
    "step": patch(train, "compute_gradient", BUG, calls=4),
    "interrupted step": patch(train, "compute_gradient", INTERRUPT, calls=4),
    "exit in a step": patch(train, "compute_gradient", SystemExit(3), calls=4),
    "evaluation": patch(Validation, "validate", BUG),
    "state refused": patch(TrainState, "state_dict", REFUSED, calls=2),
    "write": patch(FileLayout, "write", BUG, calls=1),
    "end": patch(Reporter, "finish", BUG),
    "clean-up": patch(train, "cleanup_distributed", BUG),
}


def held():
    """What this process holds of the system."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            files.append(os.readlink(f"/proc/self/fd/{number}").partition(":[")[0])
    others = signal.valid_signals() - {signal.SIGCHLD}  # whose handler torch sets once for all loaders
    return {
        "files": Counter(files),
        "threads": len(os.listdir("/proc/self/task")),
        "names of threads": sorted(thread.name for thread in threading.enumerate()),
        "children": len(multiprocessing.active_children()),
        "handlers": {number: signal.getsignal(number) for number in others},
        "wakeup": signal.set_wakeup_fd(-1),
        "group": dist.is_initialized(),
        "locks": len(RunLock.held_locks),
    }


def kept(before):
    """What the process holds otherwise than before, also after some seconds."""
    ends = time.monotonic() + SECONDS_TO_SETTLE
    while (now := held()) != before and time.monotonic() < ends:
        time.sleep(0.05)
    return {name: (before[name], now[name]) for name in before if now[name] != before[name]}


def begin(folder, name, *flags):
    words = [*TINY, *FLAGS.split(), "--run_dir", f"{folder}/{name}", "--data_dir", f"{folder}/data", *flags]
    return train.train(TrainingConfig.from_args(words))


def fail(folder, name, failure, *flags):
    """The exception stays, with its frames, as in an interactive shell."""
    with failure:
        try:
            begin(folder, name, *flags)
        except BaseException as error:
            sys.last_exc = error
            return
    raise AssertionError("did not fail")


def last(folder, name):
    payload = checkpoint.read_checkpoint(checkpoint.list_step_checkpoints(Path(folder, name, "checkpoints"))[-1])[0]
    return {key: payload[key] for key in STATE}


def as_in_a_notebook():
    """No launcher, and with TensorBoard."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    utils.report.reporter.TensorBoardWriter = TensorBoardWriter


def fail_and_train(folder, stages, *flags):
    """Fail in each stage, and train after it in this process.

    Returns, by stage, what is kept, and where the bits are not those of a run.
    """
    if os.environ["WORLD_SIZE"] == "1":
        as_in_a_notebook()
    wrong = {}
    with using("images"):
        begin(folder, "whole", *flags)
        before = held()
        for stage in stages:
            fail(folder, stage, STAGES[stage], *flags)
            wrong[stage, "after the failure"] = kept(before)
            begin(folder, stage, *flags, "--resume_from", "auto")
            wrong[stage, "after the next run"] = kept(before)
            wrong[stage, "bits"] = difference(last(folder, stage), last(folder, "whole"))
    return {name: value for name, value in wrong.items() if value}


@pytest.mark.guarantee("living-process")
@pytest.mark.parametrize("part", range(4))
def test_an_exception_releases_all_that_a_start_has_taken(tmp_path, part):
    [wrong] = run_ranks(1, fail_and_train, str(tmp_path), [*STAGES][part::4])
    assert not wrong, pformat(wrong)


@pytest.mark.guarantee("living-process")
def test_ranks_that_fail_together_release_all(tmp_path):
    stages = ["machine", "folder refused", "data", "model", "step", "state refused"]
    for wrong in run_ranks(2, fail_and_train, str(tmp_path), stages):
        assert not wrong, pformat(wrong)


def test_a_profiled_run_that_fails_leaves_no_profiler(tmp_path):
    [wrong] = run_ranks(1, fail_and_train, str(tmp_path), ["step"], "--enable_profiling")
    assert not wrong, pformat(wrong)


def fail_again_and_again(folder, *flags):
    """What six failures hold, one after the other."""
    as_in_a_notebook()
    counts = []
    with using("images"):
        for _ in range(6):
            fail(folder, "run", patch(train, "compute_gradient", BUG, calls=2), *flags, "--overwrite")
            time.sleep(0.2)
            counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts


@pytest.mark.guarantee("living-process")
@pytest.mark.parametrize(
    "flags",
    [
        slow(""),
        "--reduction exact",  # extra: exact
        slow("--sharding zero3"),  # extra: sharding
        slow("--ema_decay 0.9"),
    ],
)
def test_failures_in_a_row_hold_no_more_than_one(tmp_path, flags):
    [counts] = run_ranks(1, fail_again_and_again, str(tmp_path), *flags.split())
    assert max(counts[2:]) <= max(counts[:2]), counts


def fail_in_an_evaluation(folder):
    as_in_a_notebook()
    with using("images"):
        begin(folder, "run")
        outcome = begin(folder, "run", "--eval_only")
        before = held()
        for failure in (
            patch(evaluate_only, "create_train_state", BUG),
            patch(Evaluation, "evaluate_all_weights", BUG),
        ):
            fail(folder, "run", failure, "--eval_only")
            assert not (wrong := kept(before)), pformat(wrong)
        assert begin(folder, "run", "--eval_only") == outcome


def test_an_evaluation_that_fails_releases_all(tmp_path):
    run_ranks(1, fail_in_an_evaluation, str(tmp_path))
