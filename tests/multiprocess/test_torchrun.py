"""Whole runs from the command line: what a user types, and every file that the contract promises."""

import gzip
import json
import re
import sys
import tomllib
import zipfile

import pytest
import torch

from config import TrainingConfig
from images import save_images
from ranks import ROOT, launch, torchrun
from training import TINY, Runs
from utils import checkpoint

SMALL = ["--image_size", "8", "--batch_size", "8", "--log_interval", "2", "--backend", "gloo"]
TRAIN_KEYS = "kind epoch step loss accuracy lr grad_norm samples_per_s data_wait_s step_s peak_memory_bytes".split()
EVAL_KEYS = "kind epoch step split weights loss top1 top5 count".split()
SUMMARY_KEYS = (
    "state epochs steps skipped_steps samples_seen wall_s samples_per_s samples_per_s_per_rank world_size global_batch_size best_metric "
    "best_value best_top1 best_epoch final_top1 final_loss data_wait_fraction peak_memory_bytes restarts goodput overflow_steps "
    "replaced_samples ledger"
).split()


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """Two ranks, everything on: what it printed, and its folder."""
    runs = Runs(tmp_path_factory.mktemp("full"))
    flags = [*SMALL, "--dataset_size", 80, "--epochs", 3, "--ema_decay", 0.9, "--enable_profiling", "--record_samples", "--num_workers", 1]
    ended = torchrun(2, *flags, "--run_dir", runs.folder("run"), "--save_every_steps", 4, "--keep_last", 2)
    assert ended.code == 0, ended.text
    return ended, runs


def test_rank_0_says_what_was_decided_and_how_it_goes(full_run):
    ended, runs = full_run
    for part in (
        "2 on 1 node(s): cpu", "2,777,674 parameters", "8 a micro-batch x 2 micro-batches on 2 ranks = 16 a global batch",
        "SyntheticImageDataset, 80 training samples, 16 to evaluate on (val)", "15, 5 an epoch", "a kill costs  at most the work of 10 min or 4 steps or 1 epoch(s), what comes first, and of the time that it takes to write one",
        "epoch 0 | step 2/15 | loss", "samples/s (", "a rank) | data wait", "left", "== epoch 2 done, val: loss", "val (ema): loss",
        "completed: 3 epochs, 15 steps, 240 samples", "tensorboard --logdir", "python scripts/runs.py", "python scripts/export.py",
    ):  # fmt: skip
        assert part in ended.out, part
    assert ended.out.count("epoch 0 | step 2/15") == 1  # the other rank is silent
    assert "Traceback" not in ended.text and "Warning" not in ended.text


def test_records_have_the_contracts_keys_once_a_step(full_run):
    _, runs = full_run
    train, evaluations, events = (runs.records("run", kind) for kind in ("train", "eval", "event"))
    assert [record["step"] for record in train] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert all(sorted(record) == sorted(TRAIN_KEYS) for record in train)
    assert [(r["epoch"], r["step"], r["weights"]) for r in evaluations] == [(e, 5 * e + 5, w) for e in range(3) for w in ("model", "ema")]
    assert all(sorted(record) == sorted(EVAL_KEYS) and record["count"] == 16 and record["split"] == "val" for record in evaluations)
    assert all(0 <= record["top1"] <= record["top5"] <= 1 for record in evaluations)
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]  # one that falls due while another is written waits
    assert saved == sorted(set(saved)) and saved[0] == 4 and saved[-1] == 15 and len(saved) > 3
    assert train[-1]["step_s"] > 0 and train[-1]["peak_memory_bytes"] > 1e8


def test_status_and_summary(full_run):
    _, runs = full_run
    status, summary = runs.json("run", "status.json"), runs.json("run", "summary.json")
    assert list(status) == "state epoch step samples_seen checkpoint error rank host time".split()
    assert (status["state"], status["epoch"], status["step"], status["samples_seen"], status["error"]) == ("completed", 3, 15, 240, None)
    assert status["checkpoint"].endswith("step_00000015.pt")
    assert list(summary) == SUMMARY_KEYS
    last = runs.records("run", "eval")[-1]
    assert (summary["final_top1"], summary["final_loss"], summary["best_metric"]) == (last["top1"], last["loss"], "top1")
    best = max(record["top1"] for record in runs.records("run", "eval") if record["weights"] == "ema")
    assert summary["best_value"] == summary["best_top1"] == best
    assert (summary["epochs"], summary["world_size"], summary["global_batch_size"], summary["restarts"]) == (3, 2, 16, 0)
    assert 0 < summary["goodput"] <= 1 and sum(summary["ledger"].values()) == pytest.approx(summary["wall_s"], abs=0.1)


