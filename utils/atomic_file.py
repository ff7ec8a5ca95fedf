"""A file that appears under its final name only when it is whole, and is still there after a power cut."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".tmp"


def replace_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, rename it, flush the folder.

    Raises:
        OSError: when any of that failed; `path` is then as it was, and the temporary file is gone.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")  # ranks that fail together may write the same file
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_json(path: Path, value: Any) -> None:
    """As `replace_file`; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write(data.encode()))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
