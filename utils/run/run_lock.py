"""The lock on a run folder: one process owns it at a time.

The owner has a file lock, which the kernel releases however its process ends, and a random token in lock.json. Where
file locks do not reach another machine, an owner is alive if the time stamp of lock.json moves. The token stops a
former owner that was suspended and continues: it is read again before a record or the name of a checkpoint is written.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from utils.files import BOOT_ID_FILE, read_json, replace_json, retry
from utils.logger import LOGGER_NAME
from utils.run.provenance import format_utc_time
from utils.settings.errors import TrainingError, UserError

LOCK_FILE = "lock.json"
SECONDS_OF_NFS_LEASE = 120.0  # for which an NFS server may keep the file lock of a machine that is gone
SECONDS_BETWEEN_HEARTBEATS = 10.0
SECONDS_TO_SEE_HEARTBEAT = 30.0  # of an owner on another machine, where file locks may not reach
SECONDS_UNTIL_VISIBLE = 5.0  # until a file of another machine is visible on shared storage
SECONDS_TO_READ_BACK = 2.0  # after which a token is read again: a second launch may have written its own by then


class RunLock:
    """The lock of this process on a folder. `previous_owner` is what the owner before it wrote to lock.json.

    Args:
        token: of the run, on a node whose folder is its own; by default a random one.

    Raises:
        UserError: if a live process holds it.
        OSError: if the folder cannot be read or written. A folder whose lock.json cannot be read may have an owner.
    """

    held_locks: ClassVar[set[RunLock]] = set()  # by this process; closed after an exception

    def __init__(self, folder: Path, host: str, token: str = "") -> None:
        self._file = folder / LOCK_FILE
        self._identity = {"token": token or uuid.uuid4().hex, "host": host, "boot": _read_boot_id()}
        self._has_file_locks = True  # until `_take_file_lock` finds that the storage has none
        self._stop_event = threading.Event()
        self._descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        self.held_locks.add(self)
        self.previous_owner: dict[str, Any] = {}
        is_owner = self._wait_until_free(folder) and self._write_token()
        if not is_owner:
            self.close()
            owner = _describe_owner(self.previous_owner)
            raise UserError(f"--run_dir {folder} is in use by {owner}. End that job or give another --run_dir.")
        threading.Thread(target=self._touch_periodically, daemon=True).start()

    @property
    def token(self) -> str:
        """Return the random text in lock.json that tells this owner from others."""
        return self._identity["token"]

    def _wait_until_free(self, folder: Path) -> bool:
        """Take the file lock, read the previous owner, and wait until it is known whether that owner is alive.

        An owner from this boot of this machine is alive if it has the file lock. Any other owner is alive if its
        heartbeat moves. It is gone if the file lock is free, and it has reported its end or 30 s are over. After 120 s,
        for which an NFS server may keep the file lock of a machine that is gone, the file lock decides.

        Returns:
            Whether the owner is gone, or there was none.
        """
        began = time.monotonic()
        first_heartbeat = self._heartbeat_time()
        status = read_json(folder / "status.json")
        while True:
            is_free = self._take_file_lock()
            self.previous_owner = self._read_lock_file()
            is_elsewhere = self._is_from_other_boot()
            waited = time.monotonic() - began
            if is_elsewhere and self._heartbeat_time() != first_heartbeat:
                return False
            if not is_elsewhere or waited > SECONDS_OF_NFS_LEASE:
                return is_free
            if is_free and (self._has_owner_ended(status) or waited > SECONDS_TO_SEE_HEARTBEAT):
                return True
            if waited < 0.5:
                text = "This start waits up to %.0f s to see whether the owner of %s is alive (%s)."
                owner = _describe_owner(self.previous_owner)
                logging.getLogger(LOGGER_NAME).warning(text, SECONDS_TO_SEE_HEARTBEAT, folder, owner)
            time.sleep(0.5)

    def _is_from_other_boot(self) -> bool:
        """Return whether the previous owner was on another machine, or on this one before it was restarted."""
        if not self.previous_owner:
            return False
        return any(self.previous_owner.get(name) != self._identity[name] for name in ("host", "boot"))

    def _has_owner_ended(self, status: dict[str, Any]) -> bool:
        """Return whether the previous owner has reported its end in `status`, the content of status.json."""
        if status.get("state", "running") == "running":
            return False
        # an older status is of an attempt before this owner; times in UTC and ISO 8601 sort as text
        has_ended_later = "time" not in status or status["time"] >= self.previous_owner.get("time", "")
        return has_ended_later or bool(self.previous_owner.get("ended"))

    def _write_token(self) -> bool:
        """Write the token of this process into lock.json, beside the entries of the previous owner.

        Returns:
            Whether the token is still there a little later, since a second launch may have written its own.
        """
        self.write(**self.previous_owner)
        if self._is_from_other_boot() or not self._has_file_locks:
            time.sleep(SECONDS_TO_READ_BACK)
        return read_json(self._file).get("token") == self.token

    def _heartbeat_time(self) -> int:
        """Return when lock.json was changed, in nanoseconds; 0 if it cannot be read."""
        with suppress(OSError), self._file.open() as file:  # NFS looks at the server's attributes when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
        return 0

    def _read_lock_file(self) -> dict[str, Any]:
        """Read lock.json; empty if there is none. Raises OSError if it cannot be read."""
        try:
            content = json.loads(retry(self._file.read_text))
        except (FileNotFoundError, ValueError):
            return {}
        if isinstance(content, dict):
            return content
        return {}

    def _take_file_lock(self) -> bool:
        """Take the file lock, if the storage has file locks. Return False if another process has it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._has_file_locks = True
            return False
        except OSError:
            self._has_file_locks = False
        return True

    def _touch_periodically(self) -> None:
        """Change the time stamp of lock.json again and again, in a thread, while this process is the owner."""
        while not self._stop_event.wait(SECONDS_BETWEEN_HEARTBEATS):
            with suppress(OSError):  # if the storage hangs, only this thread hangs with it
                if read_json(self._file).get("token") == self.token:
                    os.utime(self._file)

    def write(self, **values: Any) -> None:
        """Write this owner's identity and these values to lock.json."""
        process = {"pid": os.getpid(), "time": format_utc_time()}
        replace_json(self._file, values | self._identity | process)

    def close(self) -> None:
        """Release the folder."""
        self.held_locks.discard(self)
        self._stop_event.set()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class Ownership:
    """Tells whether this attempt still owns the run folder. Another job may have taken it over while this one was
    suspended or cut off.

    `may_be_owner` and `require_owner` accept a lock.json that cannot be read, since failing storage must not end
    training. `check_owner` is strict.
    """

    folder: Path
    checkpoint_folder: Path
    token: str  # of this attempt

    @property
    def lock_file(self) -> Path:
        """Return the path of lock.json."""
        return self.folder / LOCK_FILE

    def may_be_owner(self) -> bool:
        """Return whether lock.json has the token of this attempt, or cannot be read."""
        return read_json(self.lock_file).get("token", self.token) == self.token

    def require_owner(self) -> None:
        """Call this before each write, so that a former owner does not write into the run of a new one.

        Raises:
            TrainingError: if another job owns the folder. None is raised if lock.json cannot be read.
        """
        if not self.may_be_owner():
            text = f"Another job has taken over the run in {self.folder}, so this job ends."
            raise TrainingError(f"{text} Start one job for each --run_dir.")

    def check_owner(self) -> None:
        """Call this before a checkpoint gets its name. The check is strict, since a save that fails is tried again.

        Raises:
            TrainingError: if another job owns the folder.
            OSError: if lock.json cannot be read.
        """
        try:
            token = json.loads(self.lock_file.read_text(encoding="utf-8"))["token"]
        except (ValueError, KeyError, TypeError):
            raise OSError(errno.EIO, f"{self.lock_file} cannot be read") from None
        if token != self.token:
            text = f"Another job has taken over {self.checkpoint_folder}, so this job ends."
            raise TrainingError(f"{text} Start one job for each --run_dir.")


def _read_boot_id() -> str:
    """Read the id of the boot of this machine; empty where there is none."""
    try:
        return BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""


def _describe_owner(owner: dict[str, Any]) -> str:
    """Return the process, the host and the time of an owner, as text. owner: content of lock.json."""
    since = owner.get("time", "?")
    with suppress(ValueError):
        age = datetime.now(UTC) - datetime.fromisoformat(since)
        minutes = max(0.0, age.total_seconds() / 60)
        since += f", for {minutes:.1f} min"
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {since}"


def is_owner_visible(folder: Path, token: str) -> bool:
    """Return whether the owner with this token is visible in the folder here, at once or after some seconds."""
    ends = time.monotonic() + SECONDS_UNTIL_VISIBLE
    while read_json(folder / LOCK_FILE).get("token") != token:
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True
