"""Image files: finding and decoding them, and preparing CIFAR-10."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import logging
import os
import re
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from config import UserError
from utils.files import may_pass, temporary_of
from utils.logger import NAME, count

# what torchvision's ImageFolder reads
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class Listing:
    """A data set's files: images below <folder>/<class>/, by class and path. A subclass sets `folder` and `classes`."""

    folder: Path
    classes: list[str]
    has_sizes = True
    left_out: Counter[str] = Counter()  # suffixes of other files, on the rank that has listed them
    example = ""

    @functools.cached_property
    def listing(self) -> bytes:
        """<class>/<path below it> and the bytes of each file, between zeros. Raises UserError for an empty class."""
        rows: list[bytes] = []
        others: list[os.DirEntry] = []
        start = len(os.path.join(self.folder, ""))
        for name in self.classes:
            images = images_in(self.folder / name, must_exist=self.folder.name == "train", others=others)
            rows += [os.fsencode(f"{each.path[start:]} {each.stat().st_size}") for each in images]
        self.left_out = Counter(os.path.splitext(each.name)[1].lower() for each in others)
        self.example = others[0].path if others else ""
        return b"\0".join([b"", *rows, b""])

    def use_listing(self, listing: bytes) -> None:
        self.listing = listing  # from `load_data`, which lists once per file system

    @functools.cached_property
    def _zeros(self) -> Tensor:
        return (torch.frombuffer(bytearray(self.listing), dtype=torch.uint8) == 0).nonzero().flatten()

    def path(self, index: int) -> Path:
        start, end = self._zeros[index : index + 2].tolist()
        return self.folder / os.fsdecode(self.listing[start + 1 : end].rpartition(b" ")[0])

    @functools.cached_property
    def targets(self) -> Tensor:
        found = Counter(match[1] for match in re.finditer(rb"\0([^/]+)/", self.listing))
        return torch.repeat_interleave(torch.tensor([found[os.fsencode(name)] for name in self.classes]))

    def class_of(self, index: int) -> str:
        """The class of a sample, for messages."""
        return self.classes[int(self.targets[index])]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of what must match at a resume: names and labels, and not the sizes."""
        digest = hashlib.sha256()
        for row in re.finditer(rb"\0[^\0]+(?= )" if self.has_sizes else rb"[^\0]+", self.listing):
            digest.update(row[0])
        return digest.hexdigest()


class CsvListing(Listing):
    """Images listed in a CSV file, with paths relative to `folder`. A subclass sets `folder`, `file` and `limit`."""

    file: Path
    limit: int | str  # the most classes; auto: any number
    has_sizes = False  # reading the list touches no image

    @functools.cached_property
    def listing(self) -> bytes:
        """<path> and the number of the class, between zeros, then the names of the classes of train.csv as JSON."""
        train = self.file.with_name("train.csv")
        classes = _in_order({label for _, label in rows_of(train)})
        if len(classes) == 1:
            raise UserError(f"{train}: has only one class, {classes[0]}; put two or more into it")
        if isinstance(self.limit, int) and len(classes) > self.limit:
            raise UserError(f"num_classes={self.limit}: {train} has {len(classes)}; give that number or leave it auto")
        numbers, listing = {name: number for number, name in enumerate(classes)}, bytearray()
        for line, (path, label) in enumerate(rows_of(self.file), 2):
            if label not in numbers:
                raise UserError(f"{self.file}, line {line}: has the label {label!r}, which {train} has not; fix it")
            listing += b"\0%b %d" % (os.fsencode(path), numbers[label])
        return bytes(listing + b"\0") + json.dumps(classes).encode()

    @functools.cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # a cached property can be set, too
        return json.loads(self.listing.rpartition(b"\0")[2])

    @functools.cached_property
    def targets(self) -> Tensor:
        return torch.frombuffer(array("q", map(int, re.findall(rb" (\d+)\0", self.listing))), dtype=torch.int64)

    def class_of(self, index: int) -> str:
        return f"{super().class_of(index)}, {self.file}, line {index + 2}"


def rows_of(file: Path) -> Iterator[tuple[str, str]]:
    """The path and the label in each line of a CSV file after its header `path,label`. Raises UserError."""
    line = 1
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened, skipinitialspace=True, strict=True)
            if (header := next(reader, [])) != ["path", "label"]:
                raise UserError(f"{file}, line 1: has the header {','.join(header)!r}; write path,label there")
            for line, row in enumerate(reader, 2):
                if len(row) != 2 or not all(row) or reader.line_num != line or "\0" in row[0]:
                    raise UserError(f"{file}, line {line}: is not a path, a comma and a label; fix or delete the line")
                yield row[0], row[1]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read after line {line} ({error}); fix the file") from None
    if line == 1:
        raise UserError(f"{file}: has no lines after its header; add some, or delete it")


def _in_order(labels: set[str]) -> list[str]:
    """Sorted as numbers if all are, else as text."""
    try:
        return sorted(sorted(labels), key=float)  # of equal numbers the text decides
    except ValueError:
        return sorted(labels)


def images_in(folder: Path, must_exist: bool = False, others: list[os.DirEntry] | None = None) -> list[os.DirEntry]:
    """The images below a folder, those that torchvision's ImageFolder finds, in its order; `others` gets the rest.

    Raises UserError if they must exist and there are none.
    """
    found: list[os.DirEntry] = []
    rest = [] if others is None else others
    for _, files in sorted(_folders(os.fspath(folder)), key=lambda each: each[0]) if folder.is_dir() else ():
        for file in files:
            (found if file.name.lower().endswith(SUFFIXES) else rest).append(file)
    if must_exist and not found:
        raise UserError(f"{folder}: has no images ({', '.join(SUFFIXES)}); add some or delete the folder")
    return found


def _folders(folder: str) -> Iterator[tuple[str, list[os.DirEntry]]]:
    """The folder and all below it, links followed, each with its files by name."""
    with os.scandir(folder) as entries:
        by_name = sorted(entries, key=lambda entry: entry.name)
    yield folder, [entry for entry in by_name if not entry.is_dir()]
    for entry in filter(os.DirEntry.is_dir, by_name):
        if entry.is_symlink() and Path(folder).resolve().is_relative_to(Path(entry).resolve()):
            raise UserError(f"{entry.path}: is a link to a folder that contains it; remove the link")
        yield from _folders(entry.path)


def log_left_out(sets: Sequence[Listing]) -> None:
    """Log how many files of all these sets are left out, if any."""
    suffixes = sum((each.left_out for each in sets), Counter())
    if suffixes:
        kinds = ", ".join(f"{number:,} {suffix or 'without a suffix'}" for suffix, number in suffixes.most_common(5))
        example = next(each.example for each in sets if each.example)
        text = "data: left out %s of other types than images: %s, e.g. %s"
        logging.getLogger(NAME).info(text, count(suffixes.total(), "file"), kinds, example)


def classes_of(root: Path, split: str) -> list[str]:
    """The class folders of <root>/train. Raises UserError if <root>/<split> has others."""
    train = root / "train"
    classes = sorted(entry.name for entry in os.scandir(train) if entry.is_dir()) if train.is_dir() else []
    if not classes:
        raise UserError(f"data_dir={root}: has no {train}/<class>/ folders; give the folder that holds train/ and val/")
    if len(classes) == 1:
        raise UserError(f"data_dir={root}: has only one class, {classes[0]}; put two or more into {train}")
    unknown = sorted({entry.name for entry in os.scandir(root / split) if entry.is_dir()} - set(classes))
    if unknown:
        raise UserError(f"{root / split / unknown[0]}: is a class that is not in {train}; use the same classes in both")
    return classes


def read_image(path: Path, channels: int, class_name: str = "") -> Tensor:
    """uint8 [channels, H, W]. Raises UserError, which names the class (by default the folder), if it cannot be read."""
    from PIL import Image
    from torchvision.transforms.v2 import functional as transforms

    try:
        with Image.open(path) as file:  # reads only the header
            is_plain = file.format in ("JPEG", "MPO") and file.mode in ("RGB", "L")[channels == 1 :]
            image = _decode_jpeg(path, channels) if is_plain else None
            if image is None:
                image = transforms.pil_to_tensor(file.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # for a broken file PIL raises OSError, SyntaxError, ValueError, struct.error, ...
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and may_pass(error)):
            raise
        raise UserError(
            f"{path}: cannot be read as an image (class {class_name or path.parent.name}; {error});"
            " replace or delete it"
        ) from None
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
