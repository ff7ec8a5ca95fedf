"""The data, yours to change. The training loop uses three functions.

create_dataset(config, split)   the data set of "train", "val" or "test"; None if there is no such split
is_prepared(config)             whether the data is ready for create_dataset
prepare_data(config)            downloads or unpacks the data if needed; called on one rank per file system

A data set has `__len__` and `__getitem__`, which is seeded per sample and epoch: any torchvision transform is
reproducible as it is. docs/reference.md lists what else it may have: collate, device_transform, epoch_order, ...
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from config import TrainingConfig, UserError, unless_auto
from utils.data.loader import create_distributed_dataloader
from utils.example.augment import augment_images, choose, normalize
from utils.example.cifar10 import cifar10_folder, download_cifar10, read_cifar10
from utils.extras.images.files import (  # extra: images
    classes_of,
    images_in,
    kind_of,
    list_folder,
    log_listed,
    read_image,
)
from utils.extras.images.lists import list_csv, rows_of  # extra: images
from utils.extras.images.mixing import mix, repeated_order  # extra: images
from utils.extras.images.pretrained import download_weights, weights_file  # extra: images
from utils.extras.images.transforms import STATISTICS, expected_by, file_transform, sizes_of  # extra: images
from utils.rng import derive_seed

__all__ = ["SyntheticImageDataset", "create_dataset", "create_distributed_dataloader", "is_prepared", "prepare_data"]

SYNTHETIC_SAMPLES = 5_000
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
OF_FILES = (  # extra: images
    *("crop_scale", "crop_ratio", "auto_augment", "random_erase"),
    *("train_size", "resize_size", "interpolation"),
)


class ImageDataset(Dataset):
    """The base of the image sets: uint8 images, augmented and normalized on the device, a batch at a time."""

    cacheable = True  # random transforms run on the device
    in_memory = False
    split = "train"
    augment = "none"  # on the device: none or crop
    # alpha of mixup and CutMix, and classes  # extra: images
    mixing: tuple[float, float, int | str] | None = None  # extra: images
    copies = 1
    checks_labels = False  # when they are read
    image_size: int
    classes: list[str]
    targets: Tensor  # int64 [N]
    mean: Tensor  # [C], of images in [0, 1]
    std: Tensor

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def in_channels(self) -> int:
        return len(self.mean)

    def __len__(self) -> int:
        return len(self.targets)

    def collate(self, samples: Any) -> tuple[Any, ...]:
        """Images, labels and, if batches are mixed, a seed for that: a function of the samples and the epoch."""
        batch = samples if self.in_memory else default_collate(samples)  # __getitems__ already returns a batch
        if self.mixing:  # extra: images
            return (*batch, int(torch.randint(2**62, ())))
        return tuple(batch)

    def device_transform(self, batch: tuple[Any, ...], seed: int, epoch: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B, C, H, W] and labels -> float [B, C, image_size, image_size] and labels int64 [B], or if batches are
        mixed float [B, num_classes]."""
        images, labels, *mix_seed = batch
        images = augment_images(images, self.augment, self.image_size, seed, epoch, indices, len(self) * self.copies)
        images = normalize(images, self.mean, self.std)
        if self.mixing:  # extra: images
            mixup, cutmix, classes = self.mixing
            return mix(images, labels, mixup, cutmix, unless_auto(classes, self.num_classes), *mix_seed)
        return images, labels


class InMemoryImages(ImageDataset):
    """Images in one tensor, fetched a micro-batch at a time. images: uint8 [N, C, size, size]; labels: int64 [N]."""

    in_memory = True

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        classes: list[str],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        split: str,
    ) -> None:
        self.images, self.labels, self.classes, self.split = images, labels, classes, split
        self.targets = labels
        self.image_size = images.shape[-1]
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.images.index_select(0, chosen), self.labels.index_select(0, chosen)  # faster than images[chosen]


class SyntheticImageDataset(InMemoryImages):
    """A smooth pattern per class plus noise per sample, so that a model can learn and accuracy is meaningful.

    Sets with the same seed share the patterns; `split` seeds the samples.
    """

    def __init__(
        self,
        num_samples: int = SYNTHETIC_SAMPLES,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        seed: int = 0,
        split: str = "train",
    ) -> None:
        generator = torch.Generator().manual_seed(derive_seed("patterns", seed))
        coarse = torch.randn(num_classes, in_channels, 4, 4, generator=generator)
        patterns = F.interpolate(coarse, image_size, mode="bilinear", align_corners=False)
        generator.manual_seed(derive_seed("synthetic", seed, split))
        labels = torch.arange(num_samples) % num_classes
        images = torch.empty(num_samples, in_channels, image_size, image_size, dtype=torch.uint8)
        for some, label in zip(images.split(256), labels.split(256), strict=True):  # floats of a few samples at a time
            noise = torch.randn(some.shape, generator=generator)
            some.copy_((128 + 20 * patterns[label] + 45 * noise).clamp_(0, 255))
        classes = [f"class_{k}" for k in range(num_classes)]
        super().__init__(images, labels, classes, (0.5,) * in_channels, (0.2,) * in_channels, split)


