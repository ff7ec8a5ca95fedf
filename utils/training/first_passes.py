"""The passes before the first step, in which DDP orders its buckets."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from utils.data.loader import GlobalBatchLoader
from utils.distributed.collectives import on_all_ranks, require_equal
from utils.distributed.context import DistributedContext
from utils.distributed.device import raise_open_file_limit
from utils.distributed.dtensor import local_shard
from utils.logger import format_count
from utils.metrics import BestMetric, MetricTracker, check_metrics, choose_best_metric
from utils.settings.errors import UserError
from utils.training.ddp_model import WrappedModel
from utils.training.fingerprint import fingerprint_tensors
from utils.training.hooks import ComputeLoss, ModelHooks
from utils.training.state import TrainState

GRADIENTS_DIFFER = (
    "{other} and {first} have different gradients after a backward pass that should average the gradients."
    " In compute_loss, call the model that compute_loss is given, not model.module or the model from elsewhere."
)
METRICS_DIFFER = "compute_loss reports different metrics on {first} and {other}. Report the same metrics on all ranks."


def run_first_passes(
    model: WrappedModel,
    state: TrainState,
    loader: GlobalBatchLoader,
    held_out_loaders: dict[str, GlobalBatchLoader],
    hooks: ModelHooks,
    ctx: DistributedContext,
    *,
    best_metric: str,
    max_steps: int,
) -> BestMetric:
    """Run forward and backward passes on real micro-batches, before the first step of a fresh or a resumed run.

    DDP orders its buckets in the first two passes, so that a resumed run sums gradients in the order of a fresh one.
    Two passes of the smallest micro-batch of the run come last: an error that only this one has would end the run after
    the first epoch.

    Args:
        held_out_loaders: by split.
        best_metric: the setting, as `choose_best_metric` takes it.
        max_steps: of the run; 0 for no limit.

    Returns:
        The metric that selects the best checkpoint, of those that an evaluation will report.

    Raises:
        UserError: if compute_loss returns something invalid, or a parameter got no gradient.
    """
    compute_loss = hooks.compute_loss
    batch, *other_batches = on_all_ranks(loader.fetch_example_batches, ctx)

    # All ranks have the same weights and compute the same batch here, so their gradients would be equal even if nothing
    # averaged them. The loss is therefore doubled on odd ranks, which makes the gradients of odd and even ranks differ
    # until they are averaged. If the gradients after the backward pass still differ, compute_loss has bypassed DDP.
    loss_weight = 2.0 if ctx.rank % 2 == 1 else 1.0

    def train_first_batch() -> int:
        return train_twice(model, batch, state, compute_loss=compute_loss, loss_weight=loss_weight)

    def train_other_batches() -> None:
        for other_batch in other_batches:
            train_twice(model, other_batch, state, compute_loss=compute_loss)

    def train_unwrapped() -> int:
        return train_twice(state.model, batch, state, compute_loss=compute_loss)

    def train_smallest() -> None:
        for indices in loader.sampler.find_smallest_micro_batch(max_steps):
            with note_smallest_batch(indices, "another --batch_size or --drop_last"):
                smallest_batch = loader.fetch_samples(indices)[2]
                train_twice(model, smallest_batch, state, compute_loss=compute_loss)
        if loader.sampler.is_packed:
            check_single_sample_batch(state, loader, compute_loss)

    def try_evaluations() -> list[list[str]]:
        return [try_evaluation(held_out, state, compute_loss) for held_out in held_out_loaders.values()]

    gradient_digest = on_all_ranks(train_first_batch, ctx)
    on_all_ranks(train_other_batches, ctx)
    for part in state.parts:
        part.first_passes(train_unwrapped, batch)
    state.updater.zero_gradients()  # also where a part's passes have failed
    state.step_sums.running_stats.discard()
    if state.strategy.has_whole_gradients:
        require_equal(gradient_digest, GRADIENTS_DIFFER, ctx)
    require_equal(state.step_sums.metrics.shapes, METRICS_DIFFER, ctx)
    on_all_ranks(train_smallest, ctx)
    names_by_split = on_all_ranks(try_evaluations, ctx)

    loaders = [loader, *held_out_loaders.values()]
    workers = sum(data_loader.num_workers for data_loader in loaders)
    tensors = sum(data_loader.shared_tensor_count for data_loader in loaders)
    raise_limit = functools.partial(raise_open_file_limit, ctx.world_size, workers, tensors)
    on_all_ranks(raise_limit, ctx)

    metric_names = names_by_split[0] if names_by_split else []
    return on_all_ranks(functools.partial(choose_best_metric, best_metric, metric_names), ctx)


def try_evaluation(loader: GlobalBatchLoader, state: TrainState, compute_loss: ComputeLoss) -> list[str]:
    """Evaluate the example batches and the smallest micro-batch of a held-out set.

    Returns:
        The names of the metrics that an evaluation of the set will report.
    """
    for batch in loader.fetch_example_batches():
        names = evaluate_once(batch, state, compute_loss)
    size = len(loader.list_example_indices()[-1])
    samples = len(loader.dataset)
    for part in state.parts:
        names += part.try_evaluation(state.model, state.precision, batch, size, samples)

    for indices in loader.sampler.find_smallest_micro_batch():
        with note_smallest_batch(indices, "another --eval_batch_size"):
            batch = loader.fetch_samples(indices)[2]
            evaluate_once(batch, state, compute_loss)
            size = len(indices)
            for part in state.parts:
                part.try_evaluation(state.model, state.precision, batch, size, size)
    return names


@torch.no_grad()
def check_single_sample_batch(state: TrainState, loader: GlobalBatchLoader, compute_loss: ComputeLoss) -> None:
    """Check that a micro-batch of one sample can be trained: batches by length may leave one over in a later epoch.

    Raises:
        UserError: if a BatchNorm needs two samples.
    """
    try:
        with state.precision.autocast():
            batch = loader.fetch_samples([0])[2]
            compute_loss(state.model.train(), batch)
    except ValueError as error:
        check_single_sample_error(error)
    except Exception:
        pass
    state.step_sums.running_stats.discard()


def check_single_sample_error(error: ValueError) -> None:
    """Raise UserError if this is the error of a BatchNorm that got one sample."""
    if "Expected more than 1 value per channel" in str(error):
        raise UserError(
            f"A micro-batch of the run has one sample, for which BatchNorm has no variance ({error}). Use another"
            " --batch_size, --drop_last or another normalization."
        ) from None


def train_twice(
    model: nn.Module,
    batch: Any,
    state: TrainState,
    compute_loss: ComputeLoss,
    loss_weight: float = 1.0,
) -> int:
    """Run two forward and backward passes with this batch.

    Args:
        loss_weight: a factor on the loss.

    Returns:
        A digest of the gradients, which are summed over both passes and then dropped.
    """
    model.train()
    state.step_sums.running_stats.begin_epoch()
    try:
        for _ in range(2):
            with state.precision.autocast():
                metrics = check_metrics(compute_loss(model, batch))
            loss = metrics["loss"][0].sum() * loss_weight
            loss.backward()
            state.check_gradients()
    except ValueError as error:
        check_single_sample_error(error)
        raise
    gradients = []
    for parameter in state.model.parameters():
        if parameter.grad is not None:
            gradients.append(local_shard(parameter.grad))
    digest = fingerprint_tensors("gradients", gradients)
    state.updater.zero_gradients()
    state.step_sums.running_stats.discard()
    state.allocate_metrics(metrics)
    return digest


@contextmanager
def note_smallest_batch(indices: list[int], remedy: str) -> Iterator[None]:
    """Add a note to an error in this context: the smallest micro-batch has so many samples.

    Args:
        remedy: the flag that gives another size.
    """
    try:
        yield
    except Exception as error:
        size = format_count(indices, "sample")
        error.add_note(f"The smallest micro-batch has {size}. Use {remedy} if that is too few.")
        raise


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Give buffers their values back at the end. Forward passes change those of spectral norms, codebooks and queues.

    A buffer that is created or gets another shape in this context stays as it is.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])


@torch.no_grad()
def evaluate_once(batch: Any, state: TrainState, compute_loss: ComputeLoss) -> list[str]:
    """Run a forward pass in evaluation mode. Returns the names of the metrics."""
    tracker = MetricTracker(state.step_sums.metrics.values.device)
    with state.precision.autocast():
        metrics = check_metrics(compute_loss(state.model.eval(), batch))
        tracker.update(metrics)
    return list(tracker.means())
