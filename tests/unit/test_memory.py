"""utils/memory.py: which errors are taken for want of memory, and the sentence for them."""

import errno

import pytest
import torch

import train
from config import TrainingConfig, TrainingError
from ddp_utils import DistributedContext
from utils.checkpoint import format as checkpoint
from utils.memory import explain_memory, is_out_of_memory
from utils.training.state import TrainState

CUDA = (  # as c10/cuda/CUDACachingAllocator.cpp puts it together
    "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.58 GiB is"
    " free. Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this process has 126.20 GiB"
    " memory in use. Of the allocated memory 120.07 GiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch"
    " but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 33554432 bytes. Error code 12 (Cannot allocate memory)"
)
SHORT = [
    torch.OutOfMemoryError(CUDA),
    RuntimeError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error in: ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'"),
    RuntimeError(CPU),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
    ),
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


def refuse(error):
    def act(*_, **__):
        raise error

    return act


def test_an_allocation_that_failed_is_told_from_other_errors():
    assert [error for error in SHORT if not is_out_of_memory(error)] == []
    assert [error for error in OTHERS if is_out_of_memory(error) or explain_memory(error, TrainingConfig(), CTX)] == []


def test_the_sentence_names_the_rank_the_device_and_the_flags_that_help():
    def train_one_epoch():
        raise torch.OutOfMemoryError(CUDA)

    with pytest.raises(torch.OutOfMemoryError) as error:
        train_one_epoch()
    said = str(explain_memory(error.value, TrainingConfig(global_batch_size=512, use_amp=False), CTX))
    assert said.startswith(
        "rank 1: a micro-batch of 64 samples does not fit into the memory of NVIDIA H200 (cuda:1 of b)"
    )
    assert (
        "; give --batch_size 32 --global_batch_size 512 (the same global batch), or --activation_checkpointing, or"
        " --amp_dtype" in said
    )
    assert said.endswith("; python scripts/benchmark.py --find-batch with the same flags says what fits")


def test_an_evaluation_alone_says_it_too(monkeypatch):
    monkeypatch.setattr(train, "evaluate_only", refuse(MemoryError()))
    with pytest.raises(TrainingError, match="rank 0: .* does not fit into the memory of"):
        train.train(TrainingConfig(eval_only=True, backend="gloo"))


def test_want_of_memory_makes_no_checkpoint_a_damaged_one_or_one_that_does_not_fit(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "load_archive", refuse(RuntimeError(CPU)))
    monkeypatch.setattr(checkpoint, "verify", lambda path: None)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        checkpoint.read(tmp_path / "step_00000001.pt")
    monkeypatch.setattr(TrainState, "_load", refuse(torch.OutOfMemoryError(CUDA)))
    with pytest.raises(torch.OutOfMemoryError):
        object.__new__(TrainState).load_state_dict({}, 0, 1)
