# extra: benchmark
"""Find the largest micro-batch that fits in memory, and flags that keep the global batch (benchmark.py --find-batch).

A trial trains for two steps of two micro-batches each, in a process with limited memory, so that the machine does not
swap. The second step has the optimizer's state, and each second micro-batch has the gradients of the first one. A trial
uses the first samples of an epoch. If lengths vary, leave room for longer samples, or search for the budget of tokens.
The largest budget is found with the longest samples and with the most.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch

import train
from config import TrainingConfig
from ddp_utils import DistributedContext, setup_distributed
from lib import processes
from lib.benchmark.in_process_run import InProcessRun
from lib.benchmark.turns import synchronize
from utils.batch import list_tensors
from utils.data.sets import load_data
from utils.extras.lengths.token_budget import read_lengths  # extra: lengths
from utils.logger import format_count
from utils.memory import format_bytes, is_out_of_memory, read_free_memory, read_process_memory
from utils.settings.errors import UserError
from utils.training.first_passes import train_twice

HEADROOM = 0.05  # fraction of memory for fragmentation and for what a run allocates besides the loop
NCCL_BYTES = 2**30  # device memory for NCCL's buffers on two or more ranks
FIRST_SIZE = 32  # samples of the first trial, unless --batch_size is larger
TOLERANCE = 0.05  # fraction of the largest size found
TRIAL_TIMEOUT = 300  # seconds
CHECKPOINTING = "--activation_checkpointing"  # extra: compile
FITS, TOO_LARGE, TOO_SLOW = "fits", "does not fit", f"takes longer than {TRIAL_TIMEOUT} s"
# A trial has no evaluation, which needs less memory than training, and no compilation and workers, which use other
# memory.
TRIAL_SETTINGS: dict[str, Any] = {"num_workers": 0, "max_time": 0.0}
TRIAL_SETTINGS["compile"] = "off"  # extra: compile
TRIAL_SETTINGS["hang_timeout"] = 0.0  # extra: watch
TRIAL_SETTINGS |= {"epochs": 2, "max_steps": 2, "global_batch_size": 0, "grad_accum_steps": 2, "drop_last": False}


@dataclass(frozen=True)
class Trial:
    """The outcome of a micro-batch of `size` samples or tokens.

    Attributes:
        needs: the bytes that it needs (0: it did not run).
        seconds: the seconds that one micro-batch takes (0: it did not run).
    """

    size: int
    outcome: str
    needs: int = 0
    seconds: float = 0.0
    unit: str = "sample"

    def __str__(self) -> str:
        line = f"{format_count(self.size, self.unit)}: {self.outcome}"
        if self.needs:
            line += f", {format_bytes(self.needs)}, {self.seconds:.3g} s per micro-batch"
        return line


# ---- a trial, in a process of its own ----


def train_two_steps(config: TrainingConfig, ctx: DistributedContext, folder: Path, size: int) -> tuple[float, int]:
    """Train for two steps with micro-batches of `size`.

    Returns:
        The seconds per micro-batch without the wait for data, and the bytes of a checkpoint.
    """
    sizes: dict[str, Any] = {"batch_size": size}
    if config.batch_tokens:  # extra: lengths
        sizes = {"batch_tokens": size, "too_long": "alone"}
    trial_run = InProcessRun(dataclasses.replace(config, **TRIAL_SETTINGS, **sizes), ctx, folder, steps=0)
    waited, began = trial_run.seconds_by_phase()["data"], time.perf_counter()
    while not trial_run.state.schedule.is_at_end:  # a small data set has one step per epoch
        trial_run.train_epoch()
    synchronize(ctx.device)
    seconds = time.perf_counter() - began - (trial_run.seconds_by_phase()["data"] - waited)
    micro_batches = trial_run.state.progress.samples_seen / size
    if trial_run.loader.sampler.is_packed:
        micro_batches = 2.0 * trial_run.state.progress.step
        for batch in trial_run.loader.fetch_example_batches():  # the largest ones, beside the optimizer's state
            train_twice(trial_run.model, batch, trial_run.state, trial_run.training.hooks.compute_loss)
    seconds /= micro_batches
    checkpoint = sum(tensor.nbytes for tensor in list_tensors(trial_run.state.state_dict()))
    trial_run.close()
    return seconds, checkpoint


def available_memory(device: torch.device, ranks: int, gib: float) -> int:
    """Return the bytes that each of `ranks` ranks on this machine may use.

    Args:
        device: the device of this process.
        ranks: the number of ranks.
        gib: the memory that the user has given in GiB (0: none).

    Raises:
        UserError: if the user has to give the memory, since the system does not report it.
    """
    if device.type == "cuda":  # each rank has its own device, on which the data set may be already
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        if ranks > 1:
            free -= NCCL_BYTES
        memory = min(free, int(gib * 2**30)) if gib else free
    elif gib:
        memory = int(gib * 2**30)
    elif (free_memory := read_free_memory()) is None:
        raise UserError("--find-batch needs --memory GIB here, since this system does not report free memory.")
    else:
        memory = free_memory // ranks
    return int(memory * (1 - HEADROOM))


def limit_memory(device: torch.device, memory: int) -> None:
    """Limit this process to `memory` bytes of the device.

    On the CPU, the limit is the current resident memory plus the rest in new pages. Call this after one pass,
    because pages of libraries that are loaded later are not counted.
    """
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        import resource

        limit = read_process_memory("VmData") + max(0, memory - read_process_memory("VmRSS"))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def run_trial(size: int, ranks: int, gib: float, folder: Path, flags: list[str]) -> None:
    """Print the outcome as JSON, and exit. A size of 0 only reads the data set and the memory."""
    config = TrainingConfig.from_args(flags)
    result: dict[str, Any] = {"outcome": TOO_LARGE}
    try:
        ctx = setup_distributed(config)
        memory = available_memory(ctx.device, ranks, gib)
        if not size:
            data = load_data(train.your_data, config, ctx).train
            result = {"memory": memory, "max_size": len(data)}
            if config.batch_tokens:  # extra: lengths
                lengths = read_lengths(data, "the training set", Path(config.data_dir), ctx)
                if not len(lengths):
                    raise UserError(
                        f"--batch_tokens {config.batch_tokens} needs data with lengths, but this data has none. Leave"
                        " out --batch_tokens."
                    )
                result["longest_sample"] = int(lengths.max())
                result["max_size"] *= result["longest_sample"]
        else:
            train_two_steps(config, ctx, folder / "first", min(2, size))
            limit_memory(ctx.device, memory)
            seconds, checkpoint = train_two_steps(config, ctx, folder / "second", size)
            if ctx.device.type == "cuda":
                needs = torch.cuda.max_memory_reserved(ctx.device)
            else:  # this includes the checkpoint's copy in shared memory and the writer's archive
                needs = read_process_memory("VmHWM") + 2 * checkpoint
            result = {"outcome": FITS if needs <= memory else TOO_LARGE, "needs": needs, "seconds": seconds}
    except UserError as error:
        result = {"error": str(error)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    print(f"\n{json.dumps(result)}", flush=True)
    os._exit(0)  # too little memory may be left for a normal exit


def start_trial(size: int, ranks: int, gib: float, flags: list[str]) -> dict[str, Any]:
    """Run a trial in a new process, and return what it printed. Raises UserError if the flags cannot be used."""
    with tempfile.TemporaryDirectory(prefix="find-batch-") as folder:
        command = [sys.executable, __file__, str(size), str(ranks), str(gib), folder, *flags]
        try:
            ended = processes.run_process(command, TRIAL_TIMEOUT)
        except subprocess.TimeoutExpired:
            return {"outcome": TOO_SLOW}
    # the kernel has killed it for its memory, or native code has not checked its allocations
    if -ended.returncode in (signal.SIGKILL, signal.SIGSEGV):
        return {"outcome": TOO_LARGE}
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {ended.returncode}:\n{ended.stderr}")
    result = json.loads(ended.stdout.splitlines()[-1])
    if "error" in result:
        raise UserError(result["error"])
    return result


# ---- the search ----


def search_largest_size(
    trial: Callable[[int], Trial], first_size: int, max_size: int, print_line: Callable[[str], object]
) -> list[Trial]:
    """Double the size until it does not fit, then bisect to 5 %. Sizes are at most `max_size`."""
    trials: list[Trial] = []
    low, high, size = 0, max_size + 1, min(first_size, max_size)
    while high - low > max(1, TOLERANCE * low):
        trials.append(trial(size))
        print_line(f"  {trials[-1]}")
        low, high = (size, high) if trials[-1].outcome == FITS else (low, size)
        size = min(2 * low, max_size) if high > max_size and low else (low + high) // 2
    return trials


def choose_micro_batch(global_batch: int, largest: int, ranks: int) -> int:
    """Return the largest micro-batch up to `largest` that divides the global batch.

    The ranks get equal parts where possible.
    """
    sizes = [size for size in range(min(largest, global_batch), 0, -1) if global_batch % size == 0]
    enough = [size for size in sizes if global_batch // size >= ranks] or sizes[-1:]
    return next((size for size in enough if global_batch // size % ranks == 0), enough[0])


def describe_result(
    name: str, trials: list[Trial], max_size: int, global_batch: int, ranks: int, longest_sample: int = 1
) -> list[str]:
    """Describe the result of one search, with the flags to paste.

    Args:
        name: what was searched.
        trials: the outcomes of the search.
        max_size: the largest size that the data set allows.
        global_batch: the global batch that the flags keep (0: none).
        ranks: the number of ranks.
        longest_sample: the length of the longest sample, if sizes are tokens.
    """
    fitting = [trial for trial in trials if trial.outcome == FITS]
    if not fitting:
        return [f"{name}: Not one sample fits. Give a smaller --model or --image_size, or a device with more memory."]
    best = max(fitting, key=lambda trial: trial.size)
    size = choose_micro_batch(global_batch, best.size, ranks) if global_batch else best.size
    speed = f"{best.seconds:.3g} s per micro-batch, {best.size / best.seconds:,.1f} {best.unit}s/s"
    lines = [f"{name}: {best.size:,} {best.unit}s, {format_bytes(best.needs)}, {speed}"]
    if best.size == max_size:
        lines.append("  This is the whole training set.")
    remark = "   (divides the global batch)" if size != best.size else ""
    added_flags = ""
    if name.startswith("with --"):  # the name of a search with other flags lists them
        added_flags = name.removeprefix("with")
    field = "batch_size" if best.unit == "sample" else "batch_tokens"
    if size < longest_sample:  # extra: lengths
        added_flags += " --too_long alone"
    global_batch_flag = f" --global_batch_size {global_batch}" if global_batch else ""
    return [*lines, f"  --{field} {size}{global_batch_flag}{added_flags}{remark}"]


def find_largest_batch(flags: list[str], ranks: int, gib: float) -> None:
    """Search with and without activation checkpointing, and print the flags to paste. Raises UserError."""
    config = TrainingConfig.from_args(flags)
    unit, first = "sample", max(FIRST_SIZE, config.batch_size)
    global_batch = config.batch_size * config.micro_batches_per_step(ranks)
    if config.batch_tokens:  # extra: lengths
        unit, first = "token", config.batch_tokens
        # The budget alone decides. A global batch in samples has no meaning without their bound.
        global_batch = config.global_batch_size if config.micro_batch[0] == "batch_tokens" else 0
        flags = [*flags, "--batch_size", str(TrainingConfig.batch_size), "--global_batch_size", str(global_batch)]
    facts = start_trial(0, ranks, gib, flags)
    say, max_size, answers = functools.partial(print, flush=True), facts["max_size"], []
    say(f"Each rank may use {format_bytes(facts['memory'])}, after {HEADROOM:.0%} headroom.")
    flag_sets: list[list[str]] = [[]]
    if not config.activation_checkpointing:  # extra: compile
        flag_sets.append([CHECKPOINTING])
    for added_flags in flag_sets:
        name = f"with {' '.join(added_flags)}" if added_flags else "as given"
        say(f"{name}:")

        def trial(size: int, trial_flags: tuple[str, ...] = (*flags, *added_flags)) -> Trial:
            return Trial(size, **start_trial(size, ranks, gib, [*trial_flags]), unit=unit)

        try:
            trials = search_largest_size(trial, first, max_size, say)
            answers += describe_result(name, trials, max_size, global_batch, ranks, facts.get("longest_sample", 1))
        except UserError as error:  # the model may have no blocks to checkpoint
            if not added_flags:
                raise
            answers.append(f"{name}: {error}")
    say("\n".join(["", *answers]))


if __name__ == "__main__":
    size, ranks, gib, folder, *flags = sys.argv[1:]
    run_trial(int(size), int(ranks), float(gib), Path(folder), flags)
