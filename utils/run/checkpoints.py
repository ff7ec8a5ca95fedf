"""The checkpoints of a run: a copy of the state after a step, which a thread writes while training continues."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import TrainingError
from utils.checkpoint import format as checkpoint
from utils.checkpoint.archive import mapped
from utils.checkpoint.layouts import FileLayout, FolderLayout, size_of
from utils.checkpoint.snapshot import HostMemory
from utils.distributed.collectives import broadcast_json, gather, lowest_rank
from utils.distributed.dtensor import local
from utils.logger import NAME
from utils.redact import stored
from utils.rng import diverged
from utils.run.attempt import Attempt
from utils.signals import StopSignals
from utils.training.fingerprint import buffers_of, fingerprint_of, of_rest, of_weights, shown
from utils.training.schedule import Progress
from utils.training.state import TrainState

NICENESS = 10  # of the thread that writes: training comes first if every core has a rank
LAST_TRIES = 3  # at the end of a run, a second apart
SECONDS_OF_A_LOOK = 0.5
SECONDS_AFTER_RANK_0 = 5.0  # for programs beside other ranks to end
SECONDS_WITHOUT = 600.0  # for which saves may fail, or one may make no progress, before training ends
SECONDS_TO_WARN, SECONDS_AFTER_STOP = 60.0, 20.0  # of a write without progress; torchrun waits 30 s after a stop signal
SECONDS_COUNTED = 10.0  # at most, between two looks: a suspended job does not write
FLUSHED_PER_SECOND = 50e6  # bytes, at least; a flush shows no progress


class Checkpoints:
    """Saves the state. All ranks call its methods; a file is written by rank 0, and a sharded state by all.

    The copy of the state starts after a step and is complete before the weights change (`finish_copy`).

    Args:
        origin: content of provenance.json.
        before_save: writes the records of all steps so far, and counts those that were skipped.
    """

    def __init__(
        self,
        attempt: Attempt,
        state: TrainState,
        origin: dict[str, Any],
        before_save: Callable[[], None],
    ) -> None:
        run, config, ctx = attempt.run, attempt.config, attempt.ctx
        self._run, self._state, self._ctx, self._before_save, self._clock = run, state, ctx, before_save, attempt.clock
        self._keep, self._minutes = (config.keep_last, config.keep_every), config.save_every_minutes
        self._meta = {"config": stored(config), "provenance": origin | {"total_steps": state.schedule.total_steps}}
        mapped(self._meta, lambda tensor: tensor)  # raises now if no checkpoint can hold it; later only values change
        self._is_sharded = config.sharding != "none"
        shards = {"none": 1, "hybrid": ctx.local_world_size}.get(config.sharding, ctx.world_size)
        self._replicas = [range(shard, ctx.world_size, shards) for shard in range(shards)]  # ranks with equal weights
        self._layout = FolderLayout(ctx, shards, run.leads_node) if self._is_sharded else FileLayout()
        self._writes, self._memory = self._is_sharded or ctx.is_main, HostMemory()
        self._leads_node = self._writes and run.leads_node
        if self._writes:  # now: pinning gigabytes takes seconds. Adam's two tensors and a step per parameter come later
            late = [local(p) for p in state.owners if p.requires_grad and p not in state.optimizer.state]
            _, pairs = self._memory.copy_of(state.state_dict())
            self._memory.reserve([*(tensor for _, tensor in pairs), *late, *late, *(torch.empty(()) for _ in late)])
        self._stream = torch.Stream(ctx.device) if ctx.device.type != "cpu" else None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_be_nice)
        self._seconds_to_upload = config.hang_timeout or math.inf  # at the end
        resumed = run.resume_path
        is_own = resumed and resumed.resolve().parent == run.checkpoints.resolve()
        self._saved_step = state.progress.step if is_own else -1
        self._copy: Future[int] | None = None  # in progress; returns the digest of this rank's state
        # where this rank writes
        self._path, self._latest = Path(), resumed
        self._payload: dict[str, Any] = {}
        self._rest = 0  # on rank 0: the rest of its fingerprint, of buffers and position
        self._buffers: list[str] = []  # the names of these buffers
        self._writing: Future[float] | None = None  # in progress; returns its seconds
        self._new_best: tuple[int, int] | None = None  # step and epoch of a best evaluation, until it is settled
        self._is_linked = False  # by best.pt, where a rank leads its node
        self._is_owed = False  # a save was due while another one was written
        self._odd_buffers: list[str] | None = None  # that differ between ranks; None: not compared yet
        self._begun_at = time.monotonic()  # start of the last save
        self._blocked_s = 0.0  # how long it blocked training
        self._waits_since = math.inf  # since when `_wait` waits for it
        self._failing_since = 0.0  # when the first of a series of failed saves failed; 0: the last succeeded
        self._moves = self._moves_seen = 0  # of the write in progress: blocks
        self._stalled_s, self._looked_at, self._warned_of = 0.0, 0.0, Path()

    # ---- all ranks ----

    def save(self, now: bool = False, again: bool = False) -> None:
        """Start a checkpoint of the current state, unless that is saved.

        Args:
            now: if the previous one is still being written, wait for it; otherwise this one is postponed.
            again: also if this step is saved, because an evaluation has changed the state.

        Raises:
            UserError: if a checkpoint cannot hold a value of the state.
            TrainingError: where a rank writes, if saves have failed for too long.
        """
        step = self._state.progress.step
        if self._saved_step == step and not again:
            return
        self._clock.enter("save")
        began = time.perf_counter()
        is_free = not self._writes or self._is_free(now)
        self._before_save()
        if lowest_rank(not is_free, self._ctx) is None:
            self.compare_buffers()
            self._begin()
            self._blocked_s, self._saved_step = time.perf_counter() - began, step
        self._clock.enter("update")

    def finish_copy(self) -> None:
        """Complete the copy and compare the ranks' states, then have it written. Call this before the weights change.

        Raises:
            TrainingError: on all ranks if they differ; nothing is written then.
        """
        if self._copy is None:
            return
        began = time.perf_counter()
        digest, self._copy = self._copy.result(), None
        digests = [row[0] for row in gather(torch.tensor([digest]), self._ctx)]  # of all ranks, on rank 0
        groups = self._replicas if self._ctx.is_main else []
        odd = [ranks[each] for ranks in groups for each in diverged([digests[rank] for rank in ranks])]
        whole = sum(digests[ranks[0]] for ranks in groups)
        odd, fingerprint = broadcast_json([sorted(odd), shown(whole + self._rest)], self._ctx)
        if odd:
            whose = ", ".join(f"rank {rank} on {self._ctx.hosts[rank]}" for rank in odd)
            raise TrainingError(
                f"{whose}: has different weights or optimizer state than the other ranks, so nothing was saved; look"
                " for faulty memory or code that treats ranks differently (scripts/verify.py), then --resume_from auto",
                odd[0],
                self._ctx.hosts[odd[0]],
            )
        if self._writes:
            self._payload["provenance"]["fingerprint"] = fingerprint
            self._start_writing()
            self._blocked_s += time.perf_counter() - began

    def compare_buffers(self, once: bool = False) -> None:
        """Report persistent buffers that differ between ranks, as a queue that each rank fills: rank 0's are saved.

        once: only if this attempt has not compared them yet. Call it between two steps, on all ranks.
        """
        if self._ctx.world_size == 1 or (once and self._odd_buffers is not None):
            return
        buffers = buffers_of(self._state.model).items()
        mine = {name: [*each.shape, fingerprint_of("buffers", [each])] for name, each in buffers}
        first = broadcast_json(mine, self._ctx)
        rank, before, self._odd_buffers = lowest_rank(mine != first, self._ctx), self._odd_buffers, []
        if rank is None:
            return
        other = broadcast_json(mine, self._ctx, rank)
        self._odd_buffers = odd = sorted(name for name in first | other if first.get(name) != other.get(name))
        self._run.event("buffers_differ", self._state.progress.step, names=odd, rank=rank)
        if odd != before:
            self._run.warn(
                "%s: rank %d has other values in these buffers than rank 0, whose are saved; update them with what all"
                " ranks computed (torch.distributed.all_reduce or all_gather), or register them with persistent=False",
                ", ".join(odd[:5]) + (f" and {len(odd) - 5} more" if len(odd) > 5 else ""),
                rank,
            )

    def save_best(self) -> None:
        """Make best.pt a link to the checkpoint of this step as soon as that is on the disk. If that fails, the next
        evaluation starts a new best."""
        self.save(now=True)
        self._new_best, self._is_linked = (self._state.progress.step, self._state.progress.epoch_number), False
        self._link_best()

    def finish_best(self) -> None:
        """Complete the copy, and wait until the best checkpoint is on the disk. Call this before an evaluation."""
        self.finish_copy()
        if self._new_best:
            self._clock.enter("save")  # other ranks wait for those that write
            self._wait()
        self._settle_best()

    def _settle_best(self) -> None:
        """Tell all ranks whether best.pt was linked. Call this when nothing is being written."""
        if self._new_best and not broadcast_json(self._is_linked, self._ctx):
            self._state.progress.forget_best()
        self._new_best = None

    def finish_writing(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises TrainingError where a rank cannot write it."""
        self.finish_copy()
        self._clock.enter("save")  # no longer a step: other ranks may end before this one
        for last in [False] * (LAST_TRIES - 1) + [True] if self._writes else []:
            self._wait()
            if not self._failing_since:
                break
            if last:
                problem = "the last checkpoint cannot be written; make room, then --resume_from auto"
                raise TrainingError(f"{self._run.checkpoints}: {problem}")
            time.sleep(1.0)
            self._start_writing()
        self._settle_best()

    def _wait(self) -> None:
        """Wait for the write in progress. Its event has the time."""
        self._waits_since = time.monotonic()
        while self._writing:
            self._look(SECONDS_OF_A_LOOK)
        self._waits_since = math.inf

    def finish_begun(self) -> None:
        """Wait for the write in progress, for a limited time, unless it makes no progress."""
        if self._writing and self._stalled_s < SECONDS_AFTER_STOP:
            wait([self._writing], SECONDS_AFTER_STOP)

    def close(self) -> None:
        """Wait for the programs beside training, on all ranks, for a limited time, then end the threads."""
        companions, tick = self._run.companions, lambda: self._clock.enter("save")  # a long upload is not a hang
        if companions and self._ctx.is_main:
            companions.finish(self._seconds_to_upload, tick)
        broadcast_json(None, self._ctx)  # other ranks wait here, where `timeout` does not apply
        if companions and not self._ctx.is_main:  # which rank 0's have waited for
            companions.finish(SECONDS_AFTER_RANK_0, tick)
        self._copier.shutdown()
        self._writer.shutdown()
        self._memory.release()

    def _begin(self) -> None:
        """Start the copy of the state and its digest, both as they are now."""
        later, state = [], self._state.state_dict()
        if self._writes:
            self._buffers = [*buffers_of(self._state.model)]
            self._payload, pairs = self._memory.copy_of(state)
            self._payload |= self._meta
            self._path = checkpoint.step_path(self._run.checkpoints, self._state.progress.step, self._is_sharded)
            # buffers at once: the next forward pass changes them
            buffers = {buffer.data_ptr() for buffer in self._state.model.buffers()}
            _copy_all([pair for pair in pairs if pair[1].data_ptr() in buffers])
            later = [pair for pair in pairs if pair[1].data_ptr() not in buffers]
        event = torch.accelerator.current_stream().record_event() if self._stream else None
        self._copy = self._copier.submit(self._copy_and_digest, later, event)
        self._is_owed, self._begun_at = False, time.monotonic()

    def _copy_and_digest(self, pairs: list[tuple[Tensor, Tensor]], event: Any) -> int:
        if self._stream:
            torch.accelerator.set_device_index(self._ctx.device)
        with self._stream or nullcontext():
            if self._stream and event:
                self._stream.wait_event(event)
            _copy_all(pairs)
            digest = int(of_weights(self._state))  # reads from the device, so the copies are complete
            if self._stream:
                self._stream.synchronize()
        if self._ctx.is_main:
            copies = self._payload["model"]
            buffers = [copies[name] for name in self._buffers]
            self._rest = int(of_rest(Progress.of(self._payload), buffers, torch.device("cpu")))
        return digest

    # ---- where a rank writes ----

    def is_due(self) -> bool:
        """Whether a timed, postponed or failed save can start now. Also looks at the write in progress."""
        if not self._writes:
            return False
        self._look()
        is_time = 0 < self._minutes < (time.monotonic() - self._begun_at) / 60
        return not (self._copy or self._writing) and (is_time or self._is_owed)

    def _is_free(self, now: bool) -> bool:
        """Whether nothing is being written; with `now`, wait until that is so."""
        self._look()
        while now and self._writing:
            self._look(SECONDS_OF_A_LOOK)
        self._is_owed = bool(self._writing)
        return not self._writing

    def _start_writing(self) -> None:
        self._stalled_s, self._looked_at = 0.0, time.monotonic()
        self._writing = self._writer.submit(self._write)

    def _write(self) -> float:
        """In the thread: write the checkpoint. Returns the seconds."""
        began = time.monotonic()
        self._layout.write(self._path, self._payload, self._run.check_owner, self._tick)
        self._run.note_written(self._path)
        if self._leads_node:
            with suppress(OSError):
                checkpoint.prune(self._run.checkpoints, *self._keep)
        return time.monotonic() - began

    def _tick(self) -> None:
        self._moves += 1

    def _look(self, seconds: float = 0.0) -> None:
        """Handle the end of the write in progress, waiting at most this many seconds."""
        if self._run.companions:
            self._run.companions.look()
        if seconds:
            self._clock.enter("save")  # a long write is not a hang
        if self._writing is None:
            return
        if wait([self._writing], seconds).done:
            self._written(self._writing)
        else:
            self._check_progress()

    def _check_progress(self) -> None:
        """Warn of a write that makes no progress, then end the run: after minutes, or soon after a stop signal."""
        now, has_moved = time.monotonic(), self._moves != self._moves_seen or self._layout.is_waiting
        self._stalled_s = 0.0 if has_moved else self._stalled_s + min(now - self._looked_at, SECONDS_COUNTED)
        self._moves_seen, self._looked_at = self._moves, now
        text = f"{self._path}: its write has made no progress for {self._stalled_s:.0f} s"
        if self._stalled_s > SECONDS_TO_WARN and self._path != self._warned_of:
            self._warned_of = self._path
            logging.getLogger(NAME).warning("%s; check the storage", text)  # perhaps only of this rank
        since_stop = min(self._stalled_s, now - StopSignals.came_at)
        too_long = max(self._stalled_s - SECONDS_WITHOUT, since_stop - SECONDS_AFTER_STOP)
        if too_long > size_of(self._payload) / FLUSHED_PER_SECOND:
            rank, host = self._ctx.rank, self._ctx.host
            text += f" (rank {rank} on {host}), so training ends; the latest checkpoint is {self._latest or 'missing'}"
            raise TrainingError(f"{text}; repair the storage, then --resume_from auto", rank, host)

    def _written(self, write: Future[float]) -> None:
        self._writing = None
        try:
            seconds = write.result()
        except OSError as error:
            self._failing_since = self._failing_since or time.monotonic()
            failing_s = time.monotonic() - self._failing_since
            if failing_s > SECONDS_WITHOUT:
                text = f"(no checkpoint could be written for {failing_s / 60:.0f} min, so training ends)"
                raise TrainingError(f"{error} {text}") from None
            self._run.warn(f"{error}; training continues, and the next checkpoint is tried when it is due")
            return
        self._failing_since, self._latest = 0.0, self._path
        progress, blocked = self._payload["progress"], self._blocked_s
        epoch = progress["epoch"] + (progress["samples_in_epoch"] > 0)  # as in records
        waited = max(0.0, time.monotonic() - self._waits_since)
        times = {"seconds": round(seconds, 3), "blocked_s": round(blocked, 5), "waited_s": round(waited, 3)}
        self._run.event("checkpoint", progress["step"], epoch=epoch, path=str(self._path), **times)
        self._run.status("running", checkpoint=str(self._path))
        text = "saved %s in %.2f s; blocked training for %.1f ms"
        logging.getLogger(NAME).info(text, self._path, seconds, 1000 * blocked)
        self._link_best()

    def _link_best(self) -> None:
        """Link best.pt, if its checkpoint is on the disk."""
        if not self._new_best or self._is_linked or self._copy or self._writing or not self._leads_node:
            return
        step, epoch = self._new_best
        try:
            self._run.link_best(step)
        except OSError as error:
            self._run.warn(f"best.pt cannot be written ({error}); the next evaluation starts a new best")
            return
        self._is_linked = True
        self._run.event("best", step, epoch=epoch, path=str(self._run.checkpoints / checkpoint.BEST))


def _be_nice() -> None:
    """Linux has a niceness of each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)
