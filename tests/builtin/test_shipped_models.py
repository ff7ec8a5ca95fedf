"""The shipped models and image folder pass the tests that tests/distributed runs on small tasks."""

import pytest
import torch
from torchvision import models

from ranks import torchrun
from test_kernel import TO_END, check_against_the_kernel
from utils.training.activation import find_blocks


@pytest.mark.slow
def test_mini_resnet_equals_the_kernel_bit_for_bit(runs):
    flags = "--dataset_size 45 --epochs 2 --lr 0.02 --no-use_amp --grad_accum_steps 2".split()
    check_against_the_kernel(runs, [(2, 3), (2, TO_END)], "", flags)


KNOWN = [
    ("resnet50", 16, "Bottleneck"),
    ("vit_b_16", 12, "EncoderBlock"),
    ("convnext_tiny", 18, "CNBlock"),
    ("swin_t", 12, "SwinTransformerBlock"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks", "kind"), KNOWN)
def test_the_blocks_of_known_models_are_found(name, blocks, kind):
    with torch.device("meta"):
        found = find_blocks(models.get_model(name, weights=None))
    assert sum(type(block).__name__ == kind for block in found) == blocks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_verify_holds_on_a_gpu():
    ended = torchrun(1, *"--backend nccl --image_size 16 --dataset_size 100".split(), script="scripts/verify.py")
    assert ended.code == 0, ended.text
