"""What runs in the processes that fetch data, and what may befall them: each such end becomes a sentence with its
remedy."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from config import TrainingError, UserError
from utils.batch import tensors_in
from utils.data.sampler import MicroBatch
from utils.rng import derive_seed

SHARED_MEMORY = "/dev/shm"  # a collated batch travels through it from a worker to its rank; Linux alone
MORE_SHARED_MEMORY = "docker run --shm-size, in Kubernetes an emptyDir of medium: Memory mounted there"
IS_FULL = f"since {SHARED_MEMORY} is full; give it more room ({MORE_SHARED_MEMORY}), or fewer --num_workers, or 0"
FOR_MEMORY = "by the system for want of memory; give fewer --num_workers, or the job more memory"
REMEDIES = {
    "Killed": f", as a rule {FOR_MEMORY}",
    "Bus error": f", as happens {IS_FULL}",
    "": "; where the data set's code crashed, --num_workers 0 shows the place",
}
# as torch's DataLoader.cpp words it
KILLED = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: (.*?)\. ")
EXITED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) exited unexpectedly(?: with exit code (\d+))?")
NO_ROOM = re.compile(
    r"unable to (?:allocate|resize|mmap|write to) .*(?:shm|shared memory|torch_\d+).*No space left on device", re.DOTALL
)


class Fetcher(Dataset):
    """Runs in the worker: the samples of one micro-batch, each with random streams of its own."""

    def __init__(self, dataset: Dataset, is_batched: bool, seed: int) -> None:
        self._dataset, self._is_batched, self._seed = dataset, is_batched, seed

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        try:
            if self._is_batched:
                return micro_batch, self._dataset.__getitems__(micro_batch.indices)
            return micro_batch, [self._sample(micro_batch.epoch, index) for index in micro_batch.indices]
        except UserError as refused:  # raised again in the main process, as one sentence
            return micro_batch, refused

    def _sample(self, epoch: int, index: int) -> Any:
        self._seed_streams(epoch, index)
        return self._dataset[index]

    def _seed_streams(self, epoch: int, index: int) -> None:
        seed = derive_seed("sample", self._seed, epoch, index)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


class Collate:
    """Runs in the worker: the samples of a micro-batch become a batch, in shared memory."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, item: tuple[MicroBatch, Any]) -> tuple[MicroBatch, Any]:
        micro_batch, samples = item
        if isinstance(samples, UserError):
            return item
        try:
            batch = self._collate(samples)
        except UserError as refused:
            return micro_batch, refused
        share_in_worker(batch)
        return micro_batch, batch


class Late(RuntimeError):
    """What had to come did not, in so many seconds."""


def no_longer_than(seconds: float) -> contextlib.AbstractContextManager:
    """Raise Late in what takes so long. 0, or outside the main thread: no limit.

    By an alarm, and not by DataLoader's timeout: a rank that takes a batch asks the worker for it while unpickling, and
    waits
    there for ever when the worker has been stopped. The alarm rings twice. This process may itself have been stopped
    (Ctrl-Z),
    and hears then of all the rings that it missed as of one.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
        return contextlib.nullcontext()
    return _alarm(seconds)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    rings = itertools.count(1)

    def ring(*_: object) -> None:
        if next(rings) > 1:
            raise Late(f"{seconds:.0f}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds / 2, seconds / 2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def explain(error: BaseException, rank: int, awaited: str = "") -> TrainingError | None:
    """What befell a worker of this rank's loaders; None where the error is another.

    DataLoader's handler of SIGCHLD raises wherever the main process happens to be, so this is asked for the error that
    ends
    a run as well as for one of `next`.

    Args:
        awaited: what the rank was waiting for.
    """
    if not isinstance(error, RuntimeError):
        return None
    text, said = str(error), ""
    if killed := KILLED.search(text):
        pid, name = killed.groups()
        said = f"loader worker {pid} was killed by a signal ({name}){REMEDIES.get(name, REMEDIES[''])}"
    elif exited := EXITED.search(text):
        see = f"is gone (exit code {exited[2]}); see where it ends with --num_workers 0"
        said = f"loader worker {exited[1]} " + (see if exited[2] else f"died, as a rule killed {FOR_MEMORY}")
    elif isinstance(error, Late):
        said = (
            f"a loader worker hangs: in {text} s nothing came of {awaited}; mend the storage or the data set's code, or"
            " raise --hang_timeout"
        )
    elif NO_ROOM.search(text):
        said = f"a loader worker could not hand over its batch, {IS_FULL}"
    return TrainingError(f"rank {rank}: {said}") if said else None


def _to_share(batch: Any) -> Iterator[Tensor]:
    """Those that are to be copied into shared memory on their way from a worker."""
    return (
        each
        for each in tensors_in(batch)
        if each.layout == torch.strided and each.device.type == "cpu" and not each.is_shared()
    )


def share_in_worker(batch: Any) -> None:
    """In a worker: bring the batch into shared memory. Else a thread of its queue does it, whose failure nobody would
    hear of."""
    if get_worker_info():
        for tensor in _to_share(batch):
            tensor.share_memory_()


def check_shared_memory(batch: Any, workers: int, prefetched: int, ranks: int) -> None:
    """See that /dev/shm has room for what this machine's workers may put there at once. To be called before they start.

    Args:
        batch: collated, as big as they get.
        workers: of each rank.
        prefetched: batches that each worker makes ahead.
        ranks: on this machine.

    Raises:
        UserError: where there is less room.
    """
    try:
        room = os.statvfs(SHARED_MEMORY)
    except (AttributeError, OSError):
        return  # no Linux
    sizes = [(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in _to_share(batch)]

    def pages(size: int) -> int:
        return math.ceil(size / room.f_frsize) * room.f_frsize

    def needed(workers: int) -> int:
        batches = workers * prefetched + 1  # the one that the rank has just taken
        # of a view the whole storage is copied there, once by each worker
        return ranks * sum(max(batches * pages(size), workers * pages(whole)) for size, whole in sizes)

    free = room.f_bavail * room.f_frsize
    if needed(workers) <= free or not room.f_blocks:  # a tmpfs without a limit has no blocks
        return
    fits = next((fewer for fewer in range(workers, 0, -1) if needed(fewer) <= free), 0)
    raise UserError(
        f"{SHARED_MEMORY}: has {free / 2**20:.1f} MB free, and {workers} loader worker(s) of each of {ranks} rank(s)"
        f" here may put {needed(workers) / 2**20:.1f} MB there; give it more room ({MORE_SHARED_MEMORY}), or"
        f" --num_workers {fits}"
    )
