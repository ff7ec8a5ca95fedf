"""The process groups of a launch."""

from __future__ import annotations

import functools
import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from utils.distributed.collectives import call_with_timeout
from utils.distributed.context import Launch, enable_lazy_gloo_init
from utils.settings.errors import StartError

MAX_FULLY_CONNECTED_RANKS = 1024  # at most; gloo then connects all pairs
CONTROL_TIMEOUT = timedelta(hours=24)  # for votes, barriers and saves: a slow rank is not a lost one


def create_process_groups(
    launch: Launch,
    store: dist.Store,
    backend: str,
    device: torch.device,
    timeout: float,
) -> dist.ProcessGroup:
    """Create the default group, for tensors on the device, and the control group, for small messages on the CPU.

    Args:
        backend: of the default group.
        timeout: in seconds.

    Returns:
        The control group. torch keeps both until they are destroyed.

    Raises:
        StartError: if the ranks cannot connect within `timeout`, or gloo finds no network interface.
    """
    if launch.world_size > MAX_FULLY_CONNECTED_RANKS:
        enable_lazy_gloo_init()
    device_id = None
    if device.type != "cpu":
        device_id = device
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("world", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device_id,
        )
        create_group: Any = functools.partial(dist.new_group, backend="gloo", timeout=CONTROL_TIMEOUT)
        # a rank may stop now, and the group's own limit is for later
        return call_with_timeout(timeout, create_group)
    except TimeoutError:
        text = f"The ranks did not connect within {timeout:g} s."
        raise StartError(f"{text} Check the network between the nodes, then start again.") from None
    except RuntimeError as error:
        if not re.search("Unable to find|Cannot resolve", str(error)):  # an interface of the network, or its address
            raise
        reason = str(error).splitlines()[0].rpartition(". ")[2]
        remedy = "Bring up the loopback (ip link set lo up), or name another interface in GLOO_SOCKET_IFNAME (lo if the"
        remedy += " loopback has only ::1)."
        raise StartError(f"gloo finds no usable network interface ({reason}). {remedy}") from None
