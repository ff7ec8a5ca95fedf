"""The owner of a run folder: a file lock, and a random token in lock.json.

The kernel releases the lock however its process ends. Where file locks do not reach another machine, an owner is alive
if the time stamp of lock.json moves. The token stops a former owner that was suspended and continues: it is read again
before a record is written or a checkpoint is renamed into place.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from config import UserError
from utils.files import read_json, replace_json
from utils.logger import NAME as LOGGER
from utils.run.provenance import now

NAME = "lock.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")  # on Linux; differs between machines of the same name
SECONDS_OF_A_LEASE = 120.0  # for which an NFS server may keep the file lock of a machine that is gone
SECONDS_BETWEEN_BEATS = 10.0
SECONDS_TO_SEE_A_BEAT = 30.0  # of an owner on another machine, where file locks may not reach
KILLED = "every rank was killed"  # nobody wrote how far the attempt got, so its step is a little too low
SECONDS_TO_READ_BACK = 2.0  # there, a second launch may have written its token in the meantime


class RunLock:
    """The lock of this process on a folder. Raises UserError if a live process holds it.

    `before` is what the previous owner wrote.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._file, self._own = folder / NAME, {"token": uuid.uuid4().hex, "host": host, "boot": ""}
        with suppress(OSError):
            self._own["boot"] = BOOT.read_text().strip()
        self._has_locks, self._end = True, threading.Event()
        self._descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        self.before: dict[str, Any] = {}
        is_alone = self._wait_for_the_owner(folder)
        if is_alone:
            self.write(**{name: value for name, value in self.before.items() if name not in self._own})
            if self._is_elsewhere() or not self._has_locks:
                time.sleep(SECONDS_TO_READ_BACK)
            found = read_json(self._file)
            is_alone, self.before = found.get("token") == self.token, self.before if is_alone else found
        if not is_alone:
            self.close()
            raise UserError(
                f"run_dir={folder}: is in use by {_describe(self.before)}; end that job or give another --run_dir"
            )
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def token(self) -> str:
        return self._own["token"]

    def _is_elsewhere(self) -> bool:
        """Whether the previous owner was on another machine, or on this one before it was restarted."""
        return bool(self.before) and any(self.before.get(name) != self._own[name] for name in ("host", "boot"))

    def _wait_for_the_owner(self, folder: Path) -> bool:
        """Wait until it is known whether the previous owner is alive. Returns False if it is."""
        began, stamp = time.monotonic(), self._stamp()
        has_ended = read_json(folder / "status.json").get("state", "running") != "running"
        while True:
            is_held, self.before = self._is_held(), read_json(self._file)
            waited = time.monotonic() - began
            if self._is_elsewhere() and self._stamp() != stamp:
                return False
            if not self._is_elsewhere() or waited > SECONDS_OF_A_LEASE:
                return not is_held
            if not is_held and (has_ended or waited > SECONDS_TO_SEE_A_BEAT):
                return True
            if waited < 0.5:
                text = "%s: looking for up to %.0f s whether its owner, %s, is alive"
                logging.getLogger(LOGGER).warning(text, folder, SECONDS_TO_SEE_A_BEAT, _describe(self.before))
            time.sleep(0.5)

    def _stamp(self) -> int:
        with suppress(OSError), self._file.open() as file:  # NFS looks at the server's attributes when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
        return 0

    def _is_held(self) -> bool:
        """Whether another process has the file lock; otherwise this one takes it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._has_locks = isinstance(error, (BlockingIOError, PermissionError))
            return self._has_locks
        return False

    def _beat(self) -> None:
        while not self._end.wait(SECONDS_BETWEEN_BEATS):
            with suppress(OSError):  # the storage may hang; then this thread does
                if read_json(self._file).get("token") == self.token:
                    os.utime(self._file)

    def write(self, **values: Any) -> None:
        """Write this owner's identity and these values."""
        replace_json(self._file, self._own | {"pid": os.getpid(), "time": now()} | values)

    def close(self) -> None:
        """Release the folder."""
        self._end.set()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _describe(owner: dict[str, Any]) -> str:
    since = owner.get("time", "?")
    try:
        minutes = (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds() / 60
        since += f", for {max(0.0, minutes):.1f} min"
    except ValueError:
        pass
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {since}"


def repeated_failures(owner: dict[str, Any], status: dict[str, Any]) -> list[dict[str, Any]]:
    """The latest consecutive attempts that failed and did not get beyond the first of them.

    Args:
        owner: what the last attempt wrote to lock.json.
        status: its status.json.
    """
    was_asked = status.get("state") not in ("running", "failed")
    if not owner.get("has_trained") or owner.get("has_diagnosed") or was_asked:  # diagnosed: the user was told
        return []
    last = {"step": status.get("step", 0), "error": status.get("error") or KILLED}
    before = owner.get("failures", [])
    furthest = max((each["step"] for each in before), default=-1)
    return [*before, last] if last["step"] <= furthest else [last]
