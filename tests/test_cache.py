"""--cache, what needs one process: which sets it takes, the memory it may take, what a held set passes on; prefetch, with a stand-in stream."""

import contextlib
import dataclasses
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

import utils.cache
import utils.loading
from config import Refused, TrainingConfig, UnreadableSample
from dataset import SyntheticImageDataset, create_distributed_dataloader
from ddp_utils import DistributedContext
from utils import provenance
from utils.cache import Rows, anonymous_file, cached, check_room, rows_size
from utils.loading import choose_workers
from utils.prefetch import one_ahead
from utils.watchdog import Clock

CTX = DistributedContext(0, 0, 1, torch.device("cpu"))
LOGGER = logging.getLogger("ddp")


class Lines(Dataset):
    """A forker's own set: a nest of tensors of several types, weights and an order of its own."""

    cacheable = True
    weights = [1.0 + k for k in range(70)]
    bad = ()

    def __len__(self):
        return 70

    def __getitem__(self, index):
        if index in self.bad:
            raise UnreadableSample(f"line {index}: is cut short; write it anew")
        return {"ids": torch.arange(3) + index, "rest": (torch.full((2, 2), index / 2), index % 2 == 0), "label": index}

    def epoch_order(self, seed, epoch, n):
        return [(k * 3 + epoch) % n for k in range(n)]

    def device_transform(self, batch, seed, epoch, indices):
        return batch | {"drawn": indices + epoch}


def config_of(**changes):
    return TrainingConfig(**({"batch_size": 8, "cache": "ram", "num_workers": 0} | changes))


def held(source, **changes):
    return cached(source, {}, config_of(**changes), CTX, LOGGER)[0]


def all_batches(dataset, **changes):
    loader, _ = create_distributed_dataloader(dataset, config_of(**changes), CTX)
    return [m.batch for epoch in (0, 1) for window in loader.windows(epoch) for m in window]


def test_a_nest_of_tensors_comes_back_as_it_was_and_the_set_is_its_source_in_all_else():
    source = Lines()
    kept = held(source)
    for plain, mine in zip(all_batches(source), all_batches(kept), strict=True):
        assert plain.keys() == mine.keys() and type(mine["rest"]) is type(plain["rest"])
        for a, b in zip(*(utils.cache.tensors_in(each) for each in (plain, mine)), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
    assert kept.weights is source.weights and kept.source is source and not hasattr(kept, "classes")
    assert provenance.fingerprint(kept) == provenance.fingerprint(source) == "Lines of 70"
    assert kept[5]["label"] == 5 and torch.equal(kept[5]["ids"], source[5]["ids"])
    assert choose_workers(config_of(num_workers=4), kept, 1) == 0


def test_it_decodes_no_more_after_the_start(monkeypatch):
    source = Lines()
    kept = held(source)
    monkeypatch.setattr(Lines, "__getitem__", lambda *_: pytest.fail("decoded again"))
    assert len(all_batches(kept)) == 18


@pytest.mark.parametrize("is_batched", [False, True])
def test_what_cannot_be_read_is_raised_by_the_same_words_when_it_is_asked_for(is_batched):
    source = Lines()
    source.bad = (0, 33, 34)
    if is_batched:
        source.__getitems__ = lambda indices: [source[k] for k in indices]
    kept = held(source)
    assert sorted(kept.unreadable) == [0, 33, 34]
    for each in (source, kept):
        with pytest.raises(UnreadableSample, match="^line 33: is cut short; write it anew$"):
            each[33]
        with pytest.raises(Refused, match=r"^rank 0 met a corrupt sample \(.*\): line 0: is cut short"):
            all_batches(each)


def refusals():
    def with_text(self, index):
        return torch.zeros(2), "text"

    def of_two_lengths(self, index):
        return torch.zeros(2 + (index == 50))

    yield "same in every epoch and of one shape; set cacheable = True in the data set if they are, or leave", {"cacheable": False}
    yield "Other has str in a batch, and only rows of tensors can be kept; leave cache none", {"__getitem__": with_text}
    yield r"sample 50 of the data set is torch.float32 \[3\], others torch.float32 \[2\]; make them alike", {"__getitem__": of_two_lengths}
    yield "has a batch of one sample that is not one row", {"collate": lambda self, samples: torch.zeros(len(samples) + 1)}
    yield "none of the first 16 samples can be read; mend the data", {"bad": range(70)}


@pytest.mark.parametrize(("said", "changes"), [*refusals()])
def test_sets_that_cannot_be_kept_are_refused(said, changes):
    with pytest.raises(Refused, match=said):
        held(type("Other", (Lines,), changes)())


def test_for_sets_in_memory_there_is_nothing_to_do_and_that_is_said_once(caplog):
    LOGGER.setLevel(logging.INFO)
    data, val = SyntheticImageDataset(8, image_size=8), SyntheticImageDataset(4, image_size=8, split="val")
    assert cached(data, {"val": val}, config_of(), CTX, LOGGER)[:2] == (data, {"val": val})
    assert caplog.messages == ["cache=ram: SyntheticImageDataset is in memory as it is, there is nothing to decode"]
    caplog.clear()
    assert cached(data, {"val": val}, config_of(cache="none"), CTX, LOGGER)[:2] == (data, {"val": val}) and not caplog.messages


# ---- memory ----


def test_a_device_that_is_too_small_is_refused_with_figures(monkeypatch):
    ctx = dataclasses.replace(CTX, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 16 << 30))
    monkeypatch.setattr(utils.cache, "free_memory", lambda: 3 << 30)
    check_room({"train": 2 << 30, "val": 2 << 30}, "device", config_of(cache="device"), ctx)  # one after the other in memory
    with pytest.raises(
        Refused, match="data take 4.50 GiB, and cuda:0 on localhost has 8.00 GiB free, of which 50% is left .*; give --cache ram"
    ):
        check_room({"train": 9 << 29}, "device", config_of(cache="device"), ctx)
    with pytest.raises(
        Refused, match="take 3.00 GiB of memory, and localhost has 3.00 GiB free, of which 10% .*; give the job more memory"
    ):
        check_room({"train": 3 << 30}, "device", config_of(cache="device"), ctx)


