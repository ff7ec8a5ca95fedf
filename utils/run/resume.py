"""Claiming a run folder, and resuming: what may differ between a checkpoint and the run that continues from it."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import math
import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from config import YOURS, TrainingConfig, UserError, fields_of_yours
from utils.checkpoint import format as checkpoint
from utils.data.sampler import GlobalBatchSampler
from utils.data.sets import DataSets, describe
from utils.data.sketches import are_alike
from utils.distributed.collectives import (
    all_gather_json,
    broadcast_json,
    on_all_ranks,
    on_rank_0,
    require_equal,
)
from utils.distributed.context import DistributedContext
from utils.files import replace_file
from utils.run.apart import own_folder, share
from utils.run.attempt import Attempt
from utils.run.claim import Start, claim, plan_of
from utils.run.companions import Companions
from utils.run.folder import Run
from utils.run.lock import KILLED
from utils.run.start_checks import check_shared
from utils.training.fingerprint import fingerprint, shown
from utils.training.schedule import Progress
from utils.training.state import TrainState

MAX_FAILURES = 3  # attempts in a row that get no further, before the run is stopped
FILES = "training_files.gz"  # in the run folder: their listing when the latest attempt began
MAX_NAMES = 20
MAX_OF_FILES, MAX_OF_SAMPLES = 0.01, 0.5  # fractions that may differ from the checkpoint's; one file always may


def claim_run(config: TrainingConfig, ctx: DistributedContext) -> Run:
    """The run in its folder. Rank 0 locks it and decides whether to continue the run in it. Raises UserError."""
    claimed = on_rank_0(lambda: claim(config, ctx.host, ctx.launch.id, ctx.launch.may_restart), ctx)
    lock, start = claimed or (None, None)
    start = Start(**broadcast_json(dataclasses.asdict(start) if start else None, ctx))
    if config.mirror:
        apart, own_lock = own_folder(config, start, ctx)
        start, lock = dataclasses.replace(start, apart=apart), lock or own_lock
    companions = None
    if lock and not start.is_completed:
        more = {"apart": start.apart, "resume_from": start.resume_from, "decision": start.decision}
        plan = plan_of(config, ctx.rank, ctx.host, start.token, start.launch_id, **more)
        companions = Companions(config, plan, ctx)
    run = Run(config.run_folder, config.checkpoint_folder, ctx.rank, ctx.hosts, start, lock, companions)
    try:
        if run.resume_path and run.resume_path.parent == run.checkpoints:
            share(run.resume_path, run, ctx)
        if not start.is_completed:
            check_shared(run.folder, run.lock_file, start.token, ctx)
    except BaseException:
        run.end_companions()
        raise
    return run


def resume_run(
    attempt: Attempt,
    state: TrainState,
    sampler: GlobalBatchSampler,
    origin: dict[str, Any],
    listing: bytes,
    has_test: bool,
) -> list[str]:
    """Load the checkpoint that the run starts from, if any, rewind the folder to its step (`Run.rewind`), and plan the
    schedule of the whole run from there.

    origin: content of provenance.json. listing: of the training set's files.

    Returns:
        The allowed differences from the checkpoint's config.

    Raises:
        UserError: also if the last attempts got no further than those before.
    """
    run, config, ctx = attempt.run, attempt.config, attempt.ctx
    differences, progress = [], state.progress
    payload: dict[str, Any] = {}
    if run.resume_path:
        payload = load_checkpoint(run.resume_path, ctx, state.layouts())
        files = on_rank_0(lambda: changed_files(_read(run.folder), listing), ctx)
        files = broadcast_json(files, ctx)
        differences = on_all_ranks(lambda: compare(payload, config, origin, files), ctx)
        on_all_ranks(lambda: state.load_state_dict(payload), ctx)
        differences += changed_bits(payload, state, ctx)
    state.plan(sampler)
    if payload:
        differences += lr_jump(payload, state)
        if is_other_best(payload, config):
            progress.forget_best()
    if len(run.start.failures) >= MAX_FAILURES:
        on_rank_0(lambda: run.mark_training(has_diagnosed=True), ctx)
        raise UserError(diagnosis(run.start.failures, progress, sampler), 0, ctx.hosts[0], is_final=True)
    is_evaluated = progress.evaluated_step == progress.step
    on_all_ranks(lambda: run.rewind(progress.step, is_evaluated, has_test) if run.leads_node else None, ctx)
    if not broadcast_json(on_rank_0(lambda: run.restore_best(progress.best_step), ctx), ctx):
        progress.forget_best()
    on_rank_0(lambda: _keep(listing, run.folder), ctx)
    on_all_ranks(run.mark_training, ctx)
    return differences


def load_checkpoint(path: Path, ctx: DistributedContext, layouts: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Load the checkpoint on every rank. The ranks of a node verify it together; if it is damaged or differs, all raise
    UserError.

    layouts: of a sharded model (`TrainState.layouts`): only this rank's shards of these tensors are read.
    """
    files = all_gather_json([ctx.host, *(path.stat()[1:3] if path.exists() else ())], ctx)  # inode and device
    readers = [rank for rank, file in enumerate(files) if file == files[ctx.rank]]
    part = readers.index(ctx.rank), len(readers)
    trailer = on_all_ranks(lambda: checkpoint.verify(path, part), ctx)
    remedy = "put the run folder on storage that all nodes share"
    require_equal(trailer.digest, f"{path}: {{other}} and {{first}} see different files under this name; {remedy}", ctx)
    return on_all_ranks(lambda: checkpoint.read(path, trailer, layouts)[0], ctx)


