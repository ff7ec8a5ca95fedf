"""Settings by device: TF32 on CUDA only, cuDNN's benchmark mode unless --deterministic."""

import os
import warnings
from typing import ClassVar
from unittest import mock

import pytest
import torch

import utils.distributed.device
import verify  # extra: verify
from config import TrainingConfig
from ddp_utils import setup_distributed
from ranks import run_ranks
from tasks import using
from utils.clock import PhaseClock
from utils.data.transfer import SideStream
from utils.distributed.context import DistributedContext, Launch
from utils.distributed.device import configure_kernels
from utils.extras.sharding import sharded_model as sharding  # extra: sharding
from utils.rng import seed_device
from utils.training.optimizer import create_optimizer
from utils.training.precision import Precision


@pytest.fixture
def kernels():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.guarantee("kernels")
@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize(("device", "expected"), [("cuda", "high"), ("cpu", "highest")])
def test_tf32_is_used_on_cuda_and_cudnn_benchmark_unless_deterministic(kernels, device, expected, is_deterministic):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if the old and the new TF32 setting are mixed
        configure_kernels(torch.device(device, 0), is_deterministic)
        assert torch.get_float32_matmul_precision() == expected and torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32 == (device == "cuda")
        assert torch.backends.cudnn.benchmark != is_deterministic


def settings_of_libraries(flags):
    torch.use_deterministic_algorithms = lambda mode: None  # it imports the compiler, which takes seconds
    setup_distributed(TrainingConfig.from_args(flags))
    names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE")
    return *[os.environ.get(name) for name in names], torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.guarantee("kernels")
def test_deterministic_sets_up_cublas_and_nccl_and_does_not_fill_new_tensors():
    assert run_ranks(1, settings_of_libraries, ["--backend", "gloo", "--deterministic"]) == [(":4096:8", "0", False)]


def kernels_of_verify(flags):  # extra: verify
    """Those of a run that verify.py starts."""
    with using("images"):
        verify.prepare_fork(TrainingConfig.from_args(flags))
    utils.distributed.device.configure_kernels(torch.device("cuda", 0), True)  # as setup_distributed calls it
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_the_runs_of_verify_have_no_tf32():  # extra: verify
    assert run_ranks(1, kernels_of_verify, ["--dataset_size", "8", "--backend", "gloo"]) == [("highest", False)]


def test_the_banner_names_tf32_if_the_hardware_has_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    kinds = [("cpu", None), ("cpu", torch.bfloat16), ("cuda", None), ("cuda", torch.bfloat16)]
    titles = ["float32", "bfloat16", "float32 as TF32", "bfloat16, TF32 for the rest"]
    assert [Precision(*kind).title for kind in kinds] == titles
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)
    assert Precision("cuda", torch.float16).title == "float16"


@pytest.mark.parametrize(
    ("kind", "threads", "flags", "expected"),
    [
        ("cuda", "1", ["--cpu_offload"], [8]),  # as torchrun sets it
        ("cuda", "", ["--cpu_offload"], [8]),
        ("cuda", "3", ["--cpu_offload"], []),
        ("cuda", "1", [], []),
        ("cpu", "1", ["--cpu_offload"], []),
    ],
)
def test_an_offloaded_optimizer_uses_the_cores(monkeypatch, kind, threads, flags, expected):  # extra: sharding
    counts = []
    monkeypatch.setattr(sharding, "count_usable_cpus", lambda: 32)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    ctx = DistributedContext(0, 0, 4, torch.device(kind), local_world_size=4, launch=Launch(omp_num_threads=threads))
    sharding.set_offload_threads(TrainingConfig.from_args(["--sharding", "zero2", *flags]), ctx)
    assert counts == expected


@pytest.mark.parametrize(("flags", "expected"), [([], "nccl"), (["--cpu_offload"], "cpu:gloo,cuda:nccl")])
def test_offloaded_shards_get_a_backend_on_the_cpu_too(monkeypatch, kernels, flags, expected):  # extra: sharding
    device = utils.distributed.device
    monkeypatch.setattr(device, "choose_device", lambda *_: ("nccl", torch.device("cuda", 0)))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(device, "has_fast_bf16", lambda _: True)
    config = TrainingConfig.from_args(["--sharding", "zero2", *flags])
    backend, _, rank_info = device.set_up_device(config, Launch())
    assert (backend, rank_info["backend"]) == (expected, "nccl")


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_bits_of_an_optimizer_step_do_not_depend_on_the_number_of_threads(name):
    results, values = [], torch.randn(2, 300_001, generator=torch.Generator().manual_seed(0))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        parameter = torch.nn.Parameter(values[0].clone())
        optimizer = create_optimizer([{"params": [parameter]}], TrainingConfig(optimizer=name, lr=0.1))
        for _ in range(2):
            parameter.grad = values[1].clone()
            optimizer.step()
        results.append(parameter.detach())
    torch.set_num_threads(1)  # as in conftest.py
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.guarantee("unused")
def test_the_generators_of_the_device_and_the_cpu_are_seeded(monkeypatch):
    """On CUDA too: a forward pass that drops layers draws on the CPU."""
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator(), torch.Generator()])
    before = torch.get_rng_state()
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        drawn = []
        for key in ("a", "a", "b"):
            seed_device(device, "step", key)
            on_device = torch.rand(3, generator=torch.cuda.default_generators[1] if device.index else None)
            drawn.append((torch.rand(()).item(), on_device.tolist()))
        assert drawn[0] == drawn[1] and drawn[0][0] != drawn[2][0] and drawn[0][1] != drawn[2][1]
    torch.set_rng_state(before)


class Pretended:
    """torch's stream and event without an accelerator: what was called, in order."""

    seen: ClassVar[list] = []

    def __init__(self, *_, **__):
        self.seen.append(type(self).__name__)

    def __getattr__(self, name):
        return lambda *_: self.seen.append(name)

    def __enter__(self):
        self.seen.append("enter")

    def __exit__(self, *_):
        self.seen.append("exit")


def test_the_side_stream_of_any_accelerator_hands_over_in_order(monkeypatch):
    """An XPU, which this build of torch does not know; the calls are those of torch.accelerator only."""
    Pretended.seen.clear()
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch, name, type(name, (Pretended,), {}))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: torch.Stream())
    side = SideStream(torch.device("xpu", 0))
    side.wait_for_current_stream()
    batch, event = side.run(lambda: mock.Mock(spec=torch.Tensor, device=torch.device("xpu", 0)))
    side.sync_to_current_stream(batch, event)
    made = ["Stream", "Stream", "wait_stream", "enter", "Event", "record", "exit", "Stream", "wait_event"]
    assert Pretended.seen == made and batch.record_stream.call_count == 1
    clock = PhaseClock(torch.device("xpu", 0))
    clock.enter_phase("forward")
    assert Pretended.seen[len(made) :] == ["Event", "record"]
