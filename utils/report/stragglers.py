"""A rank that takes much longer than the others."""

from __future__ import annotations

import statistics

from utils.run.folder import RunFolder

MIN_STRAGGLER_RATIO = 1.5  # times the median
MIN_EXCESS_SECONDS = 0.25  # seconds over the median in a log window; less is noise


def report_straggler(run: RunFolder, hosts: tuple[str, ...], step: int, rank_values: list[list[float]]) -> None:
    """Record and name a rank that takes much longer than the median.

    Args:
        hosts: of all ranks.
        rank_values: as for `LogPoint.create_record`. Forward passes stand for "compute", since backward passes wait for
            other ranks.
    """
    rank_seconds = []
    for _, data_seconds, forward_seconds, *_ in rank_values:
        rank_seconds.append({"data": data_seconds, "compute": forward_seconds})
    rank, ratio, cause = find_straggler(rank_seconds)
    seconds = sum(rank_seconds[rank].values())
    seconds_over_median = seconds * (1 - 1 / ratio)
    if ratio >= MIN_STRAGGLER_RATIO and seconds_over_median > MIN_EXCESS_SECONDS:
        host = hosts[rank]
        run.records.append_event(
            "straggler",
            step,
            rank=rank,
            host=host,
            times=round(ratio, 2),
            cause=cause,
        )
        text = "Rank %d on %s is %.1f times slower than the median rank because of its %s."
        run.warn(text, rank, host, ratio, cause)


def find_straggler(rank_seconds: list[dict[str, float]]) -> tuple[int, float, str]:
    """Find the slowest rank of a log window.

    Args:
        rank_seconds: the seconds of each rank in "data" and "compute", without waits for other ranks.

    Returns:
        The rank, its time as a multiple of the median, and the cause: data or compute.
    """
    totals = [seconds["data"] + seconds["compute"] for seconds in rank_seconds]
    rank = totals.index(max(totals))
    ratio = totals[rank] / max(1e-9, statistics.median_low(totals))
    excess = {}  # seconds over the median
    for cause in ("data", "compute"):
        median = statistics.median_low(seconds[cause] for seconds in rank_seconds)
        excess[cause] = rank_seconds[rank][cause] - median
    if excess["compute"] > excess["data"]:
        return rank, ratio, "compute"
    return rank, ratio, "data"
