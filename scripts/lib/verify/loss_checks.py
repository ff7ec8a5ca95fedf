# extra: verify
"""Checks of the loss: its sums add up, and the loss of a micro-batch depends on nothing but itself and the weights."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import model as your_model
from config import TrainingConfig
from lib.values import (
    ADDITIVITY_TOLERANCE,
    ROUNDING_TOLERANCE,
    collect_sums,
    compute_sums,
    error_text,
    format_tensor,
    hash_rng_states,
    join_batches,
    join_first_three,
    relative_error,
    scramble_global_rngs,
)
from lib.verify.fork import (
    ACCUMULATION_STEPS,
    BrokenInvariant,
    Fork,
    measure_cancellation,
    perturb_parameters,
    pretend_rank,
)
from lib.verify.loss_notes import inspect_passes
from lib.verify.precision_checks import measure_rounding
from lib.verify.randomness import AdvanceGenerators
from lib.verify.result import NOT_CHECKED, PLEASE_CHECK, join_parts
from lib.verify.segments_check import check_segments
from utils.training.hooks import ModelHooks
from utils.training.parts.loss_terms import LossTerms

DECLARED_DEPENDENCE = (
    f"{PLEASE_CHECK}depends_on_batch is declared, so the loss of a sample may depend on the others in its micro-batch."
    " Such a loss is the same on any number of ranks and after a resume, but not with another --batch_size."
)
IS_MEAN = "It is a mean instead of a sum. Let compute_loss return sums over the micro-batch, and their counts."
DOES_NOT_ADD_UP = (
    "It does not add up over samples. Let compute_loss return sums over the micro-batch, and their counts, or, if the"
    " loss of a sample depends on the others in its micro-batch by intent, as a contrastive loss does, declare"
    " depends_on_batch = True in model.py."
)
DRAW_COUNT = 8  # draws of a random loss
PRETENDED_RANKS = 4  # ranks of which a process pretends to be one


def loss(fork: Fork) -> str:
    """Check that compute_loss returns sums and counts.

    Those of a batch equal the totals over its parts, for several weights. They depend on the weights and the batch, and
    not on how the work is divided. No generator is seeded again.
    """
    # the passes come first, because numbers that are drawn again do not add up either
    pass_note = fork.run_on_all_ranks(lambda: check_passes(fork))
    is_declared = getattr(your_model, "depends_on_batch", False)
    adding = [check_loss_is_sum] if is_declared else [partial(check_sums_add_up, number=number) for number in range(3)]
    *_, segments_note, loss_text, rounding_note, inspection_notes = fork.divide_among_ranks(
        [partial(check, fork) for check in (*adding, check_segments, describe_loss, measure_rounding, inspect_passes)]
    )
    parts = [loss_text, rounding_note, segments_note, inspection_notes, pass_note]
    if is_declared:
        return join_parts(*parts, DECLARED_DEPENDENCE)
    dtype = str(fork.loss_dtype).removeprefix("torch.")
    return join_parts(f"Sums and counts add up over samples, up to the rounding of {dtype}.", *parts)


def check_sums_add_up(fork: Fork, number: int) -> str:
    """Raise BrokenInvariant if the sums of a batch are not the totals over its halves.

    Args:
        fork: the fork that is checked.
        number: chooses the weights and, if there are enough samples, the pair of halves.
    """
    for is_training, subset in fork.modes():
        size, loader = min(fork.small_config.batch_size, len(subset) // 2), fork.create_loader(subset)
        if not size:  # one sample cannot be split
            continue
        begin = min(number * size, len(subset) - 2 * size)
        net, middle, end = perturb_parameters(fork.create_model(), number), begin + size, begin + 2 * size
        parts = range(begin, middle), range(middle, end), range(begin, end)
        *halves, whole = (loader.fetch_samples([*part])[2] for part in parts)
        joined_batches = []
        with suppress(RuntimeError, ValueError):  # the tensors may have no rows, or other shapes
            joined_batches = [*halves, join_batches(halves, size)]
        raise_if_confirmed(
            fork, partial(compare_halves, fork, net, is_training, number), [*halves, whole], joined_batches
        )
    return ""


def raise_if_confirmed(fork: Fork, compare: Callable[..., str], batches: list[Any], joined_batches: list[Any]) -> None:
    """Raise BrokenInvariant for what `compare` finds in two kinds of batches.

    One kind comes from the loader, which may mix samples or pad them otherwise. The other kind is joined of parts, if
    that is possible. Its tensors may have as many rows as samples by chance.
    """
    problem = compare(batches, bool(joined_batches) or not hasattr(fork.train_set, "device_transform"))
    if problem and joined_batches:
        with suppress(Exception):  # the loss may not accept joined batches
            problem = compare(joined_batches) and problem
    if problem:
        raise BrokenInvariant(problem)


def compare_halves(
    fork: Fork, net: nn.Module, is_training: bool, number: int, batches: list[Any], is_comparable: bool = True
) -> str:
    """Return what does not add up. The batches are two halves and the whole."""
    batch_sums, cancelled = measure_cancellation(
        lambda: [compute_sums(fork.hooks, net, batch, is_training) for batch in batches]
    )
    first, second, whole = batch_sums
    for name, value in whole.items():
        # a fork may compute in float32 on purpose
        tolerance = max(ADDITIVITY_TOLERANCE[fork.loss_dtype], ADDITIVITY_TOLERANCE.get(value.dtype, 0.0))
        value, parts = value.double(), first[name].double() + second[name].double()
        size, difference = value.norm(), (parts - value).norm()
        is_mean = name.endswith("sum") and size > 1e-6 * cancelled and relative_error(parts, 2 * value) <= 0.05
        if is_mean or (difference > tolerance * (size + cancelled) and is_comparable):
            with AdvanceGenerators():
                repeated = compute_sums(fork.hooks, net, batches[2], is_training)[name].double()
            if not torch.equal(value, repeated):  # the value is random, and need not add up
                if number or name != "loss's sum" or not is_mean_of_draws(fork, net, batches, is_training):
                    continue
                is_mean = True
            cause = IS_MEAN if is_mean else DOES_NOT_ADD_UP
            return (
                f"{name} is {format_tensor(value)} for a batch, but {format_tensor(parts)} for its halves together."
                f" {cause}"
            )
    return ""


def is_mean_of_draws(fork: Fork, net: nn.Module, batches: list[Any], is_training: bool) -> bool:
    """Return whether a random loss of a batch is about half of the sum over its halves, and not all of it."""
    drawn = [
        [compute_sums(fork.hooks, net, batch, is_training)["loss's sum"].double().sum() for batch in batches]
        for _ in range(DRAW_COUNT)
    ]
    first, second, whole = torch.tensor(drawn).T
    excess = (first + second - 1.5 * whole) * whole.mean().sign()
    return bool(excess.mean() > 3 * excess.std() / DRAW_COUNT**0.5)


def check_loss_is_sum(fork: Fork) -> str:
    """Raise BrokenInvariant if a loss that declares depends_on_batch is a mean.

    The batches hold each sample once, twice and four times. At the second doubling a sum grows by twice as much as at
    the first one, also where a sample gets a larger loss beside more others. A mean does not.
    """
    for is_training, subset in fork.modes():
        indices = [*range(min(fork.small_config.batch_size, len(subset)))]
        loader = fork.create_loader(subset)
        counts = (1, 2, 4)
        batches, joined_batches = [loader.fetch_samples(count * indices)[2] for count in counts], []
        with suppress(RuntimeError, ValueError):  # the tensors may have no rows
            joined_batches = [join_batches(count * batches[:1], len(indices)) for count in counts]
        raise_if_confirmed(fork, partial(find_mean, fork, fork.create_model(), is_training), batches, joined_batches)
    return ""


def find_mean(fork: Fork, net: nn.Module, is_training: bool, batches: list[Any], _: bool = True) -> str:
    """Return what is a mean. The batches hold the same samples once, twice and four times."""
    tolerance = ADDITIVITY_TOLERANCE[fork.loss_dtype]
    batch_sums, cancelled = measure_cancellation(
        lambda: [compute_sums(fork.hooks, net, batch, is_training) for batch in batches]
    )
    for name in (name for name in batch_sums[0] if name.startswith("loss") and name.endswith("sum")):
        one, two, four = (named_sums[name].double() for named_sums in batch_sums)
        least = 1.5 * (two - one).norm() + tolerance * four.norm()
        if four.norm() > tolerance * cancelled and (four - two).norm() <= least:
            seen = (
                f"{name} of a batch is {format_tensor(one)}, {format_tensor(two)} with each sample twice in the batch"
            )
            return f"{seen}, and {format_tensor(four)} with each sample four times. {IS_MEAN}"
    return ""


@dataclass
class PassResult:
    """The results of a pass over a micro-batch."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # counts and "the gradient" are here too
    after_forward: dict[str, str] = field(default_factory=dict)  # the states of the global generators
    after_backward: dict[str, str] = field(default_factory=dict)
    has_recomputation: bool = False  # whether the backward pass ran forward passes
    parameters: dict[str, float] = field(default_factory=dict)  # sums of parameters after the forward pass


