"""What the benchmark knows of the machine: its peak, what an epoch sends and holds, a model that costs nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import model as fork_model
import train
from benching.turns import synchronize
from utils.report.reporter import peak_memory

if TYPE_CHECKING:
    from benching.ours import Ours

SECONDS = 1.0  # of the measure of the peak


def speaker(is_main: bool) -> Callable[[str], None]:
    """Prints whole lines on rank 0."""

    def say(text: str) -> None:
        if is_main:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    return say


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of this rank's best matrix product in this type."""
    best = 0.0
    for size in (4096, 8192) if device.type == "cuda" else (512, 1024):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        ends = time.perf_counter() + SECONDS
        while time.perf_counter() < ends:
            synchronize(device)
            began = time.perf_counter()
            a @ b
            synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def flops_per_sample(ours: Ours) -> float:
    """Of a forward and backward pass, as torch's FlopCounterMode counts them: products and convolutions."""
    batch = ours.loader.sample_batch()
    with FlopCounterMode(display=False) as counter, ours.state.precision.autocast():
        loss, _ = train.compute_loss(ours.state.model, batch)
        loss.backward()
    ours.state.optimizer.zero_grad()
    ours.state.running_stats.discard()
    return counter.get_total_flops() / min(ours.config.batch_size, len(ours.loader.dataset))


def count(epoch: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Run an epoch: the collectives of all groups in it, and the peak memory in bytes (of the process, where there is
    no GPU)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        epoch()
    collectives = sum(event.count for event in profiler.key_averages() if event.key.startswith("c10d::"))
    return {"collectives": collectives, "peak_memory": peak_memory()}


class Costless(nn.Module):
    """Reads one pixel of each image: float [B, C, H, W] -> logits [B, classes]."""

    label_smoothing = 0.0

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images[:, :, 0, 0])


@contextlib.contextmanager
def costless_model() -> Iterator[None]:
    """In the place of `create_model`, for ours and for the loops that it is compared with."""

    def create(config: Any, device: torch.device) -> nn.Module:
        return Costless(config.in_channels, config.num_classes).to(device)

    with mock.patch.object(train, "create_model", create), mock.patch.object(fork_model, "create_model", create):
        yield
