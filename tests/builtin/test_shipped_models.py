"""The shipped models and image folder pass the tests that tests/distributed runs on small tasks."""

import pytest
import torch
from torchvision import models

from images import save_images
from ranks import torchrun
from test_exact_samples import observed
from test_oracle import check_against_the_oracle
from training import TINY
from utils.training.activation import find_blocks


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_dropout_of_a_torchvision_model_depends_on_step_and_micro_batch_not_on_rank(runs, ranks, accumulation):
    flags = "--model squeezenet1_1 --image_size 32 --lr 0.01 --max_steps 4".split()
    check_against_the_oracle(runs, ranks, accumulation, torch.float64, flags, 1e-12, task="")


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [((1, 0, ()), (2, 1, (1,))), ((2, 2, ()), (4, 1, (1,)))])
def test_images_decoded_and_randomly_cropped_are_the_same_on_any_number_of_ranks(runs, worlds):
    """An image folder with torchvision's augmentation, persistent workers over two epochs, also after a restart."""
    save_images(runs.root / "data" / "train", {"cat": 9, "dog": 10}, size=12)
    flags = "--dataset imagefolder --augment resized_crop --epochs 2 --global_batch_size 8 --no-use_amp --save_every 0"
    flags += " --auto_augment ra --random_erase 0.5 --train_size 10 --interpolation bicubic"
    flags = [*TINY, *flags.split(), "--data_dir", runs.root / "data"]
    each = [
        observed(ranks, "", [*flags, "--run_dir", runs.folder(str(ranks)), "--num_workers", workers], stops)
        for ranks, workers, stops in worlds
    ]
    assert each[0] == each[1] and len(each[0]) == 10


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
