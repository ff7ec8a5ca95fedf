"""What a rank finds on its own machine, without a message to another: plain JSON, for
utils.distributed.collectives.exchange."""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from config import TrainingConfig
from scripts.lib.network import addresses, interface_of, own_address_to
from utils.data.loader import usable_cpus
from utils.run import provenance

if TYPE_CHECKING:
    from ddp_utils import DistributedContext

SECONDS_TO_SHOW = 3.0  # for another node's file, on network storage
WRITTEN_AT_MOST = 2**28  # bytes, or two seconds: to see how fast the storage is
PIECE = 2**23


def gather(config: TrainingConfig, ctx: DistributedContext) -> dict[str, Any]:
    """All that one rank can say of itself."""
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "rank": ctx.rank,
        "host": ctx.host,
        "machine": machine(ctx.host),
        "versions": provenance.versions() | {"driver": driver(), "threads": str(torch.get_num_threads())},
        "code": provenance.code_digests(),
        "config": config.to_dict(),
        "device": ctx.device_names[ctx.rank],
        "cpus": usable_cpus(),
        **memory(ctx.device),
        **route(ctx.device),
        "shm": shared.f_bavail * shared.f_frsize if shared else None,
    }


def machine(host: str) -> str:
    """What tells machines and containers apart, whatever their host names."""
    try:
        return (
            f"{host} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
        )
    except OSError:
        return host


def driver() -> str:
    """The version of NVIDIA's driver; empty where there is none."""
    with suppress(OSError):
        if found := re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text()):
            return found[1]
    return ""


def memory(device: torch.device) -> dict[str, int]:
    """Bytes of the device, or of the machine where ranks compute on its CPUs: in all, and not used by others."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {"memory": total, "free": free + torch.cuda.memory_reserved(device)}
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return {
            name: int(lines[key].split()[0]) * 1024 for name, key in (("memory", "MemTotal"), ("free", "MemAvailable"))
        }
    except (OSError, KeyError, ValueError):
        return {"memory": 0, "free": 0}


def route(device: torch.device) -> dict[str, str]:
    """The interface through which this rank talks to others: the one that the user named, else that of the route to
    rank 0."""
    found = addresses()
    named = os.environ.get("NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME", "")
    wanted = tuple(name.lstrip("=") for name in named.split(",") if name and not named.startswith("^"))
    chosen = next((name for name in found if wanted and name.startswith(wanted)), "")
    if not chosen:
        with suppress(OSError):
            chosen = interface_of(own_address_to(socket.gethostbyname(os.environ.get("MASTER_ADDR", "127.0.0.1"))))
    return {"interface": chosen, "address": found.get(chosen, "")}


def open_files() -> dict[str, int]:
    """How many files this process has open now, and how many it may have (0: no limit)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/proc/self/fd")
    is_there = folder.is_dir()
    return {"open": len(list(folder.iterdir())) if is_there else 0, "limit": max(0, soft)}


class Probe:
    """Tries the run's folder without touching the run: all in a folder of its own name, which is gone afterwards.

    Args:
        token: of rank 0, common to all ranks.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self._folder, self._token = folder / f".preflight-{token}", token
        self._made: list[Path] = []  # what was not there before, outermost first

    def _make(self) -> None:
        missing = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            self._made.append(path)

    def leave_token(self) -> str:
        """On rank 0. What went wrong, or nothing."""
        return self._step_by_step({"create a folder": self._make, "write": lambda: self._write("token", self._token)})

    def use(self, name: str) -> dict[str, Any]:
        """On each node: whether rank 0's token is there, and what of all that a run does there goes wrong (or
        nothing)."""
        ends, is_seen = time.monotonic() + SECONDS_TO_SHOW, False
        while not (is_seen := self._is_seen()) and time.monotonic() < ends:
            time.sleep(0.1)
        file, renamed = self._folder / f"{name}.tmp", self._folder / name

        def append() -> None:
            with renamed.open("a") as opened:
                opened.write("b\n")
            if renamed.read_text() != "a\nb\n":
                raise OSError("what was appended is not there")

        steps = {
            "create a folder": self._make,
            "write": lambda: self._write(file.name, "a\n"),
            "rename": lambda: file.rename(renamed),
        }
        problem = self._step_by_step(steps | {"append": append, "delete": renamed.unlink})
        for left in (file, renamed):
            with suppress(OSError):
                left.unlink()
        return {"is_seen": is_seen, "problem": problem}

    def _is_seen(self) -> bool:
        with suppress(OSError):
            return (self._folder / "token").read_text() == self._token
        return False

    def _write(self, name: str, text: str) -> None:
        with (self._folder / name).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _step_by_step(steps: dict[str, Any]) -> str:
        for name, step in steps.items():
            try:
                step()
            except OSError as error:
                return f"cannot {name} ({error.strerror or error})"
        return ""

    def space(self, size: int) -> dict[str, float]:
        """Bytes free, and bytes a second that reach the disk, with fsync, of as much as a checkpoint has (0 where
        nothing did)."""
        room, file, written, began = os.statvfs(self._folder), self._folder / "speed", 0, time.perf_counter()
        with suppress(OSError), file.open("wb") as opened:
            while written < min(max(size, PIECE), WRITTEN_AT_MOST) and time.perf_counter() - began < 2:
                opened.write(bytes(PIECE))
                opened.flush()
                os.fsync(opened.fileno())
                written += PIECE
        seconds = time.perf_counter() - began
        with suppress(OSError):
            file.unlink()
        return {"free": room.f_bavail * room.f_frsize, "speed": written / seconds}

    def clean_up(self) -> None:
        """Delete what this process made."""
        with suppress(OSError):
            if self._folder in self._made:
                (self._folder / "token").unlink(missing_ok=True)
        for path in reversed(self._made):
            with suppress(OSError):
                path.rmdir()
        self._made = []
