"""The speed of communication: all-reduce by message size, pairs of nodes. All ranks call these functions together."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from utils.distributed.context import DistributedContext

SIZES = (2**3, 2**16, 2**20, 2**24, 2**26)  # bytes of a message; the last one on CUDA only
MAX_SECONDS = 0.12  # per message: the next size is sixteen times larger and would take two seconds
ROUND_TRIPS = 10  # of a small message; the fastest is reported
PAIR_SIZE = 2**22  # bytes of a large message
MAX_ROUNDS = 24  # of pairs: with more nodes, each is measured with this many others


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_reduce_times(
    group: dist.ProcessGroup | None, device: torch.device, sizes: Sequence[int] = SIZES
) -> list[tuple[int, float]]:
    """(bytes, seconds of the slowest rank) by message size, on the members of a group (None: all ranks)."""
    found = []
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return found
    for size in sizes if device.type == "cuda" else sizes[:-1]:
        data, seconds, rounds = torch.zeros(size // 4, device=device), 0.0, 1
        for rounds in (1, 0):  # the first one connects, and determines the number of timed rounds
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
        if seconds > MAX_SECONDS:  # the same on all ranks
            break
    return found


def pair_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair of nodes once, in rounds in which each node is in at most one pair: (a + b) % odd is the round."""
    odd = nodes | 1
    rounds = range(0, odd, math.ceil(odd / MAX_ROUNDS))
    return [[(a, (k - a) % odd) for a in range(nodes) if a < (k - a) % odd < nodes] for k in rounds]


def measure_pairs(leaders: list[int], ctx: DistributedContext) -> list[list[Any]]:
    """[node, node, seconds of a round trip, bytes per second] for the pairs in which this rank comes first.

    leaders: the lowest rank of each node.
    """
    found = []
    for a, b in (pair for pairs in pair_rounds(len(leaders)) for pair in pairs):
        if ctx.rank in (leaders[a], leaders[b]):
            peer = leaders[b] if ctx.rank == leaders[a] else leaders[a]
            trip = min(_round_trip(4, peer, ctx) for _ in range(ROUND_TRIPS))
            rate = 2 * PAIR_SIZE / min(_round_trip(PAIR_SIZE, peer, ctx) for _ in range(2))
            if ctx.rank == leaders[a]:
                found.append([a, b, trip, rate])
    return found


def _round_trip(size: int, peer: int, ctx: DistributedContext) -> float:
    """Seconds; the lower rank sends first."""
    data, is_first = torch.zeros(size // 4, device=ctx.device), ctx.rank < peer
    sync(ctx.device)
    began = time.perf_counter()
    for is_sent in (is_first, not is_first):
        (dist.send if is_sent else dist.recv)(data, peer)
    sync(ctx.device)
    return time.perf_counter() - began
