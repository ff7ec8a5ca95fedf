"""Writes checkpoints in a thread, one after the other, and notices those that fail or make no progress."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from utils.checkpoint.layouts import Callback, Payload, count_payload_bytes
from utils.logger import LOGGER_NAME
from utils.settings.errors import TrainingError
from utils.signals import STOP_HANDLER

NICENESS = 10  # of the thread: training comes first if every core has a rank
MAX_STALL_SECONDS_PER_POLL = 10.0  # more time than this between two polls does not count: the job was suspended
MIN_BYTES_FLUSHED_PER_SECOND = 50e6  # a flush reports no progress, so this speed limits its time


class WriteLimits(NamedTuple):
    """The limits of a write, in seconds."""

    warn_after_seconds: float  # a warning is logged after so long without progress
    fail_after_seconds: float  # training ends if saves have failed, or one has made no progress, for so long
    fail_after_stop_seconds: float  # after a stop signal, training ends after so long without progress


class WriteResult(NamedTuple):
    """The result of a write that has ended: how long it took, or the error if it has failed."""

    seconds: float = 0.0
    error: OSError | None = None


class CheckpointWriter:
    """The writer writes one checkpoint at a time, in a thread.

    Args:
        write: writes the payload; called in the thread. Its last argument is called when bytes were written.
        is_waiting_for_ranks: whether `write` waits for another rank, which looks at its own progress.
        rank_and_host: the rank and host that errors name.
        latest_checkpoint: the checkpoint that the run starts from.
    """

    def __init__(
        self,
        write: Callable[[Path, Payload, Callback], object],
        is_waiting_for_ranks: Callable[[], bool],
        limits: WriteLimits,
        rank_and_host: tuple[int, str],
        latest_checkpoint: Path | None,
    ) -> None:
        self._write = write
        self._is_waiting_for_ranks = is_waiting_for_ranks
        self._limits = limits
        self._rank_and_host = rank_and_host
        self._latest_checkpoint = latest_checkpoint
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_lower_priority)
        self.path = Path()  # of the last write
        self.pending_payload = Future[Payload]()  # of the last write; complete when the state is copied
        self._pending_write: Future[float | None] | None = None  # the write in progress, until `poll` sees its end
        self._failing_since = 0.0  # when the first of a series of failed saves failed; 0 if the last save succeeded
        self._progress_count = 0  # blocks that were written
        self._last_progress_count = 0  # the same at the last poll
        self._stalled_s = 0.0  # how long the write in progress has made no progress
        self._polled_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a write is in progress, or has ended and `poll` has not returned its result yet."""
        return self._pending_write is not None

    @property
    def is_failing(self) -> bool:
        """Whether the last checkpoint could not be written."""
        return self._failing_since > 0

    def start(self, path: Path, pending_payload: Future[Payload]) -> None:
        """Write the payload as soon as the copy of the state is complete. If the copy fails, nothing is written."""
        self.path = path
        self.pending_payload = pending_payload
        self._submit_write()

    def retry(self) -> None:
        """Write the last payload, which could not be written, again."""
        self._submit_write()

    def _submit_write(self) -> None:
        self._stalled_s = 0.0
        self._polled_at = time.monotonic()
        self._pending_write = self._thread.submit(self._write_snapshot)

    def _write_snapshot(self) -> float | None:
        """Write the payload, in the thread. Returns the seconds, or None if the copy of the state has failed."""
        copy_error = self.pending_payload.exception()  # waits for the copy
        if copy_error is not None:
            return None
        began = time.monotonic()
        self._write(self.path, self.pending_payload.result(), self._count_progress)
        return time.monotonic() - began

    def _count_progress(self) -> None:
        self._progress_count += 1

    def poll(self, within_seconds: float) -> WriteResult | None:
        """Return the result of the write in progress, if it has ended, or ends within so many seconds.

        Returns:
            The result, once for each write. None if no write has ended, or nothing was written since the copy of the
            state has failed.

        Raises:
            TrainingError: if another try will not help, or none has succeeded or made progress for too long.
        """
        write = self._pending_write
        if write is None:
            return None
        if not wait([write], within_seconds).done:
            self._check_progress()
            return None

        self._pending_write = None
        try:
            write_seconds = write.result()
        except OSError as error:
            now = time.monotonic()
            if not self.is_failing:
                self._failing_since = now
            failing_s = now - self._failing_since
            if failing_s > self._limits.fail_after_seconds:
                text = f"No checkpoint could be written for {failing_s / 60:.0f} min, so training ends."
                raise TrainingError(f"{error} {text}") from None
            return WriteResult(error=error)
        if write_seconds is None:
            return None
        self._failing_since = 0.0
        self._latest_checkpoint = self.path
        return WriteResult(seconds=write_seconds)

    def _check_progress(self) -> None:
        """Warn of a write that makes no progress, then end the run: after minutes, or soon after a stop signal."""
        now = time.monotonic()
        seconds_since_poll = min(now - self._polled_at, MAX_STALL_SECONDS_PER_POLL)
        stalled_before = self._stalled_s
        has_written = self._progress_count != self._last_progress_count
        is_copy_complete = self.pending_payload.done()
        self._last_progress_count = self._progress_count
        self._polled_at = now
        if has_written or self._is_waiting_for_ranks() or not is_copy_complete:
            self._stalled_s = 0.0
            return

        self._stalled_s += seconds_since_poll
        text = f"The write of {self.path} has made no progress for {self._stalled_s:.0f} s"
        if stalled_before <= self._limits.warn_after_seconds < self._stalled_s:
            # a rank shows this warning also if it is not rank 0: perhaps only its write makes no progress
            logging.getLogger(LOGGER_NAME).warning("%s. Check the storage.", text)
        stalled_since_stop = min(self._stalled_s, now - STOP_HANDLER.received_at)
        excess = self._stalled_s - self._limits.fail_after_seconds
        excess_since_stop = stalled_since_stop - self._limits.fail_after_stop_seconds
        max_flush_seconds = count_payload_bytes(self.pending_payload.result()) / MIN_BYTES_FLUSHED_PER_SECOND
        if max(excess, excess_since_stop) > max_flush_seconds:
            rank, host = self._rank_and_host
            latest = "The run has no checkpoint yet."
            if self._latest_checkpoint:
                latest = f"The latest checkpoint is {self._latest_checkpoint}."
            raise TrainingError(
                f"{text} on rank {rank} ({host}), so training ends. {latest}"
                " Repair the storage, then start again with --resume_from auto.",
                rank,
                host,
            )

    def wait_briefly(self) -> None:
        """Wait at most `fail_after_stop_seconds` for the write in progress. `poll` still has to return its result.

        This does not wait for a write that has made no progress for so long already.
        """
        if self._pending_write and self._stalled_s < self._limits.fail_after_stop_seconds:
            wait([self._pending_write], self._limits.fail_after_stop_seconds)

    def close(self) -> None:
        """End the thread once its write has ended. This does not wait, since the storage may hang."""
        self._thread.shutdown(wait=False)


def _lower_priority() -> None:
    """Lower the priority of this thread. Only Linux has a niceness of each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
