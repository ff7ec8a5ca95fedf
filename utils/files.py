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
PERMANENT_ERRORS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,  # a file of wrong content
    errno.ENXIO,  # a socket
}
MAX_TRIES = 3
SECONDS_BETWEEN_TRIES = 1.0
MAX_PENDING_LINES = 100_000  # lines kept while they cannot be written
BLOCK_BYTES = 1 << 18  # bytes of a step back from the end of a file
RECORDS_PER_BLOCK = 20  # records that are read after such a step


def is_transient(error: OSError) -> bool:
    """Return whether a retry may succeed: the storage failed or something was short, and the file is not wrong."""
    return bool(error.errno) and error.errno not in PERMANENT_ERRORS


def retry(action: Callable[[], T]) -> T:
    """Return the result of the action, which is tried three times, a second apart, while its errors may pass."""
    for _ in range(MAX_TRIES - 1):
        try:
            return action()
        except OSError as error:
            if not is_transient(error):
                raise
            time.sleep(SECONDS_BETWEEN_TRIES)
    return action()


def replace_file(
    path: Path,
    write: Callable[[BinaryIO], object],
    before_rename: Callable[[], object] | None = None,
    fsync: bool = True,
) -> None:
    """Let `write` fill a temporary file next to `path`, fsync the file, rename it and fsync the folder.

    Args:
        before_rename: is called just before the rename. An exception aborts the write.
        fsync: without fsync, a crash of the machine may lose the file.

    Raises:
        OSError: if any of this fails. Then `path` is unchanged and the temporary file is deleted.
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
    """Return a new name for a temporary file.

    Several ranks may write `path`, in containers even with equal names and pids.
    """
    writer = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    return path.with_name(f"{path.name}.{writer}{TEMPORARY_SUFFIX}")


def replace_json(path: Path, value: Any, fsync: bool = True) -> None:
    """Replace a file by one with this value as JSON, as `replace_file` does. Non-finite numbers become null."""
    data = json.dumps(replace_non_finite(value), indent=2, ensure_ascii=False) + "\n"
    # a byte of a name that is not UTF-8 is a surrogate, which becomes JSON's own \udcXX and is read back as that byte
    replace_file(path, lambda file: file.write(data.encode(errors="backslashreplace")), fsync=fsync)


def replace_non_finite(value: Any) -> Any:
    """Return the value with None in place of non-finite numbers, which JSON lacks."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the dict in a JSON file, or an empty dict if the file cannot be read or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


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
        # The folder is created now, and the file once. If they are missing later, the file system may be unmounted, and
        # nothing belongs below a mount point.
        self._create_flag = os.O_CREAT
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)

    def append(self, line: str) -> None:
        """Append a whole line. Never raises because of the disk, since a lost record must not stop training."""
        encoded_line = f"{line}\n".encode(errors="backslashreplace")
        self._pending_lines = [*self._pending_lines[-MAX_PENDING_LINES:], encoded_line]
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | self._create_flag, 0o666)
        except OSError:
            return
        self._create_flag = 0
        try:
            size = os.fstat(descriptor).st_size
            data = b"".join(self._pending_lines)
            if os.write(descriptor, data) == len(data):
                self._pending_lines = []
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def read_records(path: Path, start: int = 0) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield the offset, the line and the record of each line that begins at `start` or later.

    Lines that a kill truncated are left out.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        offset = 0
        if start:
            offset = file.seek(start - 1)
            offset += len(file.readline())
        for line in file:
            if line.endswith(b"\n"):
                with suppress(ValueError):
                    yield offset, line, json.loads(line)
            offset += len(line)


def _find_settled_record(path: Path, size: int, is_settled: Callable[[dict], bool]) -> int:
    """Return the offset of a late record for which `is_settled` is true, or 0 if none is found.

    The search goes back from the end of the file, and looks at a few records of each block.
    """
    for start in range(size - BLOCK_BYTES, -BLOCK_BYTES, -BLOCK_BYTES):
        for offset, _, record in islice(read_records(path, max(0, start)), RECORDS_PER_BLOCK):
            if is_settled(record):
                return offset
    return 0


def drop_records(path: Path, is_kept: Callable[[dict], bool], is_settled: Callable[[dict], bool]) -> None:
    """Drop the records for which `is_kept` is false.

    Args:
        is_settled: is true for records before which all are kept. The search begins at a late one of these.
    """
    size = path.stat().st_size if path.exists() else 0
    end = _find_settled_record(path, size, is_settled)  # up to where the file stays as it is
    kept_lines = []
    for offset, line, record in read_records(path, end):
        if not is_kept(record):
            continue
        if offset == end:
            end += len(line)
        else:  # the record follows a dropped one
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
