"""The state that an attempt starts from: that of step 0, or that of a checkpoint, and what may differ from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
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
from utils.metrics import BestMetric
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
from utils.training.schedule import Progress
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
            _load_initial_weights(model, hooks, config, train_set=train_set)
        if config.activation_checkpointing:  # extra: compile
            from utils.extras.compile.activation_checkpointing import checkpoint_activations

            checkpoint_activations(model, hooks.blocks(model))
        return model

    strategy = GradientStrategy.create(config, ctx)
    model = strategy.build_model(build, hooks.blocks)
    precision = Precision.choose(
        use_amp=config.use_amp,
        amp_dtype=config.amp_dtype,
        device=ctx.device,
        fast_bf16=ctx.fast_bf16,
    )
    state = TrainState(model, hooks, config, precision=precision, strategy=strategy)
    if config.compile == "reduce-overhead":  # extra: compile
        state.updater.zeroes_in_place = True  # a replay of CUDA graphs overwrites new ones
    state.parts += create_parts(
        hooks.parts,
        model=model,
        is_saved=hooks.is_saved,
        config=config,
        ctx=ctx,
        precision=precision,
    )
    return state


def _load_initial_weights(model: nn.Module, hooks: ModelHooks, config: TrainingConfig, train_set: Any) -> None:
    """Load the weights of `init_from` into a new model."""
    source = config.init_from
    if hooks.initial_weights:
        weights = hooks.initial_weights(config)
    else:
        weights = checkpoint.load_weights(local_checkpoint(source))
    warn_of_changed_classes(weights, train_set, source)
    weights = match_parameter_names(weights, model.state_dict(), source)
    weights, unsaved_parameters = complete_initial_weights(
        weights,
        model=model,
        is_saved=hooks.is_saved,
        source=source,
    )
    load_matching_weights(
        model,
        weights,
        source,
        requires_all=config.eval_only,
        kept_names=unsaved_parameters,
    )


def resume_run(
    attempt: Attempt,
    state: TrainState,
    sampler: GlobalBatchSampler,
    provenance: dict[str, Any],
    file_listing: bytes,
    best_metric: BestMetric,
) -> list[str]:
    """Load the checkpoint that the run starts from, if any, and plan the schedule of the whole run from there.

    The folder is rewound to that step (`RunFolder.rewind`).

    Args:
        provenance: content of provenance.json.
        file_listing: of the training set's files.
        best_metric: the metric that selects the best checkpoint, if there is a validation set.

    Returns:
        The allowed differences from the checkpoint's config.

    Raises:
        UserError: if the checkpoint does not fit this run.
    """
    run = attempt.run
    config = attempt.config
    ctx = attempt.ctx
    selection = ""  # as the progress has it: max:top1
    if "val" in provenance["held_out"]:
        direction = "max" if best_metric.sign > 0 else "min"
        selection = f"{direction}:{best_metric.name}"

    def compare_files() -> dict[str, Any]:
        return compare_listings(read_file_listing(run.folder), file_listing)

    differences: list[str] = []
    if run.resume_path:
        payload = load_checkpoint(run.resume_path, ctx, state.sharded_parameters())
        file_changes = broadcast_json(on_rank_0(compare_files, ctx), ctx)
        compare = partial(compare_checkpoint, payload, config, provenance=provenance, file_changes=file_changes)
        differences = on_all_ranks(compare, ctx)
        # rank 0 decides, since each rank compares the samples that it has fetched, and some may have fetched fewer
        compare_selection = partial(compare_best, payload, config, provenance=provenance, best_metric=selection)
        lines, is_comparable = broadcast_json(on_rank_0(compare_selection, ctx), ctx)
        differences += lines
        on_all_ranks(partial(state.load_state_dict, payload), ctx)
        differences += compare_fingerprints(payload, state, ctx)
        state.plan_schedule(sampler)
        differences += describe_lr_jump(payload, state)
        if not is_comparable:
            _forget_best(run, state.progress, ctx)
    else:
        state.plan_schedule(sampler)
    state.progress.best_metric = selection

    _rewind_run(run, state, has_test="test" in provenance["held_out"], ctx=ctx)
    on_rank_0(partial(save_file_listing, file_listing, run.folder), ctx)
    on_all_ranks(run.mark_training, ctx)
    return differences


def _forget_best(run: RunFolder, progress: Progress, ctx: DistributedContext) -> None:
    """Let the best value start again, since later values cannot be compared with it. Collective.

    Call this before the rewind, which may move best.pt or what it links to.
    """
    progress.reset_best()
    progress.evaluated_step = -1  # so that an evaluation that is due at this step is repeated
    on_rank_0(run.checkpoint_files.copy_best, ctx)


def _rewind_run(run: RunFolder, state: TrainState, has_test: bool, ctx: DistributedContext) -> None:
    """Rewind the run folder and best.pt to the step of the state. Collective."""
    progress = state.progress
    # an evaluation that is due at this step is repeated, and writes its records again
    keeps_evaluation = not state.schedule.is_evaluation_due

    def rewind_folder() -> None:
        if run.is_node_leader:
            run.rewind(progress.step, keeps_evaluation, has_test)

    on_all_ranks(rewind_folder, ctx)
    restore_best = partial(run.checkpoint_files.restore_best, progress.best_step)
    is_best_restored = broadcast_json(on_rank_0(restore_best, ctx), ctx)
    if not is_best_restored:
        progress.reset_best()


def load_checkpoint(path: Path, ctx: DistributedContext, sharded: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Load the checkpoint on every rank. The ranks of a node verify it together. Collective.

    Args:
        sharded: of a sharded model (`TrainState.sharded_parameters`): only this rank's shards of these tensors are
            read.

    Returns:
        The payload of the checkpoint.

    Raises:
        UserError: on all ranks, if the checkpoint is damaged or ranks see different files.
    """
    # the ranks that see the same file verify it together
    file_id: list[Any] = [ctx.host]
    if path.exists():
        file_status = path.stat()
        file_id += [file_status.st_ino, file_status.st_dev]
    file_ids = all_gather_json(file_id, ctx)
    readers = [rank for rank, other_id in enumerate(file_ids) if other_id == file_ids[ctx.rank]]
    reader_and_count = (readers.index(ctx.rank), len(readers))
    trailer = on_all_ranks(partial(checkpoint.verify_checkpoint, path, reader_and_count), ctx)
    sentence = f"The file {path} differs between {{first}} and {{other}}."
    sentence += " Put the run folder on storage that all nodes share."
    require_equal(trailer.checksum, sentence, ctx)
    payload, _checksum = on_all_ranks(partial(checkpoint.read_checkpoint, path, trailer, sharded), ctx)
    return payload


