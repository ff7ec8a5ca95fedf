"""Where the time of a run went, over all its attempts. Each second of it is in one account."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.files import replace_json
from utils.run.watchdog import Watch

LEDGER = "ledger.json"
ACCOUNTS = ("training", "data_wait", "evaluation", "checkpoints", "start_up", "recomputed", "down")


class Ledger:
    """Kept by rank 0 in the run's folder, once a second, so that a killed attempt is accounted for too.

    Args:
        file: None on the other ranks.
        before: what an earlier attempt left; None: there was none.
        began: when this attempt's process was started, in seconds since 1970.
    """

    def __init__(self, file: Path | None, watch: Watch, before: dict[str, Any] | None, began: float) -> None:
        self._file, self._watch, self._is_there = file, watch, False
        self._before = dict.fromkeys(ACCOUNTS, 0.0) | {"started_at": began, "until": began, "step": 0} | (before or {})
        self._before["down"] += max(0.0, began - self._before["until"])
        # imports, before the watch began
        self._before["start_up"] += max(0.0, time.time() - sum(watch.spent()[0].values()) - began)
        watch.reached = self._before["step"]

    def now(self) -> dict[str, Any]:
        """Seconds by account, `started_at` and `until` (seconds since 1970), and the last `step` begun."""
        (spent, again), until = self._watch.spent(), time.time()
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
        step = max(self._before["step"], self._watch.step)
        return total | {"started_at": self._before["started_at"], "until": until, "step": step}

    def write(self) -> None:
        """For the watch's thread. A disk that does not take it now does the next time."""
        # what is gone is not made anew, below a mount point say
        if self._file and (self._file.exists() or not self._is_there):
            with suppress(OSError):
                replace_json(self._file, self.now(), is_flushed=False)
                self._is_there = True


def read_ledger(file: Path) -> dict[str, Any] | None:
    """What an earlier attempt left."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return (
            found
            if all(isinstance(found.get(name), int | float) for name in (*ACCOUNTS, "started_at", "until", "step"))
            else None
        )
    except (OSError, ValueError, AttributeError):
        return None


def goodput(ledger: dict[str, Any]) -> float:
    """Time in training over all time."""
    total = sum(ledger[name] for name in ACCOUNTS)
    return ledger["training"] / total if total > 0 else 0.0