class ImageFolderDataset(ImageDataset):  # extra: images
    """Images below <folder>/<class>/, by class and path, decoded on access. `load_data` lists them once per file
    system.

    Args:
        folder: of a split.
        config: the size of the files may be "auto"; then they have image_size, and another one is an error.
        image_size: height and width of the model input in pixels.
    """

    has_sizes = True  # the listing has those of the files
    left_out: Counter[str] = Counter()  # suffixes of other files, on the rank that has listed them
    example = ""
    log_listed = staticmethod(log_listed)

    def __init__(self, folder: Path, classes: list[str], config: TrainingConfig, image_size: int) -> None:
        self.folder, self.classes, self.split, self.image_size = folder, classes, folder.stem, image_size
        self.mean, self.std = map(torch.tensor, STATISTICS[unless_auto(config.in_channels, 3)])
        self._is_resized = config.image_size != "auto"
        self._transform, is_random = file_transform(config, image_size, self.split == "train")
        self.cacheable = not is_random

    @functools.cached_property
    def listing(self) -> bytes:
        """<class>/<path below it> and the bytes of each file, between zeros. Raises UserError for an empty class."""
        listing, others = list_folder(self.folder, self.classes)
        self.left_out, self.example = Counter(kind_of(each.name) for each in others), others[0].path if others else ""
        return listing

    def use_listing(self, listing: bytes) -> None:
        self.listing = listing  # from `load_data`, which lists once per file system

    @functools.cached_property
    def _zeros(self) -> Tensor:
        return (torch.frombuffer(bytearray(self.listing), dtype=torch.uint8) == 0).nonzero().flatten()

    def path(self, index: int) -> Path:
        start, end = self._zeros[index : index + 2].tolist()
        return self.folder / os.fsdecode(self.listing[start + 1 : end].rpartition(b" ")[0])

    @functools.cached_property
    def targets(self) -> Tensor:  # type: ignore[override]  # a cached property can be set, too
        found = Counter(match[1] for match in re.finditer(rb"\0([^/]+)/", self.listing))
        return torch.repeat_interleave(torch.tensor([found[os.fsencode(name)] for name in self.classes]))

    def class_of(self, index: int) -> str:
        """The class of a sample, for messages."""
        return self.classes[int(self.targets[index])]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of what must match at a resume: names and labels, and not the sizes."""
        rows = re.finditer(rb"\0[^\0]+(?= )" if self.has_sizes else rb"[^\0]+", self.listing)
        digest = hashlib.sha256()
        for row in rows:
            digest.update(row[0])
        return digest.hexdigest()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """uint8 [C, size, size] and the label. Raises UserError for a corrupt file or one of a wrong size."""
        path, size, label = self.path(index), self.image_size, int(self.targets[index])
        image = read_image(path, self.in_channels, self.class_of(index))
        height, width = image.shape[1:]
        if not self._is_resized and (height, width) != (size, size):
            raise UserError(
                f"{path}: has {width}x{height} pixels, others {size}x{size}; resize all with --image_size N"
            )
        return self._transform(image), label


class CsvDataset(ImageFolderDataset):  # extra: images
    """Images that a CSV file names, each with its label: <data_dir>/<split>.csv. Read once per file system, too."""

    has_sizes = False  # reading the list touches no image
    checks_labels = True

    def __init__(self, file: Path, classes: list[str], config: TrainingConfig, image_size: int) -> None:
        super().__init__(file, classes, config, image_size)
        del self.classes  # they are in the listing
        self.folder, self.file, self.limit = file.parent, file, config.num_classes

    @functools.cached_property
    def listing(self) -> bytes:
        return list_csv(self.file, self.limit)

    @functools.cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # as above
        return json.loads(self.listing.rpartition(b"\0")[2])

    @functools.cached_property
    def targets(self) -> Tensor:  # type: ignore[override]  # as above
        return torch.frombuffer(array("q", map(int, re.findall(rb" (\d+)\0", self.listing))), dtype=torch.int64)

    def class_of(self, index: int) -> str:
        return f"{super().class_of(index)}, {self.file}, line {index + 2}"


def is_prepared(config: TrainingConfig) -> bool:
    """Whether the data, and the weights of `--init_from torchvision`, are there; called on every rank."""
    return not _downloads(config)


def prepare_data(config: TrainingConfig) -> None:
    """Download what is missing to config.data_dir, completely or not at all. Raises UserError."""
    for download in _downloads(config):
        download()


def _downloads(config: TrainingConfig) -> list[Callable[[], None]]:
    missing: list[Callable[[], None]] = []
    if config.dataset == "cifar10" and not cifar10_folder(Path(config.data_dir)).exists():
        missing.append(lambda: download_cifar10(Path(config.data_dir)))
    if config.init_from == "torchvision" and not weights_file(config).exists():  # extra: images
        missing.append(lambda: download_weights(config))
    return missing


def create_dataset(config: TrainingConfig, split: str) -> Dataset | None:
    """The data set of a split; None if there is no such split. Raises UserError if the data cannot be used."""
    create: dict[str, Callable[..., Any]] = {"synthetic": _synthetic, "cifar10": _cifar10}
    create |= {"imagefolder": _image_files, "csv": _image_files}  # extra: images
    dataset = create[config.dataset](config, split)
    if dataset is not None and (expected := expected_by(config)):  # extra: images
        dataset.mean, dataset.std = torch.tensor(expected.mean), torch.tensor(expected.std)
    if dataset is not None and split == "train":
        if not dataset.checks_labels:
            _check_labels(dataset, config)
        for name in OF_FILES if dataset.in_memory else ():  # extra: images
            if (value := getattr(config, name)) != getattr(TrainingConfig, name):
                raise UserError(f"{name}={value}: is for image files; leave it out, or use --dataset imagefolder")
        kind = choose(config.augment, dataset.image_size, dataset.in_memory)
        dataset.augment = "none" if kind == "resized_crop" else kind  # resized crops are made by the workers
        if config.mixup_alpha or config.cutmix_alpha:  # extra: images
            dataset.mixing = (config.mixup_alpha, config.cutmix_alpha, config.num_classes)
        if config.augment_repeats > 1:  # extra: images
            dataset.copies, dataset.with_replacement = config.augment_repeats, True
            dataset.epoch_order = functools.partial(repeated_order, dataset.copies, config.batch_size)
    return dataset


def _synthetic(config: TrainingConfig, split: str) -> SyntheticImageDataset | None:
    if split not in ("train", "val"):
        return None
    auto = {"num_classes": 10, "in_channels": 3, "image_size": 32}
    sizes = {name: unless_auto(getattr(config, name), size) for name, size in auto.items()}
    samples = config.dataset_size or SYNTHETIC_SAMPLES
    count = samples if split == "train" else math.ceil(samples / 5)
    return SyntheticImageDataset(count, **sizes, seed=config.seed, split=split)


def _cifar10(config: TrainingConfig, split: str) -> InMemoryImages | None:
    if split not in ("train", "val"):
        return None
    if config.in_channels not in ("auto", 3) or config.image_size not in ("auto", 32):
        raise UserError("dataset=cifar10: has 3 channels and 32x32 pixels; leave in_channels and image_size at auto")
    return InMemoryImages(*read_cifar10(Path(config.data_dir), split == "train"), CIFAR_MEAN, CIFAR_STD, split)


def _image_files(config: TrainingConfig, split: str) -> ImageFolderDataset | None:  # extra: images
    """<data_dir>/train, val and test, or <data_dir>/train.csv, ... If only one of val and test exists, it is "val"."""
    root, suffix = Path(config.data_dir), ".csv" if config.dataset == "csv" else ""
    held_out = [name for name in ("val", "test") if (root / f"{name}{suffix}").exists()]
    if split == "val" and held_out:
        split = held_out[0]
    elif split == "test" and len(held_out) < 2:
        return None
    source = root / f"{split}{suffix}"
    if not source.exists() and split != "train":
        return None
    classes = [] if suffix else classes_of(root, split)
    channels = unless_auto(config.in_channels, 3)
    if channels not in STATISTICS:
        raise UserError(f"in_channels={channels}: images have 1 or 3 channels; give 1 or 3")
    sizes: dict[str, Any] = sizes_of(config)
    config = dataclasses.replace(config, **sizes)
    size = config.image_size
    if not isinstance(size, int):  # that of the first image
        if suffix:
            first = root / next(rows_of(root / "train.csv"))[0]
        else:
            first = Path(images_in(root / "train" / classes[0], must_exist=True)[0][0])
        size, width = read_image(first, channels).shape[1:]
        if size != width:
            raise UserError(f"{first}: is not square ({width}x{size} pixels); resize all to N x N with --image_size N")
    dataset = (CsvDataset if suffix else ImageFolderDataset)(source, classes, config, size)
    vars(dataset).update(sizes)
    return dataset


def _check_labels(dataset: ImageDataset, config: TrainingConfig) -> None:
    classes = unless_auto(config.num_classes, dataset.num_classes)
    if dataset.num_classes > classes:
        raise UserError(
            f"num_classes={classes}: the data has {dataset.num_classes} classes; give that number or leave it auto"
        )
    labels = getattr(dataset, "labels", torch.empty(0))  # in a folder, labels are classes
    for sample in ((labels < 0) | (labels >= classes)).nonzero().flatten()[:1].tolist():
        raise UserError(
            f"dataset: sample {sample} has label {labels[sample]}, outside the {classes} classes;"
            " fix the label or give num_classes"
        )
