# extra: template
"""scripts/runs.py, export.py, predict.py and replay.py on real runs."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import forks
from config import TrainingConfig
from dataset import create_dataset
from export import as_safetensors
from ranks import ROOT, WarmLaunch, finish, launch
from training import Runs, difference
from utils.checkpoint import archive
from utils.settings.errors import UserError

AVERAGED: list = []
AVERAGED += ["--ema_decay", 0.5]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("two"))
    for name, lr in (("slow", 0.01), ("fast", 0.05)):
        runs.train(1, name, "--dataset_size", 40, "--epochs", 2, "--lr", lr, *AVERAGED, task="")
    return runs


def run_script(name, *words, ranks=0):
    return finish(WarmLaunch(ranks, ROOT / "scripts" / name, words))


@pytest.mark.slow
def test_a_step_of_a_sharded_run_is_replayed_by_the_script_in_a_single_process(tmp_path):
    """As a user starts it: without the paths of the tests."""
    runs = Runs(tmp_path)
    runs.train(2, "run", *"--dataset_size 16 --epochs 1 --save_every_steps 1 --sharding zero3".split(), task="")
    ended = forks.run(ROOT, 0, "scripts/replay.py", runs.folder("run"), "--step", "2")
    assert ended.code == 0 and "is replayed from step_00000001.\n" in ended.out, ended.text


def test_a_table_of_runs_has_only_the_settings_that_differ(two_runs):
    ended = run_script("runs.py", two_runs.root)
    assert ended.code == 0, ended.text
    header, *rows = ended.out.splitlines()
    assert header.split() == "run state epochs step best final top1 minutes MB lr".split()
    assert len(rows) == 2 and all("completed" in row and re.search(r"top1 \d\.\d{4}", row) for row in rows)
    assert rows[0].endswith("0.05") and rows[1].endswith("0.01")


def test_the_report_has_the_timeline_and_curves_of_all_runs(two_runs, tmp_path):
    ended = run_script("runs.py", two_runs.root, "--html", tmp_path / "report.html")
    assert ended.code == 0, ended.text
    page = (tmp_path / "report.html").read_text()
    marks = [len(re.findall(f'<rect class="{kind}" [^>]*><title>', page)) for kind in ("start_up", "training")]
    assert marks == [2, 2] and page.count("<title>evaluation at step") == 4
    assert ">fast (averaged weights)<" in page
    assert page.count("<title>fast, training, optimizer step 10: ") >= 2  # loss and top1


def test_compare_says_whether_the_weights_are_bitwise_equal(two_runs):
    slow, fast = (two_runs.folder(name) for name in ("slow", "fast"))
    ended = run_script("runs.py", "--compare", slow, fast)
    assert ended.code == 1 and "The weights DIFFER." in ended.out
    shutil.copytree(fast, two_runs.root.parent / "copies" / "fast", dirs_exist_ok=True)
    ended = run_script("runs.py", "--compare", fast, two_runs.root.parent / "copies")
    assert ended.code == 0 and "The weights are bitwise equal." in ended.out, ended.text
    assert run_script("runs.py", "--compare", fast).code == 2


def test_compare_lists_the_weights_that_differ_as_json(two_runs, tmp_path):
    slow, fast = (two_runs.folder(name) for name in ("slow", "fast"))
    ended = run_script("runs.py", "--compare", slow, fast, fast, "--json")
    report, weights = json.loads(ended.out), two_runs.last("slow")["model"]
    assert ended.code == 1 and not report["equal"] and [row["run"] for row in report["runs"]] == [str(slow), str(fast)]
    changed = [name for name, value in weights.items() if not torch.equal(value, two_runs.last("fast")["model"][name])]
    assert {row["weight"] for row in report["differences"]} == {*changed} and 0 < len(changed) < len(weights)
    assert all(row["runs"] == [str(fast)] for row in report["differences"])
    shutil.copytree(fast, tmp_path / "fast")
    ended = run_script("runs.py", "--compare", fast, tmp_path / "fast", "--json")
    report = json.loads(ended.out)
    assert (ended.code, report["equal"], report["differences"]) == (0, True, [])
    for file in (tmp_path / "fast/checkpoints").rglob("*.pt"):
        file.write_bytes(file.read_bytes()[:-100])
    ended = run_script("runs.py", "--compare", fast, tmp_path / "fast", "--json")
    assert (ended.code, ended.out) == (2, "") and "has no valid checkpoint" in ended.err, ended.text


def test_the_list_has_the_results_and_settings_of_real_runs(two_runs):
    rows = json.loads(run_script("runs.py", two_runs.root, "--json").out)
    assert [row["settings"]["lr"] for row in rows] == [0.05, 0.01]
    for row in rows:
        summary = json.loads((two_runs.folder(Path(row["run"]).name) / "summary.json").read_text())
        assert all(
            row[name] == summary[name] for name in ("wall_s", "samples_per_s", "best_value", "final", "restarts")
        )
        assert (row["state"], row["epochs"], row["world_size"]) == ("completed", 2, 1)
        assert None not in (row["started"], row["ended"], row["git_commit"]) and row["started"] < row["ended"]


@pytest.mark.guarantee("export")
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--ema"],
        ["--no-ema"],
        pytest.param(["--format", "safetensors"], marks=pytest.mark.slow),
    ],
)
def test_the_printed_snippet_gives_the_same_predictions_as_the_evaluation(two_runs, tmp_path, flags):
    """The printed lines are run unchanged on the evaluated data."""
    is_safe = "safetensors" in flags
    load = pytest.importorskip("safetensors.torch").load_file if is_safe else lambda file: torch.load(file)["model"]
    ended = run_script("export.py", two_runs.checkpoints("fast")[-1], tmp_path / "model.pt", *flags)
    assert ended.code == 0, ended.text
    weights = "model"
    if "--no-ema" not in flags:
        weights = "ema"
    title = {"ema": "averaged", "model": "plain"}[weights]
    assert f"{tmp_path / 'model.pt'} was written from the {title} weights of " in ended.out
    assert difference(load(tmp_path / "model.pt"), two_runs.last("fast")[weights]) == []
    snippet = ended.out.split("This code uses it:\n\n")[1].strip()
    assert len(snippet.splitlines()) == (8 if is_safe else 6)
    data = create_dataset(TrainingConfig.from_args(["--config", str(two_runs.folder("fast") / "config.json")]), "val")
    torch.save(data.images, tmp_path / "images.pt")
    (tmp_path / "use.py").write_text(
        f"{snippet}\nprint(*predict(torch.load({str(tmp_path / 'images.pt')!r})), sep='\\n')\n"
    )
    names = finish(WarmLaunch(0, tmp_path / "use.py", [])).out.split()
    top1 = sum(name == data.classes[label] for name, label in zip(names, data.targets, strict=True)) / len(data)
    evaluated = [r for r in two_runs.records("fast", "eval") if r["weights"] == weights][-1]
    assert top1 == evaluated["top1"]


READ = {
    "torch.export": """
