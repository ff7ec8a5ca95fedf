"""The code of loader workers, and the error message for a worker that fails."""

from __future__ import annotations

import functools
import gc
import os
import re
import resource
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
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
# the second one is raised where descriptors are received
OPEN_FILES_PATTERN = re.compile(r"Too many open files|received \d+ items of ancdata")

# A worker has copies of its parent's objects. The destructor of a gloo group hangs there, since the threads that it
# waits for exist in the parent alone: so no copy is collected as garbage.
os.register_at_fork(after_in_child=gc.freeze)


def format_sample_name(dataset: Any, index: int) -> str:
    """The index of a sample in the data set itself, and its file if `path(index)` gives one."""
    index %= len(dataset)  # it may be that of a copy
    while isinstance(dataset, Subset):
        index, dataset = dataset.indices[index], dataset.dataset
    with suppress(Exception):  # it may have no files
        return f"sample {index} ({dataset.path(index)})"
    return f"sample {index}"


def note_failed_samples(error: Exception, dataset: Any, indices: Sequence[int], try_subset: Any = None) -> None:
    """Add a note to the error with its samples and their files: the first one for which `try_subset` fails; or one that
    fails only beside the first; or all."""
    positions = range(len(indices))
    subset: Sequence[int] = positions
    for subset in [*([k] for k in positions), *([0, k] for k in positions[1:]), positions] if try_subset else ():
        try:
            try_subset(subset)
        except Exception:
            break
    note = ", ".join(format_sample_name(dataset, indices[k]) for k in subset[:8])
    if note not in getattr(error, "__notes__", []):  # a data set around this one may have added it
        error.add_note(note)
    if isinstance(error, StopIteration):  # would look like the end of the data
        raise ValueError(f"StopIteration; {note}") from error


class CollatedMicroBatch(tuple):
    """A micro-batch and its samples. The DataLoader pins them by this method, which knows more objects than torch."""

    def pin_memory(self) -> CollatedMicroBatch:
        return CollatedMicroBatch((self[0], pin_batch(self[1])))


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
                return micro_batch, retry(functools.partial(self._fetch_batch, epoch, indices))
            for index in indices:
                samples.append(retry(functools.partial(self._fetch_sample, epoch, index)))
            return micro_batch, samples
        except UserError as error:  # DataLoader would wrap it; the main process raises it unchanged
            return micro_batch, error
        except Exception as error:
            if self._is_batched:
                note_failed_samples(
                    error, self._dataset, indices, lambda subset: self._fetch_batch(epoch, [indices[k] for k in subset])
                )
            else:
                note_failed_samples(error, self._dataset, [indices[len(samples)]])
            if not isinstance(error, OSError) or not is_transient(error):
                raise
            text = f"a sample cannot be read in three tries ({error_text(error)}); repair the storage"
            return micro_batch, StartError(explain_open_file_limit(error) or f"{text}, then --resume_from auto")

    def _fetch_batch(self, epoch: int, indices: Sequence[int]) -> Any:
        seed_host("sample", self._seed, epoch, *indices)
        size = len(self._dataset)  # once: for each index, it took 300 us per thousand
        return self._dataset.__getitems__([index % size for index in indices])

    def _fetch_sample(self, epoch: int, index: int) -> Any:
        seed_host("sample", self._seed, epoch, index)
        return self._dataset[index % len(self._dataset)]  # it may be that of a copy

    def collate(self, item: tuple[MicroBatch, Any]) -> tuple[MicroBatch, Any]:
        """The micro-batch with its samples collated."""
        micro_batch, samples = item
        if isinstance(samples, UserError):
            return item
        try:
            return CollatedMicroBatch((micro_batch, self._collate_samples(samples)))
        except UserError as error:
            return micro_batch, error
        except Exception as error:
            is_listed = isinstance(samples, list) and len(samples) == len(micro_batch.indices)  # else a batch already
            collate_subset = (lambda subset: self._collate_samples([samples[k] for k in subset])) if is_listed else None
            note_failed_samples(error, self._dataset, micro_batch.indices, collate_subset)
            raise


def send_pickling_error(queue: Queue, error: Exception, item: Any) -> None:
    """In the thread of a worker's queue, which pickles batches: without it, one that cannot be pickled is lost."""
    match item:
        case number, (MicroBatch() as micro_batch, _):
            kind = TrainingError if isinstance(error, (OSError, RuntimeError)) else UserError
            text = f"collate: a loader worker cannot send what it returns ({type(error).__name__}: {error}); return"
            text += " tensors, numbers, text, lists and dicts, or use --num_workers 0"
            queue.put((number, (micro_batch, kind(explain_open_file_limit(error) or text))))
        case number, ExceptionWrapper() as raised:  # of a class that cannot be pickled
            raised.exc_type = RuntimeError
            queue.put((number, raised))
        case _:  # in a queue of the data set's code
            traceback.print_exc()


cast(Any, Queue)._on_queue_feeder_error = send_pickling_error  # also in a worker that imports this file


def explain_worker_error(error: BaseException, rank: int) -> TrainingError | None:
    """torch's message about a failed loader worker, with the rank and the fix; None if the error is not about a worker.

    DataLoader's SIGCHLD handler raises anywhere in the main process, so this is called for any error that ends a run.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, TrainingError):  # one of ours, perhaps of another rank
        return None
    failure = WORKER_FAILURE_PATTERN.search(str(error))
    if not failure:
        return None
    message = failure[0].strip().rstrip(".")
    remedy = "If the data set's code crashed, --num_workers 0 shows where. If memory ran out,"
    remedy += " give the job more memory or a larger --shm-size, or use fewer --num_workers."
    return TrainingError(f"rank {rank}: {message}. {remedy}")


def explain_open_file_limit(error: BaseException) -> str:
    """The sentence for a process that can open no more files; empty for another error."""
    if isinstance(error, UserError | TrainingError) or not OPEN_FILES_PATTERN.search(str(error)):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    cause = f"open files: the limit is {limit}, and each tensor of a batch from a loader worker needs one"
    return f"{cause}; use --num_workers 0, or raise it (ulimit -n {2**20}, which is Linux's maximum by default)"


def check_socket_folder() -> None:
    """Raises UserError if TMPDIR cannot hold the sockets through which workers pass on their batches."""
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        text = f"TMPDIR={tempfile.tempdir}: loader workers cannot open a socket there ({error})"
        raise UserError(f"{text}; set TMPDIR to a short path on a local disk, e.g. /tmp") from None
