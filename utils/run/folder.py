"""The run folder: who owns it, whether the run in it is continued, and its records."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import DEFAULT_RUN_DIR, StartError, TrainingConfig, TrainingError, UserError
from utils.checkpoint import format as checkpoint
from utils.data.sampler import GlobalBatchSampler
from utils.files import TEMPORARY, LinesFile, finite, keep_lines, may_pass, read_json, read_lines, replace_json
from utils.logger import NAME as LOGGER
from utils.logger import count
from utils.run.lock import NAME as LOCK
from utils.run.lock import RunLock, repeated_failures
from utils.run.provenance import now
from utils.run.watchdog import look_twice
from utils.training.state import SkippedStep

OURS = ("config.json", "provenance.json", "code.zip", "status.json", "metrics.jsonl", "summary.json", "goodput.json")
OURS += ("training_files.gz", LOCK, ".lock", "eval-*.json", "hang-*.txt", "superseded-*")
OURS += ("checkpoints", "tensorboard", "logs", "traces", "samples")
SECONDS_TO_LOOK = 10.0  # for lost ranks
SECONDS_BETWEEN_STATUS = 1.0  # while only the progress changes


@dataclass(frozen=True)
class Start:
    """How an attempt starts, as decided by rank 0. Plain values."""

    resume_from: str = ""  # the checkpoint
    is_completed: bool = False  # nothing is left to do, and nothing may be written
    is_replacing: bool = False  # the folder holds another run, until `replace_old_run`
    attempt: int = 1
    lock_number: int = 0
    launch_id: str = ""
    failures: list[dict[str, Any]] = field(default_factory=list)  # attempts in a row that failed at the same step
    notes: list[str] = field(default_factory=list)  # decisions to log


def claim(config: TrainingConfig, host: str, launch_id: str, may_restart: bool) -> tuple[RunLock, Start]:
    """On rank 0: lock the folder and decide whether to continue the run in it.

    Args:
        launch_id: common to all attempts of one launch; empty if unknown.
        may_restart: whether the launcher starts further attempts.

    Raises:
        UserError: if the folder holds another run, belongs to a running job, or cannot be written.
    """
    folder, checkpoints = config.run_folder, config.checkpoint_folder
    if Path.cwd().is_relative_to(folder.resolve()) or any(folder.glob(f"*/{LOCK}")):
        raise UserError(f"run_dir={folder}: contains more than one run's files; give a separate folder, e.g. runs/NAME")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder, host)
    except OSError as error:
        kind = StartError if may_pass(error) else UserError
        raise kind(f"run_dir={folder}: cannot be written ({error.strerror}); give a writable folder") from None
    owner, status = lock.before, read_json(folder / "status.json")
    saved = [*checkpoint.step_checkpoints(checkpoints), *checkpoints.glob(checkpoint.BEST)]
    holds_run = (folder / "metrics.jsonl").exists() or bool(saved)
    is_same_launch = bool(launch_id) and owner.get("launch_id") == launch_id
    given = Path(config.resume_from) if config.resume_from not in ("", "auto") else None
    is_continued = holds_run and (config.resume_from == "auto" or is_same_launch)
    is_replacing, path, failures, notes = False, None, [], []
    if is_continued:
        if status.get("state") == "completed" and not config.asks_for_more_than(read_json(folder / "config.json")):
            return lock, Start(is_completed=True)
        failures = repeated_failures(owner, status, folder / "watch")
        path, notes = checkpoint.latest_valid(checkpoints)
        if status.get("checkpoint") and not (path or given):
            raise UserError(
                f"{checkpoints}: has no checkpoint, but the run has written {status['checkpoint']}; put it back (is the"
                " disk mounted?), or start over with --overwrite instead of --resume_from auto"
            )
    if given and not path:  # else an earlier attempt of this launch has already started from it
        checkpoint.verify(given)
        path = given
    if holds_run and not is_continued and not (given and given.resolve().parent == checkpoints.resolve()):
        if may_restart and not launch_id:
            raise UserError(
                f"run_dir={folder}: holds a run, and restarts look like new launches; give torchrun --rdzv-id NAME"
            )
        if not config.overwrite and (config.run_dir != DEFAULT_RUN_DIR or config.checkpoint_dir):
            raise UserError(
                f"run_dir={folder}: holds a run already; "
                "add --resume_from auto to continue it, --overwrite to replace it, or give another --run_dir"
            )
        is_replacing = True
    # an attempt that was killed before its first record or checkpoint counts too
    is_again = holds_run or (config.resume_from == "auto" and owner.get("has_trained"))
    attempt = owner.get("attempt", 0) + 1 if is_again and not is_replacing else 1
    start = Start(str(path or ""), False, is_replacing, attempt, lock.number, launch_id, failures, notes)
    # until `mark_training` a restart of this launch must not continue this run
    inherited = launch_id if is_same_launch and not is_replacing else ""
    lock.write(launch_id=inherited, attempt=attempt, failures=failures)
    partial = [*folder.glob(f"*{TEMPORARY}"), *folder.glob(f"samples/*{TEMPORARY}"), *checkpoints.glob(f"*{TEMPORARY}")]
    for left_over in [*partial, *folder.glob("watch/*")]:
        with suppress(OSError):  # NFS keeps the files that a process has open as .nfs*
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    return lock, start


class Run:
    """The folder of one run, as seen by one rank. Records that only rank 0 may write are ignored on other ranks.

    Args:
        hosts: of all ranks.
        lock: on rank 0.
    """

    def __init__(
        self, folder: Path, checkpoints: Path, rank: int, hosts: tuple[str, ...], start: Start, lock: RunLock | None
    ) -> None:
        self.folder, self.checkpoints, self.rank, self.hosts, self.start = folder, checkpoints, rank, hosts, start
        self.is_replacing, self.notes = start.is_replacing, list(start.notes)
        self.resume_path = Path(start.resume_from) if start.resume_from else None
        self.is_main, self.host = rank == 0, hosts[rank]
        self.watch_folder, self.lock_file = folder / "watch", folder / LOCK
        self.log_file = folder / "logs" / f"rank{rank}.log"
        self._lock = lock
        self._files: dict[str, LinesFile] = {}
        self._has_copied = False  # best.pt, on storage without links
        self._status: dict[str, Any] = {}
        self._status_at = -math.inf  # when it was written
        self._status_before: dict[str, Any] = {}  # of a continued run, until this attempt trains

    def mark_training(self, has_diagnosed: bool = False) -> None:
        """On rank 0: from now on a restart of this launch continues the run in the folder.

        has_diagnosed: instead, the run was stopped because it always fails at the same step.
        """
        start = self.start
        values = {"attempt": start.attempt, "failures": start.failures, "has_diagnosed": has_diagnosed}
        self._lock.write(launch_id=start.launch_id, has_trained=True, **values)

    def replace_old_run(self, config: TrainingConfig) -> None:
        """On rank 0, once nothing more can be rejected: move the old run aside, and delete it with --overwrite."""
        numbered = (self.folder.with_name(f"{self.folder.name}.{number}") for number in range(1, 1_000_000))
        aside = next(path for path in numbered if not path.exists())
        if config.checkpoint_dir:  # elsewhere; without its checkpoints the old run cannot continue
            for path in [*checkpoint.step_checkpoints(self.checkpoints), *self.checkpoints.glob(checkpoint.BEST)]:
                checkpoint.remove(path)
        self.folder.rename(aside)
        self._lock.close()
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        with suppress(OSError):  # the ranks already write into these files
            (aside / self.watch_folder.name).rename(self.watch_folder)
        self._lock = RunLock(self.folder, self.host, self.start.lock_number)
        self.notes.append(f"moved the earlier run to {aside}")
        if config.overwrite:
            for path in [path for pattern in OURS for path in aside.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            with suppress(OSError):  # files that are not ours stay there
                aside.rmdir()
            self.notes[-1] = f"replaced the run in {self.folder}" + (f"; other files are in {aside}" * aside.exists())

    def is_ours(self) -> bool:
        """Whether no other job has taken over the folder while this one was suspended or cut off."""
        return read_json(self.lock_file).get("number", self.start.lock_number) == self.start.lock_number

    def _check(self) -> None:
        """Call before every write: a later owner would take it for its own."""
        if not self.is_ours():
            raise TrainingError(f"run_dir={self.folder}: another job has taken over this run; end this one")

    def check_owner(self) -> None:
        """Call before a checkpoint gets its name. Raises TrainingError if another job owns the folder, or OSError."""
        try:
            number = json.loads(self.lock_file.read_text(encoding="utf-8"))["number"]
        except (ValueError, KeyError, TypeError):
            raise OSError(5, f"{self.lock_file} cannot be read") from None
        if number != self.start.lock_number:
            text = f"{self.checkpoints}: another job has taken over this run (owner {number}); end this one"
            raise TrainingError(text)

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.close()

    # ---- records ----

    def record(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append a record to metrics.jsonl; non-finite numbers become null."""
        values = finite({"kind": kind} | values)
        if self.is_main:
            self._append("metrics.jsonl", values)
        return values

    def event(self, event: str, step: int, **values: Any) -> None:
        self.record("event", event=event, step=step, **values, time=now())

    def record_skipped(self, skipped: list[SkippedStep], sampler: GlobalBatchSampler) -> None:
        """Record skipped optimizer steps, with the samples of their global batches."""
        for each in skipped:
            indices = sampler.order(each.epoch)[each.first : each.first + each.samples].tolist()
            self.event("skipped_step", each.step, epoch=each.epoch + 1, indices=indices, reason=each.reason)
        if skipped:
            steps = ", ".join(str(each.step) for each in skipped[:5]) + (", ..." if len(skipped) > 5 else "")
            self.warn("skipped %s with a non-finite loss or gradient: %s", count(skipped, "optimizer step"), steps)

    def log(self, text: str, *values: Any) -> None:
        logging.getLogger(LOGGER).info(text, *values)

    def warn(self, text: str, *values: Any) -> None:
        """Log what all ranks know: as a warning on rank 0, as information on the others."""
        logging.getLogger(LOGGER).log(logging.WARNING if self.is_main else logging.INFO, text, *values)

    def _append(self, name: str, values: dict[str, Any]) -> None:
        self._check()
        if name not in self._files:
            self._files[name] = LinesFile(self.folder / name)
        self._files[name].append(json.dumps(values))

    def record_samples(self, epoch: int, step: int, indices: list[int]) -> None:
        """Append the samples that this rank computed in a committed step to its own file, on every rank."""
        self._append(f"samples/rank{self.rank}.jsonl", {"epoch": epoch, "step": step, "indices": indices})

    def begin(self) -> None:
        """Write to status.json that an attempt is running."""
        self.is_replacing = False
        before = read_json(self.folder / "status.json") if self.start.attempt > 1 else {}
        where = {"epoch": 0, "step": 0, "samples_seen": 0, "checkpoint": None} | before
        kept = {name: where[name] for name in ("epoch", "step", "samples_seen", "checkpoint")}
        self.status("running", **kept, error=None, rank=None, host=None)
        self._status_before = before if self.is_main else {}

    def progress(self, **values: Any) -> None:
        """`status` of a running attempt, for values that change all the time: written at most once a second."""
        if time.monotonic() - self._status_at < SECONDS_BETWEEN_STATUS:
            self._status |= values
        else:
            self.status("running", **values)

    def status(self, state: str, **values: Any) -> None:
        """Replace status.json: the state, and the values that changed since the last call."""
        self._status_before, self._status_at = {}, time.monotonic()
        if self.is_main:
            self._check()
            self._status |= {"state": state} | values | {"time": now()}
            is_running = state == "running"
            if is_running and not self.lock_file.exists():
                return  # the file system is unmounted, and nothing belongs below its mount point
            with suppress(OSError) if is_running else nullcontext():  # a full disk: training continues
                replace_json(self.folder / "status.json", self._status, is_flushed=not is_running)

    def lost_ranks(self) -> TrainingError | None:
        """`look_for_lost_ranks` on the first rank that calls this; the others wait for its answer."""
        file, ends = self.watch_folder / "lost", time.monotonic() + SECONDS_TO_LOOK
        with suppress(OSError):
            file.touch(exist_ok=False)
            ends = 0.0  # this rank is the first
        while not (found := read_json(file)) and time.monotonic() < ends:
            time.sleep(0.25)
        if not found:
            error = self.look_for_lost_ranks()
            found = {"lost": error and (str(error), error.rank, error.host)}
            with suppress(OSError):
                file.write_text(json.dumps(found))
        return TrainingError(*found["lost"]) if found["lost"] else None

    def look_for_lost_ranks(self, meanwhile: Callable[[], None] = lambda: None) -> TrainingError | None:
        """After a collective failed because a peer is gone: the error for a rank that ended without reporting one."""
        places, standing, _ = look_twice(self.watch_folder, self.hosts, meanwhile)
        if not standing or not self.watch_folder.is_dir():
            return None
        rank, place = min(standing), places[min(standing)]
        where = f" in {place.phase} of step {place.step}" if place else ""
        more = f", and {len(standing) - 1} more" if len(standing) > 1 else ""
        remedy = "look for out-of-memory kills (dmesg) or the node's state, then --resume_from auto"
        return TrainingError(
            f"rank {rank} on {self.hosts[rank]} was killed or cut off{where}{more}; {remedy}", rank, self.hosts[rank]
        )

    def failed(self, error: BaseException) -> None:
        """Write to status.json that the run failed. Called on each rank that fails; the first one counts."""
        if self.is_replacing or not self.is_ours():
            return  # the status belongs to another run or another job
        if getattr(error, "rank", None) is not None and not self.is_main and not isinstance(error, TrainingError):
            return  # all ranks have this error: rank 0 writes it
        path = self.folder / "status.json"
        if isinstance(error, UserError) and self._status_before:  # the run is unchanged
            with suppress(OSError):
                replace_json(path, self._status_before)
            return
        text = str(error).strip() or type(error).__name__
        rank, host = getattr(error, "rank", None), getattr(error, "host", None)
        where = {"rank": self.rank, "host": self.host} if rank is None else {"rank": rank, "host": host}
        for is_second_look in (False, True):
            if is_second_look:
                time.sleep(0.3)  # rank 0 may have been writing its own status just then; it waits for this rank now
            status = read_json(path)
            if status.get("state") == "running":
                status |= {"state": "failed", "error": text} | where | {"time": now()}
                try:
                    replace_json(path, status)
                except OSError:
                    with suppress(OSError), path.open("r+") as file:  # needs no free block or inode
                        file.write(json.dumps(status))
                        file.truncate()
            if self.is_main:
                break

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_lines(self.folder / "metrics.jsonl") if record["kind"] == kind]

    def write_json(self, name: str, value: Any) -> None:
        if self.is_main:
            self._check()
            replace_json(self.folder / name, value)

    # ---- checkpoints: on rank 0 ----

    def link_best(self, step: int) -> None:
        """Make best.pt a link to the checkpoint of this step. Raises OSError, also if there is none."""
        self._check()
        paths = checkpoint.step_checkpoints(self.checkpoints)
        source = next((path for path in paths if checkpoint.step_of(path) == step), None)
        if source is None:
            raise OSError(2, f"there is no checkpoint of step {step}")
        if not checkpoint.link_best(source) and not self._has_copied:
            self._has_copied = True
            self.log("%s is a copy of %s: the storage has no links", checkpoint.BEST, source.name)

    def rewind(self, step: int, is_evaluated: bool = False) -> None:
        """Before a resumed run writes: drop records that it will write again and move checkpoints of later steps aside.

        is_evaluated: the evaluation at this step is complete and will not be repeated.
        """
        beyond = [path for path in checkpoint.step_checkpoints(self.checkpoints) if checkpoint.step_of(path) > step]
        if beyond:  # before the records: after a kill in between nothing resumes from a later step
            aside = self._aside()
            for path in beyond:
                shutil.move(path, aside / path.name)
            self.notes.append(
                f"moved checkpoints of steps after {step} to {aside}: {', '.join(each.name for each in beyond)}"
            )
        has_val = any(record["split"] == "val" for record in self.records("eval"))

        def is_kept(record: dict[str, Any]) -> bool:
            if has_val and record.get("split") == "test":  # made at the end of a shorter run, with an earlier step
                return False
            is_of_evaluation = record["kind"] == "eval" or record.get("event") in ("best", "evaluation")
            return record["step"] < step or (record["step"] == step and (is_evaluated or not is_of_evaluation))

        keep_lines(self.folder / "metrics.jsonl", is_kept)
        for path in self.folder.glob("samples/rank*.jsonl"):
            keep_lines(path, lambda record: record["step"] <= step)

    def restore_best(self, step: int) -> bool:
        """Make best.pt the checkpoint of this step again, from this folder or the resumed one's. Whether it succeeded.

        step: of the best evaluation so far; below 0 if there was none.
        """
        best = self.checkpoints / checkpoint.BEST
        folders = dict.fromkeys([self.checkpoints, *([self.resume_path.parent] if self.resume_path else [])])
        paths = [path for each in folders for path in [each / checkpoint.BEST, *checkpoint.step_checkpoints(each)]]
        for path in [path for path in paths if path.name == checkpoint.BEST or checkpoint.step_of(path) == step]:
            try:
                if path.exists() and checkpoint.verify(path).step == step:
                    is_here = path.parent == self.checkpoints
                    path = path if is_here else checkpoint.copy_here(path, self.checkpoints)
                    if path.name != checkpoint.BEST:
                        self.link_best(step)
                    return True
            except StartError:
                raise
            except UserError as error:
                self.notes.append(str(error))
        if best.is_symlink():
            best.unlink()
        elif best.exists():  # of a later step: a copy, or of an earlier version
            shutil.move(best, self._aside() / best.name)
        if step >= 0:
            text = "the best checkpoint so far, of step %d, is gone: the next evaluation starts a new best"
            self.notes.append(text % step)
        return step < 0

    def _aside(self) -> Path:
        """The folder for checkpoints of steps after the one that this attempt resumes from."""
        aside = self.folder / f"superseded-{self.start.attempt}"
        aside.mkdir(exist_ok=True)
        return aside
