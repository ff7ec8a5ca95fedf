"""Who owns a run's folder: a lock, a number that grows with each owner, and how the attempts before ended.

The kernel lets go of the lock however its process ends. The number fences off a former owner that still writes: it
re-reads the
number before a checkpoint gets its name, and readers do not count what was written under an older number after it was
succeeded.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from config import UserError
from utils.checkpoint.format import BEST, Seal, seal_of, step_checkpoints
from utils.run.provenance import now
from utils.run.watchdog import read_place

NAME = "claim.json"
SECONDS_TO_SEE_A_BEAT = 5.0  # of an owner on another host, where locks may not reach
MOST_STRIKES = 3  # attempts in a row that end at the same step before a person has to look


class Claim:
    """The claim of this process on a folder, and what it took over. Raises UserError when a living process holds it."""

    def __init__(self, folder: Path, host: str) -> None:
        self.file, self._host = folder / NAME, host
        self._lock: IO[str] | None = os.fdopen(
            os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8"
        )
        self.before = _read(self._lock)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(self._is_in_use(folder)) from None
        except OSError:  # a file system without locks
            pass
        if self.before.get("host", host) != host and _beats(folder / "watch" / "rank0"):
            raise UserError(self._is_in_use(folder))
        self.number = self.before.get("number", 0) + 1
        self._inherited: list[str] = self.before.get("inherited", [])
        self._last = self.before.get("number", 0)

    def _is_in_use(self, folder: Path) -> str:
        owner = _read(self._lock)
        since = owner.get("time", "?")
        try:
            age = f", for {(datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds() / 60:.1f} min"
        except ValueError:
            age = ""
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {since}{age}"
        return f"run_dir={folder}: is in use by {who}; end that job or give another --run_dir"

    def read(self) -> dict[str, Any]:
        """The claim as it stands now. Never by opening the file anew in this process: to close it again would end the
        lock."""
        try:
            return json.loads(os.pread(self._lock.fileno(), os.fstat(self._lock.fileno()).st_size, 0))
        except (OSError, ValueError, AttributeError):  # it is being written, or we have let go of it
            return {}

    def is_ours(self, seal: Seal) -> bool:
        """Whether a checkpoint with this seal counts: written by the last owner, or there when the folder came to that
        one."""
        return seal.claim >= self._last or seal.digest in self._inherited

    def take(self, checkpoints: Path, **values: Any) -> None:
        """Become the owner: from now on a former one's checkpoints do not count. values: kept with the claim."""
        paths = [*step_checkpoints(checkpoints), checkpoints / BEST]
        self._inherited = [seal.digest for path in paths if (seal := seal_of(path)) and self.is_ours(seal)]
        self._last = self.number
        self.keep(**values)

    def keep(self, **values: Any) -> None:
        """Write the claim, with these values beside what makes it one."""
        mine = {
            "number": self.number,
            "host": self._host,
            "pid": os.getpid(),
            "time": now(),
            **values,
            "inherited": self._inherited,
        }
        data = (json.dumps(mine) + "\n").encode()
        os.pwrite(self._lock.fileno(), data, 0)  # in place: the lock is on this very file
        os.ftruncate(self._lock.fileno(), len(data))

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def strikes_of(before: dict[str, Any], status: dict[str, Any], watch: Path) -> list[dict[str, Any]]:
    """The attempts in a row, up to the last one, that ended at the same step without a stop that was asked for.

    Args:
        before: the last attempt's claim.
        status: what it said of itself.
        watch: the folder of its ranks' places.
    """
    if not before.get("has_trained") or status.get("state") not in ("running", "failed"):
        return []
    steps = [place.step for file in watch.glob("rank*") if (place := read_place(file))]
    strike = {
        "step": max(steps, default=status.get("step", 0)),
        "error": status.get("error") or "the process was killed",
    }
    return [each for each in before.get("strikes", []) if each["step"] == strike["step"]] + [strike]


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        found = json.loads(file.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _beats(file: Path) -> bool:
    """Whether the owner's rank 0 shows life. It is asked where the lock was granted to another host: locks may not
    reach that far."""
    first = read_place(file)
    if first is None or first.phase == "end":
        return False
    ends = time.monotonic() + SECONDS_TO_SEE_A_BEAT
    while time.monotonic() < ends:
        time.sleep(0.25)
        if (place := read_place(file)) and place.beat != first.beat:
            return True
    return False
