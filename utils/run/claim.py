"""Whether a start continues the run in its folder, begins a new one, or moves an earlier run aside."""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config import DEFAULT_RUN_DIR, StartError, TrainingConfig, UserError
from utils.checkpoint import format as checkpoint
from utils.files import TEMPORARY, may_pass, read_json, replace_json
from utils.programs import ask
from utils.run.lock import KILLED, RunLock, repeated_failures
from utils.run.lock import NAME as LOCK

NOTHING = ""  # what a folder was before this start


@dataclass(frozen=True)
class Start:
    """How an attempt starts, as decided by rank 0. Plain values."""

    resume_from: str = ""  # the checkpoint
    is_completed: bool = False  # nothing is left to do, and nothing may be written
    moved: list[list[str]] = field(default_factory=list)  # folders of an earlier run, each with its new name or NOTHING
    attempt: int = 1
    token: str = ""  # of the owner
    launch_id: str = ""
    failures: list[dict[str, Any]] = field(default_factory=list)  # attempts in a row that got no further
    notes: list[str] = field(default_factory=list)  # decisions to log
    decision: dict[str, Any] = field(default_factory=dict)  # of the mirror: what this attempt owns there
    apart: list[list[int]] = field(default_factory=list)  # the ranks of each node that has a run folder of its own


def claim(config: TrainingConfig, host: str, launch_id: str, may_restart: bool) -> tuple[RunLock, Start]:
    """`decide`; a run folder that did not exist before a start that is rejected does not exist after it either."""
    if config.track != "none" and not getattr(find_spec(config.track), "origin", None):  # a folder has none
        raise UserError(f"track={config.track}: the package is missing; pip install {config.track}")
    places = [] if config.run_folder.exists() else [config.run_folder, config.checkpoint_folder]
    new = [[str(place), NOTHING] for place in places if not place.exists()]
    try:
        lock, start = decide(config, host, launch_id, may_restart)
    except StartError:  # another attempt continues with what has been fetched
        raise
    except UserError:
        move_back(new)
        raise
    is_restored = start.attempt > 1  # from the mirror
    return lock, replace(start, moved=start.moved or (new if is_restored else []))


