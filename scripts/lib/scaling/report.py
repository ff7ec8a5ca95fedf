"""From measurements to the report: measured points, the next doublings, table and plot. Plain JSON in and out.

The model of more ranks: the compute and data wait of a weak step stay as measured on the most ranks; its exposed
communication grows by the extra time of the gradient all-reduces. A ring all-reduce of S bytes over n ranks takes 2 (n
- 1) alpha + 2 (n - 1) / n S beta (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH", 2005, section 4.5), once per bucket; NCCL's trees take 2 log2(n) alpha.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from lib.scaling import flags
from lib.svg import COLORS, Series, line_plot
from utils.table import format_table

DOUBLINGS = 3


def median(job: dict[str, Any], mode: str, column: int) -> float:
    """Over the rounds of a job: 0 seconds of a step, 1 of its data wait, 2 of a step without communication."""
    return statistics.median(row[column] for row in job[mode]["rounds"])


def measured_point(job: dict[str, Any], mode: str) -> dict[str, Any]:
    step = median(job, mode, 0)
    communication = max(0.0, step - median(job, mode, 2)) if job["ranks"] > 1 else 0.0
    data = min(median(job, mode, 1), step - communication)
    return {
        "ranks": job["ranks"],
        "mode": mode,
        "is_predicted": False,
        "global_batch": job[mode]["samples"],
        "samples_per_s": job[mode]["samples"] / step,
        "step_s": step,
        "compute": (step - data - communication) / step,  # fractions of the step
        "data": data / step,
        "communication": communication / step,
    }


def link(job: dict[str, Any]) -> tuple[float, float]:
    """Seconds per message (alpha) and per byte (beta), from the smallest and the largest measured all-reduce."""
    (_, latency), (size, seconds), ranks = job["all_reduce"][0], job["all_reduce"][-1], job["ranks"]
    alpha = latency / messages(ranks, job["device"])
    return alpha, max(0.0, seconds - latency) / (2 * (ranks - 1) / ranks * size)


def messages(ranks: int, device: str) -> float:
    """Sequential messages in an all-reduce."""
    return 2 * (ranks - 1) if device == "cpu" else 2 * math.log2(ranks)


def gradient_seconds(job: dict[str, Any], ranks: int) -> float:
    """Seconds to all-reduce the whole gradient over `ranks` ranks, with the link of this job."""
    alpha, beta = link(job)
    buckets = math.ceil(job["gradient"] / job["bucket"])
    return buckets * messages(ranks, job["device"]) * alpha + 2 * (ranks - 1) / ranks * job["gradient"] * beta


def predicted_point(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Predict a weak step on more ranks from a job on several."""
    known = measured_point(job, "weak")
    more = gradient_seconds(job, ranks) - gradient_seconds(job, job["ranks"])
    step = known["step_s"] + max(more, -known["communication"] * known["step_s"])
    samples = known["global_batch"] * ranks // job["ranks"]
    shares = {name: known[name] * known["step_s"] / step for name in ("compute", "data")}
    shares["communication"] = 1 - sum(shares.values())
    figures = {"ranks": ranks, "is_predicted": True, "global_batch": samples, "samples_per_s": samples / step}
    return known | figures | {"step_s": step} | shares


def summarize(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """jobs: sorted by number of ranks, from one rank on."""
    points = [measured_point(job, mode) for job in jobs for mode in ("weak", "strong")]
    last = jobs[-1]
    if last["ranks"] > 1:
        points += [predicted_point(last, last["ranks"] * 2**k) for k in range(1, DOUBLINGS + 1)]
    base = {each["mode"]: each["samples_per_s"] for each in points if each["ranks"] == 1}
    for each in points:
        each["efficiency"] = each["samples_per_s"] / each["ranks"] / base[each["mode"]]
    return {"points": points, "advice": flags.advice(last["sweep"]) if "sweep" in last else ""}


def text(report: dict[str, Any]) -> str:
    """The table, and an explanation of it."""
    rows = [["ranks", "scaling", "samples/s", "efficiency", "step", "compute", "data wait", "communication", ""]]
    for each in sorted(report["points"], key=lambda each: (each["mode"] != "weak", each["ranks"])):
        step = f"{each['step_s'] * 1000:,.2f} ms"
        shares = [f"{each[key]:.1%}" for key in ("efficiency", "compute", "data", "communication")]
        row = [each["ranks"], each["mode"], f"{each['samples_per_s']:,.0f}", shares[0], step, *shares[1:]]
        rows.append([*row, "predicted" if each["is_predicted"] else ""])
    meaning = "weak: same micro-batches on each rank; strong: same global batch; communication: not hidden by compute"
    lines, last = [format_table(rows, range(8)), meaning], report["measured"][-1]
    if last["ranks"] > 1:
        alpha, beta = link(last)
        rate = f"{1e-9 / beta:.2f} GB/s per link" if beta else "bandwidth too high to measure"
        lines.append(f"all-reduce of {last['ranks']} ranks: {alpha * 1e6:.0f} us per message, {rate}")
        lines.append("predicted: for more machines of this kind, on a network as fast as this link")
    else:
        lines.append("give --ranks 1,2 here, or measure several nodes (scripts/launch.sh --scaling FILE)")
    for row in last.get("sweep", [])[1:]:
        gained = f"{row['step_s'] * 1000:,.2f} ms per step, {flags.gain(row):+.1%}"
        lines.append(f"  {flags.paste(row['change'])}: {gained}")
    return "\n".join([*lines, report["advice"]]).rstrip()


def plot(report: dict[str, Any], title: str) -> str:
    """An SVG of the efficiency by number of ranks."""
    series = []
    for mode, color in zip(("weak", "strong"), COLORS, strict=False):
        measured, predicted = [], []
        for each in (point for point in report["points"] if point["mode"] == mode):
            curve = predicted if each["is_predicted"] else measured
            curve.append((math.log2(each["ranks"]), 100 * each["efficiency"]))
        series.append(Series(f"{mode} scaling, measured", measured, color))
        if predicted:
            series.append(Series(f"{mode} scaling, predicted", [measured[-1], *predicted], color, is_dashed=True))
    top = max(100.0, *(y for each in series for _, y in each.points))
    y_label = "efficiency in % (samples/s per rank over one rank)"
    ticks = [(math.log2(each["ranks"]), f"{each['ranks']:,}") for each in report["points"] if each["mode"] == "weak"]
    return line_plot(series, x_label="ranks", y_label=y_label, title=title, y_range=(0.0, top), x_ticks=ticks)
