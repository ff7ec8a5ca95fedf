"""The plan of --batch_tokens, against an independent definition, and what must follow from it."""

import math
import time
from itertools import accumulate, chain, pairwise

import numpy
import pytest
import torch
from packing import micro_batches
from torch.utils.data import Subset

from config import TrainingConfig
from ddp_utils import DistributedContext
from ranks import package
from utils.data.loader import create_distributed_dataloader, create_evaluation_dataloader
from utils.data.sampler import Assignment
from utils.data.sets import take_subset
from utils.extras.exact.reduction import ContiguousAssignment  # extra: exact
from utils.extras.lengths.token_budget import BudgetSampler, TokenBudget, assign_micro_batches
from utils.settings.errors import UserError
from utils.training.schedule import Schedule

hypothesis, st = package("hypothesis"), package("hypothesis.strategies")
WAYS = {
    "by size": Assignment,
    "runs": ContiguousAssignment,  # extra: exact
}
EXAMPLES = hypothesis.settings(
    max_examples=200, derandomize=True, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


class Sequences:
    """Samples of these lengths."""

    def __init__(self, lengths, **more):
        self.lengths = lengths if isinstance(lengths, dict) else torch.as_tensor(lengths)
        vars(self).update(more)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.ones(int(self.lengths[index]))

    def path(self, index):
        return f"{index}.flac"


def samplers(data, budget, ranks, per_step, way="by size", is_padded=False, **options):
    """Those of all ranks."""
    options |= {"micro_batches_per_step": per_step, "seed": 1}
    world = [WAYS[way](rank, ranks, is_padded) for rank in range(ranks)]
    return [BudgetSampler(data, data.lengths.long(), budget, assignment=assignment, **options) for assignment in world]


def padded(indices, lengths):
    return max(lengths[k % len(lengths)] for k in indices) * len(indices)


@pytest.mark.guarantee("order", "gradient", "lengths")
@EXAMPLES
@hypothesis.given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    budget=st.integers(20, 120),
    samples=st.sampled_from([0, 1, 3]),
    window=st.integers(1, 5),
    ranks=st.integers(1, 5),
    per_step=st.integers(1, 7),
    epoch=st.integers(0, 3),
    drop=st.booleans(),
    way=st.sampled_from([*WAYS]),
    is_padded=st.booleans(),
    shuffle=st.booleans(),
    copies=st.sampled_from([0, 2]),
)
def test_any_ranks_compute_the_same_micro_batches(
    lengths, budget, samples, window, ranks, per_step, epoch, drop, way, is_padded, shuffle, copies
):
    n, order = len(lengths), None
    data = Sequences(lengths)
    if copies and shuffle:  # the order of the data set, with indices of copies
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).add(n * (epoch % 2))
        data = Sequences(lengths, epoch_order=lambda *_: order, copies=copies)
        order = order.tolist()
    options = {"shuffle": shuffle, "drop_last": drop}
    world = samplers(data, TokenBudget(budget, samples, window), ranks, per_step, way, is_padded, **options)
    settings = {"samples": samples, "window": window, "order": order, "is_drawn": shuffle}
    expected = micro_batches(lengths, budget, seed=1, epoch=epoch, **settings)
    whole = len(expected) // per_step * per_step
    if drop and shuffle:
        expected = expected[:whole]
    else:
        assert sorted(k % n for k in chain(*expected)) == [*range(n)]
    assert all(len(batch) == 1 or padded(batch, lengths) <= budget for batch in expected)
    assert all(sampler.epoch_order(epoch).tolist() == [*chain(*expected)] for sampler in world)
    assert {sampler.count_remaining_steps(epoch, 0, epoch + 1) for sampler in world} == {
        math.ceil(len(expected) / per_step)
    }
    positions, before = [0, *accumulate(map(len, expected))], []  # the steps of earlier epochs
    for earlier in range(epoch if order is None else 0):
        made = micro_batches(lengths, budget, seed=1, epoch=earlier, **settings)
        made = made[: len(made) // per_step * per_step] if drop and shuffle else made
        before += [made[first : first + per_step] for first in range(0, len(made), per_step)]
    for begin in range(0, len(expected) + 1, per_step):  # also after a resume at any step
        streams = [[*sampler.micro_batches(epoch, positions[begin])] for sampler in world]
        for first in range(begin, len(expected), per_step):
            step, by_rank = expected[first : first + per_step], []
            for stream in streams:
                own = [stream.pop(0)]
                while not own[-1].is_last:
                    own.append(stream.pop(0))
                by_rank.append(own)
            check_step(step, by_rank, lengths, is_padded, way)
            if order is not None:  # of which this test knows one epoch
                continue
            latest = [*before, *(expected[k : k + per_step] for k in range(0, first + 1, per_step))][-3:]
            latest, end = [*chain(*latest)], positions[first + len(step)]
            tokens, samples = sum(lengths[k % n] for k in chain(*latest)), sum(map(len, latest))
            density = tokens / samples, 1 - tokens / sum(padded(batch, lengths) for batch in latest)
            assert {sampler.measure_token_density(epoch, end, 3) for sampler in world} == {density}
        assert not any(streams)
    if epoch == 0 and expected:
        for steps in (0, 1, 2):
            smallest = min(map(len, expected[: steps * per_step or None]))
            chosen = world[0].find_smallest_micro_batch(steps)
            assert [len(batch) for batch in chosen] == [smallest] and chosen[0] in expected
            assert all(sampler.find_smallest_micro_batch(steps) == chosen for sampler in world)


def check_step(step, by_rank, lengths, is_padded, way):
    """The ranks compute the micro-batches of a step, each once, and equally many."""
    computed = [m for own in by_rank for m in own if not m.is_padding]
    assert {m.number: m.indices for m in computed} == dict(enumerate(step)) and len(computed) == len(step)
    assert {(m.samples_in_step, m.micro_batches_in_step) for own in by_rank for m in own} == {
        (sum(map(len, step)), len(step))
    }
    smallest = min(padded(batch, lengths) for batch in step)
    assert all(padded(m.indices, lengths) == smallest for own in by_rank for m in own if m.is_padding)
    many = [len(own) for own in by_rank]
    assert max(many) == math.ceil(len(step) / len(by_rank)) and (not is_padded or min(many) == max(many))
    if way == "by size":
        assert max(many) - min(many) <= 1
    for own in by_rank:
        numbers = [m.number for m in own if not m.is_padding]
        assert numbers == sorted(numbers)


def made(shape):
    """Lengths like those of LibriSpeech's utterances in frames, most of 12 to 16 s, or of source files in tokens; N."""
    generator = torch.Generator().manual_seed(7)
    n, draws = 30_000, torch.randn(30_000, generator=generator)
    if shape == "speech":
        lengths = (1400 + 200 * draws).where(draws > -1, 1200 * torch.rand(n, generator=generator))
        return lengths.clamp(120, 2400).long(), 16_000
    return (6.5 + 1.1 * draws).exp().clamp(10, 16_384).long(), 32_768


@pytest.mark.parametrize("shape", ["speech", "code"])
def test_a_larger_window_has_less_padding_and_an_order_that_is_farther_from_uniform(shape):
    """The spread of the mean log length of a step, over that of as many samples in a uniform order."""
    lengths, budget = made(shape)
    logs, rows = lengths.double().log(), []
    for window in (1, 10, 30, 100, 10_000):
        for per_step in (8, 64):
            [sampler] = samplers(Sequences(lengths), TokenBudget(budget, 0, window), 1, per_step, drop_last=True)
            order, begins = sampler.epoch_order(0), sampler.pack_epoch(0).starts[::per_step]
            steps = [order[first:end] for first, end in pairwise(begins)]
            spread = torch.stack([logs[indices].mean() for indices in steps]).std()
            uniform = torch.tensor([logs.var() / len(indices) for indices in steps]).mean().sqrt()
            rows.append(
                (window, per_step, sampler.measure_token_density(0, len(order), len(steps))[1], float(spread / uniform))
            )
            shown = f"padding {rows[-1][2]:.2%}, spread {spread:.2f}, {rows[-1][3]:.1f} times that of a uniform order"
            print(f"{shape}, window {window}, {per_step} micro-batches per step: {shown}")
    few = [row[2:] for row in rows if row[1] == 8]
    assert all(a[0] > b[0] and a[1] < b[1] * 1.1 for a, b in pairwise(few))


@pytest.mark.guarantee("lengths")
@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("shape", ["speech", "code"])
def test_padding_is_little_and_the_ranks_have_equally_much(shape, ranks):
    lengths, budget = made(shape)
    n, data, window = len(lengths), Sequences(lengths), TrainingConfig(batch_tokens=1).bucket_window
    share, worst = {}, {}
    for way in WAYS:
        [sampler] = samplers(data, TokenBudget(budget, 0, window), 1, 4 * ranks, way)
        share[way] = sampler.measure_token_density(0, n, n)[1]
        loads = []
        for first in range(0, sampler.micro_batches_per_epoch - 4 * ranks + 1, 4 * ranks):
            sizes = [sampler.pack_epoch(0).count_padded_tokens(k) for k in range(first, first + 4 * ranks)]
            split = [WAYS[way](r, ranks).micro_batch_numbers(r, len(sizes)) for r in range(ranks)]
            if way == "by size":
                split = [assign_micro_batches(r, ranks, sizes) for r in range(ranks)]
            load = torch.tensor([sum(sizes[k] for k in numbers) for numbers in split]).double()
            loads.append(float(load.max() / load.mean()))
        worst[way] = sum(loads) / len(loads), max(loads)
    print(f"{shape}, {ranks} ranks: padding {share}, slowest over mean (mean, worst step) {worst}")
    assert max(share.values()) <= 0.05
    assert worst["by size"][0] <= 1.05
    assert worst.get("runs", (0,))[0] <= 1.15  # extra: exact


def refusal(data, *flags, is_training=True, ranks=1):
    config = TrainingConfig.from_args(["--batch_tokens", "16", *flags])
    ctx = DistributedContext(0, 0, ranks, torch.device("cpu"))
    create = create_distributed_dataloader if is_training else create_evaluation_dataloader
    with pytest.raises(UserError) as raised:
        create(data, config, ctx)
    text = str(raised.value)
    assert ". Give " in text or "must be at least 1, got " in text
    return text


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (
            [3, 17, 40],
            "--batch_tokens must be at least 40, the length of sample 2 (2.flac) of the training set, got 16. 2 samp",
        ),
        (
            [3, 17, 4],
            "--batch_tokens must be at least 17, the length of sample 1 (1.flac) of the training set, got 16. Give a",
        ),
        ([3, 0, 4], "The lengths of the training set must be at least 1, got 0 for sample 1 (1.flac)."),
        ([3, -2, 4], "The lengths of the training set must be at least 1, got -2 for sample 1 (1.flac)."),
        (
            [3.5, 2, 4],
            "The lengths of the training set have the shape [3] and type float32. Give one integer per sample, 3",
        ),
        ([[3], [2], [4]], "The lengths of the training set have the shape [3, 1]"),
        ({0: 3, 1: 4}, "The lengths of the training set have the shape [] and type object"),
        ([True, True, True], "The lengths of the training set have the shape [3] and type bool"),
    ],
)
def test_lengths_that_cannot_be_used_are_named(lengths, expected):
    assert refusal(Sequences(lengths)).startswith(expected)


