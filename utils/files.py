"""Atomic writes of files, and files of JSON lines."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")

TEMPORARY_SUFFIX = ".tmp"
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")  # on Linux; differs between machines of the same name
PERMANENT_ERRORS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
# EINVAL: a file of wrong content; ENXIO: a socket
PERMANENT_ERRORS |= {errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO}
SECONDS_BETWEEN_TRIES = 1.0
MAX_PENDING_LINES = 100_000  # lines kept while they cannot be written
BLOCK_BYTES = 1 << 18  # bytes of a step back from the end of a file


def is_transient(error: OSError) -> bool:
    """Whether a retry may succeed: the storage failed or something was short, and the file is not wrong."""
    return bool(error.errno) and error.errno not in PERMANENT_ERRORS


def retry(action: Callable[[], T]) -> T:
    """The result of the action, which is tried three times, a second apart, while its errors may pass."""
    for is_last in (False, False, True):
        try:
            return action()
        except OSError as error:
            if is_last or not is_transient(error):
                raise
            time.sleep(SECONDS_BETWEEN_TRIES)
    raise AssertionError


def replace_file(
    path: Path,
    write: Callable[[BinaryIO], object],
    before_rename: Callable[[], object] | None = None,
    fsync: bool = True,
) -> None:
    """Let `write` fill a temporary file next to `path`; fsync it, rename it and fsync the folder.

    Args:
        before_rename: called just before the rename; an exception aborts the write.
        fsync: False leaves it out, so that a crash of the machine may lose the file.

    Raises:
        OSError: if any of this fails; `path` is then unchanged and the temporary file deleted.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        if before_rename:
            before_rename()
        temporary.replace(path)
        if fsync:
            fsync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # the folder itself may be inaccessible
            temporary.unlink(missing_ok=True)
        raise


def temporary_path(path: Path) -> Path:
    """A new name for a temporary file. Several ranks may write `path`, in containers even with equal names and pids."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY_SUFFIX}")


def replace_json(path: Path, value: Any, fsync: bool = True) -> None:
    """`replace_file` with JSON; non-finite numbers become null."""
    data = json.dumps(replace_non_finite(value), indent=2, ensure_ascii=False) + "\n"
    # a byte of a name that is not UTF-8 is a surrogate, which becomes JSON's own \udcXX and is read back as that byte
    replace_file(path, lambda file: file.write(data.encode(errors="backslashreplace")), fsync=fsync)


def replace_non_finite(value: Any) -> Any:
    """The value with None in place of non-finite numbers, which JSON lacks."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """The dict in a JSON file; an empty one if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def fsync_folder(folder: Path) -> None:
    """fsync the folder, so that the names in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendOnlyFile:
    """An append-only file of lines. Lines that cannot be written are kept and written with a later one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending_lines: list[bytes] = []
        # the folder now, the file once: if they are missing later, the file system may be unmounted, and nothing
        # belongs below a mount point
        self._create_flag = os.O_CREAT
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)

    def append(self, line: str) -> None:
        """Append a whole line. Never raises because of the disk: a lost record must not stop training."""
        self._pending_lines = [*self._pending_lines[-MAX_PENDING_LINES:], f"{line}\n".encode(errors="backslashreplace")]
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | self._create_flag, 0o666)
        except OSError:
            return
        self._create_flag = 0
        try:
            size, data = os.fstat(descriptor).st_size, b"".join(self._pending_lines)
            if os.write(descriptor, data) == len(data):
                self._pending_lines = []
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def read_records(path: Path, start: int = 0) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """The offset, the line and the record of each line that begins at `start` or later and that no kill truncated."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        offset = file.seek(start - 1) + len(file.readline()) if start else 0
        for line in file:
            with suppress(ValueError):
                yield offset, line, json.loads(line if line.endswith(b"\n") else "")
            offset += len(line)


def drop_records(path: Path, is_kept: Callable[[dict], bool], is_settled: Callable[[dict], bool]) -> None:
    """Drop records. All up to the last one for which `is_settled` is true are kept, and the search begins there."""
    end, kept_lines, size = 0, [], path.stat().st_size if path.exists() else 0
    for start in range(size - BLOCK_BYTES, -BLOCK_BYTES, -BLOCK_BYTES):
        end = end or next(
            (at for at, _, entry in islice(read_records(path, max(0, start)), 20) if is_settled(entry)), 0
        )
    for offset, line, record in read_records(path, end):
        if is_kept(record) and offset == end:
            end += len(line)
        elif is_kept(record):  # after a dropped one
            kept_lines.append(line)

    def write(copy: BinaryIO) -> None:
        with path.open("rb") as file:
            shutil.copyfileobj(file, copy)
        copy.truncate(copy.seek(end))
        copy.writelines(kept_lines)

    if kept_lines:
        replace_file(path, write)  # a kill leaves the old file or the new one
    elif end < size:
        os.truncate(path, end)
