"""The state that an attempt starts from: that of step 0, or that of a checkpoint, and what may differ from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from config import TrainingConfig, list_fork_settings
from utils.checkpoint import format as checkpoint
from utils.checkpoint.remote import local_checkpoint
from utils.checkpoint.weights import load_matching_weights, match_parameter_names, warn_of_changed_classes
from utils.data.changes import compare_data, compare_listings, read_file_listing, save_file_listing
from utils.data.sampler import GlobalBatchSampler
from utils.data.sets import DataSets, collect_dataset_properties
from utils.distributed.collectives import all_gather_json, broadcast_json, on_all_ranks, on_rank_0, require_equal
from utils.distributed.context import DistributedContext
from utils.run.folder import RunFolder
from utils.run.start import Attempt, share_checkpoint_with_nodes
from utils.settings.declarations import list_settings
from utils.settings.errors import UserError
from utils.settings.fields import FORK_GROUP
from utils.settings.removed import REMOVED_SETTINGS
from utils.settings.value_types import to_json_value, to_text
from utils.training.fingerprint import fingerprint_state, format_fingerprint
from utils.training.gradient_strategy import GradientStrategy
from utils.training.hooks import ModelHooks
from utils.training.parts.create import create_parts
from utils.training.parts.unsaved_parameters import complete_initial_weights
from utils.training.precision import Precision
from utils.training.state import TrainState


def create_train_state(
    hooks: ModelHooks,
    config: TrainingConfig,
    ctx: DistributedContext,
    is_resumed: bool = False,
    train_set: Any = None,
) -> TrainState:
    """Create the training state at step 0: the model, its optimizer and everything else that a checkpoint stores.

    Args:
        is_resumed: the weights will come from a checkpoint, not from `init_from`.
        train_set: its class names are compared with those of a checkpoint in `init_from`.
    """

    def build(device: torch.device) -> nn.Module:
        torch.manual_seed(config.seed)
        model = hooks.create_model(config, device)
        if config.init_from and not is_resumed and device.type != "meta":
            initial_weights = hooks.initial_weights
            weights = (
                initial_weights(config)
                if initial_weights
                else checkpoint.load_weights(local_checkpoint(config.init_from))
            )
            warn_of_changed_classes(weights, train_set, config.init_from)
            weights = match_parameter_names(weights, model.state_dict(), config.init_from)
            weights, unsaved_parameters = complete_initial_weights(weights, model, hooks.is_saved, config.init_from)
            load_matching_weights(
                model,
                weights,
                config.init_from,
                requires_all=config.eval_only,
                kept_names=unsaved_parameters,
            )
        if config.activation_checkpointing:  # extra: compile
            from utils.extras.compile.activation_checkpointing import checkpoint_activations

            checkpoint_activations(model, hooks.blocks(model))
        return model

    strategy = GradientStrategy.create(config, ctx)
    model = strategy.build_model(build, hooks.blocks)
    precision = Precision.choose(
        use_amp=config.use_amp, amp_dtype=config.amp_dtype, device=ctx.device, fast_bf16=ctx.fast_bf16
    )
    state = TrainState(model, hooks, config, precision, strategy)
    if config.compile == "reduce-overhead":  # extra: compile
        state.updater.zeroes_in_place = True  # a replay of CUDA graphs overwrites new ones
    state.parts += create_parts(hooks.parts, model, hooks.is_saved, config, ctx, precision)
    return state


def resume_run(
    attempt: Attempt,
    state: TrainState,
    sampler: GlobalBatchSampler,
    provenance: dict[str, Any],
    file_listing: bytes,
    metric_and_sign: tuple[str, int],
) -> list[str]:
    """Load the checkpoint that the run starts from, if any, rewind the folder to its step (`RunFolder.rewind`), and
    plan the schedule of the whole run from there.

    Args:
        provenance: content of provenance.json.
        file_listing: of the training set's files.
        metric_and_sign: the metric that selects the best checkpoint, and its sign, as `choose_best_metric` returns
        them.

    Returns:
        The allowed differences from the checkpoint's config.

    Raises:
        UserError: if the checkpoint does not fit this run.
    """
    run, config, ctx = attempt.run, attempt.config, attempt.ctx
    differences, progress = [], state.progress
    is_comparable = True
    best_metric = ""
    if "val" in provenance["held_out"]:
        name, sign = metric_and_sign
        best_metric = f"{'max' if sign > 0 else 'min'}:{name}"
    payload: dict[str, Any] = {}
    if run.resume_path:
        payload = load_checkpoint(run.resume_path, ctx, state.sharded_parameters())
        files = broadcast_json(
            on_rank_0(lambda: compare_listings(read_file_listing(run.folder), file_listing), ctx), ctx
        )
        differences = on_all_ranks(lambda: compare_checkpoint(payload, config, provenance, files), ctx)
        # rank 0 decides: ranks may have fetched other numbers of samples to compare
        lines, is_comparable = broadcast_json(
            on_rank_0(lambda: compare_best(payload, config, provenance, best_metric), ctx), ctx
        )
        differences += lines
        on_all_ranks(lambda: state.load_state_dict(payload), ctx)
        differences += compare_fingerprints(payload, state, ctx)
    state.plan_schedule(sampler)
    if payload:
        differences += describe_lr_jump(payload, state)
        if not is_comparable:
            progress.reset_best()
            progress.evaluated_step = -1  # so that an evaluation that is due at this step is repeated
            on_rank_0(run.checkpoint_files.copy_best, ctx)
    progress.best_metric = best_metric
    is_evaluated = not state.schedule.is_evaluation_due
    has_test = "test" in provenance["held_out"]
    on_all_ranks(lambda: run.rewind(progress.step, is_evaluated, has_test) if run.is_node_leader else None, ctx)
    if not broadcast_json(on_rank_0(lambda: run.checkpoint_files.restore_best(progress.best_step), ctx), ctx):
        progress.reset_best()
    on_rank_0(lambda: save_file_listing(file_listing, run.folder), ctx)
    on_all_ranks(run.mark_training, ctx)
    return differences


def load_checkpoint(path: Path, ctx: DistributedContext, sharded: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Load the checkpoint on every rank. The ranks of a node verify it together; if it is damaged or differs, all raise
    UserError.

    sharded: of a sharded model (`TrainState.sharded_parameters`): only this rank's shards of these tensors are read.
    """
    files = all_gather_json([ctx.host, *(path.stat()[1:3] if path.exists() else ())], ctx)  # inode and device
    readers = [rank for rank, file in enumerate(files) if file == files[ctx.rank]]
    reader_and_count = readers.index(ctx.rank), len(readers)
    trailer = on_all_ranks(lambda: checkpoint.verify_checkpoint(path, reader_and_count), ctx)
    remedy = "put the run folder on storage that all nodes share"
    require_equal(
        trailer.checksum, f"{path}: {{other}} and {{first}} see different files under this name; {remedy}", ctx
    )
    return on_all_ranks(lambda: checkpoint.read_checkpoint(path, trailer, sharded)[0], ctx)