def decide(config: TrainingConfig, host: str, launch_id: str, may_restart: bool) -> tuple[RunLock, Start]:
    """On rank 0: lock the folder and decide whether to continue the run in it, once its mirror has fetched it.

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
    decision: dict[str, Any] = {}
    if config.mirror and not is_completed(config, lock.before, launch_id):
        plan = plan_of(config, 0, host, lock.token, launch_id)
        decision = ask("mirror", plan, f"mirror={config.mirror}", "--first")
        if decision.get("is_completed"):
            return lock, Start(is_completed=True)
    owner = decision.get("owner") or lock.before
    status = read_json(folder / "status.json")
    notes: list[str] = decision.get("notes", [])
    if status.get("state") == "running":  # no rank survived to write it: the lock was free
        notes.append(f"the previous attempt: {KILLED}")
        status |= {"state": "failed", "error": KILLED, "rank": 0, "host": owner.get("host")}
        with suppress(OSError):
            replace_json(folder / "status.json", status)
    holds_run = has_run(folder, checkpoints)
    is_same_launch = bool(launch_id) and owner.get("launch_id") == launch_id
    given = Path(config.resume_from) if config.resume_from not in ("", "auto") else None
    is_continued = holds_run and (config.resume_from == "auto" or is_same_launch)
    if is_completed(config, owner, launch_id):
        return lock, Start(is_completed=True)
    path, aside = None, owner.get("aside", [])
    failures: list[dict[str, Any]] = []
    moved: list[list[str]] = []
    if is_continued:
        failures = repeated_failures(owner, status)
        path, skipped = checkpoint.latest_valid(checkpoints)
        notes += [each for each in skipped if each not in notes]
        if status.get("checkpoint") and not (path or given):
            raise UserError(
                f"{checkpoints}: has no checkpoint, but the run has written {status['checkpoint']}; put it back (is the"
                " disk mounted?), or start over with --overwrite instead of --resume_from auto"
            )
    elif config.resume_from == "auto" and aside and not is_same_launch:
        raise UserError(
            f"run_dir={folder}: its run was moved to {' and '.join(aside)} by a start that was killed; move it back, or"
            " start over without --resume_from auto"
        )
    if given and not path:  # else an earlier attempt of this launch has already started from it
        path, notes = checkpoint.best_or_latest(given, prefers_best=False)
        checkpoint.verify(path)
    if holds_run and not is_continued and not (given and path and path.resolve().parent == checkpoints.resolve()):
        if may_restart and not launch_id:
            raise UserError(
                f"run_dir={folder}: holds a run, and restarts look like new launches; give torchrun --rdzv-id NAME"
            )
        if not config.overwrite and (config.run_dir != DEFAULT_RUN_DIR or config.checkpoint_dir):
            raise UserError(
                f"run_dir={folder}: holds a run already; "
                "add --resume_from auto to continue it, --overwrite to replace it, or give another --run_dir"
            )
        for name, used in (("init_from", config.init_from), ("resume_from", config.resume_from)):
            if used and Path(used).resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{name}={used}: is in the run that would be moved aside; give another --run_dir")
        moved = move_aside(folder, checkpoints)
        lock.close()
        folder.mkdir()
        checkpoints.mkdir(parents=True)
        lock, owner, aside = RunLock(folder, host), {}, [name for _, name in moved]
        text = f"moved the earlier run to {' and '.join(aside)} ({size_of(aside)}); to delete it: rm -r "
        notes.append(text + " ".join(aside))
    old = Path("~") / os.path.relpath(folder, os.path.expanduser("~"))  # where earlier versions wrote it
    if not holds_run and ".." not in old.parts and (old / "metrics.jsonl").exists():
        text = f"run_dir={folder}: an earlier version wrote a run to {old.absolute()}; to continue it, move it here"
        if config.resume_from == "auto":
            raise UserError(text)
        notes.append(text)
    # an attempt that was killed before its first record or checkpoint counts too
    is_again = not moved and (holds_run or (config.resume_from == "auto" and owner.get("has_trained")))
    attempt = owner.get("attempt", 0) + 1 if is_again else 1
    start = Start(str(path or ""), False, moved, attempt, lock.token, launch_id, failures, notes, decision)
    # until `mark_training` a restart of this launch must not continue this run
    inherited = launch_id if is_same_launch else ""
    lock.write(launch_id=inherited, attempt=attempt, failures=failures, aside=aside)
    partial = [*folder.glob(f"*{TEMPORARY}"), *folder.glob(f"samples/*{TEMPORARY}"), *checkpoints.glob(f"*{TEMPORARY}")]
    for left_over in partial:
        with suppress(OSError):  # NFS keeps the files that a process has open as .nfs*
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    return lock, start


def has_run(folder: Path, checkpoints: Path) -> bool:
    """Whether there are records or checkpoints."""
    saved = [*checkpoint.step_checkpoints(checkpoints), *checkpoints.glob(checkpoint.BEST)]
    return (folder / "metrics.jsonl").exists() or bool(saved)


def is_completed(config: TrainingConfig, owner: dict[str, Any], launch_id: str) -> bool:
    """Whether the folder holds a completed run that this start would continue, and that is not to train longer."""
    folders = config.run_folder, config.checkpoint_folder
    is_continued = config.resume_from == "auto" or (bool(launch_id) and owner.get("launch_id") == launch_id)
    has_ended = read_json(config.run_folder / "status.json").get("state") == "completed"
    return is_continued and has_ended and has_run(*folders) and not config.asks_for_more_than(saved_config(*folders))


def saved_config(folder: Path, checkpoints: Path) -> dict[str, Any]:
    """The settings of the run in the folder: those of its latest valid checkpoint, since config.json may be edited."""
    for path in reversed(checkpoint.step_checkpoints(checkpoints)):
        with suppress(UserError):
            return checkpoint.read(path)[0]["config"]
    return read_json(folder / "config.json")


def plan_of(config: TrainingConfig, rank: int, host: str, token: str, launch_id: str, **more: Any) -> dict[str, Any]:
    """What the programs beside training know (scripts/companions/follow.py). more: see there."""
    folders = {"folder": str(config.run_folder.absolute()), "checkpoints": str(config.checkpoint_folder.absolute())}
    who = {"rank": rank, "host": host, "token": token, "launch_id": launch_id}
    return folders | who | {"config": config.to_dict()} | more


def move_aside(folder: Path, checkpoints: Path) -> list[list[str]]:
    """Rename the folders of a run to NAME.1, or .2, ... Returns them with their new names. Raises UserError."""
    places = [folder] if checkpoints.is_relative_to(folder) else [checkpoints, folder]

    def renamed(number: int) -> list[list[str]]:
        return [[str(place), f"{place}.{number}"] for place in places]

    moved = next(
        pairs for pairs in map(renamed, itertools.count(1)) if not any(os.path.exists(new) for _, new in pairs)
    )
    try:
        for place, aside in moved:
            os.rename(place, aside)
    except OSError as error:
        move_back(moved)
        raise UserError(f"{place}: cannot be moved aside ({error.strerror}); give another --run_dir") from None
    return moved


def move_back(moved: list[list[str]]) -> None:
    """Undo `move_aside`: the start was rejected. What it has written is deleted."""
    for place, aside in moved:
        if aside == NOTHING or os.path.exists(aside):
            rejected = Path(f"{place}.rejected{TEMPORARY}")
            with suppress(FileNotFoundError, NotADirectoryError):
                os.rename(place, rejected)  # other ranks may still write there
            if aside != NOTHING:
                os.rename(aside, place)
            shutil.rmtree(rejected, ignore_errors=True)


def size_of(folders: list[str]) -> str:
    """The gigabytes of all files in the folders, as text."""
    files = [path for each in folders for path in Path(each).rglob("*") if path.is_file() and not path.is_symlink()]
    return f"{sum(path.stat().st_size for path in files) / 1e9:.1f} GB"
