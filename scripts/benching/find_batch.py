"""benchmark.py --find-batch [--ranks N] [--memory GIB] [flags of train.py]: the largest micro-batch that fits, and the
flags that keep the global batch.

A trial is what a run does with a micro-batch: the passes before the first step, one step under DDP with the optimizer's
state (and the
average, where asked for), one evaluation. On CUDA the trials run in one process, with a limit on what torch may take of
the device;
on a CPU each runs in a process of its own that may not take more than the memory that is meant, so that the machine
does not swap.
There a step takes long: the sizes tried are those that a line through the trials before foretells, and the answer is
one of them.
Samples are the first ones of the training set: where they are of unequal length, leave room for longer ones.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from torch.utils.data import Dataset

import train
from config import TrainingConfig, UserError
from ddp_utils import DistributedContext, cleanup_distributed, read_launch, setup_distributed, wrap_ddp
from model import compute_loss
from scripts.lib.preflight.links import sync
from scripts.lib.preflight.rates import checkpoint_size
from utils.data.loader import create_distributed_dataloader
from utils.data.sampler import GlobalBatch
from utils.data.worker import Late, no_longer_than
from utils.memory import gigabytes, host_limits, is_out_of_memory, let_go, own_memory

HEAD_ROOM = 0.05  # of the memory: for fragmentation, and what a run has beside the loop
FOR_NCCL = 2**30  # bytes of a device that NCCL's buffers may take as soon as there are two ranks
NEAR_ENOUGH = 0.05  # of the largest that was found to fit
FIRST_ON_CPU, MOST_AT_ONCE = 32, 8  # the first trial; how many times larger the next one may be
SECONDS_OF_A_TRIAL = 300
GIVEN, CHECKPOINTING = "as given", "--activation_checkpointing"
FIT, UNFIT, LATE = "fits", "does not fit", f"takes longer than {SECONDS_OF_A_TRIAL} s"
ITS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID")  # what says that this process is one of several


@dataclass(frozen=True)
class Trial:
    """What became of a micro-batch of `size` samples. needs: bytes, known where it ran to its end. seconds: of one
    step."""

    size: int
    end: str
    needs: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        figures = f", {gigabytes(self.needs)}, {self.seconds:.3g} s a step" if self.needs else ""
        return f"{self.size:,} sample(s): {self.end}{figures}"


def one_step(config: TrainingConfig, ctx: DistributedContext, train_set: Dataset, size: int) -> tuple[float, int]:
    """All that a run does with a micro-batch of so many samples. Returns the seconds of a step, and the bytes of a
    checkpoint.

    config: settled.
    """
    config = dataclasses.replace(config, batch_size=size, global_batch_size=0, grad_accum_steps=1)
    loader, _ = create_distributed_dataloader(train_set, config, ctx)
    state = train.create_state(config, ctx)
    model, global_batch = wrap_ddp(state.model, config, ctx), GlobalBatch(size, float(size), [])
    batch = loader.fetch(list(range(size)))[2]
    train.warm_up(model, batch, state, compute_loss)
    model.train()
    state.plan(2, 2, config)
    # the first step makes the optimizer's state, and on CUDA chooses kernels
    for _ in range(2 if ctx.device.type == "cuda" else 1):
        sync(ctx.device)
        began = time.perf_counter()
        with state.precision.autocast():
            loss_sum, _ = compute_loss(model, batch)
        state.running_stats.add(size)
        state.running_stats.start_reduce()
        state.backward(loss_sum, 1 / size)
        del loss_sum
        state.update_if_finite(global_batch)
        sync(ctx.device)
        seconds = time.perf_counter() - began
    for each in [state.model] + ([state.average.model] if state.average else []):
        with torch.no_grad(), state.precision.autocast():
            compute_loss(each.eval(), batch)
    return seconds, checkpoint_size(state, config)


def limit_to(memory: int) -> None:
    """From here on this process may take so many bytes in all: what it holds resident now, and the rest in new pages.

    To be called when the code was run once: pages of libraries that are read later are not counted.
    """
    import resource

    most = own_memory("VmData") + max(0, memory - own_memory("VmRSS"))
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def be_a_trial(size: int, memory: int, words: list[str]) -> int:
    """In a process of its own, on the CPU: print what came of it, as JSON."""
    config = TrainingConfig.from_args(words)
    ctx = setup_distributed(config)
    train_set, _, config = train.load_data(config, ctx)
    found = {"end": UNFIT}
    try:
        one_step(config, ctx, train_set, min(2, size))
        limit_to(memory)
        seconds, checkpoint = one_step(config, ctx, train_set, size)
        # its copy in shared memory, and the archive that the writer makes of it
        needs = own_memory("VmHWM") + 2 * checkpoint
        found = {"end": FIT if needs <= memory else UNFIT, "needs": needs, "seconds": seconds}
    except UserError as refused:
        found = {"refused": str(refused)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # what is left may be too little for an orderly end


def on_cpu(words: list[str], memory: int) -> Callable[[int], Trial]:
    """A trial in a process of its own, with a deadline. Raises UserError where the flags cannot be used."""

    def run(size: int) -> Trial:
        command = [sys.executable, __file__, str(size), str(memory), *words]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS_OF_A_TRIAL, check=False
            )
        except subprocess.TimeoutExpired:
            return Trial(size, LATE)
        if ended.returncode == -9:  # by the kernel, for want of memory
            return Trial(size, UNFIT)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}")
        found = json.loads(ended.stdout.splitlines()[-1])
        if "refused" in found:
            raise UserError(found["refused"])
        return Trial(size, **found)

    return run


def on_cuda(config: TrainingConfig, ctx: DistributedContext, train_set: Dataset, memory: int) -> Callable[[int], Trial]:
    """A trial in this process, where torch may take so many bytes of the device; all is let go afterwards."""

    def run(size: int) -> Trial:
        total = torch.cuda.mem_get_info(ctx.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), ctx.device)
        torch.cuda.reset_peak_memory_stats(ctx.device)
        try:
            with no_longer_than(SECONDS_OF_A_TRIAL):
                seconds, _ = one_step(config, ctx, train_set, size)
            return Trial(size, FIT, torch.cuda.max_memory_reserved(ctx.device), seconds)
        except Exception as error:
            if not isinstance(error, Late) and not is_out_of_memory(error):
                raise
            let_go(error)
            return Trial(size, LATE if isinstance(error, Late) else UNFIT)
        finally:
            if config.compile != "off":
                torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()

    return run


def search(
    trial: Callable[[int], Trial], first: int, most: int, memory: int, is_costly: bool, say: Callable[[str], None]
) -> list[Trial]:
    """Trials, until the largest size that fits is known to 5 %; of sizes up to `most`. They double, then halve what is
    between.

    is_costly: go to where a line through the trials meets the memory, and take it when it is there.
    """
    trials: list[Trial] = []
    low, high, size = 0, most + 1, min(first, most)
    while True:
        trials.append(trial(size))
        say(f"  {trials[-1]}")
        low, high = (size, high) if trials[-1].end == FIT else (low, size)
        if high - low <= max(1, NEAR_ENOUGH * low):
            return trials
        larger = low * (MOST_AT_ONCE if is_costly else 2)
        size = min(larger, most) if high > most and low else (low + high) // 2
        if is_costly and (line := line_through(trials)):
            foretold = int((memory - line[0]) / line[1])
            if foretold <= low * (1 + NEAR_ENOUGH):
                return trials
            size = min(foretold, larger) if low and foretold < high else size


def line_through(trials: list[Trial]) -> tuple[float, float] | None:
    """Bytes in any case, and bytes a sample, by all trials that ran to their end. None where two sizes do not show it
    yet."""
    measured = {each.size: each.needs for each in trials if each.needs}
    if len(measured) < 2:
        return None
    slope, start = statistics.linear_regression(list(measured), list(measured.values()))
    return (start, slope) if slope > 0 else None


def keeping(whole: int, largest: int, ranks: int) -> int:
    """The largest micro-batch of at most `largest` that divides the global batch: evenly among the ranks where one
    does."""
    sizes = [size for size in range(min(largest, whole), 0, -1) if whole % size == 0]
    enough = [size for size in sizes if whole // size >= ranks] or sizes[-1:]
    return next((size for size in enough if whole // size % ranks == 0), enough[0])


def answer(name: str, trials: list[Trial], most: int, whole: int, ranks: int) -> list[str]:
    """What the trials of one row say, and the flags to paste."""
    fitting = [each for each in trials if each.end == FIT]
    if not fitting:
        return [f"{name}: not one sample fits; give a smaller --model or --image_size, or a device with more memory"]
    best = max(fitting, key=lambda each: each.size)
    size = keeping(whole, best.size, ranks)
    lines = [
        f"{name}: {best.size:,} samples, {gigabytes(best.needs)}, {best.seconds:.3g} s a step,"
        f" {best.size / best.seconds:,.1f} samples/s"
    ]
    if line := line_through(trials):
        lines.append(
            f"  by its trials it takes {gigabytes(max(0, line[0]))} and {line[1] / 2**20:,.2f} MiB a sample; the"
            f" {best.size:,} were really tried"
        )
    if best.size == most:
        lines.append("  which is the whole training set: no micro-batch is larger")
    elif any(each.end == LATE for each in trials):
        lines.append(f"  larger ones take longer than {SECONDS_OF_A_TRIAL} s to try")
    more = f" {CHECKPOINTING}" if name != GIVEN else ""
    why = f"   ({best.size:,} does not divide it)" if size != best.size else ""
    if best.size * ranks > whole:
        why = f"   (more is more than a rank's share of {whole:,} samples)"
    return [*lines, f"  --batch_size {size} --global_batch_size {whole}{more}{why}"]


def memory_of_this_rank(device: torch.device, ranks: int, given: float) -> tuple[int, str]:
    """Bytes that a rank may take, and where they come from."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device)  # by data that lies there already
        free = torch.cuda.mem_get_info(device)[0] + held - (FOR_NCCL if ranks > 1 else 0)
        name = f"free on {torch.cuda.get_device_name(device)}" + (
            f" but for {gigabytes(FOR_NCCL)} that NCCL may take" if ranks > 1 else ""
        )
        return (min(free, int(given * 2**30)), "--memory") if given else (free, name)
    if given:
        return int(given * 2**30), "--memory"
    tightest = min(host_limits(), key=lambda limit: limit.free, default=None)
    if tightest is None:
        raise UserError("find-batch: this system does not say how much memory is free; give --memory GIB")
    return tightest.free // ranks, f"free by {tightest.name}" + (f", shared by {ranks} ranks here" if ranks > 1 else "")


