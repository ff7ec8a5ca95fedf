# extra: reports
"""Draw a run's attempts over time, as an SVG: what each attempt did, what was lost, and the events."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from scripts.lib.svg import choose_ticks
from utils.logger import format_count, format_duration
from utils.report.goodput import AttemptTimes, parse_time

WIDTH, LEFT, ROW_HEIGHT, BAR_HEIGHT, BAR_TOP = 1160, 8, 74, 26, 30  # sizes of the picture, of a row and of its bar
PHASES = {
    "training": "training",
    "evaluation": "evaluation",
    "checkpoints": "writing a checkpoint (in the background)",
    "start_up": "start-up",
    "recomputed": "lost work, recomputed after the restart",
    "down": "not running",
}
# the radius of the mark of each event, in pixels
MARK_RADIUS = {
    "fault": 5,
    "skipped_step": 4,
    "straggler": 4,
    "resumed": 4,
    "checkpoint": 2,
    "best": 3,
}
UNITS = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))
ERROR_LINE = re.compile(r"(\S+) (\d+) (\S+) (?:ERROR|CRITICAL) (.*)")
ROUTINE_EVENTS = ("started", "evaluation")  # events that are not listed
MAX_LOGS_READ = 16  # only logs of the lowest ranks, since all ranks notice the same failure


@dataclass
class Timeline:
    """The attempts of a run and its events, with times in seconds since 1970."""

    started_at: float = 0.0
    ended_at: float = 0.0
    attempts: int = 0
    segments: list[tuple[float, float, str, str]] = field(default_factory=list)  # start, end, phase and text
    events: list[dict[str, Any]] = field(default_factory=list)  # `at` is the time, or 0


def build_timeline(
    folder: Path, records: list[dict[str, Any]], status: dict[str, Any], attempts: list[AttemptTimes]
) -> Timeline:
    """Build the timeline from the attempts, the times of the records, and the errors in the logs."""
    records = [record | {"at": parse_time(record.get("time"))} for record in records]
    result = Timeline(events=[r for r in records if r["kind"] == "event" and r["event"] not in ROUTINE_EVENTS])
    if not attempts:
        return result
    result.started_at, result.attempts = attempts[0].started_at, len(attempts)
    errors, is_failed = read_errors(folder / "logs"), status.get("state") == "failed"
    for k, attempt in enumerate(attempts):
        later = attempts[k + 1 :]
        next_start = later[0].started_at if later else float("inf")
        own_errors = [(at, text) for at, text in errors if attempt.started_at <= at < next_start]
        end, lost_from, kept_step = attempt.ended_at, attempt.lost_since, attempt.kept_step
        result.ended_at, label = end, f"attempt {k + 1}, steps {attempt.start_event['step']} to {attempt.last_step}"
        is_lost = lost_from < end
        add = result.segments.append
        add((attempt.started_at, attempt.training_started_at, "start_up", f"attempt {k + 1}: start-up"))
        add((attempt.training_started_at, lost_from, "training", label))
        for r in attempt.records:
            at, span = parse_time(r.get("time")), r.get("seconds") or 0.0
            if at and r.get("event") == "evaluation":
                add((at - span, at, "evaluation", f"evaluation at step {r['step']}, {span:.1f} s"))
            elif at and r.get("event") == "checkpoint":
                add((at - span, at, "checkpoints", f"checkpoint of step {r['step']}, {span:.1f} s"))
        if is_lost:
            add((lost_from, end, "recomputed", f"{label}: the steps after {kept_step} were lost"))
        if later:
            add((end, next_start, "down", f"not running for {format_duration(next_start - end)}"))
        if own_errors or is_lost or (is_failed and not later):
            text = own_errors[0][1] if own_errors else "" if later else status.get("error")
            text = text or f"It ended at about step {attempt.last_step} without an error in the logs, so it was killed."
            text = f"Attempt {k + 1}: {text}"
            if is_lost:
                text = f"{text.rstrip('.')}. The steps after {kept_step} were lost."
            result.events.append({"event": "fault", "step": None, "at": end, "text": text})
    result.events.sort(key=lambda event: event["at"] or result.started_at)
    return result


def read_errors(logs: Path) -> list[tuple[float, str]]:
    """Return the time and text of the errors in the ranks' log files, the earliest first."""
    errors = []
    files = sorted(logs.glob("rank*.log"), key=lambda file: (len(file.name), file.name))[:MAX_LOGS_READ]
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for match in map(ERROR_LINE.match, lines):
                if match and (at := parse_time(match[1])):
                    errors.append((at, match[4]))
    return sorted(errors)


def draw_timelines(lines: dict[str, Timeline]) -> str:
    """Draw one bar per run with recorded times, each from its own start. The text is empty if no run has any."""
    lines = {name: line for name, line in lines.items() if line.segments}
    if not lines:
        return ""
    last = max(line.ended_at - line.started_at for line in lines.values()) or 1.0
    unit, unit_name = next(entry[1:] for entry in UNITS if last >= entry[0])
    height, scale = ROW_HEIGHT * len(lines) + 42, (WIDTH - 2 * LEFT) / last
    parts = [f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">']
    for value, words in choose_ticks(0, last / unit):
        if value > last / unit:
            continue
        x = LEFT + value * unit * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{height - 36}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 22}" text-anchor="middle">{words}</text>')
    words = f"time since the start of the run, {unit_name}"
    parts.append(f'<text x="{WIDTH / 2}" y="{height - 5}" text-anchor="middle">{words}</text>')
    for k, (name, line) in enumerate(lines.items()):
        y = ROW_HEIGHT * k + BAR_TOP
        count = format_count(line.attempts, "attempt")
        parts.append(f'<text x="{LEFT}" y="{y - 16}"><tspan font-weight="bold">{escape(name)}</tspan>, {count}</text>')
        order = ("down", "start_up", "training", "evaluation", "recomputed", "checkpoints")
        drawn: set[tuple[str, int]] = set()
        for begin, end, phase, text in sorted(line.segments, key=lambda segment: order.index(segment[2])):
            width, is_beside = max(1.0, (end - begin) * scale), phase == "checkpoints"
            x = LEFT + (begin - line.started_at) * scale
            if width == 1.0 and (phase, round(x)) in drawn:
                continue  # a long run has thousands of short segments
            drawn.add((phase, round(x)))
            bar_height = 7 if is_beside else BAR_HEIGHT
            top = y + BAR_HEIGHT - bar_height
            geometry = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{bar_height}"'
            parts.append(f'<rect class="{phase}" {geometry}><title>{escape(text)}</title></rect>')
        seen: set[tuple[str, int]] = set()
        for event in line.events:
            x = LEFT + ((event["at"] or line.started_at) - line.started_at) * scale
            if not event["at"] or (event["event"], round(x)) in seen:
                continue  # a pixel has at most one mark
            seen.add((event["event"], round(x)))
            kind = event["event"] if event["event"] in MARK_RADIUS else "other"
            tip = event.get("text") or f"{event['event'].replace('_', ' ')}, step {event['step']}"
            tip = f"<title>{escape(tip)}</title>"
            parts.append(
                f'<circle class="{kind}" cx="{x:.1f}" cy="{y - 6}" r="{MARK_RADIUS.get(kind, 3)}">{tip}</circle>'
            )
    return "\n".join([*parts, "</svg>"])
