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
from utils.run.run_lock import LOCK_FILE, RunLock
from utils.settings.errors import StartError, UserError

DID_NOT_EXIST = ""  # stands for the new name of a folder that this start has created
KILLED_ERROR = "Every rank was killed."  # the error of an attempt that nobody survived to report


@dataclass(frozen=True)
class StartDecision:
    """What rank 0 has decided about the run folder. All values are plain, so that they can be sent to other ranks."""

    resume_from: str = ""  # the checkpoint
    is_completed: bool = False  # nothing is left to do, and nothing may be written
    # What a start that is refused later undoes: [old name, new name] of each folder of a run that was moved aside, and
    # [name, DID_NOT_EXIST] of each folder that was created for a run fetched from its mirror.
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
    """What a start finds in its folder."""

    config: TrainingConfig  # of this start
    launch_id: str  # of this start
    owner: dict[str, Any]  # lock.json of the attempt before
    status: dict[str, Any]  # status.json
    has_run: bool  # there are records or checkpoints

    @classmethod
    def inspect(cls, config: TrainingConfig, launch_id: str, owner: dict[str, Any]) -> ExistingRun:
        """Look at the files of the run folder and of the checkpoint folder."""
        has_records = (config.run_folder / "metrics.jsonl").exists()
        step_checkpoints = checkpoint.list_step_checkpoints(config.checkpoint_folder)
        best_checkpoints = [*config.checkpoint_folder.glob(checkpoint.BEST_NAME)]
        return cls(
            config=config,
            launch_id=launch_id,
            owner=owner,
            status=read_json(config.run_folder / "status.json"),
            has_run=any([has_records, step_checkpoints, best_checkpoints]),
        )

    @property
    def is_same_launch(self) -> bool:
        """Return whether the attempt before was one of this launch, which starts again."""
        return bool(self.launch_id) and self.owner.get("launch_id") == self.launch_id

    @property
    def wants_to_continue(self) -> bool:
        """Return whether this start asks to continue the run in the folder, which may be completed."""
        return self.has_run and (self.config.resume_from == "auto" or self.is_same_launch)

    @property
    def is_completed(self) -> bool:
        """Return whether this start asks to continue a completed run, and its settings do not train that longer."""
        has_ended = self.wants_to_continue and self.status.get("state") == "completed"
        return has_ended and not can_train_longer(vars(self.config), self.read_saved_config())

    @property
    def next_attempt(self) -> int:
        """Return 1 for a new run, else the number of the attempt before plus 1."""
        # with --resume_from auto, an attempt that was killed before its first record or checkpoint counts too
        was_training = self.config.resume_from == "auto" and self.owner.get("has_trained")
        if self.has_run or was_training:
            return self.owner.get("attempt", 0) + 1
        return 1

    def read_saved_config(self) -> dict[str, Any]:
        """Read the settings of the run from its latest valid checkpoint, since config.json may have been edited."""
        for path in reversed(checkpoint.list_step_checkpoints(self.config.checkpoint_folder)):
            with suppress(UserError):
                return checkpoint.read_checkpoint(path)[0]["config"]
        return read_json(self.config.run_folder / "config.json")

    def mark_killed(self) -> list[str]:
        """Write that every rank of the attempt before was killed, if none survived to write how the attempt ended.

        Returns:
            A note to log, or nothing.
        """
        # the attempt before has released its lock, so it cannot be running
        if self.status.get("state") != "running":
            return []
        self.status.update(state="failed", error=KILLED_ERROR, rank=0, host=self.owner.get("host"))
        with suppress(OSError):
            replace_json(self.config.run_folder / "status.json", self.status)
        return ["Every rank of the previous attempt was killed."]

    def find_checkpoint(self) -> tuple[Path | None, list[str]]:
        """Find the checkpoint to start from.

        Returns:
            Its path, or None if there is none, and notes to log.

        Raises:
            UserError: if it is not valid.
        """
        path: Path | None = None
        notes: list[str] = []
        if self.wants_to_continue:
            path, notes = checkpoint.find_latest_valid(self.config.checkpoint_folder)
        # the run's own checkpoint comes first: an earlier attempt of this launch may have started from the given one
        if path or self.config.resume_from in ("", "auto"):
            return path, notes
        path, new_notes = checkpoint.find_best_or_latest(Path(self.config.resume_from), prefer_best=False)
        checkpoint.verify_checkpoint(path)
        return path, notes + new_notes

    def refuse_to_start_over(self, path: Path | None) -> None:
        """Raise UserError if this start asks to continue a run and would begin a new one, since something is missing.

        Args:
            path: the checkpoint to start from.
        """
        config = self.config
        written = self.status.get("checkpoint")
        if self.wants_to_continue and written and not path:
            raise UserError(
                f"{config.checkpoint_folder} has no checkpoint, but the run has written {written}. Put this checkpoint"
                " back (is the disk mounted?), or start over with --overwrite instead of --resume_from auto."
            )

        backups = self.owner.get("aside")
        is_empty = not self.has_run and not self.is_same_launch
        if config.resume_from == "auto" and is_empty and backups:
            raise UserError(
                f"A start that was killed has moved the run of --run_dir {config.run_folder} to"
                f" {' and '.join(backups)}. Rename it to {config.run_folder}, or start over without --resume_from auto."
            )

    def refuse_to_replace(self, may_restart: bool) -> None:
        """Raise UserError if the run in the folder must not be moved aside.

        Args:
            may_restart: the launcher starts further attempts.
        """
        config = self.config
        folder = config.run_folder
        if may_restart and not self.launch_id:
            # a restart would move aside what the attempt before it has trained
            raise UserError(
                f"--run_dir {folder} holds a run, and a restart by torchrun would look like a new launch. Add"
                " --rdzv-id NAME to the flags of torchrun."
            )

        is_named = config.run_dir != DEFAULT_RUN_DIR or config.checkpoint_dir != ""
        if is_named and not config.overwrite:
            raise UserError(
                f"--run_dir {folder} holds a run already. Add --resume_from auto to continue it, or --overwrite to"
                f" rename it to {folder.name}.1 (.2, ...) and begin a new one, or give another --run_dir."
            )

        inside = []
        for name in ("init_from", "resume_from"):
            given = getattr(config, name)
            if given and Path(given).resolve().is_relative_to(folder.resolve()):
                inside.append(f"--{name} {given}")
        if inside:
            text = f"{' and '.join(inside)} is in the run that would be moved aside. Give another --run_dir."
            raise UserError(text)


