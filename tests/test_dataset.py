"""Data sets: what they hold, how they are augmented, and what is refused about files."""

import pytest
import torch

from config import Refused, TrainingConfig
from dataset import SyntheticImageDataset, create_dataset, is_prepared, prepare_data
from images import save_images
from utils.augment import augment_images, center_crop, crop_and_flip, normalize, resized_crop_and_flip
from utils.loading import settle
from utils.streams import derive_seed, draw_integers, draw_uniform, sample_draws


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


# ---- draws and augmentation ----


def test_draws_are_functions_of_seed_epoch_and_index_and_look_random():
    indices = torch.arange(20_000)
    draws = sample_draws(7, 3, indices, 5)
    assert torch.equal(draws[[5, 900]], sample_draws(7, 3, torch.tensor([5, 900]), 5))
    assert draws.min() >= 0 and draws.max() < 2**32
    for other in (sample_draws(8, 3, indices, 5), sample_draws(7, 4, indices, 5)):
        assert (draws == other).float().mean() < 1e-3
    uniform = draw_uniform(draws)
    assert uniform.dtype == torch.float32 and 0 <= uniform.min() and uniform.max() < 1
    assert (uniform.mean(0) - 0.5).abs().max() < 0.02
    assert torch.corrcoef(uniform.T).fill_diagonal_(0).abs().max() < 0.03
    counts = draw_integers(draws[:, 0], 10).bincount()
    assert len(counts) == 10 and (counts - 2000).abs().max() < 250


def test_seeds_of_different_keys_differ():
    keys = [("order", seed, epoch) for seed in range(30) for epoch in range(30)] + [("step", 1, 23), ("step", 12, 3)]
    assert len({derive_seed(*key) & 0xFFFFFFFF for key in keys}) == len(keys)


def test_crop_and_flip_moves_each_image_by_its_own_draws():
    images = torch.arange(2 * 1 * 6 * 6, dtype=torch.uint8).view(2, 1, 6, 6)
    # padding 1: draws below 2^32 / 3 give offset 0 (one pixel down and right), the middle third 1 (no move)
    middle, low, flip, keep = 2**31, 0, 2**32 - 1, 0
    out = crop_and_flip(images, torch.tensor([[middle, middle, flip], [low, middle, keep]]), padding=1)
    assert torch.equal(out[0], images[0].flip(2))
    assert torch.equal(out[1, :, 1:], images[1, :, :-1]) and (out[1, :, 0] == 0).all()
    assert out.dtype == torch.uint8


def test_augmentation_of_a_sample_does_not_depend_on_its_batch():
    images = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8)
    indices = torch.arange(100, 112)
    for kind, rtol in (("crop", 0), ("resized_crop", 1e-5)):
        whole = augment_images(images, kind, 16, 1, 2, indices)
        parts = torch.cat([augment_images(images[k : k + 5], kind, 16, 1, 2, indices[k : k + 5]) for k in (0, 5, 10)])
        torch.testing.assert_close(whole, parts, rtol=rtol, atol=0)
        assert not torch.equal(whole, augment_images(images, kind, 16, 1, 3, indices))


def test_resized_crop_of_the_whole_image_is_the_image():
    images = torch.randint(0, 256, (1, 3, 10, 10), dtype=torch.uint8)
    whole = torch.tensor([[2**32 - 1, 2**31, 2**31, 2**31, 2**32 - 1]])  # all of the area, ratio 1, centre, not mirrored
    torch.testing.assert_close(resized_crop_and_flip(images, whole, 10), images.float(), atol=1e-3, rtol=0)
    assert resized_crop_and_flip(images, whole, 7).shape == (1, 3, 7, 7)


def test_center_crop_and_normalize():
    images = torch.arange(2 * 25, dtype=torch.uint8).view(1, 2, 5, 5)
    assert torch.equal(center_crop(images, 3), images[:, :, 1:4, 1:4])
    mean, std = torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0.25])
    expected = (images / 255 - mean.view(2, 1, 1)) / std.view(2, 1, 1)
    torch.testing.assert_close(normalize(images, mean, std), expected)


# ---- image folders ----


