"""Who writes a checkpoint: rank 0 one file, or each rank its part of a folder. Called in a thread of each rank."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from config import TrainingError
from utils.checkpoint import archive, shards
from utils.checkpoint.format import replace_folder
from utils.distributed.collectives import all_gather_json
from utils.distributed.context import DistributedContext
from utils.files import TEMPORARY, replace_json

Payload = dict[str, Any]  # with its tensors on the CPU
Call = Callable[[], object]


class FileLayout:
    """A file that rank 0 writes. Only rank 0 takes part."""

    is_waiting = False

    def write(self, path: Path, payload: Payload, before_rename: Call, tick: Call) -> None:
        """Write the checkpoint. The arguments are those of archive.write.

        Raises:
            OSError: with a message that names the path and the free space; another try may succeed.
            TrainingError: another try will not help.
        """
        try:
            check_room(path, payload)
            archive.write(path, payload, before_rename, tick)
        except TrainingError:
            raise
        except (OSError, RuntimeError) as error:
            raise _explained(error, path, payload) from error


class FolderLayout:
    """A folder with a file of each rank that has a shard. All ranks take part, and have the same outcome.

    Args:
        ctx: of its thread (`of_threads`).
        parts: the number of shards; rank r has the shard r % parts.
        leads_node: whether this rank makes the folder and its manifest: rank 0, and one rank of each node whose disk
            is its own. There a folder has the parts of the ranks of the node.
    """

    def __init__(self, ctx: DistributedContext, parts: int, leads_node: bool) -> None:
        self.ctx, self._has_part, self._leads_node = ctx, ctx.rank < parts, leads_node
        self._numbers = itertools.count()  # of tries
        self.is_waiting = False  # for another rank, which looks at its own progress

    def write(self, path: Path, payload: Payload, before_rename: Call, tick: Call) -> None:
        """As FileLayout.write, with the error of the rank that failed on all ranks."""
        folder = path.with_name(f"{path.name}.{next(self._numbers)}{TEMPORARY}")
        name = shards.part_name(self.ctx.rank)

        def publish() -> None:
            before_rename()
            files = {name: digest for each in digests for name, digest in each.items()}
            replace_json(folder / shards.MANIFEST, {"step": payload["progress"]["step"], "files": files})
            replace_folder(folder, path)

        def write_part() -> dict[str, str]:
            return {name: archive.write(folder / name, payload, tick=tick)} if self._has_part else {}

        try:
            self._on_all(lambda: self._prepare(path, folder, payload), path, payload)
            digests = self._on_all(write_part, path, payload)
            self._on_all(lambda: publish() if self._leads_node else None, path, payload)
        except BaseException:
            if self._leads_node:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _prepare(self, path: Path, folder: Path, payload: Payload) -> None:
        check_room(path, payload)
        if self._leads_node:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def _on_all(self, action: Callable[[], Any], path: Path, payload: Payload) -> list[Any]:
        """The results of all ranks. If the action fails on one of them, all raise its error."""
        result, problem, is_final = None, "", False
        try:
            result = action()
        except TrainingError as error:
            problem, is_final = str(error), True
        except Exception as error:
            problem = f"{_explained(error, path, payload)} (rank {self.ctx.rank} on {self.ctx.host})"
        self.is_waiting = True
        found = all_gather_json([result, problem, is_final], self.ctx)
        self.is_waiting = False
        for _, text, is_final in found:
            if text:
                raise TrainingError(text) if is_final else OSError(text)
        return [result for result, *_ in found]


def of_threads(ctx: DistributedContext) -> DistributedContext:
    """The context for threads, which speak to those of other ranks while training uses the other groups."""
    if ctx.world_size == 1:
        return ctx
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(hours=24))
    return dataclasses.replace(ctx, control=group)


def size_of(payload: Payload) -> int:
    """The bytes of its tensors."""
    sizes: list[int] = []
    archive.mapped(payload, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def check_room(path: Path, payload: Payload) -> None:
    """Raises OSError if the checkpoint does not fit on the disk. Creates a missing folder of checkpoints."""
    folder = path.parent
    if (folder.parent / "lock.json").exists():  # else it may be on an unmounted disk
        folder.mkdir(exist_ok=True)
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < size_of(payload):
        raise OSError(28, "No space left on device")


def _explained(error: BaseException, path: Path, payload: Payload) -> OSError:
    """The error for a checkpoint that cannot be written, with the free space."""
    reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
    reason = "a write was cut short" if "unexpected pos" in reason else reason  # of torch.save on a full disk
    try:
        room = os.statvfs(path.parent)
        free = f"{room.f_bavail * room.f_frsize / 1e6:,.1f} MB are free"
        is_out_of_inodes = room.f_files and not room.f_favail
    except OSError as missing:
        free, is_out_of_inodes = f"its folder cannot be accessed ({missing.strerror})", False
    space = f"it needs {size_of(payload) / 1e6:,.1f} MB, {free}; make room or repair the storage"
    if is_out_of_inodes:
        space = "no inodes are free, so the file system can hold no more files; delete some"
    return OSError(f"{path}: cannot be written ({reason}); {space}")
