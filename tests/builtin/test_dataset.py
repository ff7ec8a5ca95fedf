"""The built-in data sets: their samples, and which files are rejected."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import dataset
from config import TrainingConfig, UserError
from dataset import SyntheticImageDataset, create_dataset, is_prepared, prepare_data
from ddp_utils import cleanup_distributed, setup_distributed
from images import save_images
from ranks import run_ranks
from utils.data.sets import choose_samples, load_data, with_auto


def folder_config(path, **changes):
    return TrainingConfig(dataset="imagefolder", data_dir=str(path), **changes)


# ---- synthetic ----


def test_synthetic_set_is_reproducible_uint8_and_class_conditional():
    train, again = SyntheticImageDataset(200, seed=1), SyntheticImageDataset(200, seed=1)
    val = SyntheticImageDataset(100, seed=1, split="val")
    assert train.images.dtype == torch.uint8 and train.images.shape == (200, 3, 32, 32)
    assert torch.equal(train.images, again.images) and train.fingerprint == again.fingerprint != val.fingerprint
    means = torch.stack([train.images[train.labels == k].float().mean(0) for k in range(10)])
    nearest = ((val.images[:, None].float() - means) ** 2).sum((2, 3, 4)).argmin(1)
    assert (nearest == val.labels).float().mean() > 0.95


def test_a_batch_of_an_in_memory_set_is_its_samples():
    data = SyntheticImageDataset(20)
    images, labels = data.__getitems__([3, 17])
    assert torch.equal(images[1], data[17][0]) and labels.tolist() == [data[3][1], data[17][1]]


# ---- image folders ----


def test_image_folder_reads_splits_sizes_and_labels(tmp_path):
    for split, counts in (("train", {"cat": 3, "dog": 2}), ("test", {"cat": 1, "dog": 2})):
        save_images(tmp_path / split, counts)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    config = folder_config(tmp_path)
    train, val = create_dataset(config, "train"), create_dataset(config, "val")
    assert (len(train), len(val), create_dataset(config, "test")) == (5, 3, None)
    assert (train.classes, train.targets.tolist()) == (["cat", "dog"], [0, 0, 0, 1, 1])
    assert (train.image_size, train.augment) == (8, "crop")
    assert (val.split, val.augment) == ("test", "none")  # the only held-out split is used for validation
    image, label = train[4]
    assert image.shape == (3, 8, 8) and image.dtype == torch.uint8 and label == 1
    config = with_auto(config, train)
    assert (config.num_classes, config.in_channels, config.image_size) == (2, 3, 8)
    save_images(tmp_path / "val", {"cat": 1})
    assert create_dataset(config, "val").split == "val" and create_dataset(config, "test").split == "test"


def test_image_folder_resizes_where_a_size_is_given(tmp_path):
    save_images(tmp_path / "train", {"cat": 2}, size=(20, 30))
    save_images(tmp_path / "train", {"dog": 2}, size=12)
    data = create_dataset(folder_config(tmp_path, image_size=16), "train")
    assert {data[k][0].shape for k in range(4)} == {(3, 16, 16)}
    data = create_dataset(folder_config(tmp_path, image_size=16, augment="resized_crop"), "train")
    assert {data[k][0].shape for k in range(4)} == {(3, 18, 18)}
    images = torch.stack([data[k][0] for k in range(4)])
    assert data.device_transform((images, None), 0, 0, torch.arange(4))[0].shape == (4, 3, 16, 16)
    assert create_dataset(folder_config(tmp_path, image_size=16, in_channels=1), "train")[0][0].shape == (1, 16, 16)


def test_dataset_size_takes_a_seeded_subset(tmp_path):
    save_images(tmp_path / "train", {"cat": 6, "dog": 6})
    whole = create_dataset(folder_config(tmp_path), "train")
    some = [choose_samples(whole, folder_config(tmp_path, dataset_size=5, seed=seed)) for seed in (1, 1, 2)]
    assert [len(each) for each in some] == [5] * 3 and some[0].indices == some[1].indices != some[2].indices
    assert some[0].targets.tolist() == [whole[k][1] for k in some[0].indices] and some[0].classes == whole.classes
    assert (
        torch.equal(some[0][2][0], whole[some[0].indices[2]][0]) and choose_samples(whole, folder_config("x")) is whole
    )
    with pytest.raises(UserError, match="dataset_size=99: the set has 12 samples; give"):
        choose_samples(whole, folder_config(tmp_path, dataset_size=99))


def test_data_sets_keep_their_samples_in_tensors_and_arrays(tmp_path):
    """A list of Python's integers takes up to 36 bytes a sample, and forked workers copy it."""
    save_images(tmp_path / "train", {"cat": 30, "dog": 30})
    for whole in (create_dataset(folder_config(tmp_path), "train"), SyntheticImageDataset(60, image_size=8)):
        for data in (whole, choose_samples(whole, folder_config(tmp_path, dataset_size=40))):
            assert len(data.targets) == len(data)
            assert not [name for name, value in vars(data).items() if isinstance(value, list) and len(value) > 10]


