"""Goodput: how a run spent its time, over all attempts, from its records. Each second is in one account."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, NamedTuple

TIME_ACCOUNTS = ("training", "data_wait", "evaluation", "checkpoints", "start_up", "recomputed", "down")


class AttemptTimes(NamedTuple):
    """One attempt. Times are in seconds since 1970."""

    start_event: dict[str, Any]  # its first event
    records: list[dict[str, Any]]  # the others, without those that later attempts have dropped
    started_at: float
    training_started_at: float
    lost_since: float  # when the save of `kept_step` began; `ended_at` if nothing was lost
    ended_at: float  # its last sign of life
    last_step: int  # the last one that it is known to have made
    kept_step: float  # the step from which later attempts go on


def split_attempts(records: list[dict[str, Any]], time: Any, step: Any) -> list[AttemptTimes]:
    """The attempts of a run, without those of earlier versions, whose first event has no times.

    time, step: of status.json; the first event of the next attempt has those of the others, and their state.
    """
    attempts: list[AttemptTimes] = []
    attempt_records: list[dict[str, Any]] = []
    kept_step, state = math.inf, ""
    for record in reversed(records):
        if record.get("event") not in ("started", "resumed") or "seconds" not in record:
            attempt_records.append(record)
            continue
        training_started_at = parse_time(record["time"])
        started_at = training_started_at - record["seconds"]
        times = [training_started_at, *(parse_time(entry.get("time")) for entry in attempt_records)]
        saves = [
            entry for entry in attempt_records if entry.get("event") == "checkpoint" and entry["step"] == kept_step
        ]
        starts = [parse_time(save.get("time")) - save.get("seconds", 0.0) for save in saves]
        ended_at, step = max(*times, parse_time(time)), step if isinstance(step, int) else record["step"]
        is_lost = step > kept_step or (bool(starts) and state in ("running", "failed"))
        lost_since = max(starts or times) if is_lost else ended_at
        attempts.append(
            AttemptTimes(
                record,
                attempt_records[::-1],
                min(started_at, training_started_at),
                training_started_at,
                lost_since,
                ended_at,
                step,
                kept_step,
            )
        )
        kept_step, attempt_records = min(kept_step, record["step"]), []
        time, step, state = (record.get(f"previous_{name}") for name in ("time", "step", "state"))
    return attempts[::-1]


def sum_account_seconds(attempts: list[AttemptTimes]) -> dict[str, float]:
    """The seconds in each account. Their sum is the time from the first start to the end of the last attempt."""
    accounts, ended = dict.fromkeys(TIME_ACCOUNTS, 0.0), math.inf
    for attempt in attempts:
        left, step = attempt.lost_since - attempt.training_started_at, attempt.start_event["step"]
        for record in attempt.records:
            noted = {"checkpoints": record.get("blocked_s", 0.0) + record.get("waited_s", 0.0)}
            if record["kind"] == "train":
                noted["data_wait"], step = record.get("data_wait_s", 0.0) * (record["step"] - step), record["step"]
            elif record.get("event") == "evaluation":
                noted["evaluation"] = record.get("seconds", 0.0)
            for name, seconds in noted.items():
                accounts[name] += min(seconds, left)
                left -= min(seconds, left)
        accounts["training"] += left
        accounts["start_up"] += attempt.training_started_at - attempt.started_at
        accounts["recomputed"] += attempt.ended_at - attempt.lost_since
        accounts["down"] += max(0.0, attempt.started_at - ended)
        ended = attempt.ended_at
    return accounts


def parse_time(text: Any) -> float:
    """Seconds since 1970 of a time in ISO 8601; 0 if it is not one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return 0.0
