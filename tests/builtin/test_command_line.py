# extra: template
"""train.py as a user types it: the published flags, one process without a launcher, a data set of images."""

import json
import sys

import pytest
import torch

from config import TrainingConfig
from images import save_images
from ranks import ROOT, WarmLaunch, finish, launch, run_ranks
from training import train_flags
from utils.checkpoint import format as checkpoint
from utils.settings.errors import UserError

TRAIN = ROOT / "train.py"
SMALL = "--image_size 8 --batch_size 8 --log_interval 2 --backend gloo".split()


@pytest.mark.guarantee("published-flags")
def test_the_published_flags_work_unchanged(tmp_path):
    """The command line of the published pipeline, with a run folder and small data."""
    line = "--epochs 2 --batch_size 64 --no-use_amp --grad_accum_steps 2".split()
    small = "--dataset_size 130 --image_size 8 --backend gloo".split()
    ended = finish(WarmLaunch(2, TRAIN, [*line, "--run_dir", tmp_path / "run", *small]))
    assert ended.code == 0, ended.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    expected = {"state": "completed", "epochs": 2, "samples_seen": 260, "global_batch_size": 256}
    assert summary | expected == summary and "float32" in ended.out


# torchvision's README, ResNet-50; and the flags that have another name or value here
RESNET50 = """--model resnet50 --batch-size 128 --lr 0.5 --lr-scheduler cosineannealinglr --lr-warmup-epochs 5
--lr-warmup-method linear --auto-augment ta_wide --epochs 600 --random-erase 0.1 --weight-decay 0.00002
--norm-weight-decay 0.0 --label-smoothing 0.1 --mixup-alpha 0.2 --cutmix-alpha 1.0 --train-crop-size 176
--val-resize-size 232 --ra-sampler --ra-reps 4"""
RESNET50 += " --model-ema"
HERE = {
    "--lr-scheduler": "--schedule",
    "--lr-warmup-epochs": "--warmup_epochs",
    "--lr-warmup-method": "",
    "--train-crop-size": "--train_size",
    "--val-resize-size": "--resize_size",
    "--ra-sampler": "--augment_repeats",
    "--ra-reps": "--augment_repeats",
    "--model-ema": "--ema_decay",
}


def test_torchvisions_command_for_resnet50_works_once_the_flags_are_named_as_the_answers_say(capsys):  # extra: images
    with pytest.raises(SystemExit) as ended:
        TrainingConfig.from_args(RESNET50.split())
    assert ended.value.code == 2
    expected = {flag: f" is not a flag here. Did you mean {our_flag}?" for flag, our_flag in HERE.items() if our_flag}
    expected["--lr-warmup-method"] = (
        " is not a flag here. The warm-up is linear from 1 / steps. Write lr_factor in model.py for another."
    )
    answers = capsys.readouterr().err.splitlines()
    assert len(answers) == len(HERE)
    for flag, answer in zip(HERE, answers, strict=True):
        assert answer.startswith(f"{flag}{expected[flag]}"), answer
    given = [pair.split() for pair in RESNET50[2:].split("--")]
    words = {f"--{name}": value[0] if value else "" for name, *value in given}
    named = {HERE.get(flag, flag): value for flag, value in words.items()} | {"--schedule": "cosine"}
    # theirs is a switch, whose decay docs/recipes/imagenet.toml computes
    named |= {"--ema_decay": "0.999966"}
    del named[""]
    config = TrainingConfig.from_args([word for flag, value in named.items() for word in (flag, value)])
    recipe = TrainingConfig.from_args(["--config", str(ROOT / "docs/recipes/imagenet.toml")])
    same = [flag.removeprefix("--").replace("-", "_") for flag in named]
    assert len(same) >= 16 and [getattr(config, name) for name in same] == [getattr(recipe, name) for name in same]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.guarantee("eval-only", "one-process")
