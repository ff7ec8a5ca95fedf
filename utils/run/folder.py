"""The run's folder: who owns it, whether a run in it is continued, and the records that people and programs read."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import DEFAULT_RUN_DIR, TrainingConfig, TrainingError, UserError
from utils.checkpoint import format as checkpoint
from utils.files import TEMPORARY, LinesFile, keep_lines, read_lines, replace_json
from utils.run.lock import NAME as CLAIM
from utils.run.lock import Claim, strikes_of
from utils.run.provenance import now
from utils.run.watchdog import look_twice

FILES = (
    "config.json",
    "provenance.json",
    "code.zip",
    "status.json",
    "metrics.jsonl",
    "summary.json",
    "ledger.json",
    "eval-*.json",
)
FILES += (
    "tensorboard/events.out.*",
    "logs/rank*.log",
    "traces/rank*.json.gz",
    "traces/flight-*",
    "samples/rank*.jsonl",
    "superseded-*/*.pt",
)
FILES += ("hang-*.txt",)
CHECKPOINTS = ("step_*.pt", checkpoint.BEST)
SECONDS_BETWEEN_STATUS = 1.0  # while it says no more than how far training is


@dataclass
class Run:
    """The folder of one run, as one rank sees it. What rank 0 alone may write, the other ranks pass over in silence."""

    folder: Path
    checkpoints: Path
    rank: int
    hosts: tuple[str, ...]  # of all ranks
    resume_path: Path | None = None  # the checkpoint to start from
    is_completed: bool = False  # nothing is left to do, and nothing may be written
    is_replacing: bool = False  # another run is in the folder, until `make_room`
    attempt: int = 1
    claim_number: int = 0
    strikes: list[dict[str, Any]] = field(default_factory=list)  # attempts in a row that ended at the same step
    notes: list[str] = field(default_factory=list)  # what was decided while there was no logger yet
    _claim: Claim | None = None
    _kept: dict[str, Any] = field(default_factory=dict)  # with the claim
    _files: dict[str, LinesFile] = field(default_factory=dict)
    _status: dict[str, Any] = field(default_factory=dict)
    _status_at: float = -math.inf  # when it was written
    # of a continued run, until it is settled that it goes on
    _status_before: dict[str, Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def watch_folder(self) -> Path:
        return self.folder / "watch"

    @property
    def claim_file(self) -> Path:
        return self.folder / CLAIM

    @property
    def log_file(self) -> Path:
        return self.folder / "logs" / f"rank{self.rank}.log"

    # ---- the claim ----

    def claim(self, config: TrainingConfig, launch_id: str, may_restart: bool) -> None:
        """On rank 0: own the folder, and decide whether the run in it is continued.

        Args:
            launch_id: common to all attempts of one launch; empty where nobody knows.
            may_restart: whether the launcher starts further attempts.

        Raises:
            UserError: when the folder holds another run, belongs to a running job, or cannot be written.
        """
        if Path.cwd().is_relative_to(self.folder.resolve()) or any(self.folder.glob(f"*/{CLAIM}")):
            raise UserError(
                f"run_dir={self.folder}: holds other things than one run; give a folder of the run's own, runs/NAME say"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._claim = Claim(self.folder, self.host)
        except OSError as error:
            raise UserError(
                f"run_dir={self.folder}: cannot be written ({error.strerror}); give a folder that can"
            ) from None
        owner = self._claim.before
        holds_run = (self.folder / "metrics.jsonl").exists() or any(self.checkpoints.glob("*.pt"))
        is_same_launch = bool(launch_id) and owner.get("launch_id") == launch_id
        given = Path(config.resume_from) if config.resume_from not in ("", "auto") else None
        is_continued = holds_run and (config.resume_from == "auto" or is_same_launch)
        if is_continued:
            status = _read_json(self.folder / "status.json")
            self.is_completed = status.get("state") == "completed"
            if self.is_completed:
                return
            # else a person looked at it, or sends a new job: torchrun was asked to end
            if not owner.get("has_diagnosed"):
                self.strikes = strikes_of(owner, status, self.watch_folder)
            self.resume_path, passed_over = checkpoint.newest_whole(self.checkpoints, self._claim.is_ours)
            self.notes += passed_over
        if given and not self.resume_path:  # else an earlier attempt of this launch has started from it
            checkpoint.verify(given)
            self.resume_path = given
        if holds_run and not is_continued and not (given and given.resolve().parent == self.checkpoints.resolve()):
            if may_restart and not launch_id:
                raise UserError(
                    f"run_dir={self.folder}: holds a run, and whether this restarts it cannot be known; give torchrun"
                    " --rdzv-id NAME"
                )
            if not config.overwrite and (config.run_dir != DEFAULT_RUN_DIR or config.checkpoint_dir):
                raise UserError(
                    f"run_dir={self.folder}: holds a run already; "
                    "add --resume_from auto to continue it, --overwrite to replace it, or give another --run_dir"
                )
            self.is_replacing = True
        # killed before it had anything to keep
        is_again = holds_run or (config.resume_from == "auto" and owner.get("has_trained"))
        self.attempt = owner.get("attempt", 0) + 1 if is_again and not self.is_replacing else 1
        self.claim_number = self._claim.number
        # until `own` the launch has made nothing of what is here: a restart must not go on from that
        self._kept = {"launch_id": launch_id, "attempt": self.attempt, "strikes": self.strikes}
        self._claim.take(
            self.checkpoints,
            **self._kept | {"launch_id": launch_id if is_same_launch and not self.is_replacing else ""},
        )
        for left_over in [*self.folder.glob(f"*{TEMPORARY}"), *self.checkpoints.glob(f"*{TEMPORARY}")]:
            left_over.unlink()
        for left_over in self.watch_folder.glob("*"):  # of ranks that this attempt may not have
            left_over.unlink()

    def own(self) -> None:
        """On rank 0, once the run is about to train: a restart of this launch goes on from what it finds in the
        folder."""
        self._claim.keep(**self._kept, has_trained=True)

    def say_diagnosis(self) -> None:
        """On rank 0: the run was stopped since it ends at the same step again and again. Another launch may try
        again."""
        self._claim.keep(**self._kept, has_trained=True, has_diagnosed=True)

    def make_room(self, config: TrainingConfig) -> None:
        """On rank 0, once nothing more can be refused: delete the run that the folder holds, or move it aside."""
        if config.overwrite:
            # a kill must leave nothing to go on from
            for folder, patterns in (
                (self.checkpoints, CHECKPOINTS),
                (self.folder, FILES),
            ):
                for path in [path for pattern in patterns for path in folder.glob(pattern)]:
                    path.unlink()
            self.notes.append(f"replaced the run that {self.folder} held")
        else:
            number = next(
                n for n in range(1, 1_000_000) if not self.folder.with_name(f"{self.folder.name}.{n}").exists()
            )
            aside = self.folder.with_name(f"{self.folder.name}.{number}")
            self.folder.rename(aside)
            self._claim.close()
            self.checkpoints.mkdir(parents=True)
            with suppress(OSError):  # the ranks write into these files already
                (aside / self.watch_folder.name).rename(self.watch_folder)
            self._claim = Claim(self.folder, self.host)
            self._claim.number = self.claim_number
            self.notes.append(f"moved the earlier run aside: it is now in {aside}")

    def is_ours(self) -> bool:
        """Whether no other job has taken over the folder, while this one was stopped or cut off."""
        held = self._claim.read() if self._claim else _read_json(self.claim_file)
        return not self.claim_number or held.get("number", self.claim_number) == self.claim_number

    def _check(self) -> None:
        """Before anything is written that a later owner would take for its own."""
        if not self.is_ours():
            raise TrainingError(f"run_dir={self.folder}: another job has taken over this run; end this one")

    def close(self) -> None:
        """Let go of the folder."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    # ---- records ----

    def record(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append a record to metrics.jsonl; a number that is not finite becomes null."""
        values = {"kind": kind} | {name: _finite(value) for name, value in values.items()}
        if self.is_main:
            self._append("metrics.jsonl", values)
        return values

    def _append(self, name: str, values: dict[str, Any]) -> None:
        self._check()
        if name not in self._files:
            self._files[name] = LinesFile(self.folder / name)
        self._files[name].append(json.dumps(values))

    def record_samples(self, epoch: int, step: int, indices: list[int]) -> None:
        """Append what this rank computed in a committed step to its own file; written on every rank."""
        self._append(f"samples/rank{self.rank}.jsonl", {"epoch": epoch, "step": step, "indices": indices})

    def begin(self) -> None:
        """Say in status.json that an attempt is running."""
        self.is_replacing = False
        path = self.folder / "status.json"
        before = _read_json(path) if self.attempt > 1 else {}
        where = {"epoch": 0, "step": 0, "samples_seen": 0, "checkpoint": None}
        self.status(
            "running",
            **{name: before.get(name, value) for name, value in where.items()},
            error=None,
            rank=None,
            host=None,
        )
        self._status_before = before if self.is_main else {}

    def progress(self, **values: Any) -> None:
        """As `status` of a run that goes on, for what changes all the time: on the disk once a second at most."""
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
            if is_running and not self.claim_file.exists():
                return  # the file system is gone, and nothing belongs below its mount point
            with suppress(OSError) if is_running else nullcontext():  # a full disk: training goes on
                replace_json(self.folder / "status.json", self._status, is_flushed=not is_running)

    def lost_ranks(self) -> TrainingError | None:
        """After a collective failed since a peer was gone: which rank it was that went without a word, as the watch
        shows it."""
        places, standing, _ = look_twice(self.watch_folder, len(self.hosts))
        if not standing:
            return None
        rank, place = min(standing), places[min(standing)]
        where = f" in {place.phase} of step {place.step}" if place else ""
        more = f", and {len(standing) - 1} more" if len(standing) > 1 else ""
        remedy = (
            "look for the kernel's word on memory (dmesg; then fewer --num_workers, --activation_checkpointing, "
            "or a new run with a smaller --batch_size) or the node's state, then --resume_from auto"
        )
        return TrainingError(
            f"rank {rank} on {self.hosts[rank]} was killed or cut off{where}{more}; {remedy}", rank, self.hosts[rank]
        )

    def failed(self, error: BaseException) -> None:
        """Say in status.json that the run failed; for the rank that notices first, whichever it is."""
        if self.is_replacing or not self.is_ours():
            return  # the status is that of another run, or of another job
        if getattr(error, "rank", None) is not None and not self.is_main and not isinstance(error, TrainingError):
            return  # all ranks have this error: rank 0 writes it
        path = self.folder / "status.json"
        if isinstance(error, UserError) and self._status_before:  # the run is what it was
            with suppress(OSError):
                replace_json(path, self._status_before)
            return
        text = str(error).strip() or type(error).__name__
        rank, host = getattr(error, "rank", None), getattr(error, "host", None)
        where = {"rank": self.rank, "host": self.host} if rank is None else {"rank": rank, "host": host}
        for is_second_look in (False, True):
            if is_second_look:
                # rank 0, which may have been writing its own status just then, waits for this rank by now
                time.sleep(0.3)
            status = _read_json(path)
            if status.get("state") == "running":
                with suppress(OSError):  # the error itself must come through
                    replace_json(path, status | {"state": "failed", "error": text} | where | {"time": now()})
            if self.is_main:
                break

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_lines(self.folder / "metrics.jsonl") if record["kind"] == kind]

    def write_json(self, name: str, value: Any) -> None:
        if self.is_main:
            self._check()
            replace_json(self.folder / name, value)

    # ---- checkpoints: on rank 0 ----

    def link_best(self, step: int) -> bool:
        """Make best.pt the step's own checkpoint, where there is one; whether there is. Raises OSError."""
        source = checkpoint.step_path(self.checkpoints, step)
        self._check()
        if source.exists():
            _link(source, self.checkpoints / checkpoint.BEST)
        return source.exists()

    def rewind(self, step: int, is_evaluated: bool = False) -> None:
        """Before a resumed run writes: drop records that it will write again, and set aside checkpoints from beyond its
        step.

        Args:
            is_evaluated: an evaluation at this step is behind it, and not made again.
        """

        beyond = [
            path
            for path in checkpoint.step_checkpoints(self.checkpoints)
            if path > checkpoint.step_path(self.checkpoints, step)
        ]
        best = self.checkpoints / checkpoint.BEST
        if best.exists():
            try:
                is_beyond = checkpoint.verify(best).step > step
            except UserError as refused:
                self.notes.append(str(refused))
                is_beyond = True
            beyond += [best] * is_beyond
        if beyond:  # before the records: a kill in between leaves nothing from beyond the step to go on from
            aside = self.folder / f"superseded-{self.attempt}"
            aside.mkdir(exist_ok=True)
            for path in beyond:
                shutil.move(path, aside / path.name)
            self.notes.append(
                f"moved {', '.join(path.name for path in beyond)}, not of the run up to step {step}, to {aside}"
            )
        is_test_apart = any(record["step"] == step and record["split"] == "val" for record in self.records("eval"))

        def is_kept(record: dict[str, Any]) -> bool:
            is_of_evaluation = record["kind"] == "eval" or record.get("event") == "best"
            is_made_again = not is_evaluated or (is_test_apart and record.get("split") == "test")
            return record["step"] < step or (record["step"] == step and not (is_of_evaluation and is_made_again))

        keep_lines(self.folder / "metrics.jsonl", is_kept)
        for path in self.folder.glob("samples/rank*.jsonl"):
            keep_lines(path, lambda r: r["step"] <= step)

    def restore_best(self, step: int) -> bool:
        """Make best.pt the checkpoint of this step again, from this folder or from that of the checkpoint resumed from.
        Whether it is.

        step: of the best evaluation so far; below 0 where there was none.
        """
        if step < 0:
            return True
        best = self.checkpoints / checkpoint.BEST
        folders = dict.fromkeys([self.checkpoints, self.resume_path.parent] if self.resume_path else [self.checkpoints])
        for path in [
            each for folder in folders for each in (folder / checkpoint.BEST, checkpoint.step_path(folder, step))
        ]:
            try:
                if (
                    path.exists()
                    and (seal := checkpoint.verify(path)).step == step
                    and (path.parent != self.checkpoints or self._claim.is_ours(seal))
                ):
                    if path != best:
                        _link(path, best)
                    return True
            except UserError as refused:
                self.notes.append(str(refused))
        self.notes.append(f"the best checkpoint so far, of step {step}, is gone: the best is looked for anew")
        return False


def _link(source: Path, target: Path) -> None:
    """Let `target` be the same file, or a copy of it where there are no links."""
    temporary = target.with_name(target.name + TEMPORARY)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(source, temporary)
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # of two names of one file a rename leaves both


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
