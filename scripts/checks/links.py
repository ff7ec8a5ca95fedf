"""What passes between ranks, and how fast: clocks, all-reduces by message size, pairs of nodes. All ranks call these
alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ddp_utils import DistributedContext

ROUND_TRIPS = 10  # the quickest counts
SIZES = (2**3, 2**16, 2**20, 2**24, 2**26)  # bytes of a message; the last on CUDA alone
ENOUGH = 0.12  # seconds for a message: the next one, sixteen times as large, would take two, and is not sent
MOST_ROUNDS = 24  # of pairs: with more nodes each meets so many of the others


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_offsets(leaders: list[int], ctx: DistributedContext) -> dict[int, float]:
    """Seconds by which a node's clock is ahead of rank 0's, as NTP finds them: on rank 0 of all leaders (the lowest
    ranks of the nodes)."""
    offsets = {0: 0.0}
    for leader in leaders[1:]:
        told = torch.zeros(1, dtype=torch.float64)
        if ctx.rank == leader:
            trips = []
            for _ in range(ROUND_TRIPS):
                sent = time.time()
                dist.send(told, 0, group=ctx.control)
                dist.recv(told, 0, group=ctx.control)
                back = time.time()
                trips.append((back - sent, (sent + back) / 2 - told.item()))
            dist.send(torch.tensor([min(trips)[1]], dtype=torch.float64), 0, group=ctx.control)
        elif ctx.rank == 0:
            for _ in range(ROUND_TRIPS):
                dist.recv(told, leader, group=ctx.control)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), leader, group=ctx.control)
            dist.recv(told, leader, group=ctx.control)
            offsets[leader] = told.item()
    return offsets


def make_groups(nodes: list[list[int]]) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group of this rank's node, and that of the nodes' leaders; None where it would have one rank, or this rank is
    not in it."""
    wanted = [ranks if len(ranks) > 1 and len(nodes) > 1 else [] for ranks in nodes]
    wanted.append([ranks[0] for ranks in nodes] if len(nodes) > 1 else [])
    made = [dist.new_group(ranks) if ranks else None for ranks in wanted]  # every rank makes every group
    mine = [group if group and dist.get_rank() in ranks else None for group, ranks in zip(made, wanted, strict=True)]
    return next((group for group in mine[:-1] if group), None), mine[-1]


def all_reduce_times(
    group: dist.ProcessGroup | None, device: torch.device, sizes: Sequence[int] = SIZES
) -> list[tuple[int, float]]:
    """(bytes, seconds of the slowest rank) by message size, on the members of a group (None: all ranks)."""
    found = []
    for size in sizes if device.type == "cuda" else sizes[:-1]:
        data, seconds, rounds = torch.zeros(size // 4, device=device), 0.0, 1
        for rounds in (1, 0):  # the first one connects, and says how many come after it
            rounds = rounds or max(1, min(20, int(0.2 / seconds)))
            sync(device)
            began = time.perf_counter()
            for _ in range(rounds):
                dist.all_reduce(data, group=group)
            sync(device)
            slowest = torch.tensor([(time.perf_counter() - began) / rounds], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            seconds = max(slowest.item(), 1e-9)
        found.append((size, seconds))
        if seconds > ENOUGH:  # on all ranks alike
            break
    return found


def rounds_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Each node meets each other once, as many as can at a time: the rounds of a tournament."""
    places = list(range(nodes + nodes % 2))
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = [tuple(sorted(pair)) for pair in zip(places[:half], reversed(places[half:]), strict=True)]
        rounds.append([pair for pair in pairs if pair[1] < nodes])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds[:: -(-len(rounds) // MOST_ROUNDS)]


def measure_pairs(leaders: list[int], ctx: DistributedContext) -> list[list[Any]]:
    """[node, node, seconds there and back, bytes a second] of the pairs of which this rank is the first; one node's
    leader speaks to another's."""
    found = []
    for pairs in rounds_of(len(leaders)):
        for a, b in pairs:
            if ctx.rank in (leaders[a], leaders[b]):
                measured = _pair(leaders[b] if ctx.rank == leaders[a] else leaders[a], ctx)
                if ctx.rank == leaders[a]:
                    found.append([a, b, *measured])
    return found


def _pair(peer: int, ctx: DistributedContext) -> tuple[float, float]:
    """Seconds of the quickest round trip, bytes a second of the largest message. The lower rank speaks first and
    decides."""
    is_first, device = ctx.rank < peer, ctx.device

    def there_and_back(data: torch.Tensor) -> float:
        sync(device)
        began = time.perf_counter()
        for is_sent in (is_first, not is_first):
            (dist.send if is_sent else dist.recv)(data, peer)
        sync(device)
        return time.perf_counter() - began

    small = torch.zeros(1, device=device)
    latency = min(there_and_back(small) for _ in range(ROUND_TRIPS))
    rate = 0.0
    for size in SIZES[1:4]:
        data = torch.zeros(size // 4, device=device)
        seconds = min(there_and_back(data) for _ in range(2))
        rate = 2 * size / seconds
        is_enough = torch.tensor([float(seconds > ENOUGH)], device=device)
        (dist.send if is_first else dist.recv)(is_enough, peer)
        if is_enough.item():
            break
    return latency, rate
