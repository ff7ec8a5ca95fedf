"""The code of loader workers, and the error message for a worker that fails."""

from __future__ import annotations

import gc
import os
import re
import resource
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Listener
from multiprocessing.queues import Queue
from typing import Any, cast

from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, Subset, default_collate

from utils.data.sampler import MicroBatch
from utils.data.transfer import pin_batch
from utils.files import is_transient, retry
from utils.logger import error_text
from utils.rng import seed_host
from utils.settings.errors import StartError, TrainingError, UserError

# torch's message about a worker that has died, or that has no shared memory left for its batch
WORKER_FAILURE_PATTERN = re.compile(
    r"DataLoader worker \(pid.*|unable to (?:allocate shared memory|\w+ .*</?torch_\d+_)(?!.*Too many open files).*"
)
MEMORY_REMEDY = (
    "If the data set's code crashed, --num_workers 0 shows where. If memory ran out, give the job more memory or a"
    " larger --shm-size, or use fewer --num_workers."
)
# the second text is raised where descriptors are received
OPEN_FILES_PATTERN = re.compile(r"Too many open files|received \d+ items of ancdata")

# A worker has copies of its parent's objects. The destructor of a gloo group hangs there, since the threads that it
# waits for exist in the parent alone: so no copy is collected as garbage.
os.register_at_fork(after_in_child=gc.freeze)


def format_sample_name(dataset: Any, index: int) -> str:
    """Return the index of a sample in the data set inside all subsets, and its file if `path(index)` gives one."""
    index %= len(dataset)  # the index may be that of a copy
    while isinstance(dataset, Subset):
        index = dataset.indices[index]
        dataset = dataset.dataset
    with suppress(Exception):  # the data set may have no files
        return f"sample {index} ({dataset.path(index)})"
    return f"sample {index}"


def note_failed_samples(
    error: Exception,
    dataset: Any,
    indices: Sequence[int],
    try_positions: Callable[[Sequence[int]], object] | None = None,
) -> None:
    """Add a note to the error with the failed samples of a micro-batch and their files.

    Args:
        indices: the samples of the micro-batch.
        try_positions: does what failed with the samples at these positions of `indices` only. Without it, the note
            names all samples.

    Raises:
        ValueError: instead of a StopIteration, which would look like the end of the data.
    """
    positions: Sequence[int] = range(len(indices))
    if try_positions:
        positions = _find_failing_positions(len(indices), try_positions)
    note = ", ".join(format_sample_name(dataset, indices[k]) for k in positions[:8])
    if note not in getattr(error, "__notes__", []):  # a data set around this one may have added the note
        error.add_note(note)
    if isinstance(error, StopIteration):
        raise ValueError(
            f"The data set raised StopIteration, where an IndexError or a correct __len__ is needed, for {note}."
        ) from error


def _find_failing_positions(count: int, try_positions: Callable[[Sequence[int]], object]) -> Sequence[int]:
    """Return the first position that fails alone, else the first position and one that fails beside it, else all."""
    alone = [[k] for k in range(count)]
    beside_the_first = [[0, k] for k in range(1, count)]
    for positions in alone + beside_the_first:
        try:
            try_positions(positions)
        except Exception:
            return positions
    return range(count)


class CollatedMicroBatch(tuple):
    """A micro-batch and its collated samples. The DataLoader pins them by the method `pin_memory`."""

    def pin_memory(self) -> CollatedMicroBatch:
        """Pin the batch by `pin_batch`, which knows more kinds of objects than torch."""
        micro_batch, batch = self
        return CollatedMicroBatch((micro_batch, pin_batch(batch)))


