"""The checkpoints of a run: decides when the state is saved, and which checkpoint is the best."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from utils.checkpoint import format as checkpoint
from utils.checkpoint.layouts import Callback, FileLayout, Payload, create_thread_context
from utils.checkpoint.writer import CheckpointWriter, WriteLimits
from utils.distributed.collectives import broadcast_json, first_rank_where
from utils.logger import LOGGER_NAME
from utils.redact import redact_config
from utils.run.async_snapshot import AsyncSnapshot
from utils.run.start import Attempt
from utils.settings.errors import TrainingError
from utils.training.state import TrainState

MAX_FINAL_WRITES = 3  # at the end of a run, a second apart
SECONDS_PER_POLL = 0.5
SECONDS_UNTIL_WRITE_FAILS = 600.0  # for which saves may fail, or one may make no progress, before training ends
SECONDS_TO_WARN, SECONDS_AFTER_STOP = 60.0, 20.0  # of a write without progress; torchrun waits 30 s after a stop signal


class Checkpoints:
    """Saves the state. All ranks call its methods; a file is written by rank 0, and a sharded state by all.

    The state is copied, compared and written by threads (`AsyncSnapshot`, `CheckpointWriter`). Before it changes, call
    `finish_copy`.

    Args:
        provenance: content of provenance.json.
        before_save: writes the records of all steps so far, and counts those that were skipped.
    """

    def __init__(
        self,
        attempt: Attempt,
        state: TrainState,
        provenance: dict[str, Any],
        before_save: Callable[[], None],
    ) -> None:
        run, config, ctx = attempt.run, attempt.config, attempt.ctx
        self._attempt, self._run, self._ctx, self._state, self._before_save = attempt, run, ctx, state, before_save
        thread_ctx = create_thread_context(ctx)
        self._layout, self._is_writer, shard_count = FileLayout(), ctx.is_main, 1
        if config.sharding != "none":  # extra: sharding
            from utils.extras.sharding.folder_layout import FolderLayout, count_shards

            self._is_writer, shard_count = True, count_shards(config, ctx)
            self._layout = FolderLayout(thread_ctx, shard_count, run.is_node_leader)
        meta = {"config": redact_config(config), "provenance": provenance | {"total_steps": state.schedule.total_steps}}
        self._snapshot = AsyncSnapshot(state, self._is_writer, meta, shard_count, thread_ctx)
        limits = WriteLimits(SECONDS_TO_WARN, SECONDS_UNTIL_WRITE_FAILS, SECONDS_AFTER_STOP)
        rank_and_host = (ctx.rank, ctx.host)
        self._writer = CheckpointWriter(
            self._write_checkpoint, lambda: self._layout.is_waiting_for_ranks, limits, rank_and_host, run.resume_path
        )
        is_own = run.resume_path and run.resume_path.resolve().parent == run.checkpoint_folder.resolve()
        self._saved_step = state.progress.step if is_own else -1
        # whether best.pt links to a new best; None: there is none, or all ranks know. They set and clear it together
        self._is_best_linked: bool | None = None
        self._is_save_postponed = False  # a save was due while another one was written
        self._has_warned_of_buffers = False
        self._last_save_at = time.monotonic()  # start of the last save
        self._blocked_s = 0.0  # how long it blocked training

    # ---- all ranks ----

    def save(self, blocking: bool = False, force: bool = False) -> None:
        """Start a checkpoint of the current state, unless that is saved.

        Args:
            blocking: if the previous one is still being written, wait for it; otherwise this one is postponed.
            force: also if this step is saved, because an evaluation has changed the state.

        Raises:
            UserError: if a checkpoint cannot hold a value of the state.
            TrainingError: where a rank writes, if saves have failed for too long; on all ranks if they differ.
        """
        step = self._state.progress.step
        if self._saved_step == step and not force:
            return
        self.finish_copy()
        self._attempt.clock.enter_phase("save")
        if blocking:
            self._wait_for_write()
        began = time.perf_counter()
        self._poll_write()
        self._is_save_postponed = self._writer.is_busy
        self._before_save()
        if first_rank_where(self._is_save_postponed, self._ctx) is None:
            copy, self._last_save_at = self._snapshot.start(), time.monotonic()
            if self._is_writer:
                self._writer.start(self._layout.checkpoint_path(self._run.checkpoint_folder, step), copy)
            self._blocked_s, self._saved_step = time.perf_counter() - began, step
        self._attempt.clock.enter_phase("update")

    def finish_copy(self) -> None:
        """Complete the copy. Call this before weights or optimizer state change.

        Raises:
            TrainingError: on all ranks if they differ; nothing is written then.
        """
        try:
            self._blocked_s += self._snapshot.finish()
        finally:  # buffers may be why the weights differ
            self._warn_of_other_buffers()

    def _warn_of_other_buffers(self) -> None:
        """On rank 0: an event at each save in which the buffers of a rank differ, and a warning at the first one."""
        rank = self._snapshot.pop_rank_with_other_buffers()
        if rank is None:
            return
        self._run.records.append_event("buffers_differ", self._saved_step, rank=rank)
        if not self._has_warned_of_buffers:
            self._run.warn(
                "buffers: rank %d on %s has other values in persistent buffers than rank 0. Rank 0's are saved."
                " Update them with what all ranks computed (torch.distributed.all_reduce or all_gather), or register"
                " them with persistent=False. scripts/verify.py names such buffers.",
                rank,
                self._ctx.hosts[rank],
            )
        self._has_warned_of_buffers = True

    def weights(self) -> dict[str, AbstractContextManager]:
        """`TrainState.weights`, which complete the copy before the model gets other weights than its own."""
        contexts = self._state.weights()
        return {
            kind: context if kind == "model" else self._finish_copy_before(context)
            for kind, context in contexts.items()
        }

    @contextmanager
    def _finish_copy_before(self, context: AbstractContextManager) -> Iterator[None]:
        self.finish_copy()
        with context:
            yield

    def save_best(self) -> None:
        """Make best.pt a link to the checkpoint of this step as soon as that is on the disk. If that fails, the next
        evaluation starts a new best."""
        self.save(blocking=True)
        self._is_best_linked = False
        self._link_best()

    def finish_best(self) -> None:
        """Wait until the best checkpoint is on the disk. Call this before an evaluation."""
        if self._is_best_linked is False:
            self._attempt.clock.enter_phase("save")  # other ranks wait for those that write
            self._wait_for_write()
        self._agree_on_best()

    def _agree_on_best(self) -> None:
        """Tell all ranks whether best.pt was linked. Call this when nothing is being written."""
        if self._is_best_linked is not None and not broadcast_json(self._is_best_linked, self._ctx):
            self._state.progress.reset_best()
        self._is_best_linked = None

    def finish_writing(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises TrainingError where a rank cannot write it."""
        self.finish_copy()
        self._attempt.clock.enter_phase("save")  # no longer a step: other ranks may end before this one
        self._wait_for_write()
        for _ in range(MAX_FINAL_WRITES - 1):
            if self._writer.is_failing:
                time.sleep(1.0)
                self._writer.retry()
                self._wait_for_write()
        if self._writer.is_failing:
            problem = "the last checkpoint cannot be written; make room, then --resume_from auto"
            raise TrainingError(f"{self._run.checkpoint_folder}: {problem}")
        self._agree_on_best()

    def save_and_finish(self) -> None:
        """Save the current state, unless that is saved, and wait until it is on the disk."""
        self.save(blocking=True)
        self.finish_writing()

    def finish_pending(self) -> None:
        """Wait for the copy and the write in progress, for a limited time, unless the write makes no progress."""
        self._snapshot.wait(SECONDS_AFTER_STOP)
        self._writer.wait()

    def close(self) -> None:
        """End the threads."""
        self._snapshot.close()
        self._writer.close()

    # ---- the write in progress ----

    def is_save_due(self) -> bool:
        """Whether a timed or postponed save can start now. Also looks at the write in progress."""
        if not self._is_writer:
            return False
        self._poll_write()
        is_time = 0 < self._attempt.config.save_every_minutes < (time.monotonic() - self._last_save_at) / 60
        return not self._writer.is_busy and (is_time or self._is_save_postponed)

    def _write_checkpoint(self, path: Path, payload: Payload, on_progress: Callback) -> None:
        """In the thread."""
        config = self._attempt.config
        self._layout.write(path, payload, self._run.ownership.check_owner, on_progress)
        self._run.status.set_latest_checkpoint(path)
        if self._run.is_node_leader:
            with suppress(OSError):
                checkpoint.prune_checkpoints(self._run.checkpoint_folder, config.keep_last, config.keep_every)

    def _wait_for_write(self) -> None:
        """Wait for the write in progress. Its event has the time."""
        since = time.monotonic()
        while self._writer.is_busy:
            self._attempt.clock.enter_phase("save")  # a long write is not a hang
            self._poll_write(SECONDS_PER_POLL, since)

    def _poll_write(self, seconds: float = 0.0, waiting_since: float = math.inf) -> None:
        """Report the write in progress, if it ends within so many seconds."""
        if self._is_writer and self._run.companions:
            self._run.companions.poll()
        path, taken = self._writer.path, self._writer.poll(seconds)
        if taken is None:
            return
        if isinstance(taken, OSError):
            self._run.warn(f"{taken}; training continues, and the next checkpoint is tried when it is due")
            return
        progress, blocked = self._writer.snapshot.result()["progress"], self._blocked_s
        epoch = progress["epoch"] + (progress["samples_in_epoch"] > 0)  # as in records
        waited = max(0.0, time.monotonic() - waiting_since)
        times = {"seconds": round(taken, 3), "blocked_s": round(blocked, 5), "waited_s": round(waited, 3)}
        self._run.records.append_event("checkpoint", progress["step"], epoch=epoch, path=str(path), **times)
        self._run.status.write("running", checkpoint=str(path))
        text = "saved %s in %.2f s; blocked training for %.1f ms"
        logging.getLogger(LOGGER_NAME).info(text, path, taken, 1000 * blocked)
        self._link_best()

    def _link_best(self) -> None:
        """Link best.pt, if its checkpoint is on the disk."""
        if (
            self._is_best_linked is not False
            or self._writer.is_busy
            or not (self._is_writer and self._run.is_node_leader)
        ):
            return
        progress = self._state.progress  # which has the best evaluation until a failure is settled
        try:
            self._run.checkpoint_files.link_best(progress.best_step)
        except OSError as error:
            self._run.warn(f"best.pt cannot be written ({error}); the next evaluation starts a new best")
            return
        self._is_best_linked = True
        path = str(self._run.checkpoint_folder / checkpoint.BEST_NAME)
        self._run.records.append_event("best", progress.best_step, epoch=progress.best_epoch, path=path)
