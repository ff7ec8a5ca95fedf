"""A checkpoint of a sharded state: a folder with a file per rank. Called in a thread of each rank."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import TrainingConfig
from utils.checkpoint import archive
from utils.checkpoint.format import replace_folder, step_checkpoint_path
from utils.checkpoint.layouts import Callback, FileLayout, Payload, check_free_space, explain_write_error
from utils.distributed.collectives import all_gather_json
from utils.distributed.context import DistributedContext
from utils.extras.sharding import folder_format
from utils.files import TEMPORARY_SUFFIX, replace_json
from utils.settings.errors import TrainingError


def count_shards(config: TrainingConfig, ctx: DistributedContext) -> int:
    """The number of shards. Rank r has the shard r modulo this number."""
    return ctx.local_world_size if config.sharding == "hybrid" else ctx.world_size


class FolderLayout(FileLayout):
    """A folder with a file of each rank that has a shard. All ranks take part, and have the same outcome.

    Args:
        ctx: of its thread (`create_thread_context`).
        shard_count: the number of shards; rank r has the shard r % shard_count.
        is_node_leader: whether this rank makes the folder and its manifest: rank 0, and one rank of each node whose
            disk is its own. There a folder has the shards of the node's ranks.
    """

    has_file_per_rank = True

    def __init__(self, ctx: DistributedContext, shard_count: int, is_node_leader: bool) -> None:
        self.shard_count = shard_count
        self.ctx, self._has_shard, self._is_node_leader = ctx, ctx.rank < shard_count, is_node_leader
        self._write_numbers = itertools.count()  # of tries
        self.is_waiting_for_ranks = False  # for another rank, which looks at its own progress

    def checkpoint_path(self, folder: Path, step: int) -> Path:
        return step_checkpoint_path(folder, step).with_suffix("")

    def write(self, path: Path, payload: Payload, before_rename: Callback, on_progress: Callback) -> None:
        """As FileLayout.write, with the error of the rank that failed on all ranks."""
        folder = path.with_name(f"{path.name}.{next(self._write_numbers)}{TEMPORARY_SUFFIX}")
        name = folder_format.shard_file_name(self.ctx.rank)

        def publish() -> None:
            before_rename()
            files = {name: digest for shard_digests in digests for name, digest in shard_digests.items()}
            replace_json(folder / archive.MANIFEST_FILE, {"step": payload["progress"]["step"], "files": files})
            replace_folder(folder, path)

        def write_shard() -> dict[str, str]:
            return (
                {name: archive.write_archive(folder / name, payload, on_progress=on_progress)}
                if self._has_shard
                else {}
            )

        try:
            self._run_on_all_ranks(lambda: self._prepare_folder(path, folder, payload), path, payload)
            digests = self._run_on_all_ranks(write_shard, path, payload)
            self._run_on_all_ranks(lambda: publish() if self._is_node_leader else None, path, payload)
        except BaseException:
            if self._is_node_leader:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _prepare_folder(self, path: Path, folder: Path, payload: Payload) -> None:
        check_free_space(path, payload)
        if self._is_node_leader:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def _run_on_all_ranks(self, action: Callable[[], Any], path: Path, payload: Payload) -> list[Any]:
        """The results of all ranks. If the action fails on one of them, all raise its error."""
        result, problem, is_final = None, "", False
        try:
            result = action()
        except TrainingError as error:
            problem, is_final = str(error), True
        except Exception as error:
            problem = f"Rank {self.ctx.rank} on {self.ctx.host} failed: {explain_write_error(error, path, payload)}"
        self.is_waiting_for_ranks = True
        outcomes = all_gather_json([result, problem, is_final], self.ctx)
        self.is_waiting_for_ranks = False
        for _, text, is_final in outcomes:
            if text:
                raise TrainingError(text) if is_final else OSError(text)
        return [result for result, *_ in outcomes]