def load_best_checkpoint(run: RunFolder, state: TrainState, ctx: DistributedContext) -> dict[str, Any] | None:
    """The best checkpoint, with this rank's shards; None if there is none. Collective."""
    best = run.checkpoint_folder / checkpoint.BEST_NAME
    if not broadcast_json(best.exists(), ctx):
        return None
    return load_checkpoint(share_checkpoint_with_nodes(best, run, ctx), ctx, state.sharded_parameters())


SETTING_DIFFERS = "{name}={here}: the checkpoint has {name}={before}"
SETTING_DELETED = "{name}: the checkpoint has {name}={before}, and this fork has no such flag (docs/extras.md)"


class ComparedValue(NamedTuple):
    """A value that a checkpoint and the run that continues from it have. A difference is rejected or logged."""

    name: str
    saved: Any
    current: Any
    resume_rule: str  # must it be the same, "may" it change, or is it "free"
    message: str = SETTING_DIFFERS  # that says the difference


def list_compared_settings(payload: dict[str, Any], config: TrainingConfig) -> list[ComparedValue]:
    """A row for each field, also for those that this fork has deleted and the checkpoint has."""
    saved = payload["config"]
    current = config.to_json()
    rows = []
    for setting in list_settings(type(config)):
        before = saved.get(setting.name, to_json_value(setting.resolved_default))
        rows.append(ComparedValue(setting.name, before, current[setting.name], setting.resume))
    for name, removed in REMOVED_SETTINGS.items():
        line = removed.describe_ignored(name, "{before} of the checkpoint")
        rows.append(ComparedValue(name, saved.get(name, removed.default), removed.default, "may", line))
    fields = payload["provenance"].get("fields", {}).items()
    row_names = {row.name for row in rows}
    deleted_fields = [(name, *field) for name, field in fields if name not in row_names and name in saved]
    return rows + [
        ComparedValue(name, saved[name], default, resume, SETTING_DELETED) for name, default, resume in deleted_fields
    ]


