"""How fast is the training loop, and how far from the limit? Ours, a bare loop and the official tutorial's take turns
in one process.

torchrun --standalone --nproc-per-node=N scripts/benchmark.py [--rounds 7] [--steps 20] [--json FILE] [flags of
train.py]
python scripts/benchmark.py --find-batch [flags of train.py]         the largest micro-batch that fits into memory

ours      train.train_one_epoch with all that a run has on by default: agreement, watchdog, finite check, BatchNorm
rule, records
bare      tests/plain_loop.py: the same precision, layout, fused optimizer, clipping and schedule; in DDP where there
are several ranks
least     the fewest operations that train: no schedule, no norm, no seeds
tutorial  the loop of pytorch/examples, ddp-tutorial-series/multigpu_torchrun.py: float32, stock sampler, its own
optimizer

Each round every loop has two turns of --steps optimizer steps, forth and back. Ratios are medians over the rounds; the
control is a loop's first
turns against its second: where it is off by more than 3 %, the machine was not quiet, and the row says so. Times are
rank 0's, CPU times
those of all its threads. The host's own cost is taken the same way, with a model that computes next to nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import argparse
import time

from config import TrainingConfig


def parse(words: list[str]) -> tuple[argparse.Namespace, TrainingConfig]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures into this file")
    options, flags = parser.parse_known_args(words)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be 1 or more; leave them out for the defaults")
    return options, TrainingConfig.from_args(flags)


if __name__ == "__main__":
    if "--find-batch" in sys.argv:
        from benching.find_batch import main as find_batch

        sys.exit(find_batch([word for word in sys.argv[1:] if word != "--find-batch"]))
    parse(sys.argv[1:])  # refuses a bad flag before torch is imported

import dataclasses
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks to the terminal

import platform
import shutil
import statistics
import tempfile
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from benching import loops, machine
from benching.ours import Ours
from benching.turns import MOST_OFF, Contestant, take_turns
from ddp_utils import DistributedContext, cleanup_distributed, setup_distributed
from utils.distributed.collectives import all_gather_json
from utils.files import replace_json
from utils.run.failures import leave_after
from utils.training.precision import Precision

# where the model costs nothing, for one of --steps and of --rounds: short turns, many of them
HOST_STEPS, HOST_ROUNDS = (
    5,
    6,
)


class Race:
    """The contestants on one task, their turns and what is found."""

    def __init__(
        self,
        config: TrainingConfig,
        ctx: DistributedContext,
        steps: int,
        rounds: int,
        folder: Path,
        with_tutorial: bool,
    ) -> None:
        size = config.batch_size * config.micro_batches_per_step(ctx.world_size)
        epochs = 2 * rounds + 2  # one to warm up, one in which things are counted
        config = dataclasses.replace(config, dataset_size=steps * size, epochs=epochs, max_steps=0)
        self.steps, self.samples, self._rounds, self._ctx = steps, steps * size, rounds, ctx
        self.ours = Ours(config, ctx, folder)
        self.config = dataclasses.replace(
            self.ours.config, grad_accum_steps=config.micro_batches_per_step(ctx.world_size) // ctx.world_size
        )
        self.config = dataclasses.replace(self.config, global_batch_size=0)
        precision = Precision.choose(config, ctx.device, ctx.fast_bf16)
        bare, least = (loop(self.config, ctx, precision) for loop in (loops.bare, loops.least))
        self._bare_losses: list[tuple[torch.Tensor, float]] = []
        self.contestants = {
            "ours": Contestant("ours", self.ours.epoch),
            "bare": Contestant("bare", lambda: self._bare_losses.extend(next(bare) for _ in range(steps))),
            "least": Contestant("least", lambda: [next(least) for _ in range(steps)]),
        }
        if with_tutorial:
            self.contestants["tutorial"] = Contestant("tutorial", loops.Tutorial(self.config, ctx).epoch)

    def run(self, say: Any) -> dict[str, Any]:
        """All turns; the figures of each contestant by name. On all ranks alike."""
        contestants, device = list(self.contestants.values()), self._ctx.device
        for each in contestants:
            each.epoch()
        counted = {each.name: machine.count(each.epoch, device) for each in contestants}
        waited = self.ours.watch.spent()[0]
        take_turns(contestants, self._rounds, device, say)
        spent = {phase: seconds - waited[phase] for phase, seconds in self.ours.watch.spent()[0].items()}
        in_steps = sum(spent[phase] for phase in ("data", "forward", "backward", "update"))
        bare = self.contestants["bare"]
        rows = {}
        for each in contestants:
            seconds = each.seconds("wall")
            rows[each.name] = {
                "step_s": seconds / self.steps,
                "cpu_s": each.seconds("cpu") / self.steps,
                "wall_over_bare": each.ratio(bare, "wall"),
                "cpu_over_bare": each.ratio(bare, "cpu"),
                "control_wall": each.control("wall"),
                "control_cpu": each.control("cpu"),
                "samples_per_s": self.samples / seconds,
                "collectives_per_step": counted[each.name]["collectives"] / self.steps,
                "peak_memory_bytes": counted[each.name]["peak_memory"],
                "turns_wall_s": each.wall,
                "turns_cpu_s": each.cpu,
            }
        rows["ours"]["data_wait"] = spent["data"] / in_steps
        return rows

    def equality(self) -> dict[str, Any]:
        """Whether each log interval's loss is the bare loop's, to the bit: on one rank, where both see the same
        batches."""
        if self._ctx.world_size > 1:
            return {"intervals": 0, "equal": 0}
        every = self.config.log_interval
        found = self.ours.losses()
        pieces = [self._bare_losses[k : k + every] for k in range(0, len(found) * every, every)]
        theirs = [sum(loss.item() for loss, _ in piece) / sum(weight for _, weight in piece) for piece in pieces]
        return {"intervals": len(found), "equal": sum(a == b for a, b in zip(found, theirs, strict=True))}


def host_cost(config: TrainingConfig, ctx: DistributedContext, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Microseconds of CPU time that a step of ours costs the host over one of bare, and over the least, where the model
    costs nothing."""
    tiny = {
        "dataset": "synthetic",
        "model": "mini_resnet",
        "image_size": 8,
        "batch_size": 4,
        "grad_accum_steps": 1,
        "global_batch_size": 0,
    }
    tiny |= {
        "num_classes": 10,
        "in_channels": 3,
        "compile": "off",
        "activation_checkpointing": False,
        "cache": "none",
        "augment": "none",
    }
    with machine.costless_model():
        race = Race(
            dataclasses.replace(config, **tiny),
            ctx,
            HOST_STEPS * steps,
            HOST_ROUNDS * rounds,
            folder,
            with_tutorial=False,
        )
        rows = race.run(lambda _: None)
        race.ours.close()
    ours, micro = race.contestants["ours"], 1e6 / (2 * race.steps)  # from the seconds of a round, which is two turns
    over = {
        f"over_{name}_us": (
            micro * statistics.median(a - b for a, b in zip(ours.rounds("cpu"), other.rounds("cpu"), strict=True))
        )
        for name, other in race.contestants.items()
        if name != "ours"
    }
    return {
        "ours_us": 1e6 * rows["ours"]["cpu_s"],
        **over,
        "controls": {name: row["control_cpu"] for name, row in rows.items()},
    }


