"""Contestants that take turns in one process, and what their rounds say: medians, ratios, a control."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MOST_OFF = 0.03  # of a control: a row that is further off says so


@dataclass
class Contestant:
    """Something that runs an epoch of so many optimizer steps."""

    name: str
    epoch: Callable[[], object]
    wall: list[float] = field(default_factory=list)  # seconds of each turn, two turns a round
    cpu: list[float] = field(default_factory=list)  # of all threads of this process

    def turn(self, device: torch.device) -> None:
        synchronize(device)
        wall, cpu = time.perf_counter(), time.process_time()
        self.epoch()
        synchronize(device)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def rounds(self, kind: str) -> list[float]:
        """Seconds of each round: of both turns."""
        turns = getattr(self, kind)
        return [a + b for a, b in zip(turns[::2], turns[1::2], strict=True)]

    def seconds(self, kind: str) -> float:
        """Of one turn, the median over the rounds."""
        return statistics.median(self.rounds(kind)) / 2

    def ratio(self, other: Contestant, kind: str) -> float:
        """The median over the rounds of how many times the other's time this one takes."""
        pairs = zip(self.rounds(kind), other.rounds(kind), strict=True)
        return statistics.median(mine / its for mine, its in pairs)

    def control(self, kind: str) -> float:
        """This one against itself, the first turns against the second: what differs from 1 is the machine's doing."""
        turns = getattr(self, kind)
        return statistics.median(turns[::2]) / statistics.median(turns[1::2])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(contestants: list[Contestant], rounds: int, device: torch.device, say: Callable[[int], None]) -> None:
    """Each round goes through the contestants and back again, so that a machine that slowly changes favours nobody.

    say: is told how many rounds are done.
    """
    for done in range(rounds):
        for each in [*contestants, *reversed(contestants)]:
            each.turn(device)
        say(done + 1)