def list_compared_values(
    payload: dict[str, Any], config: TrainingConfig, provenance: dict[str, Any]
) -> list[ComparedValue]:
    """All that is compared but the data. provenance: as for `compare_checkpoint`."""
    before = payload["provenance"]
    is_packed = "lengths" in before  # a position is that of a step
    size = "global batch: {here} samples per optimizer step, the checkpoint has {before}"
    size = size.replace("samples", "tokens") if is_packed and config.micro_batch[0] != "batch_size" else size
    lengths = "lengths: those of the training samples are not the checkpoint's, so they would be packed otherwise"
    precision = "precision: {here}, the checkpoint was made in {before}"
    rules = {
        "mean": ("must", SETTING_DIFFERS),
        "std": ("must", SETTING_DIFFERS),
        "lengths": ("must" if is_packed and "lengths" in provenance else "free", lengths),
        "global_batch_size": ("must" if config.global_batch_size or is_packed else "may", size),
        "precision": ("may", precision),
    }
    if config.reduction == "exact":  # extra: exact
        from utils.extras.exact.reduction import list_exact_resume_rules

        rules |= list_exact_resume_rules(payload)
    rows = [ComparedValue(name, before.get(name), provenance.get(name), *rule) for name, rule in rules.items()]
    return [*list_compared_settings(payload, config), *rows]


def describe_differences(rows: Iterable[ComparedValue], resume_rule: str) -> list[str]:
    """A line for each row with this resume rule whose values differ."""
    lines = []
    for row in rows:
        if row.resume_rule == resume_rule and row.saved != row.current:
            lines.append(row.message.format(name=row.name, before=to_text(row.saved), here=to_text(row.current)))
    return lines


def compare_checkpoint(
    payload: dict[str, Any],
    config: TrainingConfig,
    provenance: dict[str, Any],
    file_changes: dict[str, Any] | None = None,
) -> list[str]:
    """The allowed differences, one line each: with any of them the run is not the same as an uninterrupted one.

    Args:
        payload: the checkpoint.
        config: resolved, of the resumed run.
        provenance: its provenance.
        file_changes: of `compare_listings`.

    Raises:
        UserError: if values differ that must not, with all of them.
    """
    check_removed_settings(payload["config"], config)
    before, rows = payload["provenance"], list_compared_values(payload, config, provenance)
    fork_settings = {setting.name for setting in list_fork_settings()}
    is_same_code = all(before.get(name) == provenance.get(name) for name in ("code", "versions"))
    # with other values of a fork's settings, transforms may differ
    is_same_code &= all(row.saved == row.current for row in rows if row.name in fork_settings)
    line, is_other = compare_data(before, provenance, file_changes or {}, is_same_code)
    wrong, may = (describe_differences(rows, resume) for resume in ("must", "may"))
    (wrong if is_other else may).extend([line] if line else [])
    if wrong:
        remedy = "resume_from: these must match; give them as they were, or start a new run with --init_from"
        raise UserError("\n".join([*wrong, remedy]))
    return may


def check_removed_settings(saved: dict[str, Any], config: TrainingConfig) -> None:
    """Raises UserError if the checkpoint's run had a removed setting, and this one lacks what takes its place."""
    for name, removed in REMOVED_SETTINGS.items():
        value = saved.get(name, removed.default)
        if removed.required_setting and value != removed.default and not getattr(config, removed.required_setting):
            text = f"resume_from: the run was started with --{name} {value:g}, which was removed."
            raise UserError(f"{text} Add --{removed.required_setting} {saved[removed.required_setting]}.")


def check_evaluation(payload: dict[str, Any], config: TrainingConfig) -> None:
    """Raises UserError if the model or the kind of data differs from the checkpoint's."""
    compared = {setting.name for setting in list_settings(type(config)) if setting.group in (FORK_GROUP, "data")}
    wrong = describe_differences(
        [row for row in list_compared_settings(payload, config) if row.name in compared], "must"
    )
    if wrong:
        remedy = f"eval_only: these must match; give --config {payload['config']['run_dir']}/config.json"
        raise UserError("\n".join([*wrong, remedy]))


