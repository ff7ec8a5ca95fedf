"""The checkpoints of a run: files (archive.py), or folders of a file per rank; the best is a link.

A checkpoint has its final name only when it is complete and on the disk.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint import archive
from utils.checkpoint.archive import MANIFEST_FILE, STEP_NAME_PATTERN, Trailer
from utils.checkpoint.weights import LOGGER, describe_unreadable, find_state_dict, load_matching_weights
from utils.files import TEMPORARY_SUFFIX, fsync_folder, read_json, temporary_path
from utils.logger import RANK_0_WARNING
from utils.settings.errors import StartError, UserError

if TYPE_CHECKING:
    from torch import Tensor

BEST_NAME = "best.pt"
# the last record of a zip archive, which torch.save writes
ZIP_END_BYTES = 22
ZIP_END_SIGNATURE = b"PK\5\6"
take_weights = load_matching_weights  # the name that forks of version 1 import


class FileFormat:
    """This format reads a checkpoint in one file (archive.py). The functions of the module choose it by the path."""

    def verify(self, path: Path, reader_and_count: tuple[int, int]) -> Trailer:
        """Check the content by its checksum, as `verify_checkpoint` does."""
        if path.is_dir():
            raise UserError(
                f"{path} is a folder of shards, and this fork has no extra sharding. Give another checkpoint."
            )
        if (path.parent / MANIFEST_FILE).exists():
            raise UserError(f"{path} is a part of a checkpoint. Give the folder of the checkpoint, {path.parent}.")
        reader, _ = reader_and_count
        return archive.verify_archive(path, computes_checksum=reader == 0)  # the first reader verifies a file

    def read_manifest(self, path: Path) -> tuple[int, dict[str, str]]:
        """Return the step, and the checksum that each file should have, by name, as `read_manifest` does."""
        with suppress(OSError), archive.open_regular_file(path) as file:
            trailer = archive.read_trailer(file)
            if trailer is not None:
                return trailer.step, {path.name: trailer.checksum}
        return -1, {}

    def read(self, path: Path, trailer: Trailer, sharded: dict[str, Tensor]) -> dict[str, Any]:
        """Read the content of a checkpoint that was verified.

        Args:
            sharded: sharded parameters by name, of which a folder gives only the rows of this rank.

        Raises:
            UserError: if the content is damaged or incomplete.
        """
        return archive.read_archive(path, trailer)


def choose_format(path: Path) -> FileFormat:
    """Return the format of a checkpoint, which is a file or, of a sharded run, a folder."""
    if path.is_dir():  # extra: sharding
        from utils.extras.sharding.folder_format import FolderFormat

        return FolderFormat()
    return FileFormat()


def step_checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step_{step:08d}.pt"


def parse_step(path: Path) -> int:
    """Return the step in the name of a step checkpoint."""
    return int(path.stem.removeprefix("step_"))


def list_step_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first."""

    def step_and_name(path: Path) -> tuple[int, str]:
        return parse_step(path), path.name

    paths = [path for path in folder.glob("step_*") if STEP_NAME_PATTERN.fullmatch(path.name)]
    return sorted(paths, key=step_and_name)


def verify_checkpoint(path: Path, reader_and_count: tuple[int, int] = (0, 1)) -> Trailer:
    """Check the content of a checkpoint by its checksum, and its name by its step.

    Args:
        reader_and_count: the number of this process, from 0, and the count of processes that verify this checkpoint
            together.

    Returns:
        The step and the checksum.

    Raises:
        UserError: if the content does not match the checksum, or the name is that of another step.
    """
    return choose_format(path).verify(path, reader_and_count)


def read_manifest(path: Path) -> tuple[int, dict[str, str]]:
    """Return the step of a checkpoint, and the checksum that each of its files should have, by name.

    The step is -1 if the checkpoint is gone.
    """
    return choose_format(path).read_manifest(path)


def read_checksums(path: Path) -> dict[str, str]:
    """Return the checksum that each file of a checkpoint should have, by name: nothing if the checkpoint is gone."""
    _, checksums = read_manifest(path)
    return checksums


def read_checkpoint(
    path: Path, trailer: Trailer | None = None, sharded: dict[str, Tensor] | None = None
) -> tuple[dict[str, Any], str]:
    """Read a checkpoint, with its tensors mapped from the file.

    Args:
        trailer: as returned by `verify_checkpoint`, if that was called.
        sharded: sharded parameters by name: from a folder, only this rank's rows of them are read.

    Returns:
        The content and its checksum.

    Raises:
        UserError: if the checkpoint is damaged or incomplete.
    """
    if trailer is None:
        trailer = verify_checkpoint(path)
    payload = choose_format(path).read(path, trailer, sharded or {})
    return payload, trailer.checksum