def decide_start(config: TrainingConfig, host: str, launch_id: str, may_restart: bool) -> tuple[RunLock, StartDecision]:
    """Lock the folder and decide whether to continue the run in it, once its mirror has fetched it. Rank 0 calls this.

    If the start is refused here, the folders that it has created are deleted.

    Args:
        launch_id: common to all attempts of one launch; empty if unknown.
        may_restart: whether the launcher starts further attempts.

    Raises:
        UserError: if the folder holds another run, belongs to a running job, or cannot be written.
    """
    folder = config.run_folder
    checkpoint_folder = config.checkpoint_folder
    if config.track != "none" and not getattr(find_spec(config.track), "origin", None):  # extra: companions
        # a folder of that name is found as a namespace package, which has no origin
        raise UserError(
            f"--track {config.track} needs the package {config.track}, which is not installed."
            f" Run pip install {config.track}."
        )
    if Path.cwd().is_relative_to(folder.resolve()) or any(folder.glob(f"*/{LOCK_FILE}")):
        raise UserError(
            f"--run_dir {folder} contains the files of more than one run. Give a separate folder, e.g. runs/NAME."
        )

    created: list[list[str]] = []  # the folders that this start creates, as `restore_existing_run` takes them
    if not folder.exists():
        created = [[str(path), DID_NOT_EXIST] for path in (folder, checkpoint_folder) if not path.exists()]
    try:
        lock = _open_lock(folder, checkpoint_folder, host)
    except UserError:
        for created_folder, _ in reversed(created):
            with suppress(OSError):  # the folder has files of another start, which has locked it first
                os.rmdir(created_folder)
        raise
    try:
        lock, decision = _decide_locked(lock, config, host=host, launch_id=launch_id, may_restart=may_restart)
    except StartError:
        # another attempt may succeed, and continues with what has been fetched
        raise
    except UserError:
        restore_existing_run(created)
        raise
    if created and decision.attempt > 1:  # what was fetched into a new folder is deleted if this start is refused later
        decision = replace(decision, renamed_folders=created)
    return lock, decision


