"""CIFAR-10: downloading and reading torchvision's files."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from utils.files import temporary_path
from utils.packages import import_optional
from utils.settings.errors import UserError


def cifar10_folder(data_dir: Path) -> Path:
    """The folder of torchvision's files: data_dir itself if they were put there, else data_dir/cifar10."""
    return data_dir if (data_dir / "cifar-10-batches-py").is_dir() else data_dir / "cifar10"


def download_cifar10(data_dir: Path) -> None:
    """Unpack CIFAR-10 into data_dir, completely or not at all; an archive that is already there is used."""
    datasets = import_optional("--dataset cifar10", "torchvision.datasets")
    root = cifar10_folder(data_dir)
    partial = temporary_path(root)  # another job may do the same
    archive = root.with_name("cifar-10-python.tar.gz")
    try:
        partial.mkdir(parents=True)
        if archive.exists():
            shutil.copy(archive, partial)
        datasets.CIFAR10(str(partial), download=True)
        if not root.exists():
            partial.rename(root)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"The data of --dataset cifar10 cannot be downloaded ({error}). Put {archive.name} into {data_dir}"
            " (unpacked, if the folder is read-only), or give another --data_dir."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_cifar10(data_dir: Path, is_train: bool) -> tuple[Tensor, Tensor, list[str]]:
    """uint8 [N, 3, 32, 32], int64 [N] and the class names. Raises UserError if the files cannot be read."""
    datasets = import_optional("--dataset cifar10", "torchvision.datasets")
    root = cifar10_folder(data_dir)
    try:
        source = datasets.CIFAR10(str(root), train=is_train)
    except RuntimeError as error:
        text = f"{root} cannot be read ({error})."
        raise UserError(f"{text} Delete this folder, so that its data are downloaded again.") from None
    return torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(source.targets), source.classes
