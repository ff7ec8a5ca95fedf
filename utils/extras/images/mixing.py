"""Mixup, CutMix and repeated augmentation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from config import unless_auto
from utils.packages import import_optional
from utils.rng import derive_seed


@functools.cache
def _create_mixing(mixup: float, cutmix: float, num_classes: int) -> Any:
    v2 = import_optional("--mixup_alpha or --cutmix_alpha", "torchvision.transforms.v2")
    kinds = [
        kind(alpha=alpha, num_classes=num_classes) for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix)) if alpha
    ]
    return v2.RandomChoice(kinds)


def mix_batch(
    images: Tensor, labels: Tensor, mixup: float, cutmix: float, num_classes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """torchvision's MixUp or CutMix (0: without), or one of both, of a batch; its draws are a function of the seed.

    Returns images, and the share of each class: float [B, classes].
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        images, shares = _create_mixing(mixup, cutmix, num_classes)(images, labels)
    return images, shares.to(images.dtype)


@dataclass(frozen=True)
class Mixing:
    """Mixup and CutMix of training batches: each is an alpha, 0 for off. num_classes: auto for the data's."""

    mixup: float
    cutmix: float
    num_classes: int | str

    def __call__(self, images: Tensor, labels: Tensor, classes_in_data: int, seed: int) -> tuple[Tensor, Tensor]:
        return mix_batch(images, labels, self.mixup, self.cutmix, unless_auto(self.num_classes, classes_in_data), seed)


def create_repeated_order(repeats: int, group_size: int, seed: int, epoch: int, n: int) -> Tensor:
    """Repeated augmentation (Hoffer et al., "Augment your batch", 2020): int64 [n], index + n * number of the copy.

    Over `repeats` epochs each copy of each image comes once. `group_size` images come once before their next copies
    do, so that micro-batches of that size hold different images.
    """
    cycle, part = divmod(epoch, repeats)
    images = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed("order", seed, "repeats", cycle)))
    last = max(n // group_size - 1, 0) * group_size  # the last group also has the rest
    copies = n * torch.arange(repeats).unsqueeze(1)
    groups = images[:last].view(-1, 1, group_size), images[last:]
    return torch.cat([(indices + copies).flatten() for indices in groups])[part * n : (part + 1) * n]
