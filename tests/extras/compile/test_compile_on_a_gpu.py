"""Needs a GPU, a C compiler and triton. scripts/test.sh --cuda runs it."""

import pytest
import torch
from test_compile import CUDA, FLAGS, SECONDS, assert_near, need_compiler, train_net

from ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_a_compiled_run_equals_the_eager_one(runs, mode):
    """In float64; with CUDA graphs, accumulation, a short last global batch and evaluation. Nothing is compiled or
    recorded after the first step."""
    need_compiler(CUDA)
    for name in ("off", mode):
        words = runs.words(name, *FLAGS, "--backend", "nccl", "--compile", name)
        run_ranks(1, train_net, 16, words, deadline=SECONDS)
    assert_near(runs.last("off"), runs.last(mode))
    assert "recompiles" not in runs.log(mode)
