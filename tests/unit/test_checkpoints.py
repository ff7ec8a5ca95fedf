# extra: template
"""Copies of the state, files and who writes them, records on a full disk, the user's command."""

import mmap
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import train
from ranks import run_ranks
from tasks import train_task
from test_checkpoint import payload
from utils.checkpoint import archive, layouts
from utils.checkpoint import format as checkpoint
from utils.checkpoint.layouts import FileLayout
from utils.checkpoint.pinned_buffers import PinnedBuffers
from utils.files import AppendOnlyFile, read_records
from utils.rng import find_diverged_ranks
from utils.run import async_snapshot
from utils.run.async_snapshot import AsyncSnapshot
from utils.run.checkpoints import Checkpoints
from utils.settings.errors import TrainingError, UserError


def state(step):
    written = payload(step) | {"ema": {"counter": torch.tensor(step), "nothing": torch.empty(0, 3)}}
    written["model"]["conv"] = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    return written


def write(path, written, before_rename=lambda: None):
    FileLayout().write(path, written, before_rename, lambda: None)


def test_a_copy_is_in_memory_that_is_used_again_and_its_file_holds_the_state(tmp_path):
    memory, places = PinnedBuffers(), set()
    for step in (10, 20, 30):
        written, path = state(step), checkpoint.step_checkpoint_path(tmp_path, step)
        copied, pairs = memory.allocate_copy(written)
        for place, tensor in pairs:
            place.copy_(tensor)
        places.add(pairs[0][0].data_ptr())
        before = {name: tensor.clone() for name, tensor in written["model"].items()}
        for _, tensor in pairs:
            tensor.zero_()
        write(path, copied)
        loaded = checkpoint.read_checkpoint(path)[0]
        assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in before.items())
        assert loaded["model"]["conv"].stride() == before["conv"].stride() and loaded["ema"]["counter"] == step
        assert loaded["ema"]["nothing"].shape == (0, 3) and loaded["config"] == written["config"]
    assert len(places) == 1


def test_tied_weights_stay_one_tensor():
    tied = nn.Linear(3, 3).weight
    copied, pairs = PinnedBuffers().allocate_copy({"a": tied, "b": {"c": tied}, "d": tied.detach().clone()})
    assert len(pairs) == 2 and copied["a"] is copied["b"]["c"] is not copied["d"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            {"a": [1, {"b": Path("x")}]},
            r"A checkpoint cannot hold model.a\[1\].b, which is a \S+PosixPath\. Use tensors",
        ),
        ({"v": torch.__version__}, "model.v, which is a torch.torch_version.TorchVersion"),
        ({"x": (1.0, {3})}, r"model.x\[1\], which is a builtins.set"),
        ({(1, 2): 3}, "model, which .* dicts whose keys are numbers or text"),
    ],
)
def test_values_that_torch_load_would_reject_are_rejected_by_name_when_saved(value, problem):
    with pytest.raises(UserError, match=problem):
        PinnedBuffers().allocate_copy({"model": value})


def test_the_thread_that_copies_first_takes_the_device_of_its_rank(monkeypatch):
    """A new thread is on GPU 0, where each rank would open a context of its own."""
    calls, stream = [], mock.MagicMock()
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: calls.append(device))
    monkeypatch.setattr(async_snapshot, "_copy_tensors", lambda pairs: calls.append("copy"))
    monkeypatch.setattr(async_snapshot, "fingerprint_weights", lambda state: calls.append("read") or 7)
    stream.__enter__.side_effect = lambda: calls.append("stream")
    of_rank_3 = SimpleNamespace(_stream=stream, _ctx=SimpleNamespace(device="cuda:3", is_main=False), _state=None)
    assert AsyncSnapshot._copy_and_fingerprint(of_rank_3, [], torch.tensor(3), None) == [7, 3]
    assert calls == ["cuda:3", "stream", "copy", "read"]


def test_ranks_whose_weights_differ_are_told_of_their_buffers_too():
    def finish():
        raise TrainingError("rank 1 has different weights")

    noted = mock.Mock()
    with pytest.raises(TrainingError, match="different weights"):
        Checkpoints.finish_copy(
            SimpleNamespace(_snapshot=SimpleNamespace(finish=finish), _warn_of_differing_buffers=noted, _blocked_s=0.0)
        )
    noted.assert_called_once_with()


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("is_possible", [True, False])
def test_memory_for_a_gpu_is_pinned_once_without_rounding_and_a_failure_is_a_warning(is_possible, monkeypatch, caplog):
    """Its error is cleared: the next kernel would raise it."""
    cleared, sizes = [], []
    cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=is_possible - 1),
        cudaHostRegister=lambda _, size, __: sizes.append(size) or 0,
        cudaHostUnregister=lambda _: 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: cleared.append(device))
    memory = PinnedBuffers()
    for _ in range(2):
        memory.reserve([torch.empty(length).as_subclass(OnGPU) for length in (33, 1000, 70_000)])
    assert sizes == [192 + 4032 + 280_000] and cleared == ["cuda"] * (not is_possible)
    assert ("cannot be pinned, so checkpoints are copied more slowly." in caplog.text) is not is_possible
    memory.release()


