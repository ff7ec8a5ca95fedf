"""The checkpoint file: what torch.save wrote, and behind the archive its seal: whose it is, of which step, and a
checksum of it all.

`torch.load(path, weights_only=True)` opens such a file; it does not look at the seal, `read` does.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from config import UserError
from utils.checkpoint.archive import PLAIN, NotOurs, check_archive, load_archive, open_file, type_name
from utils.files import replace_file
from utils.memory import is_out_of_memory

KEYS = ("model", "ema", "optimizer", "scaler", "progress", "config", "provenance")
STEP_NAME = re.compile(r"step_(\d{8,})\.pt")
BEST = "best.pt"
TRAILER = re.compile(rb"\nclaim:(\d{10}) step:(\d{10}) sha256:([0-9a-f]{64})\n")
TRAILER_BYTES = 106


class Seal(NamedTuple):
    """What stands behind the archive."""

    claim: int  # the number of the claim on the run's folder under which it was written; 0: none
    step: int
    digest: str  # SHA-256 of all before it


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.pt"


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*.pt") if (match := STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def flatten(payload: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The payload with a number in the place of each tensor, and the tensors. `unflatten` is the inverse.

    Raises:
        UserError: for a value that `torch.load(weights_only=True)` would refuse, or not give back as it was, by its
            name.
    """
    tensors: list[Tensor] = []
    known: dict[tuple, int] = {}

    def visit(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (id(value),)
            if key not in known:  # weights that are tied stay one tensor
                known[key] = len(tensors)
                tensors.append(value.detach())
            return _Tensor(known[key])
        if kind is dict or kind is OrderedDict:
            if wrong := next((key for key in value if type(key) not in PLAIN), None):
                raise UserError(
                    f"{name}: has a key of type {type_name(wrong)}, which no checkpoint can hold; use plain text or"
                    " numbers"
                )
            return {
                key: each if type(each) in PLAIN else visit(each, f"{name}.{key}" if name else str(key))
                for key, each in value.items()
            }
        if kind is list or kind is tuple:
            return kind(
                [each if type(each) in PLAIN else visit(each, f"{name}[{number}]") for number, each in enumerate(value)]
            )
        if kind in PLAIN:
            return value
        raise UserError(
            f"{name}: is of type {type_name(value)}, which no checkpoint can hold; make it a tensor, number, text, list"
            " or dict"
        )

    return visit(payload, ""), tensors


def unflatten(apart: Any, tensors: list[Tensor]) -> Any:
    """The payload that was taken apart, of these tensors."""
    if type(apart) is _Tensor:
        return tensors[apart]
    if type(apart) is dict:
        return {key: unflatten(value, tensors) for key, value in apart.items()}
    return type(apart)(unflatten(value, tensors) for value in apart) if type(apart) in (list, tuple) else apart


class _Tensor(int):
    """The number of a tensor."""


def write(path: Path, payload: dict[str, Any], claim: int = 0, may_appear: Callable[[], None] | None = None) -> None:
    """Write a checkpoint, its tensors on the CPU, under its final name: whole or not at all.

    Args:
        claim: the number that goes into the seal.
        may_appear: called when the file is on the disk, before it gets its name; what it raises ends the writing.

    Raises:
        OSError: when the disk does not take it. What was there before is untouched, the partial file is gone.
    """

    def fill(file: BinaryIO) -> None:
        hashing = _HashingWriter(file)
        try:
            torch.save(payload, hashing)
        except RuntimeError as error:  # torch.save makes of a full disk an "unexpected pos"
            raise hashing.error or error from None
        hashing.write(f"\nclaim:{claim:010d} step:{_step_of(payload):010d} ".encode())
        file.write(f"sha256:{hashing.digest.hexdigest()}\n".encode())

    replace_file(path, fill, may_appear)


def _step_of(payload: dict[str, Any]) -> int:
    return payload["progress"]["step"]


def read(path: Path) -> tuple[dict[str, Any], str]:
    """The checkpoint, its tensors on the CPU, and its checksum. Raises UserError, with the reason, when it is damaged
    or incomplete."""
    seal = verify(path)
    try:
        payload = load_archive(path)
    except Exception as error:  # bytes that are no archive raise whatever the unpickler met
        raise _no_checkpoint(path, error) from None
    missing = [key for key in KEYS if not isinstance(payload, dict) or not isinstance(payload.get(key), dict)]
    if missing:
        raise UserError(
            f"{path}: lacks {', '.join(missing)}; give another checkpoint, or --init_from to take only its weights"
        )
    counts = {"step": None} | {
        name: value for name, value in payload["progress"].items() if name not in ("best_value", "intervals")
    }
    wrong = [name for name, value in counts.items() if type(value) is not int or not -1 <= value < 2**53]
    best = payload["progress"].get("best_value")
    if not wrong and not (best is None or (type(best) in (int, float) and math.isfinite(best))):
        wrong = ["best_value"]
    if wrong or counts["step"] != seal.step:
        raise UserError(
            f"{path}: its progress has no number for {wrong[0] if wrong else 'step'}; give another checkpoint"
        )
    return payload, seal.digest


def _no_checkpoint(path: Path, error: Exception) -> UserError:
    if is_out_of_memory(error):
        raise error  # the file is no worse for it
    # torch's own text recommends to switch its protection off
    why = str(error) if isinstance(error, NotOurs) else type(error).__name__
    return UserError(f"{path}: is no checkpoint ({why}); give another")


def verify(path: Path) -> Seal:
    """The file's seal. Raises UserError when the file is not what was sealed, or lies under the name of another
    step."""
    try:
        with open_file(path) as file:
            seal = _read_seal(file)
            if seal is None:
                raise UserError(
                    f"{path}: has no checksum at its end, it was cut short or is no checkpoint of ours; give another"
                )
            size, digest = file.seek(0, os.SEEK_END) - len(f"sha256:{seal.digest}\n"), hashlib.sha256()
            file.seek(0)
            while size > 0 and (block := file.read(min(size, 2**22))):
                digest.update(block)
                size -= len(block)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a checkpoint") from None
    if seal.digest != digest.hexdigest():
        raise UserError(f"{path}: is damaged, its bytes do not have the checksum at its end; give another")
    if (name := STEP_NAME.fullmatch(path.name)) and int(name[1]) != seal.step:
        raise UserError(
            f"{path}: is the checkpoint of step {seal.step} under another's name; give another, or rename it"
        )
    return seal


def seal_of(path: Path) -> Seal | None:
    """The seal as it is written, the bytes before it unread. None where there is none."""
    try:
        with open_file(path) as file:
            return _read_seal(file)
    except OSError:
        return None


def _read_seal(file: BinaryIO) -> Seal | None:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TRAILER_BYTES))
    written = TRAILER.fullmatch(file.read())
    return Seal(int(written[1]), int(written[2]), written[3].decode()) if written else None


