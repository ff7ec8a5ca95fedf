# extra: benchmark and template
"""Training speed: this template against three other loops, its distance from the hardware's limit, its host cost."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

import dataset as fork_dataset
import model as fork_model
from comparison import loops
from config import TrainingConfig
from ddp_utils import DistributedContext
from lib.benchmark.in_process_run import InProcessRun
from lib.benchmark.turns import Candidate, synchronize, take_turns
from utils.clock import STEP_PHASES
from utils.memory import read_peak_memory
from utils.metrics import Metrics, count_correct
from utils.table import format_table
from utils.training.hooks import ModelHooks
from utils.training.precision import Precision

TEMPLATE, PLAIN, BARE, TUTORIAL = NAMES = ("this template", "plain loop", "bare loop", "DDP tutorial")
HOST_STEPS, HOST_ROUNDS = 5, 6  # multiples of --steps and --rounds for the costless model: many short turns


class Comparison:
    """The loops on one task, and their figures."""

    def __init__(
        self, config: TrainingConfig, ctx: DistributedContext, steps: int, folder: Path, with_tutorial: bool = False
    ) -> None:
        self.steps, self._ctx = steps, ctx
        before, self._held = allocated(ctx.device), Counter[str]()  # device memory that a loop keeps between its epochs
        self.ours = InProcessRun(config, ctx, folder, steps)
        self._held[TEMPLATE] = allocated(ctx.device) - before
        accumulation = config.micro_batches_per_step(ctx.world_size) // ctx.world_size
        self.config = dataclasses.replace(self.ours.config, grad_accum_steps=accumulation, global_batch_size=0)
        precision = Precision.choose(
            use_amp=config.use_amp, amp_dtype=config.amp_dtype, device=ctx.device, fast_bf16=ctx.fast_bf16
        )
        plain, bare = (loop(self.config, ctx, precision) for loop in (loops.plain, loops.bare))
        self._plain_losses: list[tuple[Tensor, float]] = []
        epoch_of: dict[str, Callable[[], object]] = {
            TEMPLATE: self.ours.train_epoch,
            PLAIN: lambda: self._plain_losses.extend(next(plain)[1:] for _ in range(steps)),
            BARE: lambda: [next(bare) for _ in range(steps)],
        }
        if with_tutorial:
            before = allocated(ctx.device)
            epoch_of[TUTORIAL] = loops.Tutorial(self.config, ctx).epoch
            self._held[TUTORIAL] = allocated(ctx.device) - before
        self.candidates = {name: Candidate(name, epoch) for name, epoch in epoch_of.items()}

    def run(self, rounds: int, report: Callable[[str], object] = lambda text: None) -> dict[str, dict[str, Any]]:
        """Take all turns, and end the run. Returns the figures of each loop by name."""
        candidates, device = list(self.candidates.values()), self._ctx.device
        for variant in candidates:
            before = allocated(device)
            variant.epoch()
            self._held[variant.name] += allocated(device) - before
        counted = {variant.name: count(variant.epoch, device, self._held[variant.name]) for variant in candidates}
        before = self.ours.seconds_by_phase()
        take_turns(candidates, rounds, device, report)
        spent = {
            phase: seconds - before[phase]
            for phase, seconds in self.ours.seconds_by_phase().items()
            if phase in STEP_PHASES
        }
        self.ours.close()
        plain, bare, rows = self.candidates[PLAIN], self.candidates[BARE], {}
        for variant in candidates:
            rows[variant.name] = {
                "step_s": variant.seconds() / self.steps,
                "cpu_s": variant.seconds("cpu") / self.steps,
                "wall_over_bare": variant.ratio(bare),
                "cpu_over_bare": variant.ratio(bare, "cpu"),
                "wall_over_plain": variant.ratio(plain),
                "cpu_over_plain": variant.ratio(plain, "cpu"),
                "control_wall": variant.control(),
                "control_cpu": variant.control("cpu"),
                "warning": variant.warning("wall", "cpu"),
                "samples_per_s": self.ours.samples_per_epoch / variant.seconds(),
                "collectives_per_step": counted[variant.name]["collectives"] / self.steps,
                "peak_memory_bytes": counted[variant.name]["peak_memory"],
                "turns_wall_s": variant.wall,
                "turns_cpu_s": variant.cpu,
            }
        rows[TEMPLATE]["data_wait"] = spent["data"] / sum(spent.values())
        return rows

    def equality(self) -> dict[str, int]:
        """The number of log intervals, and of those with exactly the plain loop's loss. Both are zero if it need not be
        equal: on several ranks, and on a GPU without --deterministic."""
        if self._ctx.world_size > 1 or not (self._ctx.device.type == "cpu" or self.config.deterministic):
            return {"intervals": 0, "equal": 0}
        every, records = self.config.log_interval, self.ours.training.attempt.run.records.read("train")
        losses = [record["loss"] for record in records]
        pieces = [self._plain_losses[k : k + every] for k in range(0, len(losses) * every, every)]
        plain = [sum(loss.item() for loss, _ in piece) / sum(weight for _, weight in piece) for piece in pieces]
        return {"intervals": len(losses), "equal": sum(a == b for a, b in zip(losses, plain, strict=True))}


def measure(
    options: Any, config: TrainingConfig, ctx: DistributedContext, folder: Path, say: Callable[[str], object]
) -> dict[str, Any]:
    """Compare all loops on the task of `config`, and print the figures."""
    say("measuring the host cost")  # first, before the process holds many objects
    cost = host_cost(config, ctx, options.steps, options.rounds, folder / "tiny")
    comparison = Comparison(config, ctx, options.steps, folder / "run", with_tutorial=True)
    precision, workers = comparison.ours.state.precision, comparison.ours.loader.num_workers
    flops = flops_per_sample(comparison.ours)
    peak = peak_flops(ctx.device, precision.dtype or torch.float32) * ctx.world_size
    say(f"precision {precision.name}, {workers} loader workers per rank")
    say(f"{flops / 1e9:.2f} GFLOP per sample, forward and backward; measured peak: {peak / 1e9:,.0f} GFLOP/s")
    rows = comparison.run(options.rounds, say)
    equality = comparison.equality()
    say(table(rows, flops, peak))
    say(f"speed of this template over the DDP tutorial: {rows[TUTORIAL]['step_s'] / rows[TEMPLATE]['step_s']:.2f}")
    words = "losses of template and plain loop: {equal} of {intervals} log intervals are bit-identical"
    is_asked = equality["intervals"] > 0
    say(words.format(**equality) if is_asked else "losses: not compared (needs one rank, and --deterministic on a GPU)")
    controls = ", ".join(f"{value:.3f}" for value in cost["controls"].values())
    say(f"host: {cost['template_us']:.0f} us CPU time per step with a model that costs nothing (controls {controls})")
    for name in ("bare", "plain"):
        say(f"  {cost[f'over_{name}_us']:+.0f} us over the {name} loop")
    facts = {"precision": precision.name, "workers": workers, "flops_per_sample": flops, "peak_flops": peak}
    return facts | {"rows": rows, "equality": equality, "host": cost}


def host_cost(config: TrainingConfig, ctx: DistributedContext, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Microseconds of CPU time per step, and over the other loops, with a model that costs nothing."""
    tiny = TrainingConfig(batch_size=4, backend=config.backend)
    with costless_task():
        comparison = Comparison(tiny, ctx, HOST_STEPS * steps, folder)
        rows = comparison.run(HOST_ROUNDS * rounds)
    template, plain, bare = (variant.rounds("cpu") for variant in comparison.candidates.values())
    per_step = 1e6 / (2 * comparison.steps)  # a round is two turns
    return {
        "template_us": 1e6 * rows[TEMPLATE]["cpu_s"],
        "over_bare_us": per_step * statistics.median(a - b for a, b in zip(template, bare, strict=True)),
        "over_plain_us": per_step * statistics.median(a - b for a, b in zip(template, plain, strict=True)),
        "controls": {name: row["control_cpu"] for name, row in rows.items()},
    }


