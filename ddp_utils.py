"""Processes, and what passes between them: set-up, the control group, DDP's knobs, who saves and who loads.

The only file that reads the environment.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import json
import os
import re
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from config import Refused, RunFailed, TrainingConfig
from utils import checkpoint, resume
from utils.alike import check_alike, check_shared, raise_file_limit
from utils.claim import MOST_STRIKES
from utils.compiling import check_compiler
from utils.device import choose_device, choose_kernels
from utils.ending import is_of_a_peer
from utils.ledger import LEDGER, read_ledger
from utils.loading import WindowSampler
from utils.logger import setup_logger
from utils.precision import has_fast_bf16
from utils.run_folder import Run
from utils.saving import Saver
from utils.signals import die_with_parent, is_orphan
from utils.together import by_rank_0, exchange, together, within
from utils.train_state import TrainState

GROUPS = itertools.count()
MOST_STEPS = 0xFFFFFF00  # Slurm numbers its steps below; batch scripts and interactive shells have numbers above
CONTROL_TIMEOUT = timedelta(hours=24)  # words, barriers and saves: who is late here is not lost


@dataclass(frozen=True)
class Launch:
    """What the launcher said of this process. A process that nobody launched is a world of one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    is_launched: bool = False  # RANK, LOCAL_RANK and WORLD_SIZE are set, or srun speaks for them
    is_under_torchrun: bool = False
    may_restart: bool = False  # torchrun --max-restarts
    id: str = ""  # the same for all attempts of one launch; empty where nobody knows
    git_commit: str = ""
    error_file: str = ""  # what torchrun's summary shows of this rank
    address: str = ""  # where the ranks meet, tcp://HOST:PORT, where MASTER_ADDR and MASTER_PORT do not say it


@dataclass(frozen=True)
class DistributedContext:
    """This process among the others. `hosts` and `device_names` have one entry a rank; `control` is a gloo group on the CPU."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    device_names: tuple[str, ...] = ("cpu",)
    fast_bf16: bool = False  # on every rank
    launch: Launch = field(default_factory=Launch)
    control: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return is_main_process(self.rank)

    @property
    def host(self) -> str:
        return self.hosts[self.rank]


def is_main_process(rank: int) -> bool:
    return rank == 0


def read_launch() -> Launch:
    """Read what torchrun (or whoever plays its part, or srun) put into the environment. Raises Refused when only some of it is there."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    git_commit = os.environ.get("GIT_COMMIT", "")
    if len(missing) == len(names):
        return Launch(git_commit=git_commit, **_read_srun())
    if missing:
        there = [name for name in names if name not in missing]
        raise Refused(
            f"{' and '.join(missing)}: not set, while {' and '.join(there)} is; start with torchrun, or set all of {', '.join(names)}"
        )
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    except ValueError:
        raise Refused(f"{', '.join(f'{name}={os.environ[name]}' for name in names)}: not whole numbers; start with torchrun") from None
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise Refused(f"RANK={rank}, LOCAL_RANK={local_rank}: outside WORLD_SIZE={world_size}; count ranks from 0 to WORLD_SIZE - 1")
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return Launch(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        is_launched=True,
        is_under_torchrun="TORCHELASTIC_RUN_ID" in os.environ,
        may_restart=os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        id=os.environ.get("LAUNCH_ID", "") or ("" if run_id == "none" else run_id),
        git_commit=git_commit,
        error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )


def _read_srun() -> dict[str, Any]:
    """What srun says, where this process is one of several tasks of a step; nothing in a batch script or a shell, which is one process."""
    words = [os.environ.get(f"SLURM_{name}", "") for name in ("PROCID", "LOCALID", "STEP_NUM_TASKS", "JOB_ID", "STEP_ID")]
    if not all(word.isdecimal() for word in words):
        return {}
    rank, local_rank, world_size, job, step = map(int, words)
    if world_size < 2 or step > MOST_STEPS:
        return {}
    if "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",") and os.environ.get("SLURM_GPUS_ON_NODE", "1") != "1":
        local_rank = 0  # --gpus-per-task and the like: each task sees a GPU of its own, and no other
    first = re.match(r"(?:\[[^]]*]|[^,[])*", os.environ.get("SLURM_STEP_NODELIST", ""))[0]  # of rack[1-2]n[07-12,15],other
    host = re.sub(r"\[(\d+)[^]]*]", r"\1", first)  # the node of rank 0: rack1n07
    return {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "is_launched": True,
        "id": os.environ.get("LAUNCH_ID") or f"slurm-{os.environ.get('SLURM_CLUSTER_NAME', '')}-{job}.{step}",  # a requeue has the same
        "address": f"tcp://{host}:{20000 + (job + 1009 * (step + 1)) % 10000}",  # below the ports that the kernel gives away
    }


