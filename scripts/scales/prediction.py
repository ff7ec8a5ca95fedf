"""What a step would take on so many ranks: from the step of one rank, when its buckets become ready, and the
all-reduce's latency and bandwidth.

A ring all-reduce of S bytes between n ranks sends 2 (n - 1) messages one after the other, and 2 (n - 1) / n S bytes
over each link:
2 (n - 1) alpha + 2 (n - 1) / n S beta (Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH",
2005, section 4.5). gloo's default is that ring (gloo/allreduce.cc). NCCL takes a ring where bandwidth decides and trees
where
latency does, with 2 log2(n) messages (Jeaugey, "Massively scale your deep learning training with NCCL 2.4", 2019).

DDP reduces one bucket after the other, each as soon as it is ready; what then sticks out behind the backward pass is
exposed. On a CPU
an all-reduce is also work: where ranks fill the cores that part delays the step's own computing, and only its waiting
can be hidden.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """An all-reduce, as fitted to measured ones."""

    alpha: float  # seconds a message
    beta: float  # seconds a byte over a link
    work: float = 0.0  # seconds of a core for each second of it, on each rank; 0 on a GPU
    is_ring: bool = True  # gloo; else NCCL

    def seconds(self, ranks: int, size: int) -> float:
        """Of so many bytes between so many ranks."""
        alpha, beta = terms(ranks, size, self.is_ring)
        return alpha * self.alpha + beta * self.beta


def terms(ranks: int, size: int, is_ring: bool) -> tuple[float, float]:
    """Messages one after the other, and bytes over each link."""
    messages = 2 * (ranks - 1) if is_ring else 2 * math.log2(ranks)
    return messages, 2 * (ranks - 1) / ranks * size


def fit(table: Sequence[tuple[int, float]], ranks: int, work: float = 0.0, is_ring: bool = True) -> Link:
    """The link whose all-reduces between so many ranks are nearest to those of the table, (bytes, seconds).

    Of all pairs of rows, the latency and bandwidth on which the table's ratios to it deviate least in sum: one row that
    is off, as the
    burst of a shaped link is, does not move it.
    """
    rows = [(*terms(ranks, size, is_ring), seconds) for size, seconds in table]
    candidates = []
    for (m, s, t), (n, u, v) in itertools.combinations(rows, 2):
        determinant = m * u - n * s
        if determinant:
            candidates.append(Link((t * u - v * s) / determinant, (m * v - n * t) / determinant, work, is_ring))
    candidates = [link for link in candidates if link.alpha > 0 and link.beta > 0]
    if not candidates:  # as good as no latency
        candidates = [Link(0.0, t / s, work, is_ring) for _, s, t in rows]
    return min(candidates, key=lambda link: deviation(link, table, ranks))


def deviation(link: Link, table: Sequence[tuple[int, float]], ranks: int) -> float:
    """Sum of the logarithms of (fitted / measured), without sign."""
    return sum(abs(math.log(link.seconds(ranks, size) / seconds)) for size, seconds in table)


@dataclass(frozen=True)
class Step:
    """An optimizer step of one rank without communication; seconds."""

    seconds: float  # all of it
    data: float  # of it, waiting for data
    forward: float  # of one micro-batch
    backward: float
    # of each all-reduce, in order: when it can begin, from the start of the last backward pass, and its bytes
    ready: tuple[tuple[float, int], ...]
    passes: int = 1  # micro-batches
    wrapping: float = 0.0  # of all of it, what DDP does beside communication and one rank alone does not

    @property
    def one(self) -> float:
        """Of a micro-batch, both passes, by one rank alone."""
        return self.forward + self.backward - self.wrapping

    def of(self, passes: int, scale: float = 1.0) -> Step:
        """The same with another number of micro-batches, and each of them taking `scale` times as long."""
        return replace(
            self,
            seconds=self.seconds + (passes * scale - self.passes) * self.one,
            forward=self.forward * scale,
            backward=(self.backward - self.wrapping) * scale + self.wrapping,
            ready=tuple((when * scale, size) for when, size in self.ready),
            passes=passes,
        )


@dataclass(frozen=True)
class Machine:
    """What ranks share."""

    cores: float  # infinite for ranks that compute on GPUs
    threads: int  # of a rank
    # (ranks, step of a rank beside so many / alone), measured on cores that were free
    slowdown: tuple[tuple[int, float], ...] = ((1, 1.0),)

    def crowd(self, ranks: int) -> float:
        """How many times longer a rank computes where so many are on the machine: they share memory, and cores beyond
        their number."""
        fill = max(1.0, ranks * self.threads / self.cores)
        return fill * self._slower(
            min(ranks, max(1, int(self.cores / self.threads))) if math.isfinite(self.cores) else ranks
        )

    def _slower(self, ranks: int) -> float:
        """Between the measured numbers of ranks; beyond them as the last two go on."""
        known = sorted(self.slowdown)
        if len(known) < 2 or ranks <= known[0][0]:
            return known[0][1]
        (a, low), (b, high) = next((pair for pair in itertools.pairwise(known) if ranks <= pair[1][0]), known[-2:])
        return low + max(0.0, high - low) * (ranks - a) / (b - a)

    def share(self, ranks: int) -> tuple[float, float]:
        """What a second of an all-reduce's work takes beside so many ranks, and how much of that delays the rank's own
        computing."""
        each = self.cores / ranks
        return max(1.0, self.threads / each), 1.0 - min(1.0, max(0.0, each - self.threads))


def step_seconds(step: Step, link: Link, ranks: int, here: int, machine: Machine) -> tuple[float, float]:
    """Seconds of the step of so many ranks, `here` of them on each machine, and what of it is communication that
    nothing hides,
    DDP's own work for it included."""
    crowd = machine.crowd(here)
    after = max(0.0, step.seconds - step.wrapping - step.data - step.passes * step.one)  # the update
    begins = step.seconds - after - step.backward  # the last backward pass
    alone = (step.seconds - step.wrapping) * crowd
    if ranks == 1:
        return alone, 0.0
    stretch, delaying = machine.share(here)
    costs = []
    for _, size in step.ready:
        seconds = link.seconds(ranks, size)
        work = seconds * link.work
        costs.append((max(0.0, seconds - work) + work * stretch, work * stretch * delaying))
    end = finish((begins + step.backward) * crowd, [(begins + when) * crowd for when, _ in step.ready], costs)
    total = end + after * crowd
    return total, total - alone


def finish(computed: float, ready: Sequence[float], costs: Sequence[tuple[float, float]]) -> float:
    """When the last all-reduce is done and all is computed.

    Args:
        computed: when that would be without all-reduces.
        ready: when each of them could begin, without those before it.
        costs: of each, the seconds until it is done, and those by which it delays the computing.
    """
    done = delay = 0.0
    for when, (seconds, delaying) in zip(ready, costs, strict=True):
        done = max(done, when + delay) + seconds
        delay += delaying
    return max(computed + delay, done)


def efficiency(rate: float, ranks: int, rate_before: float, ranks_before: int) -> float:
    """Samples a second of a rank, as a share of those of a rank where there are fewer."""
    return (rate / ranks) / (rate_before / ranks_before)
