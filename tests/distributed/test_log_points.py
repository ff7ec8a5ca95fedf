# extra: template
"""The values of a log point are read some steps later: the records are those of a run that reads at once."""

import json
from unittest import mock

import pytest

from ranks import run_ranks
from training import TIMES, train_flags
from utils.report.reporter import Reporter
from utils.run.async_snapshot import AsyncSnapshot
from utils.training.state import TrainState

# 13 steps of two ranks in each epoch; the gradients of steps 6 and 7 are not finite
FLAGS = "--dataset_size 104 --epochs 2 --num_workers 1".split()
FLAGS += ["--ema_decay", "0.9"]
CASES = [  # flags, and the step at which each log point is read: STEPS_BEFORE_READ is 4
    ("--log_interval 6", {6: 10, 12: 13, 18: 22, 24: 26, 26: 26}),
    ("--log_interval 3 --save_every_steps 4 --eval_every_steps 5", {3: 4, 6: 8, 9: 10, 12: 12, 15: 15, 18: 20, 21: 24}),
    ("--log_interval 6 --save_every 0", {6: 10, 12: 13, 18: 22, 24: 26}),  # no save before the evaluation
    ("--log_interval 1 --use_amp --amp_dtype fp16 --lr 0.0001", {1: 2, 7: 8, 12: 13, 13: 13}),
]


def train_and_watch(words, is_at_once):
    """Where each log point was read, and where each checkpoint began: (step, last step of the train records)."""
    read, saved, recorded = {}, [], [0]
    plain_catch_up, plain_log, plain_begin = Reporter.finish_log_point, Reporter.begin_log_point, AsyncSnapshot.start
    plain_backward = TrainState.backward

    def catch_up(self):
        if self._pending_log_point:
            recorded.append(self._pending_log_point.position["step"])
            read[self._pending_log_point.position["step"]] = self._state.progress.step
        plain_catch_up(self)

    def log(self):
        plain_log(self)
        if is_at_once:
            self.finish_log_point()

    def begin(self):
        saved.append((self._state.progress.step, recorded[-1]))
        return plain_begin(self)

    def backward(self, loss, is_padding):
        plain_backward(self, loss * float("nan") if self.progress.step in (5, 6) else loss, is_padding)

    with (
        mock.patch.multiple(Reporter, finish_log_point=catch_up, begin_log_point=log),
        mock.patch.object(AsyncSnapshot, "start", begin),
        mock.patch.object(TrainState, "backward", backward),
    ):
        train_flags(words)
    return read, saved


def lines(runs, name):
    """All records in order, without times, and what depends on them: when a file is complete, which rank is slow."""
    summary = runs.json(name, "summary.json")
    assert summary["skipped_steps"] + summary["overflow_steps"] >= 2
    text = (runs.folder(name) / "metrics.jsonl").read_text()
    of_times = ("checkpoint", "best", "straggler")
    kept = [record for record in map(json.loads, text.splitlines()) if record.get("event") not in of_times]
    return [record | dict.fromkeys((*TIMES, "path")) for record in kept]


@pytest.mark.guarantee("files")
@pytest.mark.parametrize(("flags", "expected"), CASES)
def test_records_read_later_are_those_read_at_once_and_precede_their_checkpoints(runs, flags, expected):
    results = {}
    for name in ("later", "at-once"):
        words = runs.words(name, *FLAGS, *flags.split())
        results[name] = run_ranks(2, train_and_watch, words, name == "at-once")
    assert lines(runs, "later") == lines(runs, "at-once")
    every = int(flags.split()[1])
    for read, saved in results["later"]:  # on both ranks
        assert read | expected == read and all(after - point <= 4 for point, after in read.items())
        assert saved and all(recorded == step // every * every or step == 26 for step, recorded in saved)
    for read, _ in results["at-once"]:
        assert all(point == after for point, after in read.items())