def load_best(run: Run, state: TrainState, ctx: DistributedContext) -> dict[str, Any] | None:
    """The best checkpoint, with this rank's shards; None if there is none. Collective."""
    best = run.checkpoints / checkpoint.BEST
    if not broadcast_json(best.exists(), ctx):
        return None
    return load_checkpoint(share(best, run, ctx), ctx, state.layouts())


def check_evaluation(payload: dict[str, Any], config: TrainingConfig) -> None:
    """Raises UserError if the model or the kind of data differs from the checkpoint's."""
    saved = payload["config"]
    wrong = [
        f"{field.name}={getattr(config, field.name)}: the checkpoint has"
        f" {field.name}={saved.get(field.name, field.default)}"
        for field in dataclasses.fields(config)
        if field.metadata["group"] in (YOURS, "data")
        and field.metadata["resume"] == "must"
        and getattr(config, field.name) != saved.get(field.name, field.default)
    ]
    if wrong:
        raise UserError(
            "\n".join([*wrong, f"eval_only: these must match; give --config {saved['run_dir']}/config.json"])
        )


def compare_evaluated(payload: dict[str, Any], config: TrainingConfig, split: str, sets: DataSets) -> list[str]:
    """A line for each thing that has changed since the checkpoint in the samples of a split, or in what describes them.

    Raises:
        UserError: if they are others, although the seed, the data folder and all fields of yours are the checkpoint's.
    """
    saved, provenance = payload["config"], payload["provenance"]
    described = describe(sets.train)
    before = {"train": provenance} | provenance.get("held_out", {})
    here = {"train": described | sets.content} | sets.content["held_out"]
    if split not in before or split not in here:
        return []
    names = ("seed", "data_dir", "dataset_size", *(field.name for field in fields_of_yours()))
    is_same = all(saved.get(name) == getattr(config, name) for name in names)
    line, is_other = compare_data(before[split], here[split], {}, is_same, split)
    changed = [name for name in ("mean", "std") if provenance.get(name) != described[name]]
    lines = [f"{name}={described[name]}: the checkpoint has {name}={provenance.get(name)}" for name in changed]
    numbers = {each[split]["identity"].partition(" ")[0] for each in (before, here)}
    lines += [line] * bool(line)
    if is_same and len(numbers) == 1 and (is_other or changed):
        remedy = (
            f"data_dir={config.data_dir}: restore the data and the code that reads it (sort what is made from a set)"
        )
        raise UserError("\n".join([*lines, remedy]))
    return lines


