"""The decision of a start: continue the run in the folder, begin a new one, or move an earlier one aside."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config import DEFAULT_RUN_DIR, TrainingConfig, can_train_longer
from utils.checkpoint import format as checkpoint
from utils.files import TEMPORARY_SUFFIX, is_transient, read_json, replace_json
from utils.run.backup import DID_NOT_EXIST, describe_folder_size, rename_existing_run, restore_existing_run
from utils.run.run_lock import LOCK_FILE, RunLock
from utils.settings.errors import StartError, UserError

KILLED_ERROR = "every rank was killed"  # the error of an attempt that nobody survived to report


@dataclass(frozen=True)
class StartDecision:
    """What rank 0 has decided about the run folder. Plain values."""

    resume_from: str = ""  # the checkpoint
    is_completed: bool = False  # nothing is left to do, and nothing may be written
    # folders of an earlier run, each with its new name or DID_NOT_EXIST
    renamed_folders: list[list[str]] = field(default_factory=list)
    attempt: int = 1
    token: str = ""  # of the owner
    launch_id: str = ""
    notes: list[str] = field(default_factory=list)  # decisions to log
    mirror_decision: dict[str, Any] = field(default_factory=dict)  # of the mirror: what this attempt owns there
    # the ranks of each node that has a run folder of its own
    node_local_ranks: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class ExistingRun:
    """What a start finds in its folder. owner: lock.json of the attempt before."""

    config: TrainingConfig
    launch_id: str
    owner: dict[str, Any]
    status: dict[str, Any]
    has_run: bool  # records or checkpoints

    @classmethod
    def inspect(cls, config: TrainingConfig, launch_id: str, owner: dict[str, Any]) -> ExistingRun:
        folder, checkpoints = config.run_folder, config.checkpoint_folder
        saved = [*checkpoint.list_step_checkpoints(checkpoints), *checkpoints.glob(checkpoint.BEST_NAME)]
        holds_run = (folder / "metrics.jsonl").exists() or bool(saved)
        return cls(config, launch_id, owner, read_json(folder / "status.json"), holds_run)

    @property
    def is_same_launch(self) -> bool:
        return bool(self.launch_id) and self.owner.get("launch_id") == self.launch_id

    @property
    def is_continued(self) -> bool:
        return self.has_run and (self.config.resume_from == "auto" or self.is_same_launch)

    @property
    def is_completed(self) -> bool:
        """Whether this start would continue a completed run, and is not to train longer."""
        has_ended = self.is_continued and self.status.get("state") == "completed"
        return has_ended and not can_train_longer(vars(self.config), self.read_saved_config())

    def read_saved_config(self) -> dict[str, Any]:
        """The settings of the run: those of its latest valid checkpoint, since config.json may be edited."""
        for path in reversed(checkpoint.list_step_checkpoints(self.config.checkpoint_folder)):
            with suppress(UserError):
                return checkpoint.read_checkpoint(path)[0]["config"]
        return read_json(self.config.run_folder / "config.json")

    def mark_killed(self) -> list[str]:
        """Write how the attempt before has ended, if no rank survived to write it: its lock is free. Returns a note."""
        if self.status.get("state") != "running":
            return []
        self.status.update({"state": "failed", "error": KILLED_ERROR, "rank": 0, "host": self.owner.get("host")})
        with suppress(OSError):
            replace_json(self.config.run_folder / "status.json", self.status)
        return [f"the previous attempt: {KILLED_ERROR}"]

    def find_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The checkpoint to start from, if any, and notes to log. Raises UserError if it is not valid."""
        path, notes = checkpoint.find_latest_valid(self.config.checkpoint_folder) if self.is_continued else (None, [])
        if path or self.config.resume_from in ("", "auto"):
            return path, notes  # an earlier attempt of this launch may have started from the given one
        path, new_notes = checkpoint.find_best_or_latest(Path(self.config.resume_from), prefer_best=False)
        checkpoint.verify_checkpoint(path)
        return path, notes + new_notes

    def check_replacement(self, path: Path | None, is_replaced: bool, may_restart: bool) -> None:
        """Raises UserError if the run in the folder must stay as it is.

        Args:
            path: the checkpoint to start from.
            is_replaced: the run in the folder would be moved aside.
            may_restart: the launcher starts further attempts.
        """
        config, folder, is_new = self.config, self.config.run_folder, not (self.is_continued or self.is_same_launch)
        is_auto = config.resume_from == "auto"
        written = self.status.get("checkpoint")
        moved_to = self.owner.get("aside")
        is_named = config.run_dir != DEFAULT_RUN_DIR or config.checkpoint_dir != ""
        given = {name: getattr(config, name) for name in ("init_from", "resume_from")}
        inside = [f"{name}={path}" for name, path in given.items() if path and is_path_below(path, folder)]
        refusals = [
            (
                self.is_continued and written and not path,
                f"{config.checkpoint_folder}: has no checkpoint, but the run has written {written}; put it back (is the"
                " disk mounted?), or start over with --overwrite instead of --resume_from auto",
            ),
            (
                is_auto and is_new and moved_to,
                f"run_dir={folder}: its run was moved to {' and '.join(moved_to or ())} by a start that was killed;"
                " move it back, or start over without --resume_from auto",
            ),
            (
                is_replaced and may_restart and not self.launch_id,
                f"run_dir={folder}: holds a run, and restarts look like new launches; give torchrun --rdzv-id NAME",
            ),
            (
                is_replaced and is_named and not config.overwrite,
                f"run_dir={folder}: holds a run already; add --resume_from auto to continue it, --overwrite to replace"
                " it, or give another --run_dir",
            ),
            (
                is_replaced and inside,
                f"{', '.join(inside)}: is in the run that would be moved aside; give another --run_dir",
            ),
        ]
        for is_refused, text in refusals:
            if is_refused:
                raise UserError(text)


