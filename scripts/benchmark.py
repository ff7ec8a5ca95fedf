"""Measure training speed, the input pipeline, the cost of checkpoints, or the largest micro-batch.

torchrun --standalone --nproc-per-node=N scripts/benchmark.py [flags of train.py]                training speed
torchrun --standalone --nproc-per-node=N scripts/benchmark.py --checkpoint [flags of train.py]   cost of checkpoints
python scripts/benchmark.py --input [flags of train.py]                                          the loader alone
torchrun --standalone --nproc-per-node=N scripts/benchmark.py --against "--reduction exact" [flags]   cost of flags
python scripts/benchmark.py --plain-run --run_dir FOLDER [flags of train.py]   train the plain loop, for its curve
python scripts/benchmark.py --find-batch [--ranks N] [--memory GIB] [flags of train.py]          largest micro-batch
python scripts/benchmark.py --sharding-memory [--ranks 1,2,8] [flags of train.py]   memory of a rank by --sharding

Training speed compares four loops in one process (on each rank):

this template   train.train_one_epoch with the default checks, records and watchdog
plain loop      tests/plain_loop.py: the same precision, layout, fused optimizer, clipping and schedule; DDP
minimal loop    only what training needs: no schedule, gradient norm or seeding
DDP tutorial    pytorch/examples, ddp-tutorial-series/multigpu_torchrun.py: float32, stock sampler and optimizer

In each round every loop takes two turns of --steps optimizer steps, one in forward and one in reverse order. Ratios are
medians over the rounds. The control compares a loop's first turns with its second turns; a row is marked noisy if they
differ by more than 3 %. Times are measured on rank 0; CPU time includes all its threads. The host cost is measured with
a model that computes almost nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import argparse
import os

from config import TrainingConfig


def numbers(text: str) -> list[int]:
    """Parse the value of --ranks."""
    try:
        return sorted({*map(int, text.split(","))})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: is not a list of numbers; write --ranks 1,2,4") from None


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into this script's options and train.py's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    mode = parser.add_mutually_exclusive_group()
    for name in ("checkpoint", "input", "plain-run", "find-batch", "sharding-memory"):
        mode.add_argument(f"--{name}", action="store_const", const=name, dest="mode", default="speed")
    parser.add_argument("--against", metavar="FLAGS", help="compare a run with these flags of train.py and without")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; results are medians over them [7]")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps per turn [20]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    help_ = "with --find-batch: ranks on this machine [1]; with --sharding-memory: a list [1,2,4,8]"
    parser.add_argument("--ranks", type=numbers, default=[], help=help_)
    parser.add_argument(
        "--memory", type=float, default=0.0, metavar="GIB", help="with --find-batch: memory limit per rank"
    )
    options, flags = parser.parse_known_args(words)
    if options.against:
        options.mode = "against"
    options.ranks = options.ranks or ([1, 2, 4, 8] if options.mode == "sharding-memory" else [1])
    if options.mode == "find-batch" and len(options.ranks) > 1:
        parser.error("--find-batch takes one number of --ranks; those of the run on one machine")
    if min(options.rounds, options.steps, *options.ranks) < 1 or options.memory < 0:
        parser.error("--rounds, --steps and --ranks must be 1 or more, --memory 0 or more; omit them for the defaults")
    if options.mode in ("input", "plain-run", "find-batch", "sharding-memory") and "RANK" in os.environ:
        parser.error(f"--{options.mode} measures one process; start it with python instead of torchrun")
    TrainingConfig.from_args(flags)
    return options, flags


if __name__ == "__main__":
    parse(sys.argv[1:])  # rejects a bad flag before the slow import of torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence torch's profiler

import platform
import shutil
import tempfile
import time

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_utils import cleanup_distributed, setup_distributed
from lib.benchmark import against, checkpoint, find_batch, input_pipeline, memory, plain_run, speed
from utils.distributed.collectives import all_gather_json
from utils.files import replace_json
from utils.run.failures import leave_after

MODES = {"speed": speed, "against": against, "checkpoint": checkpoint, "input": input_pipeline, "plain-run": plain_run}


@record
def main(words: list[str] | None = None) -> int:
    """Run one mode. Returns the exit code: 1 if losses differ from the plain loop's."""
    options, flags = parse(sys.argv[1:] if words is None else words)
    if options.mode == "find-batch":
        find_batch.find(flags, options.ranks[0], options.memory)
        return 0
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)
    if options.mode == "sharding-memory":
        memory.show(config, ctx, options.ranks, print)
        return 0

    def say(text: str) -> None:
        if ctx.is_main:
            print(text, flush=True)

    facts = {"device": ctx.device_names[0], "ranks": ctx.world_size, "threads": torch.get_num_threads()}
    facts |= {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    facts |= {"date": time.strftime("%Y-%m-%d"), "task": " ".join(flags) or "defaults", "batch_size": config.batch_size}
    facts |= {"rounds": options.rounds, "steps": options.steps}
    say(", ".join(f"{name} {value}" for name, value in facts.items()))
    folder = Path(all_gather_json(tempfile.mkdtemp(prefix="benchmark-") if ctx.is_main else "", ctx)[0])
    try:
        found = MODES[options.mode].measure(options, config, ctx, folder, say)
    finally:
        if ctx.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json and ctx.is_main:
        replace_json(options.json, facts | found)
    cleanup_distributed()
    equality = found.get("equality", {"equal": 0, "intervals": 0})
    return 0 if equality["equal"] == equality["intervals"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        leave_after(error)