def run_pass(
    fork: Fork,
    is_training: bool = True,
    seed: int = 1,
    backward_seed: int | None = 0,
    ranks: int = 1,
    accumulation: int = ACCUMULATION_STEPS,
    first: int = 0,
) -> PassResult:
    """Make a pass over two samples, with a new model and a new copy of the fork's module.

    Args:
        fork: the fork that is checked.
        is_training: whether compute_loss is called as in training.
        seed: the seed of the global generators.
        backward_seed: the seed of the global generators between the forward and the backward pass. With 0 they are not
            seeded, and with None there is no backward pass.
        ranks, accumulation: the values that the fork sees as the number of ranks and as grad_accum_steps.
        first: the index of the first sample.
    """
    config = replace(fork.small_config, grad_accum_steps=accumulation)
    result = PassResult()
    mode = RecomputationRecorder()
    subset = fork.small_train_set() if is_training else fork.held_out_subset(2)
    count = min(2, fork.small_config.batch_size, len(subset))
    first = min(first, len(subset) - count)
    batch = fork.create_loader(subset).fetch_samples([*range(first, first + count)])[2]
    with reload_hooks(fork, config, ranks) as hooks:
        torch.manual_seed(config.seed)
        with pretend_rank(0, ranks):  # rank 0 may be the one that reads weights from a file
            net = hooks.create_model(config, fork.ctx.device).train(is_training)
        for module in net.modules():  # a single process has nothing to synchronize
            module.training &= not isinstance(module, nn.SyncBatchNorm)
        scramble_global_rngs(seed)
        with pretend_rank(ranks - 1, ranks), torch.set_grad_enabled(is_training):
            metrics = hooks.compute_loss(net, batch)
            result.sums, result.after_forward = collect_sums(hooks, metrics, batch), hash_rng_states()
            result.parameters = {name: p.sum().item() for name, p in net.named_parameters()}
            if is_training and backward_seed is not None:
                if backward_seed:
                    scramble_global_rngs(backward_seed)
                total = metrics["loss"][0].sum()
                unit_grad = torch.ones_like(total)  # backward() would create it within the mode
                with mode, mode.watch_modules():
                    total.backward(unit_grad)
                result.after_backward, result.has_recomputation = hash_rng_states(), mode.has_recomputed
                gradients = [p.grad for p in net.parameters() if p.grad is not None]
                result.sums["the gradient"] = torch.cat([gradient.detach().flatten().cpu() for gradient in gradients])
    return result