class Fetcher(Dataset):
    """The fetcher reads the samples of a micro-batch and collates them, in a worker or in the main process.

    Each sample is read with its own random seed, or all of them at once with a seed of all indices.

    Args:
        is_batched: whether the data set has `__getitems__`, which reads all samples at once.
    """

    def __init__(self, dataset: Any, is_batched: bool, seed: int) -> None:
        self._dataset = dataset
        self._is_batched = is_batched
        self._seed = seed
        self._collate_samples = getattr(dataset, "collate", default_collate)

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        """Read the samples of a micro-batch.

        Returns:
            The micro-batch, and its samples or a UserError. DataLoader would wrap an error that is raised, so it is
            returned, and the main process raises it unchanged.
        """
        epoch = micro_batch.epoch
        indices = micro_batch.indices
        samples: list[Any] = []
        try:
            if self._is_batched:
                return micro_batch, retry(partial(self._fetch_batch, epoch, indices))
            for index in indices:
                samples.append(retry(partial(self._fetch_sample, epoch, index)))
            return micro_batch, samples
        except UserError as error:
            return micro_batch, error
        except Exception as error:
            if self._is_batched:
                try_positions = partial(self._fetch_positions, epoch, indices)
                note_failed_samples(error, self._dataset, indices, try_positions=try_positions)
            else:
                failed_index = indices[len(samples)]
                note_failed_samples(error, self._dataset, [failed_index])
            if not isinstance(error, OSError) or not is_transient(error):
                raise
            message = explain_open_file_limit(error)
            if not message:
                message = f"A sample cannot be read in three tries ({error_text(error)}). Repair the storage,"
                message += " then start again with --resume_from auto."
            return micro_batch, StartError(message)

    def _fetch_batch(self, epoch: int, indices: Sequence[int]) -> Any:
        seed_host("sample", self._seed, epoch, *indices)
        size = len(self._dataset)  # once: for each index, it took 300 us per thousand
        return self._dataset.__getitems__([index % size for index in indices])

    def _fetch_positions(self, epoch: int, indices: Sequence[int], positions: Sequence[int]) -> Any:
        return self._fetch_batch(epoch, [indices[k] for k in positions])

    def _fetch_sample(self, epoch: int, index: int) -> Any:
        seed_host("sample", self._seed, epoch, index)
        return self._dataset[index % len(self._dataset)]  # the index may be that of a copy

    def collate(self, item: tuple[MicroBatch, Any]) -> tuple[MicroBatch, Any]:
        """Collate the samples of a micro-batch.

        Args:
            item: as `__getitems__` returns it.

        Returns:
            The micro-batch, and its batch or a UserError.
        """
        micro_batch, samples = item
        if isinstance(samples, UserError):
            return item
        try:
            return CollatedMicroBatch((micro_batch, self._collate_samples(samples)))
        except UserError as error:
            return micro_batch, error
        except Exception as error:
            try_positions = None
            if isinstance(samples, list) and len(samples) == len(micro_batch.indices):  # else they are a batch already
                try_positions = partial(self._collate_positions, samples)
            note_failed_samples(error, self._dataset, micro_batch.indices, try_positions=try_positions)
            raise

    def _collate_positions(self, samples: list[Any], positions: Sequence[int]) -> Any:
        return self._collate_samples([samples[k] for k in positions])


def send_pickling_error(queue: Queue, error: Exception, item: Any) -> None:
    """Send an error instead of a batch that cannot be pickled, which is lost otherwise.

    It is called in the thread of a worker's queue, which pickles batches.
    """
    match item:
        case number, (MicroBatch() as micro_batch, _):
            message = explain_open_file_limit(error)
            if not message:
                message = f"A loader worker cannot send what collate returns ({type(error).__name__}: {error})."
                if WORKER_FAILURE_PATTERN.search(str(error)):
                    message += f" {MEMORY_REMEDY}"
                else:
                    message += " Return tensors, numbers, text, lists and dicts, or use --num_workers 0."
            error_class = TrainingError if isinstance(error, (OSError, RuntimeError)) else UserError
            queue.put((number, (micro_batch, error_class(message))))
        case number, ExceptionWrapper() as raised:  # of a class that cannot be pickled
            raised.exc_type = RuntimeError
            queue.put((number, raised))
        case _:  # in a queue of the data set's code
            traceback.print_exc()


cast(Any, Queue)._on_queue_feeder_error = send_pickling_error  # also in a worker that imports this file


def explain_worker_error(error: BaseException, rank: int) -> TrainingError | None:
    """Return an error with torch's message about a failed loader worker, the rank and the fix.

    DataLoader's SIGCHLD handler raises anywhere in the main process, so this is called for any error that ends a run.

    Returns:
        None if the error is not about a worker.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, TrainingError):  # one of ours, perhaps of another rank
        return None
    failure = WORKER_FAILURE_PATTERN.search(str(error))
    if not failure:
        return None
    message = failure[0].strip().rstrip(".")
    return TrainingError(f"Rank {rank} failed: {message}. {MEMORY_REMEDY}")


def explain_open_file_limit(error: BaseException) -> str:
    """Return the message for a process that can open no more files. It is empty for another error."""
    if isinstance(error, UserError | TrainingError) or not OPEN_FILES_PATTERN.search(str(error)):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    cause = f"The limit on open files is {limit}, and each tensor of a batch from a loader worker needs one of them."
    remedy = f"Use --num_workers 0, or raise the limit (ulimit -n {2**20}, which is Linux's maximum by default)."
    return f"{cause} {remedy}"


def check_socket_folder() -> None:
    """Raise UserError if TMPDIR cannot hold the sockets through which workers pass on their batches."""
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        text = f"Loader workers cannot open a socket in TMPDIR={tempfile.tempdir} ({error})."
        raise UserError(f"{text} Set TMPDIR to a short path on a local disk, such as /tmp.") from None
