"""The public functions: process group set-up, DDP, checkpoints."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import socket
import uuid
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from config import TrainingConfig, unless_auto
from utils.distributed.collectives import within
from utils.distributed.context import (
    DistributedContext,
    Launch,
    connect_lazily,
    is_main_process,
    make_libraries_deterministic,
    read_launch,
)
from utils.distributed.device import choose_device, choose_kernels, has_fast_bf16, raise_file_limit
from utils.run.checkpoints import Checkpoints
from utils.run.resume import load_checkpoint
from utils.settings.errors import StartError, UserError
from utils.signals import follow_torchrun
from utils.training.parallel import wrap_ddp
from utils.training.replicated import unwrap

__all__ = [
    "DistributedContext",
    "cleanup_distributed",
    "is_main_process",
    "load_checkpoint",
    "read_launch",
    "save_checkpoint",
    "setup_distributed",
    "unwrap",
    "wrap_ddp",
]

GROUPS = itertools.count()
RANKS_IN_A_MESH = 1024  # at most; gloo then connects all pairs
SECONDS_TO_ANSWER = 10.0  # in which rank 0 lists the missing ranks
CONTROL_TIMEOUT = timedelta(hours=24)  # for votes, barriers and saves: a slow rank is not a lost one


def setup_distributed(config: TrainingConfig) -> DistributedContext:
    """Create the process groups, after the ranks have exchanged their devices and problems through the store.

    Raises:
        UserError: on every rank, if one of them cannot take part.
        StartError: if ranks do not start in time or cannot connect.
    """
    launch = read_launch()
    if launch.is_under_torchrun:
        follow_torchrun()
    if dist.is_initialized():  # left by a failed run in this process
        dist.destroy_process_group()
    backend, device, card = _look_at_machine(config, launch)
    url = config.init_method or "env://"
    store = _rendezvous(launch, url, timedelta(seconds=config.timeout))
    if launch.is_launched:  # a second run in this process gets its own keys
        store = dist.PrefixStore(f"group {next(GROUPS)}", store)
    cards, word = _introduce(store, launch, card, config)
    beats = None  # extra: watch
    if launch.world_size > 1 and not url.startswith("file://"):  # extra: watch
        # not files, which only append
        from utils.extras.watch.beats import Beats

        address = launch.master if url == "env://" and launch.master else (launch.address or url).split("//")[-1]
        is_of_rank_0 = not (launch.agent_hosts_store and url == "env://")
        beats = Beats(dist.PrefixStore(word, store), launch.rank, os.getpid(), address.split("?")[0], is_of_rank_0)
    control = _create_groups(config, launch, store, backend, device)
    hosts = tuple(each["host"] for each in cards)
    return DistributedContext(
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        device=device,
        local_world_size=hosts.count(card["host"]),
        hosts=hosts,
        device_names=tuple(each["device"] for each in cards),
        fast_bf16=all(each["bf16"] for each in cards),
        launch=launch,
        control_ref=weakref.ref(control),
        beats=beats,  # extra: watch
    )


def _look_at_machine(config: TrainingConfig, launch: Launch) -> tuple[str, torch.device, dict[str, Any]]:
    """Choose the backend, the device and the kernels of this rank, and write the card that it shows the others: host,
    device, whether that has fast bfloat16, and what is missing. A rank without a launcher raises that UserError."""
    if config.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.deterministic)  # it imports the compiler, which takes seconds
    if config.deterministic:
        make_libraries_deterministic()
    card: dict[str, Any] = {"host": socket.gethostname(), "problem": ""}
    backend, device = "", torch.device("cpu")
    try:
        raise_file_limit(launch.world_size, unless_auto(config.num_workers, os.cpu_count() or 1))
        backend, device = choose_device(config.backend, launch.local_rank)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # before anything touches a GPU, and before NCCL guesses which
        card |= {"backend": backend, "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
        card["bf16"] = has_fast_bf16(device)
    except UserError as error:
        if not launch.is_launched:
            raise
        card["problem"] = str(error)
    choose_kernels(device, config.deterministic)
    if config.reduction == "exact" and not launch.threads:  # extra: exact
        torch.set_num_threads(1)  # as torchrun does: the bits of a sum may depend on it
    return backend, device, card


def _create_groups(
    config: TrainingConfig, launch: Launch, store: dist.Store, backend: str, device: torch.device
) -> dist.ProcessGroup:
    """Create the default group and the control group, which is returned. Raises StartError."""
    if launch.world_size > RANKS_IN_A_MESH:
        connect_lazily()
    if config.cpu_offload and backend == "nccl":  # extra: sharding
        backend = "cpu:gloo,cuda:nccl"  # norms of shards are on the CPU
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("world", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=config.timeout),
            device_id=None if device.type == "cpu" else device,
        )
        # a rank may stop now, and the group's own limit is for later
        group: Any = within(config.timeout, lambda: dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
        return group
    except TimeoutError:
        text = f"the ranks did not connect within {config.timeout:g} s; check the network between the nodes"
        raise StartError(f"{text}, then start again") from None
    except RuntimeError as error:
        if not re.search("Unable to find|Cannot resolve", str(error)):  # an interface of the network, or its address
            raise
        remedy = "bring up the loopback (ip link set lo up), or name another interface in GLOO_SOCKET_IFNAME (lo if it"
        remedy += " has only ::1)"
        raise StartError(f"gloo: {str(error).splitlines()[0].rpartition('. ')[2]}; {remedy}") from None


def _rendezvous(launch: Launch, url: str, timeout: timedelta) -> dist.Store:
    if not launch.is_launched:
        if url != "env://":
            raise UserError(
                f"init_method={url}: needs RANK, LOCAL_RANK and WORLD_SIZE; start with torchrun, or set them"
            )
        return dist.HashStore()  # one rank needs no port and no environment
    if url == "env://" and ":" not in launch.master:
        if not launch.address:
            raise UserError(
                "MASTER_ADDR, MASTER_PORT: not set, while RANK is; start with torchrun or give --init_method"
            )
        url = launch.address
    waited_for = launch.world_size if url.startswith("file://") else 1  # with TCP, _introduce lists missing ranks
    try:
        meet = functools.partial(dist.rendezvous, url, launch.rank, waited_for, timeout=timeout)
        store, _, _ = within(timeout.total_seconds() + 5, lambda: next(meet()))
    except (dist.DistError, ValueError, RuntimeError, TimeoutError) as error:
        where = launch.master if url == "env://" else url
        reason = str(error).splitlines()[0] if str(error) else "no answer"  # without the C++ stack
        remedy = f"start all {launch.world_size} ranks with this address"
        if launch.rank:
            remedy = "check that rank 0 is running and its address is correct"
        if "EADDRINUSE" in reason:
            remedy = "another program uses the port (ss -ltnp shows it); end it, or give all ranks another MASTER_PORT"
        raise StartError(f"rank {launch.rank}: rendezvous at {where} failed ({reason}); {remedy}") from None
    store.set_timeout(timeout)
    return store


def _introduce(
    store: dist.Store, launch: Launch, card: dict[str, Any], config: TrainingConfig
) -> tuple[list[dict[str, Any]], str]:
    """Exchange one card per rank through rank 0. If any rank has a problem, all ranks raise it.

    Returns:
        The cards, by rank, and a random word of this launch.
    """
    keys = [f"card/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], json.dumps(card))
    if launch.rank == 0:
        missing: list[int] = []
        counted: list[tuple[dict[str, Any], int]] = []
        try:
            groups = itertools.groupby(map(json.loads, store.multi_get(keys)))
            counted = [(each, len(list(ranks))) for each, ranks in groups]
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        store.set("cards", json.dumps([missing, counted, uuid.uuid4().hex]))
    try:
        store.wait(keys[:1], timedelta(seconds=config.timeout))
        store.wait(["cards"], timedelta(seconds=config.timeout + SECONDS_TO_ANSWER))
        missing, counted, word = json.loads(store.get("cards"))
    except dist.DistStoreError:
        missing, counted, word = [0], [], ""
    if not counted:
        names = f"rank {', '.join(map(str, missing))} of {launch.world_size}" if missing else "a rank"
        remedy = "check its output, then start all ranks again (a larger --timeout waits longer)"
        speaker = missing[0] if missing and missing[0] > 0 else None  # rank 0 reports for all if it is there
        text = f"{names}: did not start within {config.timeout:g} s; {remedy}"
        raise StartError(text, speaker, "" if speaker else None)
    cards = [each for each, ranks in counted for _ in range(ranks)]
    for rank, each in enumerate(cards):
        if each["problem"]:
            is_common = len({card["problem"] for card in cards}) == 1
            whose = "" if is_common else f" (rank {rank} on {each['host']})"
            raise UserError(each["problem"] + whose, rank, each["host"])
    bare = [rank for rank, each in enumerate(cards) if each["device"] == "cpu"]
    if config.backend == "auto" and 0 < len(bare) < len(cards):
        hosts = ", ".join(sorted({cards[rank]["host"] for rank in bare}))
        text = "has no CUDA device while other ranks have one; fix it, leave it out, or use --backend gloo"
        raise UserError(f"{hosts}: {text}", bare[0], cards[bare[0]]["host"])
    return cards, word


def cleanup_distributed() -> None:
    """Destroy the process groups after success, not after an error. The barrier: gloo aborts if a peer leaves early."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def save_checkpoint(checkpoints: Checkpoints, must: bool = True) -> None:
    """Save a checkpoint of the current state. Call it on all ranks; it is written while training continues."""
    checkpoints.save(now=must)
    checkpoints.finish_copy()
