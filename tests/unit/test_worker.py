# extra: template
"""Loader workers that die, run out of shared memory or cannot send a batch: the error message."""

import errno
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import traceback
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset

import utils.data.worker
import utils.files
from config import TrainingConfig
from ddp_utils import DistributedContext
from utils.data.loader import create_evaluation_dataloader
from utils.data.sampler import MicroBatch
from utils.data.sets import SampleSubset
from utils.data.worker import Fetcher, explain_worker_error
from utils.distributed.collectives import is_peer_failure
from utils.logger import error_text
from utils.run.exit import find_cause
from utils.settings.errors import StartError, TrainingError, UserError

CTX = DistributedContext(0, 0, 1, torch.device("cpu"))

DIED = "DataLoader worker (pid 7) is killed by signal: {}. "
SHM = (
    "It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit. "
)
EXITED = "exited unexpectedly with exit code 3. Rerunning with num_workers=0 may give better error trace"
CAUGHT = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
NO_ROOM = f"{CAUGHT}unable to allocate shared memory(shm) for file </t>: No space left on device (28)\n"
MAPPED = f"{CAUGHT}unable to mmap 64 bytes from file </torch_7_8_1>: Cannot allocate memory (12)\n"
NO_ROOM_2_11 = f"{CAUGHT}unable to resize file <torch_7_1> to the right size: Resource temporarily unavailable (11)\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DIED.format("Killed"), "DataLoader worker (pid 7) is killed by signal: Killed"),
        (DIED.format("Segmentation fault"), "DataLoader worker (pid 7) is killed by signal: Segmentation fault"),
        (DIED.format("Bus error") + SHM, "DataLoader worker (pid 7) is killed by signal: Bus error. " + SHM[:-2]),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
        (f"DataLoader worker (pid 7) {EXITED}.", f"DataLoader worker (pid 7) {EXITED}"),
        (NO_ROOM, "unable to allocate shared memory(shm) for file </t>: No space left on device (28)"),
        (NO_ROOM_2_11, "unable to resize file <torch_7_1> to the right size: Resource temporarily unavailable (11)"),
        (MAPPED, "unable to mmap 64 bytes from file </torch_7_8_1>: Cannot allocate memory (12)"),
        (
            f"{CAUGHT}unable to open shared memory object </torch_7_8_1> in read-write mode: Too many open files (24)",
            None,
        ),
        (f"{CAUGHT}unable to open file </data/torch_2/x.pt> in read-only mode: No such file or directory (2)", None),
        ("Caught KeyError in DataLoader worker process 0.", None),
        ("CUDA error: out of memory", None),
    ],
)
def test_an_error_of_torch_about_workers_gets_the_rank_and_the_fix(text, expected):
    failure = explain_worker_error(RuntimeError(text), 1)
    if expected is None:
        assert failure is None
    else:
        remedy = "If the data set's code crashed, --num_workers 0 shows where. If memory ran out, give the job more"
        remedy += " memory or a larger --shm-size, or use fewer --num_workers."
        assert str(failure) == f"Rank 1 failed: {expected}. {remedy}"
        # the error is complete: neither another rank nor a failed allocation adds to it
        assert find_cause(failure, None, TrainingConfig(), CTX) is failure


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
    assert isinstance(error, StartError) and re.search(r"in three tries .*Input/output error.*\. Repair", str(error))
    with pytest.raises(FileNotFoundError):
        fetched(1, errno.ENOENT)


class Faulty(Dataset):
    """20 samples; what `spoil` makes of sample 13 is returned or raised."""

    def __init__(self, spoil):
        self.spoil = spoil

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.spoil(index) if index == 13 else (torch.zeros(2), index)

    def path(self, index):
        return f"/data/igloo/{index}.png"  # is_peer_failure looks for "gloo"


class Pathless(Faulty):
    path = None


class Together(Faulty):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Batched(Together):
    def __getitems__(self, indices):
        return torch.stack([self[index][0] for index in indices])

    def collate(self, batch):
        return batch


class Own(Faulty):
    def collate(self, samples):
        return sum(sample[0].sum() for sample in samples)


class Odd(Exception):
    """Cannot be made from a text alone, as DataLoader tries."""

    def __init__(self, code, text):
        super().__init__(code, text)


def raising(kind, *args):
    def spoil(index):
        raise kind(*args)

    return spoil


