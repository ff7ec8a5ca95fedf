"""The checkpoint file: an archive by torch.save, followed by a trailer with the step and a checksum of the archive.

`torch.load(path, weights_only=True)` opens such a file (it searches for the archive from the end) but ignores it;
`read` checks the trailer.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from config import UserError
from utils.distributed.dtensor import is_sharded, local, wrap
from utils.files import TEMPORARY, flush_folder, replace_file, temporary_of
from utils.logger import NAME
from utils.memory import is_out_of_memory

KEYS = ("model", "ema", "optimizer", "scaler", "progress", "config", "provenance")
STEP_NAME = re.compile(r"step_(\d{8,})(\.pt)?")  # without .pt: the folder of a sharded run (shards.py)
BEST, MANIFEST = "best.pt", "manifest.json"  # the manifest of such a folder
TRAILER = re.compile(rb"\nstep:(\d{10}) sha256:([0-9a-f]{64})\n")
TRAILER_BYTES = 89
DIGEST_BYTES = 72  # "sha256:...\n" in the trailer
PLAIN = (type(None), bool, int, float, str)  # values that weights_only=True loads, besides tensors and containers


class Trailer(NamedTuple):
    """What follows the archive."""

    step: int
    digest: str  # SHA-256 of everything before it


def step_path(folder: Path, step: int, is_sharded: bool = False) -> Path:
    return folder / f"step_{step:08d}{'' if is_sharded else '.pt'}"


def step_of(path: Path) -> int:
    """The step in the name of a step checkpoint."""
    return int(STEP_NAME.fullmatch(path.name)[1])


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step_*") if STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (step_of(path), path.name))


def flatten(payload: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The payload with an index in place of each tensor, and the tensors. `unflatten` is the inverse.

    Raises:
        UserError: for a value that `torch.load(weights_only=True)` would reject or change, with its name.
    """
    tensors: list[Tensor] = []
    known: dict[tuple, int] = {}

    def visit(value: Any, name: str) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if is_sharded(value):
            return _Shard(visit(local(value), name), value)
        if kind is Tensor or kind is nn.Parameter:
            key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (id(value),)
            if key not in known:  # tied weights stay one tensor
                known[key] = len(tensors)
                tensors.append(value.detach())
            return _Tensor(known[key])
        if kind in (dict, OrderedDict) and all(type(key) in PLAIN for key in value):
            return {key: visit(each, f"{name}.{key}" if name else str(key)) for key, each in value.items()}
        if kind in (list, tuple):
            return kind([visit(each, f"{name}[{number}]") for number, each in enumerate(value)])
        raise UserError(
            f"{name}: a checkpoint cannot hold this {kind.__module__}.{kind.__qualname__}; "
            "use tensors, numbers and text, in lists and in dicts whose keys are numbers or text"
        )

    return visit(payload, ""), tensors


def unflatten(flat: Any, tensors: list[Tensor]) -> Any:
    """The payload before `flatten`, with these tensors."""
    if type(flat) is _Tensor:
        return tensors[flat]
    if type(flat) is _Shard:
        return wrap(tensors[flat.index], flat.like)
    if type(flat) is dict:
        return {key: unflatten(value, tensors) for key, value in flat.items()}
    return type(flat)(unflatten(value, tensors) for value in flat) if type(flat) in (list, tuple) else flat


class _Tensor(int):
    """The index of a tensor."""


class _Shard(NamedTuple):
    """A sharded tensor."""

    index: _Tensor  # of the local shard
    like: Tensor


def write(path: Path, payload: dict[str, Any], may_appear: Callable[[], None] | None = None) -> None:
    """Write a checkpoint, with its tensors on the CPU, atomically under its final name.

    Args:
        may_appear: called when the file is on the disk, before it gets its name; an exception from it aborts the write.

    Raises:
        OSError: if it cannot be written. An existing file is then unchanged and the partial file deleted.
    """

    def fill(file: BinaryIO) -> None:
        hashing = _HashingWriter(file)
        try:
            torch.save(payload, hashing)
        except RuntimeError as error:  # torch.save turns a full disk into an "unexpected pos"
            raise hashing.error or error from None
        hashing.write(f"\nstep:{payload['progress']['step']:010d} ".encode())
        file.write(f"sha256:{hashing.digest.hexdigest()}\n".encode())

    replace_file(path, fill, may_appear)


