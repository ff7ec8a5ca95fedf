"""Needs a GPU: the same draws and pixels as on the CPU, and bitwise equal resumes with
--deterministic."""

import pytest
import torch

from ranks import run_ranks
from test_compile import FLAGS as COMPILE_FLAGS
from test_compile import SECONDS, assert_near, train_net
from test_exact_resume import FLAGS
from utils.data.augment import augment_images
from utils.rng import draw_integers, draw_uniform, sample_draws

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("kind", ["crop", "resized_crop"])
def test_draws_and_pixels_equal_those_on_the_cpu(kind):
    """Crop and flip are bitwise equal; a resized crop differs by the rounding of float32 interpolation (0 to 255)."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 3, 36, 36), dtype=torch.uint8, generator=generator)
    indices = torch.randint(2**40, (64,), generator=generator)
    drawn = [sample_draws(3, 5, indices.to(device), 4).cpu() for device in ("cpu", "cuda")]
    assert torch.equal(*drawn)
    assert torch.equal(draw_integers(drawn[0], 7), draw_integers(drawn[1].cuda(), 7).cpu())
    assert torch.equal(draw_uniform(drawn[0]), draw_uniform(drawn[1].cuda()).cpu())
    here, there = (
        augment_images(images.to(device), kind, 32, 3, 5, indices.to(device)).cpu() for device in ("cpu", "cuda")
    )
    if kind == "crop":
        assert torch.equal(here, there)
    else:
        torch.testing.assert_close(here, there, rtol=0, atol=0.05)


@pytest.mark.parametrize("precision", ["--amp_dtype bf16", "--amp_dtype fp16", "--no-use_amp"])
@pytest.mark.parametrize("task", ["images", "lines"])
def test_a_resume_with_deterministic_is_bitwise_equal(runs, task, precision):
    """One rank; three stops by a signal, two of them in one epoch."""
    flags = "--backend nccl --deterministic --grad_accum_steps 2 --dataset_size 61".split()
    flags = [*FLAGS, *flags, *precision.split()]
    runs.train(1, "whole", *flags, task=task)
    runs.train_with_stops(1, "parts", *flags, task=task, stops=(1, 3, 11))
    runs.assert_same("whole", "parts")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_run_equals_the_eager_one(runs, mode):
    """In float64; with CUDA graphs, accumulation, a short last global batch and evaluation. Nothing is compiled or
    recorded after the first step."""
    for name in ("off", mode):
        words = runs.words(name, *COMPILE_FLAGS, "--backend", "nccl", "--compile", name)
        run_ranks(1, train_net, 16, words, deadline=SECONDS)
    assert_near(runs.last("off"), runs.last(mode))
    assert "recompiles" not in runs.log(mode)
