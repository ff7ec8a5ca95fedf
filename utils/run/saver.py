"""Starts, commits and retries checkpoints. All ranks call it; rank 0 has the writer."""

from __future__ import annotations

import functools
import logging
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import TrainingConfig, TrainingError
from utils.checkpoint import format as checkpoint
from utils.checkpoint.shards import ShardWriter
from utils.checkpoint.writer import Outcome, Writer
from utils.clock import Clock
from utils.data.sampler import GlobalBatchSampler
from utils.distributed.collectives import broadcast_json, gather, lowest_rank
from utils.distributed.context import DistributedContext
from utils.distributed.dtensor import local
from utils.logger import NAME
from utils.rng import digest_of, diverged
from utils.run.folder import Run
from utils.signals import StopSignals
from utils.training.state import TrainState

LAST_TRIES = 3  # at the end of a run, a second apart
SECONDS_OF_A_LOOK = 0.5
SECONDS_TO_WARN, SECONDS_AFTER_STOP = 60.0, 20.0  # of a write without progress; torchrun waits 30 s after a stop signal
SECONDS_OF_A_COMMAND = 300.0  # of `on_checkpoint`, before a warning
SECONDS_TO_FINISH, SECONDS_TO_FINISH_AFTER_STOP = 3600.0, 600.0  # for it, at the end of a run
SECONDS_TO_TERMINATE = 5.0  # for it, before SIGKILL


