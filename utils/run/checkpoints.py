"""The checkpoints of a run: decides when the state is saved, and which checkpoint is the best.

A save has three stages. `save` starts a copy of the state, and training goes on. `finish_copy` waits for the copy
before the state changes. A thread writes the copy, and `report_if_written` reports the checkpoint once it is on the
disk.

best.pt is a link to the checkpoint of the best evaluation. `save_best` saves that checkpoint, `_link_best` links it
once it is on the disk, and `settle_best` tells all ranks before the next evaluation whether there is a link.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

from utils.checkpoint.format import BEST_NAME, prune_checkpoints
from utils.checkpoint.layouts import Callback, FileLayout, Payload, create_thread_context
from utils.checkpoint.writer import CheckpointWriter, WriteLimits
from utils.distributed.collectives import broadcast_json, first_rank_where
from utils.distributed.context import DistributedContext
from utils.logger import LOGGER_NAME
from utils.redact import redact_config
from utils.run.async_snapshot import AsyncSnapshot
from utils.run.start import Attempt
from utils.settings.errors import TrainingError
from utils.training.schedule import Progress
from utils.training.state import TrainState

MAX_FINAL_WRITES = 3  # the last checkpoint of a run is tried so often, a second apart
SECONDS_PER_POLL = 0.5  # a rank that waits for a write shows so often that it does not hang
SECONDS_TO_WARN = 60.0  # a warning is logged once a write has made no progress for so long
SECONDS_UNTIL_WRITE_FAILS = 600.0  # training ends once saves have failed, or one has made no progress, for so long
# after a stop signal, training ends once a write has made no progress for so long: torchrun kills the ranks after 30 s
SECONDS_AFTER_STOP = 20.0


class BestLink(Enum):
    """What a rank knows of the link best.pt.

    In `save_best` all ranks become PENDING, a rank that links best.pt then becomes LINKED, and in `_agree_on_best` all
    ranks become NONE.
    """

    NONE = "none"  # there is no new best checkpoint since the ranks agreed on the last one
    PENDING = "pending"  # there is a new best checkpoint, and this rank has not made best.pt a link to it
    LINKED = "linked"  # this rank has made best.pt a link to the new best checkpoint, which other ranks do not know yet


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
        ctx = attempt.ctx
        self._attempt = attempt
        self._run = run
        self._ctx = ctx
        self._state = state
        self._before_save = before_save

        thread_ctx = create_thread_context(ctx)
        self._layout = _choose_layout(attempt, thread_ctx)
        self._is_writer = ctx.is_main or self._layout.has_file_per_rank
        metadata = {
            "config": redact_config(attempt.config),
            "provenance": provenance | {"total_steps": state.schedule.total_steps},
        }
        self._snapshot = AsyncSnapshot(
            state,
            is_writer=self._is_writer,
            metadata=metadata,
            shard_count=self._layout.shard_count,
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

        self._saved_step = _find_resumed_step(attempt, state)  # the step of the last save, also of an earlier attempt
        self._best_link = BestLink.NONE
        self._is_save_postponed = False  # by the write of this rank
        self._has_warned_of_buffers = False
        self._last_save_at = time.monotonic()  # start of the last save
        self._blocked_s = 0.0  # how long the last save blocked training: its start, and the wait for its copy

    @property
    def _manages_folder(self) -> bool:
        """Whether this rank links best.pt and deletes old checkpoints, which one rank does in each run folder."""
        return self._is_writer and self._run.is_node_leader

    # ---- a save, on all ranks ----

    def save(self, blocking: bool = False, force: bool = False) -> None:
        """Start a checkpoint of the current state, unless this step is saved. It is written while training goes on.

        Args:
            blocking: True: wait until the previous checkpoint is written. False: postpone this save if one is still
                being written. `is_save_due` tells when to call this again.
            force: save also if this step is saved, because an evaluation has changed the state.

        Raises:
            UserError: if a checkpoint cannot hold a value of the state.
            TrainingError: where a rank writes, if saves have failed for too long; on all ranks if they differ.
        """
        if self._saved_step == self._state.progress.step and not force:
            return
        self.finish_copy()
        self._attempt.clock.enter_phase("save")
        if blocking:
            self._wait_for_write()

        began = time.perf_counter()
        self.report_if_written()
        self._before_save()
        is_writing = self._writer.is_busy
        is_any_writing = first_rank_where(is_writing, self._ctx) is not None
        if not is_any_writing:
            self._start_save()
            self._blocked_s = time.perf_counter() - began
        # the ranks that are writing ask for this save again when their write has ended
        self._is_save_postponed = is_writing
        # from here on training goes on, in the last phase of a step
        self._attempt.clock.enter_phase("update")

    def _start_save(self) -> None:
        """Start to copy the state. A rank that writes begins with its checkpoint as soon as the copy is complete."""
        step = self._state.progress.step
        pending_payload = self._snapshot.start()
        self._last_save_at = time.monotonic()
        if self._is_writer:
            path = self._layout.checkpoint_path(self._run.checkpoint_folder, step)
            self._writer.start(path, pending_payload)
        self._saved_step = step

    def finish_copy(self) -> None:
        """Wait until the copy of the state is complete, but not for its write. Call this before weights or optimizer
        state change.

        Raises:
            TrainingError: on all ranks if they differ; nothing is written then.
        """
        try:
            self._blocked_s += self._snapshot.finish()
        finally:
            # also if the weights differ, since buffers that differ may be the reason
            self._warn_of_differing_buffers()

    def _warn_of_differing_buffers(self) -> None:
        """On rank 0, write an event at each save in which the buffers of a rank differ, and warn at the first one."""
        rank = self._snapshot.pop_rank_with_other_buffers()
        if rank is None:
            return
        self._run.records.append_event("buffers_differ", self._saved_step, rank=rank)
        if not self._has_warned_of_buffers:
            self._run.warn(
                "Rank %d on %s has other values in persistent buffers than rank 0. The values of rank 0 are saved."
                " Update the buffers with what all ranks computed (torch.distributed.all_reduce or all_gather), or"
                " register the buffers with persistent=False.",
                rank,
                self._ctx.hosts[rank],
            )
        self._has_warned_of_buffers = True

    def weight_contexts(self) -> dict[str, AbstractContextManager]:
        """Return the weights to evaluate, each with the context in which the model has them.

        These are the contexts of `TrainState.weight_contexts`. Those that give the model other weights than its own
        wait for the copy of the state first.
        """
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
        """Save the current state as the best checkpoint: best.pt becomes a link to it as soon as it is on the disk.

        This does not wait until it is written. If it cannot be written, the next evaluation starts a new best.
        """
        self.save(blocking=True)
        self._best_link = BestLink.PENDING
        # if this step was saved before the evaluation, its checkpoint may be on the disk already
        self._link_best()

    def settle_best(self) -> None:
        """Wait until the best checkpoint is written, and tell all ranks whether best.pt links to it.

        Call this before an evaluation.
        """
        if self._best_link is BestLink.PENDING:
            self._attempt.clock.enter_phase("save")  # ranks that write nothing wait here for those that do
            self._wait_for_write()
        self._agree_on_best()

    def _agree_on_best(self) -> None:
        """Tell all ranks whether best.pt was linked. Call this when the write of the best checkpoint has ended."""
        if self._best_link is not BestLink.NONE:
            is_linked = self._best_link is BestLink.LINKED
            is_linked_on_rank_0 = broadcast_json(is_linked, self._ctx)
            if not is_linked_on_rank_0:
                self._state.progress.reset_best()
        self._best_link = BestLink.NONE

    def _link_best(self) -> None:
        """Link best.pt to a new best checkpoint that is on the disk. The rank that manages the folder does this."""
        if not self._manages_folder or self._writer.is_busy or self._best_link is not BestLink.PENDING:
            return
        progress = self._state.progress  # until the ranks agree, best_step is that of the new best checkpoint
        try:
            self._run.checkpoint_files.link_best(progress.best_step)
        except OSError as error:
            self._run.warn(
                f"best.pt cannot be written ({error}). Check the storage. A better checkpoint will get this name."
            )
            return
        self._best_link = BestLink.LINKED
        path = self._run.checkpoint_folder / BEST_NAME
        self._run.records.append_event("best", progress.best_step, epoch=progress.best_epoch, path=str(path))

    # ---- the end, on all ranks ----

    def finish_writing(self) -> None:
        """Wait until the last checkpoint is on the disk, and try it again if it cannot be written.

        Raises:
            TrainingError: where a rank cannot write it.
        """
        self.finish_copy()
        # Other ranks may end before this one. In a phase of a step, the watchdog would report them as lost.
        self._attempt.clock.enter_phase("save")
        self._wait_for_write()
        for _ in range(MAX_FINAL_WRITES - 1):
            if not self._writer.is_failing:
                break
            time.sleep(1.0)
            self._writer.retry()
            self._wait_for_write()
        if self._writer.is_failing:
            text = f"The last checkpoint cannot be written to {self._run.checkpoint_folder}."
            raise TrainingError(f"{text} Make room, then start again with --resume_from auto.")
        self._agree_on_best()

    def save_and_wait(self) -> None:
        """Save the current state, unless this step is saved, and wait until the checkpoint is on the disk."""
        self.save(blocking=True)
        self.finish_writing()

    def wait_briefly_for_write(self) -> None:
        """After a failure, give the checkpoint in progress time to be written, without a report.

        This waits at most `SECONDS_AFTER_STOP` for the copy of the state, then as long for the write, unless the write
        has made no progress for so long already.
        """
        self._snapshot.wait(SECONDS_AFTER_STOP)
        self._writer.wait_briefly()

    def close(self) -> None:
        """End the threads. This does not wait for them."""
        self._snapshot.close()
        self._writer.close()

    # ---- the write in progress, where a rank writes ----

    def is_save_due(self) -> bool:
        """Return whether this rank asks for a save: it was postponed, or `save_every_minutes` are over.

        A rank that is still writing does not ask. Call `report_if_written` before, which notices the end of a write.
        """
        if not self._is_writer or self._writer.is_busy:
            return False
        minutes_since_save = (time.monotonic() - self._last_save_at) / 60
        is_time = 0 < self._attempt.config.save_every_minutes < minutes_since_save
        return is_time or self._is_save_postponed

    def report_if_written(self, within_seconds: float = 0.0, waiting_since: float | None = None) -> None:
        """Report the checkpoint in progress if its write has ended, or ends within so many seconds.

        If it was written, this appends the event, logs a line and links best.pt; if not, this warns. A rank that
        writes also looks at its companions here.

        Args:
            waiting_since: when training began to wait for the write, by time.monotonic; None if it does not wait.

        Raises:
            TrainingError: if saves have failed, or the write has made no progress, for too long.
        """
        if self._is_writer and self._run.companions:
            self._run.companions.poll()
        result = self._writer.poll(within_seconds)
        if result is None:
            return
        if result.error is not None:
            self._run.warn(f"{result.error} Training continues, and the next checkpoint is tried when it is due.")
            return

        waited_s = 0.0
        if waiting_since is not None:
            waited_s = time.monotonic() - waiting_since
        path = self._writer.path
        progress = Progress.from_payload(self._writer.pending_payload.result())
        self._run.records.append_event(
            "checkpoint",
            progress.step,
            epoch=progress.epoch_number,
            path=str(path),
            seconds=round(result.seconds, 3),
            blocked_s=round(self._blocked_s, 5),
            waited_s=round(waited_s, 3),
        )
        self._run.status.write("running", checkpoint=str(path))
        text = "%s was saved in %.2f s and blocked training for %.1f ms."
        blocked_ms = 1000 * self._blocked_s
        logging.getLogger(LOGGER_NAME).info(text, path, result.seconds, blocked_ms)
        self._link_best()

    def _wait_for_write(self) -> None:
        """Wait until the write in progress has ended and is reported. The event has the time of this wait."""
        began = time.monotonic()
        while self._writer.is_busy:
            self._attempt.clock.enter_phase("save")  # again and again, since a long write is not a hang
            self.report_if_written(SECONDS_PER_POLL, waiting_since=began)

    def _write_checkpoint(self, path: Path, payload: Payload, on_progress: Callback) -> None:
        """Write a checkpoint, and delete those that are no longer kept. This runs in the thread of the writer."""
        config = self._attempt.config
        check_owner = self._run.ownership.check_owner
        self._layout.write(path, payload, before_rename=check_owner, on_progress=on_progress)
        self._run.status.set_latest_checkpoint(path)
        if self._manages_folder:
            with suppress(OSError):
                prune_checkpoints(self._run.checkpoint_folder, config.keep_last, config.keep_every)


def _choose_layout(attempt: Attempt, thread_ctx: DistributedContext) -> FileLayout:
    """Return the layout of the checkpoints: a file, or for a sharded state a folder with a file per rank."""
    if attempt.config.sharding != "none":  # extra: sharding
        from utils.extras.sharding.folder_layout import FolderLayout, count_shards

        shard_count = count_shards(attempt.config, attempt.ctx)
        return FolderLayout(thread_ctx, shard_count, attempt.run.is_node_leader)
    return FileLayout()


def _find_resumed_step(attempt: Attempt, state: TrainState) -> int:
    """Return the step of the checkpoint that this attempt resumes from, if it is in this run's folder, and else -1."""
    run = attempt.run
    if run.resume_path and run.resume_path.resolve().parent == run.checkpoint_folder.resolve():
        return state.progress.step
    return -1
