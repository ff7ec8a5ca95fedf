"""How a checkpoint is written: rank 0 writes one file. Called in a thread."""

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
    """A file that rank 0 writes. Only rank 0 takes part."""

    is_waiting_for_ranks = False  # for another rank, which looks at its own progress

    def checkpoint_path(self, folder: Path, step: int) -> Path:
        """The checkpoint of this step."""
        return step_checkpoint_path(folder, step)

    def write(self, path: Path, payload: Payload, before_rename: Callback, on_progress: Callback) -> None:
        """Write the checkpoint. The arguments are those of archive.write_archive.

        Raises:
            OSError: with a message that names the path and the free space; another try may succeed.
            TrainingError: another try will not help.
        """
        try:
            check_free_space(path, payload)
            archive.write_archive(path, payload, before_rename, on_progress)
        except TrainingError:
            raise
        except (OSError, RuntimeError) as error:
            raise explain_write_error(error, path, payload) from error


def create_thread_context(ctx: DistributedContext) -> DistributedContext:
    """The context for threads, which speak to those of other ranks while training uses the other groups."""
    if ctx.world_size == 1:
        return ctx
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(hours=24))
    return dataclasses.replace(ctx, control_group_ref=weakref.ref(group))


def count_payload_bytes(payload: Payload) -> int:
    """The bytes of its tensors."""
    sizes: list[int] = []
    archive.map_payload(payload, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def check_free_space(path: Path, payload: Payload) -> None:
    """Raises OSError if the checkpoint does not fit on the disk. Creates a missing folder of checkpoints."""
    folder = path.parent
    if (folder.parent / "lock.json").exists():  # else it may be on an unmounted disk
        folder.mkdir(exist_ok=True)
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < count_payload_bytes(payload):
        raise OSError(28, "No space left on device")


def explain_write_error(error: BaseException, path: Path, payload: Payload) -> OSError:
    """The error for a checkpoint that cannot be written, with the free space."""
    reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
    reason = "a write was cut short" if "unexpected pos" in reason else reason  # of torch.save on a full disk
    try:
        file_system = os.statvfs(path.parent)
        free = f"{file_system.f_bavail * file_system.f_frsize / 1e6:,.1f} MB are free"
        is_out_of_inodes = file_system.f_files and not file_system.f_favail
    except OSError as stat_error:
        free, is_out_of_inodes = f"its folder cannot be accessed ({stat_error.strerror})", False
    space = f"it needs {count_payload_bytes(payload) / 1e6:,.1f} MB, {free}; make room or repair the storage"
    if is_out_of_inodes:
        space = "no inodes are free, so the file system can hold no more files; delete some"
    return OSError(f"{path}: cannot be written ({reason}); {space}")
