"""Sampler and loader: each sample once, whichever rank computes it; orders that a data set defines."""

import contextlib
import gc
import itertools
import random
import weakref
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, Subset

import plain_loop
import utils.data.loader
from config import TrainingConfig
from ddp_utils import DistributedContext
from tasks import Images
from utils.clock import PhaseClock
from utils.data.loader import (
    choose_num_workers,
    create_distributed_dataloader,
    has_getitems,
)
from utils.data.sampler import Assignment, GlobalBatchSampler
from utils.data.sets import take_subset
from utils.data.transfer import to_device
from utils.rng import derive_seed
from utils.settings.errors import UserError

CPU = torch.device("cpu")


def sampler_of(data, rank=0, world_size=1, batch_size=4, per_step=0, **options):
    data = range(data) if isinstance(data, int) else data
    per_step = per_step or world_size
    options |= {"batch_size": batch_size, "micro_batches_per_step": per_step}
    assignment = Assignment(rank, world_size, options.pop("is_padded", False))
    return GlobalBatchSampler(data, assignment=assignment, **options)


def test_the_sampler_is_a_distributed_sampler_of_this_ranks_indices():
    ranks = [sampler_of(30, rank, 2) for rank in (0, 1)]
    assert all(isinstance(sampler, DistributedSampler) for sampler in ranks)
    indices = [list(sampler) for sampler in ranks]
    assert sorted(indices[0] + indices[1]) == list(range(30))
    assert [len(sampler) for sampler in ranks] == [len(part) for part in indices]
    ranks[0].set_epoch(1)
    assert list(ranks[0]) != indices[0]


def test_one_order_of_four_bytes_a_sample_is_in_memory(monkeypatch):
    sampler, plain, held = sampler_of(1000), torch.randperm, []

    def randperm(n, **options):
        held.append(sampler._epoch_order)
        return plain(n, **options)

    monkeypatch.setattr(torch, "randperm", randperm)
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(derive_seed("order", 0, epoch))
        assert torch.equal(sampler.epoch_order(epoch), plain(1000, generator=generator).int())
    assert held == [None, None] and sampler_of(1000, shuffle=False).epoch_order(0).dtype == torch.int32


class Ordered(Dataset):
    """A data set with its own order."""

    def __len__(self):
        return 10

    def epoch_order(self, seed, epoch, n):
        return [(k + epoch) % n for k in range(n)]


def changed(**attributes):
    data = Ordered()
    for name, value in attributes.items():
        setattr(data, name, value)
    return sampler_of(data)


def test_a_data_set_can_define_its_own_order():
    sampler = sampler_of(Ordered(), batch_size=2, per_step=2)
    indices = [m.indices for m in sampler.micro_batches(1)]
    assert indices == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 0]]


