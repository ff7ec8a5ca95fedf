# extra: template
"""The copy of a save goes on while the state stays as it is: in an evaluation, but not when the weights change."""

import copy
import threading
from unittest import mock

import pytest

import train
from config import TrainingConfig
from ranks import run_ranks
from tasks import using
from training import difference
from utils.checkpoint import format as checkpoint
from utils.run import async_snapshot
from utils.run.async_snapshot import AsyncSnapshot
from utils.training.evaluation import Evaluation
from utils.training.parts.weight_average import WeightAverage

# two steps of two ranks an epoch
FLAGS = "--dataset_size 16 --epochs 2 --num_workers 0 --lr 0.02 --keep_last 9".split()


def train_and_hold(words, is_held_for_evaluation, changes):
    """Each copy waits until an evaluation has begun, and then a while for a change of the weights.

    Returns:
        The state when each save began, by step, and for each save whether an evaluation began before the copy ended.
    """
    states, went_on, evaluated, changed = {}, [], threading.Event(), threading.Event()
    plain_begin = AsyncSnapshot.start
    plain_copy = async_snapshot._copy_tensors
    plain_means = Evaluation.evaluate
    plain_swap = WeightAverage._swap_tensors

    def begin(self):
        evaluated.clear()
        changed.clear()
        states[self._state.progress.step] = copy.deepcopy(self._state.state_dict())
        return plain_begin(self)

    def copy_all(pairs):
        if threading.current_thread() is not threading.main_thread():
            went_on.append(is_held_for_evaluation and evaluated.wait(10))
            changed.wait(0.5)
        plain_copy(pairs)

    def means(self, *args):
        evaluated.set()
        return plain_means(self, *args)

    def swap(self):
        plain_swap(self)
        changed.set()

    def after_epoch(training):
        for weight in training.state.model.parameters():
            weight.data.zero_() if changes else None
        changed.set()

    with (
        using("images"),
        mock.patch.object(AsyncSnapshot, "start", begin),
        mock.patch.object(async_snapshot, "_copy_tensors", copy_all),
        mock.patch.object(Evaluation, "evaluate", means),
        mock.patch.object(WeightAverage, "_swap_tensors", swap),
    ):
        train.train(TrainingConfig.from_args(words), after_epoch=after_epoch if changes else None)
    return states, went_on


@pytest.mark.guarantee("resume")
@pytest.mark.parametrize(
    ("flags", "changes"),
    [("", False), ("--ema_decay 0.9", False), ("--ema_decay 0.9 --save_every 0 --save_every_steps 2", True)],
    ids=["evaluation", "average", "after_epoch"],
)
def test_a_copy_goes_on_in_an_evaluation_and_ends_before_the_weights_change(runs, flags, changes):
    ranks = run_ranks(2, train_and_hold, runs.words("run", *FLAGS, *flags.split()), not changes, changes)
    states, _ = ranks[0]
    assert sorted(states) == [2, 4]
    assert all(went_on == [not changes] * 2 for _, went_on in ranks)
    for path in runs.checkpoints("run"):
        saved = checkpoint.read_checkpoint(path)[0]
        before = states[saved["progress"]["step"]]
        assert {key: difference(saved[key], before[key]) for key in before} == {key: [] for key in before}
