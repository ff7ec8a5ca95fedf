"""Files that appear under their final name only when they are whole, and files of JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".tmp"
MAX_WAITING = 100_000  # lines for a disk that does not take them


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
    """As `replace_file`; numbers that are not finite become null."""
    data = json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write(data.encode()), is_flushed=is_flushed)


def finite(value: Any) -> Any:
    """The value with None in place of numbers that are not finite, which JSON has not."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """The dict in a JSON file; an empty one where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LinesFile:
    """A file of lines that grows. What the disk does not take now is written with the next line that it takes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        # only once: where the file is gone, its file system may be, and nothing belongs below a mount point
        self._creates = os.O_CREAT

    def append(self, line: str) -> None:
        """Append the line whole. Never raises because of the disk: training is worth more than a record of it."""
        self._waiting = [*self._waiting[-MAX_WAITING:], f"{line}\n".encode()]
        try:
            if self._creates:
                self._path.parent.mkdir(exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | self._creates, 0o666)
        except OSError:
            return
        self._creates = 0
        try:
            size, data = os.fstat(descriptor).st_size, b"".join(self._waiting)
            if os.write(descriptor, data) == len(data):
                self._waiting = []
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last one that a kill cut short."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file without the records that are not kept."""
    if not path.exists():
        return
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.write_text(
        "".join(json.dumps(record) + "\n" for record in read_lines(path) if is_kept(record)), encoding="utf-8"
    )
    temporary.replace(path)
