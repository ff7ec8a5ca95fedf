"""torch.compile. Compiled code depends on the batch size, so each size of an epoch or an evaluation is compiled.

The model is compiled in place: it stays the same module, with the same keys in its state dict.
"""

from __future__ import annotations

import logging
from time import perf_counter

from config import TrainingConfig
from utils.data.loader import GlobalBatchLoader
from utils.logger import LOGGER_NAME, format_count
from utils.settings.errors import UserError
from utils.training.ddp_model import WrappedModel
from utils.training.first_passes import evaluate_once, train_twice
from utils.training.hooks import ModelHooks
from utils.training.state import TrainState


def compile_all_sizes(
    model: WrappedModel,
    state: TrainState,
    loader: GlobalBatchLoader,
    held_out_loaders: dict[str, GlobalBatchLoader],
    hooks: ModelHooks,
    config: TrainingConfig,
) -> None:
    """Compile the model in passes with every batch size of the run. Raises UserError if torch compiles nothing.

    Two passes each: CUDA graphs are recorded in the second. The passes before were not compiled, so the gradients are
    in memory of DDP or their own, where `Updater.zero_gradients` leaves them, and not in the memory of a graph.
    """
    import torch._dynamo  # takes seconds

    logger, began = logging.getLogger(LOGGER_NAME), perf_counter()
    passes = [("training", loader, indices) for indices in list_example_indices_by_size(loader)]
    passes += [
        ("evaluation", eval_loader, indices)
        for eval_loader in held_out_loaders.values()
        for indices in list_example_indices_by_size(eval_loader)
    ]
    shown = ", ".join(dict.fromkeys(f"{len(indices)} in {kind}" for kind, _, indices in passes))
    batch_sizes = format_count(passes, "batch size")
    logger.info("torch compiles the model (--compile %s) for %s: %s.", config.compile, batch_sizes, shown)
    torch.compiler.reset()  # drops the code of an earlier run in this process
    # graphs are split at DDP's buckets, so that these overlap; torch cannot split recomputed blocks, tiny buckets, or
    # alike on any number of ranks
    is_split = not config.activation_checkpointing
    is_split = is_split and config.reduction == "fast"  # extra: exact
    torch._dynamo.config.optimize_ddp = is_split and not 0 < config.bucket_cap_mb < 1
    counters = torch._dynamo.utils.counters
    compiled, skipped = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
    state.model.compile(mode=config.compile, dynamic=loader.sampler.is_packed)
    for kind, source, indices in passes:
        batch, size = source.fetch_samples(indices)[2], len(indices)
        if kind == "training":
            train_twice(model, batch, state, hooks.compute_loss)
        else:
            for _ in range(2):
                evaluate_once(batch, state, hooks.compute_loss)
                for part in state.parts:
                    part.try_evaluation(state.model, state.precision, batch, size, size)
        seconds = perf_counter() - began
        logger.info("The model is compiled for batches of %d in %s, after %.0f s.", size, kind, seconds)
    if counters["stats"]["unique_graphs"] == compiled:
        raise UserError(
            f"--compile {config.compile} had no effect: torch {torch.__version__} found nothing to compile, as in a"
            " bare nn.Sequential. Give the model a class with a forward method, or use --compile off."
        )
    skipped = counters["inductor"]["cudagraph_skips"] - skipped
    if config.compile == "reduce-overhead" and skipped:
        text = "With --compile reduce-overhead %s cannot use CUDA graphs (TORCH_LOGS=cudagraphs shows why)."
        logger.info(text, format_count(skipped, "compiled part"))  # of rank 0; it is the same on the others


def list_example_indices_by_size(loader: GlobalBatchLoader) -> list[list[int]]:
    """The samples of a batch of each size; where lengths vary too, of the largest, and one: torch takes a size of 1 for
    a constant."""
    return [
        *loader.list_example_indices(),
        *([[0]] if loader.sampler.is_packed else loader.sampler.find_smallest_micro_batch()),
    ]
