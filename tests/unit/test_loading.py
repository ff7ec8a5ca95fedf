"""Sampler, global batches and loader: each sample once, whoever computes it; the last global batch, orders and weights
of the data set's own."""

import random

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler

import utils.data.loader
from config import TrainingConfig, UserError
from ddp_utils import DistributedContext
from tasks import Images
from utils.data.loader import (
    choose_workers,
    create_distributed_dataloader,
    create_evaluation_dataloader,
    fetches_batches,
    resolve_auto,
)
from utils.data.sampler import GlobalBatchSampler
from utils.data.transfer import to_device

CPU = torch.device("cpu")


def sampler(n, rank=0, world_size=1, batch_size=4, per_step=None, **options):
    per_step = per_step or world_size
    return GlobalBatchSampler(
        range(n), batch_size=batch_size, micro_batches_per_step=per_step, rank=rank, world_size=world_size, **options
    )


def of_all_ranks(n, world_size, epoch=0, start=0, **options):
    """{(global batch, micro-batch): indices} as the ranks together see them; stand-ins left out."""
    seen = {}
    for rank in range(world_size):
        for w, global_batch in enumerate(sampler(n, rank, world_size, **options).global_batches(epoch, start)):
            for micro_batch in global_batch:
                if not micro_batch.is_padding:
                    assert (w, micro_batch.number) not in seen
                    assert micro_batch.number % world_size == rank
                    seen[w, micro_batch.number] = micro_batch.indices
    return seen


def test_it_is_a_distributed_sampler_of_this_ranks_indices():
    ranks = [sampler(30, rank, 2) for rank in (0, 1)]
    assert all(isinstance(each, DistributedSampler) for each in ranks)
    indices = [list(each) for each in ranks]
    assert sorted(indices[0] + indices[1]) == list(range(30))
    assert [len(each) for each in ranks] == [len(each) for each in indices]
    ranks[0].set_epoch(1)
    assert list(ranks[0]) != indices[0]


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    orders = [tuple(sampler(40, seed=seed).order(epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] == tuple(sampler(40, rank=2, world_size=3, batch_size=2, seed=0).order(0).tolist())


@pytest.mark.parametrize("n", [1, 3, 4, 5, 23, 24, 25, 48, 49])
def test_ranks_decide_only_who_computes_a_micro_batch(n):
    """Six micro-batches a step on 1, 2, 3 and 4 ranks (4 does not divide 6): the same micro-batches, each once."""
    reference = of_all_ranks(n, 1, per_step=6)
    assert sorted(index for indices in reference.values() for index in indices) == list(range(n))
    for world_size in (2, 3, 4):
        assert of_all_ranks(n, world_size, per_step=6) == reference


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8, 9, 12, 13, 20, 23, 24, 25])
def test_every_window_has_as_many_steps_on_each_rank_and_its_true_weight(n):
    world_size, per_step = 3, 6
    ranks = [list(sampler(n, rank, world_size, per_step=per_step).global_batches(0)) for rank in range(world_size)]
    assert len({len(global_batches) for global_batches in ranks}) == 1
    for global_batches in zip(*ranks, strict=True):
        counted = sum(len(m.indices) for global_batch in global_batches for m in global_batch if not m.is_padding)
        assert (
            {global_batch.samples for global_batch in global_batches}
            == {global_batch.weight for global_batch in global_batches}
            == {counted}
        )
        for global_batch in global_batches:
            assert [m.is_last for m in global_batch] == [False] * (len(global_batch.micro_batches) - 1) + [True]


def test_steps_left():
    each = sampler(50, batch_size=4, per_step=2)  # 7 steps an epoch, the last one short
    assert [each.steps_left(*where) for where in ((0, 0, 3), (0, 16, 3), (2, 48, 3), (2, 50, 3), (3, 0, 3))] == [
        21,
        19,
        1,
        0,
        0,
    ]


class Weighted(Dataset):
    """Samples of unequal weight, in an order of its own."""

    weights = [float(k) for k in range(10)]

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor(index)

    def epoch_order(self, seed, epoch, n):
        return [(k + epoch) % n for k in range(n)]


def test_weights_and_an_order_of_the_data_sets_own():
    each = GlobalBatchSampler(Weighted(), batch_size=2, micro_batches_per_step=2, rank=0, world_size=1)
    assert [global_batch.weight for global_batch in each.global_batches(0)] == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8 + 9]
    assert [m.indices for global_batch in each.global_batches(1) for m in global_batch] == [
        [1, 2],
        [3, 4],
        [5, 6],
        [7, 8],
        [9, 0],
    ]


def sampler_of(**changes):
    data = Weighted()
    for name, value in changes.items():
        setattr(data, name, value)
    return GlobalBatchSampler(data, batch_size=2, micro_batches_per_step=1, rank=0, world_size=1)