def load_best_checkpoint(run: RunFolder, state: TrainState, ctx: DistributedContext) -> dict[str, Any] | None:
    """Load the best checkpoint, with this rank's shards. Return None if there is none. Collective."""
    best = run.checkpoint_folder / checkpoint.BEST_NAME
    if not broadcast_json(best.exists(), ctx):
        return None
    path = share_checkpoint_with_nodes(best, run, ctx)
    return load_checkpoint(path, ctx, state.sharded_parameters())


SETTING_DIFFERS = "--{name} is {here}, but the checkpoint has --{name} {before}."
SETTING_DELETED = "The checkpoint has --{name} {before}, but this fork has no such flag (docs/extras.md)."
DATA_DIFFERS = "The {name} of the training set is {here}, but the checkpoint has {before}."


class ComparedValue(NamedTuple):
    """A value that a checkpoint and the run that continues from it have. A difference is rejected or logged."""

    name: str
    saved: Any
    current: Any
    resume_rule: str  # "must" be equal, "may" differ, which is logged, or "free" to differ, which is ignored
    message: str = SETTING_DIFFERS  # the line about a difference, in which {name}, {before} and {here} are filled in


def list_compared_settings(payload: dict[str, Any], config: TrainingConfig) -> list[ComparedValue]:
    """List a row for each setting, also for those that this fork has deleted and the checkpoint has."""
    saved = payload["config"]
    current = config.to_json()
    rows = []
    for setting in list_settings(type(config)):
        rows.append(
            ComparedValue(
                name=setting.name,
                saved=saved.get(setting.name, to_json_value(setting.resolved_default)),
                current=current[setting.name],
                resume_rule=setting.resume,
            )
        )
    for name, removed in REMOVED_SETTINGS.items():
        message = removed.describe_ignored(name, "{before} of the checkpoint")  # `describe_differences` fills it in
        rows.append(
            ComparedValue(
                name=name,
                saved=saved.get(name, removed.default),
                current=removed.default,
                resume_rule="may",
                message=message,
            )
        )
    known_names = {row.name for row in rows}
    for name, field in payload["provenance"].get("fields", {}).items():
        if name in known_names or name not in saved:
            continue
        default, resume_rule = field
        rows.append(
            ComparedValue(
                name=name,
                saved=saved[name],
                current=default,
                resume_rule=resume_rule,
                message=SETTING_DELETED,
            )
        )
    return rows


