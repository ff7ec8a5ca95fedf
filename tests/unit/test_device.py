"""Settings by device: TF32 on CUDA only, cuDNN's benchmark mode unless --deterministic."""

import warnings

import pytest
import torch

import ddp_utils
import verify
from config import TrainingConfig
from ranks import run_ranks
from tasks import using
from utils.distributed.device import choose_kernels
from utils.training.precision import Precision


@pytest.fixture
def kernels():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize(("device", "expected"), [("cuda", "high"), ("cpu", "highest")])
def test_tf32_is_used_on_cuda_and_cudnn_benchmark_unless_deterministic(kernels, device, expected, is_deterministic):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if the old and the new TF32 setting are mixed
        choose_kernels(torch.device(device, 0), is_deterministic)
        assert torch.get_float32_matmul_precision() == expected and torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32 == (device == "cuda")
        assert torch.backends.cudnn.benchmark != is_deterministic


def kernels_of_verify(flags):
    """Those of a run that verify.py starts."""
    with using("images"):
        verify.prepare(TrainingConfig.from_args(flags))
    ddp_utils.choose_kernels(torch.device("cuda", 0), True)  # as setup_distributed calls it
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_the_runs_of_verify_have_no_tf32():
    assert run_ranks(1, kernels_of_verify, ["--dataset_size", "8", "--backend", "gloo"]) == [("highest", False)]


def test_the_banner_names_tf32_if_the_hardware_has_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    kinds = [("cpu", None), ("cpu", torch.bfloat16), ("cuda", None), ("cuda", torch.bfloat16)]
    titles = ["float32", "bfloat16", "float32 as TF32", "bfloat16, TF32 for the rest"]
    assert [Precision(*kind).title for kind in kinds] == titles
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)
    assert Precision("cuda", torch.float16).title == "float16"
