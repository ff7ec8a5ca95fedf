# extra: template
"""What a rank exchanges does not grow with the number of ranks; only rank 0 receives a few bytes from each.

Up to 32 ranks are real processes. Beyond, only rank 0 is, without DDP and on torch's fake process group, which copies
this rank's values. `pytest -s --all tests/distributed/test_scale.py` prints the table of docs/architecture.md.
"""

import collections
import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import ddp_utils
import utils.distributed.consensus
import utils.distributed.device
import utils.distributed.groups
from config import TrainingConfig
from ranks import run_ranks, slow
from tasks import TASKS, EagerConsensus, create_images
from training import train_flags
from utils import assembly
from utils.distributed.collectives import broadcast_json, first_rank_where
from utils.distributed.consensus import Consensus, Vote
from utils.extras import sketches  # extra: sketches
from utils.training import first_passes
from utils.training.gradient_strategy import wrap_ddp

STEPS = 6
FLAGS = "--epochs 1 --batch_size 1 --log_interval 3 --save_every_steps 3 --save_every 0 --num_workers 0".split()
TIMES = {"start": 1, "step": STEPS, "log point": 2, "save": 2}  # each part occurs so often in a run


class Tally:
    """The operations and bytes of this rank, by part of the run. Bytes: what it sends, or receives if that is more."""

    def __init__(self):
        self.found = collections.Counter()

    def add(self, size):
        part = part_of_run()
        self.found[part, "operations"] += 1
        self.found[part, "bytes"] += size

    def rows(self):
        kinds = ("operations", "bytes")
        return {part: tuple(self.found[part, kind] / times for kind in kinds) for part, times in TIMES.items()}


def part_of_run():
    """The part of the run in which a collective was called, by the functions on the stack."""
    frame, names, files = sys._getframe(2), set(), set()
    while frame:
        names.add(frame.f_code.co_name)
        files.add(Path(frame.f_code.co_filename).name)
        frame = frame.f_back
    if names & {"assemble", "setup_distributed", "open_run"}:
        return "start"
    if "finish_log_point" in names:  # also in a save
        return "log point"
    if files & {"checkpoints.py", "copier.py"}:
        return "save"
    if "train_one_epoch" in names:
        return "step" if files & {"consensus.py", "step_sums.py"} else "log point"
    return "other"


class CountedStore:
    """The store as the exchange of rank information uses it."""

    def __init__(self, store, tally):
        self._store, self._tally = store, tally

    def set(self, key, value):
        self._tally.add(len(value))
        self._store.set(key, value)

    def get(self, key):
        value = self._store.get(key)
        self._tally.add(len(value))
        return value

    def multi_get(self, keys):
        values = self._store.multi_get(keys)
        self._tally.add(sum(map(len, values)))
        return values

    def clone(self):  # of the heartbeats, which belong to no part
        return self._store.clone()

    def wait(self, *args):
        self._tally.add(0)
        self._store.wait(*args)


def size_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@contextlib.contextmanager
def counting(tally):
    """Count collectives and the store's operations. DDP's own all-reduces are in C++: one per bucket and step."""
    sizes = {
        "all_reduce": lambda tensor, *_, **__: tensor.nbytes,
        "broadcast": lambda tensor, *_, **__: tensor.nbytes,
        "all_gather": lambda tensors, *_, **__: size_of(tensors),
        "gather": lambda tensor, tensors=None, *_, **__: size_of(tensors or [tensor]),
    }

    def counted(name, plain):
        def call(*args, **options):
            tally.add(sizes[name](*args, **options))
            return plain(*args, **options)

        return call

    plain_exchange = ddp_utils.exchange_rank_info

    def exchange_rank_info(launch, store, rank_info, **options):
        return plain_exchange(launch, CountedStore(store, tally), rank_info, **options)

    with contextlib.ExitStack() as stack:
        for name in sizes:
            stack.enter_context(mock.patch.object(dist, name, counted(name, getattr(dist, name))))
        stack.enter_context(mock.patch.object(ddp_utils, "exchange_rank_info", exchange_rank_info))
        yield


def without_ddp(model, config, ctx):
    return wrap_ddp(model, config, replace(ctx, world_size=1))


@contextlib.contextmanager
def pretending(world_size):
    """This process is rank 0 of so many: the others only have told of their machine, and take part in no collective."""
    plain_exchange, plain_init, plain_group = ddp_utils.exchange_rank_info, dist.init_process_group, dist.new_group

    def exchange_rank_info(launch, store, rank_info, **options):
        for rank in range(1, world_size):
            store.set(f"rank_info/{rank}", json.dumps(rank_info | {"host": f"node{rank // 8}"}))
        return plain_exchange(launch, store, rank_info, **options)

    os.environ["WORLD_SIZE"] = str(world_size)
    with (
        mock.patch.object(ddp_utils, "open_store", lambda *_: dist.HashStore()),
        mock.patch.object(utils.distributed.device, "raise_open_file_limit", lambda *_: None),
        mock.patch.object(first_passes, "raise_open_file_limit", lambda *_: None),
        mock.patch.object(assembly, "wrap_ddp", without_ddp),
        mock.patch.object(ddp_utils, "exchange_rank_info", exchange_rank_info),
        mock.patch.object(dist, "init_process_group", lambda _, **options: plain_init("fake", **options)),
        mock.patch.object(dist, "new_group", lambda backend, **options: plain_group(backend="fake", **options)),
    ):
        yield


