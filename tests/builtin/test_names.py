# extra: template
"""Whole runs whose folders, classes and files have names that are not UTF-8, and whose streams are closed or full."""

import json
import sys
from pathlib import Path

import pytest

from images import save_images
from ranks import ROOT, WarmLaunch, finish, launch
from utils.checkpoint import format as checkpoint

TRAIN = ROOT / "train.py"
FLAGS = "--dataset imagefolder --image_size 8 --batch_size 4 --num_workers 1 --backend gloo".split()
STRICT = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # no locale has fewer characters
BYTE = "\udce9"  # of latin-1


ASCII = pytest.param({"PYTHONIOENCODING": "ascii"}, marks=pytest.mark.slow)


@pytest.mark.parametrize("env", [STRICT, ASCII], ids=["C", "ascii"])  # extra: images
def test_a_run_with_a_byte_of_latin_1_in_every_name_trains_resumes_and_names_its_corrupt_file(tmp_path, env):
    """In a locale that has no such characters; the resume and the evaluation run in the usual one."""
    data, run = tmp_path / f"da{BYTE}ta", tmp_path / f"run{BYTE}"
    for split in ("train", "val"):
        save_images(data / split, {f"cat{BYTE}": 4, "dogï": 4})
        for path in [*(data / split).rglob("*.png")]:
            path.rename(path.with_name(f"im{BYTE}{path.name}"))
    words = [*FLAGS, "--data_dir", data, "--run_dir", run, "--log_interval", 1]
    ended = launch([sys.executable, TRAIN, *words, "--epochs", "1"], env=env)
    assert ended.code == 0 and "Traceback" not in ended.text, ended.text
    ended = finish(WarmLaunch(0, TRAIN, [*words, "--epochs", 2, "--resume_from", "auto"]))
    assert ended.code == 0, ended.text
    ended = finish(WarmLaunch(0, TRAIN, ["--config", run / "config.json", "--eval_only"]))
    assert ended.code == 0, ended.text
    status = json.loads((run / "status.json").read_bytes().decode())
    assert status["state"] == "completed" and checkpoint.verify_checkpoint(Path(status["checkpoint"]))

    path = sorted((data / "val").rglob("*.png"))[1]
    path.write_bytes(path.read_bytes()[:60])
    again = ["--run_dir", tmp_path / f"again{BYTE}", "--epochs", "1"]
    ended = launch([sys.executable, TRAIN, *words, *again], env=env)
    shown = str(path).encode(errors="backslashreplace").decode()
    log = (tmp_path / f"again{BYTE}/logs/rank0.log").read_bytes().decode()
    assert ended.code == 2 and shown in log, ended.text
    assert f"{shown} (class cat" in ended.err and ") cannot be read as an image" in ended.err, ended.text
    assert json.loads((tmp_path / f"again{BYTE}/status.json").read_bytes())["error"].startswith(
        f"{path} (class {path.parent.name}) cannot be read"
    )


ALSO = ["</dev/zero >/dev/full 2>/dev/full", "<&- >&- 2>&-", "</dev/zero >&- 2>/dev/full"]


@pytest.mark.parametrize(
    "channels", ["<&- >/dev/full 2>&-", *(pytest.param(redirection, marks=pytest.mark.slow) for redirection in ALSO)]
)
def test_no_output_channel_ends_a_run(runs, channels):
    words = runs.words("run", "--dataset_size", 16, "--epochs", 1, "--num_workers", 1, "--log_interval", 1)
    ended = launch(["bash", "-c", f'exec "$@" {channels}', "bash", sys.executable, TRAIN, *words])
    assert ended.code == 0 and ended.text == "", ended.text
    assert runs.json("run", "status.json")["state"] == "completed" and "epoch 1 | step 4/4" in runs.log("run")
    assert all(checkpoint.verify_checkpoint(path) for path in runs.checkpoints("run"))