def list_compared_values(
    payload: dict[str, Any], config: TrainingConfig, provenance: dict[str, Any]
) -> list[ComparedValue]:
    """List all values that are compared, but for the data.

    Args:
        provenance: of the resumed run.
    """
    saved = payload["provenance"]
    # Samples of unequal length are packed. With other lengths, or with another number of micro-batches in a step, no
    # step may begin at the saved position.
    is_packed = "lengths" in saved
    lengths_rule = "must" if is_packed and "lengths" in provenance else "free"
    # A global batch size that was given is kept. Without one, the size follows the number of ranks, which may change.
    size_rule = "must" if config.global_batch_size or is_packed else "may"
    unit = "samples"
    if is_packed and config.micro_batch[0] != "batch_size":
        unit = "tokens"
    lengths = "The lengths of the training samples differ from the checkpoint's, so samples would be packed otherwise."
    size = f"The global batch has {{here}} {unit} per optimizer step, but the checkpoint has {{before}}."
    precision = "The precision is {here}, but the checkpoint was made in {before}."
    rules = {
        "mean": ("must", DATA_DIFFERS),
        "std": ("must", DATA_DIFFERS),
        "lengths": (lengths_rule, lengths),
        "global_batch_size": (size_rule, size),
        "precision": ("may", precision),
    }
    if config.reduction == "exact":  # extra: exact
        from utils.extras.exact.reduction import list_exact_resume_rules

        rules |= list_exact_resume_rules(payload)
    rows = list_compared_settings(payload, config)
    for name, (resume_rule, message) in rules.items():
        rows.append(
            ComparedValue(
                name=name,
                saved=saved.get(name),
                current=provenance.get(name),
                resume_rule=resume_rule,
                message=message,
            )
        )
    return rows


def describe_differences(rows: Iterable[ComparedValue], resume_rule: str) -> list[str]:
    """List a line for each row with this resume rule whose values differ."""
    lines = []
    for row in rows:
        if row.resume_rule == resume_rule and row.saved != row.current:
            before = to_text(row.saved)
            here = to_text(row.current)
            lines.append(row.message.format(name=row.name, before=before, here=here))
    return lines


