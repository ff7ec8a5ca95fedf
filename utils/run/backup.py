"""Moving the folders of an earlier run aside, and back if the start that would replace it is refused."""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

from utils.files import TEMPORARY_SUFFIX
from utils.settings.errors import UserError

DID_NOT_EXIST = ""  # what a folder was before this start


def rename_existing_run(folder: Path, checkpoint_folder: Path) -> list[list[str]]:
    """Rename the folders of a run to NAME.1, or .2, ... Returns them with their new names. Raises UserError."""
    folders = [folder] if checkpoint_folder.is_relative_to(folder) else [checkpoint_folder, folder]

    def create_renames(number: int) -> list[list[str]]:
        return [[str(path), f"{path}.{number}"] for path in folders]

    moved = next(
        pairs for pairs in map(create_renames, itertools.count(1)) if not any(os.path.exists(new) for _, new in pairs)
    )
    try:
        for original, backup in moved:
            os.rename(original, backup)
    except OSError as error:
        restore_existing_run(moved)
        raise UserError(f"{original}: cannot be moved aside ({error.strerror}); give another --run_dir") from None
    return moved


def restore_existing_run(renames: list[list[str]]) -> None:
    """Undo `rename_existing_run`: the start was rejected. What it has written is deleted."""
    for original, backup in renames:
        if backup == DID_NOT_EXIST or os.path.exists(backup):
            rejected = Path(f"{original}.rejected{TEMPORARY_SUFFIX}")
            with suppress(FileNotFoundError, NotADirectoryError):
                os.rename(original, rejected)  # other ranks may still write there
            if backup != DID_NOT_EXIST:
                os.rename(backup, original)
            shutil.rmtree(rejected, ignore_errors=True)


def describe_folder_size(folders: list[str]) -> str:
    """The gigabytes of all files in the folders, as text."""
    files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    return f"{sum(path.stat().st_size for path in files) / 1e9:.1f} GB"
