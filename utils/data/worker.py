"""The code of loader workers, and an error message for each way in which a worker can fail."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Listener
from multiprocessing.queues import Queue
from typing import Any, cast

from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, Subset, default_collate

from config import StartError, TrainingError, UserError
from utils.batch import tensors_in
from utils.data.sampler import MicroBatch
from utils.files import may_pass, retried
from utils.logger import told
from utils.rng import seed_host

HANGS = "a loader worker hangs"
TIMEOUTS = 3  # in a row, before a worker hangs
SHARED_MEMORY = "/dev/shm"  # workers pass batches to their rank through it (Linux)
MORE_ROOM = "give it more room (docker run --shm-size; in Kubernetes an emptyDir of medium Memory)"
OUT_OF_MEMORY = "usually because the machine ran out of memory; use fewer --num_workers or give the job more memory"
FAILURES = {  # by the messages of torch's DataLoader
    r"DataLoader worker \(pid (\d+)\) is killed by signal: Killed": f"was killed, {OUT_OF_MEMORY}",
    r"DataLoader worker \(pid (\d+)\) is killed by signal: Bus error": (
        f"died of a bus error because {SHARED_MEMORY} is full; {MORE_ROOM}, or use fewer --num_workers"
    ),
    r"DataLoader worker \(pid (\d+)\) is killed by signal": (
        "crashed in the data set's code; use --num_workers 0 to see where"
    ),
    r"DataLoader worker \(pid (\d+)\) exited unexpectedly with exit code": "exited; use --num_workers 0 to see where",
    r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly": f"died, {OUT_OF_MEMORY}",
    # torch 2.11 gives another reason
    r"unable to (?:allocate|resize|mmap|write to) .*(?:shm|shared memory|torch_\d+).*"
    r"(?:No space left on device|Resource temporarily unavailable)()": (
        f"could not pass on its batch because {SHARED_MEMORY} is full; {MORE_ROOM}, or use fewer --num_workers"
    ),
}


def sample_name(dataset: Any, index: int) -> str:
    """The index of a sample in the data set itself, and its file if `path(index)` gives one."""
    index %= len(dataset)  # it may be that of a copy
    while isinstance(dataset, Subset):
        index, dataset = dataset.indices[index], dataset.dataset
    with suppress(Exception):  # it may have no files
        return f"sample {index} ({dataset.path(index)})"
    return f"sample {index}"


def add_samples(error: Exception, dataset: Any, indices: Sequence[int], action: Any = None) -> None:
    """Add a note to the error with its samples and their files: the first one for whose position the action fails; or
    one that only fails beside the first; or all."""
    places = range(len(indices))
    some: Sequence[int] = places
    for some in [*([k] for k in places), *([0, k] for k in places[1:]), places] if action else ():
        try:
            action(some)
        except Exception:
            break
    error.add_note(", ".join(sample_name(dataset, indices[k]) for k in some[:8]))
    if isinstance(error, StopIteration):  # would look like the end of the data
        raise ValueError(f"StopIteration; {error.__notes__[-1]}") from error


class Fetcher(Dataset):
    """Fetches the samples of a micro-batch, each with its own random seed, or at once with a seed of all indices, and
    collates them."""

    def __init__(self, dataset: Any, is_batched: bool, seed: int) -> None:
        self._dataset, self._is_batched, self._seed = dataset, is_batched, seed
        self._collate_samples = getattr(dataset, "collate", default_collate)

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        epoch, indices = micro_batch.epoch, micro_batch.indices
        samples: list[Any] = []
        try:
            if self._is_batched:
                return micro_batch, retried(functools.partial(self._batch, epoch, indices))
            for index in indices:
                samples.append(retried(functools.partial(self._sample, epoch, index)))
            return micro_batch, samples
        except UserError as error:  # DataLoader would wrap it; the main process raises it unchanged
            return micro_batch, error
        except Exception as error:
            if self._is_batched:
                add_samples(error, self._dataset, indices, lambda some: self._batch(epoch, [indices[k] for k in some]))
            else:
                add_samples(error, self._dataset, [indices[len(samples)]])
            if not isinstance(error, OSError) or not may_pass(error):
                raise
            text = f"a sample cannot be read in three tries ({told(error)}); repair the storage"
            return micro_batch, StartError(f"{text}, then --resume_from auto")

    def _batch(self, epoch: int, indices: Sequence[int]) -> Any:
        seed_host("sample", self._seed, epoch, *indices)
        size = len(self._dataset)  # once: for each index, it took 300 us per thousand
        return self._dataset.__getitems__([index % size for index in indices])

    def _sample(self, epoch: int, index: int) -> Any:
        seed_host("sample", self._seed, epoch, index)
        return self._dataset[index % len(self._dataset)]  # it may be that of a copy

    def collate(self, item: tuple[MicroBatch, Any]) -> tuple[MicroBatch, Any]:
        """The micro-batch with its samples collated."""
        micro_batch, samples = item
        if isinstance(samples, UserError):
            return item
        try:
            return micro_batch, self._collate_samples(samples)
        except UserError as error:
            return micro_batch, error
        except Exception as error:
            is_listed = isinstance(samples, list) and len(samples) == len(micro_batch.indices)  # else a batch already
            again = (lambda some: self._collate_samples([samples[k] for k in some])) if is_listed else None
            add_samples(error, self._dataset, micro_batch.indices, again)
            raise


def send_error(queue: Queue, error: Exception, item: Any) -> None:
    """In the thread of a worker's queue, which pickles batches: without it, one that cannot be pickled is lost."""
    match item:
        case number, (MicroBatch() as micro_batch, _):
            kind = TrainingError if isinstance(error, (OSError, RuntimeError)) else UserError
            text = f"collate: a loader worker cannot send what it returns ({type(error).__name__}: {error}); return"
            text += " tensors, numbers, text, lists and dicts, or use --num_workers 0"
            queue.put((number, (micro_batch, kind(text))))
        case number, ExceptionWrapper() as raised:  # of a class that cannot be pickled
            raised.exc_type = RuntimeError
            queue.put((number, raised))
        case _:  # in a queue of the data set's code
            traceback.print_exc()


