"""--cache: the same batches however the set is kept, and a run that is resumed in another mode."""

import hashlib
import logging
from collections import Counter

import pytest

import train
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from images import save_images
from ranks import run_ranks
from training import TINY, difference
from utils.cache import cached
from utils.loading import create_distributed_dataloader, create_evaluation_dataloader

BAD = ("train/cat/002", "train/dog/010", "val/cat/001")


@pytest.fixture
def flags(tmp_path):
    for split, count in (("train", 41), ("val", 7)):
        save_images(tmp_path / "data" / split, {"cat": count, "dog": count - 3}, size=12)
    for name in BAD:
        (tmp_path / f"data/{name}.png").write_bytes(b"no image")
    words = "--image_size 8 --dataset imagefolder --global_batch_size 16 --augment resized_crop --corrupt_images replace --data_dir".split()
    return [*TINY, *words, str(tmp_path / "data")]


def digests(flags):
    """Of each micro-batch of two epochs of training and of the evaluation, and what was replaced in them."""
    config = TrainingConfig.from_args([*map(str, flags)])
    ctx = setup_distributed(config)
    train_set, held_out, config = cached(*train.load_data(config, ctx), ctx, logging.getLogger("ddp"))
    loader, _ = create_distributed_dataloader(train_set, config, ctx)
    found, replaced = [], Counter()
    for epoch, each in ((0, loader), (1, loader), (0, create_evaluation_dataloader(held_out["val"], config, ctx))):
        for m in (m for window in each.windows(epoch) for m in window if m.is_counted):
            content = hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in m.batch)).hexdigest()
            found.append((each is loader, epoch, m.indices, content))
        replaced.update((each is loader, epoch, index, text) for index, text in each.take_replaced())
    cleanup_distributed()
    return found, replaced


def of_all(ranks, flags):
    each = run_ranks(ranks, digests, flags)
    return sorted(batch for found, _ in each for batch in found), sum((replaced for _, replaced in each), Counter())


@pytest.mark.parametrize(
    "worlds", [((2, 1, "ram"),), pytest.param(((1, 2, "ram"), (2, 0, "device"), (4, 2, "ram"), (2, 2, "none")), marks=pytest.mark.slow)]
)
def test_the_batches_are_the_same_however_the_set_is_kept(flags, worlds):
    """To the bit, over two epochs and the evaluation; what cannot be read is replaced alike."""
    expected, replaced = of_all(1, [*flags, "--num_workers", 0])
    assert len(expected) == 2 * 20 + 3 and set(replaced.values()) == {1} and len(replaced) == 5
    for ranks, workers, cache in worlds:
        found = of_all(ranks, [*flags, "--num_workers", workers, "--cache", cache])
        assert found == (expected, replaced), (ranks, workers, cache)


@pytest.mark.slow
def test_a_checkpoint_is_resumed_in_another_mode(runs, flags):
    """Bit for bit the run that was never stopped: two ranks, stopped within an epoch, with another cache from there on."""
    flags = [*flags, *"--epochs 2 --num_workers 1 --log_interval 1".split()]  # a replaced sample is counted at log points
    runs.train(2, "whole", *flags, task="")
    runs.train_with_stops(2, "parts", *flags, stops=(2,), task="", goes_on=False)
    runs.train(2, "parts", *flags, "--resume_from", "auto", "--cache", "ram", task="")
    assert difference(*(runs.last(name)["model"] for name in ("whole", "parts"))) == []
    assert [runs.json(name, "summary.json")["replaced_samples"] for name in ("whole", "parts")] == [4, 4]
    assert len(runs.events("parts", "resumed")) == 1
