# extra: benchmark or preflight
"""Measure candidates that take turns in one process, with medians, ratios and controls."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from config import TrainingConfig
from ddp_utils import DistributedContext

MAX_CONTROL_ERROR = 0.03  # a larger error is shown beside the figures


@dataclass
class Candidate:
    """Something that runs one epoch of a fixed number of samples."""

    name: str
    epoch: Callable[[], object]
    wall: list[float] = field(default_factory=list)  # seconds of each turn, two turns per round
    cpu: list[float] = field(default_factory=list)  # seconds of CPU time of all threads of this process

    def turn(self, device: torch.device) -> None:
        synchronize(device)
        wall, cpu = time.perf_counter(), time.process_time()
        self.epoch()
        self.cpu.append(time.process_time() - cpu)  # read before the wait for a GPU, which takes CPU time too
        synchronize(device)
        self.wall.append(time.perf_counter() - wall)

    def rounds(self, kind: str) -> list[float]:
        """Return the seconds of both turns of each round."""
        turns = getattr(self, kind)
        return [a + b for a, b in zip(turns[::2], turns[1::2], strict=True)]

    def seconds(self, kind: str = "wall") -> float:
        """Return the seconds of one turn, as the median over the rounds."""
        return statistics.median(self.rounds(kind)) / 2

    def ratio(self, other: Candidate, kind: str = "wall") -> float:
        """Return this candidate's time relative to the other's, as the median over the rounds."""
        return statistics.median(a / b for a, b in zip(self.rounds(kind), other.rounds(kind), strict=True))

    def control(self, kind: str = "wall") -> float:
        """Return this candidate's first turns relative to its second turns. A difference from 1 is noise."""
        turns = getattr(self, kind)
        return statistics.median(turns[::2]) / statistics.median(turns[1::2])

    def warning(self, *kinds: str) -> str:
        noisy = [kind for kind in kinds if abs(self.control(kind) - 1) > MAX_CONTROL_ERROR]
        return f"noisy ({', '.join(noisy)})" if noisy else ""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    candidates: Sequence[Candidate],
    rounds: int,
    device: torch.device,
    print_line: Callable[[str], object] = lambda text: None,
) -> None:
    """Run all candidates forward and then backward in each round, so that slow drift of the machine favours none."""
    began = time.monotonic()
    for done in range(1, rounds + 1):
        for candidate in [*candidates, *reversed(candidates)]:
            candidate.turn(device)
        print_line(f"  round {done} of {rounds}, {time.monotonic() - began:.0f} s")


def collect_machine_facts(ctx: DistributedContext, config: TrainingConfig) -> dict[str, Any]:
    """Return the facts on which a figure depends beside the flags."""
    machine = {"device": ctx.device_names[0], "ranks": ctx.world_size, "threads": torch.get_num_threads()}
    versions = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    return machine | versions | {"date": time.strftime("%Y-%m-%d"), "batch_size": config.batch_size}
