# extra: benchmark and template
"""Compare train.py's loop with other loops, or train the plain loop for its curve: the figures of docs/benchmarks.md.

python tests/comparison/run.py [--rounds N] [--steps N] [--json FILE] [flags of train.py]   (or under torchrun)
python tests/comparison/run.py --plain-run --run_dir FOLDER [flags of train.py]

The first command compares four loops in one process (on each rank):

this template   train.train_one_epoch with the default checks, records and watchdog
plain loop      tests/plain_loop.py: the same precision, layout, fused optimizer, clipping and schedule; DDP
bare loop       what an expert writes by hand: only what training needs; the first to compare with
DDP tutorial    pytorch/examples, ddp-tutorial-series/multigpu_torchrun.py: float32, stock sampler and optimizer, and
                copies for which the host waits

Turns, medians and controls are those of scripts/benchmark.py. The host cost is measured with a model that computes
almost nothing. The exit code is 1 if losses differ from the plain loop's: they must be equal on one
rank, on a GPU with --deterministic.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

import argparse
import os
import tempfile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence torch's profiler

from torch.distributed.elastic.multiprocessing.errors import record

from comparison import plain_run, speed
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from lib.benchmark.turns import collect_machine_facts
from utils.distributed.collectives import broadcast_json
from utils.files import replace_json
from utils.run.exit import exit_with_error


@record
def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--plain-run", action="store_true", help="train the plain loop into a new --run_dir")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; results are medians over them [7]")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps per turn [20]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    options, flags = parser.parse_known_args(words)
    if options.plain_run and "RANK" in os.environ:
        parser.error("--plain-run trains in one process; start it with python instead of torchrun")
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)

    def say(text: str) -> None:
        if ctx.is_main:
            print(text, flush=True)

    about = collect_machine_facts(ctx, config) | {
        "rounds": options.rounds,
        "steps": options.steps,
        "task": " ".join(flags),
    }
    say(", ".join(f"{name} {value}" for name, value in about.items()))
    with tempfile.TemporaryDirectory(prefix="comparison-") as temp_folder:
        folder = Path(broadcast_json(temp_folder, ctx))
        measured = (plain_run if options.plain_run else speed).measure(options, config, ctx, folder, say)
    if options.json and ctx.is_main:
        replace_json(options.json, about | measured)
    cleanup_distributed()
    equality = measured.get("equality", {"equal": 0, "intervals": 0})
    return 0 if equality["equal"] == equality["intervals"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        exit_with_error(error)