def is_other_best(payload: dict[str, Any], config: TrainingConfig) -> bool:
    """Whether the best checkpoint is now selected by another metric or other weights than in the checkpoint."""
    return payload["config"].get("best_metric") != config.best_metric or bool(payload["ema"]) != bool(config.ema_decay)


def compare(
    payload: dict[str, Any], config: TrainingConfig, origin: dict[str, Any], files: dict[str, Any] | None = None
) -> list[str]:
    """The allowed differences, one line each: with any of them the run is not the same as an uninterrupted one.

    Args:
        payload: the checkpoint.
        config: resolved, of the resumed run.
        origin: its provenance.
        files: of `changed_files`.

    Raises:
        UserError: if fields differ that must not, with all of them.
    """
    saved, provenance = payload["config"], payload["provenance"]
    wrong: list[str] = []
    may: list[str] = []
    for field in dataclasses.fields(config):
        before, here = saved.get(field.name, field.default), getattr(config, field.name)
        if before == here or field.metadata["resume"] == "free":
            continue
        line = f"{field.name}={here}: the checkpoint has {field.name}={before}"
        (wrong if field.metadata["resume"] == "must" else may).append(line)
    yours = [(saved.get(field.name, field.default), getattr(config, field.name)) for field in fields_of_yours()]
    yours += [(provenance.get(name), origin.get(name)) for name in ("code", "versions")]
    is_same_code = all(before == here for before, here in yours)  # else the transforms may have changed
    line, is_other = compare_data(provenance, origin, files or {}, is_same_code)
    (wrong if is_other else may).extend([line] if line else [])
    changed = [name for name in ("mean", "std") if provenance.get(name) != origin.get(name)]
    wrong += [f"{name}={origin.get(name)}: the checkpoint has {name}={provenance.get(name)}" for name in changed]
    before, here = provenance["global_batch_size"], origin["global_batch_size"]
    if before != here:
        line = f"global batch: {here} samples per optimizer step, the checkpoint has {before}"
        (wrong if config.global_batch_size else may).append(line)
    before, here = provenance.get("precision"), origin.get("precision")
    if before != here:
        may.append(f"precision: {here}, the checkpoint was made in {before}")
    before, here = provenance.get("cpu_threads"), origin["cpu_threads"]
    if before != here and config.reduction == saved.get("reduction") == "exact":
        wrong.append(f"OMP_NUM_THREADS={here}: with reduction=exact it must be as in the checkpoint, {before}")
    if provenance.get("exact_sums") != origin["exact_sums"] and config.reduction == saved.get("reduction") == "exact":
        may.append("reduction=exact: this version sums in another order than the checkpoint's; the bits change")
    if wrong:
        remedy = "resume_from: these must match; give them as they were, or start a new run with --init_from"
        raise UserError("\n".join([*wrong, remedy]))
    return may


def compare_data(
    before: dict[str, Any], here: dict[str, Any], files: dict[str, Any], is_same_code: bool, split: str = "training"
) -> tuple[str, bool]:
    """What has changed in a set, in one line or none, and whether it is another data set."""
    names = {kind: ", ".join(files.get(kind, [])) for kind in ("missing", "new", "resized")}
    if before["identity"] != here["identity"]:
        text = f"the {split} set differs from the checkpoint's (names, number or labels)"
        text += f"; new: {names['new']}" if names["new"] else ""
        remedy = "put them back, or readable copies of other images under these names"
        return text + (f"; missing: {names['missing']}: {remedy}" if names["missing"] else ""), True
    if before["content"] != here["content"]:
        text, (number, total) = f"{split} files of another size than in the checkpoint", files.get("count", (0, 0))
        if not number:
            return f"{text}, of unknown names: the run folder has no list of that time", False
        return f"{text}: {number:,} of {total:,} ({names['resized']})", number > max(1, MAX_OF_FILES * total)
    pairs = [pair for pair in zip(before["sketches"], here["sketches"], strict=False) if None not in pair]
    number = sum(not are_alike([one], [other]) for one, other in pairs)
    text = f"{split} samples that differ from the checkpoint's: {number} of {len(pairs)} that are compared"
    return text if number else "", is_same_code and number > MAX_OF_SAMPLES * len(pairs)