files = {"metadata.json": ""}
torch.export.load(FILE, extra_files=files)
metadata = json.loads(files["metadata.json"])
""",
    "onnx": """
import onnx
metadata = {entry.key: json.loads(entry.value) for entry in onnx.load(FILE).metadata_props}
""",
}


@pytest.mark.guarantee("export")
@pytest.mark.parametrize("kind", READ)
def test_an_exported_program_knows_its_data(two_runs, tmp_path, kind):
    """The printed lines are run in an empty folder, without the repository on the path."""
    if kind == "onnx":
        for name in ("onnx", "onnxscript"):
            pytest.importorskip(name)
    out = tmp_path / "model.out"
    ended = run_script("export.py", two_runs.checkpoints("fast")[-1], out, "--format", kind)
    assert ended.code == 0, ended.text
    config = TrainingConfig.from_args(["--config", str(two_runs.folder("fast") / "config.json")])
    data = create_dataset(config, "val")
    names = {"FILE": str(out), "json": json, "torch": torch}
    exec(READ[kind], names)
    expected = {"classes": data.classes, "mean": data.mean.tolist(), "std": data.std.tolist()}
    assert names["metadata"].items() >= (expected | {"size": data.images.shape[-1]}).items()
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    torch.save(data.images, tmp_path / "images.pt")
    images = f"torch.load({str(tmp_path / 'images.pt')!r})" + ".numpy()" * (kind == "onnx")
    use = f"{ended.out.split('This code uses it:')[1]}\nimport torch\nprint(*predict({images}), sep='\\n')\n"
    (tmp_path / "empty").mkdir()
    (tmp_path / "use.py").write_text(use)
    used = launch([sys.executable, "-I", tmp_path / "use.py"], cwd=tmp_path / "empty")
    assert used.code == 0, used.text
    hits = sum(name == data.classes[label] for name, label in zip(used.out.split(), data.targets, strict=True))
    evaluated = [record for record in two_runs.records("fast", "eval") if record["weights"] == "model"][-1]
    assert hits / len(data) == evaluated["top1"]


@pytest.mark.slow
def test_safetensors_have_a_tied_weight_under_each_name_and_only_tensors():
    load = pytest.importorskip("safetensors.torch").load
    weight = torch.arange(6.0).view(2, 3).T  # not contiguous
    loaded = load(as_safetensors({"model": {"tokens": weight, "head": weight}, "config": {"lr": 0.1}}))
    assert loaded.keys() == {"tokens", "head"} and all(torch.equal(tensor, weight) for tensor in loaded.values())
    with pytest.raises(UserError, match="count is none"):
        as_safetensors({"model": {"tokens": weight, "count": 3}})


def test_an_export_that_cannot_be_made_is_rejected(two_runs, tmp_path):
    source = two_runs.checkpoints("fast")[-1]
    (tmp_path / "text.pt").write_text("hello")
    assert "has no checksum at its end" in run_script("export.py", tmp_path / "text.pt", tmp_path / "out.pt").err
    before = source.read_bytes()
    ended = run_script("export.py", source, source)
    assert (
        ended.code == 2 and "is the checkpoint itself. Give another name" in ended.err and source.read_bytes() == before
    )


@pytest.mark.guarantee("export")
@pytest.mark.parametrize(
    ("flags", "weights"),
    [
        ([], "ema"),
        (["--ema"], "ema"),
        (["--no-ema"], "model"),
    ],
)
def test_a_prediction_uses_the_weights_that_selected_the_best_and_says_which(two_runs, tmp_path, flags, weights):
    out = tmp_path / "out.pt"
    ended = run_script("predict.py", two_runs.checkpoints("fast")[-1], "--out", out, *flags)
    assert ended.code == 0, ended.text
    title = {"ema": "averaged", "model": "plain"}[weights]
    assert f"{out} was written: output of 8 samples, computed with the {title} weights." in ended.text
    assert json.loads((tmp_path / "out.pt.json").read_text())["weights"] == weights
    config = TrainingConfig.from_args(["--config", str(two_runs.folder("fast") / "config.json")])
    labels = torch.tensor(create_dataset(config, "val").targets)
    correct = (torch.load(out, weights_only=True)["output"].argmax(1) == labels).double().mean().item()
    evaluated = [record for record in two_runs.records("fast", "eval") if record["weights"] == weights]
    assert correct == pytest.approx(evaluated[-1]["top1"])


def test_an_evaluation_alone_says_which_weights_selected_the_best(two_runs):
    ended = finish(
        WarmLaunch(0, ROOT / "train.py", ["--config", two_runs.folder("fast") / "config.json", "--eval_only"])
    )
    assert ended.code == 0, ended.text
    outcome = two_runs.json("fast", "eval-best.json")
    assert outcome["weights"] == outcome["records"][-1]["weights"]
    assert outcome["weights"] == "ema"
    assert f"the weights that select the best checkpoint are {outcome['weights']!r}" in ended.text


REFUSED = [  # ranks, arguments of predict.py, message
    (0, "nowhere.pt", "nowhere.pt cannot be read (No such file or directory). Give the path of a checkpoint."),
    (0, "PLAIN --split valid", '--split must be one of train, val, which the data has, got "valid".'),
    (2, "PLAIN --ema", "has no averaged weights. Leave out --ema"),
    (0, "PLAIN --out out.csv", '--out must end in .pt or .pth, since predictions are a torch file, got "out.csv".'),
    (2, "PLAIN --out PLAIN", "is the checkpoint itself. Give another file."),
]


@pytest.mark.parametrize(("ranks", "words", "sentence"), REFUSED)
def test_a_prediction_that_cannot_be_made_is_rejected_in_one_sentence(two_runs, tmp_path, ranks, words, sentence):
    plain = tmp_path / "plain.pt"
    archive.write_archive(plain, two_runs.last("fast") | {"ema": {}})
    before = plain.read_bytes()
    ended = run_script("predict.py", *words.replace("PLAIN", str(plain)).split(), ranks=ranks)
    assert ended.err.count(sentence) == 1 and len(ended.err.splitlines()) == 1, ended.text
    assert ended.code == (1 if ranks else 2) and plain.read_bytes() == before
