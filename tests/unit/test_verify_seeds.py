# extra: verify
"""replace_seeds of verify: seeds that code of a fork sets are others within it, and the same again after it."""

import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from lib.verify import randomness
from lib.verify.randomness import replace_seeds
from utils.rng import sample_draws, seed_host

KEPT = SimpleNamespace(generator=torch.Generator(), python=random.Random(), old=numpy.random.RandomState(3))


def after(_, draw):
    return draw()


def forked():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.rand(()).item()


def of_numpy(bits):
    return numpy.random.Generator(bits).random()


DRAWS = {
    "torch.manual_seed": lambda: after(torch.manual_seed(1), lambda: torch.rand(()).item()),
    "torch.manual_seed in fork_rng": forked,
    "torch.default_generator": lambda: after(torch.default_generator.manual_seed(1), lambda: torch.rand(()).item()),
    "random.seed": lambda: after(random.seed(a=1, version=2), random.random),
    "numpy.random.seed": lambda: after(numpy.random.seed(1), numpy.random.rand),
    "Generator": lambda: torch.rand((), generator=torch.Generator().manual_seed(1)).item(),
    "a kept Generator": lambda: torch.rand((), generator=KEPT.generator.manual_seed(1)).item(),
    "default_rng": lambda: numpy.random.default_rng(seed=1).random(),
    "default_rng of a list": lambda: numpy.random.default_rng([1, 2]).random(),
    "SeedSequence": lambda: numpy.random.default_rng(numpy.random.SeedSequence(1)).random(),
    "PCG64": lambda: of_numpy(numpy.random.PCG64(1)),
    "Philox": lambda: of_numpy(numpy.random.Philox(1)),
    "MT19937": lambda: of_numpy(numpy.random.MT19937(1)),
    "RandomState": lambda: numpy.random.RandomState(1).rand(),
    "a kept RandomState": lambda: after(KEPT.old.seed(1), lambda: KEPT.old.rand()),
    "Random": lambda: random.Random("a text").random(),
    "a kept Random": lambda: after(KEPT.python.seed(1), KEPT.python.random),
    "sample_draws": lambda: sample_draws(0, 0, torch.tensor([1]), 1).item(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_seed_of_the_fork_is_another_one(kind, monkeypatch):
    monkeypatch.setattr(randomness, "find_file_owner", {__file__: "you"}.get)
    draw = DRAWS[kind]
    before = draw()
    with replace_seeds(KEPT):
        other = draw()
        assert draw() == other != before
    assert draw() == before


def test_seeds_of_the_template_and_types_stay():
    def draw():
        seed_host("sample", 1)
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    before = draw()
    with replace_seeds(KEPT):
        assert draw() == before
        assert isinstance(numpy.random.RandomState(1), type(KEPT.old))
        assert isinstance(KEPT.old, numpy.random.RandomState)
    assert type(KEPT.old) is numpy.random.RandomState
