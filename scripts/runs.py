"""Table of runs with the settings in which they differ, and a plot of their curves.

python scripts/runs.py [FOLDER ...]                       the runs in runs/, or in the folders given
python scripts/runs.py runs --plot curves.svg             also plot their curves (training dashed, evaluation solid)
python scripts/runs.py runs/a runs/b --plot ab.svg --metric loss
python scripts/runs.py --compare runs/a runs/b            are the last weights bitwise equal? Exit code 1 if not
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import UserError
from scripts.lib.svg import COLORS, Series, line_plot, svg_file
from utils.files import read_json, read_lines
from utils.table import format_table

NOT_SETTINGS = ("run_dir", "checkpoint_dir", "resume_from", "overwrite", "init_method")
IN_TRAINING = {"top1": "accuracy"}  # the name that train records use


class RunInfo:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.status = read_json(folder / "status.json")
        self.summary = read_json(folder / "summary.json")
        self.records = read_lines(folder / "metrics.jsonl")

    def size(self) -> int:
        """Bytes; a file with several names counts once."""
        files = {path.stat().st_ino: path.stat().st_size for path in self.folder.rglob("*") if path.is_file()}
        return sum(files.values())

    def curve(self, kind: str, name: str) -> list[tuple[int, float]]:
        records = (r for r in self.records if r["kind"] == kind and r.get("weights") != "ema")
        return [(r["step"], r[name]) for r in records if r.get(name) is not None]


def find_runs(folders: list[Path]) -> list[RunInfo]:
    """The runs (folders with a status.json) in these folders. Raises UserError if there are none."""
    found = dict.fromkeys(file.parent for folder in folders for file in sorted(folder.glob("**/status.json")))
    if not found:
        raise UserError(f"{' '.join(map(str, folders))}: has no run (a folder with a status.json); give a run folder")
    return [RunInfo(folder) for folder in found]


def table(runs: list[RunInfo]) -> str:
    """One row per run: state, progress, results, time, size, and the settings that differ."""
    names = [name for name in dict.fromkeys(n for run in runs for n in run.config) if name not in NOT_SETTINGS]
    differing = [name for name in names if len({json.dumps(run.config.get(name)) for run in runs if run.config}) > 1]
    rows = [["run", "state", "epoch", "step", "best", "final top1", "minutes", "MB", *differing]]
    for run in runs:
        summary, status = run.summary, run.status
        best, top1, wall = (summary.get(name) for name in ("best_value", "final_top1", "wall_s"))
        rows.append([run.folder, *(status.get(name) for name in ("state", "epoch", "step"))])
        rows[-1] += [f"{summary['best_metric']} {best:.4f}" if best is not None else "-"]
        rows[-1] += [f"{top1:.4f}" if top1 is not None else "-", f"{wall / 60:.1f}" if wall else "-"]
        rows[-1] += [f"{run.size() / 1e6:.0f}", *(run.config.get(name, "-") for name in differing)]
    return format_table(rows)


def plot(runs: list[RunInfo], metric: str) -> str:
    """An SVG with the evaluation curves (solid) and the training curves (dashed) of all runs. Raises UserError."""
    series, marks, training = [], [], IN_TRAINING.get(metric, metric)
    for k, run in enumerate(runs):
        covering = len(runs) - 1 - k  # later lines are drawn over this one, which is wider so that it stays visible
        look = {"color": COLORS[k % len(COLORS)], "width": 2 + 5 * covering, "opacity": 0.35 if covering else 1.0}
        solid, dashed = run.curve("eval", metric), run.curve("train", training)
        series.append(Series(f"{run.folder}: {metric} (dashed: {training} in training)", solid, **look))
        series.append(Series("", dashed, is_dashed=True, has_markers=False, **look))
        resumed = (record for record in run.records if record.get("event") == "resumed")
        marks += [(event["step"], "resumed", look["color"]) for event in resumed]
    if not any(each.points for each in series):
        raise UserError(f"metric={metric}: no run has records of it; give a metric of the eval records")
    y_range = (0.0, 1.0) if metric in ("top1", "top5", "accuracy") else None
    return line_plot(series, x_label="optimizer step", y_label=metric, y_range=y_range, marks=marks)


def weights_digest(folder: Path) -> str:
    """SHA-256 of the names and bytes of the weights in the latest checkpoint. Raises UserError if there is none."""
    import torch

    from utils.checkpoint import format as checkpoint

    path = checkpoint.best_or_latest(folder / "checkpoints", prefers_best=False)
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint.read(path)[0]["model"].items()):
        digest.update(name.encode() + tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def compare(runs: list[RunInfo]) -> bool:
    """Whether the last weights of all runs are bitwise equal. Raises UserError."""
    if len(runs) < 2:
        raise UserError("compare: needs two runs; give their folders")
    digests = [weights_digest(run.folder) for run in runs]
    for run, digest in zip(runs, digests, strict=True):
        print(f"{run.folder}: weights {digest[:16]}, restarts: {run.summary.get('restarts', '-')}")
    is_equal = len({*digests}) == 1
    print("the weights are bitwise equal" if is_equal else "the weights DIFFER")
    return is_equal


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("runs")])
    parser.add_argument("--plot", type=svg_file, metavar="FILE.svg", help="plot the curves into this file")
    parser.add_argument("--metric", default="top1", help="of the curves: top1, loss, ... [top1]")
    parser.add_argument("--compare", action="store_true", help="compare the weights; exit code 1 if they differ")
    options = parser.parse_args()
    try:
        runs = find_runs(options.folders)
        print(table(runs))
        if options.plot:
            options.plot.write_text(plot(runs, options.metric))
            print(f"wrote {options.plot}")
        return int(options.compare and not compare(runs))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
