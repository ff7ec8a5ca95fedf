"""status.json: whether a run is running or how it has ended, and how far it has come."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.files import read_json, replace_json
from utils.logger import LOGGER_NAME, error_text
from utils.run.run_lock import Ownership

SECONDS_BETWEEN_WRITES = 1.0  # while only the progress changes


def log_failed_step(step: int, checkpoint: str | None) -> None:
    """Log at which step training has failed, and the checkpoint from which it can continue."""
    logger = logging.getLogger(LOGGER_NAME)
    if checkpoint:
        logger.info("Training failed at step %d. The latest checkpoint is %s.", step, checkpoint)
    else:
        logger.info("Training failed at step %d. The run has no checkpoint yet.", step)


class RunStatus:
    """The status of a run, as seen by one rank.

    Args:
        folder: of the run.
        attempt: the number of this attempt, from 1.
        ownership: is checked before each write but those of a failure, whose caller checks it.
        is_node_leader: this rank writes what a run folder has once (`RunFolder.is_node_leader`).
        format_timestamp: returns the time as in records.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        host: str,
        attempt: int,
        ownership: Ownership,
        is_node_leader: bool,
        format_timestamp: Callable[[], str],
    ) -> None:
        self._file = folder / "status.json"
        self._rank = rank
        self._host = host
        self._attempt = attempt
        self._ownership = ownership
        self._is_node_leader = is_node_leader
        self._format_timestamp = format_timestamp
        self._values: dict[str, Any] = {}  # the content of status.json
        # what a refused start writes back: the content before `mark_running`, and nothing after the next write
        self._status_to_restore: dict[str, Any] = {}
        self._latest_checkpoint = ""  # of this attempt
        self._start_step: int | None = None  # from which this attempt trains, once it does
        self._written_at = -math.inf  # by time.monotonic

    @property
    def state(self) -> str:
        """Return the state that this rank has written last, or "" if it has written none."""
        return self._values.get("state", "")

    def mark_running(self) -> None:
        """Write that an attempt is running, with the progress of the attempt before."""
        before: dict[str, Any] = {}
        if self._attempt > 1:
            before = read_json(self._file)
        progress = {"epoch": 0, "step": 0, "samples_seen": 0, "checkpoint": None}
        progress |= {name: before[name] for name in progress if name in before}
        # An attempt drops the entry `previous` when it begins to train. If the entry is there, the attempt before never
        # trained, and the entry tells of an earlier one that did.
        last_trained = before.get("previous")
        if not last_trained:
            last_trained = {name: before[name] for name in ("state", "step", "time") if name in before}
        self.write("running", **progress, previous=last_trained, error=None, rank=None, host=None)
        if self._rank == 0:
            self._status_to_restore = before

    def pop_previous_attempt(self) -> dict[str, Any]:
        """Return how the last attempt that trained has ended, for the first event: previous_state, _step and _time."""
        previous = self._values.pop("previous", {})
        return {f"previous_{name}": value for name, value in previous.items()}

    def mark_started(self, **progress: Any) -> None:
        """Write the progress from which this attempt trains. The first step after it is written at once."""
        self.write("running", **progress)
        self._start_step = progress["step"]
        self._written_at = -math.inf

    def update_progress(self, **values: Any) -> None:
        """Write the values of a running attempt that change all the time, at most once a second."""
        if time.monotonic() - self._written_at < SECONDS_BETWEEN_WRITES:
            self._values |= values
        else:
            self.write("running", **values)

    def write(self, state: str, **values: Any) -> None:
        """Replace status.json on rank 0: the state, and the values that have changed since the last call.

        The first rank of a node with a run folder of its own writes the end of the attempt too, since the launcher of
        each node reads it.
        """
        self._status_to_restore = {}
        self._written_at = time.monotonic()
        is_running = state == "running"
        is_writer = self._rank == 0 or (self._is_node_leader and not is_running)
        if not is_writer:
            return
        self._ownership.require_owner()
        self._values |= {"state": state} | values | {"time": self._format_timestamp()}
        if is_running:
            # without lock.json the file system is unmounted, and nothing belongs below its mount point
            if self._ownership.lock_file.exists():
                with suppress(OSError):  # the disk may be full: training continues
                    replace_json(self._file, self._values, fsync=False)
        else:
            replace_json(self._file, self._values)

    def set_latest_checkpoint(self, path: Path) -> None:
        """Call when a checkpoint is on the disk, in any thread: a failure names it, and does not read the folder."""
        self._latest_checkpoint = str(path)

    def write_failure(self, error: BaseException, step: int) -> None:
        """Write that the run has failed, unless status.json has already another state, which another rank has written.

        Args:
            step: the last one that this rank has completed.
        """
        self._write_failure_if_running(error, step)
        if self._rank != 0:
            # rank 0 may have written "running" over it; from now on it waits for this rank
            time.sleep(0.3)
            self._write_failure_if_running(error, step)

    def _write_failure_if_running(self, error: BaseException, step: int) -> None:
        status = read_json(self._file)
        if status.get("state") != "running":
            return
        rank = getattr(error, "rank", None)
        host = getattr(error, "host", None)
        if rank is None:
            rank = self._rank
            host = self._host
        last_step = max(step, status.get("step", 0))
        latest_checkpoint = self._latest_checkpoint or status.get("checkpoint")
        status |= {
            "state": "failed",
            "error": error_text(error),
            "step": last_step,
            "checkpoint": latest_checkpoint,
            "rank": rank,
            "host": host,
            "time": self._format_timestamp(),
        }
        if self._start_step is not None and last_step > self._start_step:
            # a start that fails shows only its error
            log_failed_step(last_step, latest_checkpoint)
        try:
            replace_json(self._file, status)
        except OSError:
            # writing into the old file needs no free block or inode
            with suppress(OSError), self._file.open("r+") as file:
                file.write(json.dumps(status))
                file.truncate()

    def restore_previous(self) -> bool:
        """Write the status that the run had before `mark_running`, unless this attempt has written another since.

        Returns:
            Whether there was such a status.
        """
        if not self._status_to_restore:
            return False
        with suppress(OSError):
            replace_json(self._file, self._status_to_restore)
        return True
