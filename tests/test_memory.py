"""utils/memory.py: what is taken for want of memory, and what is said of it; the arithmetic of scripts/benching/find_batch.py."""

import errno
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ddp_utils
import model
import train
import utils.loading
import utils.memory
from benching import find_batch
from checks import rates
from config import RunFailed, TrainingConfig
from ddp_utils import DistributedContext
from utils import checkpoint
from utils.memory import DOING, Limit, explain_memory, free_memory, halved, host_limits, is_out_of_memory
from utils.saving import Saver
from utils.train_state import TrainState
from utils.workers import Late

CUDA_2_11 = (  # as c10/cuda/CUDACachingAllocator.cpp puts it together
    "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.58 GiB is free. "
    "Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this process has 126.20 GiB memory in use. "
    "Of the allocated memory 120.07 GiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CUDA_2_15 = CUDA_2_11.replace("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LIMITED = CUDA_2_11.replace("Of the allocated", "40.00 GiB allowed; Of the allocated")  # under set_per_process_memory_fraction
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 33554432 bytes. "
    "Error code 12 (Cannot allocate memory)"
)
SHORT = [
    torch.OutOfMemoryError(CUDA_2_11),
    torch.OutOfMemoryError(CUDA_2_15),
    torch.OutOfMemoryError(LIMITED),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error in: ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'"),
    RuntimeError(CPU),
    RuntimeError("[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    MemoryError("Unable to allocate 74.5 GiB for an array with shape (10000000000,) and data type float64"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:11660"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("out of memory"),
]


@pytest.mark.parametrize("error", SHORT, ids=str)
def test_want_of_memory_is_known(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error) and explain_memory(error, TrainingConfig(), ctx()) is None


@pytest.mark.parametrize(("free", "is_memory"), [(100 * 2**20, True), (20 * 2**30, False)])
def test_onednn_does_not_say_of_what_it_died(monkeypatch, free, is_memory):
    monkeypatch.setattr(utils.memory, "host_limits", lambda: [Limit(2**40, 2**39, "the machine"), Limit(2**35, free, "its cgroup")])
    assert is_out_of_memory(RuntimeError("could not create a primitive")) == is_memory


def ctx(device="cuda", world_size=2):
    names = {"cuda": "NVIDIA H200", "cpu": "cpu"}
    return DistributedContext(
        1, 1, world_size, torch.device(device, 1 if device == "cuda" else None), hosts=("a", "b"), device_names=(names[device],) * 2
    )


def thrown(error, place):
    """The error as it comes out of a function of that name, in whose frame a batch lies."""
    code = f"def {place}(batch):\n    raise error\ndef run():\n    {place}((images, labels))"
    names = {"error": error, "images": torch.zeros(64, 3, 32, 32), "labels": torch.zeros(64, dtype=torch.int64)}
    exec(code, names)
    try:
        names["run"]()
    except BaseException as caught:
        return caught


GPU = r"memory of NVIDIA H200 \(cuda:1 of b\) \(it asked for 1.95 GiB, 1.58 GiB of 139.80 GiB is free, this process holds 126.20 GiB\); "
BATCH = r"a micro-batch of 64 samples \(float32 \[64, 3, 32, 32\] and int64 \[64\]\) does not fit into the "
FIND = r"; python scripts/benchmark.py --find-batch with the same flags says what fits"


@pytest.mark.parametrize("text", [CUDA_2_11, CUDA_2_15, LIMITED], ids=["2.11", "2.15", "fraction"])
def test_the_sentence_for_a_micro_batch_on_a_gpu(text):
    config = TrainingConfig(global_batch_size=512, use_amp=False)
    said = str(explain_memory(thrown(torch.OutOfMemoryError(text), "train_one_epoch"), config, ctx()))
    ways = r"give --batch_size 32 --global_batch_size 512 \(the same global batch\), or --activation_checkpointing, or --amp_dtype bf16 in place"
    assert re.fullmatch(rf"rank 1: {BATCH}{GPU}{ways} of --no-use_amp{FIND}", said), said


def test_a_run_that_goes_on_keeps_its_micro_batch():
    said = str(explain_memory(thrown(torch.OutOfMemoryError(CUDA_2_11), "warm_up"), TrainingConfig(), ctx(), Path("r/step_7.pt")))
    fixed = "the micro-batch of a run that goes on is fixed: give --activation_checkpointing, or a device with more memory, and --resume_from auto; "
    assert (
        fixed + "or begin a new run from its weights: --batch_size 32 --global_batch_size 128 --init_from r/step_7.pt --run_dir NEW" in said
    )


@pytest.mark.parametrize(
    ("place", "settings", "error", "said"),
    [
        (
            "warm_up",
            {"grad_accum_steps": 3},
            CUDA_2_11,
            "--batch_size 32 --global_batch_size 384 in place of --grad_accum_steps 3 (the same",
        ),
        (
            "warm_up",
            {"activation_checkpointing": True},
            CUDA_2_11,
            "give --batch_size 32 --global_batch_size 128 (the same global batch); python",
        ),
        ("warm_up", {"batch_size": 1}, CUDA_2_11, "give --activation_checkpointing; python"),
        ("evaluate", {}, CUDA_2_11, "the evaluation of a micro-batch of 64 samples"),
        ("evaluate", {"eval_only": True}, CUDA_2_11, "is free, this process holds 126.20 GiB); give --batch_size 32"),
        (
            "create_state",
            {"optimizer": "adamw", "ema_decay": 0.9},
            CUDA_2_11,
            "or --image_size, or --optimizer sgd, or no --ema_decay, or a device",
        ),
        ("update_if_finite", {}, CUDA_2_11, "the model, with its gradients and what the optimizer keeps, does not fit"),
        (
            "train_one_epoch",
            {},
            CPU,
            "give the job more memory, fewer --num_workers, or fewer ranks to this machine",
        ),  # of the host, beside a GPU
        ("save", {}, CPU, "the copy of a checkpoint does not fit into the memory of b (it asked for 32 MiB, "),
        ("elsewhere", {}, CUDA_2_11, "what the run was doing does not fit"),
    ],
)
def test_the_remedy_is_that_of_the_place(place, settings, error, said):
    error = torch.OutOfMemoryError(error) if error != CPU else RuntimeError(error)
    found = str(explain_memory(thrown(error, place), TrainingConfig(**settings), ctx()))
    assert said in found and "\n" not in found, found


def test_on_the_cpu_the_tightest_limit_is_named(monkeypatch):
    monkeypatch.setattr(utils.memory, "host_limits", lambda: [Limit(2**40, 2**39, "the machine"), Limit(2**30, 2**24, "ulimit -d")])
    said = str(explain_memory(thrown(RuntimeError(CPU), "warm_up"), TrainingConfig(use_amp=False), ctx("cpu")))
    assert re.search(
        BATCH + r"memory of b \(it asked for 32 MiB, 16 MiB of 1.00 GiB is free by ulimit -d, this process holds [\d,.]+ [MG]iB\)", said
    )
    assert "bf16" not in said  # a CPU is not fast at it, unless it has chosen it already


def test_what_the_frames_held_is_let_go():
    import weakref

    error = thrown(MemoryError(), "warm_up")
    held = weakref.ref(error.__traceback__.tb_next.tb_next.tb_frame.f_locals["batch"][0])
    error.__traceback__.tb_next.tb_frame.f_globals.clear()
    assert held() is not None
    explain_memory(error, TrainingConfig(), ctx())
    assert held() is None


@pytest.mark.parametrize(
    ("batch", "whole", "flags"), [(64, 192, (32, 192)), (7, 49, (1, 49)), (6, 18, (3, 18)), (10, 50, (5, 50)), (1, 4, None)]
)
def test_a_smaller_micro_batch_divides_the_global_batch(batch, whole, flags):
    said = halved(batch, TrainingConfig(batch_size=batch, global_batch_size=whole), 2)
    assert said == (f"--batch_size {flags[0]} --global_batch_size {flags[1]}" if flags else "")
    if flags:
        TrainingConfig.from_args(said.split())


def test_the_places_are_functions_that_there_are():
    homes = [train, ddp_utils, rates, utils.loading.WindowLoader, TrainState, Saver]
    assert not [name for name in DOING if not any(hasattr(home, name) for home in homes)]


def test_the_limits_of_a_container_are_read_in_both_versions(monkeypatch, tmp_path):
    for name, root, files in (
        ("2", "v2", {"memory.max": "2000000000", "memory.current": "1500000000", "memory.stat": "anon 5\ninactive_file 300000000"}),
        ("1", "v1", {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900", "memory.stat": "total_inactive_file 50"}),
    ):
        for folder, there in (
            ("job", files),
            ("job/step", {"memory.max": "max", "memory.current": "1", "memory.stat": ""} if name == "2" else {}),
        ):
            (tmp_path / root / folder).mkdir(parents=True, exist_ok=True)
            for file, text in there.items():
                (tmp_path / root / folder / file).write_text(text)
    monkeypatch.setattr(
        utils.memory, "CGROUPS", tuple((tmp_path / f"v{n}", *row[1:]) for n, row in zip((2, 1), utils.memory.CGROUPS, strict=True))
    )
    plain = Path.read_text
    cgroup = "4:memory:/job\n1:cpu:/\n0::/job/step\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: cgroup if str(self) == "/proc/self/cgroup" else plain(self, *a, **k))
    found = [limit for limit in host_limits() if limit.name == "its cgroup"]
    assert found == [Limit(1000, 150, "its cgroup"), Limit(2_000_000_000, 800_000_000, "its cgroup")]
    assert free_memory() == 150


# ---- find_batch ----


@dataclass
class Machine:
    """Where a sample takes so much, and some memory is gone in any case. bend: what more a sample takes in large micro-batches."""

    memory: int
    base: int
    a_sample: float
    bend: float = 0.0
    tried: int = 0

    def __call__(self, size):
        self.tried += 1
        needs = int(self.base + self.a_sample * size + self.bend * size**1.5)
        return find_batch.Trial(size, find_batch.FIT, needs, 0.1) if needs <= self.memory else find_batch.Trial(size, find_batch.UNFIT)


@pytest.mark.parametrize("is_costly", [False, True])
@pytest.mark.parametrize("bend", [0.0, 0.05])
@pytest.mark.parametrize("memory", [1_005, 1_100, 5_000, 100_000])
def test_the_search_comes_within_5_percent(memory, bend, is_costly):
    machine = Machine(memory, 1_000, 1.0, bend)
    trials = find_batch.search(machine, 32, 1_000_000, memory, is_costly, lambda text: None)
    best = max(each.size for each in trials if each.end == find_batch.FIT)
    right = max(size for size in range(1, memory) if Machine(memory, 1_000, 1.0, bend)(size).end == find_batch.FIT)
    assert best <= right <= best * 1.05 + 1
    assert machine.tried <= (10 if is_costly else 20)


def test_the_search_ends_where_not_one_sample_fits_and_where_the_whole_set_does():
    trials = find_batch.search(Machine(999, 1_000, 1.0), 32, 500, 999, True, lambda text: None)
    assert [each.size for each in trials][-1] == 1 and not any(each.end == find_batch.FIT for each in trials)
    assert "not one sample fits; give" in find_batch.answer("as given", trials, 500, 64, 1)[0]
    trials = find_batch.search(Machine(10**9, 1_000, 1.0), 32, 500, 10**9, False, lambda text: None)
    assert trials[-1].size == 500 and "no micro-batch is larger" in "".join(find_batch.answer("as given", trials, 500, 64, 1))


@pytest.mark.parametrize(
    ("whole", "largest", "ranks", "size"),
    [(512, 744, 1, 512), (512, 744, 2, 256), (512, 100, 2, 64), (96, 50, 5, 16), (60, 7, 4, 5), (7, 3, 1, 1), (4, 9, 8, 1)],
)
def test_the_flags_keep_the_global_batch(whole, largest, ranks, size):
    assert find_batch.keeping(whole, largest, ranks) == size
    lines = find_batch.answer("as given", [find_batch.Trial(largest, find_batch.FIT, 2**30, 0.5)], 10_000, whole, ranks)
    assert f"  --batch_size {size} --global_batch_size {whole}" in lines[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--ranks"], "--ranks: needs a number of"), (["--memory", "x"], "--memory: needs"), (["--memory", "0"], "of at least 0.1")],
)
def test_flags_of_its_own_are_checked(words, said, capsys):
    assert find_batch.main(words) == 2 and said in capsys.readouterr().err


# ---- where errors are caught for other reasons ----


def refuse(error):
    def act(*_, **__):
        raise error

    return act


def test_an_evaluation_alone_says_it_too(monkeypatch):
    monkeypatch.setattr(train, "evaluate_only", refuse(MemoryError()))
    with pytest.raises(RunFailed, match="rank 0: what the run was doing does not fit into the memory of"):
        train.train(TrainingConfig(eval_only=True, backend="gloo"))


def test_want_of_memory_makes_no_checkpoint_a_damaged_one(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "load_archive", refuse(RuntimeError(CPU)))
    monkeypatch.setattr(checkpoint, "verify", lambda path: None)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        checkpoint.read(tmp_path / "step_00000001.pt")


def test_want_of_memory_makes_no_checkpoint_one_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(TrainState, "_load", refuse(torch.OutOfMemoryError(CUDA_2_15)))
    with pytest.raises(torch.OutOfMemoryError):
        object.__new__(TrainState).load_state_dict({}, 0, 1)


def test_want_of_memory_makes_no_model_one_that_takes_other_images(monkeypatch):
    models = pytest.importorskip("torchvision").models
    monkeypatch.setattr(models, "get_model", refuse(RuntimeError(CPU)))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        model.create_model(TrainingConfig(model="resnet18"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("error", "end"), [(None, "fits"), (torch.OutOfMemoryError(LIMITED), "does not fit"), (Late("300"), find_batch.LATE)]
)
def test_a_trial_on_cuda_is_limited_and_lets_go(monkeypatch, error, end):
    done = []
    for name, given in (
        ("mem_get_info", (100, 400)),
        ("set_per_process_memory_fraction", None),
        ("reset_peak_memory_stats", None),
        ("max_memory_reserved", 90),
        ("empty_cache", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name, given=given: done.append((name, *args)) or given)
    monkeypatch.setattr(find_batch, "one_step", refuse(error) if error else lambda *_: (0.5, 7))
    device = torch.device("cuda", 1)
    trial = find_batch.on_cuda(TrainingConfig(), ctx(), None, 100)(8)
    assert trial == find_batch.Trial(8, end, *((90, 0.5) if error is None else ()))
    assert ("set_per_process_memory_fraction", 0.25, device) in done and done[-1] == ("empty_cache",)


def test_another_error_of_a_trial_is_no_want_of_memory(monkeypatch):
    for name in ("mem_get_info", "set_per_process_memory_fraction", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: (1, 1))
    monkeypatch.setattr(find_batch, "one_step", refuse(ValueError("mine")))
    with pytest.raises(ValueError, match="mine"):
        find_batch.on_cuda(TrainingConfig(), ctx(), None, 1)(8)
