"""How the ranks of a launch meet: they open one store, and exchange what each has found on its machine."""

from __future__ import annotations

import functools
import itertools
import json
import os
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from utils.distributed.collectives import call_with_timeout
from utils.distributed.context import Launch
from utils.settings.errors import StartError, UserError

GROUP_NUMBERS = itertools.count()
SECONDS_TO_LIST_MISSING = 10.0  # in which rank 0 lists the missing ranks


def open_store(launch: Launch, init_method: str, timeout: float) -> dist.Store:
    """Connect this rank to the store of the launch. One rank without a launcher gets a store in its own memory.

    Args:
        init_method: the URL of the store, or an empty text for the URL of the environment.
        timeout: in seconds.

    Returns:
        A store in which keys of an earlier run in the same processes are not seen.

    Raises:
        UserError: if `init_method` or the environment does not say where the store is.
        StartError: if the store cannot be reached within `timeout`.
    """
    url = init_method or "env://"
    if not launch.is_launched:
        if url != "env://":
            raise UserError(
                f"--init_method {url} needs RANK, LOCAL_RANK and WORLD_SIZE, which are not set. Start with torchrun, or"
                " set them."
            )
        return dist.HashStore()  # one rank needs no port and no environment
    if url == "env://" and ":" not in launch.master_address:
        if not launch.srun_address:
            raise UserError(
                "RANK is set, but MASTER_ADDR or MASTER_PORT is not. Start with torchrun, set both, or give"
                " --init_method."
            )
        url = launch.srun_address
    store = _connect_to_store(url, launch, timedelta(seconds=timeout))
    return dist.PrefixStore(f"group {next(GROUP_NUMBERS)}", store)  # a second run in this process gets its own keys


def _connect_to_store(url: str, launch: Launch, timeout: timedelta) -> dist.Store:
    """Connect to the store at this URL. Raises StartError if that fails."""
    # with TCP nobody waits here for other ranks than rank 0: exchange_rank_info lists those that are missing
    ranks_to_wait_for = 1
    if url.startswith("file://"):
        ranks_to_wait_for = launch.world_size
    try:
        meet = functools.partial(dist.rendezvous, url, launch.rank, ranks_to_wait_for, timeout=timeout)
        store, _, _ = call_with_timeout(timeout.total_seconds() + 5, lambda: next(meet()))
    except (dist.DistError, ValueError, RuntimeError, TimeoutError) as error:
        address = url
        if url == "env://":
            address = launch.master_address
        reason = "no answer"
        if str(error):
            reason = str(error).splitlines()[0]  # without the C++ stack
        remedy = f"Start all {launch.world_size} ranks with this address."
        if launch.rank:
            remedy = "Check that rank 0 is running and that its address is correct."
        if "EADDRINUSE" in reason:
            remedy = "Another program uses the port. End that program (ss -ltnp shows it), or give all ranks another"
            remedy += " MASTER_PORT."
        raise StartError(f"The rendezvous of rank {launch.rank} at {address} failed ({reason}). {remedy}") from None
    store.set_timeout(timeout)
    return store


