"""`--track`: one curve over stops, kills and failures of the tracker, which training does not notice."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from plans import plan_for

from config import TrainingConfig
from ranks import ROOT, run_ranks
from scripts.companions import trackers
from scripts.companions.track import DEFAULT_PROJECT, TrackCompanion
from tasks import train_task
from training import assert_same_state
from utils.files import read_json
from utils.run.start_decision import decide_start
from utils.settings.errors import UserError

PROGRAM = ROOT / "scripts/companions/track.py"
FLAGS = "--epochs 2 --dataset_size 60 --lr 0.02 --log_interval 1 --save_every_steps 3".split()
FLAGS += ["--ema_decay", "0.9"]
# Trackio's functions that the program uses. A store of JSON lines; the next word of faults.txt is what happens.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path

STORE, FAULTS = (Path(__file__).with_name(name) for name in ("store.jsonl", "faults.txt"))


def read():
    return [json.loads(line) for line in STORE.read_text().splitlines()] if STORE.exists() else []


class SQLiteStorage:
    get_logs = staticmethod(lambda project, run: [row for row in read() if row["run"] == run])

    @staticmethod
    def get_metric_values(project, run, name, step):
        return [row for row in read() if row["row"] == step and name in row]


class init:
    def __init__(self, project, name, resume, config, **options):
        assert resume == "allow" and "torch" not in sys.modules
        self.run, self.rows, self.config = name, [], config

    def log(self, values, step):
        self.rows.append({"run": self.run, "row": step, "config": self.config, **values})

    def finish(self):
        fault, *more = (FAULTS.read_text().split() if FAULTS.exists() else []) or [""]
        FAULTS.write_text(" ".join(more))
        if fault == "refuses":
            raise RuntimeError("no network")
        if fault == "hangs":
            time.sleep(1000)
        rows = self.rows[: len(self.rows) // 2] if fault in ("half", "loses") else self.rows
        with STORE.open("a") as file:
            file.writelines(json.dumps(row) + "\\n" for row in rows)
        if fault == "fails":
            raise RuntimeError("the answer was lost")
        if fault in ("dies", "half"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def fake(tmp_path):
    """The folder of a package named trackio."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "trackio.py").write_text(FAKE)
    return folder


def train_tracked(folder, *args):
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    return train_task(*args)


def attempt(runs, folder, *flags, stops=(), name="run"):
    words = runs.words(name, *FLAGS, "--track", "trackio", "--resume_from", "auto", *flags)
    return run_ranks(1, train_tracked, folder, "images", words, torch.float32, stops, False)[0]


