# extra: verify
"""Look for random numbers in compute_loss and predict, for smoothed labels, and for seeds in a fork's code."""

from __future__ import annotations

import functools
import random
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lib.values import hash_nested, hash_rng_states
from lib.verify.fork import BrokenInvariant, Fork, Subset, allow_failure
from lib.verify.hidden_state import find_file_owner, list_fork_modules
from lib.verify.result import PLEASE_CHECK, join_parts
from utils import rng
from utils.rng import derive_seed, hash_bits

DROPOUT_NAMES = re.compile("dropout|rrelu|attention")
# the functions and classes of numpy.random that take a seed
NUMPY_SEED_NAMES = "seed default_rng RandomState SeedSequence MT19937 PCG64 PCG64DXSM Philox SFC64".split()


class AdvanceGenerators(TorchFunctionMode):
    """Lets each function draw other numbers from the generator that it gets."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if generator := kwargs.get("generator"):
            torch.rand((), generator=generator, device=generator.device)
        return func(*args, **kwargs)


class DropoutRecorder(TorchFunctionMode):
    """Notes the dropout functions of torch that draw random numbers, and whether labels are smoothed.

    Functions that have a dropout among others count too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout_calls: list[str] = []
        self.has_label_smoothing = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "cross_entropy":
            self.has_label_smoothing |= kwargs.get("label_smoothing", args[7] if len(args) > 7 else 0.0) > 0
        if not DROPOUT_NAMES.search(name):
            return func(*args, **kwargs)
        before = hash_rng_states()
        result = func(*args, **kwargs)
        if hash_rng_states() != before:
            self.dropout_calls.append(name)
        return result


@allow_failure("the random numbers of an evaluation")
def check_evaluation_draws(fork: Fork, subset: Subset, net: nn.Module) -> str:
    """Return a note if an evaluation depends on what torch's generators draw, or if it smooths labels.

    Raises:
        BrokenInvariant: if a dropout draws random numbers.
    """
    with DropoutRecorder() as dropping:
        values = [fork.evaluate_in_one_process(subset, net, split=split) for split in ("val", "another")]
    if dropping.dropout_calls:
        raise BrokenInvariant(
            f"{dropping.dropout_calls[0]} drops values in evaluation mode. Pass training=self.training to F.dropout and"
            " similar functions, or use nn.Dropout."
        )
    drawn = [name for name in values[0] if hash_nested(values[0][name]) != hash_nested(values[1][name])]
    notes = []
    if drawn:
        notes.append(
            f"{PLEASE_CHECK}{drawn[0]} depends on random numbers, which are the same ones for each --eval_batch_size."
        )
    if dropping.has_label_smoothing:
        notes.append(
            f"{PLEASE_CHECK}Labels are smoothed in evaluation too. Smooth them only if torch.is_grad_enabled()."
        )
    return join_parts(*notes)


@contextmanager
def replace_seeds(*holders: Any) -> Iterator[None]:
    """Replace the seeds that code outside the template gives to generators, so that they draw other numbers.

    These are the global generators of torch, Python and numpy, and private ones, created within this context or
    earlier. The template's own seeds of global generators stay.

    Args:
        holders: data sets whose attributes may be generators that are seeded again.
    """
    seeding: list[Any] = [torch.manual_seed, random.seed]
    namespaces: list[Any] = [torch, torch.random, random, *list_fork_modules(), *holders]
    numpy: Any = sys.modules.get("numpy")
    if numpy:
        seeding += [getattr(numpy.random, name) for name in NUMPY_SEED_NAMES]
        namespaces.append(numpy.random)
    replacements = {id(plain): wrap_with_other_seed(plain) for plain in seeding}
    replacements[id(torch.default_generator)] = ReseededGenerator()
    with ExitStack() as stack:
        for namespace in namespaces:
            for name, value in [*vars(namespace).items()]:
                new = replacements.get(id(value))
                if numpy and type(value) is numpy.random.RandomState:  # the methods of its type cannot be replaced
                    new = replacements[id(type(value))]()
                    new.set_state(value.get_state())
                if new:
                    stack.enter_context(mock.patch.object(namespace, name, new))
        stack.enter_context(mock.patch.object(random.Random, "seed", wrap_with_other_seed(random.Random.seed)))
        stack.enter_context(mock.patch.object(rng, "hash_bits", lambda numbers, key: hash_bits(numbers, key ^ 1)))
        stack.enter_context(AdvanceGenerators())
        yield


class ReseededGenerator(torch.Generator):
    """Stands for torch's default generator, whose own methods cannot be replaced."""

    get_state = torch.default_generator.get_state
    set_state = torch.default_generator.set_state

    def __init__(self) -> None:
        super().__init__()
        self.manual_seed = wrap_with_other_seed(torch.default_generator.manual_seed)  # type: ignore[method-assign]


class BaseInstanceMeta(type):
    """Makes objects of the class from which it inherits instances, too."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__base__)  # type: ignore[arg-type]


def wrap_with_other_seed(plain: Any) -> Any:
    """Return a function or class that gets another seed, unless the template calls it."""
    if isinstance(plain, type):
        methods = [name for name in ("__init__", "seed") if hasattr(plain, name)]
        return BaseInstanceMeta(
            plain.__name__, (plain,), {name: wrap_with_other_seed(getattr(plain, name)) for name in methods}
        )

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if find_file_owner(sys._getframe(1).f_code.co_filename) == "template":
            return plain(*args, **kwargs)
        return plain(*map(change_seed, args), **{name: change_seed(value) for name, value in kwargs.items()})

    return call


def change_seed(value: Any) -> Any:
    """Return another number in place of a number, text or sequence. None, generators and other objects stay."""
    is_seed = hasattr(value, "__index__") or hasattr(value, "__len__")
    return derive_seed("other", value) % 2**32 if is_seed else value