def test_image_folder_reads_splits_sizes_and_labels(tmp_path):
    for split, counts in (("train", {"cat": 3, "dog": 2}), ("test", {"cat": 1, "dog": 2})):
        save_images(tmp_path / split, counts)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    config = folder_config(tmp_path)
    train, val = create_dataset(config, "train"), create_dataset(config, "val")
    assert (len(train), len(val), create_dataset(config, "test")) == (5, 3, None)
    assert (train.classes, train.targets, train.image_size, train.augment) == (["cat", "dog"], [0, 0, 0, 1, 1], 8, "crop")
    assert (val.split, val.augment) == ("test", "none")  # the only held-out part does both
    image, label = train[4]
    assert image.shape == (3, 8, 8) and image.dtype == torch.uint8 and label == 1
    config = settle(config, train)
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
    some = [create_dataset(folder_config(tmp_path, dataset_size=5, seed=seed), "train").paths for seed in (1, 1, 2)]
    assert len(some[0]) == 5 and some[0] == some[1] != some[2]


def truncate(path):
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        (lambda root: None, {"data_dir": "/nowhere"}, "data_dir=/nowhere: has no /nowhere/train/<class>/ folders; give"),
        (
            lambda root: [p.unlink() for p in (root / "train/dog").iterdir()] + [(root / "train/dog").rmdir()],
            {},
            "one class alone, cat; a class",
        ),
        (lambda root: (root / "train/emu").mkdir(), {}, "train/emu: holds no image .*; put some there or delete"),
        (lambda root: (root / "val/emu").mkdir(), {}, "val/emu: is a class that .* lacks; give both"),
        (lambda root: truncate(root / "train/cat/000.png"), {}, "cat/000.png: cannot be read as an image .*; replace or delete it"),
        (lambda root: save_images(root / "train", {"cat": 1}, size=(8, 9)), {}, "is not square .9x8 pixels.; give --image_size"),
        (lambda root: None, {"num_classes": 2}, "num_classes=2: the data has labels of 3 classes; give num_classes=3"),
        (lambda root: None, {"in_channels": 4}, "in_channels=4: images are read with 1 channel or 3; give"),
        (lambda root: None, {"dataset_size": 99}, "dataset_size=99: the set has 6 samples; give"),
    ],
)
def test_image_folders_that_cannot_be_used_are_refused(tmp_path, spoil, changes, said):
    classes = {"cat": 2, "dog": 2} if "one class" in said else {"cat": 2, "dog": 2, "eel": 2}
    for split in ("train", "val"):
        save_images(tmp_path / split, classes)
    spoil(tmp_path)
    config = folder_config(changes.pop("data_dir", tmp_path), **changes)
    with pytest.raises(Refused, match=said):
        train = create_dataset(config, "train")
        settle(config, train)
        create_dataset(config, "val")


def test_images_of_unequal_size_are_refused_where_they_are_read(tmp_path):
    save_images(tmp_path / "train", {"cat": 2, "dog": 1})
    save_images(tmp_path / "train", {"dog": 1}, size=9)
    data = create_dataset(folder_config(tmp_path), "train")
    with pytest.raises(Refused, match="dog/000.png: has 9x9 pixels, others 8x8; give --image_size N"):
        data[2]


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_classes_is_refused_by_its_sample(label):
    data = SyntheticImageDataset(10, num_classes=3)
    data.targets[7] = label
    with pytest.raises(Refused, match=f"dataset: sample 7 has label {label}, outside the 3 classes; mend the label or give"):
        settle(TrainingConfig(), data)


# ---- cifar10 ----


def test_cifar10_that_cannot_be_fetched_is_refused_and_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    config = TrainingConfig(dataset="cifar10", data_dir=str(tmp_path))
    (tmp_path / "cifar10.partial").mkdir()
    (tmp_path / "cifar10.partial" / "half").touch()

    class Offline:
        def __init__(self, root, train=True, download=False):
            raise OSError("no route to host")

    monkeypatch.setattr(datasets, "CIFAR10", Offline)
    assert not is_prepared(config)
    with pytest.raises(Refused, match="dataset=cifar10: cannot be fetched .no route to host.; put cifar-10-python.tar.gz into"):
        prepare_data(config)
    assert not is_prepared(config) and not (tmp_path / "cifar10.partial" / "half").exists()


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