def read(
    path: Path, trailer: Trailer | None = None, layouts: dict[str, Tensor] | None = None
) -> tuple[dict[str, Any], str]:
    """The checkpoint, its tensors mapped from the file, and its checksum. Raises UserError if damaged or incomplete.

    Args:
        trailer: as returned by `verify`, if that was called.
        layouts: sharded parameters by name: from a folder, only this rank's shards of them are read.
    """
    trailer = trailer or verify(path)
    if path.is_dir():
        from utils.checkpoint import shards

        return shards.read(path, trailer, layouts or {}), trailer.digest
    payload = _load(path, f"{path}: is not a checkpoint", is_mapped=True)  # the processes of a node share its memory
    missing = [key for key in KEYS if not isinstance(payload, dict) or not isinstance(payload.get(key), dict)]
    if missing:
        raise UserError(
            f"{path}: lacks {', '.join(missing)}; give another checkpoint, or load its weights with --init_from"
        )
    counts = {"step": None} | {
        k: v for k, v in payload["progress"].items() if k not in ("best_value", "interval", "user")
    }
    wrong = [name for name, value in counts.items() if type(value) is not int or not -1 <= value < 2**53]
    best = payload["progress"].get("best_value")
    if not (best is None or (type(best) in (int, float) and math.isfinite(best))):
        wrong.append("best_value")
    if wrong:
        raise UserError(f"{path}: its progress has no valid {wrong[0]}; give another checkpoint")
    if counts["step"] != trailer.step:
        raise UserError(f"{path}: has step {trailer.step} in its trailer but {counts['step']} inside; give another")
    return payload, trailer.digest


def _load(path: Path, problem: str, is_mapped: bool = False) -> Any:
    """Load tensors and plain values from an archive. Raises UserError; never runs code from the file."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # invalid bytes can raise any error in the unpickler
        if is_out_of_memory(error):
            raise
        # torch's own message recommends switching the protection off
        raise UserError(f"{problem} ({type(error).__name__}); give another") from None


def verify(path: Path, part: tuple[int, int] = (0, 1)) -> Trailer:
    """The step and the checksum. Raises UserError if the content does not match it, or the name is of another step.

    part: (number, readers): of so many processes that verify this checkpoint, the number of this one, from 0.
    """
    if path.is_dir():
        from utils.checkpoint import shards

        return shards.verify(path, part)
    if (path.parent / MANIFEST).exists():
        raise UserError(f"{path}: is a part of a checkpoint; give its folder, {path.parent}")
    is_verified = part[0] > 0  # by the first
    try:
        with _open(path) as file:
            trailer = _read_trailer(file)
            if trailer is None:
                raise UserError(
                    f"{path}: has no checksum at its end: it is truncated or not a checkpoint; give another, or"
                    " --init_from if it holds published weights"
                )
            size, digest = file.seek(0, os.SEEK_END) - DIGEST_BYTES, hashlib.sha256()
            file.seek(0)
            while not is_verified and size > 0 and (block := file.read(min(size, 2**22))):
                digest.update(block)
                size -= len(block)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a checkpoint") from None
    if not is_verified and trailer.digest != digest.hexdigest():
        raise UserError(f"{path}: is damaged: its bytes do not match the checksum at its end; give another")
    if (name := STEP_NAME.fullmatch(path.name)) and int(name[1]) != trailer.step:
        raise UserError(
            f"{path}: is the checkpoint of step {trailer.step} under another name; rename it or give another"
        )
    return trailer


def _open(path: Path) -> BinaryIO:
    """Open a regular file, possibly through a link. Raises OSError for anything else and never blocks (on a pipe)."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is not a regular file")
    return os.fdopen(descriptor, "rb")


def _read_trailer(file: BinaryIO) -> Trailer | None:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TRAILER_BYTES))
    written = TRAILER.fullmatch(file.read())
    return Trailer(int(written[1]), written[2].decode()) if written else None


