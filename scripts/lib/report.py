# extra: reports
"""Write an HTML report of runs, as one self-contained page.

It has figures, curves, a timeline, settings and provenance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from scripts.lib import timeline
from scripts.lib.svg import Series, choose_color, draw_line_plot
from utils.logger import format_duration
from utils.metrics import RESERVED_NAMES
from utils.report.goodput import TIME_ACCOUNTS, sum_account_seconds

MAX_POINTS, MAX_EVENTS, OPEN_PLOTS = 500, 1000, 4  # points per curve, rows per table and unfolded plots
MAX_TEXT = 240  # characters of an event's details
HIDDEN_DETAILS = (
    "kind event step epoch time at path text samples_seen previous_step previous_time previous_state".split()
)
DATA_WAIT = "data wait, % of the step time"
STEP_TIME = "step time, s (mean of the ranks)"
TRAINING_METRICS = (DATA_WAIT, STEP_TIME, "samples_per_s", "lr", "grad_norm")  # these are plotted after the metrics
STYLE_FILE = Path(__file__).with_name("report.css")


def format_page(runs: dict[str, Any], differing: list[str]) -> str:
    """Return the page.

    Args:
        runs: each run, which is a RunInfo, by the name to show.
        differing: the names of the settings that differ.
    """
    timelines = {
        name: timeline.build_timeline(run.folder, run.records, run.status, run.attempts) for name, run in runs.items()
    }
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    title = ", ".join(runs) if len(runs) <= 3 else f"{len(runs)} runs"
    errors = [
        f'<p class="error">{escape(name)}: {escape(str(run.status["error"]))}</p>'
        for name, run in runs.items()
        if run.status.get("error")
    ]
    figures = {name: collect_headline_figures(run, timelines[name]) for name, run in runs.items()}
    if len(runs) == 1:
        cells = [f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in figures[next(iter(runs))].items()]
        figures_html = f'<dl class="cards">{"".join(cells)}</dl>'
    else:
        figures_html = format_table_by_run(figures)
    parts = [
        f"<h1>{escape(title)}</h1><p>report of {when}</p>",
        *errors,
        format_section("Headline figures", figures_html),
    ]
    parts += [format_section("Curves", plot_all_metrics(runs)), format_section("Timeline", format_timelines(timelines))]
    parts += [
        format_section(
            "Where the time went", format_table_by_run({name: format_account_times(run) for name, run in runs.items()})
        )
    ]
    settings = {name: run.config for name, run in runs.items()}
    text = format_table_by_run({name: {key: config.get(key) for key in differing} for name, config in settings.items()})
    text = (text or "<p>No setting differs.</p>") if len(runs) > 1 else ""
    parts.append(format_section("Configuration", text + format_details("all settings", format_table_by_run(settings))))
    parts.append(
        format_section("Provenance", format_table_by_run({name: select_provenance(run) for name, run in runs.items()}))
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    icon = '<link rel="icon" href="data:,">'  # without an icon a browser asks the server for one
    head += f"{icon}<title>{escape(title)}</title><style>{STYLE_FILE.read_text(encoding='utf-8')}</style>"
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def collect_headline_figures(run: Any, run_timeline: timeline.Timeline) -> dict[str, str]:
    """Return the headline figures of a run. If the run is not completed, they are those so far."""
    status, summary, seconds = run.status, run.summary, read_account_seconds(run)
    is_current = summary.get("state") == status.get("state")
    summary = summary if is_current else {}
    train = [record for record in run.records if record["kind"] == "train"]
    last, waited = train[-1] if train else {}, seconds["training"] + seconds["data_wait"]
    metric, final = summary.get("best_metric"), summary.get("final") or {}
    rate = summary.get("samples_per_s") or last.get("samples_per_s")
    wall = summary.get("wall_s") or run_timeline.ended_at - run_timeline.started_at
    tested = [item for record in summary.get("test") or [] for item in record.items()]
    values = {
        "state": status.get("state", "unknown"),
        "epochs": status.get("epoch"),
        "optimizer steps": status.get("step"),
        f"best {metric}": summary.get("best_value") if metric else None,
        "final evaluation loss": final.get("loss"),
        **{f"test {name}": value for name, value in tested if name not in RESERVED_NAMES},
        "training loss": last.get("loss"),
        "wall time": format_duration(wall) if wall else None,
        "goodput": f"{seconds['training'] / sum(seconds.values()):.0%}" if waited else None,
        "restarts": summary.get("restarts", run_timeline.attempts - 1 if run_timeline.attempts else None),
        "recomputed": format_duration(seconds["recomputed"]) if seconds["recomputed"] else None,
        "skipped steps": summary.get("skipped_steps"),
        "samples/s": f"{rate:,.0f}" if rate else None,
        "data wait": f"{seconds['data_wait'] / waited:.1%}" if waited else None,
        "peak memory": f"{last['peak_memory_bytes'] / 2**30:.2f} GiB" if last.get("peak_memory_bytes") else None,
        "ranks": summary.get("world_size") or run.provenance.get("world_size"),
        "last update": str(status.get("time", ""))[:19].replace("T", " ") if status.get("state") == "running" else None,
    }
    return {name: format_value(value) for name, value in values.items() if value is not None}


def read_account_seconds(run: Any) -> dict[str, float]:
    """Return the seconds by account.

    They come from the summary if it is current. Otherwise they count up to the last sign of life.
    """
    seconds: dict[str, Any] = sum_account_seconds(run.attempts)
    if run.summary.get("state") == run.status.get("state"):
        seconds |= {name: (run.summary.get("time") or {}).get(f"{name}_s") for name in TIME_ACCOUNTS}
    return {name: value if isinstance(value, int | float) else 0.0 for name, value in seconds.items()}


def format_account_times(run: Any) -> dict[str, str]:
    seconds = read_account_seconds(run)
    total = sum(seconds.values())
    return {name.replace("_", " "): f"{format_duration(s)} ({s / total:.1%})" for name, s in seconds.items() if total}


def select_provenance(run: Any) -> dict[str, Any]:
    entries = {
        name: value
        for name, value in run.provenance.items()
        if name not in ("ranks", "identity", "content", "sketches", "held_out", "classes")
    }
    devices = sorted({str(rank.get("device")) for rank in run.provenance.get("ranks") or []})
    command = entries.pop("command", None)
    first = {"folder": str(run.folder), "command": " ".join(map(str, command)) if command else None, "devices": devices}
    return {name.replace("_", " "): value for name, value in (first | entries).items() if value not in (None, [])}


def format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item != "")
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else f"{value:,}" if type(value) is int else json.dumps(value)


# ---- pieces of HTML ----


def format_section(title: str, text: str) -> str:
    return f"<section><h2>{title}</h2>\n{text}\n</section>"


def format_details(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>{text}</details>" if text else ""


def format_html_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def format_table_by_run(values: dict[str, dict[str, Any]]) -> str:
    """Return a table with a column per run. It is empty if no run has a value."""
    names = list(dict.fromkeys(name for run_values in values.values() for name in run_values))
    cell = {
        run: {name: format_value(run_values[name]) if name in run_values else "" for name in names}
        for run, run_values in values.items()
    }
    rows = ([name, *(cell[run][name] for run in values)] for name in names)
    return format_html_table(["", *values], rows) if names else ""


# ---- curves ----


def plot_all_metrics(runs: dict[str, Any]) -> str:
    """Return a plot for each metric and each rate, with the curves of all runs. The first plots are unfolded."""
    for record in (record for run in runs.values() for record in run.records if record.get("step_s")):
        record[DATA_WAIT] = 100 * (record.get("data_wait_s") or 0.0) / record["step_s"]
        record[STEP_TIME] = record["step_s"]
    by_kind = {
        kind: [r for run in runs.values() for r in run.records if r["kind"] == kind] for kind in ("eval", "train")
    }
    present = dict.fromkeys(name for records in by_kind.values() for record in records for name in record)
    names = [name for name in present if name not in (*TRAINING_METRICS, *RESERVED_NAMES)]
    chosen = [run.summary.get("best_metric") for run in runs.values()]
    names.sort(key=lambda name: (name != "loss", name not in chosen))
    names[OPEN_PLOTS - 1 : OPEN_PLOTS - 1] = TRAINING_METRICS[:1]  # the data wait is always among the first
    names += TRAINING_METRICS[1:]
    plots = [text for name in names if (text := plot_metric(runs, name))]
    few, remaining = (
        f'<div class="plots">{"".join(group)}</div>' for group in (plots[:OPEN_PLOTS], plots[OPEN_PLOTS:])
    )
    folded_plots = format_details(f"{len(plots) - OPEN_PLOTS} more plots", remaining) if len(plots) > OPEN_PLOTS else ""
    if not plots:
        return "<p>No records yet.</p>"
    caption = ""
    if len(runs) > 1:  # a single run has a legend
        caption = "<p>Solid: evaluation. Dashed: training.</p>"
    return caption + few + folded_plots


def plot_metric(runs: dict[str, Any], name: str) -> str:
    """Return the plot of a metric. It is empty if no run has a number of this name."""
    series, marks = [], []
    for k, (label, run) in enumerate(runs.items()):
        train, evaluations = ([r for r in run.records if r["kind"] == kind] for kind in ("train", "eval"))
        is_average = any(r.get("weights") == "ema" for r in evaluations)  # the average chooses the best checkpoint
        has_val = any(r.get("split") == "val" for r in evaluations)  # otherwise training evaluates the test set
        chosen_records = [r for r in evaluations if (r.get("weights") == "ema") == is_average]
        solid = sample_points([r for r in chosen_records if not has_val or r.get("split") == "val"], name)
        dashed = sample_points(train, name)
        color, is_alone = choose_color(k, len(runs)), len(runs) == 1
        legend = "evaluation" if is_alone else label
        if is_average:
            legend += " (averaged weights)"
        if dashed:
            named, tip = "training" if is_alone else "" if solid else label, f"{label}, training"
            series.append(Series(named, dashed, color, bool(solid), has_markers=False, width=1.6, tooltip=tip))
        if solid:
            series.append(Series(legend, solid, color, has_markers=len(solid) <= 60, tooltip=f"{label}, evaluation"))
        last = max((x for x, _ in solid + dashed), default=0)
        resumed = [r["step"] for r in run.records if r.get("event") == "resumed" and r["step"] <= last]
        for n, step in enumerate(resumed):
            words = "resumed" if n == 0 else ""
            marks.append((step, words, color))
    if not series:
        return ""
    highest = max(y for curve in series for _, y in curve.points if y is not None)
    y_range = (0.0, 1.0) if name in ("top1", "top5", "accuracy") else None
    if name in TRAINING_METRICS and highest > 0:
        y_range = (0.0, round_up(highest))
    name = name.replace("_per_", "/").replace("_", " ") if name in TRAINING_METRICS else name
    return draw_line_plot(
        series, x_label="optimizer step", y_label=name, y_range=y_range, marks=marks, has_tooltips=True
    )


def round_up(value: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(magnitude * k for k in (1, 2, 2.5, 5, 10) if value <= magnitude * k)


def sample_points(records: list[dict[str, Any]], name: str) -> list[tuple[float, float | None]]:
    """Return about MAX_POINTS points of a curve at most.

    A y is None where the value was not finite. The list is empty if no record has a number.
    """
    pairs = [(r["step"], r[name] if isinstance(r[name], int | float) else None) for r in records if name in r]
    pairs = pairs[: -1 : -(-len(pairs) // MAX_POINTS) or 1] + pairs[-1:]
    return pairs if any(y is not None for _, y in pairs) else []


# ---- timeline ----


def format_timelines(timelines: dict[str, timeline.Timeline]) -> str:
    picture = timeline.draw_timelines(timelines)
    phases = {phase for run_timeline in timelines.values() for *_, phase, _ in run_timeline.segments}
    kinds = {event["event"] for run_timeline in timelines.values() for event in run_timeline.events}
    legend = "".join(
        f'<span><svg viewBox="0 0 14 14"><rect class="{name}" x="1" y="1" width="12" height="12"/></svg>{text}</span>'
        for name, text in timeline.PHASES.items()
        if name in phases
    ) + "".join(
        f'<span><svg viewBox="0 0 14 14"><circle class="{kind}" cx="7" cy="7" r="{size}"/></svg>'
        f"{kind.replace('_', ' ')}</span>"
        for kind, size in timeline.MARK_RADIUS.items()
        if kind in kinds
    )
    events = [(name, run_timeline, event) for name, run_timeline in timelines.items() for event in run_timeline.events]
    routine = ("checkpoint", "best")
    listed = [
        format_event_table(
            [entry for entry in events if (entry[2]["event"] in routine) == is_routine], len(timelines) > 1
        )
        for is_routine in (False, True)
    ]
    no_times_text = (
        "<p>No attempt times are recorded: the run was written by an earlier version, or has not started training"
    )
    text = f'{picture}<div class="legend">{legend}</div>' if picture else f"{no_times_text}.</p>"
    fault_table = listed[0] or "<p>No faults, restarts, skipped steps or stragglers.</p>"
    event_tables = format_slow_ranks(timelines) + fault_table + format_details("checkpoints", listed[1])
    return f'{text}<div class="events">{event_tables}</div>'


def format_slow_ranks(timelines: dict[str, timeline.Timeline]) -> str:
    """Return a table of the ranks that were slow, the slowest first.

    It is empty if none was slow, because only slow ranks are recorded by rank.
    """
    by_rank: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name, run_timeline in timelines.items():
        for event in (event for event in run_timeline.events if event["event"] == "straggler"):
            key = (name, *(format_value(event.get(part, "")) for part in ("rank", "host", "cause")))
            by_rank.setdefault(key, []).append(event)
    rows = [
        (max(straggler.get("times") or 0.0 for straggler in stragglers), len(stragglers), key)
        for key, stragglers in by_rank.items()
    ]
    head = ["run", "rank", "host", "cause", "log windows", "step time, x median rank, at most"]
    return (
        format_html_table(
            head, ([*key, format_value(count), format_value(worst)] for worst, count, key in sorted(rows, reverse=True))
        )
        if rows
        else ""
    )


def format_event_table(events: list[tuple[str, timeline.Timeline, dict[str, Any]]], has_names: bool) -> str:
    rows = []
    for name, line, event in events[-MAX_EVENTS:]:
        at, details = event["at"], {key: value for key, value in event.items() if value not in ("", None, [])}
        details = {key: value for key, value in details.items() if key not in HIDDEN_DETAILS}
        details |= {"checkpoint": str(details["checkpoint"]).rpartition("/")[2]} if "checkpoint" in details else {}
        text = event.get("text") or ", ".join(
            f"{key.replace('_', ' ')} {format_value(value)}" for key, value in details.items()
        )
        since = format_duration(at - line.started_at) if at and line.started_at else ""
        when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if at else ""
        row = [
            since,
            when,
            event["event"].replace("_", " "),
            format_value(event["step"] or ""),
            text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ...",
        ]
        rows.append([name, *row] if has_names else row)
    head = ["elapsed", "time (UTC)", "event", "step", "details"]
    left_out = f"<p>The last {MAX_EVENTS:,} of {len(events):,}.</p>" if len(events) > MAX_EVENTS else ""
    return left_out + format_html_table(["run", *head] if has_names else head, rows) if rows else ""
