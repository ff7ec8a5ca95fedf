"""How a run spent its time, over all attempts, from its records. Each second is in one account."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

ACCOUNTS = ("training", "data_wait", "evaluation", "checkpoints", "start_up", "recomputed", "down")


@dataclass
class AttemptTimes:
    """One attempt. Times are in seconds since 1970."""

    started_at: float
    training_from: float
    resumed_at_step: int
    samples_seen: int  # before its first step
    records: list[dict[str, Any]] = field(default_factory=list)  # those that later attempts have kept
    until: float = 0.0  # its last sign of life
    step: int = 0  # the last one that it is known to have made
    kept_step: float = math.inf  # the step from which later attempts go on
    lost_from: float = 0.0  # when it had made that step; `until` if nothing was lost


def attempts_of(records: Iterable[dict[str, Any]], until: float, step: int) -> list[AttemptTimes]:
    """The attempts of a run. The first event of each, "started" or "resumed", has times; those of earlier versions have
    none, and what is before them is left out.

    Args:
        until, step: of the last attempt; the next attempt's first event has those of the others.
    """
    found: list[AttemptTimes] = []
    for record in records:
        started_at, at = (seconds_of(record.get(name)) for name in ("started_at", "time"))
        if started_at and at:
            if found:
                found[-1].until = seconds_of(record.get("previous_time")) or 0.0
                found[-1].step = record.get("previous_step") or 0
            samples = record.get("samples_seen") or 0
            found.append(AttemptTimes(started_at, max(at, started_at), record["step"], samples))
        elif found:
            found[-1].records.append(record)
    if found:
        found[-1].until, found[-1].step = until, step
    kept_step = math.inf
    for each in reversed(found):
        times = (seconds_of(record.get("time")) or 0.0 for record in each.records)
        each.until, each.kept_step = max(each.until, each.training_from, *times), kept_step
        each.lost_from = time_of_step(kept_step, each) if each.step > kept_step else each.until
        kept_step = min(kept_step, each.resumed_at_step)
    return found


def time_of_step(step: float, attempt: AttemptTimes) -> float:
    """About when an attempt finished this step: when it was saved, else interpolated between the last record up to it
    and the attempt's end."""
    known = [(attempt.training_from, attempt.resumed_at_step)]
    for record in attempt.records:
        if record["step"] <= step and (at := seconds_of(record.get("time"))):
            began = at - (record.get("seconds") or 0.0) * (record.get("event") == "checkpoint")
            known.append((max(began, attempt.training_from), record["step"]))
    at, before = max(known)
    if step <= before:
        return at
    return at + (step - before) / (attempt.step - before) * (attempt.until - at)


def accounts_of(attempts: list[AttemptTimes]) -> dict[str, float]:
    """The seconds in each account. Their sum is the time from the first start to the end of the last attempt."""
    found = dict.fromkeys(ACCOUNTS, 0.0)
    for each, later in itertools.zip_longest(attempts, attempts[1:]):
        left = each.lost_from - each.training_from
        for name, seconds in _noted(each).items():
            found[name] += min(seconds, left)
            left -= min(seconds, left)
        found["training"] += left
        found["start_up"] += each.training_from - each.started_at
        found["recomputed"] += each.until - each.lost_from
        found["down"] += max(0.0, later.started_at - each.until) if later else 0.0
    return found


def _noted(attempt: AttemptTimes) -> dict[str, float]:
    """Seconds by account, as the records of the attempt say."""
    found, step = dict.fromkeys(("evaluation", "checkpoints", "data_wait"), 0.0), attempt.resumed_at_step
    for record in attempt.records:
        if record["kind"] == "train":
            found["data_wait"] += (record.get("data_wait_s") or 0.0) * max(1, record["step"] - step)
            step = record["step"]
        elif record.get("event") == "evaluation":
            found["evaluation"] += record.get("seconds") or 0.0
        elif record.get("event") == "checkpoint":
            found["checkpoints"] += (record.get("blocked_s") or 0.0) + (record.get("waited_s") or 0.0)
    return found


def share_in_training(accounts: dict[str, float]) -> float:
    """The goodput: the fraction of all time spent in training."""
    total = sum(accounts.values())
    return accounts["training"] / total if total > 0 else 0.0


def seconds_of(text: Any) -> float | None:
    """Seconds since 1970 of a time in ISO 8601; None if it is not one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
