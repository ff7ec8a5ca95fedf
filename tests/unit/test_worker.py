"""Loader workers that die or run out of shared memory: the error message."""

import contextlib
import os
import re
from types import SimpleNamespace

import pytest
import torch

import utils.data.worker
from config import UserError
from utils.data.worker import check_shared_memory, explain

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
