"""The public functions: process group set-up, DDP, checkpoints."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from config import TrainingConfig
from utils.distributed.context import DistributedContext, is_main_process, read_launch
from utils.distributed.device import set_up_device
from utils.distributed.groups import create_process_groups
from utils.distributed.rendezvous import exchange_rank_info, open_store, start_heartbeats
from utils.run.checkpoints import Checkpoints
from utils.run.resume import load_checkpoint
from utils.signals import exit_with_torchrun
from utils.training.ddp_model import unwrap
from utils.training.gradient_strategy import wrap_ddp

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


def setup_distributed(config: TrainingConfig) -> DistributedContext:
    """Create the process groups.

    The ranks first exchange through the store which device each has, and what keeps it from taking part.

    Raises:
        UserError: on every rank, if one of them cannot take part.
        StartError: if ranks do not start in time or cannot connect.
    """
    launch = read_launch()
    if launch.is_under_torchrun:
        exit_with_torchrun()
    if dist.is_initialized():  # left by a failed run in this process
        dist.destroy_process_group()
    backend, device, rank_info = set_up_device(config, launch)
    store = open_store(launch, config.init_method, config.timeout)
    rank_infos, launch_nonce = exchange_rank_info(
        launch, store, rank_info, backend=config.backend, timeout=config.timeout
    )
    heartbeats = start_heartbeats(launch, store, launch_nonce, init_method=config.init_method)
    control = create_process_groups(launch, store, backend=backend, device=device, timeout=config.timeout)
    hosts = tuple(info["host"] for info in rank_infos)
    return DistributedContext(
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        device=device,
        local_world_size=hosts.count(rank_info["host"]),
        hosts=hosts,
        device_names=tuple(info["device"] for info in rank_infos),
        fast_bf16=all(info["bf16"] for info in rank_infos),
        launch=launch,
        control_group_ref=weakref.ref(control),
        heartbeats=heartbeats,
    )


def cleanup_distributed() -> None:
    """Destroy the process groups.

    Call it after success only. Its barrier waits for all ranks, since gloo aborts if a peer leaves early.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def save_checkpoint(checkpoints: Checkpoints, must: bool = True) -> None:
    """Save a checkpoint of the current state, which is written while training continues. Call it on all ranks.

    Args:
        must: wait for an earlier checkpoint that is still being written. Otherwise this one is postponed.
    """
    checkpoints.save(blocking=must)
    checkpoints.finish_copy()
