"""From what was measured to what is told: the points, the fitted link, the next doublings as predicted, the table.
Plain JSON in and out."""

from __future__ import annotations

import math
import statistics
from typing import Any

from scales import knobs
from scales.prediction import Link, Machine, Step, efficiency, fit, step_seconds

DOUBLINGS = 3


def median(job: dict[str, Any], mode: str, column: int) -> float:
    """Of a job's rounds: 0 the step's seconds, 1 what of it is waiting for data, 2 the step without communication."""
    return statistics.median(row[column] for row in job[mode]["rounds"])


def measured_point(job: dict[str, Any], mode: str) -> dict[str, Any]:
    step, data = median(job, mode, 0), median(job, mode, 1)
    waited = max(0.0, step - median(job, mode, 2)) if job["ranks"] > 1 else 0.0
    return point(job["ranks"], job["here"], mode, job[mode]["samples"], step, min(data, step - waited), waited, False)


def point(
    ranks: int, here: int, mode: str, samples: int, step: float, data: float, communication: float, is_predicted: bool
) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "here": here,  # on each machine
        "mode": mode,
        "is_predicted": is_predicted,
        "global_batch": samples,
        "samples_per_s": samples / step,
        "step_s": step,
        "compute": (step - data - communication) / step,  # shares of the step
        "data": data / step,
        "communication": communication / step,
    }


def step_of(one: dict[str, Any], job: dict[str, Any]) -> Step:
    """The weak step of a job of one rank, with what DDP does beside it, but for communication, in another job of
    several."""
    found = job["profile"]
    scale = one["profile"]["plain"] / found["plain"]
    forward, backward = scale * found["forward"], scale * found["backward"]
    wrapping = max(0.0, forward + backward - one["profile"]["plain"])
    return Step(
        seconds=median(one, "weak", 0) + wrapping,
        data=median(one, "weak", 1),
        forward=forward,
        backward=backward,
        ready=tuple((scale * when, size) for when, size in found["ready"]),
        passes=one["passes"],
        wrapping=wrapping,
    )


def link_of(job: dict[str, Any]) -> Link:
    return fit(job["all_reduce"], job["ranks"], job["work"], is_ring=job["device"] == "cpu")


def machine_of(jobs: list[dict[str, Any]]) -> Machine:
    """With the slowdown of ranks beside each other, where cores were free for all of them."""
    one = jobs[0]
    cores = one["cores"] if one["device"] == "cpu" else math.inf
    alone = [
        (job["here"], median(job, "weak", 2) / median(one, "weak", 2))
        for job in jobs[1:]
        if job["here"] * job["threads"] <= cores
    ]
    return Machine(cores, one["threads"], ((1, 1.0), *dict(alone).items()))


def scale_of(job: dict[str, Any], batch: int) -> float:
    """Seconds of a micro-batch of that size, in those of batch_size: as a straight line through two measured sizes."""
    size = job["batch"] // job["passes"]
    if batch == size or not job["half"]:
        return 1.0
    whole, half = job["profile"]["plain"], job["half"]["plain"]
    slope = max(0.0, whole - half) / (size - job["half"]["batch"])
    return max(0.0, whole - slope * (size - batch)) / whole


