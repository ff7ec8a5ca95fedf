"""Image folders for tests."""

from pathlib import Path

import torch
from PIL import Image


def save_images(folder: Path, classes: dict[str, int], size: int | tuple[int, int] = 8, seed: int = 0) -> None:
    """Write <folder>/<class>/<n>.png: random images per class, whose mean colour depends on the class."""
    generator = torch.Generator().manual_seed(seed)
    height, width = (size, size) if isinstance(size, int) else size
    for label, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for k in range(count):
            image = torch.randint(0, 100, (3, height, width), generator=generator, dtype=torch.uint8)
            image[label % 3] += 120
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / name / f"{k:03d}.png")


def folder_of_images(root, classes=("cat", "dog"), count=6):
    """Write train/ and val/ with `count` images per class; returns the flags that read them."""
    for split in ("train", "val"):
        save_images(root / split, dict.fromkeys(classes, count))
    return ["--dataset", "imagefolder", "--data_dir", str(root), "--num_workers", "1"]
