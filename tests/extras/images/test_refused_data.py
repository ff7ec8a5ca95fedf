"""Unusable image folders and models: one sentence with the fix, on every rank."""

import re

import pytest

from images import folder_of_images
from ranks import run_ranks
from training import train_flags
from utils.settings.errors import UserError


def no_images(root):
    for path in (root / "train/dog").iterdir():
        path.unlink()


CASES = [
    (None, "--num_classes 2", "--num_classes must be at least 3, the number of classes in the data, got 2. Give"),
    (None, "--sync_bn", "SyncBatchNorm works on CUDA only. Leave out"),
    (None, "--best_metric f1", r"--best_metric must be a metric that evaluations report \("),
    (None, "--init_from /nowhere", "--init_from /nowhere cannot be read"),
    (None, "--data_dir /typo", r"--data_dir /typo .*\. Give the folder that holds train/"),
    (no_images, "", "train/dog has no images"),
]


def rejections(starts):
    """The error of each start, in one process."""
    errors = []
    for words in starts:
        with pytest.raises(UserError) as error:
            train_flags(words, task="")
        errors.append(str(error.value))
    return errors


@pytest.mark.guarantee("one-sentence")
def test_data_that_cannot_be_used_is_rejected_by_all_ranks_with_the_fix(runs):
    starts = []
    for number, (spoil, flags, _) in enumerate(CASES):
        words = folder_of_images(runs.root / f"images{number}", ("cat", "dog", "eel"))
        if spoil:
            spoil(runs.root / f"images{number}")
        starts.append(runs.words(f"run{number}", *words, "--epochs", 1, *flags.split()))
    ranks = run_ranks(2, rejections, starts)
    for number, (_, _, expected) in enumerate(CASES):
        assert all(re.search(expected, errors[number]) for errors in ranks), (ranks[0][number], ranks[1][number])
        status = runs.json(f"run{number}", "status.json")
        assert (
            status["state"] == "failed"
            and re.search(expected, status["error"])
            and not runs.checkpoints(f"run{number}")
        )


@pytest.mark.guarantee("bad-sample")
def test_a_corrupt_image_ends_the_run_with_its_path_class_and_rank(runs):
    """Image 5 of 12 is in the second micro-batch of the evaluation, which rank 1 reads and rank 0 does not."""
    words = folder_of_images(runs.root / "images")
    (runs.root / "images/val/cat/below").mkdir()
    path = (runs.root / "images/val/cat/001.png").rename(runs.root / "images/val/cat/below/001.png")
    path.write_bytes(path.read_bytes()[:60])
    expected = rf"Rank 1 failed: {path} \(class cat\) cannot be read as an image \(.*\)\. "
    with pytest.raises(AssertionError, match=expected + "Replace or delete the file"):
        runs.train(2, "run", *words, "--epochs", 1, task="")
    status = runs.json("run", "status.json")
    assert status["rank"] == 1 and re.search(expected, status["error"]) and status["host"], str(status)
