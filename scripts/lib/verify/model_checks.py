# extra: verify
"""Checks of the model: its parameters, its evaluation, and its gradients, which equal those of the plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import plain_loop
from lib.row_order import check_row_order
from lib.values import (
    ROUNDING_TOLERANCE,
    error_text,
    find_shared_memory,
    format_plural,
    hash_nested,
    join_first_three,
    relative_error,
    scramble_global_rngs,
    spread_rows,
)
from lib.verify.fork import (
    ACCUMULATION_STEPS,
    BrokenInvariant,
    Fork,
    OptimizerUpdate,
    PlainProgress,
    Subset,
    measure_cancellation,
    pretend_rank,
    record_updates,
)
from lib.verify.loss_checks import check_recomputation
from lib.verify.model_notes import inspect_weights
from lib.verify.randomness import check_evaluation_draws
from lib.verify.result import NOT_CHECKED, PLEASE_CHECK, join_parts
from train import Training
from utils.data.sampler import MapDataset
from utils.data.transfer import to_device
from utils.distributed.collectives import all_gather_json
from utils.settings.errors import UserError
from utils.training.optimizer import check_param_groups


def parameters(fork: Fork) -> str:
    """Check that every trainable parameter gets a gradient from each micro-batch and is in a group.

    All ranks have to start with equal parameters. With find_unused_parameters, a parameter that no micro-batch uses is
    a note.
    """

    def check() -> tuple[str, int, list[str]]:
        scramble_global_rngs(fork.ctx.rank + 1)
        net = fork.create_model()
        start = hash_nested(net.state_dict())
        trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
        names = {p: name for name, p in net.named_parameters()}
        if shared := find_shared_memory(net):
            raise BrokenInvariant(
                f"The parameters {shared} share memory, but are two parameters, so an update of one changes the other."
                " Make them one parameter (head.weight = tokens.weight), or give each its own memory."
            )
        groups = check_param_groups(fork.hooks.param_groups(net, fork.config), names)
        in_groups = {id(p) for group in groups for p in group["params"]}
        if left_out := [name for name, p in trainable.items() if id(p) not in in_groups]:
            raise BrokenInvariant(
                f"These parameters are in no parameter group and are never trained: {join_first_three(left_out)}. Add"
                " them to param_groups."
            )
        net.train()
        loader, never = fork.create_loader(fork.small_train_set(), ctx=fork.ctx), list(trainable)
        for micro_batch in loader.micro_batches(0):
            net.zero_grad()
            fork.hooks.compute_loss(net, micro_batch.batch)["loss"][0].sum().backward()
            unused = [name for name, p in trainable.items() if p.grad is None]
            if unused and not fork.config.find_unused_parameters:
                raise BrokenInvariant(
                    f"A micro-batch does not use these parameters: {join_first_three(unused)}. DDP would wait for their"
                    " gradients forever. Use them in every forward pass, add --find_unused_parameters, or freeze them"
                    " in create_model with requires_grad_(False)."
                )
            never = [name for name in never if name in unused]
        return start, len(trainable), never

    start, count, never = fork.run_on_all_ranks(check)
    starts, nevers = all_gather_json(start, fork.ctx), all_gather_json(never, fork.ctx)
    if odd_rank := next((rank for rank, rank_start in enumerate(starts) if rank_start != starts[0]), 0):
        raise BrokenInvariant(
            f"Rank {odd_rank} has other initial weights than rank 0. create_model depends on the rank, or draws from"
            " numpy or random. Draw from torch's generator, which is seeded equally on all ranks."
        )
    (weight_notes,) = fork.divide_among_ranks([partial(inspect_weights, fork)])
    if fork.config.find_unused_parameters:
        never = [name for name in never if all(name in unused_names for unused_names in nevers)]
        note = ""
        if never:
            note = f"{PLEASE_CHECK}No micro-batch uses these parameters, so they are not trained: "
            note += f"{join_first_three(never)}."
        seen = f"{count} tensors are trained, each by some micro-batch. All ranks start equal."
        return join_parts(seen, note, weight_notes)
    seen = f"{count} tensors are trained, each by every micro-batch. All ranks start equal."
    return join_parts(seen, weight_notes)


def evaluation(fork: Fork) -> str:
    """Check that each held-out sample counts once on any number of ranks, as in one process."""
    sets = [dataset for dataset in (fork.train_set, fork.held_out) if dataset is not None]
    problems = fork.divide_among_ranks([partial(check_predict_order, fork, dataset) for dataset in sets])
    predict_note = next(
        (f"{NOT_CHECKED}whether predict keeps the order of samples: {problem}" for problem in problems if problem), ""
    )
    if fork.held_out is None:
        return join_parts(f"{NOT_CHECKED}there is no held-out set.", predict_note)
    size, ranks, counts = fork.small_config.batch_size, fork.ctx.world_size, []
    never: list[str] = []
    for count in (ranks * size + size // 2 + 1, max(1, ranks - 1)):
        subset, net = fork.held_out_subset(count), fork.create_model().eval()
        metrics = fork.evaluate(net, subset)
        # all ranks take part, because what summarize returns may be wrong on one rank only
        fork.run_on_all_ranks(
            lambda subset=subset, net=net, metrics=metrics: compare_evaluation(fork, subset, net, metrics)
        )
        counts.append(str(len(subset)))
        never = never if len(counts) > 1 else [name for name, value in metrics.items() if math.isnan(value)]
    never_note = f"{NOT_CHECKED}{', '.join(never)}, for which nothing counted." if never else ""
    draws_note = fork.run_on_all_ranks(lambda: check_evaluation_draws(fork, subset, net))
    seen = f"In sets of {' and '.join(counts)} samples each counts once. Loss and metrics are as in one process."
    return join_parts(seen, never_note, draws_note, predict_note)


def check_predict_order(fork: Fork, dataset: MapDataset) -> str:
    """Check that `predict` gives the outputs of a batch in the order of its samples.

    Returns:
        Why they could not be compared (empty: they were compared).

    Raises:
        UserError: if the order is another one.
    """
    net, subset = fork.create_model().eval(), Subset(dataset, spread_rows(64, len(dataset)), fork.dtype)
    fetch = fork.create_loader(subset).fetch_samples
    error = check_row_order(partial(fork.hooks.predict, net), lambda rows: fetch(rows)[2], len(subset))
    if isinstance(error, UserError):  # model.py may have no predict
        return str(error)
    return f"predict failed ({error_text(error)}). Define predict in model.py." if error else ""


def compare_evaluation(fork: Fork, subset: Subset, net: nn.Module, metrics: dict[str, float]) -> None:
    """Raise BrokenInvariant if an evaluation on all ranks differs from that of one process."""
    values, cancelled = measure_cancellation(partial(fork.evaluate_in_one_process, subset, net))
    relative = ROUNDING_TOLERANCE[fork.loss_dtype]  # the ranks add in another order
    for name, value in values.items():
        is_close = math.isclose(metrics[name], value, rel_tol=relative, abs_tol=1e-8 + relative * cancelled)
        if is_close or (math.isnan(value) and math.isnan(metrics[name])):  # nan means that nothing was counted
            continue
        seen = f"{name} of {len(subset)} held-out samples is {metrics[name]:.6g}, but {value:.6g} in one process."
        cause = (
            "Samples are repeated or left out, or summarize depends on the rank. Use create_evaluation_dataloader and"
            " Evaluation, and let summarize use only what it is given."
        )
        if fork.evaluate_in_one_process(subset, net, noise=1)[name] != value:
            cause = (
                "A second evaluation differs too, so the evaluation draws random numbers of Python or numpy, or changes"
                " data in place. Draw from torch's generators, which are seeded for each micro-batch."
            )
        raise BrokenInvariant(f"{seen} {cause}")


def gradient(fork: Fork) -> str:
    """Check that gradients of three global batches, the last one short, equal those of the plain loop.

    Both are computed with the same weights.
    """
    plain_settings = {"epochs": 1, "use_amp": False, "amp_dtype": "auto", "comm_hook": "none"}
    plain_settings["ema_decay"] = 0.0

    def gather_gradients(training: Training) -> None:
        for update in our_updates:
            update.gather_gradients(training.state)

    our_updates: list[OptimizerUpdate] = []
    with record_updates(our_updates):
        fork.train_short_run(
            "gradient", on_epoch_end=gather_gradients, eval_every=0, eval_every_steps=0, **plain_settings
        )
    our_model = fork.trainings["gradient"].state.model

    def run_plain_loop(noise: int) -> tuple[list[OptimizerUpdate], nn.Module]:
        subset, device = fork.small_train_set(), fork.ctx.device
        plain, transform = fork.small_train_set(), subset.device_transform
        plain.device_transform = lambda batch, seed, epoch, indices: transform(
            to_device(batch, device), seed, epoch, indices.to(device)
        )

        def groups(*given: Any) -> Any:
            with pretend_rank(ranks := fork.ctx.world_size, ranks + 1):  # this shows on one rank too
                return fork.hooks.param_groups(*given)

        # the result must not depend on how the same micro-batches are divided
        config = replace(fork.small_config, **plain_settings, grad_accum_steps=ACCUMULATION_STEPS + 1)
        replaced: Any = {"create_dataset": lambda *_: plain, "Progress": PlainProgress, "param_groups": groups}
        plain_updates: list[OptimizerUpdate] = []
        with mock.patch.multiple(plain_loop, **replaced), record_updates(plain_updates), pretend_rank():
            scramble_global_rngs(noise)
            *_, (net, *_) = plain_loop.plain_loop(config, ACCUMULATION_STEPS * fork.ctx.world_size, device)
        return plain_updates, net

    def check() -> str:
        plain_updates, net = run_plain_loop(99)

        def is_repeatable() -> bool:
            repeated_updates, repeated_net = run_plain_loop(100)
            pairs = zip(plain_updates, repeated_updates, strict=True)
            return all(torch.equal(flatten_gradients(a, net), flatten_gradients(b, repeated_net)) for a, b in pairs)

        rounding = ROUNDING_TOLERANCE[fork.loss_dtype]
        text = compare_updates(our_updates, our_model, plain_updates, net, rounding, is_repeatable)
        return join_parts(text, compare_buffers(our_model, net, rounding))

    recomputation_note, summary = fork.divide_among_ranks([partial(check_recomputation, fork), check])
    return join_parts(summary, recomputation_note)


def compare_updates(
    run_updates: list[OptimizerUpdate],
    our_model: nn.Module,
    plain_updates: list[OptimizerUpdate],
    plain_model: nn.Module,
    rounding: float,
    is_repeatable: Callable[[], bool],
) -> str:
    """Raise BrokenInvariant if an optimizer step received something else than in the plain loop.

    Args:
        run_updates, our_model: the updates and the model of the short run.
        plain_updates, plain_model: the updates and the model of the plain loop.
        rounding: the rounding that is tolerated.
        is_repeatable: returns whether a second plain loop gets the same gradients.
    """
    if len(run_updates) != len(plain_updates):
        raise BrokenInvariant(
            f"The epoch had {len(run_updates)} optimizer steps instead of {len(plain_updates)}. The training loop drops"
            " or repeats global batches. Compare it with train_one_epoch."
        )
    worst = 0.0
    for step, (run_update, plain) in enumerate(zip(run_updates, plain_updates, strict=True)):
        pairs = zip(chain(*run_update.settings), chain(*plain.settings), strict=False)
        if len(run_update.settings) != len(plain.settings) or not all(
            math.isclose(*pair, rel_tol=1e-9) for pair in pairs
        ):
            raise BrokenInvariant(
                f"In step {step} learning rate and weight decay are {run_update.settings}, but {plain.settings} in the"
                " plain loop. param_groups or the schedule depends on the ranks or on grad_accum_steps. Make them"
                " functions of the other fields and of the step."
            )
        used = [
            {name for name, p in model.named_parameters() if p in update.gradients}
            for update, model in ((run_update, our_model), (plain, plain_model))
        ]
        if odd := sorted(used[0] ^ used[1]):
            raise BrokenInvariant(
                f"In global batch {step} either the run or the plain loop uses these parameters, but not both:"
                f" {join_first_three(odd)}. What a batch uses depends on the rank, or on unkeyed random numbers. Draw"
                " from torch's generator."
            )
        a, b = flatten_gradients(run_update, our_model), flatten_gradients(plain, plain_model)
        error = relative_error(a, b)
        if not error <= rounding:
            ratio = (a @ b / (b @ b).clamp(min=1e-30)).item()
            if relative_error(a, ratio * b) <= 1e3 * rounding:
                cause = (
                    f"It is {ratio:.3g} times the plain loop's, as by a wrong divisor or factor. Check train_one_epoch."
                )
            elif not is_repeatable():
                cause = (
                    "A second plain loop differs too, so the code draws unkeyed random numbers or keeps state between"
                    " calls. Draw with utils.rng, and keep state in a buffer of the model."
                )
            else:
                cause = (
                    "The gradient depends on the rank, on the number of ranks, or on earlier computations of this"
                    " process. Let compute_loss depend only on the weights and its batch, and check train_one_epoch."
                )
            raise BrokenInvariant(f"The gradient of global batch {step} has a relative error of {error:.1e}. {cause}")
        worst = max(worst, error)
    return (
        f"The gradients of {len(run_updates)} global batches, the last one short, are within {worst:.0e} of those of"
        " the plain loop."
    )


def compare_buffers(our_model: nn.Module, plain_model: nn.Module, rounding: float) -> str:
    """Raise BrokenInvariant if a persistent buffer differs from the plain loop's after the epoch.

    Such buffers are statistics, counters and queues. BatchNorm's own counter is left out, because it counts optimizer
    steps here, and micro-batches in the plain loop.
    """
    saved = plain_model.state_dict()
    norms = [name for name, module in plain_model.named_modules() if isinstance(module, _BatchNorm)]
    counters = {f"{name}.num_batches_tracked" for name in norms}
    buffers = {name: buffer for name, buffer in plain_model.named_buffers() if name in saved and name not in counters}
    for name, plain in buffers.items():
        run_buffer = our_model.get_buffer(name)
        if torch.equal(run_buffer, plain):
            continue
        seen = "has another value than in the plain loop"
        if plain.is_floating_point() and run_buffer.shape == plain.shape:
            # a mean may be zero apart from rounding, while the variance beside it is not
            beside = plain_model.get_submodule(name.rpartition(".")[0]).buffers(recurse=False)
            size = max(tensor.norm().item() for tensor in beside if tensor.is_floating_point())
            error = (run_buffer - plain).norm().item() / max(size, 1e-30)
            if error <= rounding:
                continue
            seen = f"has a relative error of {error:.1e}"
        raise BrokenInvariant(
            f"{name} {seen} after an epoch. This buffer follows the micro-batches of its own rank, or counts padding."
            " Update it once per step over the global batch, as utils/training/batchnorm.py does."
        )
    return f"Both also agree on {format_plural(len(buffers), 'buffer')}." if buffers else ""


def flatten_gradients(update: OptimizerUpdate, model: nn.Module) -> Tensor:
    """Return all gradients as one float64 tensor on the CPU, in the order of the model's parameters."""
    return torch.cat(
        [update.gradients[p].double().flatten().cpu() for p in model.parameters() if p in update.gradients]
    )
