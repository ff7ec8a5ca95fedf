"""How fast a rank computes and reads: its device, the model's own step, the loader with its workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from checks.facts import open_files
from checks.links import sync
from ddp_utils import wrap_ddp
from model import compute_loss
from utils.distributed.collectives import all_gather_json

if TYPE_CHECKING:
    from config import TrainingConfig
    from ddp_utils import DistributedContext
    from utils.data.loader import GlobalBatchLoader
    from utils.training.state import TrainState

SECONDS = 0.6  # of a measure of speed
SECONDS_OF_STEPS = 2.0
MOST_STEPS = 10


def timed(action: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Seconds of one round."""
    sync(device)
    began = time.perf_counter()
    for _ in range(rounds):
        action()
    sync(device)
    return (time.perf_counter() - began) / rounds


def device_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a matrix product, over so long that a throttled or shared device shows."""
    size = 4096 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timed(lambda: a @ b, 3, device)
    rounds, seconds, began = 0, 0.0, time.perf_counter()
    while seconds < SECONDS:
        timed(lambda: a @ b, 10, device)
        rounds, seconds = rounds + 10, time.perf_counter() - began
    return 2 * size**3 * rounds / seconds


def checkpoint_size(state: TrainState, config: TrainingConfig) -> int:
    """Bytes: the weights, their average, and what the optimizer keeps of each parameter."""
    weights = sum(value.nbytes for value in state.model.state_dict().values())
    kept = 2 if config.optimizer == "adamw" else int(config.momentum > 0)
    return weights * (2 if config.ema_decay else 1) + kept * gradient_bytes(state)


def gradient_bytes(state: TrainState) -> int:
    return sum(p.nbytes for group in state.optimizer.param_groups for p in group["params"])


def one_pass(model: torch.nn.Module, batch: Any, state: TrainState) -> None:
    with state.precision.autocast():
        loss_sum, _ = compute_loss(model, batch)
    loss_sum.backward()


def local_step(
    state: TrainState, loader: GlobalBatchLoader, config: TrainingConfig, device: torch.device
) -> dict[str, Any]:
    """Forward and backward of one micro-batch on this rank alone."""
    state.model.train()
    batch, samples = loader.sample_batch(), min(config.batch_size, len(loader.dataset))
    if device.type == "cpu" and samples > 4:  # a large model on a CPU would take minutes: then fewer samples at a time
        few = loader.fetch([0, 1])[2]
        timed(lambda: one_pass(state.model, few, state), 1, device)
        seconds = timed(lambda: one_pass(state.model, few, state), 1, device) / 2
        if (fit := max(2, int(SECONDS_OF_STEPS / seconds))) < samples:
            batch, samples = loader.fetch(list(range(fit)))[2], fit
    first = timed(lambda: one_pass(state.model, batch, state), 1, device)  # it chooses kernels
    state.check_gradients()
    again = timed(lambda: one_pass(state.model, batch, state), 1, device)
    rounds = max(1, min(MOST_STEPS, int(SECONDS_OF_STEPS / min(first, again))))
    seconds = timed(lambda: one_pass(state.model, batch, state), rounds, device)
    state.optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"samples": samples, "step_s": seconds, "rounds": rounds, "peak": peak, "gradient": gradient_bytes(state)}


def ddp_step(
    state: TrainState,
    loader: GlobalBatchLoader,
    samples: int,
    rounds: int,
    config: TrainingConfig,
    ctx: DistributedContext,
) -> float:
    """Seconds of the same pass under DDP, its all-reduces included. On all ranks, with the same figures."""
    model, batch = wrap_ddp(state.model, config, ctx), loader.fetch(list(range(samples)))[2]
    timed(lambda: one_pass(model, batch, state), 2, ctx.device)  # DDP orders its buckets in these
    all_gather_json(None, ctx)
    seconds = timed(lambda: one_pass(model, batch, state), rounds, ctx.device)
    state.optimizer.zero_grad()
    return seconds


def loader_rate(loader: GlobalBatchLoader, device: torch.device) -> dict[str, Any]:
    """Samples a second of this rank's loader with its workers, when nothing else is done, and the files then open. No
    messages."""
    samples, files, began, ends, epoch = 0, 0, 0.0, float("inf"), 0
    while time.perf_counter() < ends:
        for global_batch in loader.global_batches(epoch):
            for micro_batch in global_batch:
                if not began:  # the first batch: workers are up
                    sync(device)
                    began, files = time.perf_counter(), open_files()["open"]
                    ends = began + SECONDS_OF_STEPS
                else:
                    samples += len(micro_batch.indices)
            if time.perf_counter() > ends:
                break
        epoch += 1
    sync(device)
    return {"rate": samples / (time.perf_counter() - began), "open": files, "workers": loader.num_workers}
