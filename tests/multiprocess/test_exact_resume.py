"""Exact: a run that stops and goes on at any step, any number of times within an epoch, is the run that did not, to the bit."""

import random

import pytest
import torch

from ranks import run_ranks
from tasks import train_task
from training import STATE, TIMES, TINY, difference
from utils import checkpoint

ENDS = ("epochs", "steps", "skipped_steps", "samples_seen", "best_value", "best_epoch", "final_top1", "final_loss")
FLAGS = [*TINY, "--dataset_size", "70", "--epochs", "2", "--ema_decay", "0.9", "--num_workers", "2", "--log_interval", "3", "--lr", "0.02"]
FLAGS += [
    "--record_samples",
    "--keep_last",
    "99",
    "--clip_grad_norm",
    "1",
    "--save_every",
    "0",
    "--save_every_minutes",
    "0",
    "--patience",
    "9",
]
SGD, ADAMW = ["--optimizer", "sgd"], ["--optimizer", "adamw", "--lr", "0.002"]
FP32, BF16, FP16 = ["--no-use_amp"], ["--amp_dtype", "bf16"], ["--amp_dtype", "fp16"]
CASES = [
    (1, "images", 2, SGD, BF16),
    (1, "lines", 1, ADAMW, FP32),
    (2, "images", 2, ADAMW, FP32),
    (2, "lines", 1, SGD, BF16),
    (2, "images", 1, SGD, FP16),
    (4, "images", 1, SGD, FP32),
    (4, "images", 2, ADAMW, BF16),
    (4, "lines", 2, SGD, FP32),
]


def same_run(runs, a, b):
    """The last checkpoints and all records but for times and rates; `samples` too."""
    whole, parts = runs.last(a), runs.last(b)
    assert {key: difference(whole[key], parts[key]) for key in STATE} == {key: [] for key in STATE}
    for kind in ("train", "eval"):
        left, right = ([{k: v for k, v in record.items() if k not in TIMES} for record in runs.records(name, kind)] for name in (a, b))
        assert left == right and left
    assert runs.samples(a) == runs.samples(b) and runs.samples(a)
    ends = [{key: runs.json(name, "summary.json")[key] for key in ENDS} for name in (a, b)]
    assert ends[0] == ends[1] and ends[0]["best_value"] > 0


@pytest.mark.parametrize(
    ("ranks", "task", "accumulation", "optimizer", "precision"),
    CASES,
    ids=lambda value: "-".join(map(str, value if isinstance(value, list) else [value])),
)
def test_stops_and_resumes_within_an_epoch_cannot_be_seen(runs, ranks, task, accumulation, optimizer, precision):
    """Three stops by a signal, at seeded steps, of which two are in one epoch; two persistent workers; a short last window."""
    global_batch = 4 * ranks * accumulation
    samples = 7 * global_batch + global_batch // 2 + 1  # 8 steps an epoch; the last micro-batch has one sample
    flags = [*FLAGS, *optimizer, *precision, "--grad_accum_steps", accumulation, "--dataset_size", samples]
    run_ranks(ranks, train_task, task, [*flags, "--run_dir", runs.folder("whole")])
    seed = f"{ranks}{task}{accumulation}"
    stops = [*sorted(random.Random(seed).sample((1, 3, 5), 2)), random.Random(seed).choice((9, 11, 13))]
    print("seed", seed, "stops after steps", [stop + 1 for stop in stops])
    run_ranks(ranks, train_task, task, [*flags, "--run_dir", runs.folder("parts")], torch.float32, stops)
    resumed = [record["step"] for record in runs.records("parts", "event") if record["event"] == "resumed"]
    assert resumed == [stop + 1 for stop in stops] and runs.last("whole")["progress"]["step"] == 16
    same_run(runs, "whole", "parts")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_resume_from_each_step_in_turn_gives_the_next_checkpoint(runs, ranks):
    """A save on the way changes nothing, and any step will do: from the checkpoint of step k the next steps are those of the whole run."""
    flags = [*FLAGS, *SGD, *FP32, "--grad_accum_steps", 4 // ranks, "--epochs", 1]
    run_ranks(ranks, train_task, "images", [*flags, "--run_dir", runs.folder("unsaved")])
    saving = [*flags, "--save_every_steps", 1]
    run_ranks(ranks, train_task, "images", [*saving, "--run_dir", runs.folder("whole")])
    same_run(runs, "unsaved", "whole")
    paths = runs.checkpoints("whole")
    assert len(paths) == 5
    for k, path in enumerate(paths[:-1], start=1):
        run_ranks(ranks, train_task, "images", [*saving, "--run_dir", runs.folder(f"from{k}"), "--resume_from", path])
        for later in paths[k:]:
            whole, resumed = checkpoint.read(later)[0], checkpoint.read(runs.folder(f"from{k}") / "checkpoints" / later.name)[0]
            assert {key: difference(whole[key], resumed[key]) for key in STATE} == {key: [] for key in STATE}, (k, later)
