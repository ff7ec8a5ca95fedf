"""Image files that change between attempts: what is logged, what is rejected, and the bits of the resumed run."""

import gzip
import os
import re
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image

from images import save_images
from ranks import run_ranks
from training import assert_same_state, train_flags
from utils.report.reporter import Reporter
from utils.run.checkpoints import Checkpoints
from utils.settings.errors import UserError

FLAGS = "--dataset imagefolder --num_workers 1 --epochs 2".split()
COUNT, STEPS = 24, 3  # files, and steps per epoch
RESIZED = "The training set has files of another size than in the checkpoint"


def save_jpegs(root: Path) -> list[Path]:
    """The files of the training set in the order of its samples."""
    for split in ("train", "val"):
        save_images(root / split, {"cat": COUNT // 2, "dog": COUNT // 2})
    for path in sorted(root.glob("*/*/*.png")):
        Image.open(path).save(path.with_suffix(".jpg"))
        path.unlink()
    return sorted((root / "train").glob("*/*.jpg"))


def train_and_cut(words: list[str], path: Path, step: int) -> None:
    """Train; after this step rank 0 cuts the file short."""
    plain = Reporter.record_step

    def done(self, samples, indices):
        plain(self, samples, indices)
        if self._state.progress.step == step and os.environ["RANK"] == "0":
            path.write_bytes(path.read_bytes()[:200])

    def save_best(self):
        plain_save_best(self)
        self.finish_writing()  # before the file is read again, and this run fails

    plain_save_best = Checkpoints.save_best
    with mock.patch.object(Reporter, "record_step", done), mock.patch.object(Checkpoints, "save_best", save_best):
        train_flags(words, task="")


def attempt(words: list[str]) -> str:
    """The error with which training is rejected, or its last state."""
    try:
        return train_flags(words, task="")["state"]
    except UserError as error:
        return str(error)


def grow(path: Path) -> None:
    """Give the file another size and the same pixels."""
    path.write_bytes(path.read_bytes() + b"\0" * 10)


@pytest.mark.guarantee("changed-data")
def test_a_file_cut_short_in_mid_run_is_repaired_and_the_run_resumes_with_the_same_bits(runs):
    files = save_jpegs(runs.root / "data")
    runs.train(2, "whole", *FLAGS, task="")
    path = files[3]
    whole = path.read_bytes()
    words = runs.words("run", *FLAGS)
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, train_and_cut, words, path, STEPS)
    pattern = rf"Rank \d failed: {path} \(class cat\) cannot be read as an image \(.*\)\. Replace or delete the file\."
    assert re.search(pattern, str(raised.value)) and re.search(pattern, runs.json("run", "status.json")["error"])
    path.write_bytes(whole + b"\0" * 10)
    assert run_ranks(2, attempt, [*words, "--resume_from", "auto"]) == ["completed"] * 2
    assert_same_state(runs.last("run"), runs.last("whole"))
    line = f"{RESIZED}: 1 of {COUNT} (cat/003.jpg)."
    assert runs.events("run", "resumed")[-1]["changed"] == [line] and f"changed: {line}" in runs.log("run")
    listing = gzip.decompress((runs.folder("run") / "training_files.gz").read_bytes())
    assert f"\0cat/003.jpg {len(whole) + 10}\0".encode() in listing and listing.count(b"\0") == COUNT + 1
    assert b"003.jpg" not in runs.checkpoints("run")[-1].read_bytes()


@pytest.mark.guarantee("changed-data")
@pytest.mark.slow
def test_without_the_list_of_files_a_change_is_logged_without_names(runs):
    """In another run folder, and with decoded images in memory; the list is written again."""
    files = save_jpegs(runs.root / "data")
    words = runs.words("run", *FLAGS)
    assert run_ranks(2, attempt, [*words, "--max_steps", "2"]) == ["completed"] * 2
    grow(files[0])
    other = [*runs.words("other", *FLAGS), "--max_steps", "4", "--resume_from"]
    other[:0] = ["--cache", "ram"]  # extra: cache
    assert run_ranks(2, attempt, [*other, str(runs.checkpoints("run")[-1])]) == ["completed"] * 2
    (line,) = [line for line in runs.events("other", "resumed")[-1]["changed"] if "files" in line]
    assert line == f"{RESIZED}. The run folder has no list of their names."
    grow(files[1])
    assert run_ranks(2, attempt, [*other[:-2], "5", "--resume_from", "auto"]) == ["completed"] * 2
    assert f"{RESIZED}: 1 of {COUNT} (cat/001.jpg)." in runs.events("other", "resumed")[-1]["changed"]


@pytest.mark.guarantee("changed-settings")  # extra: sketches
def test_validation_images_that_are_resized_otherwise_start_a_new_best_value(runs):
    save_jpegs(runs.root / "data")
    runs.train(2, "run", *FLAGS, task="")
    runs.train(2, "run", *FLAGS, "--epochs", 3, "--resize_size", 12, "--resume_from", "auto", task="")
    changed = runs.events("run", "resumed")[0]["changed"]
    assert any(line.startswith("The val set has samples that differ from the checkpoint's: ") for line in changed)
    assert any(line.startswith("The best value so far no longer counts") for line in changed)