def compare_checkpoint(
    payload: dict[str, Any],
    config: TrainingConfig,
    provenance: dict[str, Any],
    file_changes: dict[str, Any] | None = None,
) -> list[str]:
    """Compare this run with a checkpoint that it resumes from.

    Args:
        payload: the checkpoint.
        config: resolved, of the resumed run.
        provenance: its provenance.
        file_changes: of `compare_listings`.

    Returns:
        The allowed differences, one line each. With any of them the run is not the same as an uninterrupted one.

    Raises:
        UserError: if values differ that must not, with all of them.
    """
    check_removed_settings(payload["config"], config)
    saved = payload["provenance"]
    rows = list_compared_values(payload, config, provenance)
    fork_settings = {setting.name for setting in list_fork_settings()}
    # whether samples are read as before: with the same code and versions, and the same values of the fork's settings
    reads_alike = all(saved.get(name) == provenance.get(name) for name in ("code", "versions"))
    for row in rows:
        if row.name in fork_settings and row.saved != row.current:
            reads_alike = False
    data_change, is_other_data = compare_data(saved, provenance, file_changes or {}, is_same_code=reads_alike)

    forbidden = describe_differences(rows, "must")
    allowed = describe_differences(rows, "may")
    if is_other_data:
        forbidden.append(data_change)
    elif data_change:
        allowed.append(data_change)
    if forbidden:
        remedy = (
            "These values must be as they were for --resume_from. Restore them, or start a new run with --init_from."
        )
        raise UserError("\n".join([*forbidden, remedy]))
    return allowed


def check_removed_settings(saved: dict[str, Any], config: TrainingConfig) -> None:
    """Raise UserError if the checkpoint's run had a removed setting, and this one lacks what takes its place."""
    for name, removed in REMOVED_SETTINGS.items():
        value = saved.get(name, removed.default)
        required = removed.required_setting
        if required and value != removed.default and not getattr(config, required):
            text = f"The run of --resume_from was started with --{name} {value:g}, which was removed."
            raise UserError(f"{text} Add --{required} {saved[required]}.")


def require_same_model_and_data(payload: dict[str, Any], config: TrainingConfig) -> None:
    """Raise UserError if a setting that determines the model or the data differs from the checkpoint's."""
    compared = {setting.name for setting in list_settings(type(config)) if setting.group in (FORK_GROUP, "data")}
    rows = [row for row in list_compared_settings(payload, config) if row.name in compared]
    forbidden = describe_differences(rows, "must")
    if forbidden:
        remedy = f"--eval_only needs these values. Give --config {payload['config']['run_dir']}/config.json."
        raise UserError("\n".join([*forbidden, remedy]))


def compare_evaluation_data(payload: dict[str, Any], config: TrainingConfig, split: str, sets: DataSets) -> list[str]:
    """List a line for each thing that has changed since the checkpoint in the samples of a split, or in what describes
    them.

    Raises:
        UserError: if they are others, although the seed, the data folder and all fields of yours are the checkpoint's.
    """
    saved_config = payload["config"]
    saved_provenance = payload["provenance"]
    properties = collect_dataset_properties(sets.train)
    saved_sets = {"train": saved_provenance} | saved_provenance.get("held_out", {})
    current_sets = {"train": properties | sets.provenance} | sets.provenance["held_out"]
    if split not in saved_sets or split not in current_sets:
        return []

    saved = saved_sets[split]
    current = current_sets[split]
    names = ["seed", "data_dir", "dataset_size"]
    names += [setting.name for setting in list_fork_settings()]
    current_config = config.to_json()
    is_same = all(saved_config.get(name) == current_config[name] for name in names)
    data_change, is_other_data = compare_data(saved, current, {}, is_same_code=is_same, split=split)
    rows = []
    for name in ("mean", "std"):
        rows.append(ComparedValue(name, saved_provenance.get(name), properties[name], "may", DATA_DIFFERS))
    lines = describe_differences(rows, "may")
    has_changed = is_other_data or bool(lines)
    if data_change:
        lines.append(data_change)

    if is_same and has_changed and _parse_sample_count(saved) == _parse_sample_count(current):
        text = f"The samples of --data_dir {config.data_dir} have changed."
        remedy = "Restore the data and the code that reads the data (sort what is made from a set)."
        raise UserError("\n".join([*lines, f"{text} {remedy}"]))
    return lines


