"""Loader workers that die or run out of shared memory: the error message."""

import contextlib
import errno
import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

import utils.data.worker
import utils.files
from config import StartError, UserError
from utils.data.sampler import MicroBatch
from utils.data.worker import Fetcher, check_shared_memory, explain

DIED = "DataLoader worker (pid 7) is killed by signal: {}. "
NO_ROOM = (
    "Caught RuntimeError in DataLoader worker process 0.\n"
    "unable to allocate shared memory(shm) for file </t>: No space left on device (28)"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DIED.format("Killed"), "worker 7 was killed, .*ran out of memory; use fewer --num_workers"),
        (DIED.format("Bus error"), "worker 7 died of a bus error because /dev/shm is full; .*--shm-size"),
        (DIED.format("Segmentation fault"), "worker 7 crashed .*; use --num_workers 0 to see where"),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 3.", "worker 7 exited; use --num_workers 0"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "worker 7, 8 died, usually .* out of memory; use"),
        (NO_ROOM, "worker could not pass on its batch because /dev/shm is full; give it more room .*--shm-size"),
        ("DataLoader timed out after 10.8 seconds", r"hangs: no batch for 32 s \(samples 1, 2\); fix .*--hang_timeout"),
        ("Caught KeyError in DataLoader worker process 0.", None),
        ("CUDA error: out of memory", None),
    ],
)
def test_an_error_of_torch_about_workers_becomes_a_sentence_with_the_fix(text, expected):
    failure = explain(RuntimeError(text), 1, "samples 1, 2")
    if expected is None:
        assert failure is None
    else:
        assert re.match(rf"rank 1: .*{expected}", str(failure)), failure


MEGABYTE = torch.zeros(2**20, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("batch", "count", "free_mb", "expected"),
    [
        (MEGABYTE, 1, 17, "17.0 MB are free, but 4 workers .* 2 ranks may need 18.0 MB; .*, or use --num_workers 3$"),
        ({"x": [MEGABYTE[: 2**19]]}, 2, 5, "may need 18.0 MB; .*, or use --num_workers 0$"),
        (MEGABYTE, 1, 18, None),
        (MEGABYTE, 1, 0, None),  # a tmpfs without a limit
        (MEGABYTE.clone().share_memory_(), 1, 1, None),  # a tensor of the data set, already in shared memory
        (["text"] * 100, 1, 1, None),  # sent through a pipe
    ],
)
def test_shared_memory_that_cannot_hold_what_is_prefetched_is_rejected(monkeypatch, batch, count, free_mb, expected):
    room = SimpleNamespace(f_bavail=free_mb << 8, f_frsize=4096, f_blocks=free_mb << 8)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    with pytest.raises(UserError, match=f"^/dev/shm: .*{expected}") if expected else contextlib.nullcontext():
        check_shared_memory(batch, count, workers=4, prefetched=2, ranks=2)


def test_a_machine_without_dev_shm_is_not_checked(monkeypatch):
    monkeypatch.delattr(utils.data.worker.os, "statvfs")
    check_shared_memory(MEGABYTE, 10**9, workers=4, prefetched=2, ranks=2)


class Unreadable(Dataset):
    """A data set whose reads fail a number of times."""

    def __init__(self, failures, code):
        self.failures, self.code, self.reads = failures, code, 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.reads += 1
        if self.reads <= self.failures:
            raise OSError(self.code, os.strerror(self.code))
        return torch.rand(1)


class UnreadableBatches(Unreadable):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Unreadable, UnreadableBatches])
def test_a_sample_that_storage_fails_to_read_is_read_again_and_then_another_attempt_may_succeed(monkeypatch, kind):
    monkeypatch.setattr(utils.files, "SECONDS_BETWEEN_TRIES", 0)
    one = MicroBatch(0, 0, [1], False, True, 1)

    def fetched(failures, code=errno.EIO):
        is_batched = kind is UnreadableBatches
        return Fetcher(kind(failures, code), is_batched, 5).__getitems__(one)[1]

    assert fetched(2) == fetched(0)  # the same random numbers
    error = fetched(3)
    assert isinstance(error, StartError) and re.search(r"in three tries .*Input/output error.*repair", str(error))
    with pytest.raises(FileNotFoundError):
        fetched(1, errno.ENOENT)
