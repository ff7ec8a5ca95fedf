# extra: template
"""One complete run under torchrun with all features: its output, and every file that it writes."""

import gzip
import json
import re
import zipfile

import pytest
import torch

from config import TrainingConfig
from ranks import ROOT, torchrun
from training import Runs
from utils.checkpoint import archive

STEPS = [2, 4, 6, 8, 10, 12, 14, 15]  # the logged steps
TRAIN_KEYS = "kind epoch step loss top1 lr grad_norm samples_per_s data_wait_s step_s".split()
TRAIN_KEYS += ["peak_memory_bytes", "fingerprint"]
EVAL_KEYS = "kind epoch step split weights loss top1 top5 count".split()
SUMMARY_KEYS = (
    "state epochs steps skipped_steps samples_seen wall_s samples_per_s samples_per_s_per_rank world_size"
    " global_batch_size best_metric best_value best_epoch best final data_wait_fraction"
    " peak_memory_bytes restarts goodput overflow_steps time"
).split()
PROVENANCE_KEYS = "git_commit git_dirty hosts start_time verified classes mean std".split()


WEIGHTS = ["model"]
WEIGHTS += ["ema"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("full"))
    flags = "--image_size 8 --batch_size 8 --log_interval 2 --backend gloo --dataset_size 80 --epochs 3"
    flags += " --ema_decay 0.9"
    flags += " --num_workers 1 --record_samples --save_every_steps 4 --keep_last 2"
    flags += " --enable_profiling"
    runs.ended = torchrun(2, *flags.split(), "--run_dir", runs.folder("run"))
    assert (runs.ended.code, runs.ended.left) == (0, 0), runs.ended.text
    return runs


@pytest.mark.guarantee("torchrun")
def test_rank_0_prints_the_chosen_settings_and_the_progress(whole):
    for part in (
        "Starting on 2 ranks. Importing torch takes a few seconds.",
        "2 ranks on 1 node (cpu)",
        "2,777,674 parameters",
        "16 samples per optimizer step: 8 per rank x 1 accumulation step x 2 ranks",
        "SyntheticImageDataset, 80 training samples, 16 for evaluation (val), 10 classes",
        "15 optimizer steps, 5 per epoch",
        "10.60 MB per rank and step, all-reduced in buckets of about 2.65 MB",
        "every 10 min or 4 steps or 1 epoch, whichever comes first, and when asked to stop",
        f"torch {torch.__version__}",
        "epoch 1 | step 2/15 | loss",
        " per rank)",
        "left",
        "epoch 3 | val: loss",
        "| val (ema): loss",
        "completed: 3 epochs, 15 steps, 240 samples",
        "tensorboard --logdir",
        "python scripts/runs.py",
        "python train.py --config",
        "python scripts/export.py",
    ):
        assert part in whole.ended.out, part
    assert "goodput" not in whole.ended.out  # not printed for a short run
    for once in ("Starting on", "epoch 1 | step 2/15"):  # the other rank prints nothing
        assert whole.ended.out.count(once) == 1
    assert "Traceback" not in whole.ended.text and "Warning" not in whole.ended.text


@pytest.mark.guarantee("files")
def test_records_have_the_documented_keys_once_per_step(whole):
    train, evaluations, events = (whole.records("run", kind) for kind in ("train", "eval", "event"))
    assert [record["step"] for record in train] == STEPS
    assert all(sorted(record) == sorted(TRAIN_KEYS) for record in train)
    places = [(epoch, 5 * epoch, weights) for epoch in (1, 2, 3) for weights in WEIGHTS]
    assert [(record["epoch"], record["step"], record["weights"]) for record in evaluations] == places
    for record in evaluations:
        assert sorted(record) == sorted(EVAL_KEYS) and (record["count"], record["split"]) == (16, "val")
        assert 0 <= record["top1"] <= record["top5"] <= 1
    # a save that falls due during another one waits
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    assert saved == sorted(set(saved)) and saved[0] == 4 and saved[-1] == 15
    assert train[-1]["step_s"] > 0 and train[-1]["peak_memory_bytes"] > 1e8


