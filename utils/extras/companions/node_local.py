"""Nodes whose run folder is not rank 0's, in a run with a mirror: each has a folder of its own at the same path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from config import TrainingConfig
from utils.checkpoint import format as checkpoint
from utils.checkpoint.archive import MANIFEST_FILE
from utils.distributed.collectives import all_gather_json, broadcast_json, on_all_ranks
from utils.distributed.context import DistributedContext
from utils.extras.companions.programs import call_program, create_companion_plan
from utils.extras.companions.sidecar import Companions
from utils.files import replace_file
from utils.run.folder import RunFolder
from utils.run.run_lock import RunLock, is_owner_visible
from utils.run.start_decision import StartDecision

BLOCK_BYTES = 2**24  # of a file that a rank sends to other nodes


def add_companions(run: RunFolder, config: TrainingConfig, ctx: DistributedContext) -> RunFolder:
    """Start the programs beside this rank, if it has the lock of a run folder. Collective if there is a mirror.

    With a mirror, a node may have a run folder of its own, which the first rank of the node locks here.

    Returns:
        The run folder, with these programs, as this rank sees it.
    """
    decision = run.start_decision
    lock = run.lock
    companions = None
    if config.mirror:
        node_local_ranks, own_lock = create_node_folder(config, decision, ctx)
        decision = dataclasses.replace(decision, node_local_ranks=node_local_ranks)
        lock = lock or own_lock
    if lock:
        plan = create_companion_plan(
            config=config,
            rank=ctx.rank,
            host=ctx.host,
            token=decision.token,
            launch_id=decision.launch_id,
            apart=decision.node_local_ranks,
            resume_from=decision.resume_from,
            decision=decision.mirror_decision,
        )
        companions = Companions(config, plan, ctx)
    return RunFolder(
        folder=run.folder,
        checkpoint_folder=run.checkpoint_folder,
        rank=ctx.rank,
        host=ctx.host,
        start_decision=decision,
        lock=lock,
        companions=companions,
    )


def create_node_folder(
    config: TrainingConfig, start_decision: StartDecision, ctx: DistributedContext
) -> tuple[list[list[int]], RunLock | None]:
    """The ranks of each node whose run folder is not rank 0's; on its first rank, the folder's lock. Collective.

    The first rank also fetches what the mirror has of the node's samples and logs, if the folder has less.

    Raises:
        UserError: if another job owns that folder.
    """
    folder = config.run_folder
    is_node_local = ctx.local_rank == 0 and not (
        start_decision.is_completed or is_owner_visible(folder, start_decision.token)
    )
    node_local_ranks = find_node_local_ranks(all_gather_json([ctx.host, ctx.local_rank, is_node_local], ctx))

    def lock_folder() -> RunLock | None:
        if not is_node_local:
            return None
        config.checkpoint_folder.mkdir(parents=True, exist_ok=True)
        run_lock = RunLock(folder, ctx.host, start_decision.token)
        if start_decision.resume_from:
            details = {"apart": node_local_ranks, "resume_from": start_decision.resume_from}
            plan = create_companion_plan(
                config, ctx.rank, ctx.host, start_decision.token, start_decision.launch_id, **details
            )
            call_program("mirror", plan, f"--mirror {config.mirror}", "--first")
        return run_lock

    return node_local_ranks, on_all_ranks(lock_folder, ctx) if node_local_ranks else None


def find_node_local_ranks(ranks: list[tuple[str, int, bool]]) -> list[list[int]]:
    """The ranks of each node whose first rank has a folder of its own; ranks: host, local rank, and whether it has."""
    nodes: list[tuple[bool, list[int]]] = []
    latest: dict[str, list[int]] = {}  # by host: srun may spread consecutive ranks over the nodes
    for rank, (host, local_rank, is_apart) in enumerate(ranks):
        if local_rank == 0:
            latest[host] = []
            nodes.append((is_apart, latest[host]))
        latest[host].append(rank)
    return [node for is_apart, node in nodes if is_apart]


def share_checkpoint(path: Path, run: RunFolder, ctx: DistributedContext) -> Path:
    """Give a checkpoint to the nodes that have a run folder of their own. Rank 0 has it or, if it is sharded, each rank
    its part. Collective.

    Returns:
        Its path, which is no link.
    """
    path = run.checkpoint_folder / broadcast_json(path.resolve().name, ctx)
    if not broadcast_json(path.is_dir(), ctx):
        _broadcast_file(path, 0, run, ctx)
        return path
    if run.is_node_local:
        path.mkdir(exist_ok=True)
    parts = broadcast_json(sorted(checkpoint.read_checksums(path)), ctx)
    is_whole = broadcast_json(all((path / name).exists() for name in parts), ctx)
    for number, name in enumerate(parts):
        _broadcast_file(path / name, 0 if is_whole else number, run, ctx)
    _broadcast_file(path / MANIFEST_FILE, 0, run, ctx)
    return path


def _broadcast_file(path: Path, source: int, run: RunFolder, ctx: DistributedContext) -> None:
    """Send a file of the rank `source` to the other nodes, in blocks. Collective."""
    size = broadcast_json(path.stat().st_size if ctx.rank == source else 0, ctx, source)

    def broadcast_blocks(file: BinaryIO | None = None) -> Iterator[bytearray]:
        for begin in range(0, size, BLOCK_BYTES):
            block = bytearray(file.read(BLOCK_BYTES) if file else min(BLOCK_BYTES, size - begin))
            dist.broadcast(torch.frombuffer(block, dtype=torch.uint8), source, group=ctx.control_group)
            yield block

    if run.is_node_leader and ctx.rank != source:
        replace_file(path, lambda file: file.writelines(broadcast_blocks()))
    else:
        with path.open("rb") if ctx.rank == source else nullcontext() as opened:
            for _ in broadcast_blocks(opened):
                pass
