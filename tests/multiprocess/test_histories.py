"""Histories of a run that must not show in its end: a move to another folder, patience that was over, a restart in start-up."""

import os
from unittest import mock

import pytest
import torch

import train
from config import Refused
from ranks import run_ranks
from tasks import config_of, train_task, using
from training import TINY, difference
from utils import checkpoint
from utils.report import Reporter
from utils.run_folder import Run

# the loss falls, so that by its highest value the first epoch is the best
FLAGS = [*TINY, "--dataset_size", "60", "--epochs", "4", "--no-use_amp", "--lr", "0.02", "--best_metric", "max:loss", "--keep_last", "99"]


def best_of(runs, name):
    payload = checkpoint.read(runs.folder(name) / "checkpoints" / "best.pt")[0]
    return payload["progress"]["step"], payload["model"]


def test_a_run_that_goes_on_in_another_folder_has_a_checkpoint_and_its_best_there_from_the_start(runs):
    run_ranks(2, train_task, "images", [*FLAGS, "--run_dir", runs.folder("whole")])
    start = runs.checkpoints("whole")[1]
    run_ranks(2, train_task, "images", [*FLAGS, "--run_dir", runs.folder("moved"), "--resume_from", start])
    step, model = best_of(runs, "whole")
    assert (step, 8) == (8, best_of(runs, "moved")[0]) and difference(model, best_of(runs, "moved")[1]) == []
    events = [(record["event"], record["step"]) for record in runs.records("moved", "event")]
    assert events[:2] == [("resumed", 16), ("checkpoint", 16)]
    assert difference(runs.last("whole")["model"], runs.last("moved")["model"]) == []
    for name in ("best_value", "best_epoch", "steps"):
        assert runs.json("moved", "summary.json")[name] == runs.json("whole", "summary.json")[name]


def resume_without_room_for_the_best(flags):
    """On rank 0 alone; what this rank ended with."""
    full = OSError(28, "No space left on device")
    with using("images"), mock.patch.object(Run, "restore_best", side_effect=full), pytest.raises(Refused) as refused:
        train.train(config_of([*map(str, flags)]))
    return str(refused.value)


def test_a_best_checkpoint_that_cannot_be_taken_along_ends_all_ranks(runs):
    run_ranks(2, train_task, "images", [*FLAGS, "--epochs", 1, "--run_dir", runs.folder("run")])
    flags = [*FLAGS, "--epochs", 2, "--run_dir", runs.folder("moved"), "--resume_from", runs.checkpoints("run")[0]]
    said = run_ranks(2, resume_without_room_for_the_best, flags, deadline=40)
    assert said[0] == said[1] and "No space left on device; mend that and start again" in said[0]


def end_before_the_summary(flags):
    """What a kill directly before the summary leaves."""
    with using("images"), mock.patch.object(Reporter, "finish", lambda *_: os._exit(0)):
        train.train(config_of([*map(str, flags)]))


def test_patience_that_was_over_stays_over(runs):
    flags = [*FLAGS, "--patience", "1", "--save_every", "0", "--run_dir", runs.folder("run")]
    with pytest.raises(FileNotFoundError):  # the ranks left without a result
        run_ranks(2, end_before_the_summary, flags)
    assert runs.json("run", "status.json")["state"] == "running"
    run_ranks(2, train_task, "images", [*flags, "--resume_from", "auto"])
    assert runs.json("run", "summary.json")["steps"] == 16 and runs.json("run", "status.json")["state"] == "completed"
    assert [record["step"] for record in runs.records("run", "eval")] == [8, 16]


def two_attempts_of_one_launch(flags):
    """The first one fails before it trains; what the second one was told."""
    os.environ |= {"LAUNCH_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RUN_ID": "job"}
    config = config_of([*map(str, flags)])
    with using("images"):
        with mock.patch.object(train, "warm_up", side_effect=RuntimeError("out of memory, say")), pytest.raises(RuntimeError):
            train.train(config)
        return train.train(config)


def test_a_restart_of_a_launch_that_failed_in_start_up_starts_where_it_was_told_to(runs):
    run_ranks(1, train_task, "images", [*FLAGS, "--epochs", 2, "--run_dir", runs.folder("run")])
    start = runs.checkpoints("run")[0]
    run_ranks(1, two_attempts_of_one_launch, [*FLAGS, "--epochs", 2, "--run_dir", runs.folder("run"), "--resume_from", start])
    resumed = [record["step"] for record in runs.records("run", "event") if record["event"] == "resumed"]
    assert resumed == [15] and runs.last("run")["progress"]["step"] == 30


def test_what_decides_over_bits_and_is_changed_is_said(runs):
    flags = [*FLAGS, "--epochs", "1", "--run_dir", runs.folder("run")]
    run_ranks(2, train_task, "images", flags, torch.float32, [3], False, False)
    run_ranks(2, train_task, "images", [*flags, "--resume_from", "auto", "--bucket_cap_mb", "0.004"])
    event = next(record for record in runs.records("run", "event") if record["event"] == "resumed")
    assert event["changed"] == ["bucket_cap_mb=0.004: the checkpoint has bucket_cap_mb=0.002"]
