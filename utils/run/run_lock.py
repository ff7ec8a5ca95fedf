"""The lock on a run folder: one process owns it at a time.

The owner has a file lock, which the kernel releases however its process ends, and a random token in lock.json. Where
file locks do not reach another machine, an owner is alive if the time stamp of lock.json moves. The token stops a
former owner that was suspended and continues: it is read again before a record or the name of a checkpoint is written.
"""

from __future__ import annotations

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
SECONDS_TO_READ_BACK = 2.0  # there, a second launch may have written its token in the meantime


class RunLock:
    """The lock of this process on a folder. `previous_owner` is what the owner before it wrote.

    token: of the run, on a node whose folder is its own; by default a random one.

    Raises:
        UserError: if a live process holds it.
        OSError: if the folder cannot be read or written. A lock.json that cannot be read is not one without an owner.
    """

    held_locks: ClassVar[set[RunLock]] = set()  # by this process; closed after an exception

    def __init__(self, folder: Path, host: str, token: str = "") -> None:
        self._file, self._identity = folder / LOCK_FILE, {"token": token or uuid.uuid4().hex, "host": host, "boot": ""}
        with suppress(OSError):
            self._identity["boot"] = BOOT_ID_FILE.read_text().strip()
        self._has_file_locks, self._stop_event = True, threading.Event()
        self._descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        self.held_locks.add(self)
        self.previous_owner: dict[str, Any] = {}
        is_alone = self._is_owner_gone(folder)
        if is_alone:
            self.write(**self.previous_owner)
            if self._is_from_other_boot() or not self._has_file_locks:
                time.sleep(SECONDS_TO_READ_BACK)
            content = read_json(self._file)
            is_alone, self.previous_owner = (
                content.get("token") == self.token,
                self.previous_owner if is_alone else content,
            )
        if not is_alone:
            self.close()
            owner = _describe_owner(self.previous_owner)
            raise UserError(f"run_dir={folder}: is in use by {owner}; end that job or give another --run_dir")
        threading.Thread(target=self._touch_periodically, daemon=True).start()

    @property
    def token(self) -> str:
        return self._identity["token"]

    def _is_from_other_boot(self) -> bool:
        """Whether the previous owner was on another machine, or on this one before it was restarted."""
        return bool(self.previous_owner) and any(
            self.previous_owner.get(name) != self._identity[name] for name in ("host", "boot")
        )

    def _is_owner_gone(self, folder: Path) -> bool:
        """Take the file lock, and wait until it is known whether the previous owner is alive."""
        began, stamp, status = time.monotonic(), self._heartbeat_time(), read_json(folder / "status.json")
        while True:
            is_free, self.previous_owner = self._take_file_lock(), self._read_lock_file()
            waited = time.monotonic() - began
            if self._is_from_other_boot() and self._heartbeat_time() != stamp:
                return False
            if not self._is_from_other_boot() or waited > SECONDS_OF_NFS_LEASE:
                return is_free
            # an older status is that of an attempt before this owner
            is_later = status.get("time", "?") >= self.previous_owner.get("time", "")
            has_ended = status.get("state", "running") != "running" and (is_later or self.previous_owner.get("ended"))
            if is_free and (has_ended or waited > SECONDS_TO_SEE_HEARTBEAT):
                return True
            if waited < 0.5:
                text = "%s: looking for up to %.0f s whether its owner, %s, is alive"
                logging.getLogger(LOGGER_NAME).warning(
                    text, folder, SECONDS_TO_SEE_HEARTBEAT, _describe_owner(self.previous_owner)
                )
            time.sleep(0.5)

    def _heartbeat_time(self) -> int:
        with suppress(OSError), self._file.open() as file:  # NFS looks at the server's attributes when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
        return 0

    def _read_lock_file(self) -> dict[str, Any]:
        try:
            content = json.loads(retry(self._file.read_text))
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _take_file_lock(self) -> bool:
        """Take the file lock. Returns whether no other process has it; without file locks, none has."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._has_file_locks = isinstance(error, (BlockingIOError, PermissionError))
            return not self._has_file_locks
        return True

    def _touch_periodically(self) -> None:
        while not self._stop_event.wait(SECONDS_BETWEEN_HEARTBEATS):
            with suppress(OSError):  # the storage may hang; then this thread does
                if read_json(self._file).get("token") == self.token:
                    os.utime(self._file)

    def write(self, **values: Any) -> None:
        """Write this owner's identity and these values."""
        replace_json(self._file, values | self._identity | {"pid": os.getpid(), "time": format_utc_time()})

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
    suspended or cut off."""

    folder: Path
    checkpoint_folder: Path
    token: str  # of this attempt

    @property
    def lock_file(self) -> Path:
        """The path of lock.json."""
        return self.folder / LOCK_FILE

    def is_owner(self) -> bool:
        """Whether lock.json has the token of this attempt, or cannot be read."""
        return read_json(self.lock_file).get("token", self.token) == self.token

    def require_owner(self) -> None:
        """Call before every write, which a later owner would take for its own. Raises TrainingError.

        A lock.json that cannot be read counts as this owner's, since a failing storage must not end training.
        """
        if not self.is_owner():
            raise TrainingError(f"run_dir={self.folder}: another job has taken over this run; end this one")

    def check_owner(self) -> None:
        """Call before a checkpoint gets its name. It is strict, since a save is tried again.

        Raises:
            TrainingError: if another job owns the folder.
            OSError: if lock.json cannot be read.
        """
        try:
            token = json.loads(self.lock_file.read_text(encoding="utf-8"))["token"]
        except (ValueError, KeyError, TypeError):
            raise OSError(5, f"{self.lock_file} cannot be read") from None
        if token != self.token:
            raise TrainingError(f"{self.checkpoint_folder}: another job has taken over this run; end this one")


def _describe_owner(owner: dict[str, Any]) -> str:
    since = owner.get("time", "?")
    try:
        minutes = (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds() / 60
        since += f", for {max(0.0, minutes):.1f} min"
    except ValueError:
        pass
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {since}"


def is_owner_visible(folder: Path, token: str) -> bool:
    """Whether the owner with this token is visible in the folder here, at once or after some seconds."""
    ends = time.monotonic() + SECONDS_UNTIL_VISIBLE
    while read_json(folder / LOCK_FILE).get("token") != token:
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True