class RecomputationRecorder(TorchDispatchMode):
    """Notes whether modules run, or operators whose gradients are recorded.

    In a backward pass, both show that the forward pass is computed once more.
    """

    has_recomputed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_recomputed |= torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watch_modules(self) -> Iterator[None]:
        def note(*_: Any) -> None:
            self.has_recomputed = True

        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def reload_hooks(fork: Fork, config: TrainingConfig, ranks: int) -> Iterator[ModelHooks]:
    """Yield the functions of a new copy of model.py, which may read the number of ranks when it is imported.

    Args:
        fork: the fork that is checked.
        config: the config that these functions see.
        ranks: the number of ranks that they see.
    """
    spec: Any = importlib.util.spec_from_file_location(your_model.__name__, str(your_model.__file__))
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {your_model.__name__: module}), pretend_rank(ranks - 1, ranks):
        try:
            spec.loader.exec_module(module)
        except Exception:  # model.py may register a name, which is possible only once
            module = your_model
        yield ModelHooks.from_module(module, config, fork.ctx.device)


def check_passes(fork: Fork) -> str:
    """Raise BrokenInvariant if a pass depends on grad_accum_steps or the ranks, or seeds a global generator.

    Call this on all ranks, since a loss may sum over them.
    """
    passes = {is_training: run_pass(fork, is_training) for is_training, _ in fork.modes()}
    fork.first_pass = passes[True]
    for is_training, first in passes.items():
        reseeded = run_pass(fork, is_training, seed=2, backward_seed=None)
        check_generators("forward", first.after_forward, reseeded.after_forward)
    for is_training, first in passes.items():
        repeat_pass = partial(run_pass, fork, is_training)
        try:
            rescaled = repeat_pass(ranks=PRETENDED_RANKS, accumulation=ACCUMULATION_STEPS + 1)
        except Exception as error:
            return f"{NOT_CHECKED}the loss as one of {PRETENDED_RANKS} ranks, where it fails ({error_text(error)})."
        if (wrong := find_differing_sum(fork, first, rescaled)) and not find_differing_sum(fork, first, repeat_pass()):
            is_accumulation = find_differing_sum(fork, first, repeat_pass(accumulation=ACCUMULATION_STEPS + 1))
            cause = "grad_accum_steps" if is_accumulation else "the rank or the number of ranks"
            raise BrokenInvariant(
                f"{wrong} of a micro-batch changes with {cause}, so the model or compute_loss reads {cause}. Leave that"
                " out, since the template divides by the count over all ranks and micro-batches."
            )
    return ""


