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
    rank, ratio, cause = find_straggler([{"data": data, "compute": forward} for _, data, forward, *_ in rank_values])
    seconds_over_median = sum(rank_values[rank][1:3]) * (1 - 1 / ratio)
    if ratio >= MIN_STRAGGLER_RATIO and seconds_over_median > MIN_EXCESS_SECONDS:
        host = hosts[rank]
        run.records.append_event("straggler", step, rank=rank, host=host, times=round(ratio, 2), cause=cause)
        text = "rank %d on %s is %.1f times slower than the median rank because of its %s"
        run.warn(text, rank, host, ratio, cause)


def find_straggler(rank_seconds: list[dict[str, float]]) -> tuple[int, float, str]:
    """The slowest rank of a log window, its time as a multiple of the median, and the cause: data or compute.

    Args:
        rank_seconds: the seconds of each rank in "data" and "compute", without waits for other ranks.
    """
    totals = [seconds["data"] + seconds["compute"] for seconds in rank_seconds]
    rank = max(range(len(totals)), key=totals.__getitem__)
    excess = {
        part: rank_seconds[rank][part] - statistics.median_low(seconds[part] for seconds in rank_seconds)
        for part in ("data", "compute")
    }
    return rank, totals[rank] / max(1e-9, statistics.median_low(totals)), max(excess, key=excess.__getitem__)
