"""--dataset csv: the same run as of the folder that the files lie in, which lists are rejected, and their memory."""

import csv
import logging
import re
import tracemalloc
from pathlib import Path

import pytest
import torch

from config import TrainingConfig
from dataset import create_dataset
from images import save_images
from utils.data.sets import resolve_auto_fields
from utils.settings.errors import UserError

TRAIN = {"train": {"cat": 9, "dog": 10}, "val": {"cat": 3, "dog": 4}}


def csv_config(root, **changes):
    return TrainingConfig(dataset="csv", data_dir=str(root), **changes)


def list_images(root, **names):
    """Write <split>.csv for the image folders below root. names: of the classes, instead of those of the folders."""
    for folder in (folder for folder in sorted(root.iterdir()) if folder.is_dir()):
        with root.joinpath(f"{folder.name}.csv").open("w", newline="") as file:
            rows = [(path.relative_to(root), path.parent.name) for path in sorted(folder.glob("*/*"))]
            csv.writer(file).writerows([("path", "label"), *((path, names.get(name, name)) for path, name in rows)])


def write(root, text, split="train"):
    root.mkdir(exist_ok=True)
    (root / f"{split}.csv").write_text(text)


@pytest.mark.slow
def test_a_csv_trains_exactly_as_the_image_folder_that_it_lists_on_two_ranks(runs):
    data = runs.root / "data"
    for split, counts in TRAIN.items():
        save_images(data / split, counts)
    list_images(data)
    flags = "--augment resized_crop --image_size 8 --auto_augment ra --epochs 2 --num_workers 1 --record_samples"
    for name in ("imagefolder", "csv"):
        runs.train(2, name, *flags.split(), "--dataset", name, task="")
    runs.assert_same("imagefolder", "csv")
    origin = runs.json("csv", "provenance.json")
    assert origin["classes"] == ["cat", "dog"] and origin["identity"].startswith("19 samples, ")


def test_paths_labels_and_classes_are_those_of_the_list(tmp_path):
    """Quoted and spaced, with the marks that spreadsheets write; numbers are sorted as numbers."""
    save_images(tmp_path / "images", {"a, b": 1, "c": 2})
    rows = '"images/a, b/000.png",10\r\nimages/c/000.png, 9\r\nimages/c/001.png,10\r\n'
    write(tmp_path, f"\ufeffpath,label\r\n{rows}")
    write(tmp_path, "path,label\nimages/c/001.png,9\n", "test")
    config = csv_config(tmp_path)
    train, val = (create_dataset(config, split) for split in ("train", "val"))
    assert train.classes == ["9", "10"] and train.targets.tolist() == [1, 0, 1] and len(train) == 3
    assert train.path(0) == tmp_path / "images/a, b/000.png" and train[0][0].shape == (3, 8, 8)
    assert (val.split, val.targets.tolist(), create_dataset(config, "test")) == ("test", [0], None)
    auto_config = resolve_auto_fields(config, train)
    assert (auto_config.num_classes, auto_config.image_size) == (2, 8)
    texts = {"b": 0, "10": 1, "9": 2}
    write(tmp_path, "path,label\n" + "".join(f"images/c/00{k}.png,{text}\n" for text, k in texts.items()))
    assert create_dataset(config, "train").classes == ["10", "9", "b"]


def test_the_fingerprint_is_that_of_the_list(tmp_path):
    save_images(tmp_path / "images", {"a": 2, "b": 1})
    rows = ["images/a/000.png,a\n", "images/b/000.png,b\n"]
    fingerprints = []
    for text in (rows, rows, rows[::-1], [rows[0].replace(",a", ",b"), rows[1].replace(",b", ",a")]):
        write(tmp_path, "path,label\n" + "".join(text))
        fingerprints.append(create_dataset(csv_config(tmp_path), "train").fingerprint)
    assert fingerprints[0] == fingerprints[1] and len({*fingerprints}) == 3