def allocations(flags):
    """How often a run allocated the memory for its checkpoints, before the first step and in total."""
    plain_epoch, plain_map, count, before = train.train_one_epoch, mmap.mmap, [], []

    def epoch(training):
        before.append(len(count))
        return plain_epoch(training)

    def note(descriptor, size, *args):
        count.append(size) if size > 1 else None
        return plain_map(descriptor, size, *args)

    with mock.patch.object(mmap, "mmap", note), mock.patch.object(train, "train_one_epoch", epoch):
        train_task("images", flags)
    return before[0], len(count)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_memory_for_checkpoints_is_allocated_before_the_first_step(runs, optimizer):
    words = runs.words("run", *f"--dataset_size 16 --epochs 2 --save_every_steps 1 --optimizer {optimizer}".split())
    ((before, count),) = run_ranks(1, allocations, words)
    assert before == count > 0


@pytest.mark.guarantee("disk")
def test_a_checkpoint_that_cannot_be_written_is_an_error_with_the_free_space(tmp_path):
    path, written = checkpoint.step_checkpoint_path(tmp_path / "checkpoints", 10), state(10)
    with pytest.raises(
        OSError, match=r"00010.pt cannot be written \(No such file .*\)\. .* needs 0.0 MB, and its folder"
    ):
        write(path, written)
    (tmp_path / "lock.json").touch()  # the run's folder is there: the folder of checkpoints was deleted
    write(path, written)
    shutil.rmtree(path.parent)
    (tmp_path / "lock.json").unlink()  # as on a mount point whose disk is gone
    with pytest.raises(OSError, match="its folder cannot be accessed"):
        write(path, written)
    assert not path.parent.exists()
    full = mock.patch.object(layouts.os, "statvfs", lambda path: os.statvfs_result((4096,) * 4 + (0,) * 6))
    with full, pytest.raises(OSError, match="No space left"):
        write(tmp_path / "step_00000010.pt", written)


@pytest.mark.guarantee("one-owner")
def test_nothing_appears_in_a_run_that_another_job_has_taken_over(tmp_path):
    def taken():
        raise TrainingError("another job")

    with pytest.raises(TrainingError, match="another job"):
        write(checkpoint.step_checkpoint_path(tmp_path, 10), state(10), taken)
    assert not list(tmp_path.iterdir())


@pytest.mark.guarantee("stalled-write")
def test_blocks_of_a_write_are_counted_and_hashed(tmp_path):
    ticks, big = [], payload(10) | {"model": {"weight": torch.randn(5_000_000)}}
    digest = archive.write_archive(tmp_path / "a.pt", big, on_progress=lambda: ticks.append(1))
    assert len(ticks) > 5 and checkpoint.verify_checkpoint(tmp_path / "a.pt") == (10, digest)


@pytest.mark.guarantee("divergence")
@pytest.mark.parametrize(
    ("digests", "ranks"), [([5, 5, 5, 5], []), ([5, 5, 6, 5], [2]), ([5, 6], [1]), ([6, 5, 5, 5], [0])]
)
def test_ranks_whose_weights_differ_from_the_majority_are_named(digests, ranks):
    assert find_diverged_ranks(digests) == ranks


@pytest.mark.guarantee("disk")
def test_records_that_do_not_fit_on_a_full_disk_are_written_later_complete_and_once(tmp_path):
    path, plain_write = tmp_path / "records.jsonl", os.write
    file = AppendOnlyFile(path)
    file.append('{"n": 0}')
    with mock.patch("os.write", lambda descriptor, data: plain_write(descriptor, data[:3])):
        file.append('{"n": 1}')
    with mock.patch("os.write", side_effect=OSError(28, "No space left on device")):
        file.append('{"n": 2}')
    assert [record for *_, record in read_records(path)] == [{"n": 0}]
    file.append('{"n": 3}')
    assert path.read_text() == "".join(f'{{"n": {n}}}\n' for n in range(4))
