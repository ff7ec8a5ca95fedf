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
    """The content of summary.json. records: of all attempts. test_records: those of the test set."""
    progress, ranks = state.progress, attempt.ctx.world_size
    attempts = split_attempts(records, attempt.run.records.format_timestamp(), progress.step)
    accounts = sum_account_seconds(attempts)
    wall = max(1e-9, sum(accounts.values()))
    trained = accounts["training"] + accounts["data_wait"]  # counts each step once
    # the run may have begun with the checkpoint of another one
    samples = progress.samples_seen - min(
        (attempt_times.start_event["samples_seen"] for attempt_times in attempts), default=0
    )
    rate = samples / trained if trained else 0.0
    evaluations = _select_evaluations(records, test_records, [*state.weights()][-1])
    best: dict[str, Any] = next((r for r in reversed(evaluations) if r["step"] == progress.best_step), {})
    summary = {
        "state": final_state,
        "epochs": progress.epoch,
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "samples_seen": progress.samples_seen,
        "wall_s": wall,
        "samples_per_s": rate,
        "samples_per_s_per_rank": rate / ranks,
        "world_size": ranks,
        "global_batch_size": global_batch_size,
        "best_metric": best_metric,
        "best_value": progress.best_value,
        "best_epoch": progress.best_epoch,
        "best": _select_metrics(best),
        "final": _select_metrics(evaluations[-1] if evaluations else {}),
        "data_wait_fraction": accounts["data_wait"] / trained if trained else 0.0,
        "peak_memory_bytes": read_peak_memory(),
        "restarts": attempt.run.start_decision.attempt - 1,
        "goodput": accounts["training"] / wall,
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
    """The number of steps that were skipped because their loss counted nothing."""
    return sum(record.get("reason") == EMPTY_STEP for record in records)


def _select_evaluations(
    records: list[dict[str, Any]], test_records: list[dict[str, Any]], weights: str
) -> list[dict[str, Any]]:
    """Those of the weights that select the best checkpoint."""
    evaluations = [
        record
        for record in records
        if record["kind"] == "eval" and record["weights"] == weights and record not in test_records
    ]
    # the others are tests at the end of an earlier, shorter run
    return [record for record in evaluations if record["split"] == "val"] or evaluations


def _list_warnings(
    summary: dict[str, Any], evaluations: list[dict[str, Any]], empty_steps: int, has_validation: bool
) -> list[str]:
    """List what the run has not done although it ends without an error."""
    never = ", ".join(name for name in summary["final"] if all(record.get(name) is None for record in evaluations))
    warnings = []
    if 0 < summary["steps"] == empty_steps:
        warnings.append("training: all steps were without targets, so nothing was learned; label the samples")
    if never:
        warnings.append(f"evaluation: {never}: never finite")
    if has_validation and evaluations and summary["best_value"] is None:
        warnings.append(f"best_metric={summary['best_metric']}: was never finite, so there is no best.pt")
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
    """The end summary, with the next commands.

    Args:
        trained_s: seconds in steps.
        empty_steps: of the skipped ones, those without targets.
        is_averaged: averaged weights have selected the best checkpoint.
        overwrite: the command has --overwrite, with which it would start over.
    """
    why = "without targets" if summary["skipped_steps"] == empty_steps else "non-finite loss or gradient"
    skipped = f" ({summary['skipped_steps']} skipped: {why})" if summary["skipped_steps"] else ""
    times = {name.removesuffix("_s").replace("_", " "): seconds for name, seconds in summary["time"].items()}
    idle = times.pop("down")  # between attempts
    total = sum(times.values())
    parts = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in times.items() if seconds >= 0.5)
    goodput = f", goodput {times['training'] / total:.0%}" if total >= MIN_SECONDS_FOR_GOODPUT else ""
    restarts = f", {format_count(summary['restarts'], 'restart')}" if summary["restarts"] else ""
    restarts += f", {format_duration(idle)} between attempts" if idle >= 0.5 else ""
    epochs = format_count(summary["epochs"], "epoch")
    steps = format_count(summary["steps"], "step")
    lines = [
        f"{summary['state']}: {epochs}, {steps}{skipped},"
        f" {summary['samples_seen']:,} samples in {format_duration(trained_s)} of training,"
        f" {summary['samples_per_s']:,.0f} samples/s, peak memory {summary['peak_memory_bytes'] / 2**30:.2f} GiB",
        f"time: {format_duration(total)} ({parts}){goodput}{restarts}",
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
        return "\n".join([*lines, f"to continue: the same command {change}"])
    file = run.checkpoint_folder / "best.pt"
    source = file if file.exists() else [file, *list_step_checkpoints(run.checkpoint_folder)][-1]
    lines += ["next:", f"  tensorboard --logdir {run.folder}"]
    lines.append(f"  python scripts/runs.py {run.folder} --html {run.folder}/report.html")  # extra: reports
    if summary["final"]:
        lines.append(f"  python train.py --config {run.folder}/config.json --eval_only")
    return "\n".join([*lines, f"  python scripts/export.py {source} {run.folder}/model.pt"])
