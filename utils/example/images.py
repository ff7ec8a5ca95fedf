"""The base classes of the image sets of dataset.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from config import TrainingConfig, UserError, unless_auto
from utils.example.augment import augment_images, normalize


class ImageDataset(Dataset):
    """The base of the image sets: uint8 images, augmented and normalized on the device, a batch at a time."""

    cacheable = True  # __getitem__ draws nothing: random transforms run on the device
    in_memory = False
    split = "train"
    augment = "none"  # on the device: none or crop
    # mixes training batches: of images, labels, the number of classes and a seed
    mixing: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]] | None = None
    copies = 1  # of each image in an epoch: repeated augmentation
    checks_labels = False  # whether reading the labels has already checked them
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
        if self.mixing:
            return (*batch, int(torch.randint(2**62, ())))
        return tuple(batch)

    def device_transform(self, batch: tuple[Any, ...], seed: int, epoch: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B, C, H, W] and labels -> float [B, C, image_size, image_size] and labels int64 [B], or if batches are
        mixed float [B, num_classes]."""
        images, labels, *mix_seed = batch
        images = augment_images(images, self.augment, self.image_size, seed, epoch, indices, len(self) * self.copies)
        images = normalize(images, self.mean, self.std)
        if self.mixing:
            return self.mixing(images, labels, self.num_classes, *mix_seed)
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
        self.images = images
        self.labels = labels
        self.classes = classes
        self.split = split
        self.targets = labels
        self.image_size = images.shape[-1]
        self.mean = torch.tensor(mean)
        self.std = torch.tensor(std)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.images.index_select(0, chosen), self.labels.index_select(0, chosen)  # faster than images[chosen]


def check_labels(dataset: ImageDataset, config: TrainingConfig) -> None:
    """Raises UserError if the data has more classes than num_classes, or a label outside of them."""
    classes = unless_auto(config.num_classes, dataset.num_classes)
    if dataset.num_classes > classes:
        raise UserError(
            f"--num_classes must be at least {dataset.num_classes}, the number of classes in the data, got {classes}."
            " Give that number, or leave out --num_classes."
        )
    labels = getattr(dataset, "labels", torch.empty(0))  # a set of folders has none: its labels are the folders
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()
    if wrong:
        sample = wrong[0]
        raise UserError(
            f"Sample {sample} has the label {labels[sample]}, which is outside the {classes} classes."
            " Fix the label, or give another --num_classes."
        )
