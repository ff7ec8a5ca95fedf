"""Measure weak and strong scaling by number of ranks, and find the communication flags that help.

python scripts/scaling.py [--ranks 1,2,4] [--rounds N] [--json FILE] [--plot FILE.svg] [flags of train.py]
scripts/launch.sh --scaling FILE.json [flags of train.py]     on each node; FILE on storage that all nodes share

The first command runs 1, 2, 4, ... ranks on this machine, up to its number of GPUs (or cores). It times train.py's loop
alternately with and without communication, predicts the next doublings of weak scaling, and tries communication flags
at the largest number of ranks. The last line lists the flags to use.

The second command measures the ranks of the launch, and first a single rank unless FILE has it. FILE collects all
measurements: start with the first command's --json FILE, then launch on 2, 4, ... nodes with the same flags to get one
table and one plot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from config import TrainingConfig, TrainingError, UserError
from lib.svg import svg_file


def numbers(text: str) -> list[int]:
    """Parse the value of --ranks."""
    try:
        return sorted({1, *map(int, text.split(","))})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: is not a list of numbers; write --ranks 1,2,4") from None


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into this script's options and train.py's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=numbers, default=[], help="rank counts, such as 1,2,4; 1 is always included")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per measurement; the median is reported [5]")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps per round [20]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures; an existing file is extended")
    parser.add_argument("--plot", type=svg_file, metavar="FILE.svg")
    options, flags = parser.parse_known_args(words)
    if min(options.rounds, options.steps, *options.ranks) < 1:
        parser.error("--ranks, --rounds and --steps must be 1 or more; omit them for the defaults")
    if "RANK" in os.environ and not options.json:
        parser.error("--json FILE is missing; give a file on storage shared by all nodes to collect the measurements")
    TrainingConfig.from_args(flags)
    return options, flags


if __name__ == "__main__":
    parse(sys.argv[1:])  # rejects a bad flag before the slow import of torch

import shutil
import subprocess
import tempfile

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_utils import cleanup_distributed, setup_distributed
from lib import processes
from lib.scaling import report as reporting
from lib.scaling.measure import measure
from utils.distributed.collectives import all_gather_json
from utils.files import replace_json
from utils.logger import count
from utils.run.failures import leave_after


def open_report(file: Path, flags: list[str], most: int) -> dict[str, Any]:
    """The report in FILE, or a new one. Raises UserError if it was measured with other flags.

    most: the number of ranks whose global batch strong scaling keeps, and from which communication flags are tried.
    """
    if not file.exists():
        return {"flags": flags, "most": most, "measured": []}
    try:
        found = {name: json.loads(file.read_text())[name] for name in ("flags", "most", "measured")}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--json {file}: exists but is not a report of this script; give another name") from None
    if found["flags"] != flags:
        words = " ".join(found["flags"]) or "none"
        raise UserError(f"--json {file}: was measured with other flags ({words}); give another name")
    return found


def show(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the report, and write the plot if requested."""
    print(reporting.text(report), flush=True)
    if options.plot:
        config, job = TrainingConfig.from_args(report["flags"]), report["measured"][0]
        batches = f"{config.batch_size} per rank (weak), global batch {job['strong']['samples']} (strong)"
        options.plot.write_text(
            reporting.plot(report, f"{' '.join(report['flags']) or 'defaults'}, {batches}, {job['device']}")
        )


def launch(ranks: int, file: Path, options: argparse.Namespace, flags: list[str], threads: str) -> None:
    """Run this script on this many ranks of this machine to extend FILE. Raises TrainingError if it fails."""
    print(f"measuring {ranks} rank{'s' * (ranks > 1)}", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--rounds", options.rounds, "--steps", options.steps, "--json", file, *flags]
    # torchrun would read PET_NNODES and similar variables of an outer launch
    env = {"OMP_NUM_THREADS": threads} | {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    with processes.running(command, stdout=subprocess.DEVNULL, env=env) as process:
        if process.wait():
            raise TrainingError(f"{count(ranks, 'rank')}: the measurement failed; the lines above say why")


def cores_and_ranks(config: TrainingConfig) -> tuple[int, int]:
    """The cores of this machine, and its GPUs (or cores)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, (torch.cuda.device_count() if config.backend in ("auto", "nccl") else 0) or cores


def measure_here(options: argparse.Namespace, flags: list[str], config: TrainingConfig) -> None:
    """Measure each number of ranks in turn on this machine."""
    cores, room = cores_and_ranks(config)
    ranks = options.ranks or [2**k for k in range(room.bit_length())]
    with tempfile.TemporaryDirectory() as folder:
        file = options.json or Path(folder, "report.json")
        replace_json(file, open_report(file, flags, ranks[-1]))
        for each in ranks:
            launch(each, file, options, flags, str(max(1, cores // ranks[-1])))
        show(json.loads(file.read_text()), options)


def measure_launch(options: argparse.Namespace, flags: list[str], config: TrainingConfig) -> None:
    """Measure the ranks of this launch; before they connect, rank 0 measures one rank alone, unless FILE has it."""
    is_main, ranks, report = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"]), {}
    if is_main:
        report = open_report(options.json, flags, ranks)
        if ranks > 1 and not any(job["ranks"] == 1 for job in report["measured"]):
            replace_json(options.json, report)
            launch(1, options.json, options, flags, "1")
            report = open_report(options.json, flags, ranks)
    ctx = setup_distributed(config)
    most = all_gather_json(report.get("most"), ctx)[0]
    folder = Path(f"{options.json}.scaling")  # shared by all nodes
    job = measure(config, ctx, folder, options.rounds, options.steps, most)
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
        others = [each for each in report["measured"] if each["ranks"] != ranks]
        report["measured"] = sorted([*others, job], key=lambda each: each["ranks"])
        report |= reporting.summarize(report["measured"])
        replace_json(options.json, report)
        show(report, options)
    cleanup_distributed()


@record
def main() -> None:
    options, flags = parse(sys.argv[1:])
    measure_all = measure_launch if "RANK" in os.environ else measure_here
    measure_all(options, flags, TrainingConfig.from_args(flags))


if __name__ == "__main__":
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        leave_after(error)
