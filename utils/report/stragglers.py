"""A rank that takes much longer than the others."""

from __future__ import annotations

import statistics

from utils.run.folder import RunFolder

STRAGGLES = 1.5  # times the median
LEAST_EXCESS = 0.25  # seconds over the median in an interval; less is noise


def report_straggler(run: RunFolder, step: int, ranks: list[list[float]]) -> None:
    """Record and name a rank that takes much longer than the median.

    ranks: as in `LogPoint.record`. Forward passes stand for "compute", since backward passes wait for other ranks.
    """
    rank, ratio, cause = find_straggler([{"data": data, "compute": forward} for _, data, forward, *_ in ranks])
    seconds_over_median = sum(ranks[rank][1:3]) * (1 - 1 / ratio)
    if ratio >= STRAGGLES and seconds_over_median > LEAST_EXCESS:
        host = run.hosts[rank]
        run.event("straggler", step, rank=rank, host=host, times=round(ratio, 2), cause=cause)
        text = "rank %d on %s is %.1f times slower than the median rank because of its %s"
        run.warn(text, rank, host, ratio, cause)


def find_straggler(ranks: list[dict[str, float]]) -> tuple[int, float, str]:
    """The slowest rank of an interval, its time as a multiple of the median, and the cause: data or compute.

    Args:
        ranks: the seconds of each rank in "data" and "compute", without waits for other ranks.
    """
    totals = [seconds["data"] + seconds["compute"] for seconds in ranks]
    rank = max(range(len(totals)), key=totals.__getitem__)
    excess = {
        part: ranks[rank][part] - statistics.median_low(seconds[part] for seconds in ranks)
        for part in ("data", "compute")
    }
    return rank, totals[rank] / max(1e-9, statistics.median_low(totals)), max(excess, key=excess.__getitem__)
