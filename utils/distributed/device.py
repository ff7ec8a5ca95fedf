"""The device and the kernels of a rank, and the open files that it needs."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from config import TrainingConfig, unless_auto
from utils.distributed.context import Launch, make_libraries_deterministic
from utils.logger import LOGGER_NAME, format_count
from utils.settings.errors import UserError

# descriptors that a process needs
BASE_OPEN_FILES = 128
OPEN_FILES_PER_RANK = 6  # sockets
OPEN_FILES_PER_WORKER = 16  # pipes


def set_up_device(config: TrainingConfig, launch: Launch) -> tuple[str, torch.device, dict[str, Any]]:
    """Choose the backend, the device and the kernels of this rank.

    Returns:
        The backend, the device, and what the other ranks have to know of this one: "host", "backend", "device" (its
        name, or cpu), "bf16" (whether it is fast) and "problem". If there is a problem, the sentence is there and the
        rest is missing or has no meaning.

    Raises:
        UserError: the problem, if this rank has no launcher, and so nobody to tell.
    """
    if config.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.deterministic)  # it imports the compiler, which takes seconds
    if config.deterministic:
        make_libraries_deterministic()
    rank_info: dict[str, Any] = {
        "host": socket.gethostname(),
        "problem": "",
    }
    backend = ""
    device = torch.device("cpu")
    try:
        num_workers = unless_auto(config.num_workers, os.cpu_count() or 1)
        raise_open_file_limit(launch.world_size, num_workers)
        backend, device = choose_device(config.backend, launch.local_rank)
        device_name = "cpu"
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # before anything touches a GPU, and before NCCL guesses which
        if device.type == "cuda":
            device_name = torch.cuda.get_device_name(device)
        rank_info["backend"] = backend
        rank_info["device"] = device_name
        rank_info["bf16"] = has_fast_bf16(device)
    except UserError as error:
        if not launch.is_launched:
            raise
        rank_info["problem"] = str(error)
    configure_kernels(device, config.deterministic)
    if config.cpu_offload and backend == "nccl":  # extra: sharding
        backend = "cpu:gloo,cuda:nccl"  # norms of shards are on the CPU
    if config.reduction == "exact" and not launch.omp_num_threads:  # extra: exact
        torch.set_num_threads(1)  # as torchrun does: the bits of a sum may depend on it
    return backend, device, rank_info


def choose_device(backend: str, local_rank: int) -> tuple[str, torch.device]:
    """Return the backend and the device of this rank.

    Args:
        backend: the setting, which may be "auto".

    Raises:
        UserError: if the machine does not support the backend.
    """
    gpus = torch.cuda.device_count()
    if backend == "auto":
        backend = "nccl" if gpus else "gloo"
    available = [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)]
    if backend not in available:
        names = ", ".join(available)
        raise UserError(f"--backend must be one of {names}, which this build of torch has, got {backend}.")
    if backend == "gloo" and dist.get_debug_level() == dist.DebugLevel.DETAIL:  # DDP of torch 2.15 ends with SIGSEGV
        dist.set_debug_level(dist.DebugLevel.INFO)
        if local_rank == 0:
            logging.getLogger(LOGGER_NAME).warning(
                "DDP on gloo crashes with TORCH_DISTRIBUTED_DEBUG=DETAIL. INFO is used instead."
            )
    if backend != "nccl":
        return backend, torch.device("cpu")
    if not gpus:
        raise UserError(
            "--backend nccl needs a CUDA device, but this machine has no visible one. Use --backend gloo, or make the"
            " GPUs visible (check nvidia-smi and CUDA_VISIBLE_DEVICES)."
        )
    if local_rank >= gpus:
        raise UserError(
            f"LOCAL_RANK is {local_rank}, but this machine has {format_count(gpus, 'visible GPU')}, and each rank needs"
            f" one. Start with --nproc-per-node={gpus}."
        )
    return backend, torch.device("cuda", local_rank)


def configure_kernels(device: torch.device, is_deterministic: bool, allow_tf32: bool = True) -> None:
    """Set the precision of float32 matrix products on CUDA, and whether cuDNN looks for the fastest convolution.

    TF32 (10 bits of mantissa, sums in float32) is as deterministic as float32, so `deterministic` keeps it;
    torch uses it for convolutions by default. On the CPU, "high" would let oneDNN round too.
    """
    torch.backends.cudnn.benchmark = not is_deterministic
    torch.backends.cudnn.allow_tf32 = allow_tf32
    # filling new tensors takes 3 % of a step, only to find faults; mypy does not see that the attribute exists
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    precision = "highest"
    if device.type == "cuda" and allow_tf32:
        precision = "high"
    torch.set_float32_matmul_precision(precision)


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether this device is a GPU that multiplies bfloat16 in hardware. Needs no process group."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def raise_open_file_limit(world_size: int, num_workers: int, shared_tensor_count: int = 0) -> None:
    """Raise the limit on open files to the hard limit.

    Args:
        shared_tensor_count: how many tensors are in the batches of loader workers, which send each of them by a
            descriptor.

    Raises:
        UserError: if the hard limit is not enough.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS reports a hard limit that it does not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    need = BASE_OPEN_FILES
    need += OPEN_FILES_PER_RANK * world_size
    need += OPEN_FILES_PER_WORKER * num_workers
    need += shared_tensor_count
    if soft != resource.RLIM_INFINITY and soft < need:
        how = f"ulimit -n {need}, LimitNOFILE of systemd, or --ulimit of docker"
        text = f"The limit on open files is {soft}, but about {need} are needed. "
        if shared_tensor_count:
            text += f"Tensors from loader workers need {shared_tensor_count} of them. Use fewer --num_workers (0 needs"
            text += f" none), or raise the limit ({how})."
        else:
            text += f"Raise the limit ({how})."
        raise UserError(text)
