# extra: benchmark and sharding
"""Measure the memory of a rank with each --sharding, by number of ranks (benchmark.py --sharding-memory).

This process is rank 0 of N. Torch's "fake" backend ends each collective at once, so that FSDP2 and DDP allocate what
they would on N ranks. All tensors on the device count, in two steps of train.py's loop. The memory that kernels, CUDA
and the allocator use for themselves does not.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from config import TrainingConfig
from ddp_utils import DistributedContext, wrap_ddp
from lib.benchmark.find_batch import available_memory, limit_memory
from lib.preflight.facts import read_device_memory
from utils.cpus import count_usable_cpus
from utils.data.loader import create_distributed_dataloader
from utils.data.sampler import MapDataset
from utils.data.sets import load_data
from utils.distributed.dtensor import local_shard, model_device
from utils.logger import format_count
from utils.memory import drop_traceback, is_out_of_memory, read_free_memory
from utils.run.resume import create_train_state
from utils.settings.errors import UserError
from utils.table import format_table
from utils.training.first_passes import train_twice
from utils.training.hooks import ModelHooks
from utils.training.parts.weight_average import WeightAverage
from utils.training.state import TrainState

SHARDINGS = ("none", "zero2", "hybrid", "zero3")  # the later ones gather more often
USABLE_FRACTION = 0.9  # of a device's memory (kernels and the allocator need the rest)
COLUMNS = ("parameters", "optimizer", "peak")
TWO_STEPS: dict[str, Any] = {"epochs": 2, "max_steps": 2, "max_time": 0.0, "save_every_steps": 0}
TWO_STEPS |= {"num_workers": 0, "record_samples": False, "comm_hook": "none"}
TWO_STEPS["compile"] = "off"  # extra: compile


class TensorTracker(MemTracker):
    """Counts all tensors, and none by module, because the hooks for modules allow one pass only."""

    _ignore: Any = staticmethod(lambda *_: None)
    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _ignore


def count_bytes(state: TrainState, action: Callable[[], object]) -> dict[str, int]:
    """Count the bytes of parameters, of optimizer state with average, and of all tensors at the peak of `action`.

    The tensors are those on the device. Gradients must not exist yet.
    """
    tracker, copies = TensorTracker(), list[torch.Tensor]()
    average = state.find_part(WeightAverage)
    if average:
        copies = [*average._average_by_value.values()]
    tracker.track_external(state.model, state.optimizer, *copies)
    for parameter in state.model.parameters():  # DDP's buckets are counted when they are used
        parameter.grad = None
    with tracker:
        action()
    parameters = [local_shard(parameter.detach()) for parameter in state.model.parameters()]
    values = [
        value
        for param_state in state.optimizer.state.values()
        for value in param_state.values()
        if torch.is_tensor(value)
    ]
    sizes = [sum(t.nbytes for t in tensors) for tensors in (parameters, [*(v for v in values if v.ndim), *copies])]
    peak = tracker.get_tracker_snapshot("peak")[model_device(state.model)]["Total"]
    return dict(zip(COLUMNS, [*sizes, peak], strict=True))


def skip_all_reduce(state, bucket):  # DDP rejects annotations that are strings
    """Skip the all-reduce as a hook of DDP. DDP's own needs a result that the fake backend does not give."""
    flat = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
    future.set_result(flat)
    return future