def test_an_order_of_other_indices_is_refused_and_one_that_repeats_samples_has_to_say_so():
    with pytest.raises(UserError, match="epoch_order: gave 3 indices for 10 samples; return n indices"):
        sampler_of(epoch_order=lambda seed, epoch, n: [0, 1, 99]).order(0)
    twice = {"epoch_order": lambda seed, epoch, n: [k // 2 for k in range(n)]}
    with pytest.raises(
        UserError,
        match="leaves out 5 of 10 samples and repeats others; give each index once, or declare with_replacement",
    ):
        sampler_of(**twice).order(0)
    assert sampler_of(**twice, with_replacement=True).order(0).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("weights", [[1.0] * 9, [1.0] * 9 + [-1.0], [1.0] * 9 + [float("nan")]])
def test_weights_that_do_not_fit_the_set_are_refused(weights):
    with pytest.raises(
        UserError, match="weights: must be 10 numbers, one a sample, finite and not negative; mend them"
    ):
        sampler_of(weights=weights)


# ---- the loader ----


class Noisy(Dataset):
    """A forker's set: a file-like one with random CPU transforms of its own, unseeded."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        import numpy

        return torch.tensor([index, random.random(), torch.rand(()).item(), numpy.random.rand()], dtype=torch.float64)


def context(rank=0, world_size=1, device=CPU):
    return DistributedContext(rank, rank, world_size, device)


def epochs_of(dataset, world_size, workers):
    """{index: sample} of two epochs, of all ranks together; workers of the first epoch are kept."""
    config = TrainingConfig(batch_size=3, num_workers=workers)
    loaders = [
        create_distributed_dataloader(dataset, config, context(rank, world_size))[0] for rank in range(world_size)
    ]
    found = [{}, {}]
    for epoch, samples in enumerate(found):
        for m in (
            m
            for loader in loaders
            for global_batch in loader.global_batches(epoch)
            for m in global_batch
            if not m.is_padding
        ):
            samples |= dict(zip(m.indices, m.batch, strict=True))
    return found


def same(a, b):
    return all(
        x.keys() == y.keys() and all(torch.equal(x[index], y[index]) for index in x) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_samples_content_does_not_depend_on_ranks_or_workers(method):
    """A data set's own random transforms are streams of (seed, epoch, index)."""
    reference = epochs_of(Noisy(), 1, 0)
    assert not torch.equal(reference[0][5], reference[1][5])
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method(method, force=True)
    try:
        assert same(epochs_of(Noisy(), 2, 2), reference)
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def test_a_subset_of_a_set_without_getitems_is_seeded_sample_by_sample():
    """torch's Subset always has __getitems__, and would fetch a micro-batch with nobody's seeds."""
    subset = torch.utils.data.Subset(Noisy(), range(20))
    reference = epochs_of(subset, 1, 0)
    random.seed(99), torch.manual_seed(99)
    assert same(epochs_of(subset, 2, 0), reference)
    assert fetches_batches(torch.utils.data.Subset(Images(4, "train"), range(2))) and not fetches_batches(subset)


def test_iterating_a_loader_cannot_forget_the_epoch():
    loader, each = create_distributed_dataloader(Images(20, "train"), TrainingConfig(batch_size=8), context())
    assert len(loader) == 3
    first, second = ([labels.tolist() for _, labels in loader] for _ in range(2))
    assert len(first) == 3 and first != second
    each.set_epoch(0)
    assert [labels.tolist() for _, labels in loader] == first
    images, labels = next(iter(loader))
    assert images.dtype == torch.float32 and images.shape == (8, 3, 8, 8) and labels.dtype == torch.int64


def test_an_evaluation_loader_keeps_the_order_and_cuts_fixed_micro_batches():
    for world_size in (1, 2, 3, 4):
        found = {}
        for rank in range(world_size):
            loader = create_evaluation_dataloader(
                Images(10, "val"), TrainingConfig(batch_size=4), context(rank, world_size)
            )
            for w, global_batch in enumerate(loader.global_batches(0)):
                found |= {w * world_size + m.number: m.indices for m in global_batch if not m.is_padding}
        assert found == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9]}


def test_an_empty_epoch_is_refused():
    with pytest.raises(
        UserError, match="dataset: its 10 samples do not fill one global batch of 16; give more data or a smaller"
    ):
        create_distributed_dataloader(Images(10, "train"), TrainingConfig(batch_size=16, drop_last=True), context())


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_classes_is_refused_by_its_sample(label):
    data = Images(10, "train", classes=3)
    data.targets[7] = label
    with pytest.raises(
        UserError, match=f"dataset: sample 7 has label {label}, outside the 3 classes; mend the label or give"
    ):
        resolve_auto(TrainingConfig(), data)


def test_workers_respect_the_cpus_and_the_ranks_of_the_node(monkeypatch):
    in_memory, files, auto = Images(4, "train"), Noisy(), TrainingConfig()
    assert choose_workers(auto, in_memory, 1) == 0
    for cpus, ranks, expected in ((16, 2, 8), (16, 4, 4), (2, 4, 1), (128, 2, 8)):
        monkeypatch.setattr(utils.data.loader, "usable_cpus", lambda cpus=cpus: cpus)
        assert choose_workers(auto, files, ranks) == expected
    assert choose_workers(TrainingConfig(num_workers=3), in_memory, 4) == 3


def test_to_device_goes_through_containers():
    batch = {"x": torch.ones(2), "rest": [torch.zeros(1), ("text", 3)]}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].device.type == moved["rest"][0].device.type == "meta" and moved["rest"][1] == ("text", 3)


def test_sync_bn_needs_as_many_micro_batches_on_each_rank():
    """SyncBatchNorm communicates in every forward pass: with one more on one rank, the others' next collective would be
    another."""

    def create(samples, **changes):
        config = TrainingConfig(batch_size=4, sync_bn=True, **changes)
        create_distributed_dataloader(Images(samples, "train"), config, context(0, 2, torch.device("cuda", 0)))

    for samples, changes in ((40, {"grad_accum_steps": 2}), (44, {"grad_accum_steps": 2, "drop_last": True}), (39, {})):
        create(samples, **changes)
    for samples, changes in ((44, {"grad_accum_steps": 2}), (40, {"global_batch_size": 12})):
        with pytest.raises(
            UserError, match="sync_bn=True: needs as many micro-batches on each rank.*; give --drop_last"
        ):
            create(samples, **changes)
