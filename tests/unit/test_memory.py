"""utils/memory.py: which errors are taken for want of memory, and the sentence for them; the search of
scripts/benching/find_batch.py."""

import errno
from dataclasses import dataclass

import pytest
import torch

import train
from benching import find_batch
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


# ---- find_batch ----


@dataclass
class Machine:
    """Where a sample takes so much, and some memory is gone in any case. bend: what more a sample takes in large
    micro-batches."""

    memory: int
    bend: float = 0.0
    tried: int = 0

    def __call__(self, size):
        self.tried += 1
        needs = int(1_000 + size + self.bend * size**1.5)
        return (
            find_batch.Trial(size, find_batch.FIT, needs, 0.1)
            if needs <= self.memory
            else find_batch.Trial(size, find_batch.UNFIT)
        )


@pytest.mark.parametrize("is_costly", [False, True])
@pytest.mark.parametrize(("memory", "bend"), [(1_005, 0.0), (5_000, 0.05), (100_000, 0.05)])
def test_the_search_comes_within_5_percent(memory, bend, is_costly):
    machine = Machine(memory, bend)
    trials = find_batch.search(machine, 32, 1_000_000, memory, is_costly, lambda text: None)
    best = max(each.size for each in trials if each.end == find_batch.FIT)
    right = max(size for size in range(1, memory) if Machine(memory, bend)(size).end == find_batch.FIT)
    assert best <= right <= best * 1.05 + 1
    assert machine.tried <= (10 if is_costly else 20)


def test_the_search_ends_where_not_one_sample_fits_and_where_the_whole_set_does():
    trials = find_batch.search(Machine(999), 32, 500, 999, True, lambda text: None)
    assert trials[-1].size == 1 and "not one sample fits; give" in find_batch.answer("as given", trials, 500, 64, 1)[0]
    trials = find_batch.search(Machine(10**9), 32, 500, 10**9, False, lambda text: None)
    assert trials[-1].size == 500 and "no micro-batch is larger" in "".join(
        find_batch.answer("as given", trials, 500, 64, 1)
    )


@pytest.mark.parametrize(
    ("whole", "largest", "ranks", "size"),
    [(512, 744, 1, 512), (512, 744, 2, 256), (96, 50, 5, 16), (60, 7, 4, 5), (4, 9, 8, 1)],
)
def test_the_flags_keep_the_global_batch(whole, largest, ranks, size):
    lines = find_batch.answer("as given", [find_batch.Trial(largest, find_batch.FIT, 2**30, 0.5)], 10_000, whole, ranks)
    assert f"  --batch_size {size} --global_batch_size {whole}" in lines[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks"], "--ranks: needs a number of"),
        (["--memory", "x"], "--memory: needs"),
        (["--memory", "0"], "of at least 0.1"),
    ],
)
def test_flags_of_its_own_are_checked(words, said, capsys):
    assert find_batch.main(words) == 2 and said in capsys.readouterr().err
