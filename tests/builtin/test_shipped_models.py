# extra: template
"""The shipped models and image folder pass the tests that tests/distributed runs on small tasks."""

import pytest
import torch
from torchvision import models

from ranks import torchrun
from utils.training.blocks import find_blocks

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
        model_blocks = find_blocks(models.get_model(name, weights=None))
    assert sum(type(block).__name__ == kind for block in model_blocks) == blocks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_verify_holds_on_a_gpu():
    ended = torchrun(1, *"--backend nccl --image_size 16 --dataset_size 100".split(), script="scripts/verify.py")
    assert ended.code == 0, ended.text
