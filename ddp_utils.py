"""Processes, and what passes between them: set-up, the control group, DDP's knobs, who saves and who loads.

The only file that reads the environment.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from config import TrainingConfig, TrainingError, UserError
from utils.checkpoint import format as checkpoint
from utils.data.sampler import GlobalBatchSampler
from utils.distributed.collectives import all_gather_json, on_all_ranks, on_rank_0, within
from utils.distributed.context import DistributedContext, Launch, is_main_process, read_launch
from utils.distributed.device import choose_device, choose_kernels
from utils.logger import setup_logger
from utils.report.goodput import LEDGER, read_ledger
from utils.run import resume
from utils.run.folder import Run
from utils.run.lock import MOST_STRIKES
from utils.run.saver import Saver
from utils.run.start_checks import check_alike, check_shared, raise_file_limit
from utils.signals import die_with_parent, is_orphan
from utils.training.first_passes import check_compiler
from utils.training.parallel import unwrap, wrap_ddp
from utils.training.precision import has_fast_bf16
from utils.training.state import TrainState

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
CONTROL_TIMEOUT = timedelta(hours=24)  # words, barriers and saves: who is late here is not lost


def setup_distributed(config: TrainingConfig, must_be_alike: bool = True) -> DistributedContext:
    """Make the process groups. Before any group exists, the ranks tell each other over the store what they are and what
    ails them.

    must_be_alike: in code, settings and versions.

    Raises:
        UserError: on every rank, when one of them cannot take part.
    """
    launch = read_launch()
    if launch.is_under_torchrun:
        die_with_parent()
        if is_orphan():  # the agent was killed while this process imported torch
            raise TrainingError("torchrun is gone already; start it again")
    if config.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.deterministic)  # it imports the compiler, which takes seconds
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    if dist.is_initialized():  # left by an earlier run in this process that failed
        dist.destroy_process_group()
    # what is left of that run's groups ends here: in a worker that is forked later, without their threads, it would
    # hang
    gc.collect()
    card: dict[str, Any] = {"host": socket.gethostname(), "problem": ""}
    backend, device = "", torch.device("cpu")
    try:
        raise_file_limit(
            launch.world_size, (os.cpu_count() or 1) if config.num_workers == "auto" else config.num_workers
        )
        backend, device = choose_device(config.backend, launch.local_rank)
        if device.type == "cuda":
            # before anything touches a GPU, and before the group: NCCL else guesses which
            torch.cuda.set_device(device)
        card |= {"backend": backend, "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
        card["bf16"] = has_fast_bf16(device)
        check_compiler(config.compile, device, os.environ.get("CC" if device.type == "cuda" else "CXX", ""))
    except UserError as refused:
        if not launch.is_launched:
            raise
        card["problem"] = str(refused)
    choose_kernels(device, config.deterministic)

    timeout = timedelta(seconds=config.timeout)
    store = _rendezvous(launch, config.init_method or "env://", timeout)
    # a second run in this process meets none of the first one's keys
    store = dist.PrefixStore(f"group {next(GROUPS)}", store)
    cards = _introduce(store, launch, card, config)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("world", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    hosts = tuple(each["host"] for each in cards)
    ctx = DistributedContext(
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        device=device,
        local_world_size=hosts.count(card["host"]),
        hosts=hosts,
        device_names=tuple(each["device"] for each in cards),
        fast_bf16=all(each["bf16"] for each in cards),
        launch=launch,
        control=dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT),
    )
    if must_be_alike:
        check_alike(config, ctx)
    return ctx


def _rendezvous(launch: Launch, url: str, timeout: timedelta) -> dist.Store:
    if not launch.is_launched:
        if url != "env://":
            raise UserError(
                f"init_method={url}: needs RANK, LOCAL_RANK and WORLD_SIZE, which are not set; start with torchrun, or"
                " set them"
            )
        return dist.HashStore()  # a world of one: no port, no environment
    if url == "env://" and not ("MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ):
        if not launch.address:
            raise UserError(
                "MASTER_ADDR and MASTER_PORT: not set, while RANK is; start with torchrun, set both, or give"
                " --init_method"
            )
        url = launch.address
    # a TCP store that waits for all cannot say who is missing
    waited_for = launch.world_size if url.startswith("file://") else 1
    try:
        meet = functools.partial(dist.rendezvous, url, launch.rank, waited_for, timeout=timeout)
        store, _, _ = within(timeout.total_seconds() + 5, lambda: next(meet()))
    except (dist.DistError, ValueError, RuntimeError, TimeoutError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if url == "env://" else url
        # frames of C++ follow
        reason = str(error).splitlines()[0] if str(error) else "who listens there gives no answer"
        look = (
            "check that rank 0 runs and its address is right"
            if launch.rank
            else f"start all {launch.world_size} ranks with this address"
        )
        if "EADDRINUSE" in reason:
            look = "another program listens there (ss -ltnp names it); end it, or give all ranks another MASTER_PORT"
        raise UserError(f"rank {launch.rank} cannot meet the others at {where} ({reason}); {look}") from None
    store.set_timeout(timeout)
    return store


def _introduce(store: dist.Store, launch: Launch, card: dict[str, Any], config: TrainingConfig) -> list[dict[str, Any]]:
    """Exchange one card a rank; raise on every rank what any of them found wrong."""
    keys = [f"card/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], json.dumps(card))
    try:
        cards = [json.loads(store.get(key)) for key in keys]
    except dist.DistStoreError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        names = f"rank {', '.join(map(str, missing))} of {launch.world_size}" if missing else "a rank"
        remedy = "look at what it said where it was started, then start all again (--timeout waits longer)"
        speaker = missing[0] if missing and missing[0] > 0 else None  # rank 0 speaks for all, where it is there
        raise UserError(
            f"{names}: did not come within {config.timeout:g} s; {remedy}", speaker, "" if speaker else None
        ) from None
    for rank, each in enumerate(cards):
        if each["problem"]:
            is_common = len({card["problem"] for card in cards}) == 1
            whose = "" if is_common else f" (rank {rank} on {each['host']})"
            raise UserError(each["problem"] + whose, rank, each["host"])
    bare = [rank for rank, each in enumerate(cards) if each["device"] == "cpu"]
    if config.backend == "auto" and 0 < len(bare) < len(cards):
        hosts = ", ".join(sorted({cards[rank]["host"] for rank in bare}))
        text = "shows no CUDA device while other ranks have one; repair it or leave it out, or give --backend gloo"
        raise UserError(f"{hosts}: {text}", bare[0], cards[bare[0]]["host"])
    return cards


def cleanup_distributed() -> None:
    """End the process groups after a success. A barrier comes first: gloo aborts when a peer leaves early. Never call
    it on an error."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# ---- DDP and checkpoints ----