def decide_start(config: TrainingConfig, host: str, launch_id: str, may_restart: bool) -> tuple[RunLock, StartDecision]:
    """On rank 0: lock the folder and decide whether to continue the run in it, once its mirror has fetched it. A folder
    that did not exist before a start that is refused does not exist after it either.

    Args:
        launch_id: common to all attempts of one launch; empty if unknown.
        may_restart: whether the launcher starts further attempts.

    Raises:
        UserError: if the folder holds another run, belongs to a running job, or cannot be written.
    """
    folder, checkpoints = config.run_folder, config.checkpoint_folder
    if config.track != "none" and not getattr(find_spec(config.track), "origin", None):  # extra: companions
        raise UserError(f"track={config.track}: the package is missing; pip install {config.track}")
    if Path.cwd().is_relative_to(folder.resolve()) or any(folder.glob(f"*/{LOCK_FILE}")):
        raise UserError(f"run_dir={folder}: contains more than one run's files; give a separate folder, e.g. runs/NAME")
    folders = [] if folder.exists() else [folder, checkpoints]
    new = [[str(path), DID_NOT_EXIST] for path in folders if not path.exists()]
    try:
        lock = _open_lock(folder, checkpoints, host)
    except UserError:
        for new_folder, _ in reversed(new):
            with suppress(OSError):  # it has another start's files
                os.rmdir(new_folder)
        raise
    try:
        lock, start_decision = _decide_locked(lock, config, host, launch_id, may_restart)
    except StartError:  # another attempt continues with what has been fetched
        raise
    except UserError:
        restore_existing_run(new)
        raise
    if start_decision.attempt > 1 and not start_decision.renamed_folders:  # restored from the mirror
        start_decision = replace(start_decision, renamed_folders=new)
    return lock, start_decision


def _decide_locked(
    lock: RunLock, config: TrainingConfig, host: str, launch_id: str, may_restart: bool
) -> tuple[RunLock, StartDecision]:
    """The lock is another one if the folder was moved aside."""
    folder, checkpoints = config.run_folder, config.checkpoint_folder
    existing_run = ExistingRun.inspect(config, launch_id, lock.previous_owner)
    mirror_decision: dict[str, Any] = {}
    if config.mirror and not existing_run.is_completed:  # extra: companions
        from utils.extras.companions.programs import call_program, create_companion_plan

        plan = create_companion_plan(config, 0, host, lock.token, launch_id)
        mirror_decision = call_program("mirror", plan, f"mirror={config.mirror}", "--first")
        existing_run = ExistingRun.inspect(config, launch_id, mirror_decision.get("owner") or lock.previous_owner)
    if existing_run.is_completed or mirror_decision.get("is_completed"):
        return lock, StartDecision(is_completed=True)
    owner, backups = existing_run.owner, existing_run.owner.get("aside", [])
    moved: list[list[str]] = []
    notes = mirror_decision.get("notes", []) + existing_run.mark_killed()
    path, new_notes = existing_run.find_checkpoint()
    notes += [note for note in new_notes if note not in notes]
    is_here = path is not None and path.resolve().parent == checkpoints.resolve()
    if path and is_here:
        path = checkpoints / path.name  # one spelling on all ranks
    is_replaced = existing_run.has_run and not existing_run.is_continued and not is_here
    existing_run.check_replacement(path, is_replaced, may_restart)
    if is_replaced:
        moved = rename_existing_run(folder, checkpoints)
        lock.close()
        lock, owner, backups = _open_lock(folder, checkpoints, host), {}, [name for _, name in moved]
        text = (
            f"moved the earlier run to {' and '.join(backups)} ({describe_folder_size(backups)}); to delete it: rm -r "
        )
        notes.append(text + " ".join(backups))
    # an attempt that was killed before its first record or checkpoint counts too
    is_again = not moved and (existing_run.has_run or (config.resume_from == "auto" and owner.get("has_trained")))
    attempt = owner.get("attempt", 0) + 1 if is_again else 1
    # until `mark_training` a restart of this launch must not continue this run
    inherited = launch_id if existing_run.is_same_launch else ""
    lock.write(launch_id=inherited, attempt=attempt, aside=backups)
    _remove_temporary_files(folder, checkpoints)
    return lock, StartDecision(
        resume_from=str(path or ""),
        renamed_folders=moved,
        attempt=attempt,
        token=lock.token,
        launch_id=launch_id,
        notes=notes,
        mirror_decision=mirror_decision,
    )


def _remove_temporary_files(folder: Path, checkpoint_folder: Path) -> None:
    """Delete the temporary files of an attempt that was killed."""
    partial = [
        *folder.glob(f"*{TEMPORARY_SUFFIX}"),
        *folder.glob(f"samples/*{TEMPORARY_SUFFIX}"),
        *checkpoint_folder.glob(f"*{TEMPORARY_SUFFIX}"),
    ]
    for left_over in partial:
        with suppress(OSError):  # NFS keeps the files that a process has open as .nfs*
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()


def _open_lock(folder: Path, checkpoint_folder: Path, host: str) -> RunLock:
    """Create both folders and lock the run's. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint_folder.mkdir(parents=True, exist_ok=True)
        return RunLock(folder, host)
    except OSError as error:
        kind = StartError if is_transient(error) else UserError
        raise kind(f"run_dir={folder}: cannot be written ({error.strerror}); give a writable folder") from None


def is_path_below(path: str, folder: Path) -> bool:
    return Path(path).resolve().is_relative_to(folder.resolve())
