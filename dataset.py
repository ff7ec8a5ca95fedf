"""The data: yours to change. The training loop knows three functions and, of a data set, what the table says.

create_dataset(config, split)   the data set of "train", "val" or "test"; None where there is no such split
is_prepared(config)             whether create_dataset finds its data
prepare_data(config)            where not: download, unpack; called on one rank per file system

A data set is map-style (`__len__`, `__getitem__`, which raises UserError where a sample is corrupt). All else is
optional:
    __getitems__(indices)                               fetch a whole micro-batch at once
    collate(samples)                                    samples -> batch (default: torch's default_collate)
    device_transform(batch, seed, epoch, indices)       the batch, on the device -> what compute_loss takes; its random
    draws
                                                        are functions of (seed, epoch, index): utils.rng.sample_draws
    weights                                             how much each sample counts in the loss (default: 1), its tokens
    say
    epoch_order(seed, epoch, n)                         an order of its own: n indices, each once
    with_replacement                                    True: epoch_order may repeat some and leave out others
    in_memory                                           True: no workers are needed
    cacheable                                           True: a sample is the same in every epoch, and a batch is the
    rows of its
                                                        samples, all of one shape: --cache may keep them decoded
    num_classes, in_channels, image_size                what `auto` stands for in the config
    targets                                             labels, checked against num_classes
    split, classes, mean, std, fingerprint              for records, exports and the check on resume
"""

from __future__ import annotations

import errno
import functools
import hashlib
import math
import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from config import TrainingConfig, UserError
from utils.data.augment import RESIZE_MARGIN, augment_images, choose, normalize
from utils.data.loader import create_distributed_dataloader
from utils.rng import derive_seed

__all__ = ["SyntheticImageDataset", "create_dataset", "create_distributed_dataloader", "is_prepared", "prepare_data"]