def find_latest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Find the latest valid checkpoint in a folder.

    Returns:
        Its path, or None if the folder has no checkpoint at all; and why later checkpoints were skipped.

    Raises:
        UserError: if there are checkpoints but none is valid.
    """
    skipped: list[str] = []
    for path in reversed(list_step_checkpoints(folder)):
        try:
            if path.is_dir():
                verify_checkpoint(path)  # not read: a sharded checkpoint may be larger than this machine's memory
            else:
                read_checkpoint(path)
            return path, skipped
        except StartError:  # no damage: another attempt may read the checkpoint
            raise
        except UserError as error:
            skipped.append(str(error))
    if skipped:
        text = f"{folder} has no valid checkpoint. Give one with --resume_from, or start over with --overwrite."
        raise UserError("\n".join([*skipped, text]))
    return None, skipped


def find_best_or_latest(path: Path, prefer_best: bool) -> tuple[Path, list[str]]:
    """Find a checkpoint in the folder of a run or of checkpoints: best.pt if it exists, else the latest valid one.

    Args:
        path: the folder. Any other path is returned.
        prefer_best: False takes the latest valid checkpoint also if best.pt exists.

    Returns:
        The path of the checkpoint, and notes to log.

    Raises:
        UserError: if the folder has no valid checkpoint.
    """
    if not path.is_dir():
        return path, []
    if STEP_NAME_PATTERN.fullmatch(path.name) or (path / MANIFEST_FILE).exists():  # a folder that is a checkpoint
        return path, []
    configured_folder = Path(read_json(path / "config.json").get("checkpoint_dir", path))
    candidates = (path / "checkpoints", configured_folder, path)
    folder = next(candidate for candidate in candidates if candidate.is_dir())
    best = folder / BEST_NAME
    checkpoint_path: Path | None = best
    notes: list[str] = []
    if not prefer_best or not best.exists():
        checkpoint_path, notes = find_latest_valid(folder)
    if checkpoint_path is None:
        raise UserError(f"{path} holds no checkpoint. Give the path of one, e.g. RUN/checkpoints/step_00000100.pt.")
    return checkpoint_path, [*notes, f"{checkpoint_path} is used, since {path} is a folder."]


def find_superseded_steps(steps: Iterable[int], keep_last: int, keep_every: int = 0) -> list[int]:
    """Return the steps whose checkpoints may be deleted.

    Args:
        steps: the steps of all checkpoints, rising.
        keep_last: keep so many checkpoints, the latest.
        keep_every: also keep the first checkpoint of every so many steps. 0 keeps none of these.
    """
    seen_periods = set()
    superseded = []
    for step in list(steps)[:-keep_last]:
        is_kept = False
        if keep_every:
            period = step // keep_every
            is_kept = period not in seen_periods
            seen_periods.add(period)
        if not is_kept:
            superseded.append(step)
    return superseded


def read_best_name(folder: Path) -> str:
    """Return the name of the step checkpoint that best.pt links to or is a copy of.

    If there is no best.pt, the name is one that no checkpoint has.
    """
    best = folder / BEST_NAME
    if best.is_symlink():
        return best.readlink().name
    step, _ = read_manifest(best)
    path = step_checkpoint_path(folder, step)
    return path.stem if best.is_dir() else path.name


def prune_checkpoints(folder: Path, keep_last: int, keep_every: int = 0) -> None:
    """Delete superseded checkpoints, but not the best one. Call it once a new checkpoint has its final name."""
    best = read_best_name(folder)
    paths = list_step_checkpoints(folder)
    superseded = find_superseded_steps(map(parse_step, paths), keep_last, keep_every)
    for path in paths:
        if parse_step(path) in superseded and path.name != best:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint. A folder loses its name first, so that the checkpoint is whole or absent."""
    if path.is_dir() and not path.is_symlink():
        deleted_path = path.with_name(f"{path.name}.old{TEMPORARY_SUFFIX}")
        shutil.rmtree(deleted_path, ignore_errors=True)
        path.rename(deleted_path)
        shutil.rmtree(deleted_path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_folder(new_folder: Path, path: Path) -> None:
    """Give a folder that is on the disk its final name, in the place of an earlier one. Raises OSError."""
    fsync_folder(new_folder)
    if path.exists():  # a kill after this line leaves only the checkpoints before
        remove_checkpoint(path)
    new_folder.rename(path)
    fsync_folder(path.parent)


def copy_checkpoint(source: Path, folder: Path) -> Path:
    """Copy a checkpoint to this folder, under its own name, and return the path of the copy. Raises OSError."""
    source = source.resolve()
    target = folder / source.name
    temporary = temporary_path(target)
    if source.is_dir():
        shutil.copytree(source, temporary)
        replace_folder(temporary, target)
    else:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    return target


def link_best(path: Path) -> None:
    """Make best.pt in its folder a link to this step checkpoint, or a copy on storage without links. Raises OSError."""
    best = path.with_name(BEST_NAME)
    temporary = temporary_path(best)
    try:
        temporary.symlink_to(path.name)
    except OSError:
        if path.is_dir():
            shutil.rmtree(best, ignore_errors=True)
            shutil.copytree(path, temporary)
        else:
            shutil.copyfile(path, temporary)
    temporary.replace(best)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Load the weights of `--init_from` from a checkpoint of the template, or another file that holds one state dict.

    Raises:
        UserError: if a checkpoint of the template is not valid, or another file holds no state dict of one model.
    """
    import torch

    if path.is_dir():
        payload, _ = read_checkpoint(path)
        return find_state_dict(payload, path)
    try:
        with archive.open_regular_file(path) as file:
            begin = file.read(512)
            is_checkpoint = archive.read_trailer(file) is not None
            file.seek(max(0, file.tell() - ZIP_END_BYTES))
            is_whole = file.read(4) == ZIP_END_SIGNATURE  # the file does not end with a part of a trailer
    except OSError as error:
        raise UserError(
            f"--init_from {path} cannot be read ({error.strerror}). Give a checkpoint or a state dict."
        ) from None
    if is_checkpoint:
        verify_checkpoint(path)
    with torch.serialization.safe_globals([argparse.Namespace]):  # timm and others save their arguments as such
        content = archive.load_weights_only(path, partial(describe_unreadable, path, begin))
    if not is_checkpoint and isinstance(content, dict) and content.keys() >= {"model", "progress", "provenance"}:
        if not is_whole:
            raise UserError(f"--init_from {path} is a truncated checkpoint without its checksum. Give another one.")
        text = (
            "--init_from %s has no checksum, since another program has saved this checkpoint again."
            " Its weights are loaded without verification."
        )
        LOGGER.log(RANK_0_WARNING, text, path)
    return find_state_dict(content, path)
