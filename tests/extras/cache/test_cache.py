"""--cache: which data sets it accepts, and how much memory it needs."""

import dataclasses
import logging
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import utils.extras.cache.sample_cache
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from utils.extras.cache.sample_cache import cache_datasets, check_free_memory
from utils.settings.errors import UserError

CONFIG = TrainingConfig(batch_size=8, cache="ram", num_workers=0, backend="gloo")


class Lines(Dataset):
    cacheable, kind = True, "tensors"

    def __len__(self):
        return 70

    def __getitem__(self, index):
        if self.kind == "text":
            return "text"
        return {"ids": torch.arange(3 + (index > 63 and self.kind == "ragged")) + index, "label": index}


@pytest.fixture
def ctx():
    yield setup_distributed(CONFIG)
    cleanup_distributed()


def cache(ctx, **changes):
    data = Lines()
    for name, value in changes.items():
        setattr(data, name, value)
    return cache_datasets(data, {}, CONFIG, ctx, logging.getLogger("ddp"))[0]


def test_a_cached_set_returns_its_samples_and_keeps_its_attributes(ctx):
    data = cache(ctx, split="mine")
    assert (len(data), data.split, data.in_memory) == (70, "mine", True)
    batch = data.collate(data.__getitems__([3, 69]))
    assert batch["ids"].tolist() == [[3, 4, 5], [69, 70, 71]] and batch["label"].tolist() == [3, 69]
    assert data[5]["label"] == 5


@pytest.mark.guarantee("cache")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"cacheable": False},
            r"--cache ram does not work with Lines, .* not cacheable, .*\. Use --augment crop or --cache none, or set",
        ),
        (
            {"kind": "text"},
            r"--cache ram does not work with Lines, .* not tensors with one row per sample\. Leave out --cache",
        ),
        (
            {"kind": "ragged"},
            r"Samples 64 to 69 are torch.int64 \[4\], but other samples are torch.int64 \[3\]\. Make all samples alike",
        ),
    ],
)
def test_a_set_that_cannot_be_cached_is_rejected(ctx, changes, expected):
    with pytest.raises(UserError, match=expected):
        cache(ctx, **changes)


class Killed(Lines):
    """Writes down the cache that its process maps and is killed, in the middle of the decoding."""

    def __init__(self, note):
        self.note = note

    def __getitem__(self, index):
        if index == 40:
            self.note.write_text("".join(line for line in open("/proc/self/maps") if "/cache-" in line))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def cache_in_this_process(data):
    cache_datasets(data, {}, CONFIG, setup_distributed(CONFIG), logging.getLogger("ddp"))


@pytest.mark.guarantee("cache")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_a_rank_that_is_killed_while_it_decodes_leaves_no_file(tmp_path):
    """A file in /dev/shm would hold its memory until the machine restarts."""
    process = multiprocessing.get_context("fork").Process(target=cache_in_this_process, args=[Killed(tmp_path / "map")])
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    (line,) = (tmp_path / "map").read_text().splitlines()
    assert line.endswith(" (deleted)") and not Path(line.split()[5]).exists(), line


@pytest.mark.guarantee("cache")
def test_a_set_that_does_not_fit_is_rejected(ctx, monkeypatch):
    monkeypatch.setattr(utils.extras.cache.sample_cache, "read_free_memory", lambda: 2_000)
    with pytest.raises(UserError, match=r"--cache ram needs 0 MiB .*, but .* of free memory\. Give the job more"):
        cache(ctx)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 16 << 30))
    on_gpu = dataclasses.replace(ctx, device=torch.device("cuda", 0))
    with pytest.raises(UserError, match=r"needs 4.50 GiB .* but cuda:0 on .* has 8.00 GiB of .*\. Use --cache ram"):
        check_free_memory({"train": 9 << 29}, "device", dataclasses.replace(CONFIG, cache="device"), on_gpu)
