"""The benchmark compares equal work: bitwise equal losses, the same batches, a complete run."""

import contextlib
import io
import json
import statistics
from unittest import mock

import pytest
import torch

import benchmark
from ddp_utils import cleanup_distributed, setup_distributed
from lib.benchmark import speed
from lib.benchmark.ours import Ours
from lib.benchmark.turns import Candidate, take_turns
from ranks import run_ranks
from tasks import config_of, using
from utils.training.state import TrainState

SMALL = "--batch_size 4 --log_interval 4 --num_workers 0 --backend gloo".split()


def measured(file, *mode):
    """Run the command; returns its exit code and its output."""
    words = [*mode, *"--bucket_cap_mb 0.002 --rounds 1 --steps 4 --json".split(), str(file), *SMALL]
    printed = io.StringIO()
    with using("images"), contextlib.redirect_stdout(printed):
        return benchmark.main(words), printed.getvalue()


def test_one_rank_ends_with_equal_losses_and_a_json(tmp_path):
    ((code, out),) = run_ranks(1, measured, tmp_path / "b.json")
    found = json.loads((tmp_path / "b.json").read_text())
    assert code == 0 and list(found["rows"]) == list(speed.NAMES), out
    assert found["equality"] == {"intervals": 4, "equal": 4}  # 16 steps, 4 per interval
    assert [found["rows"][name]["collectives_per_step"] for name in speed.NAMES[:2]] == [0, 0]
    assert all(
        row["step_s"] > 0 and row["samples_per_s"] > 0 and len(row["turns_cpu_s"]) == 2
        for row in found["rows"].values()
    )
    assert found["flops_per_sample"] > 1e4 and found["peak_flops"] > 1e9
    assert "losses of template and plain loop: 4 of 4 log intervals are bit-identical" in out
    assert "us over the plain loop" in out


def test_two_ranks_count_the_same_collectives_for_template_and_plain_loop(tmp_path):
    assert [code for code, _ in run_ranks(2, measured, tmp_path / "b.json")] == [0, 0]
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    template, plain, minimal, _ = (rows[name]["collectives_per_step"] for name in speed.NAMES)
    assert plain >= 2 and minimal == plain
    assert template >= plain + 1  # one for BatchNorm, more for consensus and log points


def test_each_checkpoint_is_compared_with_torch_save(tmp_path):
    (_, out), _ = run_ranks(2, measured, tmp_path / "c.json", "--checkpoint")
    found = json.loads((tmp_path / "c.json").read_text())
    assert len(found["blocked_s"]) == len(found["reference_s"]) == 2 and min(found["blocked_s"]) > 0
    assert "saving every 4 steps changes the run time by" in out


def equality_of(folder, flags, factor=1.0):
    """The equality of four epochs of four steps on one rank. factor: scales the template's learning rate."""
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


@pytest.mark.parametrize(
    ("flags", "factor", "equal"),
    [
        ("--no-use_amp --grad_accum_steps 3", 1.0, 4),
        ("--optimizer adamw --lr 1e-3 --amp_dtype bf16", 1.0, 4),
        ("", 1.001, 0),
    ],
    ids=["accumulated-fp32", "adamw-bf16", "another-rate"],
)
def test_losses_equal_the_plain_loops_bitwise_and_a_difference_is_detected(tmp_path, flags, factor, equal):
    assert run_ranks(1, equality_of, tmp_path / "run", flags.split(), factor) == [{"intervals": 4, "equal": equal}]


def whole_run(folder):
    with using("images"):
        config = config_of(SMALL)
        ours = Ours(config, setup_distributed(config), folder, steps=4)
        ours.epoch()
        found = {"steps": ours.state.progress.step, "files": {path.name for path in folder.iterdir()}}
        found["records"] = [record["step"] for record in ours._run.records("train")]
        found |= {
            "has_writer": ours.training.checkpoints._writes,
            "is_watched": all(thread.is_alive() for thread in ours._watchdog._threads),
        }
        ours.close()
    cleanup_distributed()
    return found


def test_the_measured_run_is_complete(tmp_path):
    """It has records, logs, status, watchdog and checkpoints."""
    (found,) = run_ranks(1, whole_run, tmp_path / "run")
    assert found["steps"] == 4 and found["files"] >= {"metrics.jsonl", "status.json", "config.json", "logs", "watch"}
    assert found["records"] == [4] and found["has_writer"] and found["is_watched"]


def test_the_order_of_turns_alternates_and_ratios_are_medians_over_rounds():
    order = []
    candidates = [Candidate(name, lambda name=name: order.append(name)) for name in "abc"]
    take_turns(candidates, 2, torch.device("cpu"))
    assert "".join(order) == "abccba" * 2
    a, b, _ = candidates
    a.wall, b.wall = [1, 1, 2, 2, 9, 9], [2, 2, 2, 2, 3, 3]
    assert a.rounds("wall") == [2, 4, 18] and a.seconds() == 2
    assert a.ratio(b) == statistics.median([0.5, 1, 3])
    a.wall = [1.0, 1.1, 1.0, 1.1]
    assert a.control() == pytest.approx(1 / 1.1) and a.warning("wall") == "noisy (wall)"


def test_the_loader_is_compared_with_plain_indexing(tmp_path):
    ((code, out),) = run_ranks(1, measured_alone, tmp_path / "i.json")
    found = json.loads((tmp_path / "i.json").read_text())
    assert code == 0 and found["loader"]["samples_per_s"] > 0 and found["plain indexing"]["ratio"] == 1.0, out


def measured_alone(file):
    with mock.patch.dict("os.environ"):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del benchmark.os.environ[name]
        return measured(file, "--input")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rounds", "0"], "--steps and --ranks must be 1 or more"),
        (["--memory", "x"], "argument --memory: invalid float value"),
        (["--input", "--find-batch"], "not allowed with argument --input"),
    ],
)
def test_bad_flags_are_rejected(words, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse(words)
    assert sentence in capsys.readouterr().err
