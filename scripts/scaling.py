"""Measure speed by number of ranks, weak and strong, and find the communication flags that help.

python scripts/scaling.py [--ranks 1,2,4] [--rounds N] [--json FILE] [--plot FILE.svg] [flags of train.py]
scripts/launch.sh --scaling FILE.json [flags of train.py]     on each node; FILE on storage that all nodes share

The first command runs 1, 2, 4, ... ranks on this machine, up to its GPUs (or cores). It times train.py's loop with and
without communication, in turns, predicts the next doublings of weak scaling, and tries the communication flags at the
largest number of ranks. The last line holds the flags to paste.

The second command measures the number of ranks that it was launched with, after one rank alone. FILE collects all
measurements: start with the first command's --json FILE, then launch on 2, 4, ... nodes with the same flags to get one
table and one plot.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from config import TrainingConfig, TrainingError, UserError
from lib import processes
from lib.scaling import report as reporting
from utils.files import replace_json

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the flags of train.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", default="", help="numbers of ranks; 1 is always included")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement; the median counts [5]")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round [1]")
    parser.add_argument("--json", default="", metavar="FILE", help="all figures; an existing file is extended")
    parser.add_argument("--plot", default="", metavar="FILE.svg")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args(words)
    try:
        options.ranks = sorted({1, *map(int, options.ranks.split(","))}) if options.ranks else []
    except ValueError:
        parser.error(f"--ranks {options.ranks}: is not a list of numbers; write --ranks 1,2,4")
    if options.rounds < 1 or any(ranks < 1 for ranks in options.ranks):
        parser.error("--ranks and --rounds must be 1 or more; omit them for the defaults")
    if options.plot and not options.plot.endswith(".svg"):
        parser.error(f"--plot {options.plot}: the plot is an SVG; give a name that ends in .svg")
    return options, flags


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_ranks(config: TrainingConfig) -> list[int]:
    """1, 2, 4, ... up to this machine's GPUs, or its cores."""
    import torch

    room = (torch.cuda.device_count() if config.backend in ("auto", "nccl") else 0) or cores()
    return [2**k for k in range(room.bit_length())]


def new_job(options: argparse.Namespace, flags: list[str], global_batch: int, is_swept: bool = False) -> dict[str, Any]:
    measurement = {"rounds": options.rounds, "seconds": options.seconds, "global_batch": global_batch}
    return measurement | {"flags": flags, "is_swept": is_swept}


def run_job(ranks: int, job: dict[str, Any], threads: str) -> dict[str, Any]:
    """Measure in so many new processes on this machine. Raises UserError or TrainingError with their last lines."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "SLURM_"))}
    env = {name: value for name, value in env.items() if name not in LAUNCH_VARIABLES}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        replace_json(file, job | {"folder": folder})
        command = [sys.executable, *launcher, __file__, "--job", file]
        ended = processes.run(command, env={"OMP_NUM_THREADS": threads} | env)
        if (found := Path(folder, "found.json")).exists():
            return json.loads(found.read_text())
    last = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-12:])
    if ended.returncode == 2:
        raise UserError(last)
    raise TrainingError(f"{last}\n{ranks} rank(s): the measurement failed; the lines above say why")


def do_job(file: Path) -> None:
    """One rank of a measurement that `run_job` started."""
    from ddp_utils import cleanup_distributed, setup_distributed
    from lib.scaling.measure import measure

    job = json.loads(file.read_text())
    config, folder = TrainingConfig.from_args(job["flags"]), Path(job["folder"])
    ctx = setup_distributed(config)
    found = measure(job, config, ctx, folder / "runs")
    if ctx.is_main:
        replace_json(folder / "found.json", found)
    cleanup_distributed()


def open_report(file: str, flags: list[str], config: TrainingConfig, most: int) -> dict[str, Any]:
    """What --json FILE holds already. Raises UserError if it belongs to other flags."""
    batch = config.global_batch_size or config.batch_size * config.grad_accum_steps * most
    fresh = {"flags": flags, "global_batch": batch, "host": platform.node(), "measured": []}
    if not file or not Path(file).exists():
        return fresh
    try:
        found = {name: json.loads(Path(file).read_text())[name] for name in ("flags", "global_batch", "measured")}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"--json {file}: exists and is no report of this script; give another name") from None
    if found["flags"] != flags:
        words = " ".join(found["flags"]) or "none"
        raise UserError(f"--json {file}: was measured with other flags ({words}); give another name")
    return fresh | found


def finish(report: dict[str, Any], jobs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the report, and write the files that were asked for."""
    by_ranks = {job["ranks"]: job for job in [*report["measured"], *jobs]}
    report["measured"] = [by_ranks[ranks] for ranks in sorted(by_ranks)]
    report |= reporting.summarize(report["measured"])
    print(reporting.text(report), flush=True)
    if options.json:
        replace_json(Path(options.json), report)
    if options.plot:
        config, device = TrainingConfig.from_args(report["flags"]), report["measured"][0]["device"]
        batches = f"{config.batch_size} per rank (weak), global batch {report['global_batch']} (strong)"
        Path(options.plot).write_text(reporting.plot(report, f"{config.task}, {batches}, {device}"))


def measure_here(options: argparse.Namespace, flags: list[str], config: TrainingConfig) -> None:
    """Measure one number of ranks after the other on this machine."""
    numbers, jobs = options.ranks or default_ranks(config), []
    report, threads = open_report(options.json, flags, config, numbers[-1]), str(max(1, cores() // numbers[-1]))
    for ranks in numbers:
        print(f"measuring {ranks} rank(s)", flush=True)
        jobs.append(run_job(ranks, new_job(options, flags, report["global_batch"], ranks == numbers[-1]), threads))
    finish(report, jobs, options)


def measure_launch(options: argparse.Namespace, flags: list[str], config: TrainingConfig) -> None:
    """Measure the ranks of this launch; before they connect, rank 0 measures one rank alone, unless FILE has it."""
    is_main, most = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])
    report, jobs = open_report(options.json, flags, config, most) if is_main else {}, []
    if is_main and most > 1 and not any(job["ranks"] == 1 for job in report["measured"]):
        print("measuring 1 rank", flush=True)
        jobs.append(run_job(1, new_job(options, flags, report["global_batch"]), os.environ.get("OMP_NUM_THREADS", "1")))
    from ddp_utils import cleanup_distributed, setup_distributed
    from lib.scaling.measure import measure
    from utils.distributed.collectives import all_gather_json

    ctx = setup_distributed(config)
    batch = all_gather_json(report.get("global_batch", 0), ctx)[0]
    if is_main:
        print(f"measuring {most} rank(s)", flush=True)
    folder = Path(f"{options.json or config.run_folder}.scaling")  # shared by all nodes
    jobs.append(measure(new_job(options, flags, batch, is_swept=True), config, ctx, folder))
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
        finish(report, jobs, options)
    cleanup_distributed()


def main() -> int:
    options, flags = parse(sys.argv[1:])
    try:
        config = TrainingConfig.from_args(flags)
        if options.job:
            do_job(Path(options.job))
        elif "RANK" in os.environ:
            measure_launch(options, flags, config)
        else:
            measure_here(options, flags, config)
    except Exception as error:
        if "RANK" in os.environ:  # a rank that failed must not wait for its peers
            from utils.run.failures import leave_after

            leave_after(error, int(os.environ["RANK"]))
        if not isinstance(error, UserError | TrainingError):
            raise
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
