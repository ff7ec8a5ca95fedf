# extra: benchmark
"""benchmark.py measures complete runs: the table, flags to compare with, several launches in one report."""

import contextlib
import io
import json
import statistics
import threading
import time
from unittest import mock

import pytest
import torch

import benchmark
from ddp_utils import cleanup_distributed, setup_distributed
from lib.benchmark import in_process_run, speed, turns
from lib.benchmark.in_process_run import InProcessRun
from lib.benchmark.turns import Candidate, take_turns
from ranks import run_ranks, slow
from tasks import config_of, using
from utils.settings.errors import UserError
from utils.training.step_sums import StepSums

SMALL = "--batch_size 4 --log_interval 4 --num_workers 0 --backend gloo".split()


def measured(folder, *words):
    """Run the command; returns its output, and how often sums were sent."""
    words = [*"--rounds 1 --steps 4 --json".split(), str(folder / "b.json"), *words, *SMALL]
    printed, plain, sent = io.StringIO(), StepSums.start_reduce, []

    def start_reduce(sums, micro_batch):
        sent.append(1)
        plain(sums, micro_batch)

    with (
        using("images"),
        contextlib.redirect_stdout(printed),
        mock.patch.object(StepSums, "start_reduce", start_reduce),
    ):
        assert benchmark.main([*words, "--run_dir", str(folder / "run")]) == 0
    return printed.getvalue(), len(sent)


@pytest.mark.slow
def test_one_and_two_ranks_with_and_without_flags_are_one_report(tmp_path):
    against = ["--against", "--lr 0.01 --save_every_steps 2", "--against", "--num_workers 1"]
    ((first, sent),) = run_ranks(1, measured, tmp_path, *against)
    (second, sent_of_two), (nothing, _) = run_ranks(2, measured, tmp_path, *against)
    names = ["as given", "with --lr 0.01 --save_every_steps 2", "with --num_workers 1", "without communication"]
    report = json.loads((tmp_path / "b.json").read_text())
    assert [job["ranks"] for job in report["measured"]] == [1, 2] and report["flags"][:2] == SMALL[:2]
    assert [[*job["rows"]] for job in report["measured"]] == [names[:-1], names]
    for job in report["measured"]:
        for row in job["rows"].values():
            assert row["step_s"] > 0 and row["samples_per_s"] > 0 and 0 <= row["data_wait"] < 1
        assert job["rows"]["as given"]["wall_ratio"] == 1.0
    assert all(f"\n{name} " in second for name in names) and not nothing
    assert first.splitlines()[-1].split()[:3:2] == ["1", "100.0%"] and second.splitlines()[-1].split()[0] == "2"
    assert sent == 36 and sent_of_two == 36 + 4  # three epochs of three runs; of the fourth only the first
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


@pytest.mark.parametrize("flags", ["--reduction exact", slow("--sharding zero3")])
def test_communication_within_the_passes_is_not_left_out(tmp_path, flags):
    (out, _), _ = run_ranks(2, measured, tmp_path, *flags.split())
    assert "as given" in out and "without communication" not in out


def row(step, rate):
    return {"step_s": step, "samples_per_s": rate, "data_wait": 0.25}


def test_the_table_by_ranks_has_efficiency_and_exposed_communication(tmp_path):
    report = speed.read_report(None, [])
    for ranks, rows in [
        (4, {"as given": row(0.4, 300.0), "without communication": row(0.3, 400.0)}),
        (1, {"as given": row(0.3, 99.0)}),
        (1, {"as given": row(0.3, 100.0)}),  # replaces the one before
    ]:
        speed.add_launch(report, {"ranks": ranks, "rows": rows})
    lines = [line.split() for line in speed.format_scaling(report).splitlines()[1:]]
    assert lines == [
        ["1", "100", "100.0%", "300.00", "ms", "25.0%", "-"],
        ["4", "300", "75.0%", "400.00", "ms", "25.0%", "25.0%"],
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "exists, but is not a report of this script. Give another name."),
        ('{"flags": ["--lr", "1"], "measured": []}', r"was measured with other flags \(--lr 1\). Give another name."),
    ],
)
def test_a_file_that_is_not_a_report_of_these_flags_is_kept(tmp_path, text, sentence):
    file = tmp_path / "s.json"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        speed.read_report(file, [])
    assert file.read_text() == text


def whole_run(folder):
    with using("images"):
        config = config_of(SMALL)
        ours = InProcessRun(config, setup_distributed(config), folder, steps=4)
        ours.train_epoch()
        observed = {"steps": ours.state.progress.step, "files": {path.name for path in folder.iterdir()}}
        observed["records"] = [record["step"] for record in ours.training.attempt.run.records.read("train")]
        observed |= {
            "has_writer": ours.training.checkpoints._is_writer,
            "is_watched": any(thread.name == "watchdog" for thread in threading.enumerate()),
        }
        ours.close()
    cleanup_distributed()
    return observed


def test_the_measured_run_is_complete(tmp_path):
    """It has records, logs, status, watchdog and checkpoints."""
    (observed,) = run_ranks(1, whole_run, tmp_path / "run")
    assert observed["steps"] == 4 and observed["files"] >= {"metrics.jsonl", "status.json", "config.json", "logs"}
    assert observed["records"] == [4] and observed["has_writer"]
    assert observed["is_watched"]  # extra: watch


def test_a_measured_run_has_each_sample_once_where_the_data_repeats_them(monkeypatch):
    """It is cut to a number of steps by `dataset_size`."""
    data = mock.Mock(spec_set=["with_replacement", "epoch_order"])
    monkeypatch.setattr(in_process_run.train.your_data, "create_dataset", lambda config, split: data)
    created = in_process_run.create_data_without_repeats().create_dataset(config_of(SMALL), "train")
    assert created is data and not data.with_replacement
    assert sorted(data.epoch_order(0, 1, 5).tolist()) == list(range(5))


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rounds", "0"], "--rounds, --steps and --ranks must be at least 1, and"),
        (["--memory", "x"], "argument --memory: invalid float value"),
        (["--sharding-memory", "--find-batch"], "not allowed with argument --sharding-memory"),  # extra: sharding
        (["--find-batch", "--ranks", "1,2"], "--find-batch needs a single number for --ranks"),
        (["--ranks", "two"], 'must be a list of numbers such as 1,2,4, got "two".'),
        (["--against", "--lr x"], '--lr must be a number or "auto", got "x"'),
    ],
)
def test_bad_flags_are_rejected(words, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse_arguments(words)
    assert sentence in capsys.readouterr().err


def test_too_many_steps_are_rejected(tmp_path):
    refuse = mock.Mock(side_effect=UserError("dataset_size=80: the training set has 40 samples; give at most 40"))
    sentence = "--steps 20 needs more samples than the training set has. Give fewer steps."
    with mock.patch.object(speed, "InProcessRun", refuse), pytest.raises(UserError, match=sentence):
        speed.create_warm_run(config_of(SMALL), None, tmp_path, 20)


def test_waiting_for_a_gpu_is_no_cpu_time(monkeypatch):
    """CUDA's wait takes CPU time: here, 0.2 s of it after each turn."""

    def spin(device):
        ends = time.process_time() + 0.2
        while time.process_time() < ends:
            pass

    monkeypatch.setattr(turns, "synchronize", spin)
    candidate = Candidate("", lambda: None)
    candidate.turn(torch.device("cpu"))
    assert candidate.cpu[0] < 0.1 < candidate.wall[0]  # CPU time of other threads counts too
