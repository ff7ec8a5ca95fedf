"""What may differ between a checkpoint and the run that goes on from it."""

from __future__ import annotations

import dataclasses
from typing import Any

from config import TrainingConfig, UserError
from utils.data.sampler import GlobalBatchSampler
from utils.run.lock import MOST_STRIKES
from utils.training.state import Progress


def check_evaluation(payload: dict[str, Any], config: TrainingConfig) -> None:
    """Raises UserError when the config names another model or another kind of data than the checkpoint was trained
    with."""
    saved = payload["config"]
    wrong = [
        f"{field.name}={getattr(config, field.name)}: the checkpoint has"
        f" {field.name}={saved.get(field.name, field.default)}"
        for field in dataclasses.fields(config)
        if field.metadata["group"] in ("data", "model")
        and field.metadata["resume"] == "must"
        and getattr(config, field.name) != saved.get(field.name, field.default)
    ]
    if wrong:
        raise UserError(
            "\n".join([*wrong, f"eval_only: these must match; give --config {saved['run_dir']}/config.json"])
        )


def is_other_best(payload: dict[str, Any], config: TrainingConfig) -> bool:
    """Whether the best checkpoint is chosen by another metric, or by other weights, than it was in the checkpoint."""
    return payload["config"].get("best_metric") != config.best_metric or bool(payload["ema"]) != bool(config.ema_decay)


def compare(payload: dict[str, Any], config: TrainingConfig, fingerprint: str, global_batch_size: int) -> list[str]:
    """What differs and may, a line each: from there on the run is not the one that would have gone on undisturbed.

    Args:
        payload: the checkpoint.
        config: settled, of the run that goes on.
        fingerprint: of its training set.
        global_batch_size: samples of one of its optimizer steps.

    Raises:
        UserError: when something differs that must not, with all such fields.
    """
    saved, provenance = payload["config"], payload["provenance"]
    wrong, said = [], []
    for field in dataclasses.fields(config):
        before, here = saved.get(field.name, field.default), getattr(config, field.name)
        if before == here or field.metadata["resume"] == "free":
            continue
        line = f"{field.name}={here}: the checkpoint has {field.name}={before}"
        (wrong if field.metadata["resume"] == "must" else said).append(line)
    if provenance["fingerprint"] != fingerprint:
        wrong.append("the training set is not the one of the checkpoint (other files, sizes or values)")
    before = provenance["global_batch_size"]
    if before != global_batch_size:
        line = f"global batch: {global_batch_size} samples an optimizer step, the checkpoint has {before}"
        (wrong if config.global_batch_size else said).append(line)
    if wrong:
        raise UserError(
            "\n".join(
                [*wrong, "resume_from: these must match; give them as they were, or start a new run with --init_from"]
            )
        )
    return said


def diagnosis(strikes: list[dict[str, Any]], progress: Progress, sampler: GlobalBatchSampler) -> str:
    """What is to be said of a run that ends at the same step each time: which step, of which samples."""
    step = strikes[-1]["step"]
    indices, ahead = [], step - progress.step - 1
    epoch, first = progress.epoch, progress.samples_in_epoch + ahead * sampler.global_batch_size
    while first >= sampler.samples_per_epoch and ahead >= 0:  # global batches do not cross the end of an epoch
        ahead -= -(
            -(sampler.samples_per_epoch - (first - ahead * sampler.global_batch_size)) // sampler.global_batch_size
        )
        epoch, first = epoch + 1, max(0, ahead) * sampler.global_batch_size
    if ahead >= 0:
        indices = sampler.order(epoch)[first : first + sampler.global_batch_size].tolist()
    shown = f"{indices[:32]}" + (f" and {len(indices) - 32} more" if len(indices) > 32 else "")
    return (
        f"the last {len(strikes)} attempts all ended at step {step} (epoch {epoch}, samples {shown}) without a new"
        f" checkpoint; the last one said: {strikes[-1]['error']}; mend that, then start again: there are {MOST_STRIKES}"
        " more attempts"
    )
