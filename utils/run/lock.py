"""The owner of a run folder: a file lock, and a number in lock.json that increases with each owner.

The kernel releases the lock however its process ends. The number stops a former owner that was suspended and continues:
it is read again before a record is written or a checkpoint is renamed into place.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from config import UserError
from utils.clock import read_place
from utils.files import read_json, replace_json
from utils.run.provenance import now

NAME = "lock.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")  # on Linux; differs between machines of the same name
SECONDS_OF_A_LEASE = 120.0  # for which an NFS server may keep the file lock of a machine that is gone
SECONDS_TO_SEE_A_BEAT = 5.0  # of an owner on another machine, where file locks may not reach


class RunLock:
    """The lock of this process on a folder. Raises UserError if a live process holds it.

    `before` is what the previous owner wrote. `number` counts owners; it is kept if given.
    """

    def __init__(self, folder: Path, host: str, number: int = 0) -> None:
        self._file, self._own = folder / NAME, {"host": host, "boot": ""}
        with suppress(OSError):
            self._own["boot"] = BOOT.read_text().strip()
        self._descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        ends = time.monotonic() + SECONDS_OF_A_LEASE
        while True:
            is_held, self.before = self._is_held(), read_json(self._file)
            is_elsewhere = bool(self.before) and any(self.before.get(name) != own for name, own in self._own.items())
            is_alive = is_elsewhere and _beats(folder / "watch" / "rank0")
            if is_alive or not (is_held and is_elsewhere) or time.monotonic() > ends:
                break
            time.sleep(0.5)
        self.number = number or self.before.get("number", 0) + 1
        if is_held or is_alive:
            self.close()
            raise UserError(
                f"run_dir={folder}: is in use by {_describe(self.before)}; end that job or give another --run_dir"
            )

    def _is_held(self) -> bool:
        """Whether another process has the file lock; otherwise this one takes it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # others: a file system without locks
            return isinstance(error, (BlockingIOError, PermissionError))
        return False

    def write(self, **values: Any) -> None:
        """Become the owner: write its identity and these values."""
        replace_json(self._file, {"number": self.number, **self._own, "pid": os.getpid(), "time": now(), **values})

    def close(self) -> None:
        """Release the folder."""
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


def _beats(file: Path) -> bool:
    """Whether the owner's rank 0 is alive, by its watchdog's beat."""
    first = read_place(file)
    if first is None or first.phase == "end":
        return False
    ends = time.monotonic() + SECONDS_TO_SEE_A_BEAT
    while time.monotonic() < ends:
        time.sleep(0.25)
        if (place := read_place(file)) and place.beat != first.beat:
            return True
    return False


def repeated_failures(owner: dict[str, Any], status: dict[str, Any], watch: Path) -> list[dict[str, Any]]:
    """The latest consecutive attempts that failed at the same step.

    Args:
        owner: what the last attempt wrote to lock.json.
        status: its status.json.
        watch: the folder in which its ranks published their steps.
    """
    was_asked = status.get("state") not in ("running", "failed")
    if not owner.get("has_trained") or owner.get("has_diagnosed") or was_asked:  # diagnosed: the user was told
        return []
    steps = [place.step for file in watch.glob("rank*") if (place := read_place(file))]
    last = {"step": max(steps, default=status.get("step", 0)), "error": status.get("error") or "the process was killed"}
    return [each for each in owner.get("failures", []) if each["step"] == last["step"]] + [last]
