"""Which folders and files of a data_dir are splits, classes and images, and the messages about others."""

import logging
import re
import shutil
from collections import Counter

import pytest

from config import TrainingConfig
from dataset import create_dataset
from images import save_images
from utils.extras.images.files import list_image_folder
from utils.settings.errors import UserError


def folder_config(path, **changes):
    return TrainingConfig(data_dir=str(path), **({"dataset": "imagefolder"} | changes))


@pytest.mark.guarantee("splits")
@pytest.mark.parametrize("name", [".ipynb_checkpoints", "@eaDir", "__MACOSX", "lost+found", ".thumbs", "#recycle"])
@pytest.mark.parametrize("place", ["train", "val", "train/cat", "val/dog", "train/cat/below"])
def test_folders_of_tools_and_hidden_files_are_no_classes_and_no_samples(tmp_path, name, place):
    """data_dir's own path may have such names."""
    root = tmp_path / ".hidden" / "@eaDir"
    for split in ("train", "val"):
        save_images(root / split, {"cat": 2, "dog": 2})
        shutil.copytree(root / split / "cat", root / split / "cat/below")
    save_images(root / place / name, {"a": 1})
    shutil.copy(root / "train/cat/000.png", root / place / "._000.png")
    sets = [create_dataset(folder_config(root), split) for split in ("train", "val")]
    assert [(len(data), data.classes) for data in sets] == [(6, ["cat", "dog"])] * 2
    assert sum((data.left_out for data in sets), Counter()) == {"hidden or of tools": 2}


@pytest.mark.guarantee("splits")
@pytest.mark.parametrize(
    "name", ["valid", "validation", "eval", "dev", "Val", "VALID", "Validation_set", "val2", "holdout"]
)
@pytest.mark.parametrize("suffix", ["", ".csv"])
@pytest.mark.parametrize("has_test", [False, True])
def test_a_validation_set_of_another_name_is_an_error(tmp_path, monkeypatch, caplog, name, suffix, has_test):
    def make(split):
        save_images(tmp_path / "images" / split if suffix else tmp_path / split, {"cat": 1, "dog": 1})
        if suffix:
            (tmp_path / f"{split}.csv").write_text(f"path,label\nimages/{split}/cat/000.png,a\n{split}/dog/000.png,b\n")

    for split in ("train", name, *["test"] * has_test):
        make(split)
    config = folder_config(tmp_path, dataset="csv" if suffix else "imagefolder", image_size=8)
    expected = f"{tmp_path / name}{suffix} would not be read. Rename it to val{suffix}."
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        len(create_dataset(config, "train"))
    make("val")
    monkeypatch.setattr(logging.getLogger("ddp"), "propagate", True)
    with caplog.at_level(logging.INFO, "ddp"):
        assert len(create_dataset(config, "train")) == 2
    assert caplog.messages == [f"The run reads {tmp_path}/val{suffix}, and ignores {tmp_path / name}{suffix}."]


class Counted(str):
    """A name of a class that counts the comparisons with other names."""

    number = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.number += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("classes", [20, 80])
def test_listing_a_folder_compares_a_class_with_few_others(tmp_path, monkeypatch, split, classes):
    """With 20,000 classes a comparison of each with all others takes longer than reading the folders."""
    names = [Counted(f"class{number:03}") for number in range(classes)]
    for name in names:
        (tmp_path / split / name).mkdir(parents=True)
        (tmp_path / split / name / "a.png").touch()
    (tmp_path / "val").mkdir(exist_ok=True)
    monkeypatch.setattr(Counted, "number", 0)
    listing, others = list_image_folder(tmp_path / split, names)
    assert listing.count(b".png") == classes and not others
    assert Counted.number <= 2 * classes


@pytest.mark.parametrize("name", ["values", "extra", "devices", "evaluator.py", "valid.csv", "valley"])
def test_other_folders_and_files_beside_train_are_ignored(tmp_path, name):
    save_images(tmp_path / "train", {"cat": 1, "dog": 1})
    (tmp_path / name).write_text("") if "." in name else (tmp_path / name).mkdir()
    (tmp_path / "v").symlink_to(tmp_path / "train")
    assert len(create_dataset(folder_config(tmp_path), "train")) == 2


def test_a_link_to_val_is_another_name_of_it(tmp_path, monkeypatch, caplog):
    for split in ("train", "val"):
        save_images(tmp_path / split, {"cat": 1, "dog": 1})
    (tmp_path / "valid").symlink_to("val")
    monkeypatch.setattr(logging.getLogger("ddp"), "propagate", True)
    with caplog.at_level(logging.INFO, "ddp"):
        len(create_dataset(folder_config(tmp_path), "train"))
    assert not caplog.messages


@pytest.mark.guarantee("splits")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], r"val has no <class>/ folders with images \(.jpg, .*\)\. Add some, or delete the folder"),
        (["a.png", "b.png"], r"val has no <class>/ folders with images \(.*\), only 2 .png\. Add some, or delete"),
        (["cat/a.jfif", "cat/b.JFIF", "dog/c.heic"], r"val has no .*, only 2 .jfif, 1 .heic\. Add some, or delete"),
        (["cat/.a.png"], r"val has no .*, only 1 hidden or of tools\. Add some, or delete"),
    ],
)
def test_a_val_without_images_is_an_error_that_names_it_and_what_it_has(tmp_path, files, expected):
    save_images(tmp_path / "train", {"cat": 1, "dog": 1})
    (tmp_path / "val").mkdir()
    for name in files:
        (tmp_path / "val" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "val" / name).touch()
    data = create_dataset(folder_config(tmp_path), "val")
    with pytest.raises(UserError, match=f"^{tmp_path}/{expected}"):
        len(data)


def test_near_misses_of_a_class_are_counted_in_the_error(tmp_path):
    save_images(tmp_path / "train", {"cat": 1, "dog": 1})
    (tmp_path / "train/dog/000.png").rename(tmp_path / "train/dog/000.jfif")
    with pytest.raises(
        UserError, match=r"train/dog has no images \(.jpg, .*\), only 1 .jfif\. Add some, or delete the fo"
    ):
        len(create_dataset(folder_config(tmp_path), "train"))


@pytest.mark.guarantee("splits")
def test_training_without_a_held_out_set_is_a_line_of_the_banner(runs):
    save_images(runs.root / "data/train", {"cat": 3, "dog": 3})
    runs.train(1, "run", *"--dataset imagefolder --num_workers 0 --epochs 1".split(), task="")
    save_images(runs.root / "data/test", {"cat": 1, "dog": 1})
    runs.train(1, "tested", *"--dataset imagefolder --num_workers 0 --epochs 1".split(), task="")
    line = "the data has no validation or test set"
    assert line in runs.log("run") and line not in runs.log("tested")
    assert "ImageFolderDataset, 6 training samples, 2 classes" in runs.log("run")