def table(rows: dict[str, dict[str, Any]], flops: float, peak: float) -> list[str]:
    """The contestants as lines of text. flops: of one sample, forward and backward; peak: measured operations a
    second."""
    head = f"{'':<9}{'step':>10}{'CPU/step':>11}{'wall/bare':>11}{'CPU/bare':>10}{'control':>9}{'samples/s':>11}"
    lines = [head + f"{'GFLOP/s':>9}{'of peak':>9}{'data wait':>11}{'collectives':>13}{'memory':>10}"]
    for name, row in rows.items():
        rate = row["samples_per_s"] * flops
        wait = f"{row['data_wait']:.1%}" if "data_wait" in row else "-"
        line = (
            f"{name:<9}{1000 * row['step_s']:>7.2f} ms{1000 * row['cpu_s']:>8.2f}"
            f" ms{row['wall_over_bare']:>11.3f}{row['cpu_over_bare']:>10.3f}"
        )
        line += (
            f"{row['control_wall']:>9.3f}{row['samples_per_s']:>11,.0f}{rate / 1e9:>9,.0f}{rate / peak:>9.0%}{wait:>11}"
        )
        line += f"{row['collectives_per_step']:>13.2f}{row['peak_memory_bytes'] / 2**20:>6,.0f} MiB"
        off = [kind for kind in ("wall", "cpu") if abs(row[f"control_{kind}"] - 1) > MOST_OFF]
        lines.append(line + (f"   control off ({', '.join(off)}): not to be relied on" if off else ""))
    return lines


