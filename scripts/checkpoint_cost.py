"""What checkpoints cost, measured on this machine: for how long training stands still, and how much slower a whole run
is.

torchrun --standalone --nproc-per-node=2 scripts/checkpoint_cost.py [--rounds N] [flags of train.py]

The reference, torch.save + fsync + rename of the same state into the same folder, is taken beside each checkpoint, in
the same run.
For the whole run, runs that save every 20 steps and runs that never do take turns.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import train
from config import TrainingConfig
from utils.report.goodput import Ledger
from utils.report.reporter import Reporter
from utils.run import saver as saving

RUNS = itertools.count()  # a completed run would be left as it is
EVERY, SAVES = 20, 8  # steps between two checkpoints; checkpoints of one run


def one_run(
    folder: Path, flags: list[str], every: int, references: list[float] | None = None
) -> tuple[list[float], float]:
    """Seconds for which each checkpoint held up training, and seconds of the steps with all that lies between them."""
    stood_still, ledgers, plain_save, plain_saved, plain_init = (
        [],
        [],
        saving.Saver.save,
        Reporter.saved,
        Ledger.__init__,
    )

    def save(saver: saving.Saver, *args: Any, **options: Any) -> None:
        dist.barrier()  # who waits here for the slowest rank would do so in the next step
        plain_save(saver, *args, **options)
        if references is not None and saver._writer:
            saver._copy.result()  # neither disturbs the other
            payload = saver._state.state_dict([]) | saver._meta()
            begin = time.perf_counter()
            with (folder / "reference.tmp").open("wb") as file:
                torch.save(payload, file)
                file.flush()
                os.fsync(file.fileno())
            (folder / "reference.tmp").rename(folder / "reference.pt")
            references.append(time.perf_counter() - begin)

    def saved(reporter: Reporter, outcome: Any, seconds: float) -> None:
        stood_still.append(seconds)
        plain_saved(reporter, outcome, seconds)

    def init(ledger: Ledger, *args: Any) -> None:
        plain_init(ledger, *args)
        ledgers.append(ledger)

    fixed = [
        "--save_every_minutes",
        "0",
        "--save_every",
        "0",
        "--eval_every",
        "0",
        "--max_steps",
        str(EVERY * SAVES + 1),
        "--epochs",
        "1000",
    ]
    words = [
        *flags,
        *fixed,
        "--save_every_steps",
        str(every),
        "--run_dir",
        str(folder / f"run-{next(RUNS)}"),
        "--overwrite",
    ]
    with (
        mock.patch.object(saving.Saver, "save", save),
        mock.patch.object(Reporter, "saved", saved),
        mock.patch.object(Ledger, "__init__", init),
    ):
        train.train(TrainingConfig.from_args(words))
    logging.getLogger("ddp").handlers.clear()
    spent = ledgers[0].now()
    return stood_still, spent["training"] + spent["data_wait"] + spent["checkpoints"] * bool(every)


def milliseconds(values: list[float]) -> str:
    return (
        f"{1000 * statistics.median(values):.2f} ms (n = {len(values)}, {1000 * min(values):.2f} to"
        f" {1000 * max(values):.2f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=3)
    options, flags = parser.parse_known_args()
    folder = Path(os.environ.get("CHECKPOINT_COST_DIR", tempfile.gettempdir())) / "checkpoint_cost"
    folder.mkdir(parents=True, exist_ok=True)
    references: list[float] = []
    stood_still, _ = one_run(folder, flags, EVERY, references)
    is_main = int(os.environ.get("RANK", 0)) == 0
    if is_main:
        size = (folder / "reference.pt").stat().st_size / 1e6
        print(f"{platform.machine()}, torch {torch.__version__}, a checkpoint of {size:.1f} MB in {folder}")
        print(f"torch.save + fsync + rename: {milliseconds(references)}")
        ratio = statistics.median(references) / statistics.median(stood_still)
        print(f"training stands still for:   {milliseconds(stood_still)}, 1/{ratio:.0f} of it", flush=True)
    with_saves, without = [], []
    for _ in range(options.rounds):
        with_saves.append(one_run(folder, flags, EVERY)[1])
        without.append(one_run(folder, flags, 0)[1])
    if is_main and with_saves:
        slower = statistics.median(with_saves) / statistics.median(without) - 1
        shown = ", ".join(f"{a:.1f} / {b:.1f}" for a, b in zip(with_saves, without, strict=True))
        print(f"a run that saves every {EVERY} steps: {slower:+.2%} (seconds with / without: {shown})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
