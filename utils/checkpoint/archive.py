"""A checkpoint file: an archive by torch.save, followed by a trailer with the step and a checksum of archive and step.

`torch.load(path, weights_only=True)` opens such a file (it searches for the archive from the end) but ignores the
trailer. `verify_archive` checks the trailer. Programs beside training look at checkpoints without torch, so only the
functions that need torch import torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from utils.files import is_transient, replace_file, retry
from utils.settings.errors import StartError, UserError

if TYPE_CHECKING:
    from torch import Tensor

PAYLOAD_KEYS = ("model", "ema", "optimizer", "scaler", "progress", "config", "provenance")
OTHER_PROGRESS = ("best_metric", "best_value", "interval", "user")  # keys of the progress that are no counts
STEP_NAME_PATTERN = re.compile(r"step_(\d{8,})(\.pt)?")  # without .pt: the folder of a sharded run
MANIFEST_FILE = "manifest.json"  # of such a folder
# the trailer is a line in two parts; the checksum covers all bytes before the second part
TRAILER_STEP = b"\nstep:%010d "
TRAILER_CHECKSUM = b"sha256:%s\n"
TRAILER_PATTERN = re.compile(rb"\nstep:(\d{10}) sha256:([0-9a-f]{64})\n")
CHECKSUM_BYTES = len(TRAILER_CHECKSUM % (64 * b"0"))
TRAILER_BYTES = len(TRAILER_STEP % 0) + CHECKSUM_BYTES
BLOCK_BYTES = 2**22
PLAIN_TYPES = (type(None), bool, int, float, str)  # values that weights_only=True loads, besides tensors and containers


class Trailer(NamedTuple):
    """The trailer follows the archive in the file of a checkpoint."""

    step: int
    checksum: str  # SHA-256 of everything before it


def map_payload(value: Any, function: Callable[[Tensor], Any], name: str = "") -> Any:
    """Return the content of a checkpoint with function(tensor) in place of each tensor.

    Args:
        name: the name of the value in messages.

    Raises:
        UserError: for a value that `torch.load(weights_only=True)` would reject or change, with its name.
    """
    kind = type(value)
    if kind in PLAIN_TYPES:
        return value
    if is_tensor(value):
        return function(value)
    if kind in (dict, OrderedDict) and all(type(key) in PLAIN_TYPES for key in value):
        mapped = {}
        for key, item in value.items():
            item_name = f"{name}.{key}" if name else str(key)
            mapped[key] = map_payload(item, function, item_name)
        return mapped
    if kind in (list, tuple):
        items = []
        for number, item in enumerate(value):
            items.append(map_payload(item, function, f"{name}[{number}]"))
        return kind(items)
    raise UserError(
        f"A checkpoint cannot hold {name}, which is a {kind.__module__}.{kind.__qualname__}. "
        "Use tensors, numbers and text, in lists and in dicts whose keys are numbers or text."
    )


def is_tensor(value: Any) -> bool:
    """Return whether this is a tensor that a checkpoint can hold: a plain or sharded one, or a parameter.

    Other subclasses of torch.Tensor do not count, since `torch.load(weights_only=True)` may reject them.
    """
    import torch

    from utils.distributed.dtensor import is_sharded

    return type(value) in (torch.Tensor, torch.nn.Parameter) or is_sharded(value)


def write_archive(
    path: Path,
    payload: dict[str, Any],
    before_rename: Callable[[], object] | None = None,
    on_progress: Callable[[], object] = lambda: None,
) -> str:
    """Write a checkpoint, with its tensors on the CPU, atomically under its final name.

    Args:
        before_rename: called when the file is on the disk, before it gets its name; an exception aborts the write.
        on_progress: called after each block that was written.

    Returns:
        The checksum.

    Raises:
        OSError: if it cannot be written. An existing file is then unchanged and the partial file deleted.
    """
    import torch

    checksum = hashlib.sha256()

    def write_content(file: BinaryIO) -> None:
        hashing_file = _HashingWriter(file, checksum.update, on_progress)
        try:
            torch.save(payload, cast(IO[bytes], hashing_file))
        except RuntimeError as error:
            # torch.save turns the OSError of a full disk into a RuntimeError with the text "unexpected pos"
            if hashing_file.error is not None:
                raise hashing_file.error from None
            raise error from None
        hashing_file.write(TRAILER_STEP % payload["progress"]["step"])
        file.write(TRAILER_CHECKSUM % checksum.hexdigest().encode())

    replace_file(path, write_content, before_rename)
    return checksum.hexdigest()


def read_archive(path: Path, trailer: Trailer) -> dict[str, Any]:
    """Read the content of a file that was verified, with its tensors mapped from the file.

    Args:
        trailer: as `verify_archive` returned it.

    Raises:
        UserError: if the content is not that of a checkpoint.
    """

    def explain_error(error: Exception) -> str:
        return f"{path} is not a checkpoint ({type(error).__name__}). Give another file."

    # mapped, since the processes of a node then share its memory
    payload = load_weights_only(path, explain_error, mmap=True)
    missing = list(PAYLOAD_KEYS)
    if isinstance(payload, dict):
        missing = [key for key in PAYLOAD_KEYS if not isinstance(payload.get(key), dict)]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)}. Give another checkpoint, or load the weights of this file with"
            " --init_from."
        )
    _check_progress(path, payload["progress"], trailer)
    return payload


def _check_progress(path: Path, progress: dict[str, Any], trailer: Trailer) -> None:
    """Raise UserError if a value of a checkpoint's progress is not valid, or its step is not that of the trailer."""
    names = dict.fromkeys(["step", *progress])  # "step" also if the progress has none, which is not valid
    wrong = [name for name in names if name not in OTHER_PROGRESS and not _is_count(progress.get(name))]
    best_value: Any = progress.get("best_value")
    is_finite_number = type(best_value) in (int, float) and math.isfinite(best_value)
    if best_value is not None and not is_finite_number:
        wrong.append("best_value")
    if wrong:
        raise UserError(f"{path} was changed: its progress has no valid {wrong[0]}. Give another checkpoint.")
    step = progress["step"]
    if step != trailer.step:
        raise UserError(
            f"{path} was changed: it is of step {step}, but its end says {trailer.step}. Give another checkpoint."
        )