def test_a_spawned_worker_maps_the_same_memory():
    row = (torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    path, close = anonymous_file(rows_size(row, 5))
    rows = Rows(path, row, 5)
    again = pickle.loads(pickle.dumps(rows))
    close()
    again.batch[1][4] = 7
    assert rows.batch[1].tolist() == [0, 0, 0, 0, 7] and rows.batch[0].shape == (5, 3)


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
    found = one_ahead(items(2, Refused("no more; stop")))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(Refused, match="^no more; stop$"):
        next(found)
    with pytest.raises(StopIteration):
        next(found)


class StandIn:
    """In the place of the side stream: notes what goes through it."""

    def __init__(self):
        self.said = []

    is_open = False

    def begin(self):
        self.said.append("begin")

    @contextlib.contextmanager
    def queued(self):
        self.is_open = True
        yield
        self.is_open = False

    def run(self, action):
        with self.queued():
            staged = action()
        self.said.append(("staged", staged.indices))
        return staged, SimpleNamespace(indices=staged.indices)

    def hand_over(self, batch, event):
        self.said.append(("handed over", event.indices))


@pytest.fixture
def ahead(monkeypatch):
    """A loader with a stand-in for the side stream, and what went through it."""
    monkeypatch.setattr(utils.loading, "pinned", lambda batch: batch)

    def make(source, **changes):
        loader, sampler = create_distributed_dataloader(source, config_of(cache="none", **changes), CTX)
        loader._side = StandIn()
        return loader, sampler, loader._side.said

    return make


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_micro_batch_is_staged_before_this_one_is_computed(ahead, workers):
    source = Lines()
    loader, sampler, said = ahead(source, batch_size=24, num_workers=workers)
    for epoch in (0, 1):  # the workers of the first epoch are kept
        plan = [m.indices for window in sampler.windows(epoch) for m in window]
        said.clear()
        for window in loader.windows(epoch):
            for m in window:
                said.append(("computed", m.indices))
                assert m.batch["label"].tolist() == m.indices and m.batch["drawn"].tolist() == [k + epoch for k in m.indices]
        a, b, c = plan
        assert said == [
            "begin",
            *(("staged", a), ("staged", b), ("handed over", a), ("computed", a)),
            *(("staged", c), ("handed over", b), ("computed", b)),
            *(("handed over", c), ("computed", c)),
        ]


def test_a_set_on_the_device_is_indexed_and_transformed_on_the_side(ahead):
    found, source = [], Lines()
    loader, _, _ = ahead(source, batch_size=24)
    side = loader._side
    plain, source.device_transform = source.device_transform, lambda *args: found.append(side.is_open) or plain(*args)
    source.__getitems__ = lambda indices: found.append(side.is_open) or [source[k] for k in indices]
    loader, _, _ = ahead(source, batch_size=24)
    loader._side = side
    for window in loader.windows(0):
        for _ in window:
            assert not side.is_open
    assert found == [True] * 6


class Phases(Clock):
    def __init__(self):
        super().__init__()
        self.entered = []

    def enter(self, phase):
        self.entered.append(phase)
        super().enter(phase)


class Unweighted(Lines):
    weights = None


def test_phases_and_replaced_samples_belong_to_their_own_micro_batch(ahead):
    source = Unweighted()
    loader, sampler, _ = ahead(source, batch_size=24, corrupt_images="replace")
    order = sampler.order(0).tolist()
    source.bad = (order[0], order[30], order[60])
    loader.clock = Phases()
    seen = []
    for window in loader.windows(0):
        for _ in window:
            assert loader.clock.entered[-1] == "forward"
            seen.append([index for index, _ in loader.take_replaced()])
    assert seen == [[order[0]], [order[30]], [order[60]]]
    assert loader.clock.entered == ["data", "forward"] * 4  # the last look finds the end


def test_a_corrupt_sample_ends_the_run_where_it_would_have_been_computed(ahead):
    source = Unweighted()
    loader, sampler, said = ahead(source, batch_size=24)
    source.bad = (sampler.order(0)[30].item(),)
    computed = []
    with pytest.raises(Refused, match="rank 0 met a corrupt sample .*: line "):
        for window in loader.windows(0):
            for m in window:
                computed.append(m.indices)
    assert computed == [sampler.order(0)[:24].tolist()]


def test_an_epoch_that_is_left_half_way_leaves_nothing_to_the_next(ahead):
    loader, sampler, said = ahead(Lines(), batch_size=8, num_workers=1)
    for epoch in (0, 1):
        for number, window in enumerate(loader.windows(epoch)):
            for m in window:
                assert m.indices == sampler.order(epoch)[8 * number : 8 * number + 8].tolist()
                assert m.batch["label"].tolist() == m.indices
            if number == 2 and epoch == 0:
                break
    assert number == 8
