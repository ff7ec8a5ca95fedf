"""A file that appears under its final name only when it is whole, and is still there after a power cut."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".tmp"


def replace_file(
    path: Path, write: Callable[[BinaryIO], None], may_appear: Callable[[], None] | None = None, is_flushed: bool = True
) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, rename it, flush the folder.

    Args:
        may_appear: called directly before the rename; what it raises ends all.
        is_flushed: False leaves it to the system when the file reaches the disk.

    Raises:
        OSError: when any of that failed; `path` is then as it was, and the temporary file is gone.
    """
    temporary = temporary_of(path, os.getpid())
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            if is_flushed:
                os.fsync(file.fileno())
        if may_appear:
            may_appear()
        temporary.replace(path)
        if is_flushed:
            _flush_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # the folder may be what failed
            temporary.unlink(missing_ok=True)
        raise


def temporary_of(path: Path, pid: int) -> Path:
    """What this process fills before it gets its name; ranks that fail together may write the same file."""
    return path.with_name(f"{path.name}.{pid}{TEMPORARY}")


def replace_json(path: Path, value: Any, is_flushed: bool = True) -> None:
    """As `replace_file`."""
    data = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write(data.encode()), is_flushed=is_flushed)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
