"""Test the run folder without touching the run: all files are in a temporary folder, which is deleted afterwards."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from config import TrainingConfig, UserError
from utils.run.start_checks import SECONDS_TO_SEE

MAX_BYTES, MAX_SECONDS = 2**28, 2.0  # written to measure the speed
BLOCK = bytes(2**23)


def create_probe(folder: Path) -> str:
    """Create a temporary folder in this one, or in the parent in which the run will create it."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return tempfile.mkdtemp(prefix=".preflight-", dir=existing)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be created ({error.strerror}); fix the permissions or give another folder"
        ) from None


def use_folder(probe: Path, name: str, patience: float = SECONDS_TO_SEE) -> None:
    """On each node: use files as a run does. Raises UserError if that fails or rank 0's probe is not visible."""
    ends = time.monotonic() + patience
    while not probe.exists():
        if time.monotonic() > ends:
            fix = "put the run folder on storage that all nodes share, at the same path"
            raise UserError(f"{probe.parent}: is not the folder that rank 0 sees under this name; {fix}")
        time.sleep(0.1)
    new, file = probe / f"{name}.tmp", probe / name
    try:
        new.write_text("a\n")
        new.rename(file)
        with file.open("a") as opened:
            opened.write("b\n")
        file.unlink()
    except OSError as error:
        fix = "free space or fix the permissions there, or give a folder that all nodes can write"
        raise UserError(f"{probe.parent}: cannot write there ({error.strerror}); {fix}") from None


def measure(probe: Path, checkpoint: int, config: TrainingConfig) -> dict[str, float]:
    """Bytes free, bytes of checkpoints that the run will replace, and bytes per second written with fsync."""
    room, file, written, began = os.statvfs(probe), probe / "speed", 0, time.perf_counter()
    with suppress(OSError), file.open("wb") as opened:
        while written < min(max(checkpoint, len(BLOCK)), MAX_BYTES) and time.perf_counter() - began < MAX_SECONDS:
            written += opened.write(BLOCK)
            opened.flush()
            os.fsync(opened.fileno())
    seconds = time.perf_counter() - began
    with suppress(OSError):
        file.unlink()
    old = config.checkpoint_folder.glob("*.pt") if config.resume_from or config.overwrite else ()
    replaced = sum(path.stat().st_size for path in old)
    return {"free": room.f_bavail * room.f_frsize, "replaced": replaced, "speed": written / seconds}