def changed_files(before: bytes, here: bytes) -> dict[str, Any]:
    """How the files in two listings differ, with up to 20 names of each kind."""
    if not before or before == here:
        return {}
    old, new = (dict(row.rpartition(b" ")[::2] for row in each.split(b"\0")[1:-1]) for each in (before, here))
    resized = [name for name, size in old.items() if new.get(name, size) != size]
    kinds = {"missing": old.keys() - new.keys(), "new": new.keys() - old.keys(), "resized": resized}
    some = {kind: [*sorted(names)[:MAX_NAMES], *[b"..."] * (len(names) > MAX_NAMES)] for kind, names in kinds.items()}
    shown = {kind: [name.decode(errors="replace") for name in names] for kind, names in some.items()}
    return shown | {"count": (len(resized), len(old))}


def _read(folder: Path) -> bytes:
    try:
        return gzip.decompress((folder / FILES).read_bytes())
    except (OSError, EOFError, zlib.error):  # missing or damaged
        return b""


def _keep(listing: bytes, folder: Path) -> None:
    if listing and listing != _read(folder):
        replace_file(folder / FILES, lambda file: file.write(gzip.compress(listing, compresslevel=1, mtime=0)))


def changed_bits(payload: dict[str, Any], state: TrainState, ctx: DistributedContext) -> list[str]:
    """A line if a rank has loaded a state of another fingerprint than the checkpoint's. Collective."""
    saved, found = payload["provenance"].get("fingerprint"), all_gather_json(shown(int(fingerprint(state))), ctx)
    return [
        f"the state that rank {rank} on {ctx.hosts[rank]} has loaded: its fingerprint is {each}, that of the checkpoint"
        f" {saved}; look for faulty memory, or an optimizer that converts what it loads"
        for rank, each in enumerate(found)
        if saved not in (None, each)
    ][:1]


def lr_jump(payload: dict[str, Any], state: TrainState) -> list[str]:
    """A line if a group's learning rate of the last step would be different under this run's settings."""
    step = state.progress.step - 1
    if step < 0:
        return []
    factors = state.factors_at(step, copy.deepcopy(state.progress))
    groups = zip(payload["optimizer"]["param_groups"], state.optimizer.param_groups, factors, strict=False)
    for saved, group, factor in groups:
        before, base = saved["lr"], group["base_lr"]
        now = base * factor
        if not math.isclose(before, now, rel_tol=1e-3, abs_tol=1e-6 * base):
            return [f"the learning rate of step {step + 1} was {before:.3g} and would be {now:.3g} now: it jumps there"]
    return []


def diagnosis(failures: list[dict[str, Any]], progress: Progress, sampler: GlobalBatchSampler) -> str:
    """The error message for a run that gets no further, with the samples of the step that fails."""
    step, size = max(each["step"] for each in failures) + 1, sampler.global_batch_size
    first = progress.samples_in_epoch + (step - progress.step - 1) * size
    indices = sampler.order(progress.epoch)[max(0, first) : first + size].tolist()[:32]
    if KILLED in failures[-1]["error"]:
        indices = []
    which = f" (epoch {progress.epoch + 1}, samples {indices})" if indices else ""
    return (
        f"the last {len(failures)} attempts did not complete step {step}{which}, the last one failed with:"
        f" {failures[-1]['error']}; fix that and start again: there are {MAX_FAILURES} more attempts"
    )
