"""A table of runs with only the settings in which they differ, and one picture of their curves.

python scripts/runs.py [FOLDER ...]                       the runs below runs/, or in the folders given
python scripts/runs.py runs --plot curves.svg             and their curves (train dashed, evaluation solid)
python scripts/runs.py runs/a runs/b --plot ab.svg --metric loss
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import UserError

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
NOT_SETTINGS = ("run_dir", "checkpoint_dir", "resume_from", "overwrite", "init_method")
PARTNERS = {"top1": "accuracy"}  # what train records call it


@dataclass
class RunInfo:
    """One run as its files tell it."""

    folder: Path
    config: dict[str, Any]
    status: dict[str, Any]
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    size: int  # bytes

    @classmethod
    def read(cls, folder: Path) -> RunInfo:
        config, status, summary = (read_json(folder / f"{name}.json") for name in ("config", "status", "summary"))
        path = folder / "metrics.jsonl"
        records = (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        )
        size = sum(
            file.stat().st_size for file in {f.stat().st_ino: f for f in folder.rglob("*") if f.is_file()}.values()
        )
        return cls(folder, config, status, summary, records, size)

    def curve(self, kind: str, name: str) -> list[tuple[int, float]]:
        return [
            (r["step"], r[name])
            for r in self.records
            if r["kind"] == kind and r.get("weights") != "ema" and r.get(name) is not None
        ]


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def find_runs(folders: list[Path]) -> list[RunInfo]:
    """A folder that has a status.json is a run; others are searched for some."""
    found = [
        path.parent
        for folder in folders
        for path in sorted([*folder.glob("status.json"), *folder.glob("**/status.json")])
    ]
    return [RunInfo.read(folder) for folder in dict.fromkeys(found)]


def table(runs: list[RunInfo]) -> str:
    """One line a run: state, progress, results, time, size, and the settings that are not the same in all of them."""
    names = [name for name in dict.fromkeys(n for run in runs for n in run.config) if name not in NOT_SETTINGS]
    differing = [name for name in names if len({json.dumps(run.config.get(name)) for run in runs if run.config}) > 1]
    rows = [["run", "state", "epoch", "step", "best", "final top1", "minutes", "MB", *differing]]
    for run in runs:
        best = (
            f"{run.summary['best_metric']} {run.summary['best_value']:.4f}"
            if run.summary.get("best_value") is not None
            else "-"
        )
        top1 = run.summary.get("final_top1")
        wall = run.summary.get("wall_s")
        known = [run.status.get("state"), run.status.get("epoch"), run.status.get("step"), best]
        known += [
            f"{top1:.4f}" if top1 is not None else "-",
            f"{wall / 60:.1f}" if wall else "-",
            f"{run.size / 1e6:.0f}",
        ]
        rows.append([str(run.folder), *map(str, known), *(str(run.config.get(name, "-")) for name in differing)])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plot(runs: list[RunInfo], metric: str) -> str:
    """An SVG of the evaluation curves of all runs (solid, with dots) over their training curves (dashed), by optimizer
    step."""
    solid = [run.curve("eval", metric) for run in runs]
    dashed = [run.curve("train", PARTNERS.get(metric, metric)) for run in runs]
    points = [point for curve in solid + dashed for point in curve]
    if not points:
        raise UserError(f"metric={metric}: no run has records of it; give one that eval records have")
    left, top, right, bottom = 62, 26 + 18 * len(runs), 20, 46
    width, height = 760, 380 + top
    low, high = min(y for _, y in points), max(y for _, y in points)
    if metric in ("top1", "top5", "accuracy"):
        low, high = 0.0, 1.0
    last = max(x for x, _ in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (width - left - right) * x / max(1, last)
        return across, top + (height - top - bottom) * (1 - (y - low) / max(1e-12, high - low))

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
            ' font-size="12">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for value in (low + (high - low) * k / 5 for k in range(6)):
        _, y = place(0, value)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#333">{value:.3g}</text>')
    for step in range(0, last + 1, round_step(last)):
        x, _ = place(step, low)
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#333">{step:,}</text>')
    parts.append(
        f'<text x="{(width + left) / 2}" y="{height - 8}" text-anchor="middle" fill="#333">optimizer step</text>'
    )
    for k, run in enumerate(runs):
        # how many are drawn over this one: it shows under them
        color, above = (
            COLORS[k % len(COLORS)],
            len(runs) - 1 - k,
        )
        wide = f'stroke-width="{2 + 5 * above}" opacity="{0.35 if above else 1}"'
        for curve, style in ((dashed[k], f'stroke-dasharray="4 3" {wide}'), (solid[k], wide)):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'
            for x, y in (place(*point) for point in solid[k])
        ]
        for event in (record for record in run.records if record.get("event") == "resumed"):
            x, y = place(event["step"], low)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{y:.1f}" stroke="{color}" stroke-dasharray="1 3"/>'
            )
            parts.append(f'<text x="{x:.1f}" y="{top - 4}" text-anchor="middle" fill="{color}">resumed</text>')
        y = 20 + 18 * k
        parts.append(f'<line x1="{left}" x2="{left + 24}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"/>')
        name = escape(str(run.folder))
        parts.append(
            f'<text x="{left + 30}" y="{y + 4}" fill="#333">{name}: {metric} (dashed: {PARTNERS.get(metric, metric)} in'
            " training)</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def round_step(last: int) -> int:
    """A round distance of ticks, such that there are five to ten of them up to `last`."""
    magnitude = 10 ** max(0, len(str(last)) - 2)
    return next(step for step in (magnitude * k for k in (1, 2, 5, 10, 20)) if last / step <= 10)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("runs")])
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the curves into this file")
    parser.add_argument("--metric", default="top1", help="of the curves: top1, loss, ... [top1]")
    options = parser.parse_args()
    try:
        show(options.folders, options.plot, options.metric)
    except UserError as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


def show(folders: list[Path], picture: Path | None, metric: str) -> None:
    """Raises UserError where there is nothing to show, or no place for the picture."""
    runs = find_runs(folders)
    if not runs:
        raise UserError(
            f"{' '.join(map(str, folders))}: no run is there (a folder with a status.json); give the folder of one"
        )
    print(table(runs))
    if picture:
        if picture.suffix != ".svg":
            raise UserError(f"plot={picture}: the picture is an SVG; give a name that ends in .svg")
        try:
            picture.write_text(plot(runs, metric))
        except OSError as error:
            raise UserError(f"plot={picture}: cannot be written ({error.strerror}); give another file") from None
        print(f"wrote {picture}")


if __name__ == "__main__":
    sys.exit(main())
