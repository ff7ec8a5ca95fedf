"""Histories of a run that must not show in its end: a move to another folder, patience that was over."""

import os
from unittest import mock

import pytest

from config import UserError
from ranks import run_ranks
from tasks import train_task
from training import difference
from utils.checkpoint import format as checkpoint
from utils.report.reporter import Reporter
from utils.run.folder import Run

# the loss falls, so that by its highest value the first epoch is the best
FLAGS = "--dataset_size 60 --epochs 4 --global_batch_size 8 --no-use_amp --lr 0.02 --best_metric max:loss --keep_last 99".split()


def test_a_run_that_is_resumed_in_another_folder_has_a_checkpoint_and_its_best_there_from_the_start(runs):
    runs.train(1, "whole", *FLAGS)
    runs.train(1, "moved", *FLAGS, "--resume_from", runs.checkpoints("whole")[1])
    best, moved = (checkpoint.read(runs.folder(name) / "checkpoints" / "best.pt")[0] for name in ("whole", "moved"))
    assert best["progress"]["step"] == moved["progress"]["step"] == 8
    assert difference(best["model"], moved["model"]) == []
    events = [(record["event"], record["step"]) for record in runs.records("moved", "event")]
    assert events[:2] == [("resumed", 16), ("checkpoint", 16)]
    assert difference(runs.last("whole")["model"], runs.last("moved")["model"]) == []
    for name in ("best_value", "best_epoch", "steps"):
        assert runs.json("moved", "summary.json")[name] == runs.json("whole", "summary.json")[name]


def resume_without_room_for_the_best(flags):
    """On rank 0 alone; what this rank ended with."""
    full = OSError(28, "No space left on device")
    with mock.patch.object(Run, "restore_best", side_effect=full), pytest.raises(UserError) as error:
        train_task("images", flags)
    return str(error.value)


def test_a_best_checkpoint_that_cannot_be_taken_along_ends_all_ranks(runs):
    runs.train(1, "run", *FLAGS, "--epochs", 1)
    words = runs.words("moved", *FLAGS, "--epochs", 2, "--resume_from", runs.checkpoints("run")[0])
    texts = run_ranks(2, resume_without_room_for_the_best, words, deadline=40)
    assert texts == ["[Errno 28] No space left on device; fix that and start again"] * 2


def end_before_the_summary(flags):
    """What a kill directly before the summary leaves."""
    with mock.patch.object(Reporter, "finish", lambda *_: os._exit(0)):
        train_task("images", flags)


def test_patience_that_was_over_stays_over(runs):
    flags = [*FLAGS, "--patience", "1", "--save_every", "0"]
    with pytest.raises(FileNotFoundError):  # the ranks left without a result
        run_ranks(2, end_before_the_summary, runs.words("run", *flags))
    assert runs.json("run", "status.json")["state"] == "running"
    runs.train(2, "run", *flags, "--resume_from", "auto")
    assert runs.json("run", "summary.json")["steps"] == 16 and runs.json("run", "status.json")["state"] == "completed"
    assert [record["step"] for record in runs.records("run", "eval")] == [8, 16]


def test_a_changed_setting_that_changes_bits_is_recorded(runs):
    runs.train_with_stops(1, "run", *FLAGS, stops=(3,), goes_on=False)
    more = "--resume_from auto --bucket_cap_mb 0.004 --epochs 1".split()
    runs.train_with_stops(1, "run", *FLAGS, *more, stops=())
    changed = runs.events("run", "resumed")[0]["changed"]
    assert "bucket_cap_mb=0.004: the checkpoint has bucket_cap_mb=0.002" in changed
