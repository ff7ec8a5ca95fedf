"""Image folders: their samples, how they are transformed, and which files are rejected."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

import dataset
from config import TrainingConfig
from dataset import SyntheticImageDataset, create_dataset
from ddp_utils import cleanup_distributed, setup_distributed
from images import save_images
from ranks import run_ranks
from utils.data.sampler import MicroBatch
from utils.data.sets import load_data, resolve_auto_fields, take_subset
from utils.data.worker import Fetcher
from utils.example.augment import normalize
from utils.extras.images.sets import FILE_SETTINGS
from utils.rng import seed_host
from utils.settings.errors import UserError


def folder_config(path, **changes):
    return TrainingConfig(dataset="imagefolder", data_dir=str(path), **changes)


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
    config = resolve_auto_fields(config, train)
    assert (config.num_classes, config.in_channels, config.image_size) == (2, 3, 8)
    save_images(tmp_path / "val", {"cat": 1})
    assert create_dataset(config, "val").split == "val" and create_dataset(config, "test").split == "test"


def test_image_folder_resizes_where_a_size_is_given(tmp_path):
    save_images(tmp_path / "train", {"cat": 2}, size=(20, 30))
    save_images(tmp_path / "train", {"dog": 2}, size=12)
    data = create_dataset(folder_config(tmp_path, image_size=16), "train")
    assert {data[k][0].shape for k in range(4)} == {(3, 16, 16)} and data.augment == "crop" and data.cacheable
    data = create_dataset(folder_config(tmp_path, image_size=16, augment="resized_crop"), "train")
    assert {data[k][0].shape for k in range(4)} == {(3, 16, 16)} and data.augment == "none" and not data.cacheable
    images = torch.stack([data[k][0] for k in range(4)])
    expected = normalize(images, data.mean, data.std)
    assert torch.equal(data.device_transform((images, None), 0, 0, torch.arange(4))[0], expected)
    assert create_dataset(folder_config(tmp_path, image_size=16, in_channels=1), "train")[0][0].shape == (1, 16, 16)


def a_folder_of_every_kind(root):
    """train/ with every suffix that ImageFolder reads, sub-folders, links, and files that it does not read."""
    suffixes = ".jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp".split()
    for name in ("cat", "dog"):
        for k, suffix in enumerate(suffixes * 2):
            below = ("", "b", "b/c", "b/c/d", "b-2", "B")[k % 6]
            (root / "train" / name / below).mkdir(parents=True, exist_ok=True)
            color = (k * 12, len(name) * 9, ord(name[0]))
            image = Image.new("RGB", (8, 8), color)
            ending = suffix.upper() if k >= len(suffixes) else suffix
            image.save(root / "train" / name / below / f"{k}{ending}", format=None if ending != ".PGM" else "PPM")
    save_images(root / "elsewhere", {"x": 2, "y": 1})
    (root / "train/cat/linked").symlink_to(root / "elsewhere")
    (root / "train/dog/b/linked.png").symlink_to(root / "elsewhere/y/000.png")
    (root / "train/dog/.png").symlink_to(root / "elsewhere/y/000.png")
    save_images(root / "val", {"cat": 1})
    for name in ("train/cat/notes.txt", "train/cat/b/more.TXT", "train/dog/b/c/0.gif", "val/cat/README"):
        (root / name).write_text("no image")


def test_an_image_folder_has_the_files_of_torchvisions_image_folder_in_its_order(tmp_path):
    folder = pytest.importorskip("torchvision.datasets").ImageFolder
    a_folder_of_every_kind(tmp_path)
    expected = folder(str(tmp_path / "train"))
    ours = create_dataset(folder_config(tmp_path), "train")
    expected.samples = [item for item in expected.samples if not item[0].endswith("/.png")]  # hidden files are left out
    assert len(ours) == 2 * 18 + 3 + 1
    assert [(str(ours.path(k)), int(ours.targets[k])) for k in range(len(ours))] == expected.samples
    assert ours.classes == expected.classes
    for k, (image, label) in enumerate(expected):
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
        assert torch.equal(ours[k][0], pixels) and ours[k][1] == label, ours.path(k)


def test_files_that_are_left_out_are_logged_in_one_line_by_rank_0(runs):
    a_folder_of_every_kind(runs.root / "data")
    runs.train(2, "run", *"--dataset imagefolder --num_workers 1 --epochs 1".split(), task="")
    logs = "".join(path.read_text() for path in (runs.folder("run") / "logs").iterdir())
    lines = [line for line in logs.splitlines() if "of other types than images" in line]
    kinds = "2 .txt, 1 hidden or of tools, 1 .gif, 1 without a suffix"
    text = f"The run ignores 5 files of other types than images: {kinds}, e.g. "
    assert len(lines) == 1 and text + str(runs.root / "data/train/cat/notes.txt") in lines[0], lines


def test_a_link_to_a_folder_around_it_is_rejected(tmp_path):
    """ImageFolder would list each file 41 times."""
    save_images(tmp_path / "train", {"cat": 1, "dog": 1})
    (tmp_path / "train/dog/deep").mkdir()
    (tmp_path / "train/dog/deep/again").symlink_to(tmp_path / "train/dog")
    with pytest.raises(
        UserError, match=r"dog/deep/again is a link to a folder that contains this link\. Remove the link"
    ):
        len(create_dataset(folder_config(tmp_path), "train"))


def test_listing_reads_each_folder_once_and_stats_no_file_by_its_path(tmp_path, monkeypatch):
    """A file's size comes from its directory entry."""
    a_folder_of_every_kind(tmp_path)
    data, calls = create_dataset(folder_config(tmp_path), "train"), []
    folders = [root for root, *_ in os.walk(tmp_path / "train", followlinks=True)] + [str(tmp_path)]

    def counted(name):
        plain = getattr(os, name)
        return lambda path, *args, **options: (calls.append((name, os.fspath(path))), plain(path, *args, **options))[1]

    for name in ("scandir", "listdir", "stat", "lstat"):
        monkeypatch.setattr(os, name, counted(name))
    assert len(data) == 40
    monkeypatch.undo()
    assert sorted(path for name, path in calls if name == "scandir") == sorted(folders)
    assert not [call for call in calls if call[0] == "listdir" or os.path.isfile(call[1])]


