# extra: reports
"""List runs as plain values, for runs.py --json (keys: docs/reference.md)."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from utils.files import replace_non_finite


def runs_as_json(runs: list[Any]) -> str:
    """Return a JSON list with an object for each run, which is a RunInfo."""
    return as_json([summarize_run(run) for run in runs])


def as_json(value: Any) -> str:
    """Return a value as JSON. Numbers that are not finite become null, as in metrics.jsonl."""
    return json.dumps(replace_non_finite(value), indent=2, allow_nan=False)


def summarize_run(run: Any) -> dict[str, Any]:
    """Return the facts about a run by name.

    All keys are always there. A value is None if it is not known, or has another type in a damaged file.
    """
    status, origin, state = run.status, run.provenance, get_typed(run.status, "state", str)
    summary = run.summary if run.summary.get("state") == state else {}  # otherwise it is that of an earlier attempt
    train: dict[str, Any] = next((record for record in reversed(run.records) if record["kind"] == "train"), {})
    began, until = (run.attempts[0].started_at, run.attempts[-1].ended_at) if run.attempts else (0.0, 0.0)
    first = datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds") if began else None
    has_ended = state not in (None, "starting", "running")
    tests = get_typed(summary, "test", list) or []
    return {
        "run": run.title,
        "folder": str(run.folder),
        "state": state,
        "error": get_typed(status, "error", str),
        "epochs": get_typed(status, "epoch", int),
        "steps": get_typed(status, "step", int),
        "world_size": get_typed(summary, "world_size", int) or get_typed(origin, "world_size", int),
        "restarts": len(run.attempts) - 1 if run.attempts else get_typed(summary, "restarts", int),
        "started": first or get_typed(origin, "start_time", str),
        "ended": get_typed(status, "time", str) if has_ended else None,
        "wall_s": get_typed(summary, "wall_s", int, float) or ((until - began) if began else None),
        "samples_per_s": get_typed(summary, "samples_per_s", int, float)
        or get_typed(train, "samples_per_s", int, float),
        "best_metric": get_typed(summary, "best_metric", str),
        "best_value": get_typed(summary, "best_value", int, float),
        "best_epoch": get_typed(summary, "best_epoch", int),
        "best": get_typed(summary, "best", dict) or {},
        "final": get_typed(summary, "final", dict) or {},
        "test": [result for result in tests if isinstance(result, dict)],
        "settings": run.config,
        "git_commit": get_typed(origin, "git_commit", str),
        "git_dirty": get_typed(origin, "git_dirty", bool),
        "verified": get_typed(origin, "verified", bool),  # extra: verify
        "bytes": run.size(),
    }


def get_typed(values: dict[str, Any], name: str, *kinds: type) -> Any:
    """Return a value if it has one of these types, and None otherwise. A bool is no number."""
    value = values.get(name)
    return value if isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds) else None