SYNTHETIC_SAMPLES = 5_000
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of the machine: no fault of the file that is being read
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageDataset(Dataset):
    """What all image sets here share: uint8 images that are augmented and normalised on the device, a batch at a
    time."""

    cacheable = True  # what is random comes later, on the device
    split = "train"
    augment = "none"  # none, crop or resized_crop
    image_size: int
    classes: list[str]
    targets: list[int]
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

    def device_transform(
        self, batch: tuple[Tensor, Tensor], seed: int, epoch: int, indices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """uint8 [B, C, H, W] and labels -> float [B, C, image_size, image_size] and labels int64 [B]."""
        images, labels = batch
        images = augment_images(images, self.augment, self.image_size, seed, epoch, indices)
        return normalize(images, self.mean, self.std), labels


class InMemoryImages(ImageDataset):
    """Images in one tensor, fetched a micro-batch at a time. images: uint8 [N, C, size, size]; labels: int64 [N]."""

    in_memory = True

    def __init__(
        self, images: Tensor, labels: Tensor, classes: list[str], mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        self.images, self.labels, self.classes = images, labels, classes
        self.targets = labels.tolist()
        self.image_size = images.shape[-1]
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.images.numpy().tobytes() + self.labels.numpy().tobytes()).hexdigest()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        # several times as fast as images[chosen]
        return self.images.index_select(0, chosen), self.labels.index_select(0, chosen)

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch  # __getitems__ has made it

    def subset(self, chosen: Tensor) -> None:
        self.images, self.labels = self.images[chosen], self.labels[chosen]
        self.targets = self.labels.tolist()


class SyntheticImageDataset(InMemoryImages):
    """Each class is a smooth pattern of its own, each sample that pattern under noise: a model learns it, and accuracy
    means something.

    Sets of one seed share the patterns; `split` decides over the samples.
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
        for some, label in zip(images.split(256), labels.split(256), strict=True):  # floats of a few samples at a time
            noise = torch.randn(some.shape, generator=generator)
            some.copy_((128 + 20 * patterns[label] + 45 * noise).clamp_(0, 255))
        super().__init__(
            images, labels, [f"class_{k}" for k in range(num_classes)], (0.5,) * in_channels, (0.2,) * in_channels
        )
        self.split = split


class ImageFolderDataset(ImageDataset):
    """Images in <folder>/<class>/*, decoded when they are asked for.

    Args:
        image_size: pixels of what the model gets.
        load_size: pixels the images are read with, at least image_size.
        is_resized: whether images of another size are brought to load_size (else they are refused).
    """

    def __init__(
        self, folder: Path, classes: list[str], channels: int, image_size: int, load_size: int, is_resized: bool
    ) -> None:
        self.classes, self.split = classes, folder.name
        self.image_size, self._load_size, self._is_resized = image_size, load_size, is_resized
        self.paths = [path for name in classes for path in _images_in(folder / name)]
        labels = {name: label for label, name in enumerate(classes)}
        self.targets = [labels[path.parent.name] for path in self.paths]
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.25,) * channels)
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    @functools.cached_property
    def fingerprint(self) -> str:
        names = "\n".join(f"{path.parent.name}/{path.name} {path.stat().st_size}" for path in self.paths)
        return hashlib.sha256(names.encode()).hexdigest()

    def subset(self, chosen: Tensor) -> None:
        self.paths = [self.paths[k] for k in chosen.tolist()]
        self.targets = [self.targets[k] for k in chosen.tolist()]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """uint8 [C, load_size, load_size] and the label. Raises UserError for a file that is no image,
        for another size."""
        path, size = self.paths[index], self._load_size
        image = read_image(path, self.in_channels, size if self._is_resized else 0)
        height, width = image.shape[1:]
        if (height, width) != (size, size):
            raise UserError(
                f"{path}: has {width}x{height} pixels, others {size}x{size}; give --image_size N to resize all to it"
            )
        return image, self.targets[index]


def read_image(path: Path, channels: int, size: int = 0) -> Tensor:
    """uint8 [channels, H, W]; with a size, the shorter side is brought to it and the middle cut out: [channels, size,
    size].

    Raises UserError when the file, <class>/<name>, cannot be read as an image.
    """
    from PIL import Image
    from torchvision.transforms.v2 import functional as transforms

    try:
        with Image.open(path) as file:  # it reads no more than the header here
            is_plain = file.format in ("JPEG", "MPO") and file.mode in ("RGB", "L")[channels == 1 :]
            image = _decode_jpeg(path, channels) if is_plain else None
            if image is None:
                image = transforms.pil_to_tensor(file.convert("L" if channels == 1 else "RGB"))
    # a broken file makes PIL raise much: OSError, SyntaxError, ValueError, struct.error, ...
    except Exception as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in SHORTAGES:
            raise
        raise UserError(
            f"{path}: cannot be read as an image (class {path.parent.name}; {error}); replace or delete it"
        ) from None
    if size and image.shape[1:] != (size, size):
        image = transforms.center_crop(transforms.resize(image, [size]), [size])
    return image


def _decode_jpeg(path: Path, channels: int) -> Tensor | None:
    """uint8 [channels, H, W] in a third of the time that PIL takes. None where torchvision cannot: the file is cut
    short, say."""
    try:
        from torchvision.io import decode_jpeg  # a later one than 0.29 may lack it

        return decode_jpeg(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)).expand(channels, -1, -1)
    except (ImportError, AttributeError, RuntimeError):
        return None


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES)


def is_prepared(config: TrainingConfig) -> bool:
    """Whether the data is where create_dataset reads it; asked on every rank."""
    return config.dataset != "cifar10" or _cifar_root(config).exists()


def prepare_data(config: TrainingConfig) -> None:
    """Bring the data to config.data_dir, whole or not at all. It runs on one rank per file system; the others wait.
    Raises UserError."""
    root = _cifar_root(config)
    partial = root.with_name("cifar10.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a preparation that was killed
    partial.mkdir(parents=True)
    given = root.with_name("cifar-10-python.tar.gz")
    if given.exists():
        shutil.copy(given, partial)
    try:
        from torchvision.datasets import CIFAR10

        CIFAR10(str(partial), download=True)
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"dataset=cifar10: cannot be fetched ({error}); put {given.name} into {config.data_dir}"
        ) from None
    partial.rename(root)


def create_dataset(config: TrainingConfig, split: str) -> Dataset | None:
    """The data set of a split; None where there is no such split. Raises UserError when the data cannot be used."""
    build = {"synthetic": _synthetic, "cifar10": _cifar10, "imagefolder": _image_folder}[config.dataset]
    dataset = build(config, split)
    if dataset is not None and split == "train":
        _take_subset(dataset, config)
        dataset.augment = choose(config.augment, dataset.image_size)
    return dataset


def _synthetic(config: TrainingConfig, split: str) -> SyntheticImageDataset | None:
    if split == "test":
        return None  # one held-out part, "val"
    auto = {"num_classes": 10, "in_channels": 3, "image_size": 32}
    sizes = {
        name: default if getattr(config, name) == "auto" else getattr(config, name) for name, default in auto.items()
    }
    samples = config.dataset_size or SYNTHETIC_SAMPLES
    return SyntheticImageDataset(
        samples if split == "train" else math.ceil(samples / 5), **sizes, seed=config.seed, split=split
    )


def _cifar_root(config: TrainingConfig) -> Path:
    """Where torchvision's files are: in data_dir itself, if somebody put them there, else in a folder of their own."""
    root = Path(config.data_dir)
    return root if (root / "cifar-10-batches-py").is_dir() else root / "cifar10"


def _cifar10(config: TrainingConfig, split: str) -> InMemoryImages | None:
    if split == "test":
        return None  # one held-out part, "val"
    if config.in_channels not in ("auto", 3) or config.image_size not in ("auto", 32):
        raise UserError("dataset=cifar10: has 3 channels and 32 pixels; leave in_channels and image_size auto")
    root = _cifar_root(config)
    try:
        from torchvision.datasets import CIFAR10

        source = CIFAR10(str(root), train=split == "train")
    except (ImportError, RuntimeError) as error:
        raise UserError(f"{root}: cannot be read ({error}); delete it, and it is fetched anew") from None
    images = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()
    dataset = InMemoryImages(images, torch.tensor(source.targets), source.classes, CIFAR_MEAN, CIFAR_STD)
    dataset.split = split
    return dataset


def _image_folder(config: TrainingConfig, split: str) -> ImageFolderDataset | None:
    """<data_dir>/train, val and test. Where only one of val and test is there, it is what "val" gives."""
    root = Path(config.data_dir)
    train = root / "train"
    held_out = [name for name in ("val", "test") if (root / name).is_dir()]
    if split == "val" and held_out:
        split = held_out[0]
    elif split == "test" and len(held_out) < 2:
        return None
    if not (root / split).is_dir() and split != "train":
        return None
    classes = sorted(path.name for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
    if not classes:
        raise UserError(
            f"data_dir={root}: has no {train}/<class>/ folders; give the folder that holds train/, and val/ or test/"
        )
    if len(classes) == 1:
        raise UserError(
            f"data_dir={root}: has one class alone, {classes[0]}; a classifier needs two, each a folder in {train}"
        )
    for name in classes:
        if not _images_in(train / name):
            raise UserError(
                f"{train / name}: holds no image ({', '.join(IMAGE_SUFFIXES)}); put some there or delete the folder"
            )
    unknown = sorted({path.name for path in (root / split).iterdir() if path.is_dir()} - set(classes))
    if unknown:
        raise UserError(f"{root / split / unknown[0]}: is a class that {train} lacks; give both the same classes")
    channels = 3 if config.in_channels == "auto" else config.in_channels
    if channels not in (1, 3):
        raise UserError(f"in_channels={channels}: images are read with 1 channel or 3; give one of these")
    first = _images_in(train / classes[0])[0]
    image = read_image(first, channels)
    height, width = image.shape[1:]
    if config.image_size != "auto":
        size = config.image_size
        is_cropped = choose(config.augment, size) == "resized_crop" and (height, width) != (size, size)
        load_size = round(RESIZE_MARGIN * size) if is_cropped else size
    elif height != width:
        raise UserError(f"{first}: is not square ({width}x{height} pixels); give --image_size N to resize all to N x N")
    else:
        size = load_size = height
    return ImageFolderDataset(root / split, classes, channels, size, load_size, is_resized=config.image_size != "auto")


def _take_subset(dataset: ImageDataset, config: TrainingConfig) -> None:
    """Keep `dataset_size` samples, chosen by the seed."""
    if not config.dataset_size:
        return
    if config.dataset_size > len(dataset):
        raise UserError(
            f"dataset_size={config.dataset_size}: the set has {len(dataset)} samples; give at most as many, or 0"
            " for all"
        )
    generator = torch.Generator().manual_seed(derive_seed("subset", config.seed))
    dataset.subset(torch.randperm(len(dataset), generator=generator)[: config.dataset_size].sort().values)
