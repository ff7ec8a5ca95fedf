"""--cache, what needs one process: which sets it takes, the memory it may take; prefetch, with a stand-in stream."""

import contextlib
import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

import utils.data.cache
import utils.data.loader
from config import TrainingConfig, UserError
from ddp_utils import DistributedContext
from utils.clock import Clock
from utils.data.cache import cached, check_room
from utils.data.loader import create_distributed_dataloader
from utils.data.transfer import one_ahead

CTX = DistributedContext(0, 0, 1, torch.device("cpu"))
LOGGER = logging.getLogger("ddp")


class Lines(Dataset):
    """A forker's own set."""

    cacheable = True

    def __len__(self):
        return 70

    def __getitem__(self, index):
        return {"ids": torch.arange(3) + index, "label": index}

    def device_transform(self, batch, seed, epoch, indices):
        return batch | {"drawn": indices + epoch}


def config_of(**changes):
    return TrainingConfig(**({"batch_size": 8, "cache": "ram", "num_workers": 0} | changes))


def test_a_set_that_cannot_be_kept_or_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(UserError, match="set cacheable = True in the data set if they are, or leave cache none"):
        cached(type("Other", (Lines,), {"cacheable": False})(), {}, config_of(), CTX, LOGGER)
    monkeypatch.setattr(utils.data.cache, "free_memory", lambda: 2_000)
    with pytest.raises(
        UserError,
        match="cache=ram: the decoded data take 0 MiB of memory, and localhost has 0 MiB free, .*; give the job more",
    ):
        cached(Lines(), {}, config_of(), CTX, LOGGER)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 16 << 30))
    said = "data take 4.50 GiB, and cuda:0 on localhost has 8.00 GiB free, of which 50% is left .*; give --cache ram"
    with pytest.raises(UserError, match=said):
        ctx = dataclasses.replace(CTX, device=torch.device("cuda", 0))
        check_room({"train": 9 << 29}, "device", config_of(cache="device"), ctx)


# ---- one micro-batch ahead ----


def test_one_ahead_keeps_order_and_end_and_brings_an_error_in_its_place():
    asked = []

    def items(count, error=None):
        for k in range(count):
            asked.append(k)
            yield k
        if error:
            raise error

    seen = []
    for item in one_ahead(items(4)):
        seen.append((item, asked[-1]))
    assert seen == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert list(one_ahead(items(0))) == [] and list(one_ahead(items(1))) == [0]
    found = one_ahead(items(2, UserError("no more; stop")))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(UserError, match="^no more; stop$"):
        next(found)
    with pytest.raises(StopIteration):
        next(found)


class StandIn:
    """In the place of the side stream: notes what goes through it."""

    def __init__(self):
        self.said = []

    def begin(self):
        self.said.append("begin")

    queued = contextlib.nullcontext

    def run(self, action):
        staged = action()
        self.said.append(("staged", staged.indices))
        return staged, SimpleNamespace(indices=staged.indices)

    def hand_over(self, batch, event):
        self.said.append(("handed over", event.indices))


@pytest.fixture
def ahead(monkeypatch):
    """A loader with a stand-in for the side stream, and what went through it."""
    monkeypatch.setattr(utils.data.loader, "pinned", lambda batch: batch)

    def make(source, **changes):
        loader, sampler = create_distributed_dataloader(source, config_of(cache="none", **changes), CTX)
        loader._side = StandIn()
        return loader, sampler, loader._side.said

    return make


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_micro_batch_is_staged_before_this_one_is_computed(ahead, monkeypatch, workers):
    """The wait and the computation are in the phases of their own micro-batch."""
    loader, sampler, said = ahead(Lines(), batch_size=24, num_workers=workers)
    loader.clock, phases = Clock(), []
    monkeypatch.setattr(loader.clock, "enter", phases.append)
    for epoch in (0, 1):  # the workers of the first epoch are kept
        plan = [m.indices for global_batch in sampler.global_batches(epoch) for m in global_batch]
        said.clear()
        for global_batch in loader.global_batches(epoch):
            for m in global_batch:
                said.append(("computed", m.indices))
                assert phases[-1] == "forward"
                assert m.batch["label"].tolist() == m.indices and m.batch["drawn"].tolist() == [
                    k + epoch for k in m.indices
                ]
        a, b, c = plan
        assert said == [
            "begin",
            *(("staged", a), ("staged", b), ("handed over", a), ("computed", a)),
            *(("staged", c), ("handed over", b), ("computed", b)),
            *(("handed over", c), ("computed", c)),
        ]
    assert phases == ["data", "forward"] * 8  # the last look of each epoch finds the end


def test_an_epoch_that_is_left_half_way_leaves_nothing_to_the_next(ahead):
    loader, sampler, said = ahead(Lines(), batch_size=8, num_workers=1)
    for epoch in (0, 1):
        for number, global_batch in enumerate(loader.global_batches(epoch)):
            for m in global_batch:
                assert m.indices == sampler.order(epoch)[8 * number : 8 * number + 8].tolist()
                assert m.batch["label"].tolist() == m.indices
            if number == 2 and epoch == 0:
                break
    assert number == 8