def compare_evaluation_data(payload: dict[str, Any], config: TrainingConfig, split: str, sets: DataSets) -> list[str]:
    """A line for each thing that has changed since the checkpoint in the samples of a split, or in what describes them.

    Raises:
        UserError: if they are others, although the seed, the data folder and all fields of yours are the checkpoint's.
    """
    saved, provenance = payload["config"], payload["provenance"]
    described = collect_dataset_properties(sets.train)
    before = {"train": provenance} | provenance.get("held_out", {})
    current = {"train": described | sets.provenance} | sets.provenance["held_out"]
    if split not in before or split not in current:
        return []
    here_as_saved = config.to_json()
    names = ("seed", "data_dir", "dataset_size", *(setting.name for setting in list_fork_settings()))
    is_same = all(saved.get(name) == here_as_saved[name] for name in names)
    line, is_other = compare_data(before[split], current[split], {}, is_same, split)
    changed = describe_differences(
        [ComparedValue(name, provenance.get(name), described[name], "must") for name in ("mean", "std")], "must"
    )
    numbers = {data[split]["identity"].partition(" ")[0] for data in (before, current)}
    lines = changed + [line] * bool(line)
    if is_same and len(numbers) == 1 and (is_other or changed):
        remedy = (
            f"data_dir={config.data_dir}: restore the data and the code that reads it (sort what is made from a set)"
        )
        raise UserError("\n".join([*lines, remedy]))
    return lines


def compare_best(
    payload: dict[str, Any], config: TrainingConfig, provenance: dict[str, Any], best_metric: str
) -> tuple[list[str], bool]:
    """Compare what selects the best checkpoint with that of the checkpoint: the metric, the kind of weights, and the
    validation set.

    Args:
        provenance: of this run.
        best_metric: of this run, with its direction: max:top1; empty without a validation set.

    Returns:
        A line for each change that no setting shows, and whether the best value so far still counts.
    """
    progress = payload["progress"]
    changes = compare_held_out(payload["provenance"], provenance)
    lines = list(changes.values())
    is_same_metric = progress.get("best_metric") == best_metric
    if "best_metric" not in progress:  # of an earlier version
        is_same_metric = payload["config"].get("best_metric") == config.best_metric != "auto"
    elif not is_same_metric and "val" not in changes:
        lines.append(
            f"the best checkpoint is selected by {best_metric}, in the checkpoint by {progress['best_metric']}"
        )
    is_averaged = bool(config.ema_decay)
    is_comparable = is_same_metric and "val" not in changes and bool(payload["ema"]) == is_averaged
    if progress.get("best_value") is not None and not is_comparable:
        lines.append("the best value so far no longer counts: the best checkpoint and patience start again")
    return lines, is_comparable


def compare_held_out(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, str]:
    """How the held-out sets differ from those of a checkpoint: a line by split. saved, current: provenances."""
    old, new = saved.get("held_out", current["held_out"]), current["held_out"]  # earlier versions did not save them
    changes: dict[str, str] = {}
    for split in sorted(old | new):
        if split not in old:
            changes[split] = f"the {split} set is new: the checkpoint was made without one"
        elif split not in new:
            changes[split] = f"the {split} set is gone: the checkpoint was made with one"
        elif line := compare_data(old[split], new[split], {}, False, split)[0]:
            changes[split] = line
    return changes


def compare_fingerprints(payload: dict[str, Any], state: TrainState, ctx: DistributedContext) -> list[str]:
    """A line if a rank has loaded a state of another fingerprint than the checkpoint's. Collective."""
    saved = payload["provenance"].get("fingerprint")
    fingerprints = all_gather_json(format_fingerprint(int(fingerprint_state(state))), ctx)
    return [
        f"the state that rank {rank} on {ctx.hosts[rank]} has loaded: its fingerprint is {bits}, that of the checkpoint"
        f" {saved}; look for faulty memory, or an optimizer that converts what it loads"
        for rank, bits in enumerate(fingerprints)
        if saved not in (None, bits)
    ][:1]


def describe_lr_jump(payload: dict[str, Any], state: TrainState) -> list[str]:
    """A line if a group's learning rate of the last step would be different under this run's settings."""
    step = state.progress.step - 1
    if step < 0:
        return []
    factors = state.compute_lr_factors(step, copy.deepcopy(state.progress))
    groups = zip(payload["optimizer"]["param_groups"], state.optimizer.param_groups, factors, strict=False)
    for saved, group, factor in groups:
        before, base = saved["lr"], group["base_lr"]
        now = base * factor
        if not math.isclose(before, now, rel_tol=1e-3, abs_tol=1e-6 * base):
            return [f"the learning rate of step {step + 1} was {before:.3g} and would be {now:.3g} now: it jumps there"]
    return []
