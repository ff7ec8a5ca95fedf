# extra: cache and images
"""--cache: the same batches as without a cache, from memory that the ranks of a node share."""

import hashlib
import logging
from pathlib import Path

import pytest
import torch.distributed as dist

import train
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from images import save_images
from ranks import run_ranks
from training import TINY
from utils.data.loader import create_distributed_dataloader, create_evaluation_dataloader
from utils.data.sets import load_data
from utils.extras.cache.sample_cache import cache_datasets

FLAGS = [*TINY, *"--image_size 8 --dataset imagefolder --global_batch_size 16 --augment crop".split()]


@pytest.fixture
def flags(tmp_path):
    for split, count in (("train", 41), ("val", 7)):
        save_images(tmp_path / split, {"cat": count, "dog": count - 3}, size=12)
    return [*FLAGS, "--data_dir", str(tmp_path)]


def load(flags):
    """The context and config of this rank, and its data sets as cached."""
    config = TrainingConfig.from_args([*map(str, flags)])
    ctx = setup_distributed(config)
    sets = load_data(train.your_data, config, ctx)
    return ctx, sets.config, *cache_datasets(sets.train, sets.held_out, sets.config, ctx, logging.getLogger("ddp"))


def digests(flags):
    """Digests of each micro-batch of two training epochs and of the evaluation."""
    ctx, config, train_set, held_out = load(flags)
    loader, _ = create_distributed_dataloader(train_set, config, ctx)
    entries = []
    for epoch, source in ((0, loader), (1, loader), (0, create_evaluation_dataloader(held_out["val"], config, ctx))):
        for m in (m for m in source.micro_batches(epoch) if not m.is_padding):
            content = hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in m.batch)).hexdigest()
            entries.append((source is loader, epoch, m.indices, content))
    cleanup_distributed()
    return entries


@pytest.mark.guarantee("cache")
@pytest.mark.parametrize(
    "worlds",
    [
        ((2, 1, "ram"),),
        pytest.param(((1, 2, "ram"), (2, 0, "device"), (4, 2, "ram"), (2, 2, "none")), marks=pytest.mark.slow),
    ],
)
def test_the_batches_are_the_same_with_and_without_a_cache(flags, worlds):
    """Bitwise, over two epochs and the evaluation, on any number of ranks and workers."""

    def of_all(ranks, workers, cache):
        results = run_ranks(ranks, digests, [*flags, "--num_workers", workers, "--cache", cache])
        return sorted(batch for entries in results for batch in entries)

    expected = of_all(1, 0, "none")
    assert len(expected) == 2 * 20 + 3
    for world in worlds:
        assert of_all(*world) == expected, world


def shared_files(flags):
    """The value that rank 0 writes into the first sample, as read by this rank; {inode: bytes} of the caches that this
    rank maps; and whether they are unlinked."""
    ctx, _, train_set, _ = load(flags)
    if ctx.is_main:
        train_set[0][0].fill_(77)
    dist.barrier()
    value = train_set[0][0].unique().tolist()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/cache-" in line]
    cleanup_distributed()
    ends = {words[4]: [int(end, 16) for end in words[0].split("-")] for words in lines}
    are_gone = all(words[-1] == "(deleted)" for words in lines)
    return value, {inode: end - begin for inode, (begin, end) in ends.items()}, are_gone


@pytest.mark.guarantee("cache")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_the_ranks_of_a_node_share_one_mapped_file_per_data_set(flags):
    """So memory does not grow with the ranks. The files are unlinked: the memory is freed when the processes end."""
    ranks = run_ranks(2, shared_files, [*flags, "--num_workers", 1, "--cache", "ram"])
    assert ranks[0] == ranks[1]
    value, files, are_gone = ranks[0]
    bytes_of = [count * (3 * 8 * 8 + 8) for count in (79, 11)]  # uint8 images of 8 x 8 pixels and int64 labels
    assert value == [77] and are_gone and len(files) == 2
    for size, least in zip(sorted(files.values(), reverse=True), bytes_of, strict=True):
        assert least <= size <= least + 4096 + 128, files
