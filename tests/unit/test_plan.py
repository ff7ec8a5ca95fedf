"""The assignment of micro-batches, for any sizes: an independent definition, and what must follow from it."""

import math
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from config import TrainingConfig
from ddp_utils import DistributedContext
from plain_loop import number
from ranks import package
from utils.data.loader import create_evaluation_dataloader
from utils.data.sampler import Assignment, GlobalBatchSampler
from utils.extras.exact.reduction import ContiguousAssignment  # extra: exact

hypothesis, st = package("hypothesis"), package("hypothesis.strategies")
EXAMPLES = hypothesis.settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),  # which measures time
)
WAYS = {
    "every-nth": Assignment,
    "runs": ContiguousAssignment,  # extra: exact
}
SIZES = {"n": st.integers(1, 60), "size": st.integers(1, 7), "ranks": st.integers(1, 6), "epoch": st.integers(0, 3)}


def steps_of(sampler, epoch, start=0):
    """The global batches of an epoch as a rank sees them: its micro-batches, and the samples of all ranks."""
    steps = [SimpleNamespace(samples=0, mine=[])]
    for micro_batch in sampler.micro_batches(epoch, start):
        steps[-1].mine.append(micro_batch)
        if micro_batch.is_last:
            assert {steps[-1].mine[0].samples_in_step} == {m.samples_in_step for m in steps[-1].mine}
            steps[-1].samples = micro_batch.samples_in_step
            steps.append(SimpleNamespace(samples=0, mine=[]))
    assert not steps.pop().mine
    return steps


def samplers(n, ranks, size, per_step, way="every-nth", is_padded=False, **options):
    """Those of all ranks."""
    options |= {"batch_size": size, "micro_batches_per_step": per_step, "seed": 1}
    world = [WAYS[way](rank, ranks, is_padded) for rank in range(ranks)]
    return [GlobalBatchSampler(range(n), assignment=assignment, **options) for assignment in world]


def check_steps(all_steps, expected, size):
    """The ranks compute the expected micro-batches of each step together, each once. Yields those of each rank."""
    assert {len(rank_steps) for rank_steps in all_steps} == {len(expected)}
    for steps, entries in zip(zip(*all_steps, strict=True), expected, strict=True):
        by_rank = [step.mine for step in steps]
        assert {step.samples for step in steps} == {len(entries)}
        computed = [m for own in by_rank for m in own if not m.is_padding]
        by_number = {m.number: m.indices for m in computed}
        assert len(by_number) == len(computed) and [*chain(*(by_number[k] for k in sorted(by_number)))] == entries
        assert all(len(by_number[k]) == size for k in sorted(by_number)[:-1])
        for own in by_rank:
            assert [m.is_last for m in own] == [False] * (len(own) - 1) + [True]  # at least one
            assert [m.is_padding for m in own] == sorted(m.is_padding for m in own)
            assert all(1 <= len(m.indices) <= size for m in own)  # padding has samples, as all have
        yield by_rank, by_number


