"""How a run spent its time, over all attempts. Each second is in one account."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.clock import Clock
from utils.files import read_json, replace_json
from utils.run.folder import Run

NAME = "goodput.json"
SECONDS_TO_WRITE = 10.0
ACCOUNTS = ("training", "data_wait", "evaluation", "checkpoints", "start_up", "recomputed", "down")


class Goodput:
    """The accounts of a run. Rank 0 writes them once a second, so that a killed attempt is included.

    Args:
        began: when this attempt's process started, by time.perf_counter.
    """

    def __init__(self, run: Run, clock: Clock, began: float) -> None:
        self._offset = time.time() - time.perf_counter()  # once: the system's clock may jump during the attempt
        self._run, self._clock, self._began = run, clock, began + self._offset
        self._file = run.folder / NAME
        self._before: dict[str, Any] = {}  # known once the attempt is about to train
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_each_second, daemon=True)
        if run.is_main:
            self._thread.start()

    def resume(self, saved: dict[str, Any] | None, step: int = 0) -> None:
        """Continue from the file of the last attempt, else from the accounts in the checkpoint (None: there are none).

        step: the step at which this attempt starts.
        """
        before = (_read(self._file) if self._run.start.attempt > 1 else None) or saved or {}
        began, now = self._began, time.perf_counter() + self._offset
        fresh: dict[str, Any] = dict.fromkeys(ACCOUNTS, 0.0) | {
            "started_at": began,
            "until": began,
            "step": 0,
            "attempts": [],
        }
        before = fresh | before
        before["down"] += max(0.0, began - before["until"])
        before["start_up"] += max(0.0, now - sum(self._clock.spent()[0].values()) - began)  # before the clock started
        self._clock.mark_reached(before["step"])
        own = {"started_at": began, "training_from": now, "resumed_at_step": step}
        self._before = before | {"attempts": [*before["attempts"], own]}

    def now(self) -> dict[str, Any]:
        """Seconds by account, `started_at` and `until` (seconds since 1970), the last `step` begun, the attempts."""
        (spent, again), until = self._clock.spent(), time.perf_counter() + self._offset
        accounts = {
            "training": sum(spent[phase] - again[phase] for phase in ("forward", "backward", "update")),
            "data_wait": spent["data"] - again["data"],
            "evaluation": spent["evaluation"],
            "checkpoints": spent["save"],
            "start_up": spent["start"] + spent["end"],
            "recomputed": sum(again.values()),
            "down": 0.0,
        }
        total = {name: self._before[name] + seconds for name, seconds in accounts.items()}
        *earlier, own = self._before["attempts"]
        own = own | {"until": until, "step": max(own["resumed_at_step"], self._clock.step)}
        reached = {"until": until, "step": max(self._before["step"], own["step"]), "attempts": [*earlier, own]}
        return total | {"started_at": self._before["started_at"]} | reached

    def close(self) -> None:
        """Write for the last time, unless the storage hangs."""
        self._stop.set()
        if self._run.is_main:
            self._thread.join(SECONDS_TO_WRITE)

    def _write_each_second(self) -> None:
        while not self._stop.wait(1):
            self.write()
        self.write()  # the last values, also of a run that is shorter than a second

    def write(self) -> None:
        """If a write fails, the next one follows a second later."""
        if self._before and self._run.is_ours():
            is_there = self._run.lock_file.stat  # raises if the file system is unmounted
            with suppress(OSError):
                is_there()
                replace_json(self._file, self.now(), is_flushed=False, may_appear=is_there)


def _read(file: Path) -> dict[str, Any] | None:
    found = read_json(file)
    is_whole = all(isinstance(found.get(name), int | float) for name in (*ACCOUNTS, "started_at", "until", "step"))
    return found if is_whole else None


def share_in_training(accounts: dict[str, Any]) -> float:
    """The goodput: the fraction of all time spent in training."""
    total = sum(accounts[name] for name in ACCOUNTS)
    return accounts["training"] / total if total > 0 else 0.0