cast(Any, Queue)._on_queue_feeder_error = send_error  # also in a worker that imports this file


def is_late(error: BaseException) -> re.Match | None:
    """The seconds in DataLoader's message that a batch has not come in time; None for another error."""
    return re.search(r"DataLoader timed out after ([\d.]+) seconds", str(error))


def explain(error: BaseException, rank: int, awaited: str = "") -> TrainingError | None:
    """The error for a failed loader worker of this rank; None if the error is not about one.

    DataLoader's SIGCHLD handler raises anywhere in the main process, so this is called for any error that ends a run.

    Args:
        awaited: what the rank was waiting for.
    """
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    if late := is_late(error):
        remedy = "fix the storage or the data set's code"
        remedy += ", or raise --hang_timeout"  # extra: watch
        seconds = TIMEOUTS * float(late[1])
        return TrainingError(f"rank {rank}: {HANGS}: no batch for {seconds:.0f} s ({awaited}); {remedy}")
    for pattern, what in FAILURES.items():
        if found := re.search(pattern, text, re.DOTALL):
            return TrainingError(f"rank {rank}: loader worker {found[1]} {what}".replace("  ", " "))
    return None


def check_shared_memory(batch: Any, count: int, workers: int, prefetched: int, ranks: int) -> None:
    """Raises UserError if /dev/shm lacks the space for all batches that the workers of this machine may prefetch, or
    TMPDIR cannot hold the sockets through which they pass them on.

    Args:
        batch: collated; `count` times its size is the largest batch.
        workers: per rank.
        prefetched: batches per worker.
        ranks: on this machine.
    """
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        text = f"TMPDIR={tempfile.tempdir}: loader workers cannot open a socket there ({error})"
        raise UserError(f"{text}; set TMPDIR to a short path on a local disk, e.g. /tmp") from None
    try:
        room = os.statvfs(SHARED_MEMORY)
    except (AttributeError, OSError):  # not Linux
        return
    size = count * sum(tensor.nbytes for tensor in tensors_in(batch) if not tensor.is_shared())
    free = room.f_bavail * room.f_frsize
    need = ranks * (workers * prefetched + 1) * size
    if need <= free or not room.f_blocks:  # a tmpfs without a limit has no blocks
        return
    fitting = max(0, (free // (ranks * size) - 1) // prefetched)
    raise UserError(
        f"{SHARED_MEMORY}: {free / 2**20:.1f} MB are free, but {workers} workers of each of {ranks} ranks may need"
        f" {need / 2**20:.1f} MB; {MORE_ROOM}, or use --num_workers {fitting}"
    )