def test_one_process_needs_no_launcher_and_the_default_folder_is_moved_aside(tmp_path):
    """`python train.py` in a folder with an earlier run; then --eval_only, which leaves the run unchanged."""
    flags = [*SMALL, "--dataset_size", "40", "--epochs", "1", "--run_dir", tmp_path / "runs" / "default"]
    assert finish(WarmLaunch(0, TRAIN, flags)).code == 0
    ended = launch([sys.executable, TRAIN, *flags[:-2]], cwd=tmp_path)
    assert ended.code == 0 and "The earlier run was moved to runs/default.1" in ended.out, ended.text
    default = tmp_path / "runs" / "default"
    assert (tmp_path / "runs" / "default.1" / "summary.json").exists() and (default / "summary.json").exists()
    before = contents(default)
    ended = finish(WarmLaunch(0, TRAIN, [*flags, "--eval_only"]))
    assert ended.code == 0, ended.text
    evaluated = json.loads((default / "eval-best.json").read_text())["records"][0]
    (default / "eval-best.json").unlink()
    assert contents(default) == before
    last = [json.loads(line) for line in (default / "metrics.jsonl").read_text().splitlines() if '"eval"' in line][-1]
    assert (evaluated["loss"], evaluated["top1"], evaluated["count"]) == (last["loss"], last["top1"], 8)


@pytest.mark.guarantee("exit-codes")  # extra: images
def test_bad_data_ends_one_process_with_exit_code_2_and_one_sentence(tmp_path):
    folders = ["--data_dir", tmp_path, "--run_dir", tmp_path / "run"]
    ended = launch([sys.executable, TRAIN, *SMALL, "--dataset", "imagefolder", *folders])
    assert ended.code == 2 and len(ended.err.splitlines()) == 1, ended.text
    assert ended.err.startswith(f"--data_dir {tmp_path} has no "), ended.text
    assert not (tmp_path / "run" / "config.json").exists()


def train_without_torchvision(flags):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "PIL")]:
        del sys.modules[name]
    sys.modules["torchvision"] = sys.modules["PIL"] = None  # Pillow comes with it
    with pytest.raises(UserError, match="--model resnet18 needs torchvision"):  # extra: images
        train_flags([*flags, "--model", "resnet18"], task="")
    return train_flags([*flags, "--overwrite"], task="")["state"]


@pytest.mark.guarantee("no-torchvision")
def test_the_synthetic_run_works_without_torchvision(tmp_path):
    flags = [*SMALL, "--dataset_size", "40", "--epochs", "1", "--run_dir", str(tmp_path / "run")]
    assert run_ranks(2, train_without_torchvision, flags) == ["completed"] * 2


@pytest.mark.guarantee("eval-only", "test-split")  # extra: images
def test_a_separate_test_set_is_evaluated_once_with_the_best_weights(runs):
    for split, counts in (("train", (6, 6)), ("val", (3, 2)), ("test", (4, 3))):
        save_images(runs.root / "data" / split, dict(zip(("cat", "dog"), counts, strict=True)), seed=len(split))
    folder = "--dataset imagefolder --num_workers 1".split()
    runs.train(2, "run", *folder, "--epochs", 2, "--lr", 0.01, task="")
    evaluations = runs.records("run", "eval")
    assert [(record["split"], record["count"]) for record in evaluations] == [("val", 5), ("val", 5), ("test", 7)]
    summary = runs.json("run", "summary.json")
    saved = checkpoint.read_checkpoint(runs.folder("run") / "checkpoints/best.pt")[0]
    assert evaluations[-1]["step"] == saved["progress"]["step"] and summary["best_epoch"] == evaluations[-1]["epoch"]
    assert [record["epoch"] for record in evaluations[:2]] == [1, 2]
    assert f"in epoch {summary['best_epoch']}\n" in runs.log("run")
    assert summary["test"] == evaluations[-1:] and summary["final"]["top1"] == evaluations[1]["top1"]
    runs.train(2, "run", *folder, "--eval_only", task="")
    again = runs.json("run", "eval-best.json")["records"]
    assert [record["loss"] for record in again if record["split"] == "test"] == [evaluations[-1]["loss"]]
    weights = runs.root / "published.pth"
    torch.save(saved["model"], weights)
    before = contents(runs.folder("run"))
    runs.train(2, "run", *folder, "--eval_only", "--init_from", weights, task="")
    again = runs.json("run", "eval-published.json")["records"]
    assert [record["loss"] for record in again if record["split"] == "test"] == [evaluations[-1]["loss"]]
    after = contents(runs.folder("run"))
    assert [path.name for path in after if after[path] != before.get(path)] == ["eval-published.json"]
    with pytest.raises(AssertionError, match="or use --init_from if the file holds published weights."):
        runs.train(2, "run", *folder, "--eval_only", "--resume_from", weights, task="")
    other_data = r"(?s)--dataset is synthetic, but the checkpoint has --dataset imagefolder.\n.*/run/config.json"
    with pytest.raises(AssertionError, match=other_data):
        runs.train(2, "run", "--eval_only", task="")
