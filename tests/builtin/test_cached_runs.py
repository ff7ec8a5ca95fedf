"""--cache: the same batches however the set is kept."""

import hashlib
import logging

import pytest

import train
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from images import save_images
from ranks import run_ranks
from training import TINY
from utils.data.cache import cached
from utils.data.loader import create_distributed_dataloader, create_evaluation_dataloader


def digests(flags):
    """Of each micro-batch of two epochs of training and of the evaluation."""
    config = TrainingConfig.from_args([*map(str, flags)])
    ctx = setup_distributed(config)
    train_set, held_out, config = cached(*train.load_data(config, ctx), ctx, logging.getLogger("ddp"))
    loader, _ = create_distributed_dataloader(train_set, config, ctx)
    found = []
    for epoch, each in ((0, loader), (1, loader), (0, create_evaluation_dataloader(held_out["val"], config, ctx))):
        for m in (m for global_batch in each.global_batches(epoch) for m in global_batch if not m.is_padding):
            content = hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in m.batch)).hexdigest()
            found.append((each is loader, epoch, m.indices, content))
    cleanup_distributed()
    return found


@pytest.mark.parametrize(
    "worlds",
    [
        ((2, 1, "ram"),),
        pytest.param(((1, 2, "ram"), (2, 0, "device"), (4, 2, "ram"), (2, 2, "none")), marks=pytest.mark.slow),
    ],
)
def test_the_batches_are_the_same_however_the_set_is_kept(tmp_path, worlds):
    """To the bit, over two epochs and the evaluation."""
    for split, count in (("train", 41), ("val", 7)):
        save_images(tmp_path / split, {"cat": count, "dog": count - 3}, size=12)
    flags = "--image_size 8 --dataset imagefolder --global_batch_size 16 --augment resized_crop --data_dir".split()

    def of_all(ranks, workers, cache):
        each = run_ranks(ranks, digests, [*TINY, *flags, tmp_path, "--num_workers", workers, "--cache", cache])
        return sorted(batch for found in each for batch in found)

    expected = of_all(1, 0, "none")
    assert len(expected) == 2 * 20 + 3
    for world in worlds:
        assert of_all(*world) == expected, world
