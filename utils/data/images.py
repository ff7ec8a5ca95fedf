"""Image files: finding, decoding and resizing them, and preparing CIFAR-10."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import torch
from torch import Tensor

from config import UserError
from utils.files import temporary_of

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of resources; the file may be fine
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")


def images_in(folder: Path) -> list[Path]:
    """The image files of a folder, by name."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)


def classes_of(root: Path, split: str) -> list[str]:
    """The class folders of <root>/train. Raises UserError if <root>/<split> has others."""
    train = root / "train"
    classes = sorted(path.name for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
    if not classes:
        raise UserError(f"data_dir={root}: has no {train}/<class>/ folders; give the folder that holds train/ and val/")
    if len(classes) == 1:
        raise UserError(f"data_dir={root}: has only one class, {classes[0]}; put two or more into {train}")
    for name in classes:
        if not images_in(train / name):
            raise UserError(f"{train / name}: has no images ({', '.join(SUFFIXES)}); add some or delete the folder")
    unknown = sorted({path.name for path in (root / split).iterdir() if path.is_dir()} - set(classes))
    if unknown:
        raise UserError(f"{root / split / unknown[0]}: is a class that is not in {train}; use the same classes in both")
    return classes


def read_image(path: Path, channels: int, size: int = 0) -> Tensor:
    """uint8 [channels, H, W]; with a size, resized by its shorter side and center-cropped to [channels, size, size].

    Raises UserError if the file, <class>/<name>, cannot be read as an image.
    """
    from PIL import Image
    from torchvision.transforms.v2 import functional as transforms

    try:
        with Image.open(path) as file:  # reads only the header
            is_plain = file.format in ("JPEG", "MPO") and file.mode in ("RGB", "L")[channels == 1 :]
            image = _decode_jpeg(path, channels) if is_plain else None
            if image is None:
                image = transforms.pil_to_tensor(file.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # for a broken file PIL raises OSError, SyntaxError, ValueError, struct.error, ...
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in SHORTAGES:
            raise
        raise UserError(
            f"{path}: cannot be read as an image (class {path.parent.name}; {error}); replace or delete it"
        ) from None
    if size and image.shape[1:] != (size, size):
        image = transforms.center_crop(transforms.resize(image, [size]), [size])
    return image


def _decode_jpeg(path: Path, channels: int) -> Tensor | None:
    """uint8 [channels, H, W] in a third of PIL's time. None if torchvision cannot decode it, e.g. if truncated."""
    try:
        from torchvision.io import decode_jpeg  # may be missing in a version after 0.29

        return decode_jpeg(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)).expand(channels, -1, -1)
    except (ImportError, AttributeError, RuntimeError):
        return None


def cifar10_folder(data_dir: Path) -> Path:
    """The folder of torchvision's files: data_dir itself if they were put there, else data_dir/cifar10."""
    return data_dir if (data_dir / "cifar-10-batches-py").is_dir() else data_dir / "cifar10"


def download_cifar10(data_dir: Path) -> None:
    """Unpack CIFAR-10 into data_dir, completely or not at all; an archive that is already there is used."""
    root = cifar10_folder(data_dir)
    partial = temporary_of(root)  # another job may do the same
    partial.mkdir(parents=True)
    archive = root.with_name("cifar-10-python.tar.gz")
    try:
        if archive.exists():
            shutil.copy(archive, partial)
        from torchvision.datasets import CIFAR10

        CIFAR10(str(partial), download=True)
        if not root.exists():
            partial.rename(root)
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"dataset=cifar10: cannot be downloaded ({error}); put {archive.name} into {data_dir}"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_cifar10(data_dir: Path, is_train: bool) -> tuple[Tensor, Tensor, list[str]]:
    """uint8 [N, 3, 32, 32], int64 [N] and the class names. Raises UserError if the files cannot be read."""
    root = cifar10_folder(data_dir)
    try:
        from torchvision.datasets import CIFAR10

        source = CIFAR10(str(root), train=is_train)
    except (ImportError, RuntimeError) as error:
        raise UserError(f"{root}: cannot be read ({error}); delete it to download it again") from None
    return torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(source.targets), source.classes
