"""Exact: a run that goes on with other numbers of ranks is the same run, up to the order of a sum."""

import math

import pytest
import torch

import plain_loop
from ranks import run_ranks
from tasks import config_of, train_task, using
from training import TINY
from utils import checkpoint

# 24 steps of 5 micro-batches, which neither 2 nor 3 nor 4 ranks share evenly; the last step has 2 samples
FLAGS = [*TINY, "--dataset_size", "462", "--epochs", "1", "--global_batch_size", "20", "--lr", "0.05", "--ema_decay", "0.9"]
FLAGS += ["--clip_grad_norm", "1", "--no-use_amp", "--save_every", "0", "--num_workers", "1", "--record_samples", "--log_interval", "3"]
CHAIN = ((4, 3), (2, 8), (1, 11), (3, 16), (4, 0))  # ranks, and the step after which a signal comes


def relative(got, want):
    """The largest relative distance of two state dicts' tensors."""
    floats = [name for name in want if want[name].is_floating_point()]
    return max(((got[name].double() - want[name].double()).norm() / want[name].double().norm()).item() for name in floats)


@pytest.mark.parametrize("task", ["images", "lines"])
def test_four_two_one_three_and_four_ranks_within_one_epoch(runs, task):
    """The same samples in the same global batches, each once; float64 within 1e-12 of the oracle after 24 steps, statistics included."""
    flags = (*FLAGS, "--run_dir", str(runs.folder("run")))
    for ranks, stop in CHAIN:
        run_ranks(ranks, train_task, task, [*flags, "--resume_from", "auto"], torch.float64, [stop], False, False)
    with using(task):
        steps = list(plain_loop.plain_loop(config_of(flags, torch.float64), 5))
    net, average, *_ = steps[-1]
    saved, events = runs.last("run"), [record for record in runs.records("run", "event") if record["event"] == "resumed"]
    assert [(record["step"], record["world_size"]) for record in events] == [(4, 2), (9, 1), (12, 3), (17, 4)]
    assert all(record["changed"] == [] for record in events) and saved["progress"]["step"] == len(steps) == 24
    assert relative(saved["model"], net.state_dict()) < 1e-12
    assert relative(saved["ema"], average.state_dict()) < 1e-12
    order = torch.randperm(462, generator=torch.Generator().manual_seed(plain_loop.number("order", 42, 0)))
    assert runs.samples("run") == {step: sorted(window.tolist()) for step, window in enumerate(order.split(20), start=1)}
    run_ranks(4, train_task, task, [*flags[:-1], runs.folder("whole")], torch.float64)
    for name in ("loss", "grad_norm", "accuracy"):  # intervals of 3 steps, in which the number of ranks changed
        whole, parts = ([record[name] for record in runs.records(run, "train")] for run in ("whole", "run"))
        assert parts == pytest.approx(whole, rel=1e-9), name
    rates = [record["lr"] for record in runs.records("run", "train")]
    assert len(rates) == 8 and rates == pytest.approx([0.05 * plain_factor(step) for step in range(2, 24, 3)], rel=1e-12)


def plain_factor(step):
    """The schedule of 24 steps with 12 of warm-up, as the whole run has it."""
    return (step + 1) / 12 if step < 12 else 0.5 + 0.5 * math.cos(math.pi * (step - 12) / 12)


def test_one_float32_step_from_a_common_state(runs):
    """From the checkpoint of step 3 each number of ranks takes one step: at most 1e-5 apart, the rounding of float32 sums."""
    flags = [*FLAGS, "--save_every_steps", "1", "--keep_last", "99"]
    run_ranks(4, train_task, "images", [*flags, "--run_dir", runs.folder("whole"), "--max_steps", 4])
    states = {}
    for ranks in (1, 2, 3, 4):
        name = f"on{ranks}"
        start = runs.folder("whole") / "checkpoints" / "step_00000003.pt"
        run_ranks(ranks, train_task, "images", [*flags, "--run_dir", runs.folder(name), "--resume_from", start, "--max_steps", 4])
        states[ranks] = runs.last(name)
        assert states[ranks]["progress"]["step"] == 4
    before = checkpoint.read(start)[0]["model"]
    for ranks in (2, 3, 4):
        assert relative(states[ranks]["model"], states[1]["model"]) < 1e-5
    assert relative(states[1]["model"], before) > 1e-3  # the step did move the weights
    assert relative(states[4]["model"], runs.last("whole")["model"]) == 0


def test_with_a_global_batch_size_steps_and_learning_rate_stay_as_they_were(runs):
    """3 steps on 4 ranks, the rest on 2 or on 1: as many steps an epoch, the same learning rates; nothing is said to have changed."""
    flags = [*TINY, "--dataset_size", "90", "--epochs", "2", "--global_batch_size", "16", "--log_interval", "1", "--no-use_amp"]
    run_ranks(4, train_task, "images", [*flags, "--run_dir", runs.folder("whole")])
    want = [(record["step"], record["epoch"], record["lr"]) for record in runs.records("whole", "train")]
    assert len(want) == 12
    for ranks in (2, 1):
        name = f"then{ranks}"
        run_ranks(4, train_task, "images", [*flags, "--run_dir", runs.folder(name)], torch.float32, [2], False, False)
        assert runs.json(name, "status.json")["state"] == "preempted" and runs.json(name, "status.json")["step"] == 3
        run_ranks(ranks, train_task, "images", [*flags, "--run_dir", runs.folder(name), "--resume_from", "auto"])
        assert [(record["step"], record["epoch"], record["lr"]) for record in runs.records(name, "train")] == want
        assert "changed:" not in (runs.folder(name) / "logs" / "rank0.log").read_text()


def test_without_it_a_changed_global_batch_is_said_loudly(runs):
    """On the terminal, in the log and in the record of the resume; the epoch goes on at the same sample."""
    flags = [*TINY, "--dataset_size", "90", "--epochs", "1", "--no-use_amp", "--record_samples", "--run_dir", runs.folder("run")]
    run_ranks(4, train_task, "images", flags, torch.float32, [2], False, False)
    run_ranks(2, train_task, "images", [*flags, "--resume_from", "auto"])
    said = "global batch: 8 samples an optimizer step, the checkpoint has 16"
    log = (runs.folder("run") / "logs" / "rank0.log").read_text()
    assert f"WARNING changed: {said}" in log
    event = next(record for record in runs.records("run", "event") if record["event"] == "resumed")
    assert event["changed"] == [said]
    samples = runs.samples("run")
    assert [len(samples[step]) for step in sorted(samples)] == [16, 16, 16, 8, 8, 8, 8, 8, 2]
    assert sorted(k for indices in samples.values() for k in indices) == list(range(90))
