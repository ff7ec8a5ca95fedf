"""A loader that cannot feed the device is told once, with the workers that it would take."""

import re
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import train
import utils.feeding
from images import folder_of_images
from ranks import run_ranks
from tasks import train_task
from utils.feeding import advice, feeding, workers_needed


@pytest.mark.parametrize(
    ("workers", "waited", "computed", "needed"),
    [
        (1, 3.0, 1.0, 4),  # one is busy for 4 s with what takes the device 1 s
        (2, 3.0, 1.0, 8),
        (2, 0.5, 1.0, 3),
        (4, 1.0, 1.0, 8),
        (0, 3.0, 1.0, 3),  # loads in 3 s itself what takes the device 1 s
        (0, 0.3, 1.0, 1),
    ],
)
def test_workers_needed(workers, waited, computed, needed):
    assert workers_needed(workers, waited, computed) == needed


def rank(total=10.0, computed=2.5, **changes):
    return {"total": total, "computed": computed, "workers": 1, "cpus": 8, "is_held": False, "cache": ""} | changes


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([rank()], "waits 75% of the time: 1 worker.s. a rank bring 100 samples/s in all, and 400 would be taken; .* 4 worker.s. a rank: --num_workers 4$"),
        ([rank(), rank(computed=7.5)], "waits 50% .* 100 samples/s in all, and 200 would .* --num_workers 2$"),
        ([rank(cpus=2)], "takes 4 worker.s. a rank, and the CPUs of this machine allow 2: --num_workers 2$"),
        ([rank(cpus=1)], "takes 4 worker.s. a rank, and the CPUs of this machine allow 1$"),
        ([rank(cache="--cache ram would decode it once, into 3 GB")], "--num_workers 4; --cache ram would decode it once, into 3 GB$"),
        ([rank(computed=8.5)], ""),
        ([rank(total=0.05, computed=0.01)], ""),
        ([rank(is_held=True)], ""),
    ],
)  # fmt: skip
def test_the_advice(ranks, said):
    text = advice(1000, ranks)
    assert re.search(said, text) if said else text == ""


def facts(device="cpu", first_wait=2.0, cache="none", free=10**9, synced=0.0, forward=1.0, **dataset):
    data = SimpleNamespace(__len__=None, **dataset)
    loader = SimpleNamespace(
        dataset=mock.MagicMock(spec_set=[*vars(data), "__len__"], **{"__len__.return_value": 1000}, **dataset),
        device=torch.device(device),
        sample_bytes=1000.0,
        num_workers=2,
        local_world_size=1,
        first_wait=first_wait,
    )
    with mock.patch.object(utils.feeding, "free_memory", lambda: free):
        return feeding(loader, cache, {"data": 6.0, "forward": 1.0, "backward": 2.0, "update": 3.0}, forward, synced)


def test_the_first_wait_does_not_count_and_a_gpu_that_computes_meanwhile_does_not_wait():
    assert (facts()["total"], facts()["computed"]) == (10.0, 6.0)
    # the host waited 6 s for data, and then 3 s for a GPU that was behind: it has computed for 9 s
    assert facts("cuda", first_wait=0.0, synced=3.0, forward=3.0)["computed"] == 9.0
    assert facts("cuda", first_wait=0.0, synced=0.5, forward=1.0)["computed"] == 5.5


def test_a_cache_is_recommended_where_the_set_takes_it_and_it_fits():
    assert facts(cacheable=True)["cache"] == "--cache ram would decode it once, into 1 MiB"
    assert facts(cacheable=True, free=10**6)["cache"] == facts(cacheable=True, cache="ram")["cache"] == ""
    assert facts(cacheable=True, in_memory=True)["cache"] == facts()["cache"] == ""


def train_slowly(flags, of_sample, of_step):
    """Train, where a sample and a step take so many seconds."""
    plain_read, plain_loss = train.create_dataset.__globals__["read_image"], train.compute_loss

    def read(*args):
        time.sleep(of_sample)
        return plain_read(*args)

    def loss(*args):
        time.sleep(of_step)
        return plain_loss(*args)

    with mock.patch.dict(train.create_dataset.__globals__, read_image=read), mock.patch.object(train, "compute_loss", loss):
        return train_task("images", flags)[0]


@pytest.mark.parametrize(("of_sample", "of_step", "is_told"), [(0.03, 0.0, True), (0.0, 0.3, False)])
def test_a_run_is_told_at_its_first_log_line_and_a_fast_one_is_not(runs, of_sample, of_step, is_told):
    """Two ranks with a worker each; the same set, slow to read or quick beside the step."""
    flags = ["--image_size", 8, "--batch_size", 4, "--epochs", 1, "--log_interval", 4, "--eval_every", 0, "--save_every_minutes", 0]
    flags += [*folder_of_images(runs.root / "data", count=32), "--backend", "gloo", "--run_dir", runs.folder("run")]
    run_ranks(2, train_slowly, flags, of_sample, of_step)
    lines = (runs.folder("run") / "logs/rank0.log").read_text().splitlines()
    told = [k for k, line in enumerate(lines) if "the loader cannot feed the device" in line]
    first = next(k for k, line in enumerate(lines) if "step 4/8" in line)
    assert told == ([first + 1] if is_told else [])
    if is_told:
        said = r"1 worker\(s\) a rank bring \d+ samples/s in all, and \d+ would be taken; that takes \d+ worker\(s\) a rank.*; --cache ram"
        assert re.search(said, lines[told[0]]), lines[told[0]]
