"""Invariants of short runs of train.train itself: the samples it trained on, its ranks' weights, its checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import model as fork_model
import train
from config import TrainingError, UserError
from ddp_utils import cleanup_distributed, setup_distributed
from utils.checkpoint import format as checkpoint
from utils.data.transfer import to_device
from utils.distributed.collectives import all_gather_json, is_of_a_peer
from utils.run import provenance
from utils.run import saver as saving
from utils.run.folder import Run
from verification.fork import Broken, Few, Fork, digest, leaves, named, scramble

STATE = ("model", "ema", "optimizer", "scaler", "progress")
TIMES = ("samples_per_s", "data_wait_s", "step_s", "peak_memory_bytes")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
PLAIN_LOAD = """
import sys, torch
from config import TrainingConfig
from model import compute_loss, create_model
probe = torch.load(sys.argv[2], weights_only=False)  # verify.py's own, of a moment ago: a batch may be of any type
saved = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
torch.set_num_threads(probe["threads"])
model = create_model(TrainingConfig(**saved["config"] | {"init_from": "", "sync_bn": False}), torch.device("cpu"))
model.load_state_dict(saved["model"])
with torch.no_grad():
    print(compute_loss(model.eval(), probe["batch"])[0].item().hex())
"""


def training(fork: Fork) -> str:
    """The samples that travelled with the batches of two epochs of training: each once an epoch."""
    run(fork, "whole", save_every_steps=1)
    count, progress = len(fork.few()), fork.states["whole"].progress
    seen: dict[int, list[int]] = {}
    for file in fork.runs["whole"].folder.glob("samples/rank*.jsonl"):
        for record in map(json.loads, file.read_text().splitlines()):
            seen.setdefault(record["epoch"], []).extend(record["indices"])
    for epoch in (0, 1):
        mine = seen.get(epoch, [])
        if sorted(mine) != list(range(count)):
            raise Broken(
                f"epoch {epoch} trained on {len(set(mine))} of {count} samples, {len(mine) - len(set(mine))} of them"
                " again: a loop or a loader of its own; see train_one_epoch"
            )
    if progress.skipped_steps and not fork.states["whole"].precision.is_scaled:  # a float16 scale is searched for
        raise Broken(
            f"{progress.skipped_steps} of {progress.step} steps were skipped, their gradients were not finite; "
            "lower --lr, or look for a division by zero in compute_loss"
        )
    return (
        f"2 epochs of {count} samples in {progress.step} steps: each sample once, by the indices that travelled with"
        " the batches"
    )


def weights(fork: Fork) -> str:
    """After training, weights, statistics, averages and optimizer are the same on all ranks, to the bit."""
    need_whole(fork)
    state = fork.states["whole"]
    mine = comparable(state.state_dict([]))
    each = all_gather_json({name: digest(leaf) for name, leaf in leaves(mine).items()}, fork.ctx)
    for rank, found in enumerate(each):
        if wrong := [name for name, value in found.items() if each[0].get(name) != value]:
            raise Broken(
                f"{named(wrong)}: other on rank {rank} than on rank 0: it is changed outside the optimizer, or by what"
                " the rank sees; let parameters move by their gradients alone, and reduce other state over the ranks"
            )
    return f"{len(each[0])} tensors identical on {len(each)} rank(s) after {state.progress.step} steps"


def resume(fork: Fork) -> str:
    """A run that goes on from a checkpoint within its first epoch ends as the one that was not interrupted, to the
    bit."""
    whole, steps = need_whole(fork), fork.states["whole"].progress.step
    before = max(1, min(2, steps - 1))
    run(fork, "parts", init_from="", resume_from=str(checkpoint.step_path(whole.checkpoints, before)), num_workers=1)
    if different := differences(fork, "whole", "parts"):
        run(fork, "again", save_every_steps=1)
        if differences(fork, "whole", "again"):
            cause = (
                "two uninterrupted runs differ as well: randomness outside the streams; draw from torch's generators,"
                " which are seeded"
            )
        else:
            cause = (
                "a state that is not in the checkpoint, or draws from torch's generator that no stream keys; keep state"
                " in a parameter or a (persistent) buffer of the model, not in an attribute, and draw by utils.rng"
            )
        raise Broken(f"{named(different)}: other after save, load, continue than without: {cause}")
    return f"{before} step(s), a checkpoint, {steps - before} more = {steps} steps: state and records to the bit"


def plain_load(fork: Fork) -> str:
    """The checkpoint opens in a process of its own, without ranks, and computes the same loss."""
    path = checkpoint.step_checkpoints(need_whole(fork).checkpoints)[-1]

    def look() -> str:
        net = fork.states["whole"].model.cpu().eval()
        batch = to_device(fork.loader(fork.few()).sample_batch(), torch.device("cpu"))
        with torch.no_grad():
            expected = fork_model.compute_loss(net, batch)[0].item()
        probe = fork.folder / "probe.pt"
        torch.save({"batch": batch, "threads": torch.get_num_threads()}, probe)
        lone = {name: value for name, value in os.environ.items() if name not in RANKS}
        command = [sys.executable, "-c", PLAIN_LOAD, str(path.resolve()), str(probe.resolve())]
        ended = subprocess.run(
            command, cwd=provenance.ROOT, env=lone, capture_output=True, text=True, timeout=300, check=False
        )
        if ended.returncode:
            reason = (ended.stderr.strip() or "no output").splitlines()[-1]
            raise Broken(
                f"it cannot be opened alone ({reason}): a model that needs ranks or changes its shape; see create_model"
            )
        found = float.fromhex(ended.stdout.split()[-1])
        if found != expected:
            raise Broken(
                f"its loss is {found:.6g} there and {expected:.6g} here: something learned is not in the model's state;"
                " keep it in a parameter or a (persistent) buffer"
            )
        return "opens with weights_only in one process, without ranks: the same loss to the bit"

    return fork.on_rank_0(look)


def comparable(payload: dict[str, Any]) -> dict[str, Any]:
    """The state in a checkpoint; that of the optimizer by the names of the parameters, in whose order groups need not
    be."""
    optimizer = payload["optimizer"]
    by_name = {name: optimizer["state"].get(number, {}) for number, name in enumerate(optimizer["names"])}
    return {key: payload[key] for key in STATE} | {"optimizer": by_name}


def need_whole(fork: Fork) -> Run:
    if "whole" not in fork.runs:
        raise Broken("not checked, since no training came to its end; mend that first")
    return fork.runs["whole"]


def differences(fork: Fork, a: str, b: str) -> list[str]:
    """Where the last checkpoints of two runs differ, and the records of b that are not those of a."""
    runs = [fork.runs[name] for name in (a, b)]
    payloads = [checkpoint.read(checkpoint.step_checkpoints(each.checkpoints)[-1])[0] for each in runs]
    states = [leaves(comparable(payload)) for payload in payloads]
    wrong = [
        name for name in states[0].keys() | states[1] if digest(states[0].get(name)) != digest(states[1].get(name))
    ]
    for kind in ("train", "eval"):
        of_a, of_b = ([{k: v for k, v in r.items() if k not in TIMES} for r in each.records(kind)] for each in runs)
        wrong += [f"the {kind} record of step {record['step']}" for record in of_b if record not in of_a]
    return sorted(wrong)


# ---- short runs ----


@dataclass
class Update:
    """What an optimizer step was given."""

    gradients: dict[nn.Parameter, Tensor]
    settings: list[tuple[float, float]]  # learning rate and weight decay of each group


def run(fork: Fork, name: str, is_standing: bool = False, **changes: Any) -> list[Update]:
    """Train on few samples, by train.train itself. Returns its updates where the weights are kept from moving
    (`is_standing`)."""
    few, updates, plain_state = fork.few(), [], train.create_state
    held_out = (
        Few(fork.held_out, list(range(min(fork.small.batch_size + 1, len(fork.held_out)))))
        if fork.held_out is not None
        else None
    )
    config = replace(fork.small, run_dir=str(fork.folder / name), **changes)

    def keep(*args: Any) -> Any:
        fork.states[name] = plain_state(*args)
        return fork.states[name]

    cleanup_distributed()
    with (
        mock.patch.object(
            train, "create_dataset", lambda _, split: {"train": few, "val": held_out, "test": None}[split]
        ),
        mock.patch.object(train, "create_state", keep),
        mock.patch.object(saving, "PATIENCE", 60.0),  # a checkpoint at each step, however quick the steps are
        updates_into(updates) if is_standing else nullcontext(),
    ):
        scramble(100 * fork.ctx.rank + len(fork.runs))
        try:
            outcome = train.train(config)
        except (UserError, TrainingError) as problem:
            if isinstance(problem, TrainingError) and (problem.rank is None or is_of_a_peer(problem)):
                raise
            fork.ctx = setup_distributed(fork.config)  # all ranks have it
            raise Broken(str(problem)) from None
    if outcome["state"] == "preempted":
        raise KeyboardInterrupt
    fork.runs[name] = Run(config.run_folder, config.checkpoint_folder, fork.ctx.rank, fork.ctx.hosts)
    fork.ctx = setup_distributed(fork.config)
    return updates


@contextmanager
def updates_into(found: list[Update]) -> Iterator[None]:
    """Keep what each optimizer step is given, and the weights where they are: with a learning rate of 0."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = [group for group in optimizer.param_groups if any(p.grad is not None for p in group["params"])]
        gradients = {p: p.grad.clone() for group in groups for p in group["params"] if p.grad is not None}
        found.append(Update(gradients, [(round(group["lr"], 12), group["weight_decay"]) for group in groups]))
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def as_one_process() -> Iterator[None]:
    """What looks at the ranks sees one."""
    lone = {name: value for name, value in os.environ.items() if name not in RANKS}
    with (
        mock.patch.dict(os.environ, lone, clear=True),
        mock.patch.object(dist, "is_initialized", lambda: False),
        mock.patch.object(dist, "get_rank", lambda *_: 0),
        mock.patch.object(dist, "get_world_size", lambda *_: 1),
    ):
        yield