def setup_distributed(config: TrainingConfig, must_be_alike: bool = True) -> DistributedContext:
    """Make the process groups. Before any group exists, the ranks tell each other over the store what they are and what ails them.

    must_be_alike: in code, settings and versions.

    Raises:
        Refused: on every rank, when one of them cannot take part.
    """
    launch = read_launch()
    if launch.is_under_torchrun:
        die_with_parent()
        if is_orphan():  # the agent was killed while this process imported torch
            raise RunFailed("torchrun is gone already; start it again")
    if config.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.deterministic)  # it imports the compiler, which takes seconds
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    if dist.is_initialized():  # left by an earlier run in this process that failed
        dist.destroy_process_group()
    gc.collect()  # what is left of that run's groups ends here: in a worker that is forked later, without their threads, it would hang
    card: dict[str, Any] = {"host": socket.gethostname(), "problem": ""}
    backend, device = "", torch.device("cpu")
    try:
        raise_file_limit(launch.world_size, (os.cpu_count() or 1) if config.num_workers == "auto" else config.num_workers)
        backend, device = choose_device(config.backend, launch.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # before anything touches a GPU, and before the group: NCCL else guesses which
        card |= {"backend": backend, "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
        card["bf16"] = has_fast_bf16(device)
        check_compiler(config.compile, device, os.environ.get("CC" if device.type == "cuda" else "CXX", ""))
    except Refused as refused:
        if not launch.is_launched:
            raise
        card["problem"] = str(refused)
    choose_kernels(device, config.deterministic)

    timeout = timedelta(seconds=config.timeout)
    store = _rendezvous(launch, config.init_method or "env://", timeout)
    store = dist.PrefixStore(f"group {next(GROUPS)}", store)  # a second run in this process meets none of the first one's keys
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
            raise Refused(f"init_method={url}: needs RANK, LOCAL_RANK and WORLD_SIZE, which are not set; start with torchrun, or set them")
        return dist.HashStore()  # a world of one: no port, no environment
    if url == "env://" and not ("MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ):
        if not launch.address:
            raise Refused("MASTER_ADDR and MASTER_PORT: not set, while RANK is; start with torchrun, set both, or give --init_method")
        url = launch.address
    waited_for = launch.world_size if url.startswith("file://") else 1  # a TCP store that waits for all cannot say who is missing
    try:
        meet = functools.partial(dist.rendezvous, url, launch.rank, waited_for, timeout=timeout)
        store, _, _ = within(timeout.total_seconds() + 5, lambda: next(meet()))
    except (dist.DistError, ValueError, RuntimeError, TimeoutError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if url == "env://" else url
        reason = str(error).splitlines()[0] if str(error) else "who listens there gives no answer"  # frames of C++ follow
        look = (
            "check that rank 0 runs and its address is right" if launch.rank else f"start all {launch.world_size} ranks with this address"
        )
        if "EADDRINUSE" in reason:
            look = "another program listens there (ss -ltnp names it); end it, or give all ranks another MASTER_PORT"
        raise Refused(f"rank {launch.rank} cannot meet the others at {where} ({reason}); {look}") from None
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
        raise Refused(f"{names}: did not come within {config.timeout:g} s; {remedy}", speaker, "" if speaker else None) from None
    for rank, each in enumerate(cards):
        if each["problem"]:
            is_common = len({card["problem"] for card in cards}) == 1
            whose = "" if is_common else f" (rank {rank} on {each['host']})"
            raise Refused(each["problem"] + whose, rank, each["host"])
    bare = [rank for rank, each in enumerate(cards) if each["device"] == "cpu"]
    if config.backend == "auto" and 0 < len(bare) < len(cards):
        hosts = ", ".join(sorted({cards[rank]["host"] for rank in bare}))
        text = "shows no CUDA device while other ranks have one; repair it or leave it out, or give --backend gloo"
        raise Refused(f"{hosts}: {text}", bare[0], cards[bare[0]]["host"])
    return cards


def cleanup_distributed() -> None:
    """End the process groups after a success. A barrier comes first: gloo aborts when a peer leaves early. Never call it on an error."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# ---- DDP and checkpoints ----


class Alone(DistributedDataParallel):
    """A world of one has nobody to average with: it leaves out what DDP does in each pass, which a small model would notice."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


def wrap_ddp(model: nn.Module, config: TrainingConfig, ctx: DistributedContext) -> DistributedDataParallel:
    """Wrap the model in DDP. Every knob of DDP is set here and only here."""
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    if not sizes:
        raise Refused("model: has no parameter that is trained; leave some with requires_grad=True")
    megabytes = sum(sizes) / 2**20
    # running statistics have a rule of their own (utils/running_stats.py); torch 2.15 renamed the argument
    is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    no_buffers = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
    wrapper = DistributedDataParallel if ctx.world_size > 1 else Alone
    wrapped = wrapper(
        model,
        device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None,
        **no_buffers,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_cap_mb or min(25.0, max(1.0, megabytes / 4)),  # some buckets, so that they overlap
    )
    if config.comm_hook != "none" and ctx.world_size > 1:
        _compress(wrapped, config.comm_hook, ctx.device)
    return wrapped


def _compress(model: DistributedDataParallel, name: str, device: torch.device) -> None:
    """All-reduce gradients rounded to 16 bits; they, the weights and the optimizer stay as wide as they are. Raises Refused."""
    hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    try:
        model.register_comm_hook(None, hook)  # it knows for which builds torch takes bfloat16
        dist.all_reduce(torch.zeros(1, dtype=dtype, device=device))  # and the backend says here whether it does
    except (TypeError, ValueError, RuntimeError) as error:
        if is_of_a_peer(error):
            raise
        backend, other = dist.get_backend(), "none" if name == "fp16" else "fp16 or none"
        reason = f"torch {torch.__version__} cannot all-reduce {name} over {backend} ({str(error).splitlines()[0]})"
        raise Refused(f"comm_hook={name}: {reason}; give --comm_hook {other}") from None


def unwrap(model: nn.Module) -> nn.Module:
    """The model without DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def open_run(config: TrainingConfig, ctx: DistributedContext) -> Run:
    """Claim the run's folder; rank 0 decides whether a run in it is continued, and all ranks learn it. Raises Refused."""
    run = Run(config.run_folder, config.checkpoint_folder, ctx.rank, ctx.hosts)
    by_rank_0(lambda: run.claim(config, ctx.launch.id, ctx.launch.may_restart), ctx)
    mine = [str(run.resume_path or ""), run.is_completed, run.is_replacing, run.attempt, run.strikes, run.claim_number]
    resume_path, run.is_completed, run.is_replacing, run.attempt, run.strikes, run.claim_number = exchange(mine, ctx)[0]
    run.resume_path = Path(resume_path) if resume_path else None
    if not run.is_completed:
        check_shared(run, ctx)
    return run


def resume_run(
    run: Run, state: TrainState, config: TrainingConfig, origin: dict[str, Any], sampler: WindowSampler, ctx: DistributedContext
) -> tuple[list[str], dict[str, Any] | None]:
    """Load the checkpoint that the run starts from, if any, and make the folder fit to go on from there.

    Returns what differs from the checkpoint's config and may, and the account of time so far.

    Raises:
        Refused: also when the last attempts all ended at the same step.
    """
    differences, ledger = [], None
    if run.resume_path:
        payload = load_checkpoint(run.resume_path, ctx)
        differences = together(lambda: resume.compare(payload, config, origin["fingerprint"], origin["global_batch_size"]), ctx)
        together(lambda: state.load_state_dict(payload, ctx.rank, ctx.world_size), ctx)
        if resume.is_other_best(payload, config):
            state.progress.forget_best()
        ledger = payload["provenance"]["ledger"]
    if len(run.strikes) >= MOST_STRIKES:
        by_rank_0(run.say_diagnosis, ctx)
        raise Refused(resume.diagnosis(run.strikes, state.progress, sampler), 0, ctx.hosts[0], is_final=True)
    if run.is_replacing:  # nothing is left that could be refused
        by_rank_0(lambda: run.make_room(config), ctx)
        setup_logger(ctx.rank, run.log_file)
        run.begin()
    progress = state.progress
    by_rank_0(lambda: run.rewind(progress.step, progress.evaluated_step == progress.step), ctx)
    is_best_there = together(lambda: ctx.is_main and run.restore_best(progress.best_step), ctx)
    if not exchange(is_best_there, ctx)[0]:
        progress.forget_best()
    by_rank_0(run.own, ctx)
    if dump := os.environ.get("TORCH_FR_DUMP_TEMP_FILE"):  # launch.sh --debug: torch makes no folder for its flight recorder
        together(lambda: Path(dump).parent.mkdir(parents=True, exist_ok=True), ctx)
    return differences, (read_ledger(run.folder / LEDGER) if run.attempt > 1 else None) or ledger


def save_checkpoint(saver: Saver, must: bool = True) -> None:
    """A checkpoint of this moment, by all ranks alike: rank 0 writes, and its process goes on meanwhile. As `Saver.save_now`."""
    saver.save_now(must)


def load_checkpoint(path: Path, ctx: DistributedContext) -> dict[str, Any]:
    """Every rank reads the file from shared storage; all of them read the same bytes, or all raise Refused."""
    payload, digest = together(lambda: checkpoint.read(path), ctx)
    digests = exchange(digest, ctx)
    if len(set(digests)) > 1:
        other = next(rank for rank, each in enumerate(digests) if each != digests[0])
        hosts = f"{ctx.hosts[0]} and {ctx.hosts[other]}"
        raise Refused(f"{path}: {hosts} see different files under this name; put the run folder on storage that all nodes share")
    return payload