def measure_sharding(
    config: TrainingConfig, ctx: DistributedContext, data: MapDataset, sharding: str, ranks: int, per_node: int
) -> dict[str, int]:
    """Train two steps as rank 0 of `ranks`, and return the bytes that they need. Raises UserError.

    Args:
        config: the settings of the run.
        ctx: the context of this process alone. Its process group no longer exists.
        data: the training set.
        sharding: the value of --sharding.
        ranks: the number of ranks.
        per_node: the number of ranks on a node.
    """
    config = dataclasses.replace(config, **TWO_STEPS, sharding=sharding)
    hooks = ModelHooks.from_module(train.your_model, config, ctx.device)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    hosts = tuple(f"node{rank // per_node}" for rank in range(ranks))
    size: dict[str, Any] = {"world_size": ranks, "local_world_size": min(ranks, per_node), "hosts": hosts}
    control: Any = weakref.ref(cast(Any, dist.group.WORLD))
    ctx = dataclasses.replace(ctx, **size, device_names=ctx.device_names * ranks, control_group_ref=control)
    try:
        state = create_train_state(hooks, config, ctx)
        loader, sampler = create_distributed_dataloader(data, config, ctx)
        model = wrap_ddp(state.model, config, ctx)
        has_own_hook = False
        has_own_hook = config.reduction == "exact"  # extra: exact
        if isinstance(model, DistributedDataParallel) and not has_own_hook:
            model.register_comm_hook(None, skip_all_reduce)
        train_twice(model, loader.fetch_example_batch(), state, hooks.compute_loss)
        state.plan_schedule(sampler)
        parts = {
            "attempt": mock.MagicMock(config=config, ctx=ctx),
            "hooks": hooks,
            "state": state,
            "loader": loader,
            "model": model,
        }
        training = mock.MagicMock(**parts)  # it makes no votes, records and checkpoints
        training.reporter.is_log_due = training.consensus.step.return_value = False

        def train_two_steps() -> None:
            while not state.schedule.is_at_end:
                train.train_one_epoch(training)
                state.schedule.end_epoch()

        return count_bytes(state, train_two_steps)
    finally:
        dist.destroy_process_group()


def try_measure(*args: Any) -> tuple[dict[str, int], str]:
    """Return the bytes, or none and the reason."""
    try:
        return measure_sharding(*args), ""
    except UserError as error:
        return {}, str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        drop_traceback(error)
        return {}, "does not fit into the memory of this process"


def print_sharding_memory(
    config: TrainingConfig, ctx: DistributedContext, ranks: list[int], print_line: Callable[[str], object]
) -> None:
    """Print the bytes for each strategy, and the first flag that fits on the most ranks. Raises UserError."""
    sets = load_data(train.your_data, config, ctx)
    config, on_cuda = sets.config, ctx.device.type == "cuda"
    dist.destroy_process_group()
    per_node = torch.cuda.device_count() if on_cuda else count_usable_cpus()
    memory_per_rank = read_device_memory(ctx.device)["memory"] // (1 if on_cuda else min(per_node, ranks[-1]))
    if not on_cuda and read_free_memory() is not None:
        limit_memory(ctx.device, available_memory(ctx.device, 1, 0.0))  # the machine would swap otherwise
    chosen = ""
    rows: list[tuple[str, ...]] = [("flags", "ranks", *COLUMNS, "")]
    for number in ranks:
        for sharding in SHARDINGS if number > 1 else SHARDINGS[:1]:
            if sharding == "hybrid" and (number <= per_node or number % per_node):
                continue
            usage, note = try_measure(config, ctx, sets.train, sharding, number, per_node)
            gc.collect()
            shown = [f"{usage[name] / 1e6:,.1f}" if usage else "-" for name in COLUMNS]
            rows.append((f"--sharding {sharding}", str(number), *shown, note))
            if number == ranks[-1] and not chosen and usage and usage["peak"] <= USABLE_FRACTION * memory_per_rank:
                chosen = sharding
    field, size = config.micro_batch
    print_line(
        f"The table shows MB on a rank in a step with --{field} {size} on {ctx.device_names[0]}, with {per_node} ranks"
        " on a node."
    )
    print_line(format_table(rows, range(1, 5)))
    most_ranks = format_count(ranks[-1], "rank")
    limit = f"{USABLE_FRACTION:.0%} of {memory_per_rank / 1e9:,.1f} GB per rank, on {most_ranks}"
    alternative = ""
    if not config.activation_checkpointing:  # extra: compile
        alternative = ", or --activation_checkpointing"
    if chosen:
        print_line(f"Flags: --sharding {chosen}   (the first whose peak fits into {limit})")
    else:
        print_line(f"The model does not fit into {limit}. Use more ranks, a smaller --batch_size{alternative}.")
