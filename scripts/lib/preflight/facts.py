# extra: benchmark or preflight
"""Gather facts about one rank's machine, without communication, as plain JSON."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

from scripts.lib.network import find_interface, find_local_address, list_addresses, resolve
from utils.distributed.context import DistributedContext


def collect_facts(ctx: DistributedContext) -> dict[str, Any]:
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "host": ctx.host,
        "machine": identify_machine(ctx.host),
        "device": ctx.device_names[ctx.rank],
        "driver": read_driver_version(),
        "threads": torch.get_num_threads(),
        **read_device_memory(ctx.device),
        **find_route(ctx.device),
        "shm": shared.f_bavail * shared.f_frsize if shared else 0,
    }


def identify_machine(host: str) -> str:
    """Return a text that distinguishes machines and containers, even where they have the same host name."""
    with suppress(OSError):
        host += f" {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    return host


def read_driver_version() -> str:
    """Return the version of the NVIDIA driver (empty: there is none)."""
    return collect_env.get_nvidia_driver_version(collect_env.run) or ""


def read_device_memory(device: torch.device) -> dict[str, int]:
    """Return the GPU's memory in bytes, and how much of it other programs use.

    Without a GPU, it is the machine's memory.
    """
    if device.type != "cuda":
        return {"memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "used": 0}
    free, total = torch.cuda.mem_get_info(device)
    return {"memory": total, "used": total - free - torch.cuda.memory_reserved(device)}


def find_route(device: torch.device) -> dict[str, str]:
    """Return the interface to the other ranks.

    It is the one that the user has selected, or otherwise the one on the route to rank 0.
    """
    interfaces = list_addresses()
    selected = os.environ.get("NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME", "")
    prefixes = tuple(name.lstrip("=") for name in selected.split(",") if name and not name.startswith("^"))
    interface = next((name for name in interfaces if prefixes and name.startswith(prefixes)), "")
    local_address = ""
    if not interface:
        with suppress(OSError):
            rank_0 = resolve(os.environ.get("MASTER_ADDR", "127.0.0.1"))[0]
            local_address = find_local_address(rank_0)
            interface = find_interface(local_address)
    return {"interface": interface, "address": interfaces.get(interface, local_address)}
