"""Images with their predicted and true class below them."""

from __future__ import annotations

import torch
from torch import Tensor


def label_pictures(images: Tensor, predicted: list[int], true: list[int]) -> Tensor:
    """uint8 [B, 3, 144, 128]: each image, and below it both classes, in green if they are equal and else in red.

    images: [B, C, H, W] with 1 or 3 channels and values of any range, which becomes 0 to 255.
    """
    from PIL import Image, ImageDraw  # installed with tensorboard

    images = images.float()
    low = images.amin((1, 2, 3), keepdim=True)
    high = images.amax((1, 2, 3), keepdim=True)
    scaled = (images - low) / (high - low).clamp(min=1e-6) * 255
    pixels = scaled.byte().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu()
    shown = []
    for image, guess, label in zip(pixels, predicted, true, strict=True):
        picture = Image.new("RGB", (128, 144), "white")
        picture.paste(Image.fromarray(image.numpy()).resize((128, 128), Image.Resampling.NEAREST))
        color = "green" if guess == label else "red"
        ImageDraw.Draw(picture).text((4, 130), f"{guess}, true {label}", fill=color)
        # a bytearray, since frombuffer warns about memory that cannot be written
        flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        shown.append(flat.view(144, 128, 3).permute(2, 0, 1))
    return torch.stack(shown)
