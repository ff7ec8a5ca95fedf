"""The end of a run: summary.json, and the last lines of the output."""

from __future__ import annotations

from typing import Any

from utils.checkpoint.format import list_step_checkpoints
from utils.logger import format_count, format_duration
from utils.memory import read_peak_memory
from utils.metrics import RESERVED_NAMES
from utils.report.goodput import split_attempts, sum_account_seconds
from utils.run.folder import RunFolder
from utils.run.start import Attempt
from utils.training.log_window import EMPTY_STEP
from utils.training.state import TrainState

MIN_SECONDS_FOR_GOODPUT = 60  # in a shorter run, start-up dominates


def create_summary(
    attempt: Attempt,
    state: TrainState,
    global_batch_size: int,
    final_state: str,
    best_metric: str,
    records: list[dict[str, Any]],
    test_records: list[dict[str, Any]],
) -> dict[str, Any]:
    """Create the content of summary.json.

    Args:
        records: of all attempts.
        test_records: those of the test set.
    """
    progress = state.progress
    ranks = attempt.ctx.world_size
    attempts = split_attempts(records, attempt.run.records.format_timestamp(), progress.step)
    accounts = sum_account_seconds(attempts)
    wall_s = max(1e-9, sum(accounts.values()))
    trained_s = accounts["training"] + accounts["data_wait"]  # counts each step once
    # the run may have begun with the checkpoint of another one
    samples_before = min((times.start_event["samples_seen"] for times in attempts), default=0)
    samples = progress.samples_seen - samples_before
    samples_per_s = samples / trained_s if trained_s else 0.0

    evaluated_kind = list(state.weight_contexts())[-1]
    evaluations = _select_evaluations(records, test_records, evaluated_kind)
    best: dict[str, Any] = {}
    final: dict[str, Any] = {}
    for record in evaluations:
        final = record
        if record["step"] == progress.best_step:
            best = record

    summary = {
        "state": final_state,
        "epochs": progress.epoch,
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "samples_seen": progress.samples_seen,
        "wall_s": wall_s,
        "samples_per_s": samples_per_s,
        "samples_per_s_per_rank": samples_per_s / ranks,
        "world_size": ranks,
        "global_batch_size": global_batch_size,
        "best_metric": best_metric,
        "best_value": progress.best_value,
        "best_epoch": progress.best_epoch,
        "best": _select_metrics(best),
        "final": _select_metrics(final),
        "data_wait_fraction": accounts["data_wait"] / trained_s if trained_s else 0.0,
        "peak_memory_bytes": read_peak_memory(),
        "restarts": attempt.run.start_decision.attempt - 1,
        "goodput": accounts["training"] / wall_s,
        "overflow_steps": progress.overflow_steps,
        "time": {f"{name}_s": round(seconds, 3) for name, seconds in accounts.items()},
    }
    empty_steps = count_empty_steps(records)
    warnings = list(state.schedule.warnings)
    warnings += _list_warnings(summary, evaluations, empty_steps, has_validation=bool(progress.best_metric))
    if test_records:
        summary["test"] = test_records
    if warnings:
        summary["warnings"] = warnings
    return summary


def count_empty_steps(records: list[dict[str, Any]]) -> int:
    """Count the steps that were skipped because their loss counted nothing."""
    return sum(record.get("reason") == EMPTY_STEP for record in records)


def _select_evaluations(
    records: list[dict[str, Any]], test_records: list[dict[str, Any]], weights: str
) -> list[dict[str, Any]]:
    """Select the evaluations of the weights that select the best checkpoint: of the validation set, if there is one."""
    evaluations = []
    for record in records:
        if record["kind"] == "eval" and record["weights"] == weights and record not in test_records:
            evaluations.append(record)
    validations = [record for record in evaluations if record["split"] == "val"]
    # the others are tests at the end of an earlier, shorter run
    return validations or evaluations


