"""The sets of image files, and what the settings of this extra change in any image set of the example."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import TrainingConfig, UserError, unless_auto
from utils.example.images import ImageDataset
from utils.extras.images.csv_lists import list_csv_images, read_csv_rows
from utils.extras.images.files import (
    file_suffix,
    find_images,
    list_classes,
    list_image_folder,
    log_file_listing,
    read_image,
)
from utils.extras.images.mixing import Mixing, create_repeated_order
from utils.extras.images.transforms import (
    MEAN_AND_STD,
    create_file_transform,
    find_pretrained_transforms,
    resolve_auto_sizes,
)

FILE_SETTINGS = (
    *("crop_scale", "crop_ratio", "auto_augment", "random_erase"),
    *("train_size", "resize_size", "interpolation"),
)


class ImageFolderDataset(ImageDataset):
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
    log_file_listing = staticmethod(log_file_listing)

    def __init__(self, folder: Path, classes: list[str], config: TrainingConfig, image_size: int) -> None:
        self.folder, self.classes, self.split, self.image_size = folder, classes, folder.stem, image_size
        self.mean, self.std = map(torch.tensor, MEAN_AND_STD[unless_auto(config.in_channels, 3)])
        self._is_resized = config.image_size != "auto"
        self._transform, is_random = create_file_transform(config, image_size, self.split == "train")
        self.cacheable = not is_random

    @functools.cached_property
    def listing(self) -> bytes:
        """<class>/<path below it> and the bytes of each file, between zeros. Raises UserError for an empty class."""
        listing, other_files = list_image_folder(self.folder, self.classes)
        self.left_out = Counter(file_suffix(file.name) for file in other_files)
        self.example = other_files[0].path if other_files else ""
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
        counts = Counter(match[1] for match in re.finditer(rb"\0([^/]+)/", self.listing))
        return torch.repeat_interleave(torch.tensor([counts[os.fsencode(name)] for name in self.classes]))

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
                f"{path} has {width}x{height} pixels, but other images have {size}x{size}. Resize all images with"
                " --image_size N."
            )
        return self._transform(image), label


class CsvDataset(ImageFolderDataset):
    """Images that a CSV file names, each with its label: <data_dir>/<split>.csv. Read once per file system, too."""

    has_sizes = False  # reading the list touches no image
    checks_labels = True

    def __init__(self, file: Path, classes: list[str], config: TrainingConfig, image_size: int) -> None:
        super().__init__(file, classes, config, image_size)
        del self.classes  # they are in the listing
        self.folder, self.file, self.limit = file.parent, file, config.num_classes

    @functools.cached_property
    def listing(self) -> bytes:
        return list_csv_images(self.file, self.limit)

    @functools.cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # as above
        return json.loads(self.listing.rpartition(b"\0")[2])

    @functools.cached_property
    def targets(self) -> Tensor:  # type: ignore[override]  # as above
        return torch.frombuffer(array("q", map(int, re.findall(rb" (\d+)\0", self.listing))), dtype=torch.int64)

    def class_of(self, index: int) -> str:
        return f"{super().class_of(index)}, line {index + 2} of {self.file}"


def image_files(config: TrainingConfig, split: str) -> ImageFolderDataset | None:
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
    classes = [] if suffix else list_classes(root, split)
    channels = unless_auto(config.in_channels, 3)
    if channels not in MEAN_AND_STD:
        raise UserError(f"--in_channels must be 1 or 3 for image files, got {channels}.")
    sizes: dict[str, Any] = resolve_auto_sizes(config)
    config = dataclasses.replace(config, **sizes)
    size = config.image_size
    if not isinstance(size, int):  # that of the first image
        if suffix:
            first = root / next(read_csv_rows(root / "train.csv"))[0]
        else:
            first = Path(find_images(root / "train" / classes[0], must_exist=True)[0][0])
        size, width = read_image(first, channels).shape[1:]
        if size != width:
            text = f"{first} is not square ({width}x{size} pixels)."
            raise UserError(f"{text} Resize all images to N x N pixels with --image_size N.")
    dataset = (CsvDataset if suffix else ImageFolderDataset)(source, classes, config, size)
    vars(dataset).update(sizes)
    return dataset


def apply_image_settings(dataset: Any, config: TrainingConfig, split: str) -> None:
    """Change a new set as the settings of this extra, and torchvision's weights of the model, say.

    Raises:
        UserError: if a setting is for image files, and the set is in memory.
    """
    expected = find_pretrained_transforms(config)
    if expected:
        dataset.mean = torch.tensor(expected.mean)
        dataset.std = torch.tensor(expected.std)
    if split != "train":
        return
    if dataset.in_memory:
        _check_file_settings(config)
    if config.mixup_alpha or config.cutmix_alpha:
        dataset.mixing = Mixing(config.mixup_alpha, config.cutmix_alpha, config.num_classes)
    if config.augment_repeats > 1:
        dataset.copies = config.augment_repeats
        dataset.with_replacement = True
        dataset.epoch_order = functools.partial(create_repeated_order, config.augment_repeats, config.batch_size)


def _check_file_settings(config: TrainingConfig) -> None:
    for name in FILE_SETTINGS:
        value = getattr(config, name)
        if value != getattr(TrainingConfig, name):
            text = f"--{name} {value} works only with image files."
            raise UserError(f"{text} Leave out --{name}, or use --dataset imagefolder.")