@pytest.mark.parametrize("make", [list, tuple, numpy.array, lambda given: numpy.array(given, ">i4")[::-1][::-1]])
def test_lengths_may_be_any_array_of_whole_numbers(make):
    data = Sequences([])
    data.__class__ = type("Three", (Sequences,), {"__len__": lambda self: 3})
    data.lengths = make([3, 5, 4])
    ctx = DistributedContext(0, 0, 1, torch.device("cpu"))
    assert create_distributed_dataloader(data, TrainingConfig(batch_tokens=16), ctx)[1].lengths.tolist() == [3, 5, 4]


def test_an_error_in_a_property_is_not_taken_for_missing_lengths():
    data = type("Wrong", (Sequences,), {"lengths": property(lambda self: self.nothing), "__init__": object.__init__})()
    data.__class__.__len__ = lambda self: 3
    with pytest.raises(AttributeError, match="nothing"):
        create_distributed_dataloader(
            data, TrainingConfig(batch_tokens=16), DistributedContext(0, 0, 1, torch.device("cpu"))
        )


def test_lengths_of_a_subset_are_checked_as_those_of_the_whole_set():
    """Of --dataset_size and of torch's own Subset, which has no attributes."""
    data, ctx = Sequences([3, 9, 4, 5, 6, 7]), DistributedContext(0, 0, 1, torch.device("cpu"))
    nested = Subset(Subset(data, [5, 4, 1, 0]), torch.tensor([2, 0]))
    sampler = create_distributed_dataloader(nested, TrainingConfig(batch_tokens=16), ctx)[1]
    assert sampler.lengths.tolist() == [9, 7]
    data.__class__ = type("Six", (Sequences,), {"__len__": lambda self: 6})
    data.lengths = torch.tensor([1, 3, 9, 4, 5, 6, 7])  # one too many
    chosen = take_subset(data, 4, seed=1)
    for subset in (chosen, Subset(data, [0, 1])):
        assert "have the shape [7]" in refusal(subset) and "6 in all" in refusal(subset)
    del data.lengths
    assert "Six (the training set) has no lengths" in refusal(take_subset(data, 4, seed=1))


