"""Files of JSON lines: each line whole or not there, whatever the disk or a kill does meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.atomic_file import TEMPORARY

MOST_KEPT = 100_000  # pieces that wait for a disk that takes them


class AppendedFile:
    """A file that grows. What the disk does not take now is kept, and written with the next piece that it takes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._creates = os.O_CREAT  # once: where the file was and is gone, its file system may be, and nothing belongs below a mount point

    def write(self, piece: bytes) -> None:
        """Append it whole. Never raises for the disk's sake: training is worth more than a record of it."""
        self._waiting = [*self._waiting[-MOST_KEPT:], piece]
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
                os.ftruncate(descriptor, size)  # half a line helps nobody
        except OSError:
            pass
        finally:
            os.close(descriptor)


class LinesFile(AppendedFile):
    """Lines of text."""

    def append(self, line: str) -> None:
        self.write(f"{line}\n".encode())


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
    temporary.write_text("".join(json.dumps(record) + "\n" for record in read_lines(path) if is_kept(record)), encoding="utf-8")
    temporary.replace(path)