def sample(data, index, epoch=0, seed=5):
    """Pixels of a sample, as a loader's worker fetches it."""
    micro_batch = MicroBatch(epoch, 0, [index], is_padding=False, is_last=True, micro_batches_in_step=1)
    return Fetcher(data, False, seed).__getitems__(micro_batch)[1][0][0]


def decoded(path):
    return torch.from_numpy(numpy.array(Image.open(path))).permute(2, 0, 1)


def test_resized_crops_are_torchvisions(tmp_path):
    """Of the whole image, from 8 % of its area; half of them are mirrored. Evaluation is that of its presets."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    for split in ("train", "val"):
        save_images(tmp_path / split, {"cat": 1, "dog": 1}, size=(40, 60))
    flags = {"image_size": 28, "augment": "resized_crop"}
    cases = (({}, ((0.08, 1), (3 / 4, 4 / 3))), ({"crop_scale": "0.3,.6", "crop_ratio": "1,2"}, ((0.3, 0.6), (1, 2))))
    for changes, crop in cases:
        data = create_dataset(folder_config(tmp_path, **flags, **changes), "train")
        transform = v2.Compose([v2.RandomResizedCrop(28, *crop), v2.RandomHorizontalFlip()])
        for epoch in range(4):
            ours = sample(data, 1, epoch)
            seed_host("sample", 5, epoch, 1)
            assert torch.equal(ours, transform(decoded(data.path(1))))
    assert not torch.equal(sample(data, 1, 0), sample(data, 1, 1))
    val = create_dataset(folder_config(tmp_path, **flags), "val")
    transform = v2.Compose([v2.Resize(32), v2.CenterCrop(28)])  # as 256 for 224
    assert torch.equal(sample(val, 1), transform(decoded(val.path(1)))) and val.cacheable


POLICIES = {"ra": "RandAugment", "ta_wide": "TrivialAugmentWide", "augmix": "AugMix", "autoaugment": "AutoAugment"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("augment", ["resized_crop", "none"])
def test_augmentation_of_files_is_torchvisions_in_the_order_of_its_reference(tmp_path, policy, augment):
    """ClassificationPresetTrain and ClassificationPresetEval, composed by hand, with the same seed."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    for split in ("train", "val"):
        save_images(tmp_path / split, {"cat": 1, "dog": 1}, size=(40, 60))
    sizes = {"image_size": 28, "train_size": 20, "resize_size": 36, "interpolation": "bicubic"}
    config = folder_config(tmp_path, **sizes, augment=augment, auto_augment=policy, random_erase=1)
    data, val, mode = create_dataset(config, "train"), create_dataset(config, "val"), v2.InterpolationMode.BICUBIC
    if augment == "resized_crop":
        first = [v2.RandomResizedCrop(20, interpolation=mode, antialias=True), v2.RandomHorizontalFlip(0.5)]
    else:
        first = [v2.Resize(20, mode), v2.CenterCrop(20)]
    before = v2.Compose([*first, getattr(v2, POLICIES[policy])(interpolation=v2.InterpolationMode.BILINEAR)])
    mean, std = data.mean.tolist(), data.std.tolist()
    after = v2.Compose([v2.ToDtype(torch.float, scale=True), v2.Normalize(mean, std), v2.RandomErasing(1)])
    assert not data.cacheable and data.image_size == 28
    for epoch in range(6):
        ours = data.device_transform((sample(data, 1, epoch)[None], None), 5, epoch, torch.tensor([1]))[0][0]
        seed_host("sample", 5, epoch, 1)
        reference = after(before(decoded(data.path(1))))
        is_erased = (reference == 0).all(0)
        assert 0.01 < is_erased.float().mean() < 0.5
        torch.testing.assert_close(ours[:, ~is_erased], reference[:, ~is_erased], rtol=0, atol=1e-5)
        assert ours[:, is_erased].abs().max() < 0.51 / 255 / min(std)  # of a grey level: files stay uint8
    transform = v2.Compose([v2.Resize(36, mode), v2.CenterCrop(28)])
    assert torch.equal(sample(val, 1), transform(decoded(val.path(1)))) and val.cacheable