@pytest.mark.guarantee("files")
def test_status_and_summary_have_the_result(whole):
    status, summary = whole.json("run", "status.json"), whole.json("run", "summary.json")
    assert list(status) == "state epoch step samples_seen checkpoint error rank host time".split()
    assert status | {"state": "completed", "epoch": 3, "step": 15, "samples_seen": 240, "error": None} == status
    assert status["checkpoint"].endswith("step_00000015.pt")
    assert list(summary) == SUMMARY_KEYS
    assert summary | {"epochs": 3, "world_size": 2, "global_batch_size": 16, "restarts": 0} == summary
    evaluations = whole.records("run", "eval")
    best = max(record["top1"] for record in evaluations if record["weights"] == WEIGHTS[-1])
    assert summary["best_metric"] == "top1" and summary["best_value"] == summary["best"]["top1"] == best
    assert summary["final"] == {name: evaluations[-1][name] for name in ("loss", "top1", "top5")}
    assert 0 < summary["goodput"] <= 1 and sum(summary["time"].values()) == pytest.approx(summary["wall_s"], abs=0.1)


@pytest.mark.guarantee("files")
def test_config_provenance_and_code_are_those_of_the_run(whole):
    config, provenance = whole.json("run", "config.json"), whole.json("run", "provenance.json")
    assert config | {"num_classes": 10, "in_channels": 3, "image_size": 8, "num_workers": 1} == config
    TrainingConfig.from_args(["--config", str(whole.folder("run") / "config.json")])
    assert "--record_samples" in provenance["command"] and len(provenance["ranks"]) == 2
    assert provenance["versions"]["torch"] == torch.__version__ and set(PROVENANCE_KEYS) <= provenance.keys()
    with zipfile.ZipFile(whole.folder("run") / "code.zip") as archive:
        assert archive.read("train.py") == (ROOT / "train.py").read_bytes()
        assert "utils/data/loader.py" in archive.namelist()


@pytest.mark.guarantee("plain-load", "keep-last")
def test_the_last_checkpoints_are_kept_and_open_with_plain_torch_load(whole):
    best = whole.folder("run") / "checkpoints" / "best.pt"
    kept = [path for path in whole.checkpoints("run") if path.name != str(best.readlink())]
    assert len(whole.checkpoints("run")[-2:]) == 2 >= len(kept) and kept[-1].name == "step_00000015.pt"
    payload = torch.load(whole.checkpoints("run")[-1], weights_only=True)
    assert tuple(payload) == archive.PAYLOAD_KEYS
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in payload["model"])
    assert torch.load(best, weights_only=True)["progress"]["step"] in (5, 10, 15)


@pytest.mark.guarantee("files")
def test_rank_0_has_a_log_and_the_others_have_one_only_after_a_warning(whole):
    lines = (whole.folder("run") / "logs" / "rank0.log").read_text().splitlines()
    assert len(lines) > 20 and all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z 0 \S+", line) for line in lines)
    assert [path.name for path in (whole.folder("run") / "logs").iterdir()] == ["rank0.log"]


@pytest.mark.guarantee("files")
def test_each_sample_is_recorded_once_per_epoch(whole):
    for epoch in range(3):
        seen = [index for step in range(5 * epoch + 1, 5 * epoch + 6) for index in whole.samples("run")[step]]
        assert sorted(seen) == list(range(80))


@pytest.mark.guarantee("files")
def test_tensorboard_has_scalars_by_step_texts_and_images(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole.folder("run") / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    tags = events.Tags()
    assert {"train/loss", "train/top1", "train/lr", "val/loss", "val/top1"} <= set(tags["scalars"])
    assert "val_ema/top1" in tags["scalars"]
    assert [event.step for event in events.Scalars("train/loss")] == STEPS
    assert [event.step for event in events.Scalars("val/top1")] == [5, 10, 15]
    assert tags["images"] == ["val/predictions"]
    assert [event.step for event in events.Images("val/predictions")] == [5, 10, 15]  # one per evaluation
    assert {"config/text_summary", "environment/text_summary"} <= set(tags["tensors"])


def test_the_profile_opens_and_its_costliest_operations_are_printed(whole):
    with gzip.open(whole.folder("run") / "traces" / "rank0.json.gz") as file:
        trace = json.load(file)
    assert any("convolution" in event.get("name", "") for event in trace["traceEvents"])
    assert "The costliest operations:" in whole.ended.out and "Self CPU" in whole.ended.out
