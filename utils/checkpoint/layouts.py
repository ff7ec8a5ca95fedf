"""Write a checkpoint in its layout, which is one file that rank 0 writes. The functions are called in a thread."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.checkpoint import archive
from utils.checkpoint.format import step_checkpoint_path
from utils.distributed.context import DistributedContext
from utils.settings.errors import TrainingError

Payload = dict[str, Any]  # with its tensors on the CPU
Callback = Callable[[], object]


class FileLayout:
    """The layout of a checkpoint in one file. Only rank 0 takes part."""

    has_file_per_rank = False  # whether all ranks write
    shard_count = 1  # rank r has the shard r % shard_count of the state
    is_waiting_for_ranks = False  # whether a write waits for another rank, which looks at its own progress

    def checkpoint_path(self, folder: Path, step: int) -> Path:
        """Return the path of the checkpoint of this step."""
        return step_checkpoint_path(folder, step)

    def write(self, path: Path, payload: Payload, before_rename: Callback, on_progress: Callback) -> None:
        """Write the checkpoint. The arguments are those of archive.write_archive.

        Raises:
            OSError: with a message that names the path and the free space; another try may succeed.
            TrainingError: another try will not help.
        """
        try:
            check_free_space(path, payload)
            archive.write_archive(path, payload, before_rename=before_rename, on_progress=on_progress)
        except TrainingError:
            raise
        except (OSError, RuntimeError) as error:
            raise explain_write_error(error, path, payload) from error


def create_thread_context(ctx: DistributedContext) -> DistributedContext:
    """Create the context for threads, which speak to the threads of other ranks while training uses other groups."""
    if ctx.world_size == 1:
        return ctx
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(hours=24))
    return dataclasses.replace(ctx, control_group_ref=weakref.ref(group))


def count_payload_bytes(payload: Payload) -> int:
    """Return the bytes of all tensors in a payload."""
    sizes: list[int] = []
    archive.map_payload(payload, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def check_free_space(path: Path, payload: Payload) -> None:
    """Raise OSError if the checkpoint does not fit on the disk. This creates a missing folder of checkpoints."""
    folder = path.parent
    if (folder.parent / "lock.json").exists():  # else the folder may be on an unmounted disk
        folder.mkdir(exist_ok=True)
    file_system = os.statvfs(folder)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    if free_bytes < count_payload_bytes(payload):
        raise OSError(28, "No space left on device")


def explain_write_error(error: BaseException, path: Path, payload: Payload) -> OSError:
    """Return the error for a checkpoint that cannot be written, with the free space."""
    reason = _describe_reason(error)
    is_out_of_inodes = False
    try:
        file_system = os.statvfs(path.parent)
        free = f"{file_system.f_bavail * file_system.f_frsize / 1e6:,.1f} MB are free"
        is_out_of_inodes = file_system.f_files > 0 and file_system.f_favail == 0
    except OSError as stat_error:
        free = f"its folder cannot be accessed ({stat_error.strerror})"
    needed = f"{count_payload_bytes(payload) / 1e6:,.1f} MB"
    space = f"The checkpoint needs {needed}, and {free}. Make room or repair the storage."
    if is_out_of_inodes:
        space = "No inodes are free, so the file system can hold no more files. Delete some files."
    return OSError(f"{path} cannot be written ({reason}). {space}")


def _describe_reason(error: BaseException) -> str:
    """Return what the system says of an error, or the first line of its text, or its class."""
    reason = getattr(error, "strerror", None)
    if not reason:
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
    if "unexpected pos" in reason:  # of torch.save on a full disk
        return "a write was cut short"
    return reason
