# extra: verify
"""Random numbers: those that compute_loss and predict draw, label smoothing in an evaluation, and other seeds."""

from __future__ import annotations

import functools
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lib.values import digest, generators
from lib.verify.fork import Broken, Fork, Subset
from lib.verify.memory import modules_of_yours, owner_of
from utils import rng

DROPS = re.compile("dropout|rrelu|attention")
SEED_NAMES = ("seed", "entropy", "a", "x")  # of the argument that is a seed
SEEDED_TYPES = ("RandomState", "SeedSequence", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")  # of numpy.random


class Advancing(TorchFunctionMode):
    """Lets each function draw other numbers from the generator that it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if generator := kwargs.get("generator"):
            torch.rand((), generator=generator, device=generator.device)
        return func(*args, **kwargs)


class Dropping(TorchFunctionMode):
    """Notes the names of torch's dropout functions, and of those with a dropout, that draw random numbers, and whether
    labels are smoothed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.smooths = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "cross_entropy":
            self.smooths |= kwargs.get("label_smoothing", args[7] if len(args) > 7 else 0.0) > 0
        if not DROPS.search(name):
            return func(*args, **kwargs)
        before = generators()
        result = func(*args, **kwargs)
        self.found += [name] * (generators() != before)
        return result


def draws_in_evaluation(fork: Fork, subset: Subset, net: nn.Module) -> str:
    """A note if the result depends on what torch's generators draw, and if labels are smoothed. Raises Broken if a
    dropout draws."""
    with Dropping() as dropping:
        values = [fork.plain_evaluation(subset, net, split=split) for split in ("val", "another")]
    if dropping.found:
        raise Broken(
            f"{dropping.found[0]} drops values in evaluation mode; pass training=self.training to F.dropout and similar"
            " functions, or use nn.Dropout"
        )
    drawn = [name for name in values[0] if digest(values[0][name]) != digest(values[1][name])]
    notes = [f"{name} depends on random numbers: the same ones for each eval_batch_size" for name in drawn[:1]]
    if dropping.smooths:
        notes.append("labels are smoothed in evaluation too; do that only if torch.is_grad_enabled()")
    return "".join(f"; please check: {note}" for note in notes)


@contextmanager
def other_seeds(*holders: Any) -> Iterator[None]:
    """Within it, seeds that code outside the template gives to a generator are replaced, so that it draws other
    numbers: global generators of torch, Python and numpy, and private ones, created here or earlier.

    The template's own seeds of global generators stay.

    Args:
        holders: data sets whose attributes may be generators that are seeded again.
    """
    replaced = {id(function): with_other_seed(function) for function in (torch.manual_seed, random.seed)}
    places: list[Any] = [torch, torch.random, random, *modules_of_yours(), *holders]
    numpy: Any = sys.modules.get("numpy")
    if numpy:
        places.append(numpy.random)
        replaced |= {id(each): with_other_seed(each) for each in (numpy.random.seed, numpy.random.default_rng)}
        kinds = [getattr(numpy.random, name) for name in SEEDED_TYPES]
        replaced |= {id(kind): with_other_seed_type(kind) for kind in kinds}
    with ExitStack() as stack:
        for place in places:
            for name, value in [*vars(place).items()]:
                new = replaced.get(id(value))
                if numpy and type(value) is numpy.random.RandomState and place is not numpy.random:
                    new = replaced[id(type(value))]()  # methods of the type cannot be replaced
                    new.set_state(value.get_state())
                if new:
                    stack.enter_context(mock.patch.object(place, name, new))
        stack.enter_context(mock.patch.object(random.Random, "seed", with_other_seed(random.Random.seed, place=1)))
        stack.enter_context(mock.patch.object(rng, "mix", functools.partial(mix_with_other_key, rng.mix)))
        stack.enter_context(Advancing())
        yield


def with_other_seed(function: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
    """The function, with another seed unless the template calls it. place: of the seed among the arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if owner_of(sys._getframe(1).f_code.co_filename) == "template":
            return function(*args, **kwargs)
        others = [other_seed(value) if k == place else value for k, value in enumerate(args)]
        return function(*others, **{k: other_seed(v) if k in SEED_NAMES else v for k, v in kwargs.items()})

    return call


class AlsoOfBase(type):
    """Objects that were created before are instances, too."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__base__)  # type: ignore[arg-type]


def with_other_seed_type(kind: type) -> type:
    methods = [name for name in ("__init__", "seed") if hasattr(kind, name)]
    return AlsoOfBase(kind.__name__, (kind,), {name: with_other_seed(getattr(kind, name), place=1) for name in methods})


def other_seed(seed: Any) -> Any:
    """None stays, and so do generators of numpy, which have got another seed when they were created."""
    if seed is None or type(seed).__module__.startswith("numpy.random"):
        return seed
    return rng.derive_seed("other", seed) % 2**32


def mix_with_other_key(mix: Callable[..., Any], numbers: Any, key: int) -> Any:
    return mix(numbers, key ^ 1)