@pytest.mark.parametrize(
    ("text", "split", "expected"),
    [
        (
            "file,label\nx,1\n",
            "train",
            r"The header of .*train.csv must be path,label, got 'file,label'\. Write path,label",
        ),
        ("", "train", r"The header of .*train.csv must be path,label, got ''\. Write path,label into line 1\."),
        ("path,label\n", "train", r"train.csv has no lines after its header\. Add some, or delete the file\."),
        ("path,label\n\n", "train", r"train.csv has no lines after its header\. Add some, or delete the file\."),
        (
            "path,label\nx,1\n\ny,2\n",
            "train",
            r"Line 3 of .*train.csv is not a path, a comma and a label\. Fix or delete this line\.",
        ),
        ("path,label\nx,1\ny\n", "train", "Line 3 of .*train.csv is not a path, a comma and a label"),
        ("path,label\nx,\n", "train", "Line 2 of .*train.csv is not a path, a comma and a label"),
        ('path,label\n"x\ny",1\n', "train", "Line 2 of .*train.csv is not a path, a comma and a label"),
        ('path,label\nx,1\n"y,1\n', "train", r"train.csv cannot be read after line 2 .*\. Fix the file\."),
        ("path,label\nx,1\ny,1\n", "train", r"train.csv has only one class, 1\. Put two or more classes into this"),
        (
            "path,label\nx,1\ny,2\nz,3\n",
            "train",
            r"--num_classes must be at least 3, .*train.csv, got 2\. Give that number, or leave out --num_classes",
        ),
        ("path,label\nx, \n", "train", "Line 2 of .*train.csv is not a path, a comma and a label"),
        (
            "path,label\nx,a\ny,c\n",
            "val",
            r"label 'c' in line 3 of .*val.csv does not occur in .*/train.csv\. Fix the label",
        ),
    ],
)
def test_a_wrong_list_is_an_error_that_names_file_and_line(tmp_path, text, split, expected):
    write(tmp_path, "path,label\nx,a\ny,b\n")
    write(tmp_path, text, split)
    with pytest.raises(UserError, match=expected) as raised:
        len(create_dataset(csv_config(tmp_path, image_size=8, num_classes=2), split))
    assert len(str(raised.value).splitlines()) == 1


ALIKE = {  # labels of lines 2, 3, ...: the error, or None and the classes
    ("0", "1", "0.0"): "label '0.0' in line 4 of {train} looks like '0' in line 2 of {train}. Write both labels alike",
    ("01", "2", "1"): "label '1' in line 4 of {train} looks like '01' in line 2 of {train}",
    ("+1", "2", "1."): "label '1.' in line 4 of {train} looks like '+1' in line 2 of {train}",
    ("caf\u00e9", "b", "cafe\u0301"): r"label 'cafe\u0301' in line 4 of {train} looks like 'caf\xe9' in line 2 of",
    ("cat", "dog", "ca\u200bt"): r"label 'ca\u200bt' in line 4 of {train} looks like 'cat' in line 2 of {train}",
    ("big cat", "dog", "big\u00a0cat"): r"label 'big\xa0cat' in line 4 of {train} looks like 'big cat' in line 2 of",
    ("big cat", "dog", "big  cat"): "label 'big  cat' in line 4 of {train} looks like 'big cat' in line 2 of {train}",
    ("1", "2.5", "nan"): "label 'nan' in line 4 of {train} is not a number, but the label in line 2 of {train} is one",
    ("NaN", "1", "2"): "label 'NaN' in line 2 of {train} is not a number, but the label in line 3 of {train} is one",
    ("1", "None", "2"): "label 'None' in line 3 of {train} is not a number, but the label in line 2 of {train} is one",
    ("1", "2", "NA"): "label 'NA' in line 4 of {train} is not a number, but the label in line 2 of {train} is one",
    ("cat", "dog ", " cat", "dog\t", "cat\u00a0"): ["cat", "dog"],
    ("1", "x", "1.0"): ["1", "1.0", "x"],  # not numbers
    ("1e1", "10", "2"): ["2", "10", "1e1"],
    ("NA", "nan", "cat"): ["NA", "cat", "nan"],
    ("-1", "1", "0"): ["-1", "0", "1"],
}


@pytest.mark.guarantee("labels")
@pytest.mark.parametrize("labels", ALIKE, ids=ascii)
def test_labels_that_look_alike_are_an_error_that_names_two_lines(tmp_path, labels):
    write(tmp_path, "path,label\n" + "".join(f"{k}.png,{label}\n" for k, label in enumerate(labels)))
    data, expected = create_dataset(csv_config(tmp_path, image_size=8), "train"), ALIKE[labels]
    if isinstance(expected, list):
        assert sorted(data.classes) == sorted(expected)
    else:
        train = tmp_path / "train.csv"
        with pytest.raises(UserError, match="^The " + re.escape(expected.format(train=train))):
            len(data)


