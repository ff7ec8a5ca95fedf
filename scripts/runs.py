# extra: reports
"""Print a table of runs with the settings that differ between them, and plot their curves.

python scripts/runs.py [FOLDER ...]                       the runs in runs/, or in the folders given
python scripts/runs.py runs --plot curves.svg             also plot their curves (training dashed, evaluation solid)
python scripts/runs.py runs/a runs/b --plot ab.svg --metric loss --title "learning rates"
python scripts/runs.py runs/a runs/b --html report.html   an HTML report: figures, curves, timeline and settings
python scripts/runs.py --compare runs/a runs/b            compare the final weights bitwise; exit code 1 if they differ
python scripts/runs.py runs --json                        the runs as a JSON list (with --compare: what differs)

The exit code is 1 if runs differ, and 2 if there is no run, or if one cannot be read.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib import listing
from scripts.lib.svg import Series, choose_color, draw_line_plot, parse_output_path
from utils.files import BOOT_ID_FILE, read_json, read_records
from utils.logger import format_count
from utils.report.goodput import split_attempts
from utils.run.command_line import repair_standard_streams
from utils.settings.errors import UserError
from utils.table import format_table

IGNORED_SETTINGS = ("run_dir", "checkpoint_dir", "resume_from", "overwrite", "init_method")
AXIS_LABELS = {"top1": "top-1 accuracy", "top5": "top-5 accuracy"}
SECONDS_UNTIL_STALE = 120.0  # a live owner of a run folder touches its lock.json more often
NO_RECORDS = '--metric must be a metric that a run has recorded, got "{}". Give a metric of the eval records.'


class RunInfo:
    """The files of one run."""

    def __init__(self, folder: Path, title: str = "") -> None:
        self.folder, self.title = folder, title or str(folder)
        self.config = read_json(folder / "config.json")
        self.status = read_json(folder / "status.json")
        if self.status.get("state") == "running" and not may_be_running(folder):
            self.status["state"] = "killed"  # no rank was left to write the state
        self.summary = read_json(folder / "summary.json")
        self.provenance = read_json(folder / "provenance.json")
        records = read_records(folder / "metrics.jsonl")
        self.records = [
            r for *_, r in records if isinstance(r, dict) and "kind" in r and isinstance(r.get("step"), int)
        ]
        self.attempts = split_attempts(self.records, self.status.get("time"), self.status.get("step"))

    def size(self) -> int:
        """Return the size of the folder in bytes. Hard links count once. A live run replaces its files meanwhile."""
        sizes = {}
        for folder, _, names in os.walk(self.folder):  # unlike rglob, it skips folders that disappear
            for name in names:
                with suppress(FileNotFoundError):
                    status = os.stat(os.path.join(folder, name))
                    sizes[status.st_ino] = status.st_size
        return sum(sizes.values())

    def curve(self, kind: str, name: str) -> list[tuple[int, float]]:
        records = (r for r in self.records if r["kind"] == kind and r.get("weights") != "ema")
        return [(r["step"], r[name]) for r in records if r.get(name) is not None]


def may_be_running(folder: Path) -> bool:
    """Return whether the run's owner may be alive.

    A live owner holds the file lock, or is on another machine and touches lock.json.
    """
    try:
        with open(folder / ".lock", "rb") as file:  # this asks for the lock without taking it
            request = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            is_held = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, request))[0] != fcntl.F_UNLCK
        is_here = read_json(folder / "lock.json").get("boot") == BOOT_ID_FILE.read_text().strip()
        is_fresh = time.time() - (folder / "lock.json").stat().st_mtime < SECONDS_UNTIL_STALE
    except OSError:  # a copy of a run has no lock, and systems other than Linux have no such question
        return True
    return is_held or (is_fresh and not is_here)


def find_runs(sources: list[str], choose_steps: Callable[[list[int], int], list[int]] | None = None) -> list[RunInfo]:
    """Find the runs (folders with a status.json) in these folders and at these URLs.

    Args:
        sources: the folders and URLs.
        choose_steps: a function that returns the checkpoints that are needed of a run at a URL.

    Raises:
        UserError: if there are no runs.
    """
    titles: dict[Path, str] = {}
    for source in sources:
        if "://" in source:  # extra: companions
            from scripts.lib.mirrored_run import local_run  # imported here, since few runs are at URLs

            titles[local_run(source, choose_steps or (lambda steps, best: []))] = source
            continue
        titles |= {file.parent: "" for file in sorted(Path(source).glob("**/status.json"))}
    if not titles:
        raise UserError(f"There is no run (a folder with a status.json) in {' '.join(sources)}. Give a run folder.")
    return [RunInfo(folder, title) for folder, title in titles.items()]


def choose_metric(runs: list[RunInfo]) -> str:
    """Return the metric by which most of the runs choose their best checkpoint, or the loss if none does."""
    names = [run.summary["best_metric"] for run in runs if run.summary.get("best_metric")]
    return max(names, key=names.count, default="loss")


def sort_runs(runs: list[RunInfo], by: str) -> list[RunInfo]:
    """Sort runs by a setting or a metric of the best evaluation. Raises UserError.

    Numbers come first, then text, and then runs without a value.
    """
    values = {id(run): {**run.config, **(run.summary.get("best") or {})}.get(by) for run in runs}
    with_value = [run for run in runs if values[id(run)] is not None]
    if not with_value:
        raise UserError(
            f'--sort must be a setting or metric that a run has, got "{by}". Give a setting, or a metric of the eval'
            " records."
        )
    with_value.sort(key=lambda run: (isinstance(values[id(run)], str), values[id(run)]))  # auto after all numbers
    return with_value + [run for run in runs if values[id(run)] is None]


def label_runs(runs: list[RunInfo]) -> list[str]:
    """Return the folder names of the runs, or their paths if two runs have the same name."""
    names = [run.folder.name for run in runs]
    return names if len({*names}) == len(names) else [run.title for run in runs]


def find_differing_settings(runs: list[RunInfo]) -> list[str]:
    names = [name for name in dict.fromkeys(n for run in runs for n in run.config) if name not in IGNORED_SETTINGS]
    return [name for name in names if len({json.dumps(run.config.get(name)) for run in runs if run.config}) > 1]


def format_runs(runs: list[RunInfo], metric: str) -> str:
    """Format one row per run, with state, progress, results, time, size, and the settings that differ."""
    differing = find_differing_settings(runs)
    rows: list[list[Any]] = [["run", "state", "epochs", "step", "best", f"final {metric}", "minutes", "MB", *differing]]
    for run in runs:
        summary, status = run.summary, run.status
        best, wall = summary.get("best_value"), summary.get("wall_s")
        final = (summary.get("final") or {}).get(metric)
        rows.append([run.title, *(status.get(name) for name in ("state", "epoch", "step"))])
        rows[-1] += [f"{summary['best_metric']} {best:.4f}" if best is not None else "-"]
        rows[-1] += [f"{final:.4f}" if final is not None else "-", f"{wall / 60:.1f}" if wall else "-"]
        rows[-1] += [f"{run.size() / 1e6:.0f}", *(run.config.get(name, "-") for name in differing)]
    return format_table(rows)


def plot_curves(runs: list[RunInfo], metric: str, title: str = "") -> str:
    """Draw an SVG with the evaluation curves (solid) and the training curves (dashed) of all runs. Raises UserError."""
    series, marks = [], []
    for k, (label, run) in enumerate(zip(label_runs(runs), runs, strict=True)):
        # with up to three runs, earlier lines are wider, so that later lines do not hide them
        covering = len(runs) - 1 - k if len(runs) <= 3 else 0
        look: dict[str, Any] = {
            "color": choose_color(k, len(runs)),
            "width": 2 + 5 * covering,
            "opacity": 0.35 if covering else 1.0,
        }
        solid, dashed = run.curve("eval", metric), run.curve("train", metric)
        series.append(Series(label + (" (dashed: training)" if dashed else ""), solid, **look))
        series.append(Series("", dashed, is_dashed=True, has_markers=False, **look))
        resumed = (record for record in run.records if record.get("event") == "resumed")
        for event in resumed:
            ranks = event.get("world_size")
            words = f"resumed on {format_count(ranks, 'rank')}" if ranks else "resumed"
            marks.append((event["step"], words, look["color"]))
    if not any(curve.points for curve in series):
        raise UserError(NO_RECORDS.format(metric))
    y_range = (0.0, 1.0) if metric in ("top1", "top5", "accuracy") else None
    label = AXIS_LABELS.get(metric, metric)
    return draw_line_plot(series, x_label="optimizer step", y_label=label, title=title, y_range=y_range, marks=marks)


def hash_weights(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each weight in the latest checkpoint, by name.

    Raises:
        UserError: if there is no checkpoint.
    """
    import torch

    from utils.checkpoint import format as checkpoint

    path, _ = checkpoint.find_best_or_latest(folder, prefer_best=False)
    weights = {
        name: weight.flatten().contiguous().view(torch.uint8)
        for name, weight in checkpoint.read_checkpoint(path)[0]["model"].items()
    }
    return {name: hashlib.sha256(weights[name].numpy()).hexdigest() for name in sorted(weights)}