def giving(value):
    return lambda index: value


KINDS = [
    ValueError,
    KeyError,
    RuntimeError,
    StopIteration,
    AssertionError,
    OSError,
    AttributeError,
    EOFError,
]
RAISED = [*(raising(kind, "bad") for kind in KINDS), raising(Odd, 3, "bad"), raising(FileNotFoundError, 2, "bad")]
WRONG = [None, Image.new("RGB", (2, 2)), (torch.zeros(2), None), (torch.zeros(3), 1), (torch.zeros(2), 1, 2), object()]
CASES = [
    *((Faulty, spoil) for spoil in RAISED),
    *((kind, spoil) for kind in (Together, Batched, Own) for spoil in RAISED[:4]),
    *((kind, giving(value)) for kind in (Faulty, Together) for value in WRONG),
    *((kind, giving(None)) for kind in (Batched, Own)),
]


def error_of(dataset, workers):
    """The error of a loader of the data set, 4 samples at a time."""
    loader = create_evaluation_dataloader(dataset, TrainingConfig(batch_size=4, num_workers=workers), CTX)
    with pytest.raises(Exception) as caught:
        list(loader.micro_batches(0))
    return caught.value


@pytest.mark.parametrize(("kind", "spoil"), CASES)
def test_an_error_of_a_sample_has_its_index_and_file_beside_the_traceback(kind, spoil):
    error = error_of(kind(spoil), workers=0)
    text = error_text(error)
    assert re.search(r"sample 13 \(/data/igloo/13.png\)\.?$", text), text
    others = re.findall(r"sample (\d+)", text)[:-1]
    assert others in ([], ["12"]), text  # alone, or beside the first of its micro-batch
    code = "".join(traceback.format_exception(error))
    assert "in spoil" in code or "in default_collate" in code or "in collate" in code or "in __getitems__" in code, code


@pytest.mark.parametrize("kind", [Faulty, Batched])
@pytest.mark.parametrize("spoil", [*RAISED[1:4], RAISED[-2], giving(None)])
def test_an_error_in_a_loader_worker_has_them_too_and_blames_no_peer(kind, spoil):
    error = error_of(kind(spoil), workers=1)
    assert "sample 13 (/data/igloo/13.png)" in error_text(error) and "Traceback" in error_text(error), error_text(error)
    assert not is_peer_failure(error)


def test_the_sample_is_that_of_the_data_set_itself():
    """In a subset, in a subset of one, and in a data set that has no files; of a copy, the sample."""
    chosen = SampleSubset(Faulty(raising(KeyError, "bad")), torch.tensor([19, 13, 0, 1, 2]))
    for dataset in (chosen, Subset(chosen, [4, 3, 1])):
        assert error_text(error_of(dataset, 0)) == "'bad'; sample 13 (/data/igloo/13.png)"
    assert error_text(error_of(Pathless(raising(KeyError, "bad")), 0)) == "'bad'; sample 13"
    fetcher = Fetcher(Faulty(raising(KeyError, "bad")), False, 1)
    with pytest.raises(KeyError) as caught:
        fetcher.__getitems__(MicroBatch(0, 0, [1, 33], False, True, 1))
    assert caught.value.__notes__ == ["sample 13 (/data/igloo/13.png)"]
    read_later = raising(OSError, errno.EIO, "bad")
    with mock.patch.object(utils.files, "SECONDS_BETWEEN_TRIES", 0):
        text = str(error_of(Faulty(read_later), 0))
    assert re.search(r"bad\W+sample 13 \(/data/igloo/13.png\)\)\. Repair the storage, then", text), text


# ---- batches that cannot be sent ----