def test_sizes_of_files_are_checked_before_they_are_transformed(tmp_path):
    """With image_size auto all files have one size; training images may still get another one."""
    for split in ("train", "val"):
        save_images(tmp_path / split, {"cat": 1, "dog": 1}, size=12)
    save_images(tmp_path / "val", {"dog": 1}, size=(12, 13))
    config = folder_config(tmp_path, augment="resized_crop", train_size=8)
    data, val = create_dataset(config, "train"), create_dataset(config, "val")
    assert (
        data[1][0].shape == (3, 8, 8)
        and val[0][0].shape == (3, 12, 12)
        and resolve_auto_fields(config, data).image_size == 12
    )
    with pytest.raises(
        UserError, match=r"dog/000.png has 13x12 pixels, but .* 12x12\. Resize all images with --image_size N"
    ):
        val[1]


@pytest.mark.parametrize("name", FILE_SETTINGS)
def test_settings_of_image_files_are_rejected_for_data_in_memory(name):
    values = {"crop_scale": ".1,1", "crop_ratio": "1,1", "auto_augment": "ra", "random_erase": 0.1}
    config = TrainingConfig(**{name: values.get(name, "nearest" if name == "interpolation" else 16)})
    problem = rf"--{name} {getattr(config, name)} works only with image files\. Leave out --{name}, or use"
    with pytest.raises(UserError, match=problem):
        create_dataset(config, "train")


@pytest.mark.parametrize("name", ["synthetic", "cifar10"])
def test_resized_crops_of_data_in_memory_are_rejected(monkeypatch, name):
    monkeypatch.setattr(dataset, "_cifar10", dataset._synthetic)
    with pytest.raises(UserError, match=r"--augment resized_crop needs image files, .*\. Use --augment crop"):
        create_dataset(TrainingConfig(dataset=name, augment="resized_crop"), "train")
    assert create_dataset(TrainingConfig(image_size=80, dataset_size=10), "train").augment == "crop"  # auto


def test_dataset_size_takes_a_seeded_subset(tmp_path):
    save_images(tmp_path / "train", {"cat": 6, "dog": 6})
    whole = create_dataset(folder_config(tmp_path), "train")
    sets = [take_subset(whole, 5, seed) for seed in (1, 1, 2)]
    assert [len(subset) for subset in sets] == [5] * 3 and sets[0].indices == sets[1].indices != sets[2].indices
    assert sets[0].targets.tolist() == [whole[k][1] for k in sets[0].indices] and sets[0].classes == whole.classes
    assert torch.equal(sets[0][2][0], whole[sets[0].indices[2]][0])
    assert take_subset(whole, 0, seed=1) is whole
    with pytest.raises(UserError, match="--dataset_size must be at most 12, the size of the training set, got 99."):
        take_subset(whole, 99, seed=1)


