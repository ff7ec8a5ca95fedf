"""When a checkpoint is begun, committed, tried again and given up. All ranks call it alike; rank 0 has the writer."""

from __future__ import annotations

import functools
import shlex
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import TrainingConfig, TrainingError
from utils.checkpoint import format as checkpoint
from utils.checkpoint.writer import Outcome, Writer
from utils.clock import Clock
from utils.distributed.collectives import all_gather_json
from utils.distributed.context import DistributedContext
from utils.report.reporter import Reporter
from utils.rng import derive_seed
from utils.run.folder import Run
from utils.training.state import TrainState

FIRST_RETRY = 10.0  # seconds after a failed save; each further failure doubles it
MOST_FAILURES = 7  # in a row, about ten minutes: then training without a net ends
LAST_TRIES = 3  # at the end of a run, a second apart
SECONDS_OF_A_LOOK = 0.5
PATIENCE = 0.0  # seconds that a save waits for the one before, before it is put off


class Saver:
    """The saves of one attempt. A copy of the state is begun at one step and complete before the weights change again
    (`settle`).

    Args:
        writer: rank 0's.
        meta: gives what a checkpoint holds beside the state, plain values: its "config" and "provenance".
    """

    def __init__(
        self,
        run: Run,
        state: TrainState,
        config: TrainingConfig,
        ctx: DistributedContext,
        reporter: Reporter,
        clock: Clock,
        writer: Writer | None,
        meta: Callable[[], dict[str, Any]],
    ) -> None:
        self._run, self._state, self._ctx, self._reporter, self._clock, self._meta = (
            run,
            state,
            ctx,
            reporter,
            clock,
            meta,
        )
        self._warn, self._keep_last, self._minutes = reporter.warn, config.keep_last, config.save_every_minutes
        self._writer = writer
        checkpoint.flatten(meta())  # what no checkpoint can hold is refused now; later its values alone are other ones
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._weights = list(state.model.parameters())
        self._stream = torch.cuda.Stream() if ctx.device.type == "cuda" else None
        self._hook = Hook(config.on_checkpoint, reporter.warn)
        self._copy: Future[int] | None = None  # under way; gives the digest of this rank's weights
        self.saved_step = -1  # of the last checkpoint begun
        self._is_busy = False  # rank 0: a job is with the writer
        self._failures, self._retry_at = 0, 0.0
        self._is_finishing = False
        self._begun_s = 0.0  # for which the loop stood still
        self._is_owed = False  # rank 0: a save fell due while the writer was busy
        self._begun_at = time.monotonic()

    # ---- all ranks ----

    def save(self, must: bool = False, name: str = "") -> None:
        """Begin a checkpoint of this moment: the ranks give what is theirs, rank 0 copies and has it written.

        Args:
            must: wait for one that is still being written; without it this one is then put off.
            name: of the file; the step's own by default.

        Raises:
            UserError: when something in the state cannot be in a checkpoint.
            TrainingError: on rank 0, when none could be written for long.
        """
        self._clock.enter("save")
        began, state = time.perf_counter(), self._state
        is_free = not self._writer or self._may_begin(must)
        skips = state.read_skips()  # before `interval`, to which it adds
        ranks = all_gather_json({"interval": state.interval.state(), "skips": skips, "is_free": is_free}, self._ctx)
        self._reporter.skipped(state.note_skips([each["skips"] for each in ranks]))
        if ranks[0]["is_free"]:
            self._begin(
                state.state_dict([each["interval"] for each in ranks]),
                name or checkpoint.step_path(Path(), state.progress.step).name,
            )
            self._begun_s = time.perf_counter() - began
            if not name:
                self.saved_step = state.progress.step
        self._clock.enter("update")

    def save_now(self, must: bool = True, is_again: bool = False) -> None:
        """A checkpoint of this moment, unless there is one, of a state that nothing changes meanwhile. is_again: even
        if there is one."""
        if is_again or self.saved_step != self._state.progress.step:
            self.save(must)
        self.settle()

    def save_best(self) -> None:
        """best.pt is this state, on the disk, when this returns; where the disk does not take it the best is looked for
        anew."""
        progress = self._state.progress
        if self.saved_step != progress.step:
            self.save(must=True, name=checkpoint.BEST)
        self.settle()
        self._clock.enter("save")
        if all_gather_json(not self._writer or self._link_best(progress.step), self._ctx)[0]:
            self._reporter.best(progress)
        else:
            progress.forget_best()

    def _may_begin(self, must: bool) -> bool:
        self._look(seconds=PATIENCE)
        while must and self._is_busy and not self._retry_at:
            self._look(seconds=SECONDS_OF_A_LOOK)
        if self._retry_at:  # what could not be written is older than what comes
            self._retry_at, self._is_busy = 0.0, False
        self._is_owed = self._is_busy
        return not self._is_busy

    def _begin(self, state: dict[str, Any], name: str) -> None:
        """Begin the copy of the state and the digest of the weights, both as they are now."""
        model, later, send = self._state.model, [], None
        if self._writer:
            apart, tensors = checkpoint.flatten(state)
            # the next forward pass changes them
            volatile, at_once = (
                {buffer.data_ptr() for buffer in model.buffers()},
                [],
            )
            for view, tensor in zip(self._writer.fit(tensors), tensors, strict=True):
                (at_once if tensor.data_ptr() in volatile else later).append((view, tensor))
            _copy_all(at_once)
            where = (
                self._run.checkpoints / name,
                apart | self._meta(),
                self._keep_last,
                self._run.claim_file,
                self._run.claim_number,
            )
            send = functools.partial(self._writer.send, *where)
        event = torch.cuda.current_stream().record_event() if self._stream else None
        self._copy = self._thread.submit(self._copy_and_digest, later, self._weights, send, event)
        self._is_busy, self._begun_at = bool(self._writer), time.monotonic()

    def _copy_and_digest(self, pairs: list, weights: list[Tensor], send: Callable[[], None] | None, event: Any) -> int:
        if self._stream:
            torch.cuda.set_device(self._ctx.device)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if event:
                self._stream.wait_event(event)
            _copy_all(pairs)
            digest = digest_of(weights)  # reads from the device: what was copied is there
            if self._stream:
                self._stream.synchronize()
        if send:
            send()
        return digest

    def settle(self) -> None:
        """Before the weights change: the copy is complete, and the ranks' weights are compared.

        Raises:
            TrainingError: on all ranks when they differ; the checkpoint is then not committed.
        """
        if self._copy is None:
            return
        began = time.perf_counter()
        digest, self._copy = self._copy.result(), None
        odd = diverged(all_gather_json(digest, self._ctx))
        if self._writer:
            self._writer.commit(not odd)
            self._begun_s += time.perf_counter() - began
        if odd:
            whose = ", ".join(f"rank {rank} on {self._ctx.hosts[rank]}" for rank in odd)
            raise TrainingError(
                f"{whose}: has other weights than the other ranks, so nothing was saved; look for a fault of its memory"
                " or for code that treats ranks differently (scripts/verify.py), then --resume_from auto",
                odd[0],
                self._ctx.hosts[odd[0]],
            )

    # ---- rank 0 ----

    def is_due(self) -> bool:
        """Whether a save by the clock, or one that was put off, can be begun now. Looks after the writer."""
        if not self._writer:
            return False
        self._look(seconds=0.0)
        is_time = 0 < self._minutes < (time.monotonic() - self._begun_at) / 60
        return not self._is_busy and (is_time or self._is_owed)

    def _look(self, seconds: float) -> None:
        """Hear what became of the job, for so many seconds at most; try again what is due for it."""
        self._hook.look()
        if seconds:
            self._clock.enter("save")  # a long write is no hang
        if not self._is_busy or self._copy is not None:
            return
        if self._retry_at and time.monotonic() >= self._retry_at:
            self._retry_at = 0.0
            self._writer.again()
            self._writer.commit()
        if not self._retry_at and (outcome := self._writer.wait(seconds)):
            self._heard(outcome)

    def _heard(self, outcome: Outcome) -> None:
        if not outcome.problem:
            self._is_busy, self._failures = False, 0
            self._reporter.saved(outcome, self._begun_s)
            self._hook.run(outcome.path)
            return
        self._failures += 1
        if outcome.is_final or self._failures >= (LAST_TRIES if self._is_finishing else MOST_FAILURES):
            more = (
                ""
                if outcome.is_final
                else f" ({self._failures} times in a row, training without a checkpoint ends here)"
            )
            raise TrainingError(outcome.problem + more)
        wait = 1.0 if self._is_finishing else FIRST_RETRY * 2 ** (self._failures - 1)
        wait = wait if outcome.seconds else 0.0  # 0: the process was killed
        self._retry_at = time.monotonic() + wait
        self._warn(f"{outcome.problem}; training goes on, and it is tried again in {wait:.0f} s")

    def finish(self) -> None:
        """Wait until what was begun is on the disk. Raises TrainingError on rank 0 when it cannot be."""
        self._clock.enter("save")
        if self._writer:
            self._is_finishing, self._failures = True, 0
            self._retry_at = min(self._retry_at, time.monotonic())
            try:
                while self._is_busy:
                    self._look(seconds=SECONDS_OF_A_LOOK)
                    time.sleep(0.1 if self._retry_at else 0.0)
            finally:
                self._is_finishing = False

    def _link_best(self, step: int) -> bool:
        """Make best.pt the checkpoint of this step, once that is on the disk. Whether it is."""
        try:
            self.finish()
            return self.saved_step != step or self._run.link_best(step)  # else it was written as best.pt
        except (OSError, TrainingError) as error:
            self._retry_at = time.monotonic() + FIRST_RETRY if self._is_busy else 0.0
            self._warn(f"best.pt cannot be written ({error}); the best checkpoint is looked for anew")
            return False

    def close(self) -> None:
        """Wait for the user's command, and end the writer and the thread."""
        self._hook.wait()
        self._thread.shutdown()
        if self._writer:
            self._writer.end()


