"""A rank that cannot write its part of a checkpoint: all ranks have the same outcome, and the next try succeeds."""

import contextlib
import re
import resource
import time
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from ranks import run_ranks
from test_checkpoint import payload
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.checkpoint.pinned_buffers import PinnedBuffers
from utils.extras.sharding import folder_layout as layouts
from utils.extras.sharding.folder_layout import FolderLayout

FAILING = {  # where it fails: the rank, the object and its function
    "the room": (1, layouts, "check_free_space"),
    "the part of rank 0": (0, archive, "write_archive"),
    "another part": (1, archive, "write_archive"),
    "the archive": (1, torch, "save"),
    "the manifest": (0, layouts, "replace_json"),
    "the name": (0, layouts, "replace_folder"),
}


@contextlib.contextmanager
def failing(rank, where):
    """An error on one rank; the limit on the size of files is one of the system, in the middle of a file."""
    if where == "limit":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if rank == 1 else before[0], before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    chosen, owner, name = FAILING[where]
    error = OSError(28, "No space left on device")
    with mock.patch.object(owner, name, side_effect=error) if rank == chosen else contextlib.nullcontext():
        yield


def save_with_failures(folder, places):
    """For each place, the outcome of a save that fails there, and that of the next try."""
    ctx = setup_distributed(TrainingConfig(run_dir=str(folder)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    full = torch.arange(20_100.0).reshape(201, 100)  # not a multiple of the ranks
    layout, memory, outcomes = FolderLayout(ctx, 2, ctx.is_main), PinnedBuffers(), []
    torch.distributed.barrier()
    for number, where in enumerate(places):
        written = payload(step=number) | {"model": {"weight": distribute_tensor(full + number, mesh, [Shard(0)])}}
        copied, pairs = memory.allocate_copy(written)
        for place, tensor in pairs:
            place.copy_(tensor)
        path = checkpoint.step_checkpoint_path(folder, number).with_suffix("")

        def save(path=path, copied=copied):
            try:
                layout.write(path, copied, lambda: None, lambda: None)
            except OSError as error:
                return str(error)
            return ""

        with failing(ctx.rank, where):
            problem = save()
            torch.distributed.barrier()
        partial = sorted(entry.name for entry in folder.iterdir())
        torch.distributed.barrier()
        again = save()
        assert not again, [where, problem, again]
        saved = checkpoint.read_checkpoint(path)[0]["model"]["weight"]
        outcomes.append((where, problem, partial, torch.equal(saved, full + number)))
    cleanup_distributed()
    return outcomes


@pytest.mark.guarantee("sharded-save")
def test_a_rank_that_cannot_write_holds_up_no_other(tmp_path):
    places, began = [*FAILING, "limit"], time.monotonic()
    ranks = run_ranks(2, save_with_failures, tmp_path, places)
    assert time.monotonic() - began < 30
    for number, (where, problem, partial, is_whole) in enumerate(ranks[0]):
        assert ranks[1][number] == (where, problem, partial, is_whole)
        rank, reason = (1, "") if where == "limit" else (FAILING[where][0], "No space left on device")
        message = rf"Rank {rank} on \S+ failed: {tmp_path}/step_0000000{number} cannot be written \({reason}"
        assert re.match(message, problem), where
        assert is_whole and partial == [f"step_0000000{k}" for k in range(number)], where


def test_each_part_opens_with_torch_load_and_a_reader_takes_only_the_rows_of_its_layout(tmp_path):
    (first, _) = run_ranks(2, save_with_failures, tmp_path, ["the name"])
    assert first[0][3]
    parts = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "step_00000000").glob("part_*.pt"))]
    assert [len(part["model"]["weight"]["rows"]) for part in parts] == [101, 100]
    assert [part["model"]["weight"]["first"] for part in parts] == [0, 101]
