# extra: preflight
"""Test the run folder without touching the run.

All files are in a temporary folder, which is deleted afterwards.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from config import TrainingConfig
from scripts.lib.storage import Storage  # extra: companions
from utils.run.run_lock import SECONDS_UNTIL_VISIBLE
from utils.settings.errors import UserError

MAX_BYTES, MAX_SECONDS = 2**28, 2.0  # bytes that are written to measure the speed, and the time for them
BLOCK = bytes(2**23)


def create_probe(folder: Path) -> str:
    """Create a temporary folder in the run folder, or in the parent in which the run will create its folder."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return tempfile.mkdtemp(prefix=".preflight-", dir=existing)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be created ({error.strerror}). Change the permissions, or give another folder."
        ) from None


def check_folder(probe: Path, name: str, patience: float = SECONDS_UNTIL_VISIBLE) -> None:
    """Use files on each node as a run does. Raises UserError if that fails or rank 0's probe is not visible."""
    ends = time.monotonic() + patience
    while not probe.exists():
        if time.monotonic() > ends:
            fix = "Put the run folder on storage that all nodes share, at the same path."
            raise UserError(f"{probe.parent} is not the folder that rank 0 sees under this name. {fix}")
        time.sleep(0.1)
    temporary, file = probe / f"{name}.tmp", probe / name
    try:
        temporary.write_text("a\n")
        temporary.rename(file)
        with file.open("a") as opened:
            opened.write("b\n")
        file.unlink()
    except OSError as error:
        fix = "Free space, change the permissions there, or give a folder that all nodes can write."
        raise UserError(f"{probe.parent} cannot be written ({error.strerror}). {fix}") from None


def measure_mirror(url: str, checkpoint_bytes: int) -> dict[str, float]:  # extra: companions
    """Measure object storage.

    Returns:
        The bytes per second to the storage and from it, and whether it creates an object only if that is absent.

    Raises:
        UserError: if an object cannot be written, listed, read or deleted.
    """
    storage = Storage(f"{url.rstrip('/')}/.preflight-{os.urandom(4).hex()}", f"--mirror {url}")
    size = min(max(checkpoint_bytes, len(BLOCK)), MAX_BYTES // 4)
    with tempfile.TemporaryDirectory() as folder:
        sent, received = Path(folder, "sent"), Path(folder, "received")
        sent.write_bytes(os.urandom(size))
        began = time.perf_counter()
        storage.upload(sent, "speed")
        uploaded_at = time.perf_counter()
        storage.download("speed", received, size, lambda count: None)
        ended, is_same = time.perf_counter(), sent.read_bytes() == received.read_bytes()
    done = 0
    with suppress(Exception):  # each storage has errors of its own
        for _ in range(2):
            storage.create_object("claim", b"{}")
            done += 1
    names = storage.list_objects()
    storage.delete_objects(list(names))
    if not is_same or names.get("speed") != size:
        text = f"What is read from --mirror {url} or listed there is not what was written."
        raise UserError(f"{text} Give another storage.")
    rates = {"to": size / (uploaded_at - began), "from": size / (ended - uploaded_at)}
    return rates | {"is_exclusive": done == 1 and "claim" in names}


def measure_disk(probe: Path, checkpoint_bytes: int, config: TrainingConfig) -> dict[str, float]:
    """Measure the storage of checkpoints.

    Returns:
        The free bytes, the bytes of checkpoints that the run will replace, and the bytes per second written with fsync.
    """
    file_system, file, written, began = os.statvfs(probe), probe / "speed", 0, time.perf_counter()
    with suppress(OSError), file.open("wb") as opened:
        while written < min(max(checkpoint_bytes, len(BLOCK)), MAX_BYTES) and time.perf_counter() - began < MAX_SECONDS:
            written += opened.write(BLOCK)
            opened.flush()
            os.fsync(opened.fileno())
    seconds = time.perf_counter() - began
    with suppress(OSError):
        file.unlink()
    old = config.checkpoint_folder.glob("*.pt") if config.resume_from or config.overwrite else ()
    replaced = sum(path.stat().st_size for path in old)
    return {"free": file_system.f_bavail * file_system.f_frsize, "replaced": replaced, "speed": written / seconds}
