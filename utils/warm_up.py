"""The passes before the first step: DDP orders its buckets in them, and torch.compile compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from config import TrainingConfig
from utils.compiling import Compiling
from utils.loading import WindowLoader
from utils.metrics import Metrics
from utils.train_state import TrainState

if TYPE_CHECKING:
    from ddp_utils import DistributedContext

Loss = Callable[[nn.Module, Any], tuple[Tensor, Metrics]]  # model.compute_loss


def warm_up(model: DistributedDataParallel, batch: Any, state: TrainState, compute_loss: Loss) -> list[str]:
    """Two complete passes whose gradients are dropped: DDP orders its buckets in them, so that a resumed run sums as a fresh one does.

    Returns the names that an evaluation will report. Raises Refused when a parameter got no gradient.
    """
    train_twice(model, batch, state, compute_loss)
    return evaluate_once(batch, state, compute_loss)


def train_twice(model: DistributedDataParallel, batch: Any, state: TrainState, compute_loss: Loss) -> None:
    """Two complete passes of which nothing stays."""
    model.train()
    for _ in range(2):
        with state.precision.autocast():
            loss_sum, _ = compute_loss(model, batch)
        loss_sum.backward()
        state.check_gradients()
    state.drop_gradients()
    state.running_stats.discard()


@torch.no_grad()
def evaluate_once(batch: Any, state: TrainState, compute_loss: Loss) -> list[str]:
    """The names of what is reported; nothing else stays."""
    with state.precision.autocast():
        _, metrics = compute_loss(state.model.eval(), batch)
    return ["loss", *metrics]


def compile_all_sizes(
    model: DistributedDataParallel,
    loader: WindowLoader,
    held_out_loaders: dict[str, WindowLoader],
    state: TrainState,
    compute_loss: Loss,
    config: TrainingConfig,
    ctx: DistributedContext,
    logger: logging.Logger,
) -> None:
    """After `warm_up`: compile the model, in as many passes of each size that the run will meet, on all ranks alike.

    Two of each: CUDA graphs are recorded in the second. The passes before were not compiled, so that the gradients lie in memory of
    DDP's or of their own, where `TrainState.drop_gradients` leaves them, and not in that of a graph.
    """
    compiling = Compiling(state.model, config)
    in_training, in_evaluation = sizes_of(loader), []
    for size in in_training:
        train_twice(model, loader.fetch(list(range(size)))[2], state, compute_loss)
    for held_out in held_out_loaders.values():
        for size in sizes_of(held_out):
            in_evaluation += [size] if size not in in_evaluation else []
            for _ in range(2):
                evaluate_once(held_out.fetch(list(range(size)))[2], state, compute_loss)
    compiling.finish({"training": in_training, "evaluation": in_evaluation}, logger.info, logger.warning if ctx.is_main else logger.info)


def sizes_of(loader: WindowLoader) -> list[int]:
    """The batch sizes of an epoch: the full one, and that of a short last micro-batch."""
    samples, size = loader.sampler.samples_per_epoch, loader.sampler.batch_size
    return [size, samples % size] if samples > size and samples % size else [min(size, samples)]