@pytest.mark.guarantee("labels")
def test_a_label_of_val_that_only_looks_like_one_of_train_is_an_error_that_says_so(tmp_path):
    write(tmp_path, "path,label\nx,caf\u00e9\ny,b\n")
    write(tmp_path, "path,label\nx,b\ny,cafe\u0301\n", "val")
    with pytest.raises(
        UserError, match=r"label 'cafe\\u0301' in line 3 of .*val.csv looks like .* in line 2 of .*train.csv"
    ):
        len(create_dataset(csv_config(tmp_path, image_size=8), "val"))


def logged(monkeypatch, caplog, data):
    monkeypatch.setattr(logging.getLogger("ddp"), "propagate", True)
    with caplog.at_level(logging.INFO, "ddp"):
        size = len(data)
    return size, [record.getMessage() for record in caplog.records]


def test_labels_that_differ_in_case_are_a_warning(tmp_path, monkeypatch, caplog):
    write(tmp_path, "path,label\na,A\nb,a\nc,b\n")
    data, train = create_dataset(csv_config(tmp_path, image_size=8), "train"), tmp_path / "train.csv"
    expected = f"The label a in line 3 of {train} is another class than A in line 2 of {train}."
    assert logged(monkeypatch, caplog, data) == (3, [expected]) and data.classes == ["A", "a", "b"]


@pytest.mark.guarantee("labels")
@pytest.mark.parametrize("again", ["a", "./a", "b/../a"])
def test_a_file_twice_is_a_warning_with_one_label_and_an_error_with_two(tmp_path, monkeypatch, caplog, again):
    write(tmp_path, f"path,label\na,x\nb,y\n{again},x\n{again},x\n")
    data, train = create_dataset(csv_config(tmp_path, image_size=8), "train"), tmp_path / "train.csv"
    expected = f"{train} lists files again, with the same label, in 2 lines."
    assert logged(monkeypatch, caplog, data) == (4, [expected])
    write(tmp_path, f"path,label\nc,y\na,x\nb,y\n{again},y\n")
    problem = rf"{again} has the label 'y' in line 5 of {train}, but 'x' in line 3\. Delete one of these lines"
    with pytest.raises(UserError, match=problem):
        len(create_dataset(csv_config(tmp_path, image_size=8), "train"))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n  \n", "\n,\n", ""])
def test_empty_lines_at_the_end_are_none(tmp_path, end):
    (tmp_path / "train.csv").write_text(f"path,label\na,x\n b ,y{end}", newline="")
    data = create_dataset(csv_config(tmp_path, image_size=8), "train")
    assert len(data) == 2 and data.path(1) == tmp_path / "b "


def test_a_missing_list_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"train.csv cannot be read after line 1 .*\. Fix the file"):
        len(create_dataset(csv_config(tmp_path, image_size=8), "train"))


def test_a_missing_file_is_an_error_with_the_line_that_names_it(tmp_path):
    save_images(tmp_path / "train", {"cat": 4, "dog": 4})
    list_images(tmp_path)
    lost = tmp_path / "train/dog/001.png"
    lost.unlink()
    expected = rf"{lost} \(class dog, line 7 of {tmp_path}/train.csv\) cannot be read as an image \(.*\)\. Replace or"
    with pytest.raises(UserError, match=expected):
        create_dataset(csv_config(tmp_path, image_size=8), "train")[5]


@pytest.mark.slow
def test_a_long_list_takes_few_bytes_per_row_on_the_rank_that_reads_it_and_fewer_on_the_others(tmp_path):
    rows = 100_000
    write(tmp_path, "path,label\n" + "".join(f"images/{k % 1000:04d}/{k:08d}.jpeg,{k % 1000}\n" for k in range(rows)))
    reader, other = (create_dataset(csv_config(tmp_path, image_size=8), "train") for _ in range(2))
    peaks = []
    for use in (lambda: reader.listing, lambda: other.use_listing(reader.listing) or other.targets):
        tracemalloc.start()
        use()
        peaks.append(tracemalloc.get_traced_memory()[1] / rows)
        tracemalloc.stop()
    assert len(reader.listing) < 40 * rows and peaks[0] < 200 and peaks[1] < 150, peaks
    assert other.path(rows - 1) == Path(tmp_path, f"images/0999/{rows - 1:08d}.jpeg")
    assert torch.equal(other.targets, torch.arange(rows) % 1000)
