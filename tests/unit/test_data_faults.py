"""Workers that die or run out of shared memory: what the error says."""

import contextlib
import os
import re
from types import SimpleNamespace

import pytest
import torch

from config import UserError
from utils.data.worker import check_shared_memory, explain

CPU = torch.device("cpu")


DIED = "DataLoader worker (pid 7) is killed by signal: {}. "
NO_ROOM = (
    "Caught RuntimeError in DataLoader worker process 0.\n"
    "unable to allocate shared memory(shm) for file </t>: No space left on device (28)"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DIED.format("Killed"), "worker 7 was killed .*want of memory; give fewer --num_workers"),
        (DIED.format("Bus error"), "Bus error., .*/dev/shm is full; .*--shm-size"),
        (DIED.format("Segmentation fault"), "Segmentation fault.; .* --num_workers 0 shows the place"),
        (
            "DataLoader worker (pid 7) exited unexpectedly with exit code 3.",
            "7 is gone .exit code 3.; see .* --num_workers 0",
        ),
        (
            "DataLoader worker (pid(s) 7, 8) exited unexpectedly",
            "worker 7, 8 died, as a rule killed by the system for want of memory; give",
        ),
        (
            NO_ROOM,
            "could not hand over its batch, since /dev/shm is full; give it more room .*, or fewer --num_workers, or 0",
        ),
        ("Caught KeyError in DataLoader worker process 0.", None),
        ("CUDA error: out of memory", None),
    ],
)
def test_what_torch_says_of_workers_becomes_a_sentence_with_a_remedy(text, said):
    failed = explain(RuntimeError(text), 1, "samples 1, 2")
    assert failed is None if said is None else str(failed).startswith("rank 1: ") and re.search(said, str(failed))


# ---- shared memory ----


def some(count):
    return torch.zeros(count, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("batch", "free_mb", "said"),
    [
        (some(2**20), 17, "has 17.0 MB free, and 4 .* of each of 2 .* put 18.0 MB there; .*, or --num_workers 3$"),
        ({"x": [some(2**20)]}, 5, "put 18.0 MB there; .*, or --num_workers 0$"),
        (some(2**20), 18, None),
        ([torch.zeros(10) for _ in range(64)], 4, "put 4.5 MB there"),  # each takes a page
        (some(2**20), 0, None),  # a tmpfs without a limit
        (some(2**20).share_memory_(), 1, None),  # the data set's own, in shared memory already
        (some(2**23)[:4], 64, None),  # of a view the whole, once for each of 8 workers
        (some(2**23)[:4], 63, "put 64.0 MB there"),
        (some(2**20).to("meta"), 1, None),
        (some(2**20).numpy(), 1, None),  # what is no tensor goes through a pipe
        (["text"] * 100, 1, None),
    ],
)
def test_shared_memory_is_refused_only_where_it_cannot_hold_what_travels_through_it(monkeypatch, batch, free_mb, said):
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=free_mb << 8, f_frsize=4096, f_blocks=free_mb << 8)
    )
    with pytest.raises(UserError, match=f"^/dev/shm: .*{said}") if said else contextlib.nullcontext():
        check_shared_memory(batch, workers=4, prefetched=2, ranks=2)


def test_a_machine_without_shared_memory_is_left_alone(monkeypatch):
    monkeypatch.setattr("utils.data.worker.SHARED_MEMORY", "/nowhere")  # macOS
    check_shared_memory(torch.zeros(2**40, device="meta"), workers=4, prefetched=2, ranks=2)
    check_shared_memory(torch.zeros(8), workers=10**9, prefetched=10**6, ranks=2)
