"""The built-in data sets in memory: their samples, and what is rejected."""

import numpy
import pytest
import torch

import dataset
from config import TrainingConfig
from dataset import SyntheticImageDataset, create_dataset, is_prepared, prepare_data
from utils.data.sets import identify_dataset, take_subset
from utils.example.augment import augment_images, normalize
from utils.settings.errors import UserError


def test_synthetic_set_is_reproducible_uint8_and_class_conditional():
    train, again = SyntheticImageDataset(200, seed=1), SyntheticImageDataset(200, seed=1)
    val = SyntheticImageDataset(100, seed=1, split="val")
    assert train.images.dtype == torch.uint8 and train.images.shape == (200, 3, 32, 32)
    assert torch.equal(train.images, again.images) and identify_dataset(train) == identify_dataset(
        again
    ) != identify_dataset(val)
    means = torch.stack([train.images[train.labels == k].float().mean(0) for k in range(10)])
    nearest = ((val.images[:, None].float() - means) ** 2).sum((2, 3, 4)).argmin(1)
    assert (nearest == val.labels).float().mean() > 0.95


def test_a_batch_of_an_in_memory_set_is_its_samples():
    data = SyntheticImageDataset(20)
    images, labels = data.__getitems__([3, 17])
    assert torch.equal(images[1], data[17][0]) and labels.tolist() == [data[3][1], data[17][1]]


def test_a_batch_has_the_crops_of_its_samples_among_all_copies_of_the_set():
    data = SyntheticImageDataset(20, image_size=16)
    data.augment, data.copies = "crop", 3
    images, indices = data.images[:4], torch.tensor([19, 59, 0, 20])
    for epoch in (0, 1):
        moved, _ = data.device_transform((images, None), 3, epoch, indices)
        expected = augment_images(images, "crop", 16, 3, epoch, indices)
        assert torch.equal(moved, normalize(expected, data.mean, data.std))
    with pytest.raises(IndexError):
        data.device_transform((images, None), 3, 0, indices + 1)


def test_a_subset_transforms_a_batch_without_work_per_sample_of_the_set(monkeypatch):
    whole = SyntheticImageDataset(400, image_size=8)
    whole.augment = "crop"
    subset = take_subset(whole, 300, seed=1)
    expected = whole.device_transform(whole.__getitems__([subset.indices[7]]), 1, 2, torch.tensor([subset.indices[7]]))
    batch, made = subset.__getitems__([7]), []
    monkeypatch.setattr(torch, "tensor", lambda values, **_: made.append(values))
    assert torch.equal(subset.device_transform(batch, 1, 2, torch.arange(7, 8))[0], expected[0]) and not made


def test_cifar10_that_cannot_be_downloaded_is_rejected_and_leaves_no_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    config = TrainingConfig(dataset="cifar10", data_dir=str(tmp_path))

    class Offline:
        def __init__(self, root, train=True, download=False):
            raise OSError("no route to host")

    monkeypatch.setattr(datasets, "CIFAR10", Offline)
    assert not is_prepared(config)
    with pytest.raises(UserError, match=r"cannot be downloaded .no route to host.\. Put cifar-10-python.tar.gz into"):
        prepare_data(config)
    assert not is_prepared(config) and not list(tmp_path.iterdir())


def test_cifar10_is_read_from_torchvisions_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")

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
    with pytest.raises(
        UserError, match=rf"Sample 7 has the label {label}, .* outside the 3 classes\. Fix the label, or give"
    ):
        create_dataset(TrainingConfig(), "train")