def take(words: list[str], name: str, low: float) -> tuple[list[str], float]:
    """The words without a flag, and its number; 0 where it is not given. Raises UserError."""
    if name not in words:
        return words, 0
    place = words.index(name)
    try:
        value = float(words[place + 1])
        if value < low:
            raise ValueError
    except (IndexError, ValueError):
        raise UserError(f"{name}: needs a number of at least {low:g}; give one behind it") from None
    return words[:place] + words[place + 2 :], value


def main(words: list[str]) -> int:
    """words: the command line without --find-batch. Returns the exit code."""
    launch = read_launch()
    if launch.rank:
        return 0  # rank 0 tries for all
    here = int(os.environ.get("LOCAL_WORLD_SIZE", launch.world_size))
    for name in ITS_OWN:
        os.environ.pop(name, None)
    try:
        words, ranks = take(words, "--ranks", 1)
        words, gib = take(words, "--memory", 0.1)
        ranks, here = (int(ranks), int(ranks)) if ranks else (launch.world_size, here)
        return find(words, ranks, here, gib)
    except UserError as refused:
        sys.stderr.write(f"{refused}\n")
        return 2


def find(words: list[str], ranks: int, here: int, gib: float) -> int:
    """Search and say, for so many ranks in all and on this machine. Raises UserError."""
    config = TrainingConfig.from_args(words)
    whole = config.batch_size * config.micro_batches_per_step(ranks)
    ctx = setup_distributed(config)
    is_cuda = ctx.device.type == "cuda"
    train_set, _, settled = train.load_data(config, ctx)
    memory, source = memory_of_this_rank(ctx.device, ranks if is_cuda else here, gib)
    room = int(memory * (1 - HEAD_ROOM))

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    say(
        f"{gigabytes(memory)} for a rank ({source}); {gigabytes(memory - room)} of it are left free, for fragmentation"
        " and what else a run has"
    )
    rows, answers = {GIVEN: []}, []
    if not config.activation_checkpointing:
        rows[f"with {CHECKPOINTING}"] = [CHECKPOINTING]
    for name, more in rows.items():
        say(f"{name}:")
        trial, first = on_cpu([*words, *more], room), FIRST_ON_CPU
        if is_cuda:
            asked = dataclasses.replace(
                settled, activation_checkpointing=settled.activation_checkpointing or bool(more)
            )
            trial, first = on_cuda(asked, ctx, train_set, room), config.batch_size
        try:
            trials = search(trial, first, len(train_set), room, not is_cuda, say)
        except UserError as refused:
            if name == GIVEN:
                raise
            answers.append(f"{name}: {refused}")
            continue
        answers += answer(name, trials, len(train_set), whole, ranks)
    say("\n".join(["", *answers]))
    cleanup_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(be_a_trial(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
