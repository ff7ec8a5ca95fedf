"""What is chosen for the device: TF32 on CUDA alone, cuDNN's search unless --deterministic; and how the banner names
it."""

import warnings

import pytest
import torch

from utils.distributed.device import choose_kernels
from utils.training.precision import Precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def kernels():
    """What a test chooses does not outlive it."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_tf32_is_for_cuda_and_the_search_for_kernels_unless_deterministic(kernels, is_deterministic):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the older and the newer way to ask for TF32 warn when they are mixed
        for device, precision in ((CUDA, "high"), (CPU, "highest")):
            choose_kernels(device, is_deterministic)
            assert torch.get_float32_matmul_precision() == precision
            assert torch.backends.cuda.matmul.allow_tf32 == (device is CUDA) and torch.backends.cudnn.allow_tf32
            assert torch.backends.cudnn.benchmark != is_deterministic


@pytest.mark.parametrize(
    ("device", "dtype", "has_tf32", "title"),
    [
        ("cpu", None, False, "float32"),
        ("cpu", torch.bfloat16, False, "bfloat16"),
        ("cuda", None, True, "float32 as TF32"),
        ("cuda", torch.bfloat16, True, "bfloat16, TF32 where float32 is left"),
        ("cuda", torch.float16, False, "float16"),
    ],
)
def test_the_banner_names_tf32_where_the_hardware_has_it(monkeypatch, device, dtype, has_tf32, title):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: has_tf32)
    assert Precision(device, dtype).title == title