def check_generators(pass_name: str, first: dict[str, str], second: dict[str, str]) -> None:
    """Raise BrokenInvariant if a generator has the same state after two passes that began with different states."""
    if same := [name for name in first if first[name] == second[name]]:
        raise BrokenInvariant(
            f"{same[0]} global generator has the same state after a {pass_name} pass, whatever its seed was. The model"
            " or compute_loss seeds it again, so each step draws the same numbers. Draw from a torch.Generator of your"
            " own, or seed within torch.random.fork_rng()."
        )


def check_recomputation(fork: Fork) -> str:
    """Raise BrokenInvariant if the backward pass draws random numbers to compute the forward pass once more."""
    first, scrambled = fork.first_pass or run_pass(fork), run_pass(fork, backward_seed=3)
    check_generators("backward", first.after_backward, scrambled.after_backward)
    if not find_differing_sum(fork, first, scrambled) or find_differing_sum(fork, first, run_pass(fork)):
        return ""
    if not scrambled.has_recomputation:
        return f"{PLEASE_CHECK}The gradient depends on random numbers that the backward pass draws."
    raise BrokenInvariant(
        "The gradient of a micro-batch depends on random numbers drawn in the backward pass. Layers are computed again"
        " there with other numbers than in the forward pass, such as another dropout mask. Restore the state of the"
        " generators, as torch.utils.checkpoint does with preserve_rng_state=True."
    )


def find_differing_sum(fork: Fork, a: PassResult, b: PassResult) -> str:
    """Return the name of a sum, a count or the gradient that differs by more than rounding, or "" if none does."""
    pairs = {name: (a.sums[name].double(), b.sums[name].double()) for name in a.sums.keys() & b.sums}
    limit = ROUNDING_TOLERANCE[fork.loss_dtype]
    wrong = [name for name, (x, y) in pairs.items() if not torch.equal(x, y) and not relative_error(x, y) <= limit]
    return min(wrong, default="")


def describe_loss(fork: Fork) -> str:
    """Describe consistent values that only a person can judge: the loss, and metrics that count otherwise."""
    net, means, notes = fork.create_model(), [], []
    for is_training, subset in fork.modes():
        kind = "training" if is_training else "held-out"
        count = min(fork.small_config.batch_size, len(subset))
        batch = fork.create_loader(subset).fetch_samples([*range(count)])[2]
        net.train(is_training)
        with torch.set_grad_enabled(is_training):
            metrics = fork.hooks.compute_loss(net, batch)
        total, counted = map(torch.as_tensor, metrics["loss"][:2])
        means.append(f"{torch.where(counted == 0, 0.0, total / counted).sum().item():.6g} for {kind} samples")
        counts = {name: torch.as_tensor(entry[1]).double().sum().item() / count for name, entry in metrics.items()}
        other_counts = [
            f"{name} {per_sample:.6g}"
            for name, per_sample in counts.items()
            if not math.isclose(per_sample, counts["loss"])
        ]
        if fork.hooks.find_part(LossTerms):
            continue
        if other_counts:
            notes.append(
                f"{PLEASE_CHECK}Metrics of {kind} samples are means over other counts than the loss. The counts per"
                f" sample are loss {counts['loss']:.6g}, {join_first_three(other_counts)}."
            )
    return join_parts(f"With the same weights, the loss is {' and '.join(means)}.", *notes)