def test_config_provenance_and_code(full_run):
    _, runs = full_run
    config = runs.json("run", "config.json")
    assert (config["num_classes"], config["in_channels"], config["image_size"], config["num_workers"]) == (10, 3, 8, 1)
    TrainingConfig.from_args(["--config", str(runs.folder("run") / "config.json")])
    provenance = runs.json("run", "provenance.json")
    assert "--ema_decay" in provenance["command"] and len(provenance["ranks"]) == 2 and provenance["versions"]["torch"] == torch.__version__
    assert {
        "git_commit",
        "git_dirty",
        "hosts",
        "start_time",
        "changed_template_files",
        "verified",
        "classes",
        "mean",
        "std",
    } <= provenance.keys()
    with zipfile.ZipFile(runs.folder("run") / "code.zip") as archive:
        assert archive.read("train.py") == (ROOT / "train.py").read_bytes() and "utils/loading.py" in archive.namelist()


def test_checkpoints_are_kept_and_open_with_plain_torch_load(full_run):
    _, runs = full_run
    assert len(runs.checkpoints("run")) == 2 and runs.checkpoints("run")[-1].name == "step_00000015.pt"
    payload = torch.load(runs.checkpoints("run")[-1], weights_only=True)
    assert tuple(payload) == checkpoint.KEYS
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in payload["model"])
    assert (runs.folder("run") / "checkpoints" / "best.pt").exists()


def test_each_ranks_log_has_its_lines(full_run):
    _, runs = full_run
    for rank in (0, 1):
        lines = (runs.folder("run") / "logs" / f"rank{rank}.log").read_text().splitlines()
        assert len(lines) > 20 and all(re.match(rf"\d{{4}}-\d\d-\d\dT[\d:.]+Z {rank} \S+", line) for line in lines)


def test_samples_that_travelled_are_each_sample_once_an_epoch(full_run):
    _, runs = full_run
    for epoch in range(3):
        seen = [index for step in range(5 * epoch + 1, 5 * epoch + 6) for index in runs.samples("run")[step]]
        assert sorted(seen) == list(range(80))


