"""best.pt is linked when its checkpoint is on the disk; training does not wait for that, and a failure does."""

import os
import time
from concurrent.futures import wait
from unittest import mock

import pytest

from ranks import run_ranks
from tasks import BUCKETS, TASKS, EagerConsensus, image_loss
from training import train_flags
from utils import assembly
from utils.checkpoint.layouts import FileLayout
from utils.checkpoint.writer import CheckpointWriter
from utils.report.reporter import Reporter
from utils.run.checkpoint_files import CheckpointFiles
from utils.run.checkpoints import BestLink, Checkpoints

# 8 steps of two ranks, evaluated after each second one
FLAGS = "--dataset_size 64 --epochs 1 --eval_every_steps 2 --num_workers 0 --lr 0.01 --keep_last 2".split()
BEST = {2: 4.0, 4: 3.0, 6: 5.0, 8: 2.0}  # the loss that each evaluation reports


def train_on_a_slow_disk(words, fails_at):
    """No write ends before the next step is made. Returns the saved steps for which training waited."""
    steps, waited = [0], []
    plain_write, plain_done, plain_link = FileLayout.write, Reporter.record_step, CheckpointFiles.link_best

    def write(self, path, payload, **rest):
        step, ends = payload["progress"]["step"], time.monotonic() + 10
        while step == steps[-1] < 8 and time.monotonic() < ends:
            time.sleep(0.001)
        waited.extend([step] if step == steps[-1] < 8 else [])
        if step == fails_at:
            raise OSError(28, "No space left on device", str(path))
        plain_write(self, path, payload, **rest)

    def done(self, samples, indices):
        plain_done(self, samples, indices)
        steps.append(self._state.progress.step)

    def link(self, step):
        assert (self._checkpoint_folder / f"step_{step:08d}.pt").exists()
        plain_link(self, step)

    def losses(self, split, loader, weights, progress):
        where = {"epoch": progress.epoch_number, "step": progress.step, "split": split, "weights": "model"}
        return [{"kind": "eval", **where, "loss": BEST[progress.step], "top1": 0.5, "count": 4}]

    with (
        mock.patch.object(FileLayout, "write", write),
        mock.patch.object(Reporter, "record_step", done),
        mock.patch.object(CheckpointFiles, "link_best", link),
        mock.patch("utils.training.evaluation.Evaluation.evaluate_all_weights", losses),
    ):
        train_flags([*words, "--best_metric", "loss"])
    return waited


CASES = [(-1, [2, 4, 8], ""), (4, [2, 6, 8], ""), (-1, [4, 8], "--eval_every_steps 4 --save_every_steps 1")]


@pytest.mark.guarantee("keep-last")
@pytest.mark.parametrize(("fails_at", "best", "flags"), CASES)
def test_training_goes_on_while_the_best_checkpoint_is_written(runs, fails_at, best, flags):
    """If the write of step 4 fails, the evaluation after it starts a new best, which is worse. With a save in each
    step, the best checkpoint is not deleted before it is linked."""
    waited = run_ranks(2, train_on_a_slow_disk, runs.words("run", *FLAGS, *flags.split()), fails_at)
    assert waited == [[], []]
    assert [event["step"] for event in runs.events("run", "best")] == best
    checkpoints = runs.folder("run") / "checkpoints"
    assert os.readlink(checkpoints / "best.pt") == "step_00000008.pt"


def train_and_look(words):
    """What best.pt links to after step 7, if the checkpoint of step 4 is on the disk after step 6."""
    link_targets, started, plain_done, plain_start = [], [], Reporter.record_step, CheckpointWriter.start

    def start_writing(self, *args):
        plain_start(self, *args)
        started.append(self._pending_write)

    def done(self, samples, indices):
        plain_done(self, samples, indices)
        if self._state.progress.step == 6:
            wait(started, 10)
        elif self._state.progress.step == 7:
            link_targets.append(os.readlink(self._run.checkpoint_folder / "best.pt"))

    with (
        mock.patch.object(CheckpointWriter, "start", start_writing),
        mock.patch.object(Reporter, "record_step", done),
        mock.patch.object(assembly, "Consensus", EagerConsensus),
    ):
        train_flags(words)
    return link_targets


@pytest.mark.guarantee("keep-last")
def test_best_is_linked_before_the_next_save_or_evaluation(runs):
    words = runs.words("run", *FLAGS, "--eval_every_steps", 4)
    assert run_ranks(1, train_and_look, words) == [["step_00000004.pt"]]


def evaluate_longer_than_the_write(words):
    """Whether best.pt is linked right after the evaluation."""
    was_linked, plain = [], Checkpoints.save_best

    def save_best(self):
        self._wait_for_write()  # the checkpoint that was begun before the evaluation is on the disk, and reported
        plain(self)
        was_linked.append(self._best_link is BestLink.LINKED)

    with mock.patch.object(Checkpoints, "save_best", save_best):
        train_flags(words)
    return was_linked


@pytest.mark.guarantee("keep-last")
def test_best_is_linked_after_an_evaluation_that_takes_longer_than_the_write(runs):
    words = runs.words("run", "--dataset_size", 64, "--epochs", 1, "--num_workers", 0)
    assert run_ranks(1, evaluate_longer_than_the_write, words) == [[True]]


def fail_while_writing(words):
    plain_write, plain_done = FileLayout.write, Reporter.record_step

    def write(*args, **rest):
        time.sleep(1.0)
        plain_write(*args, **rest)

    def done(self, samples, indices):
        plain_done(self, samples, indices)
        if self._state.progress.step == 3:
            raise ZeroDivisionError

    with mock.patch.object(FileLayout, "write", write), mock.patch.object(Reporter, "record_step", done):
        try:
            train_flags(words)
        except ZeroDivisionError:
            return "failed"


def test_a_failure_does_not_cost_the_checkpoint_that_is_being_written(runs):
    assert run_ranks(1, fail_while_writing, runs.words("run", *FLAGS, "--save_every_steps", 2)) == ["failed"]
    assert runs.last("run")["progress"]["step"] == 2


def slashed(net, batch):
    metrics = image_loss(net, batch)
    return {"loss": metrics["loss"], "rewards/accuracy": metrics["top1"]}


def train_slashed(words):
    with mock.patch.dict(TASKS["images"], {"compute_loss": slashed}):
        return train_flags(words)


def test_a_metric_with_a_slash_in_its_name_selects_the_best_checkpoint(runs):
    flags = "--dataset_size 40 --epochs 3 --lr 0.02 --no-use_amp --num_workers 0 --best_metric".split()
    runs.train(2, "plain", *flags, "max:top1")
    run_ranks(2, train_slashed, runs.words("slashed", *BUCKETS, *flags, "max:rewards/accuracy"))
    plain, actual = (runs.json(name, "summary.json") for name in ("plain", "slashed"))
    assert actual["best_metric"] == "rewards/accuracy"
    assert (actual["best_value"], actual["best_epoch"]) == (plain["best_value"], plain["best_epoch"])
    assert [record["rewards/accuracy"] for record in runs.records("slashed", "eval")] == [
        record["top1"] for record in runs.records("plain", "eval")
    ]
