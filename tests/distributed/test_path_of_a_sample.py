# extra: template
"""The functions that a sample passes from the plan to the logged loss: who looks for a wrong loss reads them all."""

import sys
from pathlib import Path
from unittest import mock

import train
from ranks import ROOT, run_ranks
from training import train_flags
from utils.data.sampler import MicroBatch
from utils.metrics import MetricTracker
from utils.report.records import LogPoint
from utils.training.log_window import PendingRead

MOST_FUNCTIONS, MOST_FILES = 28, 11  # with the two moments at which parts see its metrics
CARRIERS = (MicroBatch, MetricTracker, PendingRead, LogPoint)
FORKS = ("model.py", "dataset.py", "tests", ".venv")  # not ours


class PathOfASample:
    """For sys.setprofile: our functions that get, hold or return a micro-batch, its metrics, a sum of them or the train
    record, until that is written."""

    def __init__(self):
        self.functions = []

    def __call__(self, frame, event, result):
        code = frame.f_code
        file, name = Path(code.co_filename), f"{code.co_filename}:{code.co_qualname}"
        if code.co_qualname == "RunRecords.append" and frame.f_locals["kind"] == "train":
            sys.setprofile(None)
        if event != "return" or name in self.functions or not file.is_relative_to(ROOT) or "<" in code.co_name:
            return
        if file.relative_to(ROOT).parts[0] not in FORKS and any(map(carries, [result, *frame.f_locals.values()])):
            self.functions.append(name)


def carries(value):
    parts = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(part, CARRIERS) or (isinstance(part, dict) and "loss" in part) for part in parts[:4])


def functions_of_an_epoch(flags):
    """In the second epoch."""
    path, plain = PathOfASample(), train.train_one_epoch

    def train_one_epoch(training):
        sys.setprofile(path if training.state.progress.epoch == 1 else None)
        plain(training)
        sys.setprofile(None)

    with mock.patch.object(train, "train_one_epoch", train_one_epoch):
        train_flags(flags)
    return [name.removeprefix(f"{ROOT}/") for name in path.functions]


def test_a_sample_passes_few_functions_from_the_plan_to_the_logged_loss(runs):
    flags = "--dataset_size 32 --epochs 3 --log_interval 1 --num_workers 0 --save_every 0".split()
    for functions in run_ranks(2, functions_of_an_epoch, runs.words("run", *flags)):
        files, path = {name.partition(":")[0] for name in functions}, "\n".join(functions)
        # some that must be there, else it is not the whole path
        for part in (
            "GlobalBatchSampler.micro_batches",
            "train.py:compute_gradient",
            "StepSums",
            "LogPoint.create_record",
        ):
            assert part in path, path
        assert len(functions) <= MOST_FUNCTIONS and len(files) <= MOST_FILES, path
