# extra: benchmark and template
"""The comparison with other loops compares equal work: bitwise equal losses, the same batches."""

import contextlib
import dataclasses
import io
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from comparison import run, speed
from ddp_utils import cleanup_distributed, setup_distributed
from ranks import ROOT, WarmLaunch, finish, run_ranks
from tasks import config_of, using
from training import TINY, Runs
from utils.files import read_records
from utils.training.state import TrainState

SMALL = "--batch_size 4 --log_interval 4 --num_workers 0 --backend gloo".split()


def measured(file):
    """Run the command; returns its exit code and its output."""
    words = [*"--bucket_cap_mb 0.002 --rounds 1 --steps 4 --json".split(), str(file), *SMALL]
    printed = io.StringIO()
    with using("images"), contextlib.redirect_stdout(printed):
        return run.main(words), printed.getvalue()


@pytest.mark.slow
def test_one_rank_ends_with_equal_losses_and_a_json(tmp_path):
    ((code, out),) = run_ranks(1, measured, tmp_path / "b.json")
    report = json.loads((tmp_path / "b.json").read_text())
    assert code == 0 and list(report["rows"]) == list(speed.NAMES), out
    assert report["equality"] == {"intervals": 4, "equal": 4}  # 16 steps, 4 per interval
    assert [report["rows"][name]["collectives_per_step"] for name in speed.NAMES[:2]] == [0, 0]
    assert all(
        row["step_s"] > 0 and row["samples_per_s"] > 0 and len(row["turns_cpu_s"]) == 2
        for row in report["rows"].values()
    )
    assert report["flops_per_sample"] > 1e4 and report["peak_flops"] > 1e9
    assert "losses of template and plain loop: 4 of 4 log intervals are bit-identical" in out
    assert "us over the bare loop" in out and "us over the plain loop" in out
    assert report["rows"]["bare loop"]["wall_over_bare"] == report["rows"]["plain loop"]["cpu_over_plain"] == 1


@pytest.mark.slow
def test_two_ranks_count_the_same_collectives_for_template_and_plain_loop(tmp_path):
    assert [code for code, _ in run_ranks(2, measured, tmp_path / "b.json")] == [0, 0]
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    template, plain, bare, _ = (rows[name]["collectives_per_step"] for name in speed.NAMES)
    assert plain >= 2 and bare == plain
    assert template >= plain + 1  # one for BatchNorm, more for consensus and log points


EQUALITY = [  # flags, a factor of the template's learning rate, the number of equal intervals
    ("--no-use_amp --grad_accum_steps 3", 1.0, 4),
    ("--optimizer adamw --lr 1e-3 --amp_dtype bf16", 1.0, 4),
    ("", 1.001, 0),
]


def equality_of(folder, flags, factor):
    """The equality of four epochs of four steps on one rank."""
    plain = TrainState._set_lr

    def set_lr(self):
        plain(self)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    with using("images"), mock.patch.object(TrainState, "_set_lr", set_lr):
        config = config_of([*SMALL, *flags])
        comparison = speed.Comparison(config, setup_distributed(config), steps=4, folder=folder)
        comparison.run(rounds=1)
    cleanup_distributed()
    return comparison.equality()


def equalities(folder):
    return [equality_of(folder / str(k), flags.split(), factor) for k, (flags, factor, _) in enumerate(EQUALITY)]


@pytest.mark.slow
def test_losses_equal_the_plain_loops_bitwise_and_a_difference_is_detected(tmp_path):
    assert run_ranks(1, equalities, tmp_path) == [[{"intervals": 4, "equal": equal} for *_, equal in EQUALITY]]


@pytest.mark.parametrize(("device", "is_deterministic", "ranks"), [("cuda", False, 1), ("cpu", True, 2)])
def test_losses_that_need_not_be_equal_are_not_compared(device, is_deterministic, ranks):
    ctx, config = SimpleNamespace(world_size=ranks, device=torch.device(device)), config_of([])
    comparison = SimpleNamespace(_ctx=ctx, config=dataclasses.replace(config, deterministic=is_deterministic))
    assert speed.Comparison.equality(comparison) == {"intervals": 0, "equal": 0}


@pytest.mark.slow
def test_the_plain_run_has_the_curve_of_a_run(tmp_path):
    """With a short last global batch, and a step after the last epoch that is not evaluated."""
    flags = "--dataset_size 42 --epochs 3 --max_steps 13 --lr 0.01 --no-use_amp --global_batch_size 8".split()
    runs, folder = Runs(tmp_path), tmp_path / "plain"
    runs.train(2, "ours", *flags, task="")
    words = ["--plain-run", "--run_dir", folder, *TINY, *flags]
    ended = finish(WarmLaunch(0, ROOT / "tests/comparison/run.py", words))
    assert ended.code == 0, ended.text
    ours, plain = (
        [r for *_, r in read_records(f / "metrics.jsonl") if r["kind"] == "eval"] for f in (runs.folder("ours"), folder)
    )
    assert [r["step"] for r in plain] == [6, 12] and [r["step"] for r in ours] == [6, 12, 13]
    for expected, row in zip(ours, plain, strict=False):
        assert (row["epoch"], row["count"], row["top1"]) == (expected["epoch"], expected["count"], expected["top1"])
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)  # float32 sums in another order on two ranks
    ended = finish(WarmLaunch(0, ROOT / "tests/comparison/run.py", words))
    assert ended.code == 2 and "exists; give a new folder" in ended.text


def test_the_memory_of_a_loop_is_without_that_of_the_others(monkeypatch):
    """2,000 bytes are allocated, 300 of them by this loop, which needs 500 more."""
    monkeypatch.setattr(speed, "allocated", lambda device: 2000)
    monkeypatch.setattr(speed, "read_peak_memory", lambda: 2500)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert speed.count(lambda: None, torch.device("cuda", 0), held=300)["peak_memory"] == 800
    assert speed.count(lambda: None, torch.device("cpu"))["peak_memory"] == 2500
