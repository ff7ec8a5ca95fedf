"""The passes before the first step: DDP orders its buckets in them, and torch.compile compiles."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from config import TrainingConfig, UserError
from utils.data.loader import GlobalBatchLoader
from utils.distributed.context import DistributedContext
from utils.metrics import Metrics
from utils.training.state import TrainState

Loss = Callable[[nn.Module, Any], tuple[Tensor, Metrics]]  # model.compute_loss


def warm_up(model: DistributedDataParallel, batch: Any, state: TrainState, compute_loss: Loss) -> list[str]:
    """Two complete passes whose gradients are dropped: DDP orders its buckets in them, so that a resumed run sums as a
    fresh one does.

    Returns the names that an evaluation will report. Raises UserError when a parameter got no gradient.
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
    loader: GlobalBatchLoader,
    held_out_loaders: dict[str, GlobalBatchLoader],
    state: TrainState,
    compute_loss: Loss,
    config: TrainingConfig,
    ctx: DistributedContext,
    logger: logging.Logger,
) -> None:
    """After `warm_up`: compile the model, in as many passes of each size that the run will meet, on all ranks alike.

    Two of each: CUDA graphs are recorded in the second. The passes before were not compiled, so that the gradients lie
    in memory of
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
    compiling.finish(
        {"training": in_training, "evaluation": in_evaluation},
        logger.info,
        logger.warning if ctx.is_main else logger.info,
    )


def sizes_of(loader: GlobalBatchLoader) -> list[int]:
    """The batch sizes of an epoch: the full one, and that of a short last micro-batch."""
    samples, size = loader.sampler.samples_per_epoch, loader.sampler.batch_size
    return [size, samples % size] if samples > size and samples % size else [min(size, samples)]


def check_compiler(mode: str, device: torch.device, named: str) -> None:
    """Raise UserError where this machine lacks what torch.compile needs to build its kernels. named: by the
    environment, CC or CXX."""
    if mode == "off":
        return
    on_cuda = device.type == "cuda"
    kind, known = ("C", ["gcc", "clang"]) if on_cuda else ("C++", ["g++"])
    if not any(map(shutil.which, [named] if named else known)):
        looked = named or " nor ".join(known)
        raise UserError(
            f"compile={mode}: needs a {kind} compiler, and there is no {looked}; install {known[0]}, or give"
            " --compile off"
        )
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise UserError(
            f"compile={mode}: needs the headers of this Python (Python.h); install python3-dev, or give --compile off"
        )
    if on_cuda and importlib.util.find_spec("triton") is None:
        raise UserError(f"compile={mode}: needs triton, which is not installed; install it, or give --compile off")


class Compiling:
    """The model is compiled at its next calls. Make it on all ranks."""

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        import torch._dynamo  # seconds, of which a run without --compile knows nothing

        torch.compiler.reset()  # of an earlier run in this process: its code and its listeners
        # cut at DDP's buckets, so that they overlap with what comes; torch cannot cut blocks that compute again, nor at
        # very small buckets
        can_cut = not config.activation_checkpointing and not 0 < config.bucket_cap_mb < 1
        torch._dynamo.config.optimize_ddp = can_cut
        self._mode, self._seconds, self._began, self._say = config.compile, 0.0, 0.0, None
        torch._dynamo.on_compile_start(self._start)
        torch._dynamo.on_compile_end(self._end)
        model.compile(mode=config.compile, dynamic=False)

    def finish(self, sizes: dict[str, list[int]], log: Callable[..., None], warn: Callable[..., None]) -> None:
        """All passes were made that the run will make. What is compiled from here on is said, once. Raises UserError
        where nothing was."""
        if not self._seconds:
            raise UserError(
                f"compile={self._mode}: torch {torch.__version__} finds nothing to compile in the model, a bare"
                " nn.Sequential as a rule; give it a class of its own with a forward, or --compile off"
            )
        shown = ", ".join(f"{' and '.join(map(str, each))} in {name}" for name, each in sizes.items() if each)
        log("compiled (%s) in %.1f s, for batches of %s", self._mode, self._seconds, shown)
        self._say = warn

    def _start(self, _: Any) -> None:
        self._began = perf_counter()
        if self._say:
            self._say(
                "torch.compile compiles again in the middle of the run, and training waits: as a rule a batch of"
                " another shape; make batches of few shapes (crop, pad), or give --compile off"
            )
            self._say = None

    def _end(self, _: Any) -> None:
        self._seconds += perf_counter() - self._began
