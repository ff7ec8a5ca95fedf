"""Lists of images in CSV files: <data_dir>/{train,val,test}.csv with the columns `path,label`."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from utils.extras.images.files import check_splits
from utils.logger import LOGGER_NAME, RANK_0_WARNING, format_count
from utils.settings.errors import UserError

DECIMAL_PATTERN = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)")
MISSING_LABELS = ("nan", "-nan", "none", "null", "na", "n/a", "#n/a", "#na", "<na>", "nat")  # in lower case


def list_csv_images(file: Path, max_classes: int | str) -> bytes:
    """<path> and the number of the class, between zeros, then the names of the classes of train.csv as JSON.

    Args:
        file: <data_dir>/<split>.csv, with paths relative to its folder.
        max_classes: the most classes; auto: any number.

    Raises:
        UserError: for a wrong line or label.
    """
    train, locations = file.with_name("train.csv"), {}
    for line, (_, label) in enumerate(read_csv_rows(train), 2):
        if label not in locations:
            locations[label] = f"line {line} of {train}"
    if file == train:
        check_splits(train)
        check_labels(locations)
    classes = _sort_labels(set(locations))
    if len(classes) == 1:
        raise UserError(f"{train} has only one class, {classes[0]}. Put two or more classes into this file.")
    if isinstance(max_classes, int) and len(classes) > max_classes:
        raise UserError(
            f"--num_classes must be at least {len(classes)}, the number of classes in {train}, got {max_classes}."
            " Give that number, or leave out --num_classes."
        )
    numbers, listing = {name: number for number, name in enumerate(classes)}, bytearray()
    labels: dict[int, int] = {}  # by the hash of the path, which takes fewer bytes
    for line, (path, label) in enumerate(read_csv_rows(file), 2):
        location = f"line {line} of {file}"
        if label not in numbers:
            check_labels(locations | {label: location})
            raise UserError(f"The label {label!r} in {location} does not occur in {train}. Fix the label.")
        listing += b"\0%b %d" % (os.fsencode(path), numbers[label])
        name = os.path.normpath(path)
        if (index := labels.setdefault(hash(name), numbers[label])) != numbers[label]:
            first = next(
                n for n, (other_path, _) in enumerate(read_csv_rows(file), 2) if os.path.normpath(other_path) == name
            )
            raise UserError(
                f"{path} has the label {label!r} in {location}, but {classes[index]!r} in line {first}. Delete one of"
                " these lines."
            )
    if repeated := line - 1 - len(labels):
        text = "%s lists files again, with the same label, in %s."
        logging.getLogger(LOGGER_NAME).log(RANK_0_WARNING, text, file, format_count(repeated, "line"))
    return bytes(listing + b"\0") + json.dumps(classes).encode()


def read_csv_rows(file: Path) -> Iterator[tuple[str, str]]:
    """The path and the label in each line of a CSV file after its header `path,label`. Raises UserError."""
    line, ends = 1, 0  # ends: the first empty line, which only empty ones may follow
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened, skipinitialspace=True, strict=True)
            if (header := next(reader, [])) != ["path", "label"]:
                raise UserError(
                    f"The header of {file} must be path,label, got {','.join(header)!r}. Write path,label into line 1."
                )
            for line, row in enumerate(reader, 2):
                if not "".join(row).strip():
                    ends = ends or line
                    continue
                path, label = row if len(row) == 2 else ("", "")
                if ends or not path or not label.strip() or reader.line_num != line or "\0" in path:
                    text = f"Line {ends or line} of {file} is not a path, a comma and a label."
                    raise UserError(f"{text} Fix or delete this line.")
                yield path, label.strip()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} cannot be read after line {line} ({error}). Fix the file.") from None
    if line == 1 or ends == 2:
        raise UserError(f"{file} has no lines after its header. Add some, or delete the file.")


def check_labels(locations: dict[str, str]) -> None:
    """Raises UserError for two labels that look alike or are one number. locations: the first line of each."""
    texts = [label for label in locations if not DECIMAL_PATTERN.fullmatch(label)]
    if 0 < len(texts) < len(locations) and all(label.lower() in MISSING_LABELS for label in texts):
        text_line, other = locations[texts[0]], next(line for label, line in locations.items() if label not in texts)
        text = f"The label {texts[0]!r} in {text_line} is not a number, but the label in {other} is one."
        raise UserError(f"{text} Fix the label, or delete its line.")
    alike: dict[Any, str] = {}
    in_case: dict[str, str] = {}
    for label, location in locations.items():
        shown = "".join(char for char in label if unicodedata.category(char) != "Cf")  # marks without width
        key = unicodedata.normalize("NFC", " ".join(shown.split())) if texts else Decimal(label)
        if (other := alike.setdefault(key, label)) != label:
            text = f"The label {label!a} in {location} looks like {other!a} in {locations[other]}."
            raise UserError(f"{text} Write both labels alike.")
        if (other := in_case.setdefault(label.casefold(), label)) != label:
            text = "The label %s in %s is another class than %s in %s."
            logging.getLogger(LOGGER_NAME).log(RANK_0_WARNING, text, label, location, other, locations[other])


def _sort_labels(labels: set[str]) -> list[str]:
    """Sorted as numbers if all are, else as text."""
    try:
        return sorted(sorted(labels), key=float)  # of equal numbers the text decides
    except ValueError:
        return sorted(labels)
