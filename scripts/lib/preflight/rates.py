"""How fast one rank computes and reads, measured without communication: its device, the model's step, its loader."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

import model
from config import TrainingConfig
from scripts.lib.preflight.links import sync
from utils.data.loader import GlobalBatchLoader
from utils.training.state import TrainState

SECONDS = 0.6  # duration of the device measurement
SECONDS_OF_STEPS, MAX_STEPS = 2.0, 10


def timed(action: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Seconds per round."""
    sync(device)
    began = time.perf_counter()
    for _ in range(rounds):
        action()
    sync(device)
    return (time.perf_counter() - began) / rounds


def device_speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product, measured long enough to see a throttled or shared device."""
    size = 4096 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timed(lambda: a @ b, 3, device)
    rounds, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < SECONDS:
        timed(lambda: a @ b, 10, device)
        rounds += 10
    return 2 * size**3 * rounds / seconds


def gradient_bytes(state: TrainState) -> int:
    return sum(p.nbytes for group in state.optimizer.param_groups for p in group["params"])


def checkpoint_size(state: TrainState, config: TrainingConfig) -> int:
    """Bytes: the weights, their average, and the optimizer's state of each parameter."""
    weights = sum(value.nbytes for value in state.model.state_dict().values())
    copies = 2 if config.optimizer == "adamw" else int(config.momentum > 0)
    return weights * (2 if config.ema_decay else 1) + copies * gradient_bytes(state)


def step_seconds(state: TrainState, loader: GlobalBatchLoader, passes: int = 1) -> float:
    """Seconds of a forward and backward pass of one micro-batch.

    passes: the same on all ranks, since SyncBatchNorm communicates in each.
    """
    state.model.train()
    batch = loader.sample_batch()

    def step() -> None:
        with state.precision.autocast():
            model.compute_loss(state.model, batch)["loss"][0].backward()

    timed(step, 1, loader.device)  # selects kernels
    state.check_gradients()
    seconds = timed(step, passes, loader.device)
    state.optimizer.zero_grad()
    return seconds


def passes_for(step_s: list[float]) -> int:
    """How many passes take about SECONDS_OF_STEPS on the slowest rank. step_s: of each rank."""
    return max(1, min(MAX_STEPS, int(SECONDS_OF_STEPS / max(step_s))))


def loader_rate(loader: GlobalBatchLoader) -> dict[str, Any]:
    """Samples per second of this rank's loader with its workers, while nothing else runs."""
    global_batches = (each for epoch in itertools.count() for each in loader.global_batches(epoch))
    micro_batches = itertools.chain.from_iterable(global_batches)
    next(micro_batches)  # the workers have started
    sync(loader.device)
    samples, began = 0, time.perf_counter()
    while time.perf_counter() < began + SECONDS_OF_STEPS:
        samples += len(next(micro_batches).indices)
    sync(loader.device)
    return {"rate": samples / (time.perf_counter() - began), "workers": loader.num_workers}