class Reduced:
    """Pickling it fails with this error."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def deep():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    return SimpleNamespace(found=nested)


class OfAFunction:
    """Its instances have a class that pickle does not find."""

    def __new__(cls):
        return type("Local", (), {})()


RETURN = r"\. Return tensors, numbers, text, lists and dicts, or use --num_workers 0\."
UNSENDABLE = {  # made in the worker: the error's type, what it says of it
    "a generator": (lambda: (k for k in range(3)), UserError, f"cannot pickle 'generator' object.*{RETURN}"),
    "a function": (lambda: lambda: None, UserError, f"lambda.*{RETURN}"),
    "a lock": (threading.Lock, UserError, f"cannot pickle '_thread.lock' object.*{RETURN}"),
    "a lock of processes": (multiprocessing.Lock, TrainingError, f"RuntimeError: .*{RETURN}"),
    "an open file": (lambda: open(os.devnull), UserError, rf"cannot pickle '(_io\.)?TextIOWrapper'.*{RETURN}"),
    "a local class": (OfAFunction, UserError, f"Local.*{RETURN}"),
    "a graph": (lambda: torch.ones(1, requires_grad=True) * 2, TrainingError, f"requires_grad.*{RETURN}"),
    "a deep object": (deep, TrainingError, f"RecursionError: .*{RETURN}"),
    "code that fails": (lambda: Reduced(KeyError("k")), UserError, f"KeyError: 'k'.*{RETURN}"),
    "no socket": (lambda: Reduced(OSError("AF_UNIX path too long")), TrainingError, f"path too long.*{RETURN}"),
    "no descriptor": (lambda: Reduced(OSError(errno.EMFILE, "Too many")), TrainingError, f"Errno 24.*{RETURN}"),
    "no room": (lambda: Reduced(OSError(errno.ENOSPC, "No space")), TrainingError, f"Errno 28.*{RETURN}"),
    "no shared memory": (
        lambda: Reduced(RuntimeError("unable to write to file </torch_7_8_1>: No space left on device (28)")),
        TrainingError,
        r"No space left.*If memory ran out, give the job more memory or a larger --shm-size, or use fewer .*",
    ),
}


class Unsendable(Dataset):
    def __len__(self):
        return len(UNSENDABLE) + 2

    def __getitem__(self, index):
        if index == len(UNSENDABLE) + 1:
            raise type("LocalError", (Exception,), {})("of a class that pickle does not find")
        return list(UNSENDABLE.values())[index][0]() if index < len(UNSENDABLE) else torch.ones(2)

    def collate(self, samples):
        return samples[0]


def loader_of(data):
    ctx = DistributedContext(0, 0, 1, torch.device("cpu"))
    return create_evaluation_dataloader(data, TrainingConfig(batch_size=1, num_workers=1), ctx)


@pytest.mark.guarantee("worker-killed")
def test_a_batch_that_a_worker_cannot_send_is_an_error_and_not_a_hang():
    loader = loader_of(Unsendable())
    batches = iter(loader._loader)
    for name, (_, kind, expected) in UNSENDABLE.items():
        with pytest.raises(kind) as raised:
            loader._start_transfer(next(batches))
        assert type(raised.value) is kind, name
        problem = f"Rank 0 failed: A loader worker cannot send what collate returns .*{expected}$"
        assert re.match(problem, str(raised.value)), raised.value
    assert torch.equal(loader._start_transfer(next(batches)).batch, torch.ones(2))  # the worker goes on
    with pytest.raises(RuntimeError, match=r"(?s)line \d+, in __getitem__.*LocalError: of a class that pickle does"):
        next(batches)
    loader.close()


def test_the_queues_of_a_data_set_in_a_worker_report_as_without_us(capfd):
    class Queued(Unsendable):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            queue = multiprocessing.Queue()
            for item in (lambda: None, (1, lambda: None), (2, "text")):
                queue.put(item)
            return torch.tensor(queue.get()[0])

    loader = loader_of(Queued())
    assert next(iter(loader)).tolist() == 2
    loader.close()
    assert capfd.readouterr().err.count("Traceback") == 2  # Python's own text differs between its versions


def test_a_temporary_folder_where_workers_cannot_open_a_socket_is_rejected_if_there_are_workers(tmp_path, monkeypatch):
    missing = str(tmp_path / "missing")
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    for folder, reason in ((str(deep), "path too long"), (missing, "No such file")):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
        if sys.version_info >= (3, 14) and folder != missing:
            continue  # multiprocessing takes /tmp there
        expected = f"socket in TMPDIR={folder} \\(.*{reason}.*\\)\\. Set TMPDIR to a short path"
        with pytest.raises(UserError, match=expected):
            loader_of([torch.ones(1)] * 3)
        ctx = DistributedContext(0, 0, 1, torch.device("cpu"))
        without = create_evaluation_dataloader([torch.ones(1)], TrainingConfig(batch_size=1, num_workers=0), ctx)
        assert len(without.fetch_example_batch()) == 1
