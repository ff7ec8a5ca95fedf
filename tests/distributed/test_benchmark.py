"""The benchmark compares what it says: the same losses to the bit, the same batches, everything that a run has; timed
figures gate nothing."""

import contextlib
import io
import json
import statistics
import sys
from unittest import mock

import pytest
import torch

import benchmark
from benching import machine
from benching.ours import Ours
from benching.turns import Contestant, take_turns
from ddp_utils import cleanup_distributed, setup_distributed
from ranks import run_ranks
from tasks import config_of, using
from utils.training.state import TrainState

SMALL = "--image_size 8 --batch_size 4 --log_interval 5 --num_workers 0 --backend gloo".split()


def measured(file):
    """The command: its exit code, and what it printed."""
    words = ["benchmark.py", *"--bucket_cap_mb 0.002 --rounds 1 --steps 4 --json".split(), str(file), *SMALL]
    quick_peak, few_steps = (
        mock.patch.object(machine, "SECONDS", 0.01),
        mock.patch.multiple(benchmark, HOST_STEPS=1, HOST_ROUNDS=1),
    )
    printed = io.StringIO()
    with (
        using("images"),
        mock.patch.object(sys, "argv", words),
        quick_peak,
        few_steps,
        contextlib.redirect_stdout(printed),
    ):
        return benchmark.main(), printed.getvalue()


def test_one_rank_ends_with_equal_losses_and_a_json(tmp_path):
    ((code, out),) = run_ranks(1, measured, tmp_path / "b.json")
    found = json.loads((tmp_path / "b.json").read_text())
    assert code == 0 and list(found["rows"]) == ["ours", "bare", "least", "tutorial"], out
    assert found["equality"] == {"intervals": 4, "equal": 4}  # 16 steps, 5 an interval, and the last one
    assert found["rows"]["ours"]["collectives_per_step"] == 0 and found["rows"]["bare"]["collectives_per_step"] == 0
    assert all(
        row["step_s"] > 0 and row["samples_per_s"] > 0 and len(row["turns_cpu_s"]) == 2
        for row in found["rows"].values()
    )
    assert found["flops_per_sample"] > 1e4 and found["peak_flops"] > 1e9
    assert "losses of ours and bare: equal to the bit in 4 of 4" in out and "us over bare" in out


def test_two_ranks_count_the_same_collectives_for_ours_and_bare(tmp_path):
    assert [code for code, _ in run_ranks(2, measured, tmp_path / "b.json")] == [0, 0]
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    buckets = rows["bare"]["collectives_per_step"]
    assert buckets >= 2 and rows["least"]["collectives_per_step"] == buckets
    assert rows["ours"]["collectives_per_step"] >= buckets + 1  # one for BatchNorm; agreements and log points beside


def equality_of(folder, flags, factor=1.0):
    """Of four epochs of four steps on one rank. factor: on the learning rate of ours."""
    plain = TrainState._set_lr

    def set_lr(self, step):
        plain(self, step)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    counted = mock.patch.object(
        machine, "count", lambda epoch, device: (epoch(), {"collectives": 0, "peak_memory": 0})[1]
    )
    with using("images"), counted, mock.patch.object(TrainState, "_set_lr", set_lr):
        config = config_of([*SMALL, *flags])
        race = benchmark.Race(config, setup_distributed(config), 4, 1, folder, with_tutorial=False)
        race.run(lambda _: None)
        race.ours.close()
    cleanup_distributed()
    return race.equality()


@pytest.mark.parametrize(
    ("flags", "factor", "equal"),
    [
        ("--no-use_amp --grad_accum_steps 3 --clip_grad_norm 0.5", 1.0, 4),
        ("--optimizer adamw --lr 1e-3 --amp_dtype bf16", 1.0, 4),
        ("", 1.001, 0),
    ],
    ids=["accumulated-clipped-fp32", "adamw-bf16", "another-rate"],
)
def test_losses_are_those_of_the_bare_loop_to_the_bit_and_a_difference_is_found(tmp_path, flags, factor, equal):
    assert run_ranks(1, equality_of, tmp_path / "run", flags.split(), factor) == [{"intervals": 4, "equal": equal}]


def whole_run(folder):
    with using("images"):
        config = config_of([*SMALL, "--dataset_size", "20"])
        ours = Ours(config, setup_distributed(config), folder)
        found = {"steps": ours.epoch(), "files": {path.name for path in folder.iterdir()}}
        found["records"] = [record["step"] for record in ours._run.records("train")]
        found |= {
            "has_writer": ours._writer is not None and ours._writer.pid > 0,
            "is_watched": ours.watch._thread.is_alive(),
        }
        ours.close()
    cleanup_distributed()
    return found


def test_ours_is_a_whole_run(tmp_path):
    """Records, log, status, places of the watchdog, a writer: all there."""
    (found,) = run_ranks(1, whole_run, tmp_path / "run")
    assert found["steps"] == 5 and found["files"] >= {"metrics.jsonl", "status.json", "config.json", "logs", "watch"}
    assert found["records"] == [5] and found["has_writer"] and found["is_watched"]


def test_turns_go_forth_and_back_and_ratios_are_medians_over_rounds():
    order = []
    contestants = [Contestant(name, lambda name=name: order.append(name)) for name in "abc"]
    take_turns(contestants, 2, torch.device("cpu"), lambda _: None)
    assert "".join(order) == "abccba" * 2
    a, b, _ = contestants
    a.wall, b.wall = [1, 1, 2, 2, 9, 9], [2, 2, 2, 2, 3, 3]
    assert a.rounds("wall") == [2, 4, 18] and a.seconds("wall") == 2
    assert a.ratio(b, "wall") == statistics.median([0.5, 1, 3])
    a.wall = [1.0, 1.1, 1.0, 1.1]
    assert a.control("wall") == pytest.approx(1 / 1.1)
