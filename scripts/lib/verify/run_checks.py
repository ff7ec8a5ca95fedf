# extra: verify
"""Checks of short runs of train.train: the samples they trained on, the ranks' weights, the checkpoints."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import torch

from config import TrainingConfig
from lib.values import (
    ROUNDING_TOLERANCE,
    TIMING_FIELDS,
    comparable_state,
    flatten_nested,
    format_plural,
    hash_nested,
    join_first_three,
)
from lib.verify.data_checks import check_continued_data
from lib.verify.fork import ACCUMULATION_STEPS, BrokenInvariant, Fork, SkippedCheck, pretend_rank
from lib.verify.hidden_state import find_lost_state
from lib.verify.loss_checks import run_pass
from lib.verify.model_notes import inspect_statistics
from lib.verify.result import NOT_CHECKED, PLEASE_CHECK, join_parts
from train import Training
from utils.checkpoint import format as checkpoint
from utils.distributed.collectives import all_gather_json
from utils.distributed.dtensor import is_sharded, local_shard
from utils.training.parts.unsaved_parameters import PROVENANCE_KEY, fill_in_unsaved

KEEP_STATE = "Keep it in a buffer (register_buffer), in the optimizer's state or in progress.user."


def training(fork: Fork) -> str:
    """Check that two epochs of training visit each sample once per epoch, by the indices in the batches."""

    def save_sharded_loss(training: Training) -> None:
        if any(map(is_sharded, training.state.model.parameters())):
            fork.sharded_loss = fork.compute_sample_loss(training.state.model, fork.ctx.device)

    # changes of the data sets in workers would not be seen
    fork.train_short_run("whole", save_every_steps=1, on_epoch_end=save_sharded_loss, num_workers=0)
    count, progress = len(fork.small_train_set()), fork.trainings["whole"].state.progress
    seen: dict[int, list[int]] = {1: [], 2: []}
    for file in fork.trainings["whole"].attempt.run.folder.glob("samples/rank*.jsonl"):
        for record in map(json.loads, file.read_text().splitlines()):
            seen.setdefault(record["epoch"], []).extend(record["indices"])
    for epoch, indices in seen.items():
        if sorted(indices) != list(range(count)):
            coverage = f"{len(set(indices))} of {count} samples in {len(indices)} visits"
            raise BrokenInvariant(
                f"Epoch {epoch} trained on {coverage}. A custom training loop or loader is the likely cause. Compare it"
                " with train_one_epoch."
            )
    _, note = fork.divide_among_ranks([partial(check_parameters_fixed, fork), partial(inspect_statistics, fork)])
    samples = format_plural(count, "sample")
    return join_parts(f"2 epochs of {samples} in {progress.step} steps visit each sample once per epoch.", note)


def check_parameters_fixed(fork: Fork) -> str:
    """Raise BrokenInvariant if a forward pass changes parameters by its data, which differ between ranks."""
    parameters_a, parameters_b = (run_pass(fork, backward_seed=None, first=first).parameters for first in (0, 2))
    if changed := [name for name in parameters_a if parameters_a[name] != parameters_b[name]]:
        raise BrokenInvariant(
            f"A forward pass changes these parameters by its batch: {join_first_three(changed)}. Ranks would differ."
            " Change parameters only through gradients."
        )
    return ""


def weights(fork: Fork) -> str:
    """Check that weights, statistics, averages and optimizer state are bitwise equal on all ranks after training."""
    state, local_digests = get_whole_run(fork).state, {}
    for name, leaf in flatten_nested(comparable_state(state.state_dict())).items():
        shard = f" (shard {leaf.device_mesh.get_local_rank('shards')})" if is_sharded(leaf) else ""
        local_digests[name + shard] = hash_nested(local_shard(leaf))
    rank_digests = all_gather_json(local_digests, fork.ctx)
    holders: dict[str, list[tuple[int, str]]] = {}
    for rank, tensors in enumerate(rank_digests):
        for name, value in tensors.items():
            holders.setdefault(name, []).append((rank, value))
        if wrong := [name for name, value in tensors.items() if holders[name][0][1] != value]:
            raise BrokenInvariant(
                f"Rank {rank} and rank {holders[wrong[0]][0][0]} differ in {join_first_three(wrong)}. These were"
                " changed outside the optimizer, or by rank. Change parameters only through gradients, and all-reduce"
                " other state."
            )
    shared = sum(len(ranks) > 1 for ranks in holders.values())
    in_shards = f" in {len(holders) - shared} shards" if len(holders) > shared > 0 else ""
    tensors = len(holders) if len(rank_digests) == 1 else shared
    ranks = format_plural(len(rank_digests), "rank")
    return f"{tensors} tensors are identical on {ranks}{in_shards} after {state.progress.step} steps."


def resume(fork: Fork) -> str:
    """Check that a run resumed in its first epoch ends bitwise equal to the uninterrupted run.

    No value that changes while training may be missing in checkpoints.
    """
    whole = get_whole_run(fork)
    first, *later_paths = checkpoint.list_step_checkpoints(whole.attempt.run.checkpoint_folder)
    fork.train_short_run("resumed", resume_from=str(first), num_workers=1)
    # rank 0 alone lists the checkpoints, because `check_continued_data` adds one for a moment
    different = fork.divide_among_ranks([partial(find_differences, fork, "whole", "resumed")])[0]
    if different:
        fork.train_short_run("again", save_every_steps=1)
        if fork.divide_among_ranks([partial(find_differences, fork, "whole", "again")])[0]:
            cause = (
                "Two uninterrupted runs differ too, so the code draws unkeyed random numbers or keeps state between"
                " runs. Use utils.rng."
            )
        else:
            lost, _ = find_lost_in_run(fork, "resumed")
            example = f" ({lost[0]})" if lost else ""
            cause = f"Some state is outside the checkpoint{example}. {KEEP_STATE}"
        raise BrokenInvariant(f"The resumed and the uninterrupted run differ in {join_first_three(different)}. {cause}")
    notes = fork.divide_among_ranks([partial(check_continued_data, fork)])
    if later_paths:
        notes.append(check_hidden_state(fork, [first, *later_paths][-2]))
    else:
        notes.append(f"{NOT_CHECKED}what a run remembers, since it has a single checkpoint.")
    steps = whole.state.progress.step
    seen = f"A run resumed from {first.name} is bitwise equal to the uninterrupted run after {steps} steps."
    return join_parts(seen, *notes)


def check_hidden_state(fork: Fork, checkpoint_path: Path) -> str:
    """Raise BrokenInvariant if a value that changes while training is not in a checkpoint.

    The results may still be the same, as with a counter that has an effect after a thousand steps.
    """
    fork.initial_hidden_state.restore()  # a new process would begin with this state
    fork.train_short_run("late", resume_from=str(checkpoint_path), num_workers=0)

    def check() -> str:
        lost, caches = find_lost_in_run(fork, "late")
        if lost:
            and_more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            raise BrokenInvariant(
                f"{lost[0]}{and_more}. This value changes while training, and is not in a checkpoint. {KEEP_STATE}"
            )
        if not caches:
            return ""
        return (
            f"{PLEASE_CHECK}These are filled while training, but are empty after a resume: {join_first_three(caches)}."
        )

    return fork.run_on_all_ranks(check)


def find_lost_in_run(fork: Fork, name: str) -> tuple[list[str], list[str]]:
    """Return what the resumed run of this name has lost, and caches. Both are empty if the run had no step left."""
    whole, resumed = fork.hidden_states["whole"], fork.hidden_states[name]
    return find_lost_state(whole[0], whole[-1], resumed[-1]) if resumed else ([], [])


def reduction(fork: Fork) -> str:  # extra: exact
    """Check that with --reduction exact a single process gives the bits of all ranks.

    They are compared after one step and after the run.
    """
    whole, size = get_whole_run(fork), fork.small_config.batch_size * ACCUMULATION_STEPS * fork.ctx.world_size
    fork.train_short_run("alone", is_alone=True, save_every_steps=1, global_batch_size=size, grad_accum_steps=1)

    def check() -> str:
        steps = whole.state.progress.step
        for number, moment in ((0, "step 1"), (-1, f"step {steps}")):
            if different := find_differences(fork, "whole", "alone", number):
                raise BrokenInvariant(
                    f"After {moment} a single process has other bits than {format_plural(fork.ctx.world_size, 'rank')}"
                    f" in {join_first_three(different)}. Something depends on the rank, on what a process computed"
                    " before, or on its memory. Remove that, or use --reduction fast."
                )
        ranks = format_plural(fork.ctx.world_size, "rank")
        return f"A single process gives the same bits as {ranks}, in {steps} steps."

    return fork.divide_among_ranks([check])[0]


def plain_load(fork: Fork) -> str:
    """Check that a checkpoint loads into a new model in a single process, and gives the same loss."""
    whole = get_whole_run(fork)
    path = checkpoint.list_step_checkpoints(whole.attempt.run.checkpoint_folder)[-1]

    def check() -> str:
        has_shards = path.is_dir()  # then the kernels ran on the device, in another memory format
        device = fork.ctx.device if has_shards else torch.device("cpu")
        with pretend_rank():
            expected = fork.sharded_loss if has_shards else fork.compute_sample_loss(whole.state.model.cpu(), device)
            saved = (
                checkpoint.read_checkpoint(path)[0]
                if has_shards
                else torch.load(path, map_location="cpu", weights_only=True)
            )
            torch.manual_seed(fork.config.seed)
            loaded = fork.hooks.create_model(TrainingConfig(**saved["config"]), device)
            weights = saved["model"]
            weights = fill_in_unsaved(
                weights, saved["provenance"].get(PROVENANCE_KEY, {}), loaded, {}, "the checkpoint"
            )
            loaded.load_state_dict(weights)
            loss = fork.compute_sample_loss(loaded, device)
        if not math.isclose(loss, expected, rel_tol=ROUNDING_TOLERANCE[fork.loss_dtype] if has_shards else 0):
            raise BrokenInvariant(
                f"The loaded model's loss is {loss:.6g} instead of {expected:.6g}. Learned state is missing from"
                " state_dict(). Keep it in a parameter or persistent buffer."
            )
        if has_shards:
            return "The shards are read in one process, with the same loss up to rounding."
        return "A checkpoint opens with weights_only=True in one process, with a bitwise equal loss."

    return fork.divide_among_ranks([check])[0]


def get_whole_run(fork: Fork) -> Training:
    if "whole" not in fork.trainings:
        raise SkippedCheck("This check was skipped, because no training finished. Fix that first.")
    return fork.trainings["whole"]


def find_differences(fork: Fork, a: str, b: str, number: int = -1) -> list[str]:
    """Return where checkpoints of two runs differ, and the records of b that a lacks.

    By default the last checkpoints are compared.
    """
    runs = [fork.trainings[name].attempt.run for name in (a, b)]
    payloads = [
        checkpoint.read_checkpoint(checkpoint.list_step_checkpoints(run.checkpoint_folder)[number])[0] for run in runs
    ]
    state_a, state_b = (flatten_nested(comparable_state(payload)) for payload in payloads)
    names = state_a.keys() | state_b.keys()
    wrong = [name for name in names if hash_nested(state_a.get(name)) != hash_nested(state_b.get(name))]
    for kind in ("train", "eval"):
        records_a, records_b = (
            [{k: v for k, v in r.items() if k not in TIMING_FIELDS} for r in run.records.read(kind)] for run in runs
        )
        wrong += [f"the {kind} record of step {record['step']}" for record in records_b if record not in records_a]
    return sorted(wrong)