def test_data_sets_keep_their_samples_in_tensors_and_arrays(tmp_path):
    """A list of Python's integers takes up to 36 bytes a sample, and forked workers copy it."""
    save_images(tmp_path / "train", {"cat": 30, "dog": 30})
    for whole in (create_dataset(folder_config(tmp_path), "train"), SyntheticImageDataset(60, image_size=8)):
        for data in (whole, take_subset(whole, 40, seed=1)):
            assert len(data.targets) == len(data)
            assert not [name for name, value in vars(data).items() if isinstance(value, list) and len(value) > 10]


def listed_folders(flags):
    """How many folders this rank listed to load the data, its number of samples, a path and the listing's hashes."""
    listed = []
    sys.addaudithook(lambda event, args: listed.append(args[0]) if event in ("os.scandir", "os.listdir") else None)
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)
    listed.clear()
    sets = load_data(dataset, config, ctx)
    train_set = sets.train
    count = len([path for path in listed if isinstance(path, str | Path) and str(path).startswith(config.data_dir)])
    cleanup_distributed()
    return count, len(train_set), train_set.path(6), (train_set.fingerprint, sets.provenance["content"])


@pytest.mark.guarantee("data-once")
def test_an_image_folder_is_listed_by_one_rank(tmp_path):
    """Also with names that are not UTF-8 or contain a space or a line break. Sizes need not match at a resume."""
    names = [f"class{k:02d}" for k in range(12)]
    for split in ("train", "val"):
        save_images(tmp_path / split, dict.fromkeys(names, 2))
    odd = os.fsencode(tmp_path / "train/class03/000") + b" \n\xff.png"
    os.rename(tmp_path / "train/class03/000.png", odd)
    ranks = run_ranks(3, listed_folders, ["--dataset", "imagefolder", "--data_dir", str(tmp_path), "--backend", "gloo"])
    counts, *same = zip(*ranks, strict=True)
    assert counts[0] >= 24 and counts[1] == counts[2] <= 10
    paths = [path for name in names for path in sorted((tmp_path / "train" / name).iterdir())]
    names = [b"\0" + os.fsencode(f"{path.parent.name}/{path.name}") for path in paths]
    rows = [b"%b %d" % (name, path.stat().st_size) for name, path in zip(names, paths, strict=True)]
    hashes = [hashlib.sha256(data).hexdigest() for data in (b"".join(names), b"".join(rows) + b"\0")]
    assert same == [(24,) * 3, (paths[6],) * 3, ((hashes[0], hashes[1][:16]),) * 3]


def truncate(path):
    path.write_bytes(path.read_bytes()[:40])


def leave_one_class(root):
    for name in ("dog", "eel"):
        shutil.rmtree(root / "train" / name)


@pytest.mark.parametrize(
    ("spoil", "changes", "pattern"),
    [
        (leave_one_class, {}, r"only one class, cat\. Put two or more"),
        (lambda root: (root / "val/emu").mkdir(), {}, r"val/emu is a class that is not in .*\. Use the same"),
        (
            lambda root: truncate(root / "train/cat/000.png"),
            {},
            r"cat/000.png \(class cat\) cannot be read as an image .*\. Replace",
        ),
        (
            lambda root: save_images(root / "train", {"cat": 1}, size=(8, 9)),
            {},
            r"is not square .9x8 pixels.\. Resize all",
        ),
        (lambda root: None, {"in_channels": 4}, "--in_channels must be 1 or 3 for image files, got 4."),
    ],
)
def test_image_folders_that_cannot_be_used_are_rejected(tmp_path, spoil, changes, pattern):
    """More cases, on every rank: test_refused_data.py."""
    for split in ("train", "val"):
        save_images(tmp_path / split, {"cat": 2, "dog": 2, "eel": 2})
    spoil(tmp_path)
    config = folder_config(tmp_path, **changes)
    with pytest.raises(UserError, match=pattern):
        create_dataset(config, "train")
        create_dataset(config, "val")
