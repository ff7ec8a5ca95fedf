"""The checkpoints of a run: files (archive.py), or folders of a file per rank; the best is a link.

A checkpoint has its final name only when it is complete and on the disk.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable
from contextlib import suppress
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
take_weights = load_matching_weights  # the name that forks of version 1 import


class FileFormat:
    """How a checkpoint in one file is read (archive.py). The functions of this module choose the format by the path."""

    def verify(self, path: Path, reader_and_count: tuple[int, int]) -> Trailer:
        """The step and the checksum. Raises UserError if the content does not match it.

        reader_and_count: as for `verify_checkpoint`.
        """
        if path.is_dir():
            raise UserError(f"{path}: is a folder, and this fork has no extra sharding; give another checkpoint")
        if (path.parent / MANIFEST_FILE).exists():
            raise UserError(f"{path}: is a part of a checkpoint; give its folder, {path.parent}")
        # the first reader verifies a file
        return archive.verify_archive(path, computes_checksum=reader_and_count[0] == 0)

    def read_manifest(self, path: Path) -> tuple[int, dict[str, str]]:
        """The step, and the checksum that each file should have, by name; -1 if the checkpoint is gone."""
        with suppress(OSError), archive.open_regular_file(path) as file:
            if trailer := archive.read_trailer(file):
                return trailer.step, {path.name: trailer.checksum}
        return -1, {}

    def read(self, path: Path, trailer: Trailer, sharded: dict[str, Tensor]) -> dict[str, Any]:
        """The content of a checkpoint that was verified. Raises UserError if it is damaged or incomplete.

        sharded: sharded parameters by name, of which a folder gives only the rows of this rank.
        """
        return archive.read_archive(path, trailer)


def choose_format(path: Path) -> FileFormat:
    """The format of a checkpoint, which is a file or, of a sharded run, a folder."""
    if path.is_dir():  # extra: sharding
        from utils.extras.sharding.folder_format import FolderFormat

        return FolderFormat()
    return FileFormat()


def step_checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.pt"


def parse_step(path: Path) -> int:
    """The step in the name of a step checkpoint."""
    return int(path.stem.removeprefix("step_"))


def list_step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    paths = [path for path in folder.glob("step_*") if STEP_NAME_PATTERN.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (parse_step(path), path.name))


def verify_checkpoint(path: Path, reader_and_count: tuple[int, int] = (0, 1)) -> Trailer:
    """The step and the checksum. Raises UserError if the content does not match it, or the name is of another step.

    reader_and_count: (number, readers): of so many processes that verify this checkpoint, the number of this one, from
    0.
    """
    return choose_format(path).verify(path, reader_and_count)


def read_manifest(path: Path) -> tuple[int, dict[str, str]]:
    """The step of a checkpoint, and the checksum that each of its files should have, by name; -1 if it is gone."""
    return choose_format(path).read_manifest(path)


def read_checksums(path: Path) -> dict[str, str]:
    """The checksum that each file of a checkpoint should have, by name; empty if it is gone."""
    return read_manifest(path)[1]


def read_checkpoint(
    path: Path, trailer: Trailer | None = None, sharded: dict[str, Tensor] | None = None
) -> tuple[dict[str, Any], str]:
    """The checkpoint, its tensors mapped from the file, and its checksum. Raises UserError if damaged or incomplete.

    Args:
        trailer: as returned by `verify_checkpoint`, if that was called.
        sharded: sharded parameters by name: from a folder, only this rank's rows of them are read.
    """
    trailer = trailer or verify_checkpoint(path)
    return choose_format(path).read(path, trailer, sharded or {}), trailer.checksum


def find_latest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The latest valid checkpoint (None if the folder has none at all) and why later ones were skipped.

    Raises:
        UserError: if there are checkpoints but none is valid.
    """
    skipped: list[str] = []
    for path in reversed(list_step_checkpoints(folder)):
        try:
            # a sharded one may be larger than this machine's memory
            verify_checkpoint(path) if path.is_dir() else read_checkpoint(path)
            return path, skipped
        except StartError:  # no damage: another attempt may read it
            raise
        except UserError as error:
            skipped.append(str(error))
    if skipped:
        remedy = "give one with --resume_from, or start over with --overwrite"
        raise UserError("\n".join([*skipped, f"{folder}: has no valid checkpoint; {remedy}"]))
    return None, skipped