def exchange_rank_info(
    launch: Launch,
    store: dist.Store,
    rank_info: dict[str, Any],
    *,
    backend: str,
    timeout: float,
) -> tuple[list[dict[str, Any]], str]:
    """Exchange what each rank has found on its machine, through rank 0. If any rank has a problem, all ranks raise it.

    Args:
        store: that of all ranks, without keys of an earlier run.
        rank_info: of this rank, as `set_up_device` returns it.
        backend: the setting. With "auto" a rank without a GPU, beside ranks that have one, is refused.
        timeout: in seconds.

    Returns:
        The information of all ranks, by rank, and a random word of this launch, the same on all ranks.

    Raises:
        UserError: the problem of the first rank that has one, or if some ranks have a GPU and others have none.
        StartError: if a rank does not start within `timeout`.
    """
    keys = [f"rank_info/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], json.dumps(rank_info))
    if launch.rank == 0:
        _publish_rank_infos(store, keys)
    missing, infos_with_counts, launch_nonce = _read_rank_infos(store, keys, timeout)
    if not infos_with_counts:
        raise _explain_missing_ranks(missing, timeout, launch.world_size)
    rank_infos: list[dict[str, Any]] = []
    for info, count in infos_with_counts:
        rank_infos.extend([info] * count)
    _raise_first_problem(rank_infos, backend)
    return rank_infos, launch_nonce


def _publish_rank_infos(store: dist.Store, keys: list[str]) -> None:
    """Read the information of all ranks on rank 0, and set the answer.

    The answer has the missing ranks, or the information of all ranks. Equal ranks in a row are one entry with their
    number, so that the answer hardly grows with the ranks.
    """
    missing: list[int] = []
    infos_with_counts: list[tuple[dict[str, Any], int]] = []
    try:
        values = store.multi_get(keys)
        for rank_info, equal_ranks in itertools.groupby(map(json.loads, values)):
            infos_with_counts.append((rank_info, len(list(equal_ranks))))
    except dist.DistStoreError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    launch_nonce = uuid.uuid4().hex
    store.set("rank_infos", json.dumps([missing, infos_with_counts, launch_nonce]))


def _read_rank_infos(
    store: dist.Store,
    keys: list[str],
    timeout: float,
) -> tuple[list[int], list[tuple[dict[str, Any], int]], str]:
    """Return the answer of rank 0. If there is no answer, rank 0 is missing."""
    try:
        store.wait(keys[:1], timedelta(seconds=timeout))
        store.wait(["rank_infos"], timedelta(seconds=timeout + SECONDS_TO_LIST_MISSING))
        missing, counted, launch_nonce = json.loads(store.get("rank_infos"))
    except dist.DistStoreError:
        return [0], [], ""
    return missing, counted, launch_nonce


def _explain_missing_ranks(missing: list[int], timeout: float, world_size: int) -> StartError:
    """Return the error for ranks that did not start.

    Args:
        missing: the ranks, or an empty list if it is not known which ranks are missing.
    """
    names = "A rank"
    if missing:
        names = f"Rank {', '.join(map(str, missing))} of {world_size}"
    remedy = "Check its output, then start all ranks again (a larger --timeout waits longer)."
    text = f"{names} did not start within {timeout:g} s. {remedy}"
    if missing and missing[0] > 0:  # rank 0 is there, and reports for all
        return StartError(text, missing[0], "")
    return StartError(text)


def _raise_first_problem(rank_infos: list[dict[str, Any]], backend: str) -> None:
    """Raise the problem of the first rank that has one, or that some ranks have no GPU. All ranks raise the same."""
    problems = {info["problem"] for info in rank_infos}
    for rank, rank_info in enumerate(rank_infos):
        if rank_info["problem"]:
            text = rank_info["problem"]
            if len(problems) > 1:
                text = f"Rank {rank} on {rank_info['host']} failed: {text}"
            raise UserError(text, rank, rank_info["host"])
    ranks_without_gpu = [rank for rank, info in enumerate(rank_infos) if info["device"] == "cpu"]
    if backend == "auto" and 0 < len(ranks_without_gpu) < len(rank_infos):
        first_rank = ranks_without_gpu[0]
        hosts = {rank_infos[rank]["host"] for rank in ranks_without_gpu}
        text = f"The ranks on {', '.join(sorted(hosts))} have no CUDA device, but other ranks have one. Repair the GPUs"
        text += " there, leave these ranks out, or use --backend gloo."
        raise UserError(text, first_rank, rank_infos[first_rank]["host"])


def start_heartbeats(
    launch: Launch,
    store: dist.Store,
    launch_nonce: str,
    init_method: str,
) -> Any:
    """Publish the first status of this rank before the ranks connect, so that a watchdog finds one of every rank.

    Returns:
        The `Heartbeats` of the extra `watch`; None if nobody can watch: with one rank, or a store in a file, which only
        grows.
    """
    if launch.world_size > 1 and not init_method.startswith("file://"):  # extra: watch
        from utils.extras.watch.heartbeat import Heartbeats

        is_from_environment = init_method in ("", "env://")
        address = init_method
        if is_from_environment:
            address = launch.master_address or launch.srun_address
        address = address.split("//")[-1].split("?")[0]  # HOST:PORT
        is_of_rank_0 = not (launch.agent_hosts_store and is_from_environment)
        launch_store = dist.PrefixStore(launch_nonce, store)  # torchrun may keep a store for the next attempt
        return Heartbeats(launch_store, launch.rank, os.getpid(), address, is_of_rank_0)
    return None
