"""A checkpoint file: an archive by torch.save, followed by a trailer with the step and a checksum of the archive.

`torch.load(path, weights_only=True)` opens such a file (it searches for the archive from the end) but ignores the
trailer; `verify_archive` checks it. Programs beside training look at checkpoints without torch, so functions import it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from utils.files import is_transient, replace_file, retry
from utils.settings.errors import StartError, UserError

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = None  # a test puts another class of tensors here

PAYLOAD_KEYS = ("model", "ema", "optimizer", "scaler", "progress", "config", "provenance")
STEP_NAME_PATTERN = re.compile(r"step_(\d{8,})(\.pt)?")  # without .pt: the folder of a sharded run
MANIFEST_FILE = "manifest.json"  # of such a folder
TRAILER_PATTERN = re.compile(rb"\nstep:(\d{10}) sha256:([0-9a-f]{64})\n")
TRAILER_BYTES = 89
CHECKSUM_BYTES = 72  # "sha256:...\n" in the trailer
BLOCK_BYTES = 2**22
PLAIN_TYPES = (type(None), bool, int, float, str)  # values that weights_only=True loads, besides tensors and containers


class Trailer(NamedTuple):
    """What follows the archive."""

    step: int
    checksum: str  # SHA-256 of everything before it


def map_payload(value: Any, function: Callable[[Tensor], Any], name: str = "") -> Any:
    """The content of a checkpoint with function(tensor) in place of each tensor.

    Raises:
        UserError: for a value that `torch.load(weights_only=True)` would reject or change, with its name.
    """
    import torch

    from utils.distributed.dtensor import is_sharded

    tensors = (torch.Tensor if Tensor is None else Tensor, torch.nn.Parameter)

    def walk(value: Any, name: str) -> Any:
        kind = type(value)
        if kind in PLAIN_TYPES:
            return value
        if kind in tensors or is_sharded(value):
            return function(value)
        if kind in (dict, OrderedDict) and all(type(key) in PLAIN_TYPES for key in value):
            return {key: walk(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        if kind in (list, tuple):
            return kind([walk(item, f"{name}[{number}]") for number, item in enumerate(value)])
        raise UserError(
            f"{name}: a checkpoint cannot hold this {kind.__module__}.{kind.__qualname__}; "
            "use tensors, numbers and text, in lists and in dicts whose keys are numbers or text"
        )

    return walk(value, name)


def write_archive(
    path: Path,
    payload: dict[str, Any],
    before_rename: Callable[[], object] | None = None,
    on_progress: Callable[[], object] = lambda: None,
) -> str:
    """Write a checkpoint, with its tensors on the CPU, atomically under its final name. Returns the checksum.

    Args:
        before_rename: called when the file is on the disk, before it gets its name; an exception aborts the write.
        on_progress: called after each block that was written.

    Raises:
        OSError: if it cannot be written. An existing file is then unchanged and the partial file deleted.
    """
    import torch

    digest = ""

    def write_content(file: BinaryIO) -> None:
        nonlocal digest
        hashing = _HashingWriter(file, on_progress)
        try:
            torch.save(payload, cast(IO[bytes], hashing))
        except RuntimeError as error:  # torch.save turns a full disk into an "unexpected pos"
            raise hashing.error or error from None
        hashing.write(f"\nstep:{payload['progress']['step']:010d} ".encode())
        digest = hashing.checksum.hexdigest()
        file.write(f"sha256:{digest}\n".encode())

    replace_file(path, write_content, before_rename)
    return digest


def read_archive(path: Path, trailer: Trailer) -> dict[str, Any]:
    """The content of a file that was verified, its tensors mapped from it. Raises UserError if it is no checkpoint."""
    problem = f"{path}: is not a checkpoint"
    # mapped, since the processes of a node then share its memory
    payload = load_weights_only(path, lambda error: f"{problem} ({type(error).__name__}); give another", mmap=True)
    missing = [key for key in PAYLOAD_KEYS if not isinstance(payload, dict) or not isinstance(payload.get(key), dict)]
    if missing:
        raise UserError(
            f"{path}: lacks {', '.join(missing)}; give another checkpoint, or load its weights with --init_from"
        )
    counts = {"step": None} | {
        k: v for k, v in payload["progress"].items() if k not in ("best_metric", "best_value", "interval", "user")
    }
    wrong = [name for name, value in counts.items() if type(value) is not int or not -1 <= value < 2**53]
    best = payload["progress"].get("best_value")
    if not (best is None or (type(best) in (int, float) and math.isfinite(best))):
        wrong.append("best_value")
    if wrong:
        raise UserError(f"{path}: its progress has no valid {wrong[0]}; give another checkpoint")
    if counts["step"] != trailer.step:
        raise UserError(f"{path}: has step {trailer.step} in its trailer but {counts['step']} inside; give another")
    return payload


def load_weights_only(path: Path, explain_error: Callable[[Exception], str], mmap: bool = False) -> Any:
    """Load tensors and plain values from an archive. Raises UserError; never runs code from the file.

    explain_error: returns the message for what torch raised.
    """
    import torch

    from utils.memory import is_out_of_memory

    mmap = mmap and str(path).isprintable()  # torch maps no file whose name is not UTF-8
    try:
        return retry(lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except Exception as error:  # invalid bytes can raise any error in the unpickler
        if is_out_of_memory(error):
            raise
        if isinstance(error, OSError) and is_transient(error):
            raise explain_unreadable(path, error) from None
        # torch's own message recommends switching the protection off
        raise UserError(explain_error(error)) from None


def verify_archive(path: Path, computes_checksum: bool = True) -> Trailer:
    """The step and the checksum. Raises UserError if the content does not match it, or the name is of another step."""
    try:
        trailer, digest = retry(lambda: _read_checksum(path, computes_checksum))
    except OSError as error:
        raise explain_unreadable(path, error) from None
    if trailer is None:
        raise UserError(
            f"{path}: has no checksum at its end: it is truncated or not a checkpoint; give another, or --init_from if"
            " it holds published weights"
        )
    if computes_checksum and trailer.checksum != digest:
        raise UserError(f"{path}: is damaged: its bytes do not match the checksum at its end; give another")
    check_step_in_name(path, trailer.step)
    return trailer


def _read_checksum(path: Path, computes_checksum: bool) -> tuple[Trailer | None, str]:
    """The trailer, and the checksum of what is before it, if that is wanted."""
    digest = hashlib.sha256()
    with open_regular_file(path) as file:
        trailer = read_trailer(file)  # which is at the end of the file
        size = file.tell() - CHECKSUM_BYTES
        file.seek(0)
        while computes_checksum and trailer and size > 0 and (block := file.read(min(size, BLOCK_BYTES))):
            digest.update(block)
            size -= len(block)
    return trailer, digest.hexdigest()


def explain_unreadable(path: Path, error: OSError) -> UserError:
    """The error for a checkpoint that cannot be read; if that may pass, it is not taken for damage (StartError)."""
    if is_transient(error):
        remedy = "repair the storage and start again, or delete it to resume from an earlier one"
        return StartError(f"{path}: cannot be read in three tries ({error.strerror}); {remedy}")
    return UserError(f"{path}: cannot be read ({error.strerror}); give the path of a checkpoint")


def check_step_in_name(path: Path, step: int) -> None:
    """Raises UserError if the name is that of another step."""
    if (name := STEP_NAME_PATTERN.fullmatch(path.name)) and int(name[1]) != step:
        raise UserError(f"{path}: is the checkpoint of step {step} under another name; rename it or give another")


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file, possibly through a link. Raises OSError for anything else and never blocks (on a pipe)."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_trailer(file: BinaryIO) -> Trailer | None:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TRAILER_BYTES))
    written = TRAILER_PATTERN.fullmatch(file.read())
    return Trailer(int(written[1]), written[2].decode()) if written else None


class _HashingWriter:
    """A file that computes the checksum of the data written, and keeps the OSError that torch.save replaces."""

    def __init__(self, file: BinaryIO, on_progress: Callable[[], object]) -> None:
        self._file, self._on_progress = file, on_progress
        self.checksum = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        try:
            for start in range(0, len(view), BLOCK_BYTES):  # blocks, so that a slow write shows progress
                block = view[start : start + BLOCK_BYTES]
                self.checksum.update(block)
                self._file.write(block)
                self._on_progress()
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        self._file.flush()