def _is_count(value: Any) -> bool:
    """Return whether this is a number of steps, samples or the like; -1 stands for none."""
    return type(value) is int and -1 <= value < 2**53


def load_weights_only(path: Path, explain_error: Callable[[Exception], str], mmap: bool = False) -> Any:
    """Load an archive of tensors and plain values by torch.load with its flag weights_only, so that no code from the
    file is run. The archive may hold more than weights: a checkpoint has the optimizer's state, too.

    Args:
        explain_error: returns the message for an exception that torch raised.
        mmap: map the tensors from the file, which is then read only where they are used.

    Raises:
        UserError: with the explained message, if the content cannot be loaded.
        StartError: if the storage failed, and another attempt may succeed.
    """
    import torch

    from utils.memory import is_out_of_memory

    if not str(path).isprintable():  # the path may have bytes that are not UTF-8, which Python cannot print
        mmap = False  # torch maps no file with such a path
    try:
        return retry(partial(torch.load, path, map_location="cpu", weights_only=True, mmap=mmap))
    except Exception as error:  # invalid bytes can raise any error in the unpickler
        if is_out_of_memory(error):
            raise
        if isinstance(error, OSError) and is_transient(error):
            raise explain_unreadable(path, error) from None
        # torch's own message recommends switching the protection off
        raise UserError(explain_error(error)) from None


def verify_archive(path: Path, computes_checksum: bool = True) -> Trailer:
    """Check the content of a checkpoint file by its checksum, and its name by the step.

    Args:
        computes_checksum: False if another process compares the content with the checksum.

    Returns:
        The trailer, that is the step and the checksum.

    Raises:
        UserError: if the content does not match the checksum, or the name is that of another step.
        StartError: if the storage failed, and another attempt may succeed.
    """
    try:
        trailer, digest = retry(partial(_read_checksum, path, computes_checksum))
    except OSError as error:
        raise explain_unreadable(path, error) from None
    if trailer is None:
        raise UserError(
            f"{path} has no checksum at its end, so it is truncated or not a checkpoint. Give another checkpoint,"
            " or use --init_from if the file holds published weights."
        )
    if computes_checksum and trailer.checksum != digest:
        raise UserError(f"{path} is damaged: its bytes do not match the checksum at its end. Give another checkpoint.")
    check_step_in_name(path, trailer.step)
    return trailer


def _read_checksum(path: Path, computes_checksum: bool) -> tuple[Trailer | None, str]:
    """Return the trailer, and the checksum of the content before the trailer if `computes_checksum`."""
    digest = hashlib.sha256()
    with open_regular_file(path) as file:
        trailer = read_trailer(file)
        if computes_checksum and trailer is not None:
            remaining = file.tell() - CHECKSUM_BYTES  # read_trailer has read to the end of the file
            file.seek(0)
            while remaining > 0:
                block = file.read(min(remaining, BLOCK_BYTES))
                if not block:  # the file has been cut since
                    break
                digest.update(block)
                remaining -= len(block)
    return trailer, digest.hexdigest()


def explain_unreadable(path: Path, error: OSError) -> UserError:
    """Return the exception to raise for a checkpoint that cannot be read.

    Returns:
        StartError if a later try may succeed, so that a checkpoint that cannot be read at the moment is not taken for
        a damaged one. UserError otherwise.
    """
    if is_transient(error):
        return StartError(
            f"{path} cannot be read in three tries ({error.strerror}). Repair the storage and start again, or delete"
            " this checkpoint to resume from an earlier one."
        )
    return UserError(f"{path} cannot be read ({error.strerror}). Give the path of a checkpoint.")


def check_step_in_name(path: Path, step: int) -> None:
    """Raise UserError if the checkpoint has the name of another step."""
    name = STEP_NAME_PATTERN.fullmatch(path.name)
    if name and int(name[1]) != step:
        raise UserError(
            f"{path} is the checkpoint of step {step} under another name. Rename the file or give another checkpoint."
        )


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file, possibly through a link. Raises OSError for anything else and never blocks (on a pipe)."""
    flags = os.O_RDONLY
    flags |= getattr(os, "O_NONBLOCK", 0)
    flags |= getattr(os, "O_NOCTTY", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return os.fdopen(descriptor, "rb")


def read_trailer(file: BinaryIO) -> Trailer | None:
    """Read the trailer, which ends at the end of the file. Returns None if the file has none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TRAILER_BYTES))
    match = TRAILER_PATTERN.fullmatch(file.read())
    if match is None:
        return None
    return Trailer(step=int(match[1]), checksum=match[2].decode())


class _HashingWriter:
    """A file that adds the data written to a checksum, and keeps the OSError that torch.save replaces."""

    def __init__(
        self, file: BinaryIO, update_checksum: Callable[[memoryview], object], on_progress: Callable[[], object]
    ) -> None:
        self._file = file
        self._update_checksum = update_checksum
        self._on_progress = on_progress
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write the data in blocks, so that a slow write shows progress. Returns the number of bytes."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                self._update_checksum(block)
                self._file.write(block)
                self._on_progress()
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        self._file.flush()