class Saver:
    """The saves of one attempt. The copy of the state starts after a step and is complete before the weights change.

    Args:
        sampler: of the training set; gives the samples of skipped steps.
        writer: on rank 0; of a sharded run on all ranks.
        meta: returns the rest of a checkpoint as plain values: its "config" and "provenance".
        saved_step: of the checkpoint in this run's folder that the run resumes from; -1: none.
        max_seconds_without: how long saves may fail, or one may make no progress, before training ends.
    """

    def __init__(
        self,
        run: Run,
        state: TrainState,
        config: TrainingConfig,
        ctx: DistributedContext,
        sampler: GlobalBatchSampler,
        clock: Clock,
        writer: Writer | ShardWriter | None,
        meta: Callable[[], dict[str, Any]],
        saved_step: int = -1,
        max_seconds_without: float = 600.0,
    ) -> None:
        self._run, self._state, self._ctx, self._sampler, self._clock = run, state, ctx, sampler, clock
        self._writer, self._meta, self._saved_step = writer, meta, saved_step
        self._max_seconds_without = max_seconds_without
        self._keep, self._minutes = (config.keep_last, config.keep_every), config.save_every_minutes
        checkpoint.flatten(meta())  # raises now if no checkpoint can hold it; later only its values change
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._is_sharded = isinstance(writer, ShardWriter)
        shards = {"none": 1, "hybrid": ctx.local_world_size}.get(config.sharding, ctx.world_size)
        self._replicas = [range(shard, ctx.world_size, shards) for shard in range(shards)]  # ranks with equal weights
        self._weights = [local(p) for p in state.model.parameters()]
        if writer:  # now: pinning gigabytes takes seconds. Missing are two tensors and a step per parameter, as Adam's
            late = [local(p) for p in state.owners if p.requires_grad and p not in state.optimizer.state]
            _, tensors = checkpoint.flatten(state.state_dict())
            writer.fit([*tensors, *late, *late, *(torch.empty(()) for _ in late)])
        self._stream = torch.cuda.Stream() if ctx.device.type == "cuda" else None
        self._hook = Hook(config.on_checkpoint if ctx.is_main else "", run.warn)
        self._copy: Future[int] | None = None  # in progress; returns the digest of this rank's weights
        # on rank 0
        self._is_busy = False  # the writer has a job
        self._is_owed = False  # a save was due while the writer was busy
        self._begun_at = time.monotonic()  # start of the last save
        self._begun_s = 0.0  # how long it blocked training
        self._failing_since = 0.0  # when the first of a series of failed saves failed; 0: the last succeeded
        self._latest = run.resume_path  # the latest checkpoint
        self._warned_of: Path | None = None  # the checkpoint whose write made no progress

    # ---- all ranks ----

    def save(self, must: bool = False, name: str = "") -> None:
        """Start a checkpoint of the current state. Called on all ranks; rank 0 copies the state and has it written.

        Args:
            must: wait for the previous one if it is still being written; otherwise this one is postponed.
            name: of the file; by default that of the step.

        Raises:
            UserError: if a checkpoint cannot hold a value of the state.
            TrainingError: on rank 0, if saves have failed for too long.
        """
        self._clock.enter("save")
        began, state = time.perf_counter(), self._state
        is_free = not self._writer or self._is_free(must)
        self._run.record_skipped(state.read_skips(), self._sampler)
        if lowest_rank(not is_free, self._ctx) is None:
            if self._is_sharded or not name:  # the best one of a sharded run is a link
                name = checkpoint.step_path(Path(), state.progress.step, self._is_sharded).name
            self._begin(state.state_dict(), name)
            self._begun_s = time.perf_counter() - began
            if name != checkpoint.BEST:
                self._saved_step = state.progress.step
        self._clock.enter("update")

    def save_now(self, must: bool = True, is_again: bool = False) -> None:
        """Save the current state unless it is saved, and complete the copy. is_again: save it in any case."""
        if is_again or self._saved_step != self._state.progress.step:
            self.save(must)
        self.finish_snapshot()

    def save_best(self) -> None:
        """Write this state to best.pt and wait for it. If that fails, the next evaluation starts a new best."""
        progress = self._state.progress
        if self._saved_step != progress.step:
            self.save(must=True, name=checkpoint.BEST)
        self.finish_snapshot()
        self._clock.enter("save")
        if broadcast_json(not self._writer or self._link_best(progress.step), self._ctx):
            self._run.event(
                "best", progress.step, epoch=progress.epoch_number, path=str(self._run.checkpoints / checkpoint.BEST)
            )
        else:
            progress.forget_best()

    def finish_snapshot(self) -> None:
        """Complete the copy and compare the ranks' weights. Call this before the weights change.

        Raises:
            TrainingError: on all ranks if they differ; the checkpoint is then not committed.
        """
        if self._copy is None:
            return
        began = time.perf_counter()
        digest, self._copy = self._copy.result(), None
        digests = [row[0] for row in gather(torch.tensor([digest]), self._ctx)]  # of all ranks, on rank 0
        groups = self._replicas if self._ctx.is_main else []
        odd = [ranks[each] for ranks in groups for each in diverged([digests[rank] for rank in ranks])]
        odd = broadcast_json(sorted(odd), self._ctx)
        if self._writer:
            self._writer.commit(not odd)
            self._begun_s += time.perf_counter() - began
        if odd:
            whose = ", ".join(f"rank {rank} on {self._ctx.hosts[rank]}" for rank in odd)
            raise TrainingError(
                f"{whose}: has different weights than the other ranks, so nothing was saved; look for faulty memory or"
                " code that treats ranks differently (scripts/verify.py), then --resume_from auto",
                odd[0],
                self._ctx.hosts[odd[0]],
            )

    def _begin(self, state: dict[str, Any], name: str) -> None:
        """Start the copy of the state and the digest of the weights, both as they are now."""
        later, send = [], None
        if self._writer:
            flat, tensors = checkpoint.flatten(state)
            # buffers at once: the next forward pass changes them
            buffers = {buffer.data_ptr() for buffer in self._state.model.buffers()}
            pairs = list(zip(self._writer.fit(tensors), tensors, strict=True))
            _copy_all([pair for pair in pairs if pair[1].data_ptr() in buffers])
            later = [pair for pair in pairs if pair[1].data_ptr() not in buffers]
            place = self._run.checkpoints / name, flat | self._meta(), self._keep
            send = functools.partial(self._writer.send, *place, self._run.lock_file, self._run.start.lock_number)
        event = torch.cuda.current_stream().record_event() if self._stream else None
        self._copy = self._thread.submit(self._copy_and_digest, later, send, event)
        self._is_busy, self._is_owed, self._begun_at = bool(self._writer), False, time.monotonic()

    def _copy_and_digest(self, pairs: list, send: Callable[[], None] | None, event: Any) -> int:
        if self._stream:
            torch.cuda.set_device(self._ctx.device)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if event:
                self._stream.wait_event(event)
            _copy_all(pairs)
            digest = digest_of(self._weights)  # reads from the device, so the copies are complete
            if self._stream:
                self._stream.synchronize()
        if send:
            send()
        return digest

    # ---- where there is a writer ----

    def is_due(self) -> bool:
        """Whether a timed, postponed or failed save can start now. Also polls the writer."""
        if not self._writer:
            return False
        self._look(seconds=0.0)
        is_time = 0 < self._minutes < (time.monotonic() - self._begun_at) / 60
        return not self._is_busy and (is_time or self._is_owed)

    def _is_free(self, must: bool) -> bool:
        """Whether the writer can take a job; with `must`, wait until it can."""
        self._look(seconds=0.0)
        while must and self._is_busy:
            self._look(SECONDS_OF_A_LOOK)
        self._is_owed = self._is_busy
        return not self._is_busy

    def _look(self, seconds: float) -> None:
        """Handle the outcome of the writer's job, waiting at most this many seconds."""
        self._hook.look()
        if seconds:
            self._clock.enter("save")  # a long write is not a hang
        if self._is_busy and self._copy is None:
            if outcome := self._writer.wait(seconds):
                self._is_busy = False
                self._take(outcome)
            else:
                self._check_progress()

    def _check_progress(self) -> None:
        """Warn of a write that makes no progress, then end the run: after minutes, or soon after a stop signal."""
        path, seconds, flush = self._writer.stalled()
        text = f"{path}: its write has made no progress for {seconds:.0f} s"
        if seconds > SECONDS_TO_WARN and path != self._warned_of:
            self._warned_of = path
            logging.getLogger(NAME).warning("%s; check the storage", text)  # perhaps only of this rank
        since_stop = min(seconds, time.monotonic() - StopSignals.came_at)
        if max(seconds - self._max_seconds_without, since_stop - SECONDS_AFTER_STOP) > flush:
            self._writer.end(seconds=0.0)
            rank, host = self._ctx.rank, self._ctx.host
            text += f" (rank {rank} on {host}), so training ends; the latest checkpoint is {self._latest or 'missing'}"
            raise TrainingError(f"{text}; repair the storage, then --resume_from auto", rank, host)

    def _take(self, outcome: Outcome) -> None:
        if not outcome.problem:
            self._failing_since = 0.0
            self._report(outcome)
            self._hook.run(outcome.path)
            return
        self._failing_since = self._failing_since or time.monotonic()
        minutes = (time.monotonic() - self._failing_since) / 60
        if outcome.is_final:
            raise TrainingError(outcome.problem)
        if minutes * 60 > self._max_seconds_without:
            raise TrainingError(
                f"{outcome.problem} (no checkpoint could be written for {minutes:.0f} min, so training ends)"
            )
        self._is_owed = outcome.was_killed
        self._run.warn(f"{outcome.problem}; training continues, and the next checkpoint is tried when it is due")

    def _report(self, outcome: Outcome) -> None:
        """Report a checkpoint that is on the disk."""
        if outcome.path.name != checkpoint.BEST:
            times = {"seconds": round(outcome.seconds, 3), "blocked_s": round(self._begun_s, 5)}
            self._latest = outcome.path
            self._run.event("checkpoint", outcome.step, epoch=outcome.epoch, path=str(outcome.path), **times)
            self._run.status("running", checkpoint=str(outcome.path))
            blocked = 1000 * self._begun_s
            self._run.log("saved %s in %.2f s; blocked training for %.1f ms", outcome.path, outcome.seconds, blocked)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises TrainingError on rank 0 if it cannot be written."""
        self.finish_snapshot()
        self._clock.enter("save")  # no longer a step: other ranks may end before this one
        for last in [] if not self._writer else [False] * (LAST_TRIES - 1) + [True]:
            while self._is_busy:
                self._look(SECONDS_OF_A_LOOK)
            if not self._failing_since:
                return
            if last:
                problem = "the last checkpoint cannot be written; make room, then --resume_from auto"
                raise TrainingError(f"{self._run.checkpoints}: {problem}")
            time.sleep(1.0)
            self._writer.again()
            self._writer.commit()
            self._is_busy = True

    def _link_best(self, step: int) -> bool:
        """Make best.pt the checkpoint of this step once that is on the disk. Returns whether that succeeded."""
        try:
            self.finish()
            if not self._ctx.is_main:
                return True
            return self._saved_step != step or self._run.link_best(step)  # else it was written as best.pt
        except (OSError, TrainingError) as error:
            if self._is_busy:  # the write makes no progress
                raise
            self._run.warn(f"best.pt cannot be written ({error}); the next evaluation starts a new best")
            return False

    def close(self) -> None:
        """Wait for the user's command, on all ranks, for a limited time, then end the writer and the thread."""
        while self._hook.is_running():
            self._clock.enter("save")  # a long upload is not a hang
            self._hook.end_after(SECONDS_TO_FINISH if StopSignals.came_at == math.inf else SECONDS_TO_FINISH_AFTER_STOP)
            time.sleep(SECONDS_OF_A_LOOK)
        broadcast_json(None, self._ctx)  # other ranks wait here, where `timeout` does not apply
        self._thread.shutdown()
        if self._writer:
            self._writer.end()


