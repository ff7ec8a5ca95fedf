"""The passes before the first step, in which DDP orders its buckets."""

from __future__ import annotations

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
from utils.metrics import MetricTracker, check_metrics, choose_best_metric
from utils.settings.errors import UserError
from utils.training.ddp_model import WrappedModel
from utils.training.fingerprint import fingerprint_tensors
from utils.training.hooks import ComputeLoss, ModelHooks
from utils.training.state import TrainState

GRADIENTS_DIFFER = (
    "compute_loss: {other} and {first} have different gradients after a backward pass that should average them; call"
    " the model that compute_loss is given, not model.module or the model from elsewhere"
)


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
) -> tuple[str, int]:
    """Two complete passes, so that a resumed run sums gradients in the order of a fresh one. Then two of the smallest
    micro-batch of the run: an error that only this one has would end the run after the first epoch.

    Args:
        held_out_loaders: by split.
        best_metric: the setting, as `choose_best_metric` takes it.
        max_steps: of the run; 0 for no limit.

    Returns:
        The metric that selects the best checkpoint, of those that an evaluation will report, and its sign: see
        `choose_best_metric`.

    Raises:
        UserError: if compute_loss returns something invalid, or a parameter got no gradient.
    """
    compute_loss = hooks.compute_loss
    batch, *other_batches = on_all_ranks(loader.fetch_example_batches, ctx)
    # the loss is doubled on every other rank: gradients differ unless they are averaged
    digest = on_all_ranks(lambda: train_twice(model, batch, state, compute_loss, 1.0 + ctx.rank % 2), ctx)
    on_all_ranks(lambda: [train_twice(model, other_batch, state, compute_loss) for other_batch in other_batches], ctx)
    for part in state.parts:
        part.first_passes(lambda: train_twice(state.model, batch, state, compute_loss), batch)
    state.updater.zero_gradients()  # also where a part's passes have failed
    state.step_sums.running_stats.discard()
    if state.strategy.has_whole_gradients:
        require_equal(digest, GRADIENTS_DIFFER, ctx)
    metric_shapes = state.step_sums.metrics.shapes
    require_equal(
        metric_shapes, "compute_loss: {other} and {first} report different metrics; report the same on all", ctx
    )

    def train_smallest() -> None:
        for indices in loader.sampler.find_smallest_micro_batch(max_steps):
            with note_smallest_batch(indices, "another --batch_size or --drop_last"):
                train_twice(model, loader.fetch_samples(indices)[2], state, compute_loss)
        if loader.sampler.is_packed:
            check_single_sample_batch(state, loader, compute_loss)

    def evaluate(loader: GlobalBatchLoader) -> list[str]:
        for batch in loader.fetch_example_batches():
            names = evaluate_once(batch, state, compute_loss)
        samples = len(loader.dataset)
        for part in state.parts:
            names += part.try_evaluation(
                state.model, state.precision, batch, len(loader.list_example_indices()[-1]), samples
            )
        for indices in loader.sampler.find_smallest_micro_batch():
            with note_smallest_batch(indices, "another --eval_batch_size"):
                batch = loader.fetch_samples(indices)[2]
                evaluate_once(batch, state, compute_loss)
                for part in state.parts:
                    part.try_evaluation(state.model, state.precision, batch, len(indices), len(indices))
        return names

    on_all_ranks(train_smallest, ctx)
    names = on_all_ranks(lambda: [evaluate(eval_loader) for eval_loader in held_out_loaders.values()], ctx)
    loaders = [loader, *held_out_loaders.values()]
    workers = sum(data_loader.num_workers for data_loader in loaders)
    tensors = sum(data_loader.shared_tensor_count for data_loader in loaders)
    on_all_ranks(lambda: raise_open_file_limit(ctx.world_size, workers, tensors), ctx)
    return on_all_ranks(lambda: choose_best_metric(best_metric, [*names, []][0]), ctx)


@torch.no_grad()
def check_single_sample_batch(state: TrainState, loader: GlobalBatchLoader, compute_loss: ComputeLoss) -> None:
    """Raises UserError if a BatchNorm needs two samples: batches by length may leave one over in a later epoch."""
    try:
        with state.precision.autocast():
            compute_loss(state.model.train(), loader.fetch_samples([0])[2])
    except ValueError as error:
        check_single_sample_error(error)
    except Exception:
        pass
    state.step_sums.running_stats.discard()


def check_single_sample_error(error: ValueError) -> None:
    """Raises UserError if a BatchNorm got one sample."""
    if "Expected more than 1 value per channel" in str(error):
        raise UserError(
            f"batch_size: a micro-batch of the run has one sample, for which BatchNorm has no variance ({error}); use"
            " another batch size, --drop_last or another normalization"
        ) from None


def train_twice(
    model: nn.Module, batch: Any, state: TrainState, compute_loss: ComputeLoss, loss_weight: float = 1.0
) -> int:
    """Run two forward and backward passes. Returns a digest of the gradients, which are dropped.

    loss_weight: the loss is multiplied by it.
    """
    model.train()
    state.step_sums.running_stats.begin_epoch()
    try:
        for _ in range(2):
            with state.precision.autocast():
                metrics = check_metrics(compute_loss(model, batch))
            (metrics["loss"][0].sum() * loss_weight).backward()
            state.check_gradients()
    except ValueError as error:
        check_single_sample_error(error)
        raise
    gradients = [local_shard(p.grad) for p in state.model.parameters() if p.grad is not None]
    digest = fingerprint_tensors("gradients", gradients)
    state.updater.zero_gradients()
    state.step_sums.running_stats.discard()
    state.allocate_metrics(metrics)
    return digest


@contextmanager
def note_smallest_batch(indices: list[int], remedy: str) -> Iterator[None]:
    """Let an error say that it is one of the smallest micro-batch."""
    try:
        yield
    except Exception as error:
        size = format_count(indices, "sample")
        error.add_note(f"the smallest micro-batch has {size}: use {remedy} if that is too few")
        raise


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Give buffers their values back at the end. Forward passes move those of spectral norms, codebooks and queues.

    A buffer that is created or gets another shape meanwhile stays as it is.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])


@torch.no_grad()
def evaluate_once(batch: Any, state: TrainState, compute_loss: ComputeLoss) -> list[str]:
    """Run a pass in evaluation mode. Returns the names of the metrics."""
    tracker = MetricTracker(state.step_sums.metrics.values.device)
    with state.precision.autocast():
        tracker.update(check_metrics(compute_loss(state.model.eval(), batch)))
    return [*tracker.means()]