@pytest.mark.guarantee("order", "gradient")
@EXAMPLES
@hypothesis.given(
    **SIZES,
    per_step=st.integers(1, 9),
    drop=st.booleans(),
    way=st.sampled_from([*WAYS]),
    is_padded=st.booleans(),
    shuffle=st.booleans(),
    position=st.floats(0, 1),
    later=st.integers(-1, 3),
)
def test_any_ranks_compute_the_same_global_batches(
    n, size, per_step, ranks, epoch, drop, way, is_padded, shuffle, position, later
):
    world, whole = samplers(n, ranks, size, per_step, way, is_padded, shuffle=shuffle, drop_last=drop), size * per_step
    generator = torch.Generator().manual_seed(number("order", 1, epoch))
    order = torch.randperm(n, generator=generator).tolist() if shuffle else [*range(n)]
    order = order[: n // whole * whole] if drop else order
    assert all(
        sampler.epoch_order(epoch).tolist() == order and sampler.samples_per_epoch == len(order) for sampler in world
    )
    start = round(position * len(order))  # of a run that had another global batch, too
    expected = [order[at : at + whole] for at in range(start, len(order), whole)]
    left = len(expected) + max(0, later) * math.ceil(len(order) / whole) if later >= 0 else 0
    assert {sampler.count_remaining_steps(epoch, start, epoch + 1 + later) for sampler in world} == {left}
    for by_rank, by_number in check_steps([steps_of(sampler, epoch, start) for sampler in world], expected, size):
        assert sorted(by_number) == [*range(len(by_number))]
        assert {m.micro_batches_in_step for own in by_rank for m in own} == {len(by_number)}
        lengths, most = [len(own) for own in by_rank], math.ceil(len(by_number) / ranks)
        if is_padded:
            assert {*lengths} == {most}
        if way == "runs":
            assert max(lengths) <= most  # consecutive ones
            runs = [[m.number for m in own if not m.is_padding] for own in by_rank]
            assert all(run == [*range(run[0], run[0] + len(run))] for run in runs if run)
        else:  # a collective that takes one micro-batch meets `timeout`
            assert max(lengths) == most and max(lengths) - min(lengths) <= 1
            assert all(m.is_padding or m.number % ranks == r for r, own in enumerate(by_rank) for m in own)


@EXAMPLES
@hypothesis.given(
    n=SIZES["n"],
    size=SIZES["size"],
    ranks=SIZES["ranks"],
    per_step=st.integers(1, 4),
    drop=st.booleans(),
    max_steps=st.integers(0, 9),
)
def test_the_smallest_micro_batch_is_that_of_the_run(n, size, ranks, per_step, drop, max_steps):
    world = samplers(n, ranks, size, per_step, drop_last=drop)
    steps = [steps_of(sampler, 0)[: max_steps or None] for sampler in world]
    computed = [m.indices for rank in steps for step in rank for m in step.mine if not m.is_padding]
    expected = min(computed, key=len, default=[])
    if len(expected) == max(map(len, computed), default=0):
        expected = []  # all are equally large
    assert [sampler.find_smallest_micro_batch(max_steps) for sampler in world] == [
        [expected] if expected else []
    ] * ranks


@pytest.mark.guarantee("exact-ranks")
@EXAMPLES
@hypothesis.given(n=SIZES["n"], size=SIZES["size"], ranks=SIZES["ranks"], way=st.sampled_from([*WAYS]))
def test_an_evaluation_has_equally_many_passes_on_all_ranks(n, size, ranks, way):
    """In order; for exact sums, the set is one global batch, of which each rank has consecutive micro-batches."""
    config = TrainingConfig(batch_size=size, **({"reduction": "exact"} if way == "runs" else {}))
    numbers = {}
    for rank in range(ranks):
        ctx = DistributedContext(rank, rank, ranks, torch.device("cpu"))
        sampler = create_evaluation_dataloader(range(n), config, ctx).sampler
        passes = list(sampler.micro_batches(0))
        assert len(passes) == sampler.passes_per_epoch == math.ceil(math.ceil(n / size) / ranks)
        by_number = {m.indices[0] // size: m for m in passes if not m.is_padding}
        assert all(m.indices == [*range(k * size, min(n, (k + 1) * size))] for k, m in by_number.items())
        if way == "runs":
            assert (
                [m.number for m in by_number.values()]
                == [*by_number]
                == [*range(min(by_number, default=0), max(by_number, default=-1) + 1)]
            )
        assert not numbers.keys() & by_number.keys()
        numbers |= by_number
    assert len(numbers) == math.ceil(n / size)


@pytest.mark.guarantee("order")
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_an_epoch_is_its_own_if_the_samples_are_shuffled(shuffle):
    [sampler] = samplers(40, 1, 4, 1, shuffle=shuffle)
    assert len({tuple(sampler.epoch_order(epoch).tolist()) for epoch in range(4)}) == (4 if shuffle else 1)
