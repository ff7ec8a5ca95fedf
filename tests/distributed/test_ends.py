"""What ends a run as completed, and what a second run in the same process finds."""

import torch

import train
from ranks import run_ranks
from tasks import config_of, using
from training import TINY


def test_max_steps_ends_a_run_as_completed_and_more_steps_continue_it(runs):
    flags = "--dataset_size 80 --epochs 9 --max_steps".split()
    outcome = runs.train(2, "steps", *flags, 13)[0]
    assert (outcome["state"], outcome["steps"]) == ("completed", 13)
    assert runs.records("steps", "eval")[-1]["step"] == 13 and runs.records("steps", "train")[-1]["lr"] < 0.01
    progress = runs.last("steps")["progress"]  # for a run that continues here: it knows the evaluation, which stays
    assert (progress["step"], progress["evaluated_step"]) == (13, 13)
    assert progress["best_value"] == max(each["top1"] for each in runs.records("steps", "eval"))
    last = runs.checkpoints("steps")[-1]
    runs.train(2, "steps", *flags, 13, "--resume_from", last)  # nothing is left to do
    assert [record["step"] for record in runs.records("steps", "eval")] == [10, 13]
    runs.train(2, "steps", *flags, 15, "--lr", 1e-9, "--resume_from", last)
    assert [record["step"] for record in runs.records("steps", "eval")] == [10, 13, 15]
    assert runs.json("steps", "summary.json")["best_value"] == max(r["top1"] for r in runs.records("steps", "eval"))


def test_patience_ends_a_run_as_completed_and_saves_it(runs):
    outcome = runs.train(2, "run", *"--dataset_size 16 --epochs 9 --lr 1e-9 --patience 2 --save_every 0".split())[0]
    assert runs.last("run")["progress"]["step"] == outcome["steps"] == 6  # saved, though no save was due
    assert (outcome["state"], outcome["epochs"]) == ("completed", 3)
    assert "patience ends the run: no better value in 2 evaluations" in runs.log("run")


def train_twice(folder):
    flags = [*TINY, "--dataset_size", "16", "--epochs", "1", "--run_dir"]
    with using("images"):
        return [train.train(config_of([*flags, str(folder / name)]))["state"] for name in "ab"]


def test_two_runs_in_one_process_are_the_same_run(runs):
    """As in a notebook."""
    assert run_ranks(1, train_twice, runs.root) == [["completed"] * 2]
    a, b = (runs.last(name)["model"] for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