def test_an_order_with_wrong_indices_is_rejected_and_repeats_must_be_declared():
    problem = r"epoch_order must return 10 indices from 0 to 9, but returned 3 indices from 0 to 99\."
    with pytest.raises(UserError, match=problem):
        changed(epoch_order=lambda seed, epoch, n: [0, 1, 99]).epoch_order(0)
    twice = {"epoch_order": lambda seed, epoch, n: [k // 2 for k in range(n)]}
    with pytest.raises(UserError, match=r"leaves out 5 of 10 samples .*\. Give each index once, or set with_repl"):
        changed(**twice).epoch_order(0)
    assert changed(**twice, with_replacement=True).epoch_order(0).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_a_subset_keeps_the_order_that_its_data_set_gives_the_whole_set(size, copies):
    """Each of the ten samples comes once in an epoch, as the copy of its epoch."""
    data = Ordered()
    data.epoch_order = lambda seed, epoch, n: [(7 * k + epoch) % n + n * (k % copies) for k in range(n)]
    data.copies = copies
    subset = take_subset(data, size, seed=1)
    for epoch in (0, 3):
        order = sampler_of(subset).epoch_order(epoch).tolist()
        wanted = [index for index in data.epoch_order(0, epoch, 10) if index % 10 in subset.indices]
        assert [subset.indices[place % size] + 10 * (place // size) for place in order] == wanted
        assert sorted(place % size for place in order) == list(range(size))


def test_an_order_that_repeats_samples_is_not_cut_to_a_subset():
    data = Ordered()
    data.with_replacement = True
    problem = r"--dataset_size 4 does not work with an epoch_order that repeats .* \(with_replacement\)\. Give --data"
    with pytest.raises(UserError, match=problem):
        take_subset(data, 4, seed=1)
    assert take_subset(data, 10, seed=1) is data


# ---- the loader ----


class Noisy(Dataset):
    """A data set that is read sample by sample, with unseeded random transforms."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), torch.rand(()).item(), numpy.random.rand()], dtype=torch.float64)


class NoisyTogether(Noisy):
    """Samples that are fetched together, as by a Hugging Face `Dataset` with `set_transform`."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class NoisyCollate(Noisy):
    """Draws in collate too, as mixing does; those draws follow the ones of the last sample."""

    def collate(self, samples):
        return torch.stack(samples) + torch.rand(()).item() + random.random() + numpy.random.rand()


def context(rank=0, world_size=1, device=CPU):
    return DistributedContext(rank, rank, world_size, device)


def epochs_of(dataset, world_size, workers):
    """{index: sample} of two epochs of all ranks together; the workers of the first epoch are kept."""
    config = TrainingConfig(batch_size=3, num_workers=workers)
    ranks = [create_distributed_dataloader(dataset, config, context(rank, world_size))[0] for rank in range(world_size)]
    by_epoch = [{}, {}]
    for epoch, samples in enumerate(by_epoch):
        for m in (m for loader in ranks for m in loader.micro_batches(epoch)):
            samples |= {} if m.is_padding else dict(zip(m.indices, map(tuple, m.batch.tolist()), strict=True))
    return by_epoch


@pytest.mark.guarantee("samples")
@pytest.mark.parametrize("data", [Noisy(), NoisyTogether(), NoisyCollate()], ids=["alone", "together", "collate"])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_samples_content_does_not_depend_on_ranks_or_workers(method, data):
    """The random transforms of a data set draw from streams of (seed, epoch, index), or of all indices of a call."""
    reference = epochs_of(data, 1, 0)
    assert reference[0][5] != reference[1][5] and len({row[1:] for row in reference[0].values()}) == len(data)
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method(method, force=True)
    try:
        assert epochs_of(data, 2, 2) == reference
        assert epochs_of(data, 4, 0) == reference
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def test_a_subset_of_a_set_without_getitems_is_seeded_sample_by_sample():
    """torch's Subset always has __getitems__, which would fetch a micro-batch without seeds."""
    subset = Subset(Noisy(), range(20))
    reference = epochs_of(subset, 1, 0)
    random.seed(99), torch.manual_seed(99)
    assert epochs_of(subset, 2, 0) == reference
    assert has_getitems(Subset(Images(4, "train"), range(2))) and not has_getitems(subset)


SUBSETS = {
    "no subset": lambda data: data,
    "torch's": lambda data: Subset(data, range(3, 20)),
    "of a subset": lambda data: Subset(Subset(data, range(21)), range(3, 20)),
    "--dataset_size": lambda data: take_subset(data, 17, seed=5),
}


@pytest.mark.parametrize("subset", SUBSETS.values(), ids=SUBSETS)
@pytest.mark.parametrize("data", [Noisy(), NoisyTogether()], ids=["alone", "together"])
def test_the_plain_loop_reads_the_samples_of_a_run(data, subset):
    """Each sample has its own seed, unless the data set reads a micro-batch at once."""
    dataset = subset(data)
    loader, _ = create_distributed_dataloader(dataset, TrainingConfig(batch_size=3, num_workers=0), context())
    for micro_batch in loader.micro_batches(1):
        samples = plain_loop.read_samples(dataset, micro_batch.indices, loader.sampler.seed, 1)
        assert torch.equal(torch.stack(samples), micro_batch.batch)


def test_each_iteration_of_a_loader_is_a_new_epoch():
    loader, sampler = create_distributed_dataloader(Images(20, "train"), TrainingConfig(batch_size=8), context())
    assert len(loader) == 3
    first, second = ([labels.tolist() for _, labels in loader] for _ in range(2))
    assert len(first) == 3 and first != second
    sampler.set_epoch(0)
    assert [labels.tolist() for _, labels in loader] == first
    images, labels = next(iter(loader))
    assert images.dtype == torch.float32 and images.shape == (8, 3, 8, 8) and labels.dtype == torch.int64


def test_an_empty_epoch_is_rejected():
    with pytest.raises(UserError, match=r"10 samples .* do not fill a global batch of 16\. Reduce --batch_size\."):
        create_distributed_dataloader(Images(10, "train"), TrainingConfig(batch_size=16, drop_last=True), context())


def test_workers_respect_the_cpus_and_the_ranks_of_the_node(monkeypatch):
    in_memory, files = Images(4, "train"), Noisy()
    assert choose_num_workers("auto", in_memory, 1) == 0
    for cpus, ranks, expected in ((16, 2, 8), (16, 4, 4), (2, 4, 1), (128, 2, 8)):
        monkeypatch.setattr(utils.data.loader, "count_usable_cpus", lambda cpus=cpus: cpus)
        assert choose_num_workers("auto", files, ranks) == expected
    assert choose_num_workers(3, in_memory, 4) == 3


# ---- to the device ----


def test_to_device_goes_through_containers():
    batch = {"x": torch.ones(2), "rest": [torch.zeros(1), ("text", 3)]}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].device.type == moved["rest"][0].device.type == "meta" and moved["rest"][1] == ("text", 3)


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cpu", False)])
def test_only_copies_to_a_gpu_are_asynchronous(device, expected):
    """One from a GPU could be read before it is complete."""
    tensor = mock.Mock(spec=torch.Tensor)
    to_device(tensor, torch.device(device))
    tensor.to.assert_called_once_with(torch.device(device), non_blocking=expected)


class Stream:
    """Replaces the side stream and records the calls."""

    def __init__(self, device):
        self.seen = []

    def wait_for_current_stream(self):
        self.seen.append("begin")

    stream = contextlib.nullcontext()

    def run(self, action):
        staged = action()
        self.seen.append(("staged", staged.indices))
        return staged, SimpleNamespace(indices=staged.indices)

    def sync_to_current_stream(self, batch, event):
        self.seen.append(("handed over", event.indices))


class Lines(Dataset):
    def __len__(self):
        return 70

    def __getitem__(self, index):
        return {"ids": torch.arange(3) + index, "label": index}

    def device_transform(self, batch, seed, epoch, indices):
        return batch | {"drawn": indices + epoch}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_micro_batch_is_handed_out_without_waiting_for_the_next_one(monkeypatch, workers):
    """The times of waiting and computing are attributed to the right micro-batch."""
    monkeypatch.setattr(utils.data.loader, "pin_batch", lambda batch: batch)
    clock, phases = PhaseClock(), []
    monkeypatch.setattr(clock, "enter_phase", phases.append)
    config = TrainingConfig(batch_size=24, num_workers=workers)
    loader, sampler = create_distributed_dataloader(Lines(), config, context(), clock)
    loader._side_stream = Stream(CPU)
    for epoch in (0, 1):  # the workers of the first epoch are kept
        a, b, c = (m.indices for m in sampler.micro_batches(epoch))
        seen = loader._side_stream.seen
        seen.clear()
        for m in itertools.islice(loader.micro_batches(epoch), 3):  # training does not ask for more
            seen.append(("computed", m.indices))
            assert phases[-1] == "forward" and m.batch["label"].tolist() == m.indices
            assert m.batch["drawn"].tolist() == [k + epoch for k in m.indices]
        parts = [(word, indices) for indices in (a, b, c) for word in ("staged", "handed over", "computed")]
        assert seen == ["begin", *parts]
    assert phases == ["data", "forward"] * 6


def test_an_epoch_that_is_left_early_does_not_affect_the_next_one():
    loader, sampler = create_distributed_dataloader(Lines(), TrainingConfig(batch_size=8, num_workers=1), context())
    for epoch, last in ((0, 2), (1, 8)):
        for number, m in enumerate(loader.micro_batches(epoch)):
            assert m.indices == sampler.epoch_order(epoch)[8 * number : 8 * number + 8].tolist()
            assert m.batch["label"].tolist() == m.indices
            if number == last:
                break
    assert number == 8


def test_a_loader_that_is_not_used_any_more_is_freed_at_once():
    """Else a collection in a worker of another loader may free it, which ends the queues of that worker."""
    loader, _ = create_distributed_dataloader(Lines(), TrainingConfig(batch_size=8, num_workers=1), context())
    list(loader.micro_batches(0))
    workers = weakref.ref(loader._loader._iterator)
    gc.disable()
    try:
        del loader
        assert workers() is None
    finally:
        gc.enable()
