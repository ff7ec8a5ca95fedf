"""The files in the checkpoint folder of a run: best.pt, and the checkpoints of steps that a resumed run makes again."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from utils.checkpoint import format as checkpoint
from utils.run.run_lock import Ownership
from utils.settings.errors import StartError, UserError


class CheckpointFiles:
    """Links, restores and moves the checkpoints of a run. `Checkpoints` (utils/run/checkpoints.py) saves them.

    Args:
        folder: of the run.
        resume_path: the checkpoint that this attempt resumes from, if any.
        attempt: the number of this attempt, from 1.
        ownership: is checked before best.pt is changed.
        add_note: takes a line to log at the start of this attempt.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint_folder: Path,
        resume_path: Path | None,
        attempt: int,
        ownership: Ownership,
        add_note: Callable[[str], None],
    ) -> None:
        self._checkpoint_folder = checkpoint_folder
        self._resume_path = resume_path
        # holds the checkpoints of steps after the one that this attempt resumes from
        self._superseded_folder = folder / f"superseded-{attempt}"
        self._ownership = ownership
        self._add_note = add_note

    @property
    def best(self) -> Path:
        """Return the path of best.pt."""
        return self._checkpoint_folder / checkpoint.BEST_NAME

    def link_best(self, step: int) -> None:
        """Make best.pt a link to the checkpoint of this step. Raises OSError, also if there is none."""
        self._ownership.require_owner()
        for path in checkpoint.list_step_checkpoints(self._checkpoint_folder):
            if checkpoint.parse_step(path) == step:
                checkpoint.link_best(path)
                return
        raise OSError(errno.ENOENT, f"there is no checkpoint of step {step}")

    def move_later_aside(self, step: int) -> None:
        """Move the checkpoints of later steps to the superseded folder. `RunFolder.rewind` checks the owner."""
        later = []
        for path in checkpoint.list_step_checkpoints(self._checkpoint_folder):
            if checkpoint.parse_step(path) > step:
                later.append(path)
        if not later:
            return
        self._create_superseded_folder()
        for path in later:
            shutil.move(path, self._superseded_folder / path.name)
        names = ", ".join(path.name for path in later)
        self._add_note(f"The checkpoints after step {step} were moved to {self._superseded_folder}: {names}.")

    def restore_best(self, step: int) -> bool:
        """Make best.pt the checkpoint of this step again, from this folder or that of the checkpoint resumed from.

        Args:
            step: of the best evaluation so far; below 0 if there was none.

        Returns:
            False if the best checkpoint is gone. True also if there was no evaluation.
        """
        self._ownership.require_owner()
        for path in self._list_candidates(step):
            try:
                if self._restore_best_from(path, step):
                    return True
            except StartError:
                raise
            except UserError as error:
                self._add_note(str(error))
        if self.best.is_symlink():
            self.best.unlink()
        elif self.best.exists():  # no link: a copy, or written by an earlier version
            self._create_superseded_folder()
            shutil.move(self.best, self._superseded_folder / self.best.name)
        if step < 0:
            return True
        text = f"The best checkpoint so far, of step {step}, is gone."
        self._add_note(f"{text} The next evaluation starts a new best checkpoint.")
        return False

    def _list_candidates(self, step: int) -> list[Path]:
        """List the files that may be the checkpoint of this step, those of this run's folder first."""
        folders = [self._checkpoint_folder]
        if self._resume_path and self._resume_path.parent != self._checkpoint_folder:
            folders.append(self._resume_path.parent)
        candidates = []
        for folder in folders:
            candidates.append(folder / checkpoint.BEST_NAME)
            for path in checkpoint.list_step_checkpoints(folder):
                if checkpoint.parse_step(path) == step:
                    candidates.append(path)
        return candidates

    def _restore_best_from(self, path: Path, step: int) -> bool:
        """Make best.pt this checkpoint, if it exists and is of this step. Raises UserError if it is not valid."""
        if not path.exists() or checkpoint.verify_checkpoint(path).step != step:
            return False
        if path.parent != self._checkpoint_folder:
            path = checkpoint.copy_checkpoint(path, self._checkpoint_folder)
        if path.name != checkpoint.BEST_NAME:
            self.link_best(step)
        return True

    def copy_best(self) -> None:
        """Copy the best checkpoint to the superseded folder. Call this before a new best begins. Raises OSError.

        On storage without links best.pt is a copy itself, and `restore_best` moves it there.
        """
        if self.best.is_symlink() and self.best.exists():
            self._create_superseded_folder()
            kept = checkpoint.copy_checkpoint(self.best, self._superseded_folder)
            self._add_note(f"The best checkpoint so far is kept as {kept}.")

    def _create_superseded_folder(self) -> None:
        self._superseded_folder.mkdir(exist_ok=True)
