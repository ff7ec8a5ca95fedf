"""Augmentation of batches of uint8 images, on the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from utils.data.transfer import cache_per_stream
from utils.rng import draw_integers, sample_draws
from utils.settings.errors import UserError

MAX_TABLE = 64e6  # bytes on the device, for the crops of an epoch
LARGEST_CROP_SIZE = 64  # pixels; above it "auto" means resized_crop for image files


def choose(augment: str, image_size: int, in_memory: bool = False) -> str:
    """What `--augment` means for images of this size: none, crop or resized_crop. Raises UserError."""
    if in_memory and augment == "resized_crop":
        raise UserError(f"--augment {augment} needs image files, but these data are in memory. Use --augment crop.")
    if augment == "auto":
        return "crop" if in_memory or image_size <= LARGEST_CROP_SIZE else "resized_crop"
    return augment


def augment_images(images: Tensor, kind: str, size: int, seed: int, epoch: int, indices: Tensor, n: int = 0) -> Tensor:
    """uint8 [B, C, size, size], also returned. kind: none, or crop, which fills a border of size / 8 with black. n: all
    indices are below it, so that the crops of an epoch can be drawn at once; 0 if that is not known."""
    if kind == "none":
        return images
    if kind != "crop":
        raise ValueError(f"The kind must be none or crop, got {kind!r}. Use create_file_transform for other kinds.")
    padding, width = max(1, size // 8), images.shape[-1]
    if 0 < 6 * n <= MAX_TABLE:
        crops = crops_of_epoch(seed, epoch, n, padding, width, images.device).index_select(0, indices)
    else:
        crops = crops_of(sample_draws(seed, epoch, indices, 3), padding, width)
    return crop_and_flip(images, crops, padding)


def crops_of(draws: Tensor, padding: int, width: int) -> Tensor:
    """32-bit draws [B, 3] -> int16 [B, 3]: first row and column in the padded image, step to the next column (+-1)."""
    top, left = draw_integers(draws[:, :2], 2 * padding + 1).unbind(1)
    flip = draw_integers(draws[:, 2], 2)
    return torch.stack([top, left + flip * (width - 1), 1 - 2 * flip], 1).short()


@functools.partial(cache_per_stream, max_entries=2)  # the next epoch's first batches are prefetched
def crops_of_epoch(seed: int, epoch: int, n: int, padding: int, width: int, device: torch.device) -> Tensor:
    """`crops_of` all samples: for each batch it would launch 27 kernels."""
    chunks = torch.arange(n, device=device).split(2**17)  # bounds what is in memory beside the table
    return torch.cat([crops_of(sample_draws(seed, epoch, indices, 3), padding, width) for indices in chunks])


_cached_arange = cache_per_stream(lambda count, device: torch.arange(count, device=device))


def crop_and_flip(images: Tensor, crops: Tensor, padding: int) -> Tensor:
    """Shift each image by up to `padding` pixels (filled with black) and mirror half of them, in one gather.

    He et al., "Deep residual learning for image recognition", section 4.2. The result is channels_last.

    images: uint8 [B, C, H, W]; crops: from `crops_of`.
    """
    batch, _, height, width = images.shape
    batch_index, row_offsets, column_offsets = (_cached_arange(size, images.device) for size in (batch, height, width))
    rows, columns = crops[:, :1] + row_offsets, torch.addcmul(crops[:, 1:2], crops[:, 2:], column_offsets)
    padded = F.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
    return padded[batch_index[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(images / 255 - mean) / std in torch's default float type; mean and std have shape [C] and are in [0, 1]."""
    dtype = torch.get_default_dtype()
    scale, shift = _scale_and_shift(mean, std, (mean._version, std._version), dtype, images.device)
    return ((images if images.dtype is torch.uint8 else images.to(dtype)) * scale).sub_(shift)


@cache_per_stream  # the tensors mean and std: by identity and version
def _scale_and_shift(mean: Tensor, std: Tensor, _: Any, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """On the device once: a copy would wait for all work queued there."""
    pair = [1 / (255 * std), mean / std]
    return [tensor.to(device, torch.promote_types(tensor.dtype, dtype)).view(-1, 1, 1) for tensor in pair]