def by_hand(run, *words, **env):
    command = [sys.executable, PROGRAM, run, *words]
    everything = os.environ | env
    return subprocess.run(command, env=everything, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def stored(fake):
    path = fake / "store.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def group_of(record):
    return record.get("split", "train") + ("_ema" if record.get("weights") == "ema" else "")


def assert_one_curve(rows, run):
    """Each record of the run is in the tracker once, with its values. rows: what the tracker has."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] in ("train", "eval")]
    wanted = sorted((group_of(record), record["step"], record["loss"]) for record in records)
    groups = {group for group, *_ in wanted}
    tracked = [
        (name, row[f"{name}/step"], row[f"{name}/loss"]) for row in rows for name in groups if f"{name}/step" in row
    ]
    assert sorted(tracked) == wanted
    assert read_json(run / "track.json")["sent"] == {group: step for group, step, _ in wanted}


def write_run(folder, steps=12, config=None):
    """A run that has ended: a record of each step, and two evaluations at each third one."""
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            records = [{"kind": "train", "step": step, "loss": step / 3, "lr_of_groups": {"a b@c": 0.1}}]
            for weights in ("model", "ema") if step % 3 == 0 else ():
                records += [{"kind": "eval", "step": step, "split": "val", "weights": weights, "loss": step / 7}]
            records += [{"kind": "event", "event": "checkpoint", "step": step}]
            file.writelines(json.dumps(record) + "\n" for record in records)
    (folder / "config.json").write_text(json.dumps({"lr": 0.1, "track": "trackio"} | (config or {})))
    (folder / "status.json").write_text(json.dumps({"state": "completed"}))
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "best_value": 0.5, "final": {"top1": 0.25}}))
    (folder / "lock.json").write_text(json.dumps({"token": "1", "has_trained": True}))
    return folder


@pytest.mark.guarantee("tracker")
@pytest.mark.parametrize("faults", ["", "refuses", "fails", "loses", "half", "dies", "refuses half half fails loses"])
def test_by_hand_each_record_arrives_once_whatever_fails(tmp_path, fake, faults):
    run, env = write_run(tmp_path / "run"), {"PYTHONPATH": str(fake)}
    (fake / "faults.txt").write_text(faults)
    for _ in faults.split():
        assert by_hand(run, **env).returncode not in (0, 2)
    ended = by_hand(run, **env)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    assert_one_curve(stored(fake), run)
    write_run(run, 20)  # trained longer
    assert [by_hand(run, **env).returncode for _ in range(2)] == [0, 0]
    assert_one_curve(stored(fake), run)
    summaries = [row for row in stored(fake) if "summary/best_value" in row]
    assert [(row["row"], row["summary/final/top1"]) for row in summaries] == [(12, 0.25), (20, 0.25)]
    (name,) = {row["run"] for row in stored(fake)}
    assert name == read_json(run / "track.json")["id"] and name.startswith("run-")


@pytest.mark.parametrize(
    ("config", "words", "sentence"),
    [
        (
            {},
            ["mlflow"],
            "--track mlflow cannot send records (No module named 'mlflow'). Run pip install mlflow.",
        ),
        (
            {},
            ["tensorboard"],
            "The tracker must be one of wandb, mlflow, trackio, got tensorboard: track.py RUN wandb|mlflow|trackio",
        ),
        (
            {"track": "none"},
            [],
            "The tracker must be one of wandb, mlflow, trackio, got none: track.py RUN wandb|mlflow|trackio",
        ),
        (None, [], "{run} holds no run. Give the folder of a run: track.py RUN wandb|mlflow|trackio"),
    ],
)
def test_by_hand_what_cannot_be_sent_is_one_sentence(tmp_path, fake, config, words, sentence):
    run = write_run(tmp_path / "run", config=config)
    if config is None:
        (run / "config.json").unlink()
    (fake / "mlflow.py").write_text("raise ModuleNotFoundError(\"No module named 'mlflow'\")")
    ended = by_hand(run, *words, PYTHONPATH=str(fake))
    assert (ended.returncode, ended.stderr) == (2, sentence.format(run=run) + "\n")


@pytest.mark.parametrize(
    ("tracker", "variable"),
    [("wandb", "WANDB_PROJECT"), ("mlflow", "MLFLOW_EXPERIMENT_NAME"), ("trackio", "TRACKIO_PROJECT")],
)
@pytest.mark.parametrize("is_set", [False, True])
def test_the_environment_names_the_project(tmp_path, monkeypatch, tracker, variable, is_set):
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.setenv(name, f"another tracker's {name}")
    monkeypatch.setenv(variable, "cats" if is_set else "")
    companion = TrackCompanion(plan_for(tmp_path, track=tracker))
    assert companion._tracker_state["project"] == ("cats" if is_set else DEFAULT_PROJECT)


@pytest.mark.guarantee("tracker")
@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_missing_package_is_rejected_before_the_run_folder_is_made(tmp_path, monkeypatch, tracker, has_folder):
    if has_folder:  # that an earlier run of the tracker has left beside train.py
        (tmp_path / tracker).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    config = TrainingConfig.from_args(["--track", tracker, "--run_dir", str(tmp_path / "run")])
    with pytest.raises(
        UserError,
        match=f"--track {tracker} needs the package {tracker}, which is not installed. Run pip install {tracker}.",
    ):
        decide_start(config, "host", "", False)
    assert not (tmp_path / "run").exists()


@pytest.mark.guarantee("tracker")
def test_training_does_not_notice_its_tracker_and_the_curve_is_whole_over_two_resumes(runs, fake):
    command = "true --password geheim"
    for faults, stops, state in (
        ("dies fails", (5,), "preempted"),
        ("hangs", (11,), "preempted"),
        ("half refuses", (), "completed"),
    ):
        (fake / "faults.txt").write_text(faults)
        assert attempt(runs, fake, "--hang_timeout", 5, "--on_checkpoint", command, stops=stops) == state
        assert (fake / "faults.txt").read_text() == ""
    assert "--track trackio lacks the latest checkpoint or records after" in runs.log("run")
    attempt(runs, fake, "--track", "none", name="alone")
    assert_same_state(runs.last("alone"), runs.last("run"))
    assert_one_curve(stored(fake), runs.folder("run"))
    assert {row["run"] for row in stored(fake)} == {read_json(runs.folder("run") / "track.json")["id"]}
    assert "geheim" not in (fake / "store.jsonl").read_text()


@pytest.mark.parametrize(
    ("run", "sent", "expected", "rows"),
    [
        (
            {"resumed": True, "step": 8, "summary": {"train/step": 7, "val/step": 3}},
            {"train": 9},
            {"train": 7, "val": 3},
            [8, 8, 9],
        ),
        ({"resumed": True, "step": 8}, {"train": 7}, {"train": 7}, [8, 8, 9]),
        ({}, {"train": 9}, {}, [6, 8, 9]),  # the server does not have the run
        ({"offline": True}, {"train": 7}, {"train": 7}, [8, 8, 9]),  # its files have been deleted
    ],
)
def test_what_weights_and_biases_has_counts_and_no_row_goes_back(tmp_path, monkeypatch, run, sent, expected, rows):
    """Weights & Biases ignores a row whose number is below that of the last one."""
    logged = []
    run = SimpleNamespace(**{"offline": False, "resumed": False, "step": 0, "summary": {}} | run)
    run.settings, run.config = SimpleNamespace(wandb_dir=tmp_path), SimpleNamespace(update=lambda *_, **__: None)
    run.log = lambda values, step: logged.append(step)
    mode = SimpleNamespace(settings=SimpleNamespace(mode="offline", base_url=""))
    package = SimpleNamespace(
        teardown=lambda: None,
        setup=lambda: mode,
        init=lambda **options: run,
        Settings=type("Settings", (SimpleNamespace,), {"model_fields": ["console"]}),
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    tracker = trackers.Wandb("id", "project", {}, tmp_path)
    assert tracker.open(sent) == expected
    tracker.send([(6, {"val/loss": 0.1}), (8, {"train/loss": 0.1}), (9, {"train/loss": 0.1})])
    assert logged == rows