def latest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The latest valid checkpoint (None if the folder has none at all) and why later ones were skipped.

    Raises:
        UserError: if there are checkpoints but none is valid.
    """
    skipped: list[str] = []
    found = [(step_of(path), path) for path in step_checkpoints(folder)]
    best = folder / BEST  # a separate file if no checkpoint was due at its step
    if os.path.lexists(best):
        try:
            found.append((verify(best).step, best))
        except UserError as error:
            skipped.append(str(error))
    for _, path in sorted(found, key=lambda each: (each[0], each[1].name), reverse=True):
        try:
            verify(path) if path.is_dir() else read(path)
            return path, skipped
        except UserError as error:
            skipped.append(str(error))
    if skipped:
        remedy = "give one with --resume_from, or start over with --overwrite"
        raise UserError("\n".join([*skipped, f"{folder}: has no valid checkpoint; {remedy}"]))
    return None, skipped


def best_or_latest(folder: Path, prefers_best: bool) -> Path:
    """best.pt if it is preferred and exists, else the latest valid checkpoint. Raises UserError if there is none."""
    best = folder / BEST
    found = best if prefers_best and best.exists() else latest_valid(folder)[0]
    if found is None:
        raise UserError(f"{folder}: holds no checkpoint; give one with --resume_from PATH")
    return found


def prune(folder: Path, keep_last: int, keep_every: int = 0) -> None:
    """Delete step checkpoints; call it once a new one has its final name.

    Args:
        keep_last: keep so many, the latest.
        keep_every: also keep the first one of every so many steps; 0: none of these.
    """
    kept, best = {-1}, ""
    with suppress(OSError):
        best = os.readlink(folder / BEST)  # of a sharded run: the name of a folder
    for path in step_checkpoints(folder)[:-keep_last]:
        period = step_of(path) // keep_every if keep_every else -1
        if period in kept and path.name != best:
            remove(path)
        kept.add(period)


def remove(path: Path) -> None:
    """Delete a checkpoint. A folder loses its name first, so that it is whole or absent."""
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f"{path.name}.old{TEMPORARY}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_folder(new: Path, path: Path) -> None:
    """Give a folder that is on the disk its final name, in the place of an earlier one. Raises OSError."""
    flush_folder(new)
    if path.exists():  # a kill after this line leaves only the checkpoints before
        remove(path)
    new.rename(path)
    flush_folder(path.parent)


def link(source: Path, target: Path) -> None:
    """Make `target` the checkpoint at `source`: a link to it, or a copy if there can be none. Raises OSError."""
    temporary = temporary_of(target)
    try:
        if source.is_dir():
            source = source.resolve()
            if source.parent != target.parent.resolve():  # of another run, which may be deleted
                copied = target.with_name(f"{source.name}.copy{TEMPORARY}")
                shutil.copytree(source, copied, dirs_exist_ok=True)
                replace_folder(copied, target.with_name(source.name))
            temporary.symlink_to(source.name)
        else:
            try:
                os.link(source, temporary)
            except OSError:  # a file system without links
                shutil.copyfile(source, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # renaming one link to a file over another leaves both


def load_weights(path: Path) -> dict[str, Tensor]:
    """Load weights from a checkpoint of the template, which must be valid, or a plain state dict. Raises UserError."""
    if path.is_dir():
        return read(path)[0]["model"]
    try:
        with _open(path) as file:
            is_checkpoint = _read_trailer(file) is not None
    except OSError as error:
        raise UserError(
            f"init_from={path}: cannot be read ({error.strerror}); give a checkpoint or a state dict"
        ) from None
    if is_checkpoint:
        verify(path)
    payload = _load(path, f"init_from={path}: does not contain only tensors")
    if isinstance(payload, dict) and not is_checkpoint and payload.keys() >= {"model", "progress", "provenance"}:
        raise UserError(f"init_from={path}: is a truncated checkpoint: its checksum is missing; give another")
    weights = payload.get("model", payload) if isinstance(payload, dict) else payload
    if not isinstance(weights, dict) or not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"init_from={path}: holds no weights; give a checkpoint or a state dict")
    return weights


def take_weights(model: nn.Module, weights: dict[str, Tensor], source: str, must_be_whole: bool = False) -> None:
    """Load the weights that match the model by name and shape, and log the others (a head of another size).

    source: their name for messages.

    Raises:
        UserError: if none matches, or one is missing that `must_be_whole` or frozen.
    """
    own = model.state_dict()
    for prefix in ("module.", "_orig_mod.", "module."):  # of DDP and torch.compile
        if all(name.startswith(prefix) for name in weights):
            logging.getLogger(NAME).info("init_from: removed %r from the names in %s", prefix, source)
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise UserError(f"init_from={source}: none of its {len(weights)} tensors fits the model; use its own model")
    replaced = [name for name in own if name not in fitting]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    needed = [name for name in own if own[name].is_floating_point()] if must_be_whole else frozen
    if random := [name for name in replaced if name in needed]:
        listed = ", ".join(random[:5]) + f" and {len(random) - 5} more" * (len(random) > 5)
        raise UserError(f"init_from={source}: has no {listed} of this model's shape; give weights of the whole model")
    own.update(fitting)  # which has the versions of its modules (MNASNet asks for its own)
    model.load_state_dict(own)
    extra = [name for name in weights if name not in fitting]
    text = "init_from: loaded %d of %d tensors from %s; newly initialised: %s; not used: %s"
    names = (", ".join(replaced) or "none", ", ".join(extra) or "none")
    logging.getLogger(NAME).info(text, len(fitting), len(own), source, *names)


class _HashingWriter:
    """A file that computes the checksum of the data written, and keeps the OSError that torch.save replaces."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()
