# extra: verify
"""Checks of short runs of train.train: the samples they trained on, the ranks' weights, the checkpoints."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import torch

from config import TrainingConfig
from lib.values import ROUNDING, TIMES, comparable, digest, first_three, leaves, plural
from lib.verify.data_checks import compare_continued
from lib.verify.fork import ACCUMULATION, Broken, Fork, as_rank
from lib.verify.loss_checks import one_pass
from lib.verify.memory import forgotten
from lib.verify.model_notes import look_at_statistics
from lib.verify.result import notes_last
from train import Training
from utils.checkpoint import format as checkpoint
from utils.distributed.collectives import all_gather_json
from utils.distributed.dtensor import is_sharded, local_shard
from utils.training.parts.unsaved import KEY, fill_in_unsaved

KEEP = "keep it in a buffer (register_buffer), in the optimizer's state or in progress.user"


def training(fork: Fork) -> str:
    """Two epochs of training visit each sample once per epoch, according to the indices in the batches."""

    def note_loss(training: Training) -> None:
        if any(map(is_sharded, training.state.model.parameters())):
            fork.sharded_loss = fork.sample_loss(training.state.model, fork.ctx.device)

    # changes of the data sets in workers would not be seen
    fork.short_run("whole", save_every_steps=1, at_end=note_loss, num_workers=0)
    count, progress = len(fork.small_train_set()), fork.trainings["whole"].state.progress
    seen: dict[int, list[int]] = {1: [], 2: []}
    for file in fork.trainings["whole"].attempt.run.folder.glob("samples/rank*.jsonl"):
        for record in map(json.loads, file.read_text().splitlines()):
            seen.setdefault(record["epoch"], []).extend(record["indices"])
    for epoch, indices in seen.items():
        if sorted(indices) != list(range(count)):
            coverage = f"{len(set(indices))} of {count} samples in {len(indices)} visits"
            raise Broken(f"epoch {epoch} trained on {coverage}: a custom training loop or loader; see train_one_epoch")
    _, noted = fork.divided([partial(check_fixed, fork), partial(look_at_statistics, fork)])
    return f"2 epochs of {plural(count, 'sample')} in {progress.step} steps: each sample once per epoch{noted}"


def check_fixed(fork: Fork) -> str:
    """Raises Broken if a forward pass changes parameters by its data, which differ between ranks."""
    parameters_a, parameters_b = (one_pass(fork, backward_seed=None, first=first).parameters for first in (0, 2))
    if changed := [name for name in parameters_a if parameters_a[name] != parameters_b[name]]:
        raise Broken(
            f"{first_three(changed)}: a forward pass changes it by its batch, so that ranks would differ; change"
            " parameters only through gradients"
        )
    return ""


def weights(fork: Fork) -> str:
    """After training, weights, statistics, averages and optimizer state are bitwise equal on all their ranks."""
    state, local_digests = whole_run(fork).state, {}
    for name, leaf in leaves(comparable(state.state_dict())).items():
        shard = f" (shard {leaf.device_mesh.get_local_rank('shards')})" if is_sharded(leaf) else ""
        local_digests[name + shard] = digest(local_shard(leaf))
    rank_digests = all_gather_json(local_digests, fork.ctx)
    holders: dict[str, list[tuple[int, str]]] = {}
    for rank, tensors in enumerate(rank_digests):
        for name, value in tensors.items():
            holders.setdefault(name, []).append((rank, value))
        if wrong := [name for name, value in tensors.items() if holders[name][0][1] != value]:
            raise Broken(
                f"{first_three(wrong)}: rank {rank} differs from rank {holders[wrong[0]][0][0]}: changed outside the"
                " optimizer, or by rank; change parameters only through gradients, and all-reduce other state"
            )
    shared = sum(len(ranks) > 1 for ranks in holders.values())
    in_shards = f", {len(holders) - shared} shards" if len(holders) > shared > 0 else ""
    tensors = len(holders) if len(rank_digests) == 1 else shared
    ranks = plural(len(rank_digests), "rank")
    return f"{tensors} tensors identical on {ranks}{in_shards}, after {state.progress.step} steps"


def resume(fork: Fork) -> str:
    """A run resumed from a checkpoint in its first epoch ends bitwise equal to the uninterrupted run, and no value that
    changes while training is missing in checkpoints."""
    whole = whole_run(fork)
    first, *later_paths = checkpoint.step_checkpoints(whole.attempt.run.checkpoints)
    fork.short_run("resumed", resume_from=str(first), num_workers=1)
    # rank 0 alone lists the checkpoints: `compare_continued` adds one for a moment
    different = fork.divided([partial(differences, fork, "whole", "resumed")])[0]
    if different:
        fork.short_run("again", save_every_steps=1)
        if fork.divided([partial(differences, fork, "whole", "again")])[0]:
            cause = (
                "two uninterrupted runs differ too: unkeyed random numbers, or state kept between runs; use utils.rng"
            )
        else:
            lost, _ = forgotten_in(fork, "resumed")
            cause = f"state outside the checkpoint{''.join(f' ({item})' for item in lost[:1])}; {KEEP}"
        raise Broken(f"{first_three(different)}: resumed and uninterrupted runs differ: {cause}")
    notes = fork.divided([partial(compare_continued, fork)])
    if later_paths:
        notes.append(check_memory(fork, [first, *later_paths][-2]))
    else:
        notes.append("; not checked: what a run remembers, since it has a single checkpoint")
    steps = whole.state.progress.step
    return f"{first.name} resumed, {steps} steps in total: bitwise equal to the uninterrupted run{notes_last(*notes)}"


def check_memory(fork: Fork, checkpoint_before_the_last: Path) -> str:
    """Raises Broken if a value that changes while training is not in a checkpoint, although results are still the same:
    a counter that has an effect after a thousand steps."""
    fork.start.put_back()  # as in a new process
    fork.short_run("late", resume_from=str(checkpoint_before_the_last), num_workers=0)

    def check() -> str:
        lost, caches = forgotten_in(fork, "late")
        if lost:
            and_more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise Broken(f"{lost[0]}{and_more}: it changes while training, and is not in a checkpoint; {KEEP}")
        return f"; please check: {first_three(caches)}: filled while training, empty after a resume" if caches else ""

    return fork.on_all(check)


def forgotten_in(fork: Fork, name: str) -> tuple[list[str], list[str]]:
    """What the resumed run of this name has lost, and caches; none if it had no step left."""
    whole, resumed = fork.remembered["whole"], fork.remembered[name]
    return forgotten(whole[0], whole[-1], resumed[-1]) if resumed else ([], [])


def reduction(fork: Fork) -> str:
    """With --reduction exact a single process gives the bits of all ranks, after one step and after the run."""
    whole, size = whole_run(fork), fork.small_config.batch_size * ACCUMULATION * fork.ctx.world_size
    fork.short_run("alone", is_alone=True, save_every_steps=1, global_batch_size=size, grad_accum_steps=1)

    def check() -> str:
        steps = whole.state.progress.step
        for number, moment in ((0, "step 1"), (-1, f"step {steps}")):
            if different := differences(fork, "whole", "alone", number):
                raise Broken(
                    f"{first_three(different)}: after {moment} a single process has other bits than"
                    f" {plural(fork.ctx.world_size, 'rank')}: something depends on the rank, on what a process computed"
                    " before, or on its memory; remove it, or use --reduction fast"
                )
        return f"a single process gives the same bits as {plural(fork.ctx.world_size, 'rank')}, in {steps} steps"

    return fork.divided([check])[0]


def plain_load(fork: Fork) -> str:
    """A checkpoint loads into a new model in a single process, and gives the same loss."""
    whole = whole_run(fork)
    path = checkpoint.step_checkpoints(whole.attempt.run.checkpoints)[-1]

    def check() -> str:
        has_shards = path.is_dir()  # its kernels ran on the device, in another memory format
        device = fork.ctx.device if has_shards else torch.device("cpu")
        with as_rank():
            expected = fork.sharded_loss if has_shards else fork.sample_loss(whole.state.model.cpu(), device)
            saved = checkpoint.read(path)[0] if has_shards else torch.load(path, map_location="cpu", weights_only=True)
            torch.manual_seed(fork.config.seed)
            loaded = fork.hooks.create_model(TrainingConfig(**saved["config"]), device)
            weights = saved["model"]
            weights = fill_in_unsaved(weights, saved["provenance"].get(KEY, {}), loaded, {}, "the checkpoint")
            loaded.load_state_dict(weights)
            loss = fork.sample_loss(loaded, device)
        if not math.isclose(loss, expected, rel_tol=ROUNDING[fork.loss_dtype] if has_shards else 0):
            raise Broken(
                f"the loaded model's loss is {loss:.6g} instead of {expected:.6g}: learned state is missing from"
                " state_dict(); keep it in a parameter or persistent buffer"
            )
        if has_shards:
            return "the shards are read in one process, with the same loss up to rounding"
        return "opens with weights_only=True in one process, with a bitwise equal loss"

    return fork.divided([check])[0]


def whole_run(fork: Fork) -> Training:
    if "whole" not in fork.trainings:
        raise Broken("skipped: no training finished; fix that first")
    return fork.trainings["whole"]


def differences(fork: Fork, a: str, b: str, number: int = -1) -> list[str]:
    """Where checkpoints of two runs differ (by default the last ones), and the records of b that a lacks."""
    runs = [fork.trainings[name].attempt.run for name in (a, b)]
    payloads = [checkpoint.read(checkpoint.step_checkpoints(run.checkpoints)[number])[0] for run in runs]
    of_a, of_b = (leaves(comparable(payload)) for payload in payloads)
    wrong = [name for name in of_a.keys() | of_b if digest(of_a.get(name)) != digest(of_b.get(name))]
    for kind in ("train", "eval"):
        of_a, of_b = ([{k: v for k, v in r.items() if k not in TIMES} for r in run.read_records(kind)] for run in runs)
        wrong += [f"the {kind} record of step {record['step']}" for record in of_b if record not in of_a]
    return sorted(wrong)
