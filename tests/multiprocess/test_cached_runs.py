"""--cache: the same batches however they are kept, decoded once by the ranks of a node into memory that they share."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

import dataset
import train
import utils.cache
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from images import save_images
from ranks import run_ranks
from tasks import train_task
from training import TINY, difference
from utils.cache import cached
from utils.loading import create_distributed_dataloader, create_evaluation_dataloader
from utils.together import exchange

BAD = ("train/cat/002", "train/dog/010", "val/cat/001")


@pytest.fixture
def flags(tmp_path):
    for split, count in (("train", 41), ("val", 7)):
        save_images(tmp_path / "data" / split, {"cat": count, "dog": count - 3}, size=12)
    for name in BAD:
        (tmp_path / f"data/{name}.png").write_bytes(b"no image")
    words = [*TINY, "--image_size", "8", "--dataset", "imagefolder", "--data_dir", str(tmp_path / "data"), "--global_batch_size", "16"]
    return [*words, "--augment", "resized_crop", "--corrupt_images", "replace"]


def open_sets(flags, hosts=None, log=None):
    """In a rank: the sets as the cache gives them, and the context; each decoded file is noted in `log`, whoever reads it."""
    config = TrainingConfig.from_args([*map(str, flags)])
    ctx = setup_distributed(config)
    ctx = dataclasses.replace(ctx, hosts=hosts, local_world_size=hosts.count(hosts[ctx.rank])) if hosts else ctx
    loaded = train.load_data(config, ctx)
    plain = dataset.read_image

    def read(path, *rest):
        with open(log, "a") as file:
            file.write(f"{path.relative_to(config.data_dir)}\n")
        return plain(path, *rest)

    with mock.patch.object(dataset, "read_image", read) if log else contextlib.nullcontext():
        return *cached(*loaded, ctx, logging.getLogger("ddp")), ctx


def digests(flags):
    """Of each micro-batch of two epochs of training and of the evaluation, and what was replaced in them."""
    train_set, held_out, config, ctx = open_sets(flags)
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


def test_the_batches_are_the_same_however_the_set_is_kept(flags):
    """To the bit, over two epochs and the evaluation, on 1, 2 and 4 ranks with 0 and 2 workers; what cannot be read is replaced alike."""
    expected, replaced = of_all(1, [*flags, "--num_workers", 0])
    assert len(expected) == 2 * 20 + 3 and set(replaced.values()) == {1} and len(replaced) == 5
    for ranks, workers, cache in ((1, 2, "ram"), (2, 0, "device"), (4, 2, "ram"), (2, 2, "none")):
        found = of_all(ranks, [*flags, "--num_workers", workers, "--cache", cache])
        assert found == (expected, replaced), (ranks, workers, cache)


def test_another_picture_would_be_seen(flags, tmp_path):
    before = of_all(1, [*flags, "--cache", "ram"])
    save_images(tmp_path / "data" / "train", {"cat": 1}, size=12, seed=5)
    after = of_all(1, [*flags, "--cache", "ram"])
    assert len([batch for batch in before[0] if batch not in after[0]]) == 2  # its micro-batch in each of two epochs


def sharing(flags, log, hosts, is_named):
    """What this rank sees of memory that others have written to, where that memory is, and how many processes are left."""
    with mock.patch.object(os, "memfd_create", None) if is_named else contextlib.nullcontext():
        train_set, held_out, config, ctx = open_sets(flags, hosts, log)
    rows = train_set._rows[0]
    exchange("all have decoded", ctx)
    rows[ctx.rank].fill_(100 + ctx.rank)
    exchange("all have written", ctx)
    seen = [int(rows[rank].float().mean()) for rank in range(ctx.world_size)]
    files = {
        line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line or "/cache-" in line
    }
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    exchange("all have looked", ctx)
    cleanup_distributed()
    return seen, sorted(files), children


@pytest.mark.parametrize("is_named", [False, True])
def test_the_ranks_of_a_node_decode_each_sample_once_and_share_its_memory(flags, tmp_path, is_named):
    log = tmp_path / "log"
    before = set(os.listdir("/dev/shm"))
    found = run_ranks(4, sharing, [*flags, "--cache", "ram", "--num_workers", 1], log, ("a", "b", "a", "b"), is_named)
    assert [seen[rank] for rank, (seen, *_) in enumerate(found)] == [100, 101, 102, 103]
    for rank, (seen, files, children) in enumerate(found):
        assert [value >= 100 and value == 100 + other for other, value in enumerate(seen)] == [other % 2 == rank % 2 for other in range(4)]
        assert len(files) == (2 if is_named else 1) and all("(deleted)" in name for name in files), files
        assert ("memfd" in files[0]) != is_named and not children  # the workers that decoded are gone
    assert set(os.listdir("/dev/shm")) <= before
    counts, firsts = Counter(log.read_text().split()), ("train/cat/000.png", "val/cat/000.png")
    assert len(counts) == 41 + 38 + 7 + 4
    # once on each of two nodes, and the first one of a set on each rank, to know its size
    assert {name: count for name, count in counts.items() if count != 2} == dict.fromkeys(firsts, 4 + 2)


def test_a_run_goes_on_from_a_checkpoint_in_another_mode(runs, flags):
    """Bit for bit the run that was never stopped: two ranks, stopped within an epoch, with another cache from there on."""
    flags = [*flags, "--epochs", 2, "--num_workers", 1, "--log_interval", 1]  # a replaced sample is counted at log points
    run_ranks(2, train_task, "images", [*flags, "--run_dir", runs.folder("whole")])
    parts = [*flags, "--run_dir", runs.folder("parts")]
    run_ranks(2, train_task, "images", parts, torch.float32, [2], False, False)
    run_ranks(2, train_task, "images", [*parts, "--resume_from", "auto", "--cache", "ram"])
    assert difference(*(runs.last(name)["model"] for name in ("whole", "parts"))) == []
    assert [runs.json(name, "summary.json")["replaced_samples"] for name in ("whole", "parts")] == [4, 4]
    assert '"resumed"' in (runs.folder("parts") / "metrics.jsonl").read_text()


def test_a_corrupt_image_ends_a_cached_run_by_the_same_sentence(runs, flags):
    said = []
    for cache in ("none", "ram"):
        with pytest.raises(AssertionError, match="met a corrupt sample"):
            runs.train(2, cache, *flags[:-2], "--max_steps", 9, "--eval_every", 0, "--cache", cache)
        said += re.findall(r"rank \d met a corrupt sample .*", runs.json(cache, "status.json")["error"])
    assert len(said) == 2 and said[0] == said[1] and "(--corrupt_images replace goes on without it)" in said[0]


def test_a_set_that_does_not_fit_is_refused_with_figures_before_it_is_decoded(runs, flags):
    words = [*flags, "--cache", "ram", "--run_dir", str(runs.folder("run"))]
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, refused, words, runs.root / "log")
    text = r"cache=ram: the decoded data take 0 MiB of memory, and \S+ has 0 MiB free, of which 10% is left .*; give the job more"
    assert re.search(text, str(failed.value)), str(failed.value)
    assert len(set((runs.root / "log").read_text().split())) == 2  # the first of each set


def refused(flags, log):
    with mock.patch.object(utils.cache, "free_memory", lambda: 10_240):
        open_sets(flags, log=log)
