"""Allocation failures: which errors are recognised, and the message for them."""

import errno
from pathlib import Path
from unittest import mock

import pytest
import torch

from config import TrainingConfig
from ddp_utils import DistributedContext
from test_checkpoint import payload
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.memory import is_out_of_memory, read_free_memory
from utils.run.exit import find_cause
from utils.run.memory_errors import explain_out_of_memory, suggest_half_batch
from utils.settings.errors import TrainingError
from utils.training.state import TrainState

CUDA = "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 139.80 GiB."
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 33554432 bytes. Error code 12 (Cannot allocate memory)"
)
FAILED = [
    torch.OutOfMemoryError(CUDA),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error in: ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'"),
    RuntimeError(CPU),
    RuntimeError("alloc_cpu.cpp:66] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:11660"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("out of memory"),
]
CTX = DistributedContext(1, 1, 2, torch.device("cuda", 1), hosts=("a", "b"), device_names=("NVIDIA H200",) * 2)


@pytest.mark.guarantee("memory")
def test_failed_allocations_are_distinguished_from_other_errors():
    assert [error for error in FAILED if not is_out_of_memory(error)] == []
    assert [
        error for error in OTHERS if is_out_of_memory(error) or explain_out_of_memory(error, TrainingConfig(), CTX)
    ] == []


@pytest.mark.guarantee("memory")
def test_the_error_names_the_rank_the_device_and_the_flags_that_help():
    config = TrainingConfig(global_batch_size=512)
    flags = "--batch_size 32 --global_batch_size 512 (the same global batch)"
    text = str(explain_out_of_memory(FAILED[0], config, CTX))
    assert text.startswith(f"Rank 1 on b ran out of NVIDIA H200 (cuda:1) ({CUDA.rstrip('.')}). Use {flags}")
    assert text.endswith(" or a smaller model or image size.")
    assert ") or --activation_checkpointing or" in text  # extra: compile
    assert " or --sharding zero3 or" in text  # extra: sharding
    # a resume cannot change the micro-batch
    text = str(explain_out_of_memory(MemoryError(), config, CTX, is_resumed=True))
    text = text.replace("--activation_checkpointing or ", "")
    assert text.startswith("Rank 1 on b ran out of memory (MemoryError). Use fewer --num")


@pytest.mark.parametrize(("size", "flags"), [(64, "--batch_size 32"), (48, "--batch_size 16"), (1, "")])
def test_halving_the_micro_batch_keeps_the_global_batch(size, flags):
    assert suggest_half_batch("batch_size", size, 128) == (flags and f"{flags} --global_batch_size 128")


def test_out_of_memory_during_a_load_is_not_reported_as_a_bad_checkpoint(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise torch.OutOfMemoryError(CUDA)

    path = checkpoint.step_checkpoint_path(tmp_path, 10)
    archive.write_archive(path, payload(10))
    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(TrainState, "_load", fail)
    for load in (lambda: checkpoint.read_checkpoint(path), lambda: object.__new__(TrainState).load_state_dict({})):
        with pytest.raises(torch.OutOfMemoryError):
            load()


def test_the_checkpoint_folder_whose_storage_hangs_is_not_read_for_the_cause_of_a_failure():
    error, run = TrainingError("its write has made no progress"), mock.Mock(resume_path=None)
    with mock.patch("utils.run.exit.list_step_checkpoints", side_effect=AssertionError):
        assert find_cause(error, run, TrainingConfig(), mock.Mock(rank=0)) is error


@pytest.mark.parametrize("text", ["", "12:memory:/docker/0a\n4:cpu:/docker/0a\n", "0::/no/such/group\n", "nonsense"])
def test_a_cgroup_of_version_1_or_none_is_no_limit(monkeypatch, text):
    plain = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda p, *rest: text if p.name == "cgroup" else plain(p, *rest))
    assert read_free_memory() > 0
