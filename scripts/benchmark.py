# extra: benchmark
"""Measure the speed of a step, what flags change, how it scales, or how much memory it needs.

torchrun --standalone --nproc-per-node=N scripts/benchmark.py [--against FLAGS]... [--json FILE] [flags of train.py]
python scripts/benchmark.py --find-batch [--ranks N] [--memory GIB] [flags of train.py]          largest micro-batch

The first command times train.py's loop with its default checks, records and watchdog. It measures the flags as given,
and with the flags of each --against, such as "--num_workers 2" or "--save_every_steps 20". On several ranks it also
measures without communication. What that saves is the communication that is not hidden by the backward pass.

In each round all take two turns of --steps optimizer steps, one in forward and one in reverse order. Ratios are medians
over the rounds. The control compares first with second turns. A row is marked noisy if they differ by more than 3 %.
Times are measured on rank 0. CPU time includes all its threads. Memory is the peak of the CUDA allocator.

--json FILE collects the measurements of several launches with the same flags, and each launch prints them as one table
by number of ranks. Run it on 1, 2 and 4 ranks. With --global_batch_size the work is the same on any number of ranks
(strong scaling), else each rank has as much work (weak scaling).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import argparse
import os
import shlex

from config import TrainingConfig


def parse_ranks(text: str) -> list[int]:
    """Parse the value of --ranks."""
    try:
        return sorted({*map(int, text.split(","))})
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a list of numbers such as 1,2,4, got "{text}".') from None


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into this script's options and train.py's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    mode = parser.add_mutually_exclusive_group()
    modes = {
        "find-batch": "find the largest micro-batch",
        "sharding-memory": "measure the memory of a rank with each --sharding",  # extra: sharding
    }
    for name, help_ in modes.items():
        mode.add_argument(f"--{name}", action="store_const", const=name, dest="mode", default="speed", help=help_)
    parser.add_argument(
        "--against",
        metavar="FLAGS",
        action="append",
        default=[],
        help="measure with these flags of train.py too (may be given several times)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds, over which results are medians (default: 7)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps per turn (default: 20)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures to this file (an existing file is extended)"
    )
    help_ = "with --find-batch, ranks on this machine (default: 1)"
    help_ += ", and with --sharding-memory, a list (default: 1,2,4,8)"  # extra: sharding
    parser.add_argument("--ranks", type=parse_ranks, default=[], help=help_)
    parser.add_argument(
        "--memory", type=float, default=0.0, metavar="GIB", help="with --find-batch, memory limit per rank"
    )
    options, flags = parser.parse_known_args(argv)
    if options.mode == "sharding-memory":  # extra: sharding
        options.ranks = options.ranks or [1, 2, 4, 8]
    options.ranks = options.ranks or [1]
    if options.mode == "find-batch" and len(options.ranks) > 1:
        parser.error("--find-batch needs a single number for --ranks: the ranks of the run on one machine.")
    if min(options.rounds, options.steps, *options.ranks) < 1 or options.memory < 0:
        parser.error("--rounds, --steps and --ranks must be at least 1, and --memory must be at least 0.")
    if options.mode != "speed" and "RANK" in os.environ:
        parser.error(f"--{options.mode} measures one process. Start it with python instead of torchrun.")
    configs = [TrainingConfig.from_args(flags)]
    for changes in options.against:
        configs.append(TrainingConfig.from_args(shlex.split(changes), configs[0].to_dict()))
    if options.mode == "speed" and any(config.batch_tokens for config in configs):  # extra: lengths
        parser.error(
            "--batch_tokens does not go with this measurement, since its epochs cannot be cut to --steps steps. See"
            " tokens_per_s in the records of a run."
        )
    return options, flags


if __name__ == "__main__":
    parse_arguments(sys.argv[1:])  # this rejects a bad flag before the slow import of torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence torch's profiler

import shutil
import tempfile

from torch.distributed.elastic.multiprocessing.errors import record

from ddp_utils import cleanup_distributed, setup_distributed
from lib.benchmark import find_batch, speed
from lib.benchmark.turns import collect_machine_facts
from utils.distributed.collectives import broadcast_json, on_rank_0
from utils.files import replace_json
from utils.run.exit import exit_with_error


@record
def main(argv: list[str] | None = None) -> int:
    options, flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    if options.mode == "find-batch":
        find_batch.find_largest_batch(flags, options.ranks[0], options.memory)
        return 0
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)
    if options.mode == "sharding-memory":  # extra: sharding
        from lib.benchmark import memory  # it imports private parts of torch, which other versions may lack

        memory.print_sharding_memory(config, ctx, options.ranks, print)
        return 0

    def print_on_rank_0(text: str) -> None:
        if ctx.is_main:
            print(text, flush=True)

    def create_folder() -> str:  # it is beside the run folder, on storage that all nodes share
        run = config.run_folder.absolute()
        run.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=f"{run.name}.benchmark-", dir=run.parent)

    report = on_rank_0(lambda: speed.read_report(options.json, flags), ctx)
    about = collect_machine_facts(ctx, config) | {"rounds": options.rounds, "steps": options.steps}
    print_on_rank_0(", ".join(f"{name} {value}" for name, value in about.items()))
    folder = Path(broadcast_json(on_rank_0(create_folder, ctx), ctx))
    try:
        launch = about | speed.measure_speed(options, config, ctx, folder, print_on_rank_0)
    finally:
        if ctx.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json and ctx.is_main:
        speed.add_launch(report, launch)
        replace_json(options.json, report)
        print("", speed.format_scaling(report), sep="\n", flush=True)
    cleanup_distributed()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        exit_with_error(error)
