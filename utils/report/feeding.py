"""Whether the loader keeps up with the device, and what would help: said once, at the first log point."""

from __future__ import annotations

import math
from typing import Any

from utils.data.cache import MOST_OF_MEMORY
from utils.data.loader import GlobalBatchLoader, usable_cpus
from utils.memory import free_memory, gigabytes

MOST_WAIT = 0.2  # of the time, below which nothing is said
LEAST_SECONDS = 0.1  # of an interval that says something
STEP_PER_FORWARD = 3  # a backward pass takes about twice the time of a forward pass


def feeding(
    loader: GlobalBatchLoader, cache: str, seconds: dict[str, float], forward: float, synced: float
) -> dict[str, Any]:
    """What this rank brings to the advice: plain values.

    On a GPU the host may have waited for data while the GPU computed: what that takes is then known from its forward
    passes.

    Args:
        cache: the config's.
        seconds: of the interval, by phase; "data" is the wait.
        forward: seconds in forward passes, on the device.
        synced: of the seconds, those in which the host waited for the device at the interval's end.
    """
    total, on_device = sum(seconds.values()), STEP_PER_FORWARD * forward if loader.device.type == "cuda" else 0.0
    is_held = getattr(loader.dataset, "in_memory", False)
    need, free = loader.sample_bytes * len(loader.dataset), free_memory()
    fits = free is None or need < MOST_OF_MEMORY * free
    can_cache = cache == "none" and not is_held and getattr(loader.dataset, "cacheable", False) and fits
    return {
        "total": total - (loader.first_wait or 0.0),
        "computed": max(total - seconds["data"] - synced, on_device),
        "workers": loader.num_workers,
        "cpus": usable_cpus() // loader.local_world_size,
        "is_held": is_held,
        "cache": f"--cache ram would decode it once, into {gigabytes(need)}" if can_cache else "",
    }


def workers_needed(workers: int, waited: float, computed: float) -> int:
    """Loader processes of a rank that keep up with it.

    Args:
        workers: that it has now. 0: it loads itself, in the time that it "waits".
        waited: seconds for data, while workers were busy all the time.
        computed: seconds in all else.
    """
    if not workers:
        return max(1, math.ceil(waited / computed))
    return math.ceil(workers * (waited + computed) / computed)


def advice(samples: int, ranks: list[dict[str, Any]]) -> str:
    """One sentence where the ranks wait for their data; empty where they do not. The wait for the first batch, in which
    workers start, is no such wait.

    Args:
        samples: of all ranks, in the interval.
        ranks: `feeding` of each.
    """
    total, computed = (sum(each[name] for each in ranks) / len(ranks) for name in ("total", "computed"))
    here, waited = ranks[0], total - computed
    if here["is_held"] or total < LEAST_SECONDS or computed <= 0 or waited < MOST_WAIT * total:
        return ""
    need, cpus = workers_needed(here["workers"], waited, computed), min(each["cpus"] for each in ranks)
    text = (
        f"the loader cannot feed the device, which waits {waited / total:.0%} of the time: {here['workers']} worker(s)"
        f" a rank bring {samples / total:,.0f} samples/s in all, and {samples / computed:,.0f} would be taken; that"
        f" takes {need} worker(s) a rank"
    )
    if need <= cpus:
        text += f": --num_workers {need}"
    else:
        text += f", and the CPUs of this machine allow {cpus}" + (
            f": --num_workers {cpus}" if cpus > here["workers"] else ""
        )
    return text + (f"; {here['cache']}" if here["cache"] else "")