def compare_weights(runs: list[RunInfo]) -> dict[str, Any]:
    """Return whether the final weights of all runs are bitwise equal, and which differ from those of the first run.

    Raises:
        UserError: if the weights cannot be compared.
    """
    if len(runs) < 2:
        raise UserError("--compare needs two runs. Give their folders.")
    first, *other_digests = digests = [hash_weights(run.folder) for run in runs]
    differences = []
    for name in dict.fromkeys(name for run_digests in digests for name in run_digests):
        pairs = zip(runs[1:], other_digests, strict=True)
        if differing := [run.title for run, run_digests in pairs if run_digests.get(name) != first.get(name)]:
            differences.append({"weight": name, "runs": differing})
    named = [
        {
            "run": run.title,
            "weights": hashlib.sha256(json.dumps(run_digests).encode()).hexdigest(),
            "restarts": run.summary.get("restarts"),
        }
        for run, run_digests in zip(runs, digests, strict=True)
    ]
    return {"equal": not differences, "differences": differences, "runs": named}


def print_divergence(sources: list[str], may_replay: bool) -> bool:  # extra: replay
    """Print where two runs diverge, or two dumps of scripts/replay.py. Return whether they are equal."""
    from scripts.lib.diverge import compare_dump_files, compare_runs  # this imports torch

    if len(sources) != 2:
        raise UserError("--diverge needs two runs. Give their folders.")
    if all(os.path.isfile(source) for source in sources):
        text, is_equal = compare_dump_files([*map(Path, sources)])
    else:
        a, b = (find_runs([source], (lambda steps, best: steps) if may_replay else None)[0] for source in sources)
        label_a, label_b = label_runs([a, b])
        text, is_equal = compare_runs(a, b, find_differing_settings([a, b]), (label_a, label_b), may_replay)
    print(text)
    return is_equal


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "folders", nargs="*", default=["runs"], help="run folders, or URLs of mirrored runs (default: runs)"
    )
    parser.add_argument("--plot", type=parse_output_path, metavar="FILE.svg", help="plot the curves in this file")
    parser.add_argument("--title", default="", help="title of the plot")
    parser.add_argument(
        "--metric",
        default="",
        help="metric to show: loss, top1, ... (default: the one that selects the best checkpoint)",
    )
    parser.add_argument(
        "--html",
        type=lambda text: parse_output_path(text, ".html"),
        metavar="FILE.html",
        help="write an HTML report to this file",
    )
    parser.add_argument("--sort", default="", metavar="NAME", help="sort by a setting or metric of the best evaluation")
    parser.add_argument(
        "--compare", action="store_true", help="compare the final weights (the exit code is 1 if they differ)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on standard output")
    parser.add_argument(  # extra: replay
        "--diverge",
        action="store_true",
        help="find where two runs, or two files of scripts/replay.py --dump, diverge (the exit code is 1 if they do)",
    )
    parser.add_argument(  # extra: replay
        "--replay", action="store_true", help="with --diverge, repeat both runs to find the step"
    )
    options = parser.parse_args()
    if options.replay and not options.diverge:  # extra: replay
        parser.error("--replay repeats the runs of --diverge. Add --diverge.")
    if options.json and options.diverge:  # extra: replay
        parser.error("--json does not go with --diverge, which prints text only. Leave out --json.")
    try:
        if options.diverge:  # extra: replay
            return int(not print_divergence(options.folders, options.replay))
        return show_runs(options)
    except UserError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        text = f"{error.filename} cannot be used ({error.strerror}). Fix that, or leave this path out."
        print(text, file=sys.stderr)
    except Exception:  # with Python's exit code 1 the runs would seem to differ
        traceback.print_exc()
    return 2


