"""The checkpoints of a run: decides when the state is saved, and which checkpoint is the best.

A save has three stages. `save` starts a copy of the state, and training goes on. `finish_copy` waits for the copy
before the state changes. A thread writes the copy, and `_poll_write` reports the checkpoint once it is on the disk.

best.pt is a link to the checkpoint of the best evaluation. `save_best` saves that checkpoint, `_link_best` links it
once it is on the disk, and `finish_best` tells all ranks before the next evaluation whether there is a link.
"""

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
SECONDS_TO_WARN = 60.0  # a warning is logged when a write has made no progress for so long
SECONDS_AFTER_STOP = 20.0  # after a stop signal, such a write ends training sooner, since torchrun waits 30 s


class Checkpoints:
    """Saves the state, and links the best checkpoint. All ranks call the methods.

    Rank 0 writes a checkpoint, and all ranks write that of a sharded state. Threads copy, compare and write the state
    (`AsyncSnapshot`, `CheckpointWriter`). Call `finish_copy` before the state changes.

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
        run = attempt.run
        config = attempt.config
        ctx = attempt.ctx
        self._attempt = attempt
        self._run = run
        self._ctx = ctx
        self._state = state
        self._before_save = before_save

        thread_ctx = create_thread_context(ctx)
        shard_count = 1
        self._is_writer = ctx.is_main
        self._layout = FileLayout()
        if config.sharding != "none":  # extra: sharding
            from utils.extras.sharding.folder_layout import FolderLayout, count_shards

            shard_count = count_shards(config, ctx)
            self._is_writer = True
            self._layout = FolderLayout(thread_ctx, shard_count, run.is_node_leader)

        metadata = {
            "config": redact_config(config),
            "provenance": provenance | {"total_steps": state.schedule.total_steps},
        }
        self._snapshot = AsyncSnapshot(
            state,
            is_writer=self._is_writer,
            metadata=metadata,
            shard_count=shard_count,
            thread_ctx=thread_ctx,
        )
        self._writer = CheckpointWriter(
            write=self._write_checkpoint,
            is_waiting_for_ranks=lambda: self._layout.is_waiting_for_ranks,
            limits=WriteLimits(
                warn_after_seconds=SECONDS_TO_WARN,
                fail_after_seconds=SECONDS_UNTIL_WRITE_FAILS,
                fail_after_stop_seconds=SECONDS_AFTER_STOP,
            ),
            rank_and_host=(ctx.rank, ctx.host),
            latest_checkpoint=run.resume_path,
        )

        self._saved_step = -1  # the step of the last save, also of an earlier attempt
        if run.resume_path and run.resume_path.resolve().parent == run.checkpoint_folder.resolve():
            self._saved_step = state.progress.step
        # From `save_best` until all ranks know it: whether best.pt links to the new best checkpoint. Else it is None.
        # The ranks set and clear it together.
        self._is_best_linked: bool | None = None
        self._is_save_postponed = False  # a save was due while another one was written
        self._has_warned_of_buffers = False
        self._last_save_at = time.monotonic()  # start of the last save
        self._blocked_s = 0.0  # how long the last save blocked training

    # ---- a save, on all ranks ----

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
        busy_rank = first_rank_where(self._is_save_postponed, self._ctx)
        if busy_rank is None:
            copy = self._snapshot.start()
            self._last_save_at = time.monotonic()
            if self._is_writer:
                path = self._layout.checkpoint_path(self._run.checkpoint_folder, step)
                self._writer.start(path, copy)
            self._blocked_s = time.perf_counter() - began
            self._saved_step = step
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
        """On rank 0, write an event at each save in which the buffers of a rank differ, and warn at the first one."""
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

    def weight_contexts(self) -> dict[str, AbstractContextManager]:
        """Return `TrainState.weight_contexts`. The copy is completed before the model gets other weights."""
        contexts: dict[str, AbstractContextManager] = {}
        for kind, context in self._state.weight_contexts().items():
            if kind == "model":
                contexts[kind] = context
            else:
                contexts[kind] = self._finish_copy_before(context)
        return contexts

    @contextmanager
    def _finish_copy_before(self, context: AbstractContextManager) -> Iterator[None]:
        self.finish_copy()
        with context:
            yield

    # ---- the best checkpoint, on all ranks ----

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
        if self._is_best_linked is not None:
            is_linked_on_rank_0 = broadcast_json(self._is_best_linked, self._ctx)
            if not is_linked_on_rank_0:
                self._state.progress.reset_best()
        self._is_best_linked = None

    # ---- the end, on all ranks ----

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

    # ---- the write in progress, where a rank writes ----

    def is_save_due(self) -> bool:
        """Return whether a timed or postponed save can start now. This also looks at the write in progress."""
        if not self._is_writer:
            return False
        self._poll_write()
        if self._writer.is_busy:
            return False
        minutes_since_save = (time.monotonic() - self._last_save_at) / 60
        is_time = 0 < self._attempt.config.save_every_minutes < minutes_since_save
        return is_time or self._is_save_postponed

    def _write_checkpoint(self, path: Path, payload: Payload, on_progress: Callback) -> None:
        """Write a checkpoint, and delete those that are no longer kept. This runs in the thread."""
        config = self._attempt.config
        check_owner = self._run.ownership.check_owner
        self._layout.write(path, payload, before_rename=check_owner, on_progress=on_progress)
        self._run.status.set_latest_checkpoint(path)
        if self._run.is_node_leader:
            with suppress(OSError):
                checkpoint.prune_checkpoints(self._run.checkpoint_folder, config.keep_last, config.keep_every)

    def _wait_for_write(self) -> None:
        """Wait for the write in progress. The event of the checkpoint has the time of this wait."""
        since = time.monotonic()
        while self._writer.is_busy:
            self._attempt.clock.enter_phase("save")  # a long write is not a hang
            self._poll_write(SECONDS_PER_POLL, since)

    def _poll_write(self, seconds: float = 0.0, waiting_since: float = math.inf) -> None:
        """Report the write in progress, if it ends within so many seconds.

        Args:
            waiting_since: when the wait for the write began, by time.monotonic; infinite if nothing waits for it.
        """
        if self._is_writer and self._run.companions:
            self._run.companions.poll()
        path = self._writer.path
        outcome = self._writer.poll(seconds)
        if outcome is None:
            return
        if isinstance(outcome, OSError):
            self._run.warn(f"{outcome}; training continues, and the next checkpoint is tried when it is due")
            return

        write_seconds = outcome
        progress = self._writer.snapshot.result()["progress"]
        epoch = progress["epoch"]
        if progress["samples_in_epoch"] > 0:
            epoch += 1  # as in records
        waited_s = max(0.0, time.monotonic() - waiting_since)
        self._run.records.append_event(
            "checkpoint",
            progress["step"],
            epoch=epoch,
            path=str(path),
            seconds=round(write_seconds, 3),
            blocked_s=round(self._blocked_s, 5),
            waited_s=round(waited_s, 3),
        )
        self._run.status.write("running", checkpoint=str(path))
        text = "saved %s in %.2f s; blocked training for %.1f ms"
        logging.getLogger(LOGGER_NAME).info(text, path, write_seconds, 1000 * self._blocked_s)
        self._link_best()

    def _link_best(self) -> None:
        """Link best.pt, if its checkpoint is on the disk."""
        if self._is_best_linked is not False or self._writer.is_busy:
            return
        if not self._is_writer or not self._run.is_node_leader:
            return
        progress = self._state.progress  # which has the best evaluation until a failure is settled
        try:
            self._run.checkpoint_files.link_best(progress.best_step)
        except OSError as error:
            self._run.warn(f"best.pt cannot be written ({error}); the next evaluation starts a new best")
            return
        self._is_best_linked = True
        path = self._run.checkpoint_folder / checkpoint.BEST_NAME
        self._run.records.append_event("best", progress.best_step, epoch=progress.best_epoch, path=str(path))