def open_run(config: TrainingConfig, ctx: DistributedContext) -> Run:
    """Claim the run's folder; rank 0 decides whether a run in it is continued, and all ranks learn it. Raises
    UserError."""
    run = Run(config.run_folder, config.checkpoint_folder, ctx.rank, ctx.hosts)
    on_rank_0(lambda: run.claim(config, ctx.launch.id, ctx.launch.may_restart), ctx)
    mine = [str(run.resume_path or ""), run.is_completed, run.is_replacing, run.attempt, run.strikes, run.claim_number]
    resume_path, run.is_completed, run.is_replacing, run.attempt, run.strikes, run.claim_number = all_gather_json(
        mine, ctx
    )[0]
    run.resume_path = Path(resume_path) if resume_path else None
    if not run.is_completed:
        check_shared(run, ctx)
    return run


def resume_run(
    run: Run,
    state: TrainState,
    config: TrainingConfig,
    origin: dict[str, Any],
    sampler: GlobalBatchSampler,
    ctx: DistributedContext,
) -> tuple[list[str], dict[str, Any] | None]:
    """Load the checkpoint that the run starts from, if any, and make the folder fit to go on from there.

    Returns what differs from the checkpoint's config and may, and the account of time so far.

    Raises:
        UserError: also when the last attempts all ended at the same step.
    """
    differences, ledger = [], None
    if run.resume_path:
        payload = load_checkpoint(run.resume_path, ctx)
        differences = on_all_ranks(
            lambda: resume.compare(payload, config, origin["fingerprint"], origin["global_batch_size"]), ctx
        )
        on_all_ranks(lambda: state.load_state_dict(payload, ctx.rank, ctx.world_size), ctx)
        if resume.is_other_best(payload, config):
            state.progress.forget_best()
        ledger = payload["provenance"]["ledger"]
    if len(run.strikes) >= MOST_STRIKES:
        on_rank_0(run.say_diagnosis, ctx)
        raise UserError(resume.diagnosis(run.strikes, state.progress, sampler), 0, ctx.hosts[0], is_final=True)
    if run.is_replacing:  # nothing is left that could be refused
        on_rank_0(lambda: run.make_room(config), ctx)
        setup_logger(ctx.rank, run.log_file)
        run.begin()
    progress = state.progress
    on_rank_0(lambda: run.rewind(progress.step, progress.evaluated_step == progress.step), ctx)
    is_best_there = on_all_ranks(lambda: ctx.is_main and run.restore_best(progress.best_step), ctx)
    if not all_gather_json(is_best_there, ctx)[0]:
        progress.forget_best()
    on_rank_0(run.own, ctx)
    # launch.sh --debug: torch makes no folder for its flight recorder
    if dump := os.environ.get("TORCH_FR_DUMP_TEMP_FILE"):
        on_all_ranks(lambda: Path(dump).parent.mkdir(parents=True, exist_ok=True), ctx)
    return differences, (read_ledger(run.folder / LEDGER) if run.attempt > 1 else None) or ledger


def save_checkpoint(saver: Saver, must: bool = True) -> None:
    """A checkpoint of this moment, by all ranks alike: rank 0 writes, and its process goes on meanwhile. As
    `Saver.save_now`."""
    saver.save_now(must)


def load_checkpoint(path: Path, ctx: DistributedContext) -> dict[str, Any]:
    """Every rank reads the file from shared storage; all of them read the same bytes, or all raise UserError."""
    payload, digest = on_all_ranks(lambda: checkpoint.read(path), ctx)
    digests = all_gather_json(digest, ctx)
    if len(set(digests)) > 1:
        other = next(rank for rank, each in enumerate(digests) if each != digests[0])
        hosts = f"{ctx.hosts[0]} and {ctx.hosts[other]}"
        raise UserError(
            f"{path}: {hosts} see different files under this name; put the run folder on storage that all nodes share"
        )
    return payload