def table(rows: dict[str, dict[str, Any]], flops: float, peak: float) -> str:
    """The loops as lines of text. flops: per sample, forward and backward; peak: measured, per second."""
    columns = "step,CPU/step,wall/bare,CPU/bare,wall/plain,CPU/plain,control"
    lines = [["", *columns.split(","), *"samples/s,GFLOP/s,of peak,data wait,collectives,memory,".split(",")]]
    for name, row in rows.items():
        rate = row["samples_per_s"] * flops
        line = [name, f"{1000 * row['step_s']:.2f} ms", f"{1000 * row['cpu_s']:.2f} ms"]
        ratios = [f"{kind}_over_{other}" for other in ("bare", "plain") for kind in ("wall", "cpu")]
        line += [f"{row[key]:.3f}" for key in (*ratios, "control_wall")]
        line += [f"{row['samples_per_s']:,.0f}", f"{rate / 1e9:,.0f}", f"{rate / peak:.0%}"]
        line += [f"{row['data_wait']:.1%}" if "data_wait" in row else "-", f"{row['collectives_per_step']:.2f}"]
        lines.append([*line, f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB", row["warning"]])
    return format_table(lines, range(1, len(lines[0]) - 1))


def peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Floating-point operations per second of this rank's fastest matrix product."""
    best = 0.0
    for size in (4096, 8192) if device.type == "cuda" else (512, 1024):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            synchronize(device)
            began = time.perf_counter()
            a @ b
            synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def flops_per_sample(ours: InProcessRun) -> float:
    """Matrix products and convolutions of a forward and backward pass, as torch's FlopCounterMode counts them."""
    batch = ours.loader.fetch_example_batch()
    with FlopCounterMode(display=False) as counter, ours.state.precision.autocast():
        ours.training.hooks.compute_loss(ours.state.model, batch)["loss"][0].backward()
    ours.state.optimizer.zero_grad()
    ours.state.step_sums.running_stats.discard()
    return counter.get_total_flops() / min(ours.config.batch_size, len(ours.loader.dataset))


def allocated(device: torch.device) -> int:
    """Bytes of the tensors on a GPU; 0 without one."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def count(epoch: Callable[[], object], device: torch.device, held: int = 0) -> dict[str, float]:
    """Run an epoch. Returns its collectives in all groups, and peak memory in bytes (without a GPU: the process's).

    held: bytes of this loop that are allocated before; what other loops hold does not count.
    """
    others = allocated(device) - held
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    collectives = 0
    if dist.is_initialized() and dist.get_world_size() > 1:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            epoch()
        collectives = sum(event.count for event in profiler.key_averages() if event.key.startswith("c10d::"))
    else:  # where reading a profile can take longer than the epoch
        epoch()
    return {"collectives": collectives, "peak_memory": read_peak_memory() - others * (device.type == "cuda")}


class Costless(nn.Module):
    """float [B, 3] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 10)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(rows)


class Rows(Dataset):
    """Three numbers and a label each, in memory."""

    in_memory = True

    def __init__(self, size: int) -> None:
        self.rows, self.labels = torch.zeros(size, 3), torch.arange(size) % 10

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.rows[indices], self.labels[indices]

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch


def costless_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Metrics:
    logits, labels = model(batch[0]), batch[1]
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return {"loss": (loss, len(labels)), "top1": (count_correct(logits, labels), len(labels))}


@contextlib.contextmanager
def costless_task() -> Iterator[None]:
    """Replace model and data for all loops."""

    def create_dataset(config: TrainingConfig, split: str) -> Rows | None:
        return Rows(config.dataset_size) if split == "train" else None

    hooks = {
        "create_model": lambda config, device: Costless().to(device),
        "param_groups": lambda model, config: [{"params": list(model.parameters())}],
        "compute_loss": costless_loss,
    }
    # the defaults
    ours = {name: value for name, value in vars(ModelHooks).items() if name in ModelHooks.__dataclass_fields__}
    with (
        mock.patch.object(ModelHooks, "from_module", lambda *_: ModelHooks(**hooks, **ours)),
        mock.patch.multiple(fork_model, **hooks),
        mock.patch.object(fork_dataset, "create_dataset", create_dataset),
    ):
        yield