def newest_whole(folder: Path, is_ours: Callable[[Seal], bool] = lambda seal: True) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole (None where the folder has none at all) and why newer ones were passed over.

    Args:
        is_ours: whether a checkpoint with this seal was written by a rightful owner of the folder.

    Raises:
        UserError: when there are checkpoints and none is whole.
    """
    skipped: list[str] = []
    found = [(int(STEP_NAME.fullmatch(path.name)[1]), path) for path in step_checkpoints(folder)]
    if os.path.lexists(folder / BEST):  # a file of its own where none was due at its step
        seal = seal_of(folder / BEST)
        found.append((seal.step if seal else -1, folder / BEST))  # without a seal: last, to be refused with its reason
    for _, path in sorted(found, key=lambda each: (each[0], each[1].name), reverse=True):
        try:
            seal = verify(path)
            try:
                check_archive(path)
            except Exception as error:  # left here by a stranger
                raise _no_checkpoint(path, error) from None
            if not is_ours(seal):
                raise UserError(
                    f"{path}: was written by an earlier owner of the folder, after it had lost it; it does not count"
                )
        except UserError as refused:
            skipped.append(str(refused))
        else:
            return path, skipped
    if skipped:
        raise UserError(
            "\n".join(
                [
                    *skipped,
                    f"{folder}: has no whole checkpoint; give one with --resume_from, or --overwrite to start anew",
                ]
            )
        )
    return None, skipped


def best_or_newest(folder: Path, prefers_best: bool) -> Path:
    """best.pt where that is preferred and there, else the newest whole checkpoint. Raises UserError where there is
    none."""
    best = folder / BEST
    found = best if prefers_best and best.exists() else newest_whole(folder)[0]
    if found is None:
        raise UserError(f"{folder}: holds no checkpoint; give one with --resume_from PATH")
    return found


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` step checkpoints; to be called when a new one has its name."""
    for path in step_checkpoints(folder)[:-keep_last]:
        path.unlink(missing_ok=True)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Weights only: from a checkpoint of ours, or from a bare state dict. Raises UserError, for a damaged checkpoint of
    ours too."""
    try:
        with open_file(path) as file:
            is_ours = _read_seal(file) is not None
    except OSError as error:
        raise UserError(
            f"init_from={path}: cannot be read ({error.strerror}); give a checkpoint or a state dict"
        ) from None
    if is_ours:
        verify(path)
    try:
        payload = load_archive(path)
    except Exception:  # as in `read`; torch's own text recommends to switch its protection off
        raise UserError(
            f"init_from={path}: is no file of tensors alone; give a checkpoint or a saved state dict"
        ) from None
    if isinstance(payload, dict) and not is_ours and payload.keys() >= {"model", "progress", "provenance"}:
        raise UserError(
            f"init_from={path}: has no checksum at its end, as checkpoints of ours have: it was cut short; give another"
        )
    weights = payload.get("model", payload) if isinstance(payload, dict) else payload
    if (
        not isinstance(weights, dict)
        or not weights
        or not all(isinstance(value, torch.Tensor) for value in weights.values())
    ):
        raise UserError(f"init_from={path}: holds no weights; give a checkpoint or a state dict")
    return weights


class _HashingWriter:
    """A file that keeps the checksum of what passes through it, and the error that torch.save makes something else
    of."""

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
