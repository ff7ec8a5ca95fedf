"""Augmentation and normalization of batches of uint8 images on the device, with random draws per sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from utils.rng import draw_integers, draw_uniform, sample_draws

LARGEST_CROP_SIZE = 64  # pixels; above it "auto" means resized_crop
RESIZE_MARGIN = 1.15  # images for resized_crop are loaded this much larger


def choose(augment: str, image_size: int) -> str:
    """What `--augment auto` means for images of this size."""
    return ("crop" if image_size <= LARGEST_CROP_SIZE else "resized_crop") if augment == "auto" else augment


def augment_images(images: Tensor, kind: str, size: int, seed: int, epoch: int, indices: Tensor) -> Tensor:
    """uint8 [B, C, H, W] -> uint8 or float32 [B, C, size, size], in [0, 255]. kind: none, crop or resized_crop."""
    if kind == "none":
        return center_crop(images, size)
    draws = sample_draws(seed, epoch, indices, 5)
    if kind == "crop":
        return crop_and_flip(images, draws, padding=max(1, size // 8))
    return resized_crop_and_flip(images, draws, size)


def crop_and_flip(images: Tensor, draws: Tensor, padding: int) -> Tensor:
    """Shift each image by up to `padding` pixels (filled with black) and mirror half of them, in one gather.

    He et al., "Deep residual learning for image recognition", section 4.2. The result is channels_last.

    Args:
        images: uint8 [B, C, H, W].
        draws: int64 [B, >= 3], 32-bit numbers.
    """
    batch, _, height, width = images.shape
    device = images.device
    top, left = (draw_integers(draws[:, k], 2 * padding + 1) for k in (0, 1))
    flip = draw_integers(draws[:, 2], 2).bool()
    rows = top[:, None] + torch.arange(height, device=device)
    ahead = torch.arange(width, device=device)
    columns = left[:, None] + torch.where(flip[:, None], ahead.flip(0), ahead)
    padded = F.pad(images, (padding,) * 4)
    sample = torch.arange(batch, device=device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def resized_crop_and_flip(images: Tensor, draws: Tensor, size: int) -> Tensor:
    """Crop a box of 25 to 100 % of the area and aspect ratio 3/4 to 4/3 (clipped to the image), resize it and mirror
    half of the images.

    Szegedy et al., "Going deeper with convolutions", section 6, with one draw per box.

    Args:
        images: uint8 [B, C, H, W].
        draws: int64 [B, 5], 32-bit numbers.

    Returns:
        float32 [B, C, size, size] in [0, 255].
    """
    batch, _, height, width = images.shape
    area, ratio, x, y, mirror = draw_uniform(draws).unbind(1)
    area = 0.25 + 0.75 * area
    ratio = torch.exp((2 * ratio - 1) * math.log(4 / 3))
    # the box in units of the image, whose corners are at -1 and 1
    box_width = torch.sqrt(area * ratio * height / width).clamp(max=1)
    box_height = torch.sqrt(area / ratio * width / height).clamp(max=1)
    center_x = (2 * x - 1) * (1 - box_width)
    center_y = (2 * y - 1) * (1 - box_height)
    sign = 1 - 2 * (mirror < 0.5).float()
    # not F.affine_grid: that is a matrix product, and TF32 would shift pixels
    places = (2 * torch.arange(size, device=images.device, dtype=torch.float32) + 1) / size - 1
    columns = center_x[:, None] + (box_width * sign)[:, None] * places
    rows = center_y[:, None] + box_height[:, None] * places
    shape = (batch, size, size)
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], 3)
    return F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)


def center_crop(images: Tensor, size: int) -> Tensor:
    """[B, C, H, W] -> [B, C, size, size]; images of that size are unchanged."""
    top, left = (images.shape[2] - size) // 2, (images.shape[3] - size) // 2
    return images[:, :, top : top + size, left : left + size]


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(images / 255 - mean) / std in torch's default float type; mean and std have shape [C] and are in [0, 1]."""
    # non_blocking: a blocking copy to the device would wait for all work queued there
    scale = (1 / (255 * std)).to(images.device, non_blocking=True).view(-1, 1, 1)
    shift = (mean / std).to(images.device, non_blocking=True).view(-1, 1, 1)
    return images.to(torch.get_default_dtype()) * scale - shift
