"""The ranks of this process and the values from its launcher. Only this file reads the environment."""

from __future__ import annotations

import os
import re
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from utils.settings.errors import UserError

if TYPE_CHECKING:  # importing torch takes seconds; train.py needs its rank before
    import torch
    import torch.distributed as dist

# Slurm's job steps have lower numbers; batch scripts and interactive shells have higher ones
MAX_SLURM_STEP_ID = 0xFFFFFF00
# What launchers tell one rank of several: torchrun, srun about the task and its step, and mpirun.
LAUNCHER_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE)|(GROUP|ROLE|MASTER|TORCHELASTIC|PET)_.*|LAUNCH_ID|N(NODES|ODE_RANK)"
    r"|NPROC_PER_NODE|SLURM_(PROCID|LOCALID|NODEID|GTIDS|TASK_PID|NPROCS|NTASKS.*|STEP_.*|STEPID)"
    r"|(OMPI|MV2)_COMM_WORLD_.*|PMI(2|X)?_.*|MPI_LOCAL.*"
)


@dataclass(frozen=True)
class Launch:
    """The values from the launcher of this process. Without a launcher the world size is one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    is_launched: bool = False  # RANK, LOCAL_RANK and WORLD_SIZE are set, or srun gives them
    is_under_torchrun: bool = False
    may_restart: bool = False  # torchrun --max-restarts
    launch_id: str = ""  # the same for all attempts of one launch; empty if unknown
    git_commit: str = ""
    error_file: str = ""  # torchrun reads it for its summary
    srun_address: str = ""  # of the rendezvous, tcp://HOST:PORT, if srun starts the ranks
    master_address: str = ""  # MASTER_ADDR:MASTER_PORT
    agent_hosts_store: bool = False  # torchrun's agent of rank 0's node, else rank 0
    omp_num_threads: str = ""  # OMP_NUM_THREADS
    flight_recorder_path: str = ""  # where torch writes its collectives, if the launcher asks for them


@dataclass(frozen=True)
class DistributedContext:
    """The ranks and the device of this process. `hosts` and `device_names` have one entry per rank."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    device_names: tuple[str, ...] = ("cpu",)
    fast_bf16: bool = False  # on every rank
    launch: Launch = field(default_factory=Launch)
    # torch has the group until it is destroyed: a context that a traceback keeps must not keep its threads and sockets
    control_group_ref: weakref.ref[dist.ProcessGroup] | None = None
    heartbeats: Any = None  # heartbeats of several ranks that share a TCP store; None if nobody watches

    @property
    def is_main(self) -> bool:
        return is_main_process(self.rank)

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """Return the gloo group for small messages."""
        if self.control_group_ref is None:
            return None
        return self.control_group_ref()

    @property
    def host(self) -> str:
        return self.hosts[self.rank]


def is_main_process(rank: int) -> bool:
    return rank == 0


def read_launch() -> Launch:
    """Read the environment set by torchrun, srun or another launcher. Raises UserError if it is incomplete."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    address_parts = [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    common: dict[str, Any] = {
        "git_commit": os.environ.get("GIT_COMMIT", ""),
        "master_address": ":".join(address_parts),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "flight_recorder_path": os.environ.get("TORCH_FR_DUMP_TEMP_FILE", ""),
    }
    if len(missing) == len(names):
        launch = Launch(**common, **_read_srun())
        _refuse_mpirun(launch.world_size)
        return launch
    if missing:
        present = [name for name in names if name not in missing]
        raise UserError(
            f"The environment has {' and '.join(present)}, but not {' and '.join(missing)}. Start with torchrun, or set"
            f" all of {', '.join(names)}."
        )
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    except ValueError:
        values = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise UserError(f"{', '.join(names)} must be integers, got {values}. Start with torchrun.") from None
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise UserError(
            f"RANK and LOCAL_RANK must be from 0 to WORLD_SIZE - 1, got RANK={rank}, LOCAL_RANK={local_rank},"
            f" WORLD_SIZE={world_size}. Start with torchrun, or number the ranks from 0."
        )
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id == "none":  # torchrun's default
        run_id = ""
    return Launch(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        is_launched=True,
        is_under_torchrun="TORCHELASTIC_RUN_ID" in os.environ,
        may_restart=os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        launch_id=os.environ.get("LAUNCH_ID") or run_id,
        error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
        agent_hosts_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        **common,
    )


def _refuse_mpirun(world_size: int) -> None:
    """Raise UserError if mpirun has started several processes, of which each would be a run of its own.

    Args:
        world_size: from srun, which sets these variables too, with the same number.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        size = os.environ.get(name, "1")
        if size.isdecimal() and int(size) not in (1, world_size):
            text = f"mpirun ({name}={size}) would start {size} runs of one rank each."
            text += f" Start with torchrun --standalone --nproc-per-node={size} train.py, and on several nodes with"
            text += " torchrun on each node or with srun."
            raise UserError(text)


def environment_without_launcher() -> dict[str, str]:
    """Return the environment for a program that is no rank, without what would make it wait for the other ranks."""
    return {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(name)}


def make_libraries_deterministic() -> None:
    """Set the variables that cuBLAS and NCCL read when they start. cuDNN's RNNs need buffers of one size, too.

    Sums in NVLink switches (NVLS) differ from call to call; torch leaves out NCCL's algorithm NVLS, but not NVLSTree.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def enable_lazy_gloo_init() -> None:
    """Let gloo connect ranks when they first talk. To connect all pairs, each rank would read 8 bytes per pair."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _read_srun() -> dict[str, Any]:
    """Return the values from srun if this process is one of several tasks of a step.

    The dict is empty in a batch script or a shell.
    """
    names = ("PROCID", "LOCALID", "STEP_NUM_TASKS", "JOB_ID", "STEP_ID")
    words = [os.environ.get(f"SLURM_{name}", "") for name in names]
    if not all(word.isdecimal() for word in words):
        return {}
    rank, local_rank, world_size, job, step = map(int, words)
    if world_size < 2 or step > MAX_SLURM_STEP_ID:
        return {}
    sees_one_gpu = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    if sees_one_gpu and os.environ.get("SLURM_GPUS_ON_NODE", "1") != "1":
        local_rank = 0  # --gpus-per-task and the like: each task sees only its own GPU
    # the first entry of rack[1-2]n[07-12,15],other
    first = re.findall(r"(?:\[[^]]*]|[^,[])*", os.environ.get("SLURM_STEP_NODELIST", ""))[0]
    host = re.sub(r"\[(\d+)[^]]*]", r"\1", first)  # the node of rank 0: rack1n07
    port = 20000 + (job + 1009 * (step + 1)) % 10000  # below the ephemeral ports
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "is_launched": True,
        # the same after a requeue
        "launch_id": os.environ.get("LAUNCH_ID") or f"slurm-{cluster}-{job}.{step}",
        "srun_address": f"tcp://{host}:{port}",
    }