def test_tensorboard_has_scalars_on_the_step_a_layout_texts_and_images(full_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, runs = full_run
    events = EventAccumulator(str(runs.folder("run") / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    tags = events.Tags()
    assert {"train/loss", "train/accuracy", "train/lr", "val/loss", "val/top1", "val_ema/top1"} <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert [event.step for event in events.Scalars("val/top1")] == [5, 10, 15]
    assert tags["images"] == ["train/augmented"]
    layout = b"".join(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val)
    assert b"train/accuracy" in layout and b"val/top1" in layout and b"train/loss" in layout
    assert {"config/text_summary", "environment/text_summary"} <= set(tags["tensors"])


def test_the_profile_opens_and_its_costliest_operations_were_said(full_run):
    ended, runs = full_run
    with gzip.open(runs.folder("run") / "traces" / "rank0.json.gz") as file:
        trace = json.load(file)
    assert any("convolution" in event.get("name", "") for event in trace["traceEvents"])
    assert "the costliest operations" in ended.out and "Self CPU" in ended.out


def test_the_published_flags_work_unchanged(tmp_path):
    """The published pipeline's own line; only where it writes and how many samples it makes are added."""
    line = "--epochs 2 --batch_size 64 --no-use_amp --grad_accum_steps 2".split()
    ended = torchrun(2, *line, "--run_dir", tmp_path / "run", "--dataset_size", 300, "--backend", "gloo")
    assert ended.code == 0, ended.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["state"], summary["epochs"], summary["samples_seen"], summary["global_batch_size"]) == ("completed", 2, 600, 256)
    assert "float32" in ended.out and "6,0" not in ended.out


@pytest.mark.parametrize("ranks", [1, 4])
def test_training_through_torchrun(tmp_path, ranks):
    ended = torchrun(ranks, *SMALL, "--dataset_size", 100, "--epochs", 1, "--run_dir", tmp_path / "run")
    assert ended.code == 0, ended.text
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["samples_seen"], status["step"]) == ("completed", 100, -(-100 // (8 * ranks)))
    flags = ["--dataset_size", 100, "--epochs", 2, "--run_dir", tmp_path / "run", "--resume_from", status["checkpoint"]]
    ended = torchrun(ranks, *SMALL, *flags)
    assert ended.code == 0 and ended.text.count("changed: epochs=2: the checkpoint has epochs=1") == 1  # not by each rank


def test_one_process_needs_no_launcher_and_no_variables(tmp_path):
    """`python train.py`, then again: the default folder moves aside; then evaluation only, which leaves the run as it is."""
    flags = [*SMALL, "--dataset_size", "40", "--epochs", "1"]
    for _ in range(2):
        ended = launch([sys.executable, ROOT / "train.py", *flags], cwd=tmp_path)
        assert ended.code == 0, ended.text
    assert "moved the earlier run aside: it is now in runs/default.1" in ended.out
    default = tmp_path / "runs" / "default"
    assert (tmp_path / "runs" / "default.1" / "summary.json").exists() and (default / "summary.json").exists()
    files = {path: path.read_bytes() for path in default.rglob("*") if path.is_file()}
    ended = launch([sys.executable, ROOT / "train.py", *flags, "--eval_only"], cwd=tmp_path)
    assert ended.code == 0, ended.text
    evaluated = json.loads((default / "eval-best.json").read_text())["records"][0]
    files_now = {path: path.read_bytes() for path in default.rglob("*") if path.is_file() and path.name != "eval-best.json"}
    assert files == files_now
    last = [json.loads(line) for line in (default / "metrics.jsonl").read_text().splitlines() if '"eval"' in line][-1]
    assert (evaluated["loss"], evaluated["top1"], evaluated["count"]) == (last["loss"], last["top1"], 8)


def test_it_runs_where_torchvision_cannot_be_imported(tmp_path):
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "sitecustomize.py").write_text("import sys; sys.modules['torchvision'] = None\n")
    env = {"PYTHONPATH": str(tmp_path / "block")}
    ended = torchrun(2, *SMALL, "--dataset_size", 40, "--epochs", 1, "--run_dir", tmp_path / "run", env=env)
    assert ended.code == 0, ended.text
    ended = launch([sys.executable, "train.py", *SMALL, "--model", "resnet18", "--run_dir", tmp_path / "other"], env=env)
    assert ended.code == 2 and "model=resnet18: needs torchvision" in ended.err and "Traceback" not in ended.text


def test_print_config_is_toml_that_feeds_back(tmp_path):
    ended = launch([sys.executable, "train.py", "--lr", "0.3", "--print-config"])
    assert ended.code == 0 and tomllib.loads(ended.out)["lr"] == 0.3
    (tmp_path / "c.toml").write_text(ended.out)
    assert launch([sys.executable, "train.py", "--config", tmp_path / "c.toml", "--print-config"]).out == ended.out


def test_two_trainings_in_one_process(tmp_path, monkeypatch):
    """As in a notebook."""
    from train import train

    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--dataset_size", "16", "--epochs", "1"]
    outcomes = [train(TrainingConfig.from_args([*flags, "--run_dir", f"runs/{name}"])) for name in "ab"]
    assert [outcome["state"] for outcome in outcomes] == ["completed"] * 2
    a, b = (torch.load(tmp_path / "runs" / name / "checkpoints" / "step_00000004.pt", weights_only=True)["model"] for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_separate_test_set_is_evaluated_once_with_the_best_weights(runs):
    for split, counts in (("train", (6, 6)), ("val", (3, 2)), ("test", (4, 3))):
        save_images(runs.root / "data" / split, dict(zip(("cat", "dog"), counts, strict=True)), seed=len(split))
    runs.train(2, "run", "--dataset", "imagefolder", "--epochs", 2, "--lr", 0.01, "--num_workers", 2)
    evaluations = runs.records("run", "eval")
    assert [(record["split"], record["count"]) for record in evaluations] == [("val", 5), ("val", 5), ("test", 7)]
    summary = runs.json("run", "summary.json")
    assert summary["test"] == evaluations[-1:] and summary["final_top1"] == evaluations[1]["top1"]
    runs.train(2, "run", "--dataset", "imagefolder", "--eval_only")
    with pytest.raises(AssertionError, match=r"(?s)dataset=synthetic: the checkpoint has dataset=imagefolder\n.*/run/config.json"):
        runs.train(2, "run", "--eval_only")  # not the data that it was trained on
    again = runs.json("run", "eval-best.json")["records"]
    assert [(record["split"], record["loss"]) for record in again if record["split"] == "test"] == [("test", evaluations[-1]["loss"])]


def test_patience_and_max_steps_end_a_run_as_completed(runs):
    outcome = runs.train(2, "steps", "--dataset_size", 80, "--epochs", 9, "--max_steps", 13)[0]
    assert (outcome["state"], outcome["steps"]) == ("completed", 13) and runs.last("steps")["progress"]["step"] == 13
    assert runs.records("steps", "eval")[-1]["step"] == 13 and runs.records("steps", "train")[-1]["lr"] < 0.01
    progress = runs.last("steps")["progress"]  # of a run that goes on from here: it knows the evaluation, which stays
    assert progress["evaluated_step"] == 13 and progress["best_value"] == max(each["top1"] for each in runs.records("steps", "eval"))
    last = runs.checkpoints("steps")[-1]
    runs.train(2, "steps", "--dataset_size", 80, "--epochs", 9, "--max_steps", 13, "--resume_from", last)  # nothing is left to do
    assert [record["step"] for record in runs.records("steps", "eval")] == [10, 13]
    runs.train(2, "steps", "--dataset_size", 80, "--epochs", 9, "--max_steps", 15, "--lr", 1e-9, "--resume_from", last)
    assert [record["step"] for record in runs.records("steps", "eval")] == [10, 13, 15]
    assert runs.json("steps", "summary.json")["best_value"] == max(r["top1"] for r in runs.records("steps", "eval"))
    outcome = runs.train(2, "patience", "--dataset_size", 16, "--epochs", 9, "--lr", 1e-9, "--patience", 2, "--save_every", 0)[0]
    assert runs.last("patience")["progress"]["step"] == outcome["steps"] == 6  # saved, though no save was due
    assert (outcome["state"], outcome["epochs"]) == ("completed", 3)
    assert "no better top1 in 2 evaluation(s): patience ends the run" in (runs.folder("patience") / "logs" / "rank0.log").read_text()
