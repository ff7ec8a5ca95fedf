"""A rank that cannot write its part of a checkpoint: all ranks have the same outcome, and the next try succeeds."""

import contextlib
import io
import pickle
import resource
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from ranks import run_ranks
from test_checkpoint import payload
from utils.checkpoint import format as checkpoint
from utils.checkpoint import shards
from utils.run.lock import RunLock

FAILING = {  # where it fails: the rank, the object and its function
    "the memory": (1, checkpoint, "unflatten"),
    "the writer of shards": (1, dcp.FileSystemWriter, "__init__"),
    "the plan of the shards": (1, dcp.FileSystemWriter, "prepare_local_plan"),
    "the shards": (1, dcp.FileSystemWriter, "write_data"),
    "the metadata": (0, dcp.FileSystemWriter, "finish"),
    "the rest": (0, checkpoint, "write"),
    "the checksums": (1, shards, "digest_of_file"),
    "the manifest": (0, shards, "replace_json"),
    "the name": (0, checkpoint, "replace_folder"),
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


def send(writer, folder, step, weight):
    """What Saver does, without its thread. Returns the path of the checkpoint."""
    written = payload(step=step) | {"model": {"weight": weight}}
    written["progress"] |= {"epoch": 0, "samples_in_epoch": 0}
    written["optimizer"] = {"state": {}, "names": []}
    flat, tensors = checkpoint.flatten(written)
    for view, tensor in zip(writer.fit(tensors), tensors, strict=True):
        view.copy_(tensor)
    path = checkpoint.step_path(folder / "checkpoints", step, is_sharded=True)
    writer.send(path, flat, (99, 0), folder / "lock.json", 1)
    return path


def save_with_failures(folder, places):
    """For each place, the outcome of a save that fails there, and that of the next try."""
    ctx = setup_distributed(TrainingConfig(run_dir=str(folder)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    full = torch.arange(20_000.0).reshape(200, 100)
    lock = RunLock(folder, "here") if ctx.is_main else None
    if lock:
        lock.write()
        (folder / "checkpoints").mkdir()
    torch.distributed.barrier()
    writer, found = shards.ShardWriter(ctx), []
    for number, where in enumerate(places):
        path = send(writer, folder, number, distribute_tensor(full + number, mesh, [Shard(0)]))
        with failing(ctx.rank, where):
            writer.commit()
            outcomes = [writer.wait(30)]
            torch.distributed.barrier()
        partial = sorted(each.name for each in (folder / "checkpoints").iterdir())
        torch.distributed.barrier()
        writer.again()
        writer.commit()
        outcomes.append(writer.wait(30))
        assert not outcomes[-1].problem, [where, *(each.problem for each in outcomes)]
        saved = checkpoint.read(path)[0]["model"]["weight"]
        found.append((where, [each.problem for each in outcomes], partial, torch.equal(saved, full + number)))
    writer.end()
    cleanup_distributed()
    return found


class Attribute:
    def __init__(self, owner, name):
        self.found = owner, name

    def __reduce__(self):
        return getattr, self.found


def test_the_metadata_names_members_of_enums_and_no_other_attributes():
    """Python 3.11.0 to 3.11.3 pickles them so."""
    kind = dcp.metadata._MEM_FORMAT_ENCODING
    for owner, name in ((kind, kind.TORCH_CONTIGUOUS_FORMAT.name), (dcp.metadata.Metadata, "__init__")):
        unpickler = shards._Unpickler(io.BytesIO(pickle.dumps(Attribute(owner, name))))
        if owner is kind:
            assert unpickler.load() is kind.TORCH_CONTIGUOUS_FORMAT
        else:
            with pytest.raises(AttributeError, match="__members__"):
                unpickler.load()


class OnGPU(torch.Tensor):
    is_cuda = True


def save_beside_a_gpu(folder):
    """The bytes that were pinned at each call, and the problem of a save where the GPU may not be touched."""
    ctx, sizes = setup_distributed(TrainingConfig(run_dir=str(folder))), []
    RunLock(folder, "here").write()
    success = SimpleNamespace(success=0)
    register = SimpleNamespace(cudaError=success, cudaHostRegister=lambda _, size, __: sizes.append(size) or 0)
    writer = shards.ShardWriter(ctx)
    with mock.patch.object(torch.cuda, "cudart", lambda: register):
        writer.fit([torch.empty(each).as_subclass(OnGPU) for each in (33, 1000, 70_000)])
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))
        path = send(writer, folder, 1, distribute_tensor(torch.arange(70_000.0), mesh, [Shard(0)]))
    touched = mock.Mock(side_effect=OSError("the GPU was touched"))
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(dcp.filesystem, "_OverlappingCpuLoader", touched),
    ):
        writer.commit()
        problem = writer.wait(30).problem
    writer._pinned = None
    writer.end()
    is_whole = not problem and torch.equal(checkpoint.read(path)[0]["model"]["weight"], torch.arange(70_000.0))
    cleanup_distributed()
    return sizes, problem, is_whole


def test_a_rank_pins_its_memory_once_without_rounding_and_writes_without_the_gpu(tmp_path):
    assert run_ranks(1, save_beside_a_gpu, tmp_path) == [([192 + 4032 + 280_000], "", True)]


def test_a_rank_that_cannot_write_holds_up_no_other(tmp_path):
    places, began = [*FAILING, "limit"], time.monotonic()
    ranks = run_ranks(2, save_with_failures, tmp_path, places)
    assert time.monotonic() - began < 30
    for number, (where, problems, partial, is_whole) in enumerate(ranks[0]):
        assert ranks[1][number] == (where, problems, partial, is_whole)
        rank, reason = (1, "") if where == "limit" else (FAILING[where][0], "No space left on device")
        said = f"{tmp_path}/checkpoints/step_0000000{number}: cannot be written ({reason}"
        assert problems[0].startswith(said) and f" (rank {rank} on " in problems[0], where
        assert not problems[1] and is_whole and partial == [f"step_0000000{k}" for k in range(number)], where
