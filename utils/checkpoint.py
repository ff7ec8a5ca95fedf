"""The checkpoint file: what torch.save wrote, and behind the archive a checksum of it.

`torch.load(path, weights_only=True)` opens such a file; it does not look at the checksum, `read` does.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, BinaryIO

import torch

from config import Refused
from utils.atomic_file import replace_file
from utils.loading import to_device

KEYS = ("model", "ema", "optimizer", "scaler", "progress", "config", "provenance")
STEP_NAME = re.compile(r"step_(\d{8,})\.pt")
BEST = "best.pt"
TRAILER = re.compile(rb"\nsha256:([0-9a-f]{64})\n")
TRAILER_BYTES = 73


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.pt"


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*.pt") if (match := STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def write(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint under its final name, whole or not at all. Raises Refused when the disk does not take it."""

    def fill(file: BinaryIO) -> None:
        hashing = _HashingWriter(file)
        torch.save(to_device(payload, torch.device("cpu")), hashing)  # a file that opens where there is no GPU
        file.write(f"\nsha256:{hashing.digest.hexdigest()}\n".encode())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, fill)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        raise Refused(f"{path}: cannot be written ({error}); make room or give another checkpoint_dir, then --resume_from auto") from error


def read(path: Path) -> tuple[dict[str, Any], str]:
    """The checkpoint, its tensors on the CPU, and its checksum. Raises Refused, with the reason, when it is damaged or incomplete."""
    digest = verify(path)
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no archive raise whatever the unpickler met
        raise Refused(f"{path}: is no checkpoint ({_first_line(error)}); give another") from None
    missing = [key for key in KEYS if not isinstance(payload, dict) or key not in payload]
    if missing:
        raise Refused(f"{path}: lacks {', '.join(missing)}; give another checkpoint, or --init_from to take only its weights")
    return payload, digest


def verify(path: Path) -> str:
    """The checksum of the file's archive. Raises Refused when it is not the one behind the archive."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size - TRAILER_BYTES
            digest = hashlib.sha256()
            while size > 0 and (block := file.read(min(size, 2**22))):
                digest.update(block)
                size -= len(block)
            written = TRAILER.fullmatch(file.read())
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}); give the path of a checkpoint") from None
    if written is None:
        raise Refused(f"{path}: has no checksum at its end, it was cut short or is no checkpoint of ours; give another")
    if written[1].decode() != digest.hexdigest():
        raise Refused(f"{path}: is damaged, its bytes do not have the checksum at its end; give another")
    return digest.hexdigest()


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole (None where the folder has none at all) and why newer ones were passed over.

    Raises:
        Refused: when there are checkpoints and none is whole.
    """
    skipped: list[str] = []
    found = step_checkpoints(folder)
    if (folder / BEST).exists():  # a file of its own where none was due at its step
        try:
            step = read(folder / BEST)[0]["progress"]["step"]
            found.insert(sum(path < step_path(folder, step + 1) for path in found), folder / BEST)
        except Refused as refused:
            skipped.append(str(refused))
    for path in reversed(found):
        try:
            verify(path)
        except Refused as refused:
            skipped.append(str(refused))
        else:
            return path, skipped
    if skipped:
        raise Refused(
            "\n".join([*skipped, f"{folder}: has no whole checkpoint; give one with --resume_from, or --overwrite to start anew"])
        )
    return None, skipped


def best_or_newest(folder: Path, prefers_best: bool) -> Path:
    """best.pt where that is preferred and there, else the newest whole checkpoint. Raises Refused where there is none."""
    best = folder / BEST
    found = best if prefers_best and best.exists() else newest_whole(folder)[0]
    if found is None:
        raise Refused(f"{folder}: holds no checkpoint; give one with --resume_from PATH")
    return found


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` step checkpoints."""
    for path in step_checkpoints(folder)[:-keep_last]:
        path.unlink(missing_ok=True)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Weights only: from a checkpoint of ours, or from a bare state dict. Raises Refused, for a damaged checkpoint of ours too."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TRAILER_BYTES))
            is_ours = TRAILER.fullmatch(file.read())
    except OSError as error:
        raise Refused(f"init_from={path}: cannot be read ({error.strerror}); give a checkpoint or a state dict") from None
    if is_ours:
        verify(path)
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # as in `read`; torch's own text recommends to switch its protection off
        raise Refused(f"init_from={path}: is no file of tensors alone; give a checkpoint or a saved state dict") from None
    weights = payload.get("model", payload) if isinstance(payload, dict) else payload
    if not isinstance(weights, dict) or not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise Refused(f"init_from={path}: holds no weights; give a checkpoint or a state dict")
    return weights


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _HashingWriter:
    """A file that keeps the checksum of what passes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