def _list_warnings(
    summary: dict[str, Any], evaluations: list[dict[str, Any]], empty_steps: int, has_validation: bool
) -> list[str]:
    """List what the run has not done although it ends without an error."""
    never_finite = []
    for name in summary["final"]:
        if all(record.get(name) is None for record in evaluations):
            never_finite.append(name)
    warnings = []
    if 0 < summary["steps"] == empty_steps:
        warnings.append("All steps were without targets, so nothing was learned. Label the samples.")
    if never_finite:
        warnings.append(f"These metrics were not finite in any evaluation: {', '.join(never_finite)}.")
    if has_validation and evaluations and summary["best_value"] is None:
        warnings.append(f"--best_metric {summary['best_metric']} was never finite, so there is no best.pt.")
    return warnings


def _select_metrics(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in RESERVED_NAMES}


def describe_run_end(
    summary: dict[str, Any],
    run: RunFolder,
    trained_s: float,
    empty_steps: int = 0,
    *,
    is_averaged: bool,
    overwrite: bool,
) -> str:
    """Describe the end of a run, with the next commands.

    Args:
        trained_s: seconds in steps.
        empty_steps: of the skipped ones, those without targets.
        is_averaged: averaged weights have selected the best checkpoint.
        overwrite: the command has --overwrite, with which it would start over.
    """
    skipped = ""
    if summary["skipped_steps"]:
        reason = "non-finite loss or gradient"
        if summary["skipped_steps"] == empty_steps:
            reason = "without targets"
        skipped = f" ({summary['skipped_steps']} skipped: {reason})"
    epochs = format_count(summary["epochs"], "epoch")
    steps = format_count(summary["steps"], "step")

    times = {name.removesuffix("_s").replace("_", " "): seconds for name, seconds in summary["time"].items()}
    idle = times.pop("down")  # between attempts
    total = sum(times.values())
    accounts = [f"{name} {format_duration(seconds)}" for name, seconds in times.items() if seconds >= 0.5]
    time_line = f"time: {format_duration(total)} ({', '.join(accounts)})"
    if total >= MIN_SECONDS_FOR_GOODPUT:
        time_line += f", goodput {times['training'] / total:.0%}"
    if summary["restarts"]:
        time_line += f", {format_count(summary['restarts'], 'restart')}"
    if idle >= 0.5:
        time_line += f", {format_duration(idle)} between attempts"

    lines = [
        f"{summary['state']}: {epochs}, {steps}{skipped},"
        f" {summary['samples_seen']:,} samples in {format_duration(trained_s)} of training,"
        f" {summary['samples_per_s']:,.0f} samples/s, peak memory {summary['peak_memory_bytes'] / 2**30:.2f} GiB",
        time_line,
    ]
    weights_note = ""  # the weights that selected the best checkpoint
    if is_averaged:
        weights_note = " (averaged weights)"
    if summary["best_value"] is not None:
        best = f"{summary['best_metric']} {summary['best_value']:.4f}{weights_note}"
        lines.append(f"best: {best} in epoch {summary['best_epoch']}")
    if summary["state"] == "preempted":
        change = "with --resume_from auto"
        if overwrite:
            change += " instead of --overwrite"
        lines.append(f"To continue, run the same command {change}.")
        return "\n".join(lines)

    exported = run.checkpoint_folder / "best.pt"
    if not exported.exists():
        checkpoints = list_step_checkpoints(run.checkpoint_folder)
        if checkpoints:
            exported = checkpoints[-1]
    lines.append("next:")
    lines.append(f"  tensorboard --logdir {run.folder}")
    lines.append(f"  python scripts/runs.py {run.folder} --html {run.folder}/report.html")  # extra: reports
    if summary["final"]:
        lines.append(f"  python train.py --config {run.folder}/config.json --eval_only")
    lines.append(f"  python scripts/export.py {exported} {run.folder}/model.pt")
    return "\n".join(lines)
