"""Moving the folders of an earlier run aside, and back if the start that would replace it is refused."""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

from utils.files import TEMPORARY
from utils.settings.errors import UserError

DID_NOT_EXIST = ""  # what a folder was before this start


def rename_existing_run(folder: Path, checkpoints: Path) -> list[list[str]]:
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
        restore_existing_run(moved)
        raise UserError(f"{place}: cannot be moved aside ({error.strerror}); give another --run_dir") from None
    return moved


def restore_existing_run(moved: list[list[str]]) -> None:
    """Undo `rename_existing_run`: the start was rejected. What it has written is deleted."""
    for place, aside in moved:
        if aside == DID_NOT_EXIST or os.path.exists(aside):
            rejected = Path(f"{place}.rejected{TEMPORARY}")
            with suppress(FileNotFoundError, NotADirectoryError):
                os.rename(place, rejected)  # other ranks may still write there
            if aside != DID_NOT_EXIST:
                os.rename(aside, place)
            shutil.rmtree(rejected, ignore_errors=True)


def describe_size(folders: list[str]) -> str:
    """The gigabytes of all files in the folders, as text."""
    files = [path for each in folders for path in Path(each).rglob("*") if path.is_file() and not path.is_symlink()]
    return f"{sum(path.stat().st_size for path in files) / 1e9:.1f} GB"
