"""scripts/runs.py and scripts/export.py on real runs."""

import re
import shutil
import xml.etree.ElementTree as ET

import pytest
import torch

from config import TrainingConfig
from dataset import create_dataset
from ranks import ROOT, WarmLaunch, finish
from training import Runs, difference


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("two"))
    for name, lr in (("slow", 0.01), ("fast", 0.05)):
        runs.train(2, name, "--dataset_size", 40, "--epochs", 2, "--lr", lr, "--ema_decay", 0.5, task="")
    return runs


def run_script(name, *words):
    return finish(WarmLaunch(0, ROOT / "scripts" / name, words))


def test_a_table_of_runs_has_only_the_settings_that_differ(two_runs):
    ended = run_script("runs.py", two_runs.root)
    assert ended.code == 0, ended.text
    header, *rows = ended.out.splitlines()
    assert header.split() == "run state epoch step best final top1 minutes MB lr".split()
    assert len(rows) == 2 and all("completed" in row and re.search(r"top1 \d\.\d{4}", row) for row in rows)
    assert rows[0].endswith("0.05") and rows[1].endswith("0.01")


@pytest.mark.parametrize("metric", ["top1", "loss"])
def test_one_picture_has_the_curves_of_all_runs(two_runs, tmp_path, metric):
    picture = tmp_path / "curves.svg"
    assert run_script("runs.py", two_runs.root, "--plot", picture, "--metric", metric).code == 0
    lines = ET.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4 and all(line.get("points") for line in lines)
    assert "fast" in picture.read_text() and "slow" in picture.read_text()


def test_compare_says_whether_the_weights_are_bitwise_equal(two_runs):
    slow, fast = (two_runs.folder(name) for name in ("slow", "fast"))
    ended = run_script("runs.py", "--compare", slow, fast)
    assert ended.code == 1 and "the weights DIFFER" in ended.out
    shutil.copytree(fast, two_runs.root.parent / "copies" / "fast", dirs_exist_ok=True)
    ended = run_script("runs.py", "--compare", fast, two_runs.root.parent / "copies")
    assert ended.code == 0 and "the weights are bitwise equal" in ended.out, ended.text
    assert run_script("runs.py", "--compare", fast).code == 2


def test_what_cannot_be_shown_is_rejected(two_runs, tmp_path):
    ended = run_script("runs.py", two_runs.root, "--plot", tmp_path / "curves.svg", "--metric", "f1")
    assert ended.code == 2 and "metric=f1: no run has records of it; give" in ended.err
    ended = run_script("runs.py", tmp_path)
    assert ended.code == 2 and "has no run (a folder with a status.json); give" in ended.err


@pytest.mark.parametrize("flags", [[], ["--ema"]])
def test_the_printed_snippet_classifies_as_the_evaluation_did(two_runs, tmp_path, flags):
    """The six lines are run as they were printed, on the set that was evaluated."""
    ended = run_script("export.py", two_runs.checkpoints("fast")[-1], tmp_path / "model.pt", *flags)
    assert ended.code == 0, ended.text
    exported = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert difference(exported, two_runs.last("fast")["ema" if flags else "model"]) == []
    snippet = ended.out.split("to use it:\n\n")[1].strip()
    assert len(snippet.splitlines()) == 6
    data = create_dataset(TrainingConfig.from_args(["--config", str(two_runs.folder("fast") / "config.json")]), "val")
    torch.save(data.images, tmp_path / "images.pt")
    (tmp_path / "use.py").write_text(
        f"{snippet}\nprint(*predict(torch.load({str(tmp_path / 'images.pt')!r})), sep='\\n')\n"
    )
    names = finish(WarmLaunch(0, tmp_path / "use.py", [])).out.split()
    top1 = sum(name == data.classes[label] for name, label in zip(names, data.targets, strict=True)) / len(data)
    evaluated = [r for r in two_runs.records("fast", "eval") if r["weights"] == ("ema" if flags else "model")][-1]
    assert top1 == evaluated["top1"]


def test_what_cannot_be_exported_is_rejected(two_runs, tmp_path):
    source = two_runs.checkpoints("fast")[-1]
    (tmp_path / "text.pt").write_text("hello")
    assert "has no checksum at its end" in run_script("export.py", tmp_path / "text.pt", tmp_path / "out.pt").err
    before = source.read_bytes()
    ended = run_script("export.py", source, source)
    assert (
        ended.code == 2 and "is the checkpoint itself; give another name" in ended.err and source.read_bytes() == before
    )
