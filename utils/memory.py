"""What does not fit into memory: how such an error is known, and the sentence with the flags that help. How much memory
there is."""

from __future__ import annotations

import contextlib
import errno
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import TrainingConfig, TrainingError
from utils.batch import tensors_in
from utils.distributed.context import DistributedContext

OF_THE_DEVICE = re.compile(
    r"(CUDA|HIP) (out of memory|error: out of memory)|(CUDNN|CUBLAS)_STATUS_ALLOC_FAILED|Cuda failure.*out of memory"
)
OF_THE_HOST = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|bad_alloc|Cannot allocate memory")
# oneDNN does not say of what
PERHAPS = re.compile(r"could not (create|execute) a primitive|could not create a memory object")
LITTLE = 512 * 2**20  # bytes of free memory below which that is what it died of
SIZE = r"([\d.]+ ?[KMGT]?i?(?:B|bytes))"
ASKED = re.compile(rf"(?:[Tt]ried to allocate|Unable to allocate) {SIZE}")
CAPACITY, HELD = (
    re.compile(rf"total capacity of {SIZE} of which {SIZE} is free"),
    re.compile(rf"this process has {SIZE} memory in use"),
)

# What was under way, by the functions through which the error came; of several the innermost says it.
DOING = {
    "load_data": "data",
    "cached": "data",
    "create_state": "model",
    "wrap_ddp": "model",
    "update_if_finite": "model",
    "resume_run": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save": "checkpoint",
    "sample_batch": "micro-batch",
    "windows": "micro-batch",
    "warm_up": "micro-batch",
    "compile_all_sizes": "micro-batch",
    "train_one_epoch": "micro-batch",
    "local_step": "micro-batch",
    "ddp_step": "micro-batch",
    "evaluate": "evaluation",
}
FIND = "python scripts/benchmark.py --find-batch with the same flags says what fits"
# address space, no page of it in use: what is left to say the sentence with, where a limit is reached
CUSHION = [bytearray(2**23)]
MORE_MEMORY = "give the job more memory, fewer --num_workers, or fewer ranks to this machine"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or on the host."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    if not isinstance(error, RuntimeError):
        return False
    is_said = bool(OF_THE_DEVICE.search(text) or OF_THE_HOST.search(text))
    return is_said or (
        bool(PERHAPS.search(text)) and min((limit.free for limit in host_limits()), default=LITTLE) < LITTLE
    )


def explain_memory(
    error: BaseException, config: TrainingConfig, ctx: DistributedContext, checkpoint: Path | None = None
) -> TrainingError | None:
    """The sentence for what did not fit; None where the error is another. What the error's frames hold is let go.

    Args:
        checkpoint: the newest of the run, where there is one: its micro-batch cannot be changed any more.
    """
    if not is_out_of_memory(error):
        return None
    CUSHION.clear()
    doing, size, shapes = _look_into(error.__traceback__)
    size = min(size or config.batch_size, config.batch_size)
    is_of_device = ctx.device.type == "cuda" and (
        isinstance(error, torch.OutOfMemoryError) or bool(OF_THE_DEVICE.search(str(error)))
    )
    place = f"{ctx.device_names[ctx.rank]} ({ctx.device} of {ctx.host})" if is_of_device else ctx.host
    figures = _figures_of_device(str(error)) if is_of_device else _figures_of_host(str(error))
    let_go(error)  # the sentence itself takes some memory; and in a notebook a smaller batch fits now
    samples = f"{size} samples{shapes}"
    what = {
        "data": "the data set",
        "model": "the model, with its gradients and what the optimizer keeps,",
        "checkpoint": "the copy of a checkpoint",
        "micro-batch": f"a micro-batch of {samples}",
        "evaluation": f"the evaluation of a micro-batch of {samples}",
        "": "what the run was doing",
    }[doing]
    return TrainingError(
        f"rank {ctx.rank}: {what} does not fit into the memory of {place}{figures};"
        f" {_remedy(doing, is_of_device, size, config, ctx, checkpoint)}"
    )


def let_go(error: BaseException) -> None:
    """Of all that the functions held which the error came through."""
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        frame.f_locals  # noqa: B018 -- where it was looked at, Python before 3.13 keeps a copy, until it is looked at again


@contextlib.contextmanager
def memory_explained(config: TrainingConfig, ctx: DistributedContext) -> Iterator[None]:
    """Raise TrainingError, with the sentence, where something in it does not fit."""
    try:
        yield
    except Exception as error:
        if cause := explain_memory(error, config, ctx):
            raise cause from None
        raise


