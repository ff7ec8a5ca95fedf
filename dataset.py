"""The data, yours to change. The training loop uses three functions.

create_dataset(config, split)   the data set of "train", "val" or "test"; None if there is no such split
is_prepared(config)             whether the data is ready for create_dataset
prepare_data(config)            downloads or unpacks the data if needed; called on one rank per file system

A data set has `__len__` and `__getitem__`, which is seeded per sample and epoch: any torchvision transform is
reproducible as it is. docs/reference.md lists what else it may have: collate, device_transform, epoch_order, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from config import TrainingConfig, UserError, unless_auto
from utils.data.loader import create_distributed_dataloader
from utils.example.augment import choose
from utils.example.choices import DATASET_CHANGES, DATASETS, PUBLISHED_WEIGHTS
from utils.example.cifar10 import cifar10_folder, download_cifar10, read_cifar10
from utils.example.images import InMemoryImages, check_labels
from utils.rng import derive_seed

# create_distributed_dataloader is published under the name of this module, too
__all__ = ["SyntheticImageDataset", "create_dataset", "create_distributed_dataloader", "is_prepared", "prepare_data"]

SYNTHETIC_SAMPLES = 5_000
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)


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
        for chunk, label in zip(images.split(256), labels.split(256), strict=True):  # floats of a few samples at a time
            noise = torch.randn(chunk.shape, generator=generator)
            pixels = 128 + 20 * patterns[label] + 45 * noise
            chunk.copy_(pixels.clamp_(0, 255))
        classes = [f"class_{k}" for k in range(num_classes)]
        super().__init__(
            images,
            labels,
            classes,
            mean=(0.5,) * in_channels,
            std=(0.2,) * in_channels,
            split=split,
        )


def is_prepared(config: TrainingConfig) -> bool:
    """Return whether the data, and published weights for `--init_from`, are there. Every rank calls it."""
    return not _downloads(config)


def prepare_data(config: TrainingConfig) -> None:
    """Download what is missing to config.data_dir, completely or not at all. Raises UserError."""
    for download in _downloads(config):
        download()


def _downloads(config: TrainingConfig) -> list[Callable[[], None]]:
    """Return a function for each download that is missing."""
    missing: list[Callable[[], None]] = []
    folder = Path(config.data_dir)
    if config.dataset == "cifar10" and not cifar10_folder(folder).exists():
        missing.append(partial(download_cifar10, folder))
    weights = PUBLISHED_WEIGHTS.get(config.init_from)
    if weights and not weights.file(config).exists():
        missing.append(partial(weights.download, config))
    return missing


def create_dataset(config: TrainingConfig, split: str) -> Dataset | None:
    """Return the data set of a split, or None if there is no such split. Raises UserError if it cannot be used."""
    create: dict[str, Callable[..., Any]] = {"synthetic": _synthetic, "cifar10": _cifar10, **DATASETS}
    dataset = create[config.dataset](config, split)
    if dataset is None:
        return None
    if split == "train" and not dataset.checks_labels:
        check_labels(dataset, config)
    for change in DATASET_CHANGES:
        change(dataset, config, split)
    if split == "train":
        dataset.augment = choose(config.augment, dataset.image_size, dataset.in_memory)
        if dataset.augment == "resized_crop":
            dataset.augment = "none"  # the workers make resized crops
    return dataset


def _synthetic(config: TrainingConfig, split: str) -> SyntheticImageDataset | None:
    if split not in ("train", "val"):
        return None
    samples = config.dataset_size or SYNTHETIC_SAMPLES
    if split == "val":
        samples = math.ceil(samples / 5)
    return SyntheticImageDataset(
        samples,
        num_classes=unless_auto(config.num_classes, 10),
        in_channels=unless_auto(config.in_channels, 3),
        image_size=unless_auto(config.image_size, 32),
        seed=config.seed,
        split=split,
    )


def _cifar10(config: TrainingConfig, split: str) -> InMemoryImages | None:
    if split not in ("train", "val"):
        return None
    if config.in_channels not in ("auto", 3) or config.image_size not in ("auto", 32):
        raise UserError(
            "--dataset cifar10 has 3 channels and 32x32 pixels. Leave --in_channels and --image_size at auto."
        )
    images, labels, classes = read_cifar10(Path(config.data_dir), is_train=split == "train")
    return InMemoryImages(images, labels, classes, mean=CIFAR_MEAN, std=CIFAR_STD, split=split)
