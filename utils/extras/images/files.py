"""Image files: finding and decoding them."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.files import is_transient
from utils.logger import LOGGER_NAME, RANK_0_WARNING, format_count
from utils.packages import import_optional
from utils.settings.errors import UserError

# what torchvision's ImageFolder reads
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
HIDDEN_SUFFIX = "hidden or of tools"  # by a dot, or one of these names of systems and tools
TOOL_FOLDERS = {
    *"__MACOSX __pycache__ @eaDir @Recycle #recycle $RECYCLE.BIN lost+found".split(),
    "System Volume Information",
}
VALIDATION_NAME_PATTERN = r"(val|valid|validat(e|ion)|eval|evaluat(e|ion)|dev|devel|development|hold.?out|held.?out)"
VALIDATION_NAME_PATTERN += r"([-_ ]?(set|data|images|split|\d+))?"  # names that other projects use
MIN_BRIGHT_VALUE = 2**12  # 16-bit images with no value above it lose most of their levels
MAX_FILES_SAMPLED = 64  # files of a set, whose headers are read
# the warnings that this process has logged, and the highest value of 16-bit images
_seen_in_images: dict[str, int] = {}


def log_file_listing(sets: Sequence[Any]) -> None:
    """Log how many files of all these listings are left out, if any, and what reading their images loses."""
    from PIL import Image

    _seen_in_images.clear()
    kinds: Counter[str] = sum((dataset.left_out for dataset in sets), Counter())
    if kinds:
        example = next(dataset.example for dataset in sets if dataset.example)
        text = "The run ignores %s of other types than images: %s, e.g. %s."
        logging.getLogger(LOGGER_NAME).info(
            text, format_count(kinds.total(), "file"), _describe_suffixes(kinds), example
        )
    for path in (
        dataset.path(k) for dataset in sets for k in range(0, len(dataset), max(1, len(dataset) // MAX_FILES_SAMPLED))
    ):
        with suppress(Exception), Image.open(path) as file:  # an unreadable one ends the run when it is needed
            _convert_to_8_bits(file, path)
    if 0 < (peak := _seen_in_images.get("peak", 0)) < MIN_BRIGHT_VALUE:
        text = "The 16-bit images have values up to %d of 65535, of which reading keeps %d levels. Scale the values up."
        logging.getLogger(LOGGER_NAME).warning(text, peak, peak // 256 + 1)


def list_image_folder(folder: Path, classes: list[str]) -> tuple[bytes, list[os.DirEntry]]:
    """<class>/<path below it> and the bytes of each image below <folder>/<class>/, between zeros; and other files.

    Raises:
        UserError: if there are no images, or none of a class of train.
    """
    rows: list[bytes] = []
    other_files: list[os.DirEntry] = []
    start, is_train = len(os.path.join(folder, "")), folder.name == "train"
    names = set(classes)  # a list would compare each folder with all classes
    if is_train:
        check_splits(folder)
    for name in classes:
        images, non_images = find_images(folder / name, must_exist=is_train)
        other_files += non_images
        rows += [os.fsencode(f"{image.path[start:]} {image.stat().st_size}") for image in images]
    with os.scandir(folder) as entries:
        other_files += [entry for entry in entries if entry.name not in names]
    if not rows:
        raise _explain_no_images(folder, "<class>/ folders with images", other_files)
    return b"\0".join([b"", *rows, b""]), other_files


def check_splits(train: Path) -> None:
    """Raises UserError if there is no val beside train, but a folder or file of a similar name. Else logs those."""
    val = train.with_name(f"val{train.suffix}")
    with os.scandir(train.parent) as entries:
        names = [entry.name for entry in entries if entry.is_dir() != bool(train.suffix)]
    similar = re.compile(VALIDATION_NAME_PATTERN + re.escape(train.suffix), re.IGNORECASE)
    for path in (train.with_name(name) for name in sorted(names) if similar.fullmatch(name)):
        if not val.exists():
            raise UserError(f"{path} would not be read. Rename it to {val.name}.")
        if not path.samefile(val):
            logging.getLogger(LOGGER_NAME).info("The run reads %s, and ignores %s.", val, path)


def find_images(folder: Path, must_exist: bool = False) -> tuple[list[os.DirEntry], list[os.DirEntry]]:
    """The images below a folder, those that torchvision's ImageFolder finds, in its order, but for hidden files and
    those of tools; and the rest. Raises UserError if there must be images and are none."""
    files = sorted(_walk_files(folder), key=lambda entry: os.path.split(entry.path)) if folder.is_dir() else []
    images = [file for file in files if file_suffix(file.name) in IMAGE_SUFFIXES]
    non_images = [file for file in files if file_suffix(file.name) not in IMAGE_SUFFIXES]
    if must_exist and not images:
        raise _explain_no_images(folder, "images", non_images)
    return images, non_images


def _walk_files(folder: str | Path) -> Iterator[os.DirEntry]:
    """All files below a folder, links followed, and the hidden folders."""
    with os.scandir(folder) as entries:
        children = [*entries]
    for entry in children:
        if not is_visible_folder(entry):
            yield entry
        elif entry.is_symlink() and Path(folder).resolve().is_relative_to(Path(entry).resolve()):
            raise UserError(f"{entry.path} is a link to a folder that contains this link. Remove the link.")
        else:
            yield from _walk_files(entry.path)


def is_visible_folder(entry: os.DirEntry) -> bool:
    """Whether it is a folder that is read."""
    return entry.is_dir() and file_suffix(entry.name) != HIDDEN_SUFFIX


def file_suffix(name: str) -> str:
    """The suffix of a file, in lower case, or HIDDEN_SUFFIX."""
    return HIDDEN_SUFFIX if name.startswith(".") or name in TOOL_FOLDERS else os.path.splitext(name)[1].lower()


def _explain_no_images(folder: Path, missing: str, other_files: list[os.DirEntry]) -> UserError:
    contents = (
        f", only {_describe_suffixes(Counter(file_suffix(entry.name) for entry in other_files))}" if other_files else ""
    )
    return UserError(
        f"{folder} has no {missing} ({', '.join(IMAGE_SUFFIXES)}){contents}. Add some, or delete the folder."
    )


def _describe_suffixes(kinds: Counter[str]) -> str:
    return ", ".join(f"{number:,} {kind or 'without a suffix'}" for kind, number in kinds.most_common(5))


def list_classes(root: Path, split: str) -> list[str]:
    """The class folders of <root>/train. Raises UserError if <root>/<split> has others."""
    train = root / "train"
    classes = sorted(entry.name for entry in os.scandir(train) if is_visible_folder(entry)) if train.is_dir() else []
    if not classes:
        text = f"--data_dir {root} has no {train}/<class>/ folders."
        raise UserError(f"{text} Give the folder that holds train/ and val/.")
    if len(classes) == 1:
        text = f"--data_dir {root} has only one class, {classes[0]}."
        raise UserError(f"{text} Put two or more classes into {train}.")
    unknown = sorted({entry.name for entry in os.scandir(root / split) if is_visible_folder(entry)} - set(classes))
    if unknown:
        text = f"{root / split / unknown[0]} is a class that is not in {train}."
        raise UserError(f"{text} Use the same classes in both folders.")
    return classes


def read_image(path: Path, channels: int, class_name: str = "") -> Tensor:
    """uint8 [channels, H, W]: of 16 bits the upper 8, transparent pixels on white, and not turned as EXIF says, which
    torchvision ignores too.

    Raises UserError, which names the class (by default the folder), if it cannot be read.
    """
    transforms = import_optional("Reading images", "torchvision.transforms.v2.functional")
    image_files = import_optional("Reading images", "PIL.Image")
    try:
        with image_files.open(path) as file:  # reads only the header
            is_plain = file.format in ("JPEG", "MPO") and file.mode in ("RGB", "L")[channels == 1 :]
            image = _decode_jpeg(path, channels) if is_plain else None
            if image is None:
                image = transforms.pil_to_tensor(
                    _convert_to_8_bits(file, path).convert("L" if channels == 1 else "RGB")
                )
    except Exception as error:  # for a broken file PIL raises OSError, SyntaxError, ValueError, struct.error, ...
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and is_transient(error)):
            raise
        raise UserError(
            f"{path} (class {class_name or path.parent.name}) cannot be read as an image ({error})."
            " Replace or delete the file."
        ) from None
    return image


def _convert_to_8_bits(file: Any, path: Path) -> Any:
    """A Pillow image that `convert` neither clips nor turns black: 16 bits to 8, and transparent pixels on white.

    Raises ValueError for other integers and floats.
    """
    import numpy
    from PIL import Image

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format in ("PNG", "PPM")):
        values = numpy.asarray(file)
        if (transparent := file.info.get("transparency")) is not None:
            values = numpy.where(values == transparent, 2**16 - 1, values)
        _seen_in_images["peak"] = max(_seen_in_images.get("peak", 0), int(values.max()))
        return Image.fromarray((values >> 8).astype("uint8"))
    if file.mode in ("I", "F"):
        raise ValueError(f"mode {file.mode} has no known range: save the image with 8 or 16 bits per channel")
    if not file.has_transparency_data:
        return file
    file = (file.convert("LA") if file.mode == "La" else file).convert("RGBA")
    if file.getextrema()[3][0] == 255:
        return file
    file = Image.alpha_composite(Image.new("RGBA", file.size, "white"), file).convert("RGB")
    texts = ["%s has transparent pixels. Transparent pixels become white, here and in all other images."]
    if not any(low < high for low, high in file.getextrema()):
        texts.append("%s has one colour on white. If the image shows more, put it on another background.")
    for text in texts:
        if text not in _seen_in_images:
            _seen_in_images[text] = 1
            logging.getLogger(LOGGER_NAME).log(RANK_0_WARNING, text, path)
    return file


def _decode_jpeg(path: Path, channels: int) -> Tensor | None:
    """uint8 [channels, H, W] in a third of PIL's time. None if torchvision cannot decode it, e.g. if truncated."""
    try:
        from torchvision.io import decode_jpeg  # may be missing in a version after 0.29

        return decode_jpeg(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)).expand(channels, -1, -1)
    except (ImportError, AttributeError, RuntimeError):
        return None