@record
def main() -> int:
    options, config = parse(sys.argv[1:])
    ctx = setup_distributed(config)
    say = machine.speaker(ctx.is_main)
    folder = Path(all_gather_json(tempfile.mkdtemp(prefix="benchmark-") if ctx.is_main else "", ctx)[0])
    began = time.monotonic()
    try:
        say("the host's own cost ...")
        # first: what comes later leaves much to look after
        cost = host_cost(config, ctx, options.steps, options.rounds, folder / "tiny")
        race = Race(config, ctx, options.steps, options.rounds, folder / "run", with_tutorial=True)
        facts = {
            "device": ctx.device_names[0],
            "ranks": ctx.world_size,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
        }
        facts |= {"python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        facts |= {
            "model": config.model,
            "image_size": race.config.image_size,
            "batch_size": config.batch_size,
            "rounds": options.rounds,
        }
        facts |= {
            "steps": options.steps,
            "precision": race.ours.state.precision.name,
            "workers": race.ours.loader.num_workers,
        }
        say(", ".join(f"{name} {value}" for name, value in facts.items()))
        flops = machine.flops_per_sample(race.ours)
        peak = machine.peak_flops(ctx.device, race.ours.state.precision.dtype or torch.float32) * ctx.world_size
        say(
            f"{flops / 1e9:.2f} GFLOP a sample, forward and backward; measured peak {peak / 1e9:,.0f} GFLOP/s"
            f" ({ctx.world_size} rank(s))"
        )
        rows = race.run(lambda done: say(f"  round {done} of {options.rounds}, {time.monotonic() - began:.0f} s"))
        race.ours.close()
        equality = race.equality()
        say("\n".join(table(rows, flops, peak)))
        faster = rows["tutorial"]["step_s"] / rows["ours"]["step_s"]
        say(f"ours over tutorial: {faster:.2f} times the speed")
        if equality["intervals"]:
            say(
                f"losses of ours and bare: equal to the bit in {equality['equal']} of {equality['intervals']} log"
                " intervals"
            )
        controls = ", ".join(f"{value:.3f}" for value in cost["controls"].values())
        text = (
            f"host: {cost['ours_us']:.0f} us a step with a model that costs nothing, {cost['over_bare_us']:+.0f} us"
            " over bare, "
        )
        say(f"{text}{cost['over_least_us']:+.0f} us over the least (CPU time; controls {controls})")
    finally:
        if ctx.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json and ctx.is_main:
        replace_json(
            options.json,
            facts | {"flops_per_sample": flops, "peak_flops": peak, "rows": rows, "equality": equality, "host": cost},
        )
    cleanup_distributed()
    return 0 if equality["equal"] == equality["intervals"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Exception, KeyboardInterrupt) as error:
        leave_after(error, int(os.environ.get("RANK", 0)))
