"""The run folder: its records, its status and its checkpoints. They are written only while this run owns it."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from utils.checkpoint import format as checkpoint
from utils.data.sampler import GlobalBatchSampler
from utils.files import AppendOnlyFile, drop_records, read_json, read_records, replace_json, replace_non_finite
from utils.logger import LOGGER_NAME, RANK_0_WARNING, error_text, format_count, join_first
from utils.run.backup import restore_existing_run
from utils.run.provenance import format_utc_time
from utils.run.run_lock import LOCK_FILE, RunLock
from utils.run.start_decision import StartDecision
from utils.settings.errors import StartError, TrainingError, UserError
from utils.training.log_window import StepRecord, are_all_steps_empty

START_EVENTS = ("started", "resumed")  # the first event of each attempt
SECONDS_BETWEEN_STATUS = 1.0  # while only the progress changes


class RunFolder:
    """The folder of one run, as seen by one rank. Records that only rank 0 may write are ignored on other ranks.

    An attempt calls `mark_running` (status.json), `rewind`, `restore_best`, `mark_training` (lock.json) and
    `record_start` (first event), in this order. The first status after `mark_running` makes the start final.

    Args:
        hosts: of all ranks.
        lock: on rank 0, and on the first rank of each node whose folder is its own.
        companions: the programs beside this rank, if there are any.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint_folder: Path,
        rank: int,
        hosts: tuple[str, ...],
        start_decision: StartDecision,
        lock: RunLock | None,
        companions: Any = None,
    ) -> None:
        self.folder = folder
        self.checkpoint_folder = checkpoint_folder
        self.rank = rank
        self.hosts = hosts
        self.start_decision = start_decision
        self.notes, self._renamed_folders = list(start_decision.notes), start_decision.renamed_folders
        self.resume_path = Path(start_decision.resume_from) if start_decision.resume_from else None
        self.is_main, self.host = rank == 0, hosts[rank]
        self.lock_file = folder / LOCK_FILE
        self.log_file = folder / "logs" / f"rank{rank}.log"
        self._lock, self.companions = lock, companions
        self._append_files: dict[str, AppendOnlyFile] = {}
        self._pending_start_event: list[dict[str, Any]] = []  # event of this attempt, until it is written
        self._status: dict[str, Any] = {}
        self._latest_checkpoint = ""  # the latest checkpoint of this attempt
        self._status_written_at = -math.inf  # when it was written
        self._previous_status: dict[str, Any] = {}  # of a continued run, until this attempt trains
        self._clock_offset = time.time() - time.monotonic()  # once: the system's clock may jump during the attempt

    @property
    def is_node_leader(self) -> bool:
        """Whether this rank writes what a run folder has once: rank 0, and the first rank of a node with its own."""
        return self.is_main or self.is_node_local

    @property
    def is_node_local(self) -> bool:
        """Whether this is the first rank of a node whose run folder is not rank 0's."""
        return bool(self._lock) and not self.is_main

    def _update_lock(self, **values: Any) -> None:
        """Write to lock.json, where a rank has a lock. From now on no failure undoes the start."""
        if self._lock:
            self._require_owner()
            decision = self.start_decision
            identity = {"launch_id": decision.launch_id, "attempt": decision.attempt}
            self._lock.write(**identity, has_trained=True, **values)
        self._renamed_folders = []

    def mark_training(self) -> None:
        """The folder is at the step from which this attempt trains: from now on a restart of this launch continues the
        run in it."""
        self._update_lock()

    def mark_ended(self) -> None:
        """Tell the programs beside this rank how this attempt has ended, which status.json has already."""
        if self.companions:
            with suppress(OSError):  # a full disk
                self._update_lock(ended=self._status.get("state", ""))

    def is_owner(self) -> bool:
        """Whether no other job has taken over the folder while this one was suspended or cut off."""
        return read_json(self.lock_file).get("token", self.start_decision.token) == self.start_decision.token

    def _require_owner(self) -> None:
        """Call before every write: a later owner would take it for its own. A lock.json that cannot be read counts as
        this owner's, since a failing storage must not end training; `check_owner` is strict, as a save is tried again.
        """
        if not self.is_owner():
            raise TrainingError(f"run_dir={self.folder}: another job has taken over this run; end this one")

    def check_owner(self) -> None:
        """Call before a checkpoint gets its name. Raises TrainingError if another job owns the folder, or OSError."""
        try:
            token = json.loads(self.lock_file.read_text(encoding="utf-8"))["token"]
        except (ValueError, KeyError, TypeError):
            raise OSError(5, f"{self.lock_file} cannot be read") from None
        if token != self.start_decision.token:
            raise TrainingError(f"{self.checkpoint_folder}: another job has taken over this run; end this one")

    def end_companions(self) -> None:
        """After a failure."""
        if self.companions:
            self.companions.stop()

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.close()

    # ---- records ----

    def record(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append a record to metrics.jsonl; non-finite numbers become null."""
        values = replace_non_finite({"kind": kind} | values)
        if self.is_main:
            self._append_records("metrics.jsonl", *self._pending_start_event, values)
            self._pending_start_event = []
        return values

    def record_event(self, event: str, step: int, **values: Any) -> None:
        self.record("event", event=event, step=step, **values, time=self.format_timestamp())

    def format_timestamp(self) -> str:
        """The time as in records."""
        return format_utc_time(self._clock_offset + time.monotonic())

    def record_start(self, started_at: float, position: dict[str, int], **values: Any) -> None:
        """Write the first event of this attempt, which no later one drops, and the status.

        Args:
            started_at: when its process started, by time.monotonic.
            position: epoch, step and samples_seen.
        """
        before = {f"previous_{name}": value for name, value in self._status.pop("previous", {}).items()}
        first = (
            position
            | values
            | before
            | {"seconds": round(time.monotonic() - started_at, 3), "time": self.format_timestamp()}
        )
        self._pending_start_event = [{"kind": "event", "event": START_EVENTS[bool(self.resume_path)]} | first]
        if self.is_main and (self.folder / "metrics.jsonl").exists():
            # else with the next record: a run without one begins again
            self._append_records("metrics.jsonl", *self._pending_start_event)
            self._pending_start_event = []
        self.write_status("running", **position)
        self._status_written_at = -math.inf  # the first step is written at once

    def record_skipped(self, skipped: list[StepRecord], sampler: GlobalBatchSampler) -> None:
        """Record skipped optimizer steps, with the samples of their global batches."""
        for skip in skipped:
            indices = sampler.epoch_order(skip.epoch)[skip.first_sample : skip.first_sample + skip.samples].tolist()
            self.record_event("skipped_step", skip.step, epoch=skip.epoch + 1, indices=indices, reason=skip.skip_reason)
        if skipped:
            steps = join_first([str(skipped_step.step) for skipped_step in skipped], 5)
            text = "skipped %s with a non-finite loss or gradient: %s"
            text = "skipped %s without targets: %s" if are_all_steps_empty(skipped) else text
            self.warn(text, format_count(skipped, "optimizer step"), steps)

    def warn(self, text: str, *values: Any) -> None:
        logging.getLogger(LOGGER_NAME).log(RANK_0_WARNING, text, *values)

    def _append_records(self, name: str, *records: dict[str, Any]) -> None:
        self._require_owner()
        if name not in self._append_files:
            self._append_files[name] = AppendOnlyFile(self.folder / name)
        for record in records:
            self._append_files[name].append(json.dumps(record))

    def record_samples(self, epoch: int, step: int, indices: list[int]) -> None:
        """Append the samples that this rank computed in a committed step to its own file, on every rank."""
        self._append_records(f"samples/rank{self.rank}.jsonl", {"epoch": epoch, "step": step, "indices": indices})

    def mark_running(self) -> None:
        """Write to status.json that an attempt is running."""
        before = read_json(self.folder / "status.json") if self.start_decision.attempt > 1 else {}
        status = {"epoch": 0, "step": 0, "samples_seen": 0, "checkpoint": None} | before
        progress = {name: status[name] for name in ("epoch", "step", "samples_seen", "checkpoint")}
        # of the last attempt that began to train: this one may not
        last_attempt = {name: before[name] for name in ("state", "step", "time") if name in before}
        self.write_status(
            "running", **progress, previous=before.get("previous") or last_attempt, error=None, rank=None, host=None
        )
        self._previous_status = before if self.is_main else {}

    def update_progress(self, **values: Any) -> None:
        """`write_status` of a running attempt, for values that change all the time: written at most once a second."""
        if time.monotonic() - self._status_written_at < SECONDS_BETWEEN_STATUS:
            self._status |= values
        else:
            self.write_status("running", **values)

    def write_status(self, state: str, **values: Any) -> None:
        """Replace status.json: the state, and the values that changed since the last call."""
        self._previous_status, self._status_written_at = {}, time.monotonic()
        is_running = state == "running"
        if self.is_main or (self.is_node_local and not is_running):  # each node's launcher reads how it ended
            self._require_owner()
            self._status |= {"state": state} | values | {"time": self.format_timestamp()}
            if is_running and not self.lock_file.exists():
                return  # the file system is unmounted, and nothing belongs below its mount point
            with suppress(OSError) if is_running else nullcontext():  # a full disk: training continues
                replace_json(self.folder / "status.json", self._status, fsync=not is_running)

    def set_latest_checkpoint(self, path: Path) -> None:
        """Call when a checkpoint is on the disk, in any thread: a failure names it, and does not read the folder."""
        self._latest_checkpoint = str(path)

    def report_failure(self, error: BaseException, step: int = 0) -> None:
        """Undo a start that was refused, or write that the run failed: rank 0 an error that all ranks have, else the
        first rank that finds the run still running.

        step: the last one that this rank has completed.
        """
        is_of_all = getattr(error, "rank", None) is not None and not isinstance(error, TrainingError)
        # else the status belongs to another job, or is rank 0's
        if self.is_owner() and (self.is_main or not is_of_all) and not self._undo_start(error):
            self._write_failure(error, step)
            if not self.is_main:  # rank 0 may have been writing its own status just then; it waits for this rank now
                time.sleep(0.3)
                self._write_failure(error, step)
        self.end_companions()

    def _undo_start(self, error: BaseException) -> bool:
        """Whether this start was refused and had changed the folder: it is then as before."""
        may_continue = isinstance(error, StartError)  # with what has been fetched into a new folder
        if not isinstance(error, UserError):
            return False
        if moved := [pair for pair in self._renamed_folders if pair[1] or not may_continue]:
            restore_existing_run(moved)
        elif self._previous_status:
            with suppress(OSError):
                replace_json(self.folder / "status.json", self._previous_status)
        return bool(moved or self._previous_status)

    def _write_failure(self, error: BaseException, step: int) -> None:
        path = self.folder / "status.json"
        status = read_json(path)
        if status.get("state") != "running":
            return
        rank, host = getattr(error, "rank", None), getattr(error, "host", None)
        origin = {"rank": self.rank, "host": self.host} if rank is None else {"rank": rank, "host": host}
        latest = self._latest_checkpoint or status.get("checkpoint")
        reached = {"step": max(step, status.get("step", 0)), "checkpoint": latest}
        status |= {"state": "failed", "error": error_text(error)} | reached | origin | {"time": self.format_timestamp()}
        text = "the run failed after step %d; its latest checkpoint is %s"
        logging.getLogger(LOGGER_NAME).info(text, reached["step"], latest or "missing")
        try:
            replace_json(path, status)
        except OSError:
            with suppress(OSError), path.open("r+") as file:  # needs no free block or inode
                file.write(json.dumps(status))
                file.truncate()

    def read_records(self, kind: str = "") -> list[dict[str, Any]]:
        """Those of this kind, or all."""
        return [record for *_, record in read_records(self.folder / "metrics.jsonl") if kind in ("", record["kind"])]

    def write_json(self, name: str, value: Any) -> None:
        if self.is_main:
            self._require_owner()
            replace_json(self.folder / name, value)

    # ---- checkpoints: on rank 0 ----

    def link_best(self, step: int) -> None:
        """Make best.pt a link to the checkpoint of this step. Raises OSError, also if there is none."""
        self._require_owner()
        paths = checkpoint.list_step_checkpoints(self.checkpoint_folder)
        source = next((path for path in paths if checkpoint.parse_step(path) == step), None)
        if source is None:
            raise OSError(2, f"there is no checkpoint of step {step}")
        checkpoint.link_best(source)

    def rewind(self, step: int, is_evaluated: bool = False, has_test: bool = False) -> None:
        """Before a resumed run writes: drop records that it will write again and move checkpoints of later steps aside.

        is_evaluated: the evaluation at this step will not be repeated. has_test: a test set is evaluated at the end.
        """
        self._require_owner()
        beyond = [
            path
            for path in checkpoint.list_step_checkpoints(self.checkpoint_folder)
            if checkpoint.parse_step(path) > step
        ]
        if beyond:  # before the records: after a kill in between nothing resumes from a later step
            aside = self._superseded_dir()
            for path in beyond:
                shutil.move(path, aside / path.name)
            self.notes.append(
                f"moved checkpoints of steps after {step} to {aside}: {', '.join(moved.name for moved in beyond)}"
            )

        def is_kept(record: dict[str, Any]) -> bool:
            # the time of every attempt counts (utils/report/goodput.py)
            if record.get("event") in START_EVENTS:
                return True
            if has_test and record.get("split") == "test":  # made at the end of a shorter run, with an earlier step
                return False
            is_of_evaluation = record["kind"] == "eval" or record.get("event") in ("best", "evaluation")
            return record["step"] < step or (record["step"] == step and (is_evaluated or not is_of_evaluation))

        # after a train record, no record of an earlier step is dropped; steps of other records may go back
        drop_records(
            self.folder / "metrics.jsonl", is_kept, lambda record: record["kind"] == "train" and record["step"] < step
        )
        for path in self.folder.glob("samples/rank*.jsonl"):
            drop_records(path, lambda record: record["step"] <= step, lambda record: record["step"] < step)

    def restore_best(self, step: int) -> bool:
        """Make best.pt the checkpoint of this step again, from this folder or the resumed one's. Whether it succeeded.

        step: of the best evaluation so far; below 0 if there was none.
        """
        self._require_owner()
        best = self.checkpoint_folder / checkpoint.BEST_NAME
        folders = dict.fromkeys([self.checkpoint_folder, *([self.resume_path.parent] if self.resume_path else [])])
        paths = [
            path
            for folder in folders
            for path in [folder / checkpoint.BEST_NAME, *checkpoint.list_step_checkpoints(folder)]
        ]
        for path in [
            path for path in paths if path.name == checkpoint.BEST_NAME or checkpoint.parse_step(path) == step
        ]:
            try:
                if path.exists() and checkpoint.verify_checkpoint(path).step == step:
                    is_here = path.parent == self.checkpoint_folder
                    path = path if is_here else checkpoint.copy_checkpoint(path, self.checkpoint_folder)
                    if path.name != checkpoint.BEST_NAME:
                        self.link_best(step)
                    return True
            except StartError:
                raise
            except UserError as error:
                self.notes.append(str(error))
        if best.is_symlink():
            best.unlink()
        elif best.exists():  # of a later step: a copy, or of an earlier version
            shutil.move(best, self._superseded_dir() / best.name)
        if step >= 0:
            text = "the best checkpoint so far, of step %d, is gone: the next evaluation starts a new best"
            self.notes.append(text % step)
        return step < 0

    def copy_best(self) -> None:
        """Copy the best checkpoint aside: call it before a new best begins, which supersedes it. Raises OSError.

        On storage without links, `restore_best` moves it.
        """
        best = self.checkpoint_folder / checkpoint.BEST_NAME
        if best.is_symlink() and best.exists():
            kept = checkpoint.copy_checkpoint(best, self._superseded_dir())
            self.notes.append(f"the best checkpoint so far is kept as {kept}")

    def _superseded_dir(self) -> Path:
        """The folder for checkpoints of steps after the one that this attempt resumes from."""
        superseded_dir = self.folder / f"superseded-{self.start_decision.attempt}"
        superseded_dir.mkdir(exist_ok=True)
        return superseded_dir