def predicted_points(jobs: list[dict[str, Any]], global_batch: int, numbers: list[int]) -> list[dict[str, Any]]:
    """What so many ranks would give, from the step of one rank, the slowdown of ranks beside it, and the all-reduce of
    the last job."""
    one, last = jobs[0], jobs[-1]
    step, link, machine = step_of(one, jobs[1]), link_of(last), machine_of(jobs)
    found = []
    for ranks in numbers:
        here = min(ranks, max(last["here"], one["room"]) if last["here"] == last["ranks"] else last["here"])
        if ranks == last["ranks"]:
            here = last["here"]
        seconds, waited = step_seconds(step, link, ranks, here, machine)
        found.append(point(ranks, here, "weak", ranks * one["batch"], seconds, step.data, waited, True))
        batch = min(one["batch"] // one["passes"], global_batch // ranks)
        if global_batch and batch and global_batch % (ranks * batch) == 0:
            passes = global_batch // (ranks * batch)
            seconds, waited = step_seconds(step.of(passes, scale_of(one, batch)), link, ranks, here, machine)
            found.append(
                point(
                    ranks,
                    here,
                    "strong",
                    global_batch,
                    seconds,
                    min(step.data * passes, seconds - waited),
                    waited,
                    True,
                )
            )
    return found


def account(jobs: list[dict[str, Any]], global_batch: int) -> dict[str, Any]:
    """jobs: by rising number of ranks, from one rank on."""
    points = [measured_point(job, mode) for job in jobs for mode in ("weak", "strong") if mode in job]
    report: dict[str, Any] = {"points": points, "link": None, "model_error": None, "sweep": [], "advice": ""}
    last = jobs[-1]
    if last["ranks"] > 1:
        link = link_of(last)
        rows = [[size, seconds, link.seconds(last["ranks"], size)] for size, seconds in last["all_reduce"]]
        report["link"] = vars(link) | {"ranks": last["ranks"], "rows": rows}
        again, *more = predicted_points(jobs, global_batch, [last["ranks"] * 2**k for k in range(DOUBLINGS + 1)])
        report["model_error"] = again["step_s"] / median(last, "weak", 0) - 1
        points += [each for each in more if each["ranks"] > last["ranks"]]
    if "sweep" in last:
        report |= {"sweep": last["sweep"], "advice": knobs.advice(last["sweep"])}
    base = {each["mode"]: each["samples_per_s"] for each in points if each["ranks"] == 1}
    for each in points:
        each["efficiency"] = efficiency(each["samples_per_s"], each["ranks"], base[each["mode"]], 1)
    return report


def sentences(report: dict[str, Any], room: int) -> list[str]:
    """The table, and what else is to be said."""
    rows = [["ranks", "scaling", "samples/s", "efficiency", "step", "compute", "data wait", "communication", ""]]
    for each in sorted(report["points"], key=lambda each: (each["mode"] != "weak", each["ranks"])):
        shares = [f"{each[name]:.1%}" for name in ("compute", "data", "communication")]
        row = [f"{each['ranks']}", each["mode"], f"{each['samples_per_s']:,.0f}", f"{each['efficiency']:.1%}"]
        rows.append([*row, f"{each['step_s'] * 1000:,.2f} ms", *shares, "predicted" if each["is_predicted"] else ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(
        "weak: the same micro-batches on each rank; strong: the same global batch; communication: what no computing"
        " hides"
    )
    if report["link"] is None:
        lines.append(
            "one rank alone waits for nobody: give --ranks 1,2 here, or measure several nodes (scripts/launch.sh"
            " --scaling FILE)"
        )
    if link := report["link"]:
        worst = max(report["link"]["rows"], key=lambda row: abs(math.log(row[2] / row[1])))
        rate = f"{1e-9 / link['beta']:.2f} GB/s" if link["beta"] else "any"
        text = f"all-reduce of {link['ranks']} ranks: {link['alpha'] * 1e6:.0f} us a message, {rate} a link"
        lines.append(f"{text} (worst of the fit: {worst[2] / worst[1] - 1:+.0%} at {worst[0]:,} bytes)")
        largest = max(each["ranks"] for each in report["points"] if not each["is_predicted"])
        lines.append(
            f"predicted: by that link and the step of one rank; for {largest} ranks the same gives"
            f" {report['model_error']:+.1%} of what was measured"
        )
        if any(each["ranks"] > each["here"] and each["is_predicted"] for each in report["points"]) and all(
            each["ranks"] == each["here"] for each in report["points"] if not each["is_predicted"]
        ):
            lines.append(
                f"beyond {room} ranks: on more machines like this one, on a network as fast as the link above"
                " (launch.sh --scaling measures it)"
            )
    for row in report["sweep"][1:]:
        name = ", ".join(f"{key}={value}" for key, value in row["change"].items())
        lines.append(
            f"  {name}: " + (row.get("problem") or f"{row['step_s'] * 1000:,.2f} ms a step, {knobs.gain(row):+.1%}")
        )
    return [*lines, report["advice"]] if report["advice"] else lines
