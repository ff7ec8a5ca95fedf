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
    """List the attempts of a run, without those of earlier versions, whose first event has no times.

    Args:
        records: of metrics.jsonl.
        time: of status.json. The first event of each attempt has the time, step and state of the attempt before.
        step: of status.json.
    """
    attempts: list[AttemptTimes] = []
    attempt_records: list[dict[str, Any]] = []  # of one attempt, the latest first
    kept_step = math.inf
    state: Any = ""
    for record in reversed(records):
        is_start = record.get("event") in ("started", "resumed") and "seconds" in record
        if not is_start:
            attempt_records.append(record)
            continue

        training_started_at = parse_time(record["time"])
        started_at = training_started_at - record["seconds"]
        record_times = [training_started_at]
        save_starts = []  # when the saves of the kept step began
        for entry in attempt_records:
            entry_time = parse_time(entry.get("time"))
            record_times.append(entry_time)
            if entry.get("event") == "checkpoint" and entry["step"] == kept_step:
                save_starts.append(entry_time - entry.get("seconds", 0.0))

        ended_at = max(*record_times, parse_time(time))
        last_step = step if isinstance(step, int) else record["step"]
        lost_since = ended_at
        has_failed = state in ("running", "failed")  # a killed attempt leaves "running"
        if save_starts and (last_step > kept_step or has_failed):
            lost_since = max(save_starts)
        elif last_step > kept_step:
            lost_since = max(record_times)

        attempt = AttemptTimes(
            start_event=record,
            records=attempt_records[::-1],
            started_at=min(started_at, training_started_at),
            training_started_at=training_started_at,
            lost_since=lost_since,
            ended_at=ended_at,
            last_step=last_step,
            kept_step=kept_step,
        )
        attempts.append(attempt)
        attempt_records = []
        kept_step = min(kept_step, record["step"])
        time = record.get("previous_time")
        step = record.get("previous_step")
        state = record.get("previous_state")
    return attempts[::-1]


def sum_account_seconds(attempts: list[AttemptTimes]) -> dict[str, float]:
    """Sum the seconds in each account. Their sum is the time from the first start to the end of the last attempt."""
    accounts = dict.fromkeys(TIME_ACCOUNTS, 0.0)
    ended_at = math.inf  # when the attempt before ended
    for attempt in attempts:
        left = attempt.lost_since - attempt.training_started_at  # seconds that are in no account yet
        step = attempt.start_event["step"]
        for record in attempt.records:
            noted = {"checkpoints": record.get("blocked_s", 0.0) + record.get("waited_s", 0.0)}
            if record["kind"] == "train":
                noted["data_wait"] = record.get("data_wait_s", 0.0) * (record["step"] - step)
                step = record["step"]
            elif record.get("event") == "evaluation":
                noted["evaluation"] = record.get("seconds", 0.0)
            for name, noted_seconds in noted.items():
                seconds = min(noted_seconds, left)
                accounts[name] += seconds
                left -= seconds
        accounts["training"] += left
        accounts["start_up"] += attempt.training_started_at - attempt.started_at
        accounts["recomputed"] += attempt.ended_at - attempt.lost_since
        accounts["down"] += max(0.0, attempt.started_at - ended_at)
        ended_at = attempt.ended_at
    return accounts


def parse_time(text: Any) -> float:
    """Return the seconds since 1970 of a time in ISO 8601. They are 0 if it is not one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return 0.0