def test_lengths_of_another_number_or_none_are_refused():
    wrong = Sequences([3, 4])
    wrong.lengths = [3, 4, 5]
    wrong.__class__ = type("Two", (Sequences,), {"__len__": lambda self: 2})
    assert "have the shape [3]" in refusal(wrong) and "2 in all" in refusal(wrong)
    problem = "--batch_tokens 16 needs lengths, but range (the training set) has no lengths. Give the data set an array"
    assert refusal(range(4)).startswith(problem)
    assert refusal(range(4), is_training=False).endswith(", or give --eval_batch_size.")
    assert "at least 40, the length of sample 0 (0.flac) of val, got 16" in refusal(
        Sequences([40], split="val"), is_training=False
    )
    config = TrainingConfig(batch_tokens=16, eval_batch_size=3)
    sampler = create_evaluation_dataloader(range(4), config, DistributedContext(0, 0, 1, torch.device("cpu"))).sampler
    assert sampler.micro_batches_per_epoch == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--too_long alone", "--too_long alone needs --batch_tokens. Add that flag, or leave this one out."),
        ("--bucket_window 3", "--bucket_window 3 needs --batch_tokens."),
        (
            "--batch_tokens 16 --global_batch_size 40",
            "--global_batch_size must be a multiple of --batch_tokens 16, got 40. Give 32 or 48.",
        ),
        ("--batch_tokens -1", "--batch_tokens must be at least 0, got -1."),
        ("--batch_tokens 16 --too_long drop", '--too_long must be error or alone, got "drop".'),
        (  # extra: compile
            "--batch_tokens 16 --compile reduce-overhead",
            "--batch_tokens 16 makes batches of many shapes. Use --compile default",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(capsys, flags, expected):
    with pytest.raises(SystemExit):
        TrainingConfig.from_args(flags.split())
    assert capsys.readouterr().err.startswith(expected)


def test_a_sample_that_is_too_long_may_be_alone_and_batch_size_is_a_bound_if_it_is_not_the_default():
    data, ctx = Sequences([3, 40, 4, 5, 3, 3, 3, 3]), DistributedContext(0, 0, 1, torch.device("cpu"))
    for batch_size, most in ((64, 5), (2, 2)):
        config = TrainingConfig(batch_tokens=16, batch_size=batch_size, too_long="alone")
        sampler = create_distributed_dataloader(data, config, ctx)[1]
        batches = [m.indices for m in sampler.micro_batches(0)]
        assert [1] in batches and max(map(len, batches)) == most
    config = TrainingConfig(batch_tokens=16, eval_batch_size=3, too_long="alone")
    batches = [m.indices for m in create_evaluation_dataloader(data, config, ctx).sampler.micro_batches(0)]
    assert max(map(len, batches)) == 3 and sorted(chain(*batches)) == [*range(8)]
    config = TrainingConfig(batch_tokens=16, too_long="alone")
    chosen = take_subset(data, 6, config.seed)
    sampler = create_distributed_dataloader(chosen, config, ctx)[1]
    assert sampler.lengths.tolist() == [int(data.lengths[k]) for k in chosen.indices]


def test_the_largest_batches_are_those_of_the_longest_samples_and_of_the_most():
    lengths = [5, 1, 9, 2, 2, 7, 1, 8, 3]
    [sampler] = samplers(Sequences(lengths), TokenBudget(18, 0, 1), 1, 1)
    longest, most = sampler.largest_micro_batches[0], sampler.largest_micro_batches[-1]
    assert longest == [2, 7] and {*most} == {1, 6, 3, 4, 8}
    [sampler] = samplers(Sequences(lengths), TokenBudget(18, 2, 1), 1, 1)
    assert sampler.largest_micro_batches[0] == [2, 7] and {*sampler.largest_micro_batches[-1]} == {1, 6}
    # with a bound on the samples the longest have few tokens; rows of half the budget have more pairs than one long row
    [sampler] = samplers(Sequences([10] + [5] * 6 + [1] * 9), TokenBudget(19, 3, 1), 1, 1)
    assert [len(indices) for indices in sampler.largest_micro_batches] == [1, 3, 3] and sampler.largest_micro_batches[
        1
    ] == [1, 2, 3]
    [sampler] = samplers(Sequences([40, *lengths]), TokenBudget(18, 0, 1), 1, 1)
    assert sampler.largest_micro_batches[0] == [0]


def test_a_schedule_of_its_own_length_is_followed_beyond_the_run():
    [sampler] = samplers(Sequences([5] * 40), TokenBudget(40, 0, 1), 1, 1)
    config = TrainingConfig(batch_tokens=40, epochs=2, schedule_steps=30, warmup_epochs=0)
    schedule = Schedule(config, lambda *given: given[1:3])
    schedule.plan(sampler)
    assert schedule.total_steps == 10 and schedule.compute_lr_factor(12, schedule.progress) == (12, 30)


@pytest.mark.guarantee("lengths")
def test_the_run_ends_with_its_last_epoch_and_the_factor_holds_beyond_the_schedule():
    """Epochs have other numbers of steps than the first one, more or less."""
    generator = torch.Generator().manual_seed(3)
    data = Sequences(torch.randint(1, 30, (40,), generator=generator))
    for epochs in (6, 7):
        [sampler] = samplers(data, TokenBudget(40, 0, 1), 1, 1)
        schedule = Schedule(TrainingConfig(batch_tokens=40, epochs=epochs, warmup_epochs=0), lambda *given: given[1])
        schedule.plan(sampler)
        counts = [sampler.count_remaining_steps(epoch, 0, epoch + 1) for epoch in range(epochs)]
        assert len({*counts}) > 1
        assert schedule.total_steps == epochs * counts[0]
        seen, progress = [], schedule.progress
        while not schedule.is_finished:
            for end in [*sampler.pack_epoch(progress.epoch).starts[1:]]:
                assert not (schedule.is_at_end or schedule.is_epoch_complete)
                seen.append(schedule.compute_lr_factor(progress.step, progress))
                progress.step, progress.samples_in_epoch = progress.step + 1, end
                if progress.step == sum(counts) // 2:  # a resume plans the same
                    schedule.plan(sampler)
                    assert schedule.total_steps == epochs * counts[0]
            assert schedule.is_epoch_complete and schedule.is_at_end == (progress.epoch == epochs - 1)
            schedule.end_epoch()
        assert len(seen) == sum(counts)
        assert seen == [min(step, schedule.total_steps - 1) for step in range(len(seen))]


def test_the_steps_of_epochs_differ_little():
    generator = torch.Generator().manual_seed(7)
    data = Sequences((6 + torch.randn(200_000, generator=generator)).exp().clamp(1, 16_000).long())
    [sampler] = samplers(data, TokenBudget(16_000, 0, 100), 1, 1)
    counts = [sampler.count_remaining_steps(epoch, 0, epoch + 1) for epoch in range(3)]
    print(counts)
    assert max(counts) - min(counts) <= 0.001 * min(counts)


@pytest.mark.slow
def test_ten_million_samples_are_planned_in_ten_seconds():
    generator = torch.Generator().manual_seed(7)
    data = Sequences((6 + torch.randn(10_000_000, generator=generator)).exp().clamp(1, 16_000).long())
    [sampler] = samplers(data, TokenBudget(16_000, 0, 100), 1, 8)
    began = time.process_time()
    assert len(sampler.epoch_order(3)) == 10_000_000
    print(f"{time.process_time() - began:.1f} s")
    assert time.process_time() - began <= 20  # twice of what is promised: other tests run beside this one


@pytest.mark.guarantee("lengths")
@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([5, 1, 4, 2], [[0, 1], [2, 3]]),
        ([1, 2, 3, 4, 5], [[0, 1, 4], [2, 3]]),
        ([7, 7, 7, 7, 7, 7], [[0, 5], [1, 4], [2, 3]]),
        ([9], [[0], [], []]),
    ],
)
def test_micro_batches_are_dealt_by_size_forwards_and_backwards(sizes, shares):
    assert [assign_micro_batches(rank, len(shares), sizes) for rank in range(len(shares))] == shares
