# extra: template
"""Needs a GPU: the same draws, pixels and batches as on the CPU, pinned snapshots, and bitwise equal resumes with
--deterministic. scripts/test.sh --cuda runs it."""

import pytest
import torch

from config import TrainingConfig
from ddp_utils import DistributedContext
from tasks import Images
from test_exact_resume import FLAGS
from utils.checkpoint.pinned_buffers import PinnedBuffers, _is_cuda_success
from utils.data.loader import create_distributed_dataloader
from utils.example.augment import augment_images
from utils.rng import draw_integers, draw_uniform, sample_draws
from utils.run.async_snapshot import _copy_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_draws_and_pixels_equal_those_on_the_cpu():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 3, 36, 36), dtype=torch.uint8, generator=generator)
    indices = torch.randint(2**40, (64,), generator=generator)
    drawn = [sample_draws(3, 5, indices.to(device), 4).cpu() for device in ("cpu", "cuda")]
    assert torch.equal(*drawn)
    assert torch.equal(draw_integers(drawn[0], 7), draw_integers(drawn[1].cuda(), 7).cpu())
    assert torch.equal(draw_uniform(drawn[0]), draw_uniform(drawn[1].cuda()).cpu())
    for ids, n in ((indices, 0), (indices % 1000, 1000)):  # with n, the crops of the epoch are drawn at once
        on_cpu, on_cuda = (
            augment_images(images.to(device), "crop", 36, 3, 5, ids.to(device), n).cpu() for device in ("cpu", "cuda")
        )
        assert torch.equal(on_cpu, on_cuda)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_equal_those_on_the_cpu(workers):
    """Pinned, and transformed in the side stream; labels and pixels are bitwise equal."""
    by_device = []
    for device in ("cpu", "cuda"):
        ctx = DistributedContext(0, 0, 1, torch.device(device, 0) if device == "cuda" else torch.device(device))
        config = TrainingConfig(batch_size=16, num_workers=workers)
        loader, _ = create_distributed_dataloader(Images(100, "train"), config, ctx)
        micro_batches = [m for epoch in (0, 1) for m in loader.micro_batches(epoch)]
        assert all(tensor.device.type == device for m in micro_batches for tensor in m.batch)
        by_device.append([tensor.cpu() for m in micro_batches for tensor in m.batch])
        loader.close()
    for on_cpu, on_cuda in zip(*by_device, strict=True):  # normalization may be fused to one rounding
        torch.testing.assert_close(on_cpu, on_cuda, rtol=1e-6, atol=1e-6)


def test_a_snapshot_is_pinned_and_holds_the_state():
    tensors = [torch.randn(300, 70, device="cuda"), torch.arange(5, device="cuda"), torch.ones((), device="cuda")]
    tensors.append(torch.randn(8, 3, 5, 5, device="cuda").contiguous(memory_format=torch.channels_last))
    memory = PinnedBuffers()
    copied, pairs = memory.allocate_copy({"tensors": tensors})
    assert all(view.is_pinned() for view, _ in pairs)
    _copy_tensors(pairs)
    torch.cuda.synchronize()
    assert all(torch.equal(view, tensor.cpu()) for view, tensor in zip(copied["tensors"], tensors, strict=True))
    memory.release()


def test_a_failed_pinning_does_not_surface_in_the_next_kernel():
    assert not _is_cuda_success(torch.cuda.cudart().cudaHostRegister(0, 4096, 0))
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize(
    ("task", "precision"),
    [
        ("images", "--amp_dtype bf16"),
        ("images", "--amp_dtype fp16"),
        ("lines", "--no-use_amp"),
        ("blocks", "--amp_dtype bf16 --sharding zero3"),
        ("blocks", "--no-use_amp --ema_decay 0.9 --sharding zero2 --cpu_offload"),
    ],
)
def test_a_resume_with_deterministic_is_bitwise_equal(runs, task, precision):
    """One rank; three stops by a signal, two of them in one epoch."""
    flags = "--backend nccl --deterministic --grad_accum_steps 2 --dataset_size 61".split()
    flags = [*FLAGS, *flags, *precision.split()]
    runs.train(1, "whole", *flags, task=task)
    runs.train_with_stops(1, "parts", *flags, task=task, stops=(1, 3, 11))
    runs.assert_same("whole", "parts")