class Hook:
    """`on_checkpoint`: the user's command after a commit; one at a time; of those waiting, only the latest."""

    def __init__(self, command: str, warn: Callable[[str], None]) -> None:
        self._words, self._warn = shlex.split(command), warn
        self._running: subprocess.Popen | None = None
        self._began_at, self._is_late, self._path = 0.0, False, Path()
        self._waiting: Path | None = None

    def run(self, path: Path) -> None:
        """Start it for this checkpoint, now or as soon as the previous one has ended."""
        if self._words:
            self._waiting = path
            self.look()

    def look(self) -> None:
        """Check whether it has ended, and start the one that waits. A failure or a long duration is a warning."""
        if self._running and (code := self._running.poll()) is not None:
            self._running = None
            if code:
                self._warn(
                    f"on_checkpoint: {shlex.join(self._words)} ended with exit code {code}; the checkpoint is valid"
                )
        if self._running and not self._is_late and self._age() > SECONDS_OF_A_COMMAND:
            self._is_late = True
            minutes = f"{self._age() / 60:.0f} min"
            self._warn(f"on_checkpoint: the command has been running for {minutes}; later checkpoints wait for it")
        if self._waiting and not self._running:
            self._began_at, self._is_late = time.monotonic(), False
            path = self._path = self._waiting
            self._waiting = None
            words = [word.replace("{}", str(path)) for word in self._words]
            words += [] if "{}" in " ".join(self._words) else [str(path)]
            try:
                self._running = subprocess.Popen(words, start_new_session=True)
            except OSError as error:
                command = shlex.join(self._words)
                self._warn(f"on_checkpoint: {command} cannot be run ({error.strerror}); the checkpoint is valid")

    def _age(self) -> float:
        return time.monotonic() - self._began_at

    def end_after(self, seconds: float) -> None:
        """End the command's process group if it has been running for longer."""
        if self._running and self._age() > seconds:
            what = f"was ended after {self._age() / 60:.0f} min, since the run is over; run it again for {self._path}"
            self._warn(f"on_checkpoint: the command {what}")
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(self._running.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._running.wait(SECONDS_TO_TERMINATE)
            self._running = None

    def is_running(self) -> bool:
        """Whether one is running or waiting."""
        self.look()
        return self._running is not None


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)
