# extra: preflight
"""Measure the speed of the links between pairs of nodes. All ranks call these functions together."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist

from scripts.lib.benchmark.turns import synchronize
from utils.distributed.context import DistributedContext

ROUND_TRIPS = 10  # round trips of a small message, of which the fastest is reported
MESSAGE_BYTES = 2**22  # bytes of a large message
MAX_ROUNDS = 24  # rounds of pairs (with more nodes, each node is measured with this many others)


def schedule_pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Return every pair of nodes once, in rounds in which each node is in at most one pair.

    The round of a pair is (a + b) % odd.
    """
    odd = nodes | 1
    rounds = range(0, odd, math.ceil(odd / MAX_ROUNDS))
    return [[(a, (k - a) % odd) for a in range(nodes) if a < (k - a) % odd < nodes] for k in rounds]


def measure_pairs(leaders: list[int], ctx: DistributedContext) -> list[list[Any]]:
    """Measure the pairs of nodes in which this rank comes first.

    Args:
        leaders: the lowest rank of each node.
        ctx: the ranks.

    Returns:
        [node, node, seconds of a round trip, bytes per second] for each pair.
    """
    measured = []
    for a, b in (pair for pairs in schedule_pairs(len(leaders)) for pair in pairs):
        if ctx.rank in (leaders[a], leaders[b]):
            peer = leaders[b] if ctx.rank == leaders[a] else leaders[a]
            trip = min(_time_round_trip(4, peer, ctx) for _ in range(ROUND_TRIPS))
            rate = 2 * MESSAGE_BYTES / min(_time_round_trip(MESSAGE_BYTES, peer, ctx) for _ in range(2))
            if ctx.rank == leaders[a]:
                measured.append([a, b, trip, rate])
    return measured


def _time_round_trip(size: int, peer: int, ctx: DistributedContext) -> float:
    """Return the seconds of a round trip, in which the lower rank sends first."""
    data, is_first = torch.zeros(size // 4, device=ctx.device), ctx.rank < peer
    synchronize(ctx.device)
    began = time.perf_counter()
    for is_sent in (is_first, not is_first):
        (dist.send if is_sent else dist.recv)(data, peer)
    synchronize(ctx.device)
    return time.perf_counter() - began