def _decide_locked(
    lock: RunLock, config: TrainingConfig, host: str, launch_id: str, may_restart: bool
) -> tuple[RunLock, StartDecision]:
    """Decide while the folder is locked.

    Returns:
        The lock, which is another one if the folder was moved aside, and the decision.
    """
    folder = config.run_folder
    checkpoint_folder = config.checkpoint_folder
    existing_run, mirror_decision = _inspect_with_mirror(lock, config, host=host, launch_id=launch_id)
    if existing_run.is_completed or mirror_decision.get("is_completed"):
        return lock, StartDecision(is_completed=True)

    notes = mirror_decision.get("notes", []) + existing_run.mark_killed()
    path, new_notes = existing_run.find_checkpoint()
    notes += [note for note in new_notes if note not in notes]
    existing_run.refuse_to_start_over(path)

    # a run goes on from its own checkpoint, and a checkpoint of another run (--resume_from PATH) begins a new one
    is_own = path is not None and path.resolve().parent == checkpoint_folder.resolve()
    if path and is_own:
        path = checkpoint_folder / path.name  # one spelling on all ranks
    if existing_run.has_run and not existing_run.wants_to_continue and not is_own:
        existing_run.refuse_to_replace(may_restart)
        renamed_folders = rename_existing_run(folder, checkpoint_folder)
        lock.close()
        lock = _open_lock(folder, checkpoint_folder, host)
        attempt = 1
        backups = [backup for _, backup in renamed_folders]
        text = f"The earlier run was moved to {' and '.join(backups)} ({describe_folder_size(backups)})."
        notes.append(f"{text} This command deletes the earlier run: rm -r {' '.join(backups)}")
    else:
        renamed_folders = []
        attempt = existing_run.next_attempt
        backups = existing_run.owner.get("aside", [])

    # `mark_training` writes the id of this launch, with which a restart continues the run; only a restart has it before
    inherited_launch_id = launch_id if existing_run.is_same_launch else ""
    lock.write(launch_id=inherited_launch_id, attempt=attempt, aside=backups)
    _remove_temporary_files(folder, checkpoint_folder)
    return lock, StartDecision(
        resume_from=str(path or ""),
        renamed_folders=renamed_folders,
        attempt=attempt,
        token=lock.token,
        launch_id=launch_id,
        notes=notes,
        mirror_decision=mirror_decision,
    )


def _inspect_with_mirror(
    lock: RunLock, config: TrainingConfig, host: str, launch_id: str
) -> tuple[ExistingRun, dict[str, Any]]:
    """Let the mirror, if there is one, fetch what the folder lacks, and look at the run in the folder.

    Returns:
        That run, and the decision of its mirror. The decision is empty if there is none.
    """
    existing_run = ExistingRun.inspect(config, launch_id, lock.previous_owner)
    mirror_decision: dict[str, Any] = {}
    if config.mirror and not existing_run.is_completed:  # extra: companions
        from utils.extras.companions.programs import call_program, create_companion_plan

        plan = create_companion_plan(config, rank=0, host=host, token=lock.token, launch_id=launch_id)
        mirror_decision = call_program("mirror", plan, f"--mirror {config.mirror}", "--first")
        existing_run = ExistingRun.inspect(config, launch_id, mirror_decision.get("owner") or lock.previous_owner)
    return existing_run, mirror_decision


def rename_existing_run(folder: Path, checkpoint_folder: Path) -> list[list[str]]:
    """Rename the folders of a run to NAME.1, or .2, and so on.

    Returns:
        The folders with their new names.

    Raises:
        UserError: if one of them cannot be renamed. All have their old names then.
    """
    folders = [folder]
    if not checkpoint_folder.is_relative_to(folder):
        folders = [checkpoint_folder, folder]
    number = 1
    while any(os.path.exists(f"{path}.{number}") for path in folders):
        number += 1
    renames = [[str(path), f"{path}.{number}"] for path in folders]
    try:
        for original, backup in renames:
            os.rename(original, backup)
    except OSError as error:
        restore_existing_run(renames)
        raise UserError(f"{original} cannot be moved aside ({error.strerror}). Give another --run_dir.") from None
    return renames


def restore_existing_run(renames: list[list[str]]) -> None:
    """Give the folders of an earlier run their old names, since this start was refused. What it has written is deleted.

    Args:
        renames: folders, each with its new name or DID_NOT_EXIST.
    """
    for original, backup in renames:
        existed = backup != DID_NOT_EXIST
        if existed and not os.path.exists(backup):
            continue  # the folder has its old name
        rejected = Path(f"{original}.rejected{TEMPORARY_SUFFIX}")
        with suppress(FileNotFoundError, NotADirectoryError):
            os.rename(original, rejected)  # other ranks may still write there
        if existed:
            os.rename(backup, original)
        shutil.rmtree(rejected, ignore_errors=True)


def describe_folder_size(folders: list[str]) -> str:
    """Return the gigabytes of all files in the folders, as text."""
    size = 0
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.is_file() and not path.is_symlink():
                size += path.stat().st_size
    return f"{size / 1e9:.1f} GB"


def _remove_temporary_files(folder: Path, checkpoint_folder: Path) -> None:
    """Delete the temporary files of an attempt that was killed."""
    left_over = [
        *folder.glob(f"*{TEMPORARY_SUFFIX}"),
        *folder.glob(f"samples/*{TEMPORARY_SUFFIX}"),
        *checkpoint_folder.glob(f"*{TEMPORARY_SUFFIX}"),
    ]
    for path in left_over:
        with suppress(OSError):  # NFS keeps the files that a process has open as .nfs*
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _open_lock(folder: Path, checkpoint_folder: Path, host: str) -> RunLock:
    """Create both folders and lock that of the run. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint_folder.mkdir(parents=True, exist_ok=True)
        return RunLock(folder, host)
    except OSError as error:
        kind = StartError if is_transient(error) else UserError
        raise kind(f"--run_dir {folder} cannot be written ({error.strerror}). Give a writable folder.") from None