def find_best_or_latest(path: Path, prefer_best: bool) -> tuple[Path, list[str]]:
    """In the folder of a run or of checkpoints, best.pt if it is preferred and exists, else the latest valid one, and
    notes to log; any other path is returned. Raises UserError if the folder has none."""
    if not path.is_dir() or STEP_NAME_PATTERN.fullmatch(path.name) or (path / MANIFEST_FILE).exists():
        return path, []
    configured_folder = Path(read_json(path / "config.json").get("checkpoint_dir", path))
    candidates = (path / "checkpoints", configured_folder, path)
    folder = next(candidate for candidate in candidates if candidate.is_dir())
    best = folder / BEST_NAME
    checkpoint_path, notes = (best, []) if prefer_best and best.exists() else find_latest_valid(folder)
    if checkpoint_path is None:
        raise UserError(f"{path}: holds no checkpoint; give the path of one, e.g. RUN/checkpoints/step_00000100.pt")
    return checkpoint_path, [*notes, f"{path}: takes {checkpoint_path}"]


def find_superseded_steps(steps: Iterable[int], keep_last: int, keep_every: int = 0) -> list[int]:
    """The steps whose checkpoints may be deleted.

    Args:
        steps: of all checkpoints, rising.
        keep_last: keep so many, the latest.
        keep_every: also keep the first one of every so many steps; 0: none of these.
    """
    seen_periods, superseded = {-1}, []
    for step in list(steps)[:-keep_last]:
        period = step // keep_every if keep_every else -1
        if period in seen_periods:
            superseded.append(step)
        seen_periods.add(period)
    return superseded


def read_best_name(folder: Path) -> str:
    """The name of the step checkpoint that best.pt links to or is a copy of; that of no checkpoint if there is none."""
    best = folder / BEST_NAME
    if best.is_symlink():
        return best.readlink().name
    path = step_checkpoint_path(folder, read_manifest(best)[0])
    return path.stem if best.is_dir() else path.name


def prune_checkpoints(folder: Path, keep_last: int, keep_every: int = 0) -> None:
    """Delete superseded checkpoints; call it once a new one has its final name. The best one stays."""
    best, paths = read_best_name(folder), list_step_checkpoints(folder)
    superseded = find_superseded_steps(map(parse_step, paths), keep_last, keep_every)
    for path in paths:
        if parse_step(path) in superseded and path.name != best:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint. A folder loses its name first, so that it is whole or absent."""
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
    """A copy of a checkpoint in this folder, under its own name. Raises OSError."""
    source, target = source.resolve(), folder / source.resolve().name
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
    """Load the weights of `--init_from`: of a checkpoint of the template, which must be valid, or of another file that
    holds one state dict. Raises UserError."""
    import torch

    if path.is_dir():
        return find_state_dict(read_checkpoint(path)[0], path)
    try:
        with archive.open_regular_file(path) as file:
            begin = file.read(512)
            is_checkpoint = archive.read_trailer(file) is not None
            file.seek(max(0, file.tell() - 22))
            is_whole = file.read(4) == b"PK\5\6"  # the last record of an archive, without a part of a trailer
    except OSError as error:
        raise UserError(
            f"init_from={path}: cannot be read ({error.strerror}); give a checkpoint or a state dict"
        ) from None
    if is_checkpoint:
        verify_checkpoint(path)
    with torch.serialization.safe_globals([argparse.Namespace]):  # timm and others save their arguments as such
        content = archive.load_weights_only(path, lambda error: describe_unreadable(path, begin, error))
    if not is_checkpoint and isinstance(content, dict) and content.keys() >= {"model", "progress", "provenance"}:
        if not is_whole:
            raise UserError(f"init_from={path}: is a truncated checkpoint: its checksum is missing; give another")
        text = "init_from: %s has no checksum, since it was saved again. Its weights are taken unverified."
        LOGGER.log(RANK_0_WARNING, text, path)
    return find_state_dict(content, path)
