"""A completed run goes on if what has ended it is changed: its epochs, its steps or its patience."""

import logging
import shutil
from unittest import mock

import pytest

from ranks import run_ranks
from training import train_flags

# three steps are an epoch; the loss falls, so with max:loss the first evaluation is the best
FLAGS = "--dataset_size 24 --epochs 4 --global_batch_size 8 --no-use_amp --lr 0.02 --best_metric max:loss".split()
FLAGS += ["--schedule", "constant", "--num_workers", "0"]
NOTHING_LEFT = "Nothing is left to train. To train longer, increase --epochs or --max_steps."
PATIENCE_OVER = "The run ends, since {} evaluations had no improvement. To train longer, increase --patience."
COMPLETED = "is already completed. To train longer, increase --epochs, --max_steps or --patience."
PATIENCE_1 = ["--patience", "1"]
EACH_STEP = ["--eval_every_steps", "1"]
CASES = {  # what ends the run, its steps, and for each resume: its flags, the steps it ends with, what it says
    "patience": (
        *(PATIENCE_1, 6),
        [
            (PATIENCE_1, 6, COMPLETED),
            (["--patience", "2"], 9, PATIENCE_OVER.format(2)),
            (["--patience", "8"], 12, ""),
            ([], 12, ""),
            ([*PATIENCE_1, "--epochs", "3", "--best_metric", "min:loss"], 9, ""),
            ([*PATIENCE_1, "--epochs", "6"], 6, PATIENCE_OVER.format(1)),
            (["--epochs", "5"], 15, ""),
            (["--max_steps", "8"], 8, ""),
        ],
    ),
    "patience within an epoch": (
        *([*PATIENCE_1, *EACH_STEP], 2),
        [
            ([*PATIENCE_1, *EACH_STEP], 2, COMPLETED),
            (["--patience", "3", *EACH_STEP], 4, PATIENCE_OVER.format(3)),
            (EACH_STEP, 12, ""),
        ],
    ),
    "patience at the last epoch": (
        *(["--patience", "3"], 12),
        [
            (["--patience", "3"], 12, COMPLETED),
            (["--patience", "9"], 12, NOTHING_LEFT),
            (["--patience", "9", "--epochs", "5"], 15, ""),
        ],
    ),
    "epochs": (
        *(["--epochs", "2"], 6),
        [
            (["--epochs", "2"], 6, COMPLETED),
            (["--epochs", "2", "--patience", "1"], 6, COMPLETED),
            (["--epochs", "2", "--best_metric", "min:loss"], 6, COMPLETED),
            (["--epochs", "3"], 9, ""),
        ],
    ),
    "steps": (
        *(["--max_steps", "5"], 5),
        [
            (["--max_steps", "5"], 5, COMPLETED),
            (["--max_steps", "5", "--patience", "5"], 5, COMPLETED),
            (["--max_steps", "7"], 7, ""),
        ],
    ),
}
ENDS = (NOTHING_LEFT, "evaluations had no improvement", "is already completed")


def train_and_continue(first, folder, continuations):
    """Train, and continue copies of the run. Returns what each continuation has said."""
    train_flags(first)
    logged = []
    for number, words in enumerate(continuations):
        shutil.copytree(folder, folder.with_name(f"copy{number}"), symlinks=True)
        with mock.patch.object(logging.Logger, "handle") as handle:
            train_flags(words)
        lines = [call.args[0].getMessage() for call in handle.call_args_list]
        logged.append([line for line in lines if any(text in line for text in ENDS)])
    return logged


@pytest.mark.parametrize("ended_by", CASES)
def test_a_completed_run_goes_on_if_what_has_ended_it_changes(runs, ended_by):
    flags, steps, resumes = CASES[ended_by]
    words = [
        runs.words(f"copy{number}", *FLAGS, *more, "--resume_from", "auto") for number, (more, *_) in enumerate(resumes)
    ]
    logged = run_ranks(1, train_and_continue, runs.words("run", *FLAGS, *flags), runs.folder("run"), words)[0]
    assert runs.json("run", "summary.json")["steps"] == steps
    for number, (more, last, line) in enumerate(resumes):
        summary = runs.json(f"copy{number}", "summary.json")
        assert (summary["state"], summary["steps"]) == ("completed", last), more
        assert len(logged[number]) == bool(line) and all(text.endswith(line) for text in logged[number]), (more, logged)


@pytest.mark.guarantee("schedule-end")
def test_a_run_that_goes_on_after_patience_has_the_bits_of_one_without(runs):
    flags = [*FLAGS, "--save_every", "0", *EACH_STEP]
    runs.train(2, "whole", *flags)
    runs.train(2, "run", *flags, *PATIENCE_1)
    runs.train(2, "run", *flags, "--resume_from", "auto")
    runs.assert_same("whole", "run")