class Hook:
    """`on_checkpoint`: the user's command, after a commit; one at a time, and of those that wait only the newest."""

    def __init__(self, command: str, warn: Callable[[str], None]) -> None:
        self._words, self._warn = shlex.split(command), warn
        self._running: subprocess.Popen | None = None
        self._waiting: Path | None = None

    def run(self, path: Path) -> None:
        """Start it for this checkpoint, or as soon as the one before has ended."""
        if self._words:
            self._waiting = path
            self.look()

    def look(self) -> None:
        """Whether it has ended; its failure is a warning."""
        if self._running and (code := self._running.poll()) is not None:
            self._running = None
            if code:
                self._warn(
                    f"on_checkpoint: {shlex.join(self._words)} ended with exit code {code}; the checkpoint itself is"
                    " whole"
                )
        if self._waiting and not self._running:
            path, self._waiting = self._waiting, None
            words = [word.replace("{}", str(path)) for word in self._words]
            try:
                self._running = subprocess.Popen(
                    words if "{}" in " ".join(self._words) else [*words, str(path)], start_new_session=True
                )
            except OSError as error:
                self._warn(
                    f"on_checkpoint: {shlex.join(self._words)} cannot be run ({error.strerror}); the checkpoint itself"
                    " is whole"
                )

    def wait(self) -> None:
        """Until none is running or waiting."""
        while self._running:
            self._running.wait()
            self.look()


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)


def digest_of(weights: list[Tensor]) -> int:
    """63 bits that change with any bit of any weight: the sum of each tensor's bytes taken as whole numbers, hashed."""
    sums = []
    for weight in weights:
        by_memory = sorted(range(weight.ndim), key=weight.stride, reverse=True)
        flat = weight.detach().permute(by_memory).reshape(-1).contiguous()
        places = (flat.numel() * flat.element_size(), flat.storage_offset() * flat.element_size())
        kind = torch.int64 if flat.element_size() <= 8 and not any(place % 8 for place in places) else torch.uint8
        sums.append(flat.view(kind).sum(dtype=torch.int64))
    return derive_seed(*torch.stack(sums).tolist())


def diverged(digests: list[int]) -> list[int]:
    """The ranks whose digest is not that of most; of two that differ the second, for want of a third."""
    usual = max(digests, key=lambda each: (digests.count(each), -digests.index(each)))
    return [rank for rank, each in enumerate(digests) if each != usual]