def _parse_sample_count(provenance: dict[str, Any]) -> str:
    """Return the number of samples from the identity of a data set, such as "50,000 samples, 0f3a9c...": "50,000"."""
    return provenance["identity"].partition(" ")[0]


def compare_best(
    payload: dict[str, Any], config: TrainingConfig, provenance: dict[str, Any], best_metric: str
) -> tuple[list[str], bool]:
    """Tell whether the best value in the checkpoint can be compared with later ones: whether the metric, the kind of
    weights and the validation set are the same.

    Args:
        provenance: of this run.
        best_metric: of this run, with its direction: max:top1; empty without a validation set.

    Returns:
        A line for each change that no setting shows, and whether the best value so far still counts.
    """
    progress = payload["progress"]
    changes = compare_held_out(payload["provenance"], provenance)
    lines = list(changes.values())
    is_same_set = "val" not in changes
    if "best_metric" in progress:
        saved_metric = progress["best_metric"]
        is_same_metric = saved_metric == best_metric
        if not is_same_metric and is_same_set:
            lines.append(f"The best checkpoint is selected by {best_metric}, but in the checkpoint by {saved_metric}.")
    else:
        # an earlier version saved only the setting, and "auto" does not tell which metric was chosen
        saved_setting = payload["config"].get("best_metric")
        is_same_metric = saved_setting == config.best_metric and saved_setting != "auto"
    is_same_kind_of_weights = bool(payload["ema"]) == bool(config.ema_decay)
    is_comparable = is_same_metric and is_same_kind_of_weights and is_same_set
    if progress.get("best_value") is not None and not is_comparable:
        lines.append("The best value so far no longer counts, so the best checkpoint and patience start again.")
    return lines, is_comparable


def compare_held_out(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, str]:
    """Return how the held-out sets differ from those of a checkpoint: a line by split.

    Args:
        saved: the provenance in the checkpoint.
        current: the provenance of this run.
    """
    new = current["held_out"]
    old = saved.get("held_out", new)  # earlier versions did not save them
    changes: dict[str, str] = {}
    for split in sorted(old | new):
        if split not in old:
            changes[split] = f"The {split} set is new, since the checkpoint was made without one."
        elif split not in new:
            changes[split] = f"The {split} set is gone, although the checkpoint was made with one."
        else:
            line, _is_other = compare_data(old[split], new[split], {}, is_same_code=False, split=split)
            if line:
                changes[split] = line
    return changes


def compare_fingerprints(payload: dict[str, Any], state: TrainState, ctx: DistributedContext) -> list[str]:
    """Return a line if a rank has loaded a state of another fingerprint than the checkpoint's. Collective."""
    saved = payload["provenance"].get("fingerprint")
    fingerprints = all_gather_json(format_fingerprint(int(fingerprint_state(state))), ctx)
    for rank, fingerprint in enumerate(fingerprints):
        if saved not in (None, fingerprint):
            return [
                f"The state that rank {rank} on {ctx.hosts[rank]} has loaded has the fingerprint {fingerprint}, but the"
                f" checkpoint has {saved}. Look for faulty memory, or an optimizer that converts what it loads."
            ]
    return []


def describe_lr_jump(payload: dict[str, Any], state: TrainState) -> list[str]:
    """Return a line if a group's learning rate of the last step would be different under this run's settings."""
    step = state.progress.step - 1
    if step < 0:
        return []
    # on a copy of the progress, since the schedule of a fork may change it
    factors = state.compute_lr_factors(step, copy.deepcopy(state.progress))
    # an optimizer that loads its state itself may accept another number of groups
    groups = zip(payload["optimizer"]["param_groups"], state.optimizer.param_groups, factors, strict=False)
    for saved, group, factor in groups:
        before = saved["lr"]
        base = group["base_lr"]
        now = base * factor
        if not math.isclose(before, now, rel_tol=1e-3, abs_tol=1e-6 * base):
            return [f"The learning rate jumps: at step {step + 1} it was {before:.3g}, and it would be {now:.3g} now."]
    return []