def test_a_subset_transforms_a_batch_without_work_per_sample_of_the_set(monkeypatch):
    whole = SyntheticImageDataset(400, image_size=8)
    whole.augment = "crop"
    some = choose_samples(whole, TrainingConfig(dataset_size=300))
    expected = whole.device_transform(whole.__getitems__([some.indices[7]]), 1, 2, torch.tensor([some.indices[7]]))
    batch, made = some.__getitems__([7]), []
    monkeypatch.setattr(torch, "tensor", lambda values, **_: made.append(values))
    assert torch.equal(some.device_transform(batch, 1, 2, torch.arange(7, 8))[0], expected[0]) and not made


def listed_folders(flags):
    """How many folders this rank listed to load the data, its number of samples, a path and the fingerprint."""
    listed = []
    sys.addaudithook(lambda event, args: listed.append(args[0]) if event in ("os.scandir", "os.listdir") else None)
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)
    listed.clear()
    train_set = load_data(dataset, config, ctx).train
    count = len([path for path in listed if isinstance(path, str | Path) and str(path).startswith(config.data_dir)])
    cleanup_distributed()
    return count, len(train_set), train_set.path(6), train_set.fingerprint


def test_an_image_folder_is_listed_by_one_rank(tmp_path):
    """Also with names that are not UTF-8 or contain a space or a line break. The fingerprint is that of older runs."""
    names = [f"class{k:02d}" for k in range(12)]
    for split in ("train", "val"):
        save_images(tmp_path / split, dict.fromkeys(names, 2))
    odd = os.fsencode(tmp_path / "train/class03/000") + b" \n\xff.png"
    os.rename(tmp_path / "train/class03/000.png", odd)
    found = run_ranks(3, listed_folders, ["--dataset", "imagefolder", "--data_dir", str(tmp_path), "--backend", "gloo"])
    counts, *same = zip(*found, strict=True)
    assert counts[0] >= 24 and counts[1] == counts[2] <= 10
    paths = [path for name in names for path in sorted((tmp_path / "train" / name).iterdir())]
    lines = [os.fsencode(f"{path.parent.name}/{path.name} {path.stat().st_size}") for path in paths]
    assert same == [(24,) * 3, (paths[6],) * 3, (hashlib.sha256(b"\n".join(lines)).hexdigest(),) * 3]


def truncate(path):
    path.write_bytes(path.read_bytes()[:40])


def leave_one_class(root):
    for name in ("dog", "eel"):
        shutil.rmtree(root / "train" / name)


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        (leave_one_class, {}, "only one class, cat; put"),
        (lambda root: (root / "val/emu").mkdir(), {}, "val/emu: is a class that is not in .*; use the same"),
        (lambda root: truncate(root / "train/cat/000.png"), {}, "cat/000.png: cannot be read as an image .*; replace"),
        (
            lambda root: save_images(root / "train", {"cat": 1}, size=(8, 9)),
            {},
            "is not square .9x8 pixels.; resize all",
        ),
        (lambda root: None, {"in_channels": 4}, "in_channels=4: images have 1 or 3 channels; give"),
    ],
)
def test_image_folders_that_cannot_be_used_are_rejected(tmp_path, spoil, changes, said):
    """More cases, on every rank: test_refused_data.py."""
    for split in ("train", "val"):
        save_images(tmp_path / split, {"cat": 2, "dog": 2, "eel": 2})
    spoil(tmp_path)
    config = folder_config(tmp_path, **changes)
    with pytest.raises(UserError, match=said):
        create_dataset(config, "train")
        create_dataset(config, "val")


# ---- cifar10 ----


def test_cifar10_that_cannot_be_downloaded_is_rejected_and_leaves_no_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    config = TrainingConfig(dataset="cifar10", data_dir=str(tmp_path))

    class Offline:
        def __init__(self, root, train=True, download=False):
            raise OSError("no route to host")

    monkeypatch.setattr(datasets, "CIFAR10", Offline)
    assert not is_prepared(config)
    with pytest.raises(UserError, match="cannot be downloaded .no route to host.; put cifar-10-python.tar.gz into"):
        prepare_data(config)
    assert not is_prepared(config) and not list(tmp_path.iterdir())


def test_cifar10_is_read_from_torchvisions_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    import numpy

    class Fetched:
        classes = [f"class {k}" for k in range(10)]

        def __init__(self, root, train=True, download=False):
            self.data = numpy.full((6, 32, 32, 3), 7, numpy.uint8)
            self.targets = [0, 1, 2, 3, 4, 9]

    monkeypatch.setattr(datasets, "CIFAR10", Fetched)
    config = TrainingConfig(dataset="cifar10", data_dir=str(tmp_path))
    prepare_data(config)
    assert is_prepared(config)
    train, val = create_dataset(config, "train"), create_dataset(config, "val")
    assert train.images.shape == (6, 3, 32, 32) and (train.augment, val.augment, val.split) == ("crop", "none", "val")
    assert create_dataset(config, "test") is None


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_classes_is_rejected_with_its_sample(monkeypatch, label):
    data = SyntheticImageDataset(10, num_classes=3, image_size=8)
    data.targets[7] = label
    monkeypatch.setattr(dataset, "_synthetic", lambda config, split: data)
    with pytest.raises(UserError, match=f"sample 7 has label {label}, outside the 3 classes; fix the label or give"):
        create_dataset(TrainingConfig(), "train")