def halved(size: int, config: TrainingConfig, world_size: int) -> str:
    """Flags for a micro-batch of at most half of `size`, and the same global batch; empty where one sample is too
    much."""
    whole = config.batch_size * config.micro_batches_per_step(world_size)
    size = next((size for size in range(size // 2, 0, -1) if whole % size == 0), 0)
    return f"--batch_size {size} --global_batch_size {whole}" if size else ""


def _remedy(
    doing: str, is_of_device: bool, size: int, config: TrainingConfig, ctx: DistributedContext, checkpoint: Path | None
) -> str:
    if doing == "model":
        return _smaller_model(config) if is_of_device or ctx.device.type == "cpu" else MORE_MEMORY
    if doing in ("data", "checkpoint") or (ctx.device.type == "cuda" and not is_of_device):
        return MORE_MEMORY
    flags, others = halved(size, config, ctx.world_size), []
    if config.grad_accum_steps != 1 and flags:
        flags += f" in place of --grad_accum_steps {config.grad_accum_steps}"
    if doing != "evaluation" and not config.activation_checkpointing:
        others.append("--activation_checkpointing")
    if not config.use_amp and is_of_device:
        others.append("--amp_dtype bf16 in place of --no-use_amp")
    if config.eval_only:
        return f"give --batch_size {size // 2}" if flags else _smaller_model(config)
    if checkpoint is None:
        ways = [f"{flags} (the same global batch)"] if flags else []
        return f"give {', or '.join([*ways, *others])}; {FIND}" if ways or others else _smaller_model(config)
    ways = [*others, "a device with more memory"]
    anew = (
        f"; or begin a new run from its weights: {flags} --init_from {checkpoint} --run_dir NEW; {FIND}"
        if flags
        else ""
    )
    return f"the micro-batch of a run that goes on is fixed: give {', or '.join(ways)}, and --resume_from auto{anew}"


def _smaller_model(config: TrainingConfig) -> str:
    ways = ["a smaller --model or --image_size"]
    ways += ["--optimizer sgd"] if config.optimizer == "adamw" else ["--momentum 0"] if config.momentum else []
    ways += ["no --ema_decay"] if config.ema_decay else []
    return f"give {', or '.join(ways)}, or a device with more memory: each rank holds all of the model"


def _look_into(trace: Any) -> tuple[str, int, str]:
    """What was under way where the error came from; of the batch that it was done with its samples (0: none is known)
    and its tensors."""
    doing, batch = "", None
    for frame, _ in traceback.walk_tb(trace):
        doing = DOING.get(frame.f_code.co_name, doing)
        found = frame.f_locals.get("micro_batch")
        found = frame.f_locals.get("batch") if found is None else getattr(found, "batch", None)
        batch = found if found is not None and list(tensors_in(found)) else batch
    if batch is None:
        return doing, 0, ""
    shapes = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors_in(batch)]
    return (
        doing,
        max((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), default=0),
        f" ({' and '.join(shapes[:3])})",
    )


def _figures_of_device(text: str) -> str:
    """As torch says them; it says more than anybody could find out later."""
    asked, capacity, held = ASKED.search(text), CAPACITY.search(text), HELD.search(text)
    said = [f"it asked for {asked[1]}"] if asked else [text.splitlines()[0]]
    said += [f"{capacity[2]} of {capacity[1]} is free"] if capacity else []
    said += [f"this process holds {held[1]}"] if held else []
    return f" ({', '.join(said)})"


def _figures_of_host(text: str) -> str:
    asked, tightest = ASKED.search(text), min(host_limits(), key=lambda limit: limit.free, default=None)
    said = [f"it asked for {_readable(asked[1])}"] if asked else []
    if tightest:
        said.append(f"{gigabytes(tightest.free)} of {gigabytes(tightest.most)} is free by {tightest.name}")
        said.append(f"this process holds {gigabytes(own_memory('VmRSS'))}")
    return f" ({', '.join(said)})" if said else ""


def _readable(size: str) -> str:
    return gigabytes(int(size.split()[0])) if size.endswith(" bytes") else size


def gigabytes(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"


class Limit(NamedTuple):
    """One of the limits on what this process may take, in bytes."""

    most: int
    free: int
    name: str


def host_limits() -> list[Limit]:
    """Those that there are: the machine, the cgroups of a container or job, the shell's ulimit. None where there is no
    /proc."""
    machine, found = _table("/proc/meminfo"), []
    if "MemAvailable" in machine:
        found.append(Limit(machine["MemTotal"], machine["MemAvailable"], "the machine"))
    found += _cgroup_limits()
    if sys.platform == "linux":
        import resource

        for number, name, said in (
            (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
            (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
        ):
            most = resource.getrlimit(number)[0]
            if most != resource.RLIM_INFINITY:
                found.append(Limit(most, max(0, most - own_memory(name)), said))
    return found


def free_memory() -> int | None:
    """Bytes that the tightest of them leaves; None where nobody says."""
    return min((limit.free for limit in host_limits()), default=None)


def own_memory(name: str) -> int:
    """Bytes: a line of /proc/self/status (VmRSS, VmHWM, VmData, VmSize); 0 where there is none."""
    return _table("/proc/self/status").get(name, 0)


def _table(file: str) -> dict[str, int]:
    """The lines of a file of /proc that give kB, in bytes."""
    try:
        lines = [line.split() for line in Path(file).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


CGROUPS = (  # of version 2, and of version 1
    (Path("/sys/fs/cgroup"), "", "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _cgroup_limits() -> list[Limit]:
    """Of this process's cgroup and of those that it lies in. What files keep in memory unused counts as free."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for root, controller, most, used, idle in CGROUPS:
                if controllers == controller:
                    inner = root / path.lstrip("/")
                    for folder in (inner, *(each for each in inner.parents if each.is_relative_to(root))):
                        with contextlib.suppress(OSError, ValueError):  # "max": no limit; another mount: no such file
                            limit, taken = int((folder / most).read_text()), int((folder / used).read_text())
                            files = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                            if limit < 2**60:  # version 1 writes a number where there is none
                                found.append(
                                    Limit(limit, max(0, limit - taken + int(files.get(idle, 0))), "its cgroup")
                                )
    return found