def show_runs(options: argparse.Namespace) -> int:
    """Print and write what is asked for, and return the exit code. Raises UserError."""
    runs = find_runs(options.folders, (lambda steps, best: steps[-1:]) if options.compare else None)
    runs = sort_runs(runs, options.sort) if options.sort else runs
    metric = options.metric or choose_metric(runs)
    if options.metric and not any(run.curve(kind, metric) for run in runs for kind in ("train", "eval")):
        raise UserError(NO_RECORDS.format(metric))
    say = functools.partial(print, file=sys.stderr if options.json else sys.stdout)
    if not options.json:
        say(format_runs(runs, metric))
    if options.plot:
        options.plot.write_text(plot_curves(runs, metric, options.title), encoding="utf-8", errors="backslashreplace")
        say(f"The plot was written to {options.plot}.")
    if options.html:
        from scripts.lib import report  # this imports torch

        shown = dict(zip(label_runs(runs), runs, strict=True))
        page = report.format_page(shown, find_differing_settings(runs))
        options.html.write_text(page, encoding="utf-8", errors="backslashreplace")
        say(f"The report was written to {options.html}.")
    comparison = compare_weights(runs) if options.compare else {}
    if options.json:
        print(listing.as_json(comparison) if comparison else listing.runs_as_json(runs))
    elif comparison:
        for entry in comparison["runs"]:
            restarts = "-" if entry["restarts"] is None else entry["restarts"]
            print(f"{entry['run']}: weights {entry['weights'][:16]}, restarts: {restarts}")
        print("The weights are bitwise equal." if comparison["equal"] else "The weights DIFFER.")
    return int(not comparison.get("equal", True))


if __name__ == "__main__":
    repair_standard_streams()
    sys.exit(main())