def count_operations(words, world_size):
    """Train; the operations and bytes of each part of the run. world_size: that of the fake process group, or 0."""
    tally = Tally()
    without_val = lambda config, split: create_images(config, split) if split == "train" else None  # noqa: E731
    few_sketches = contextlib.nullcontext()  # else they grow with the data, and the data with the ranks
    few_sketches = mock.patch.object(sketches, "MAX_SAMPLES", 4)  # extra: sketches
    with (
        counting(tally),
        pretending(world_size) if world_size else contextlib.nullcontext(),
        mock.patch.dict(TASKS["images"], {"create_dataset": without_val}),
        mock.patch.object(assembly, "Consensus", EagerConsensus),
        few_sketches,
    ):
        assert train_flags(words)["state"] == "completed"
    return tally.rows()


def gathered():
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    rows = [torch.zeros(1), torch.zeros(1)]
    dist.gather(torch.ones(1), rows)
    return rows[1].item()


def measure(runs, ranks, is_fake):
    """The rows of rank 0, and the largest of the other ranks."""
    if is_fake and run_ranks(1, gathered)[0] != 1:
        pytest.skip(f"the fake process group of torch {torch.__version__} gathers nothing")
    words = runs.words(f"run-{ranks}", *FLAGS, "--dataset_size", ranks * STEPS)
    first, *others = run_ranks(1 if is_fake else ranks, count_operations, words, ranks * is_fake, deadline=300)
    show(ranks, "rank 0", first)
    if not others:
        return first, None
    most = {part: tuple(max(counts[part][k] for counts in others) for k in (0, 1)) for part in TIMES}
    show(ranks, "others", most)
    return first, most


def show(ranks, label, rows):
    cells = [f"{part}: {operations:g} operations, {size:,.0f} bytes" for part, (operations, size) in rows.items()]
    print(f"{ranks:5} ranks, {label}: {'; '.join(cells)}")


@pytest.mark.parametrize(("few", "many", "is_fake"), [(2, 4, False), (256, 1024, True), slow(8, 32, False)])
def test_operations_do_not_grow_with_the_ranks_and_bytes_only_at_rank_0(runs, few, many, is_fake):
    """At the start every rank learns a few bytes of each: names of hosts, and who reads which files."""
    before, after = (measure(runs, ranks, is_fake) for ranks in (few, many))
    most_per_rank = {"start": (1000, 200), "step": (0, 0), "log point": (40, 0), "save": (20, 0)}  # rank 0, others
    for part, limits in most_per_rank.items():
        for old, new, limit in zip(before, after, limits, strict=True):
            if old:
                assert new[part][0] == old[part][0], part
                digits = 4  # numbers are sent as text; a byte per rank would be more
                assert new[part][1] - old[part][1] <= limit * (many - few) + digits * (many - few > digits), part


@pytest.mark.slow
def test_rank_0_of_8192_trains_and_saves(runs):
    first, _ = measure(runs, 8192, True)
    assert first["log point"][1] <= 40 * 8192 and first["save"][1] < 20 * 8192


def count_sockets(ranks_in_a_mesh):
    with mock.patch.object(utils.distributed.groups, "MAX_FULLY_CONNECTED_RANKS", ranks_in_a_mesh):
        ctx = ddp_utils.setup_distributed(TrainingConfig(backend="gloo"))
    assert first_rank_where(ctx.rank > 2, ctx) == 3 and broadcast_json(ctx.rank, ctx, 5) == 5
    files = Path("/proc/self/fd")
    sockets = sum(os.readlink(file).startswith("socket") for file in files.iterdir() if file.is_symlink())
    ddp_utils.cleanup_distributed()
    return sockets


@pytest.mark.slow
def test_in_a_large_world_ranks_connect_only_to_those_that_they_talk_to():
    lazy, mesh = (run_ranks(8, count_sockets, most) for most in (7, 8))
    assert max(lazy[1:]) < min(mesh)


def votes_in_1000_steps(world_size):
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    clock, votes = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), []
    with mock.patch.object(utils.distributed.consensus, "time", clock):
        consensus = Consensus(lambda: votes.append(0) or Vote(), None)
        for _ in range(1000):
            clock.now += 0.01
            consensus.step()
    return len(votes)


def test_the_interval_of_votes_grows_with_the_ranks():
    """Steps of 10 ms each: a vote every 25 steps, and every 200 steps on 8,192 ranks."""
    few, many = (run_ranks(1, votes_in_1000_steps, ranks)[0] for ranks in (4, 8192))
    assert 38 <= few <= 44 and 5 <= many <= 7
