# extra: reports
"""scripts/runs.py on forged run folders: the order of the rows, and the curves."""

import contextlib
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts import runs as script
from scripts.lib.terminal import COLUMNS, draw_terminal


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """Runs runs.py; returns the exit code, the names in row order, and the output."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["runs.py", str(tmp_path), *map(str, words)])
        code, printed = script.main(), capsys.readouterr()
        rows = [line.split() for line in printed.out.splitlines() if line.startswith(str(tmp_path))]
        return code, [row[0].rpartition("/")[2] for row in rows], printed.out + printed.err

    return run


def forge(folder, config, metric="rmse", values=(), state="completed"):
    """A run with one evaluation per value. A run that was killed or still runs has no summary."""
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"state": state, "epoch": len(values), "step": 5 * len(values)}))
    (folder / "config.json").write_text(json.dumps(config))
    kinds = [("train", {}), ("eval", {"split": "val", "weights": "model"})]
    lines = [
        json.dumps({"kind": kind, "step": 5 * k, metric: value, **more})
        for k, value in enumerate(values, 1)
        for kind, more in kinds
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "tra']))  # truncated, as by a kill
    if state == "completed":
        result = {"best_metric": metric, "best_value": values[-1], "best": {metric: values[-1]}}
        (folder / "summary.json").write_text(json.dumps(result | {"final": {metric: values[-1]}, "wall_s": 60}))


@pytest.mark.parametrize(
    ("by", "order"),
    [("batch_size", "a b c d"), ("num_workers", "b a c d"), ("optimizer", "a c b d"), ("rmse", "c a b d")],
)
def test_runs_are_sorted_by_a_setting_or_a_metric_numerically_and_those_without_it_come_last(tmp_path, show, by, order):
    settings = {"a": (9, 4, "adamw", 2.5), "b": (16, 0, "sgd", 10.5), "c": (128, "auto", "adamw", 0.25)}
    for name, (*values, rmse) in settings.items():
        config = dict(zip(("batch_size", "num_workers", "optimizer"), values, strict=True))
        forge(tmp_path / name, config, values=[3.0, rmse])
    forge(tmp_path / "d", {}, values=[1.0], state="running")
    code, names, text = show("--sort", by)
    assert (code, names) == (0, order.split()), text
    assert "final rmse" in text and "rmse 0.2500" in text  # the metric of these runs, if none is given


def test_a_setting_or_metric_that_no_run_has_is_rejected(tmp_path, show):
    forge(tmp_path / "a", {"lr": 0.1}, values=[1.0])
    for words in (["--metric", "top1"], ["--metric", "top1", "--plot", tmp_path / "a.svg"]):
        code, rows, text = show(*words)
        assert (code, rows, text) == (2, [], f"{script.NO_RECORDS.format('top1')}\n")
    code, _, text = show("--sort", "colour")
    assert code == 2 and text.startswith('--sort must be a setting or metric that a run has, got "colour". Give')


def test_runs_that_were_killed_or_have_no_record_yet_are_shown(tmp_path, show):
    forge(tmp_path / "killed", {"lr": 0.1}, values=[1.0, 0.5], state="running")
    forge(tmp_path / "new", {"lr": 0.2}, state="starting")
    for name in ("config.json", "metrics.jsonl"):  # missing in a run that has just started
        (tmp_path / "new" / name).unlink()
    code, names, text = show("--metric", "rmse", "--plot", tmp_path / "a.svg")
    assert (code, names) == (0, ["killed", "new"]) and "None" not in text, text


@pytest.mark.parametrize(
    ("boot", "seconds", "is_locked", "state"),
    [
        ("here", 0, True, "running"),
        ("here", 0, False, "killed"),  # it would hold the lock
        ("elsewhere", 0, False, "running"),  # where file locks may not reach
        ("elsewhere", 1000, False, "killed"),
        ("elsewhere", 1000, True, "running"),
        ("here", 1000, True, "running"),  # suspended
        (None, 0, False, "running"),  # without lock.json, as a run fetched from a URL
    ],
)
def test_a_run_without_a_live_owner_was_killed(tmp_path, boot, seconds, is_locked, state):
    folder = tmp_path / "run"
    forge(folder, {}, state="running")
    if boot:
        current_boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        (folder / "lock.json").write_text(json.dumps({"boot": current_boot if boot == "here" else boot}))
        os.utime(folder / "lock.json", (time.time() - seconds,) * 2)
        (folder / ".lock").touch()
    with contextlib.ExitStack() as stack:
        if is_locked:
            code = "import fcntl; f = open('.lock', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
            holder = [sys.executable, "-c", code]
            holder = stack.enter_context(
                subprocess.Popen(holder, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            holder.stdout.readline()
        assert script.RunInfo(folder).status["state"] == state


def test_a_plot_has_its_title_and_names_the_ranks_of_each_resume(tmp_path, show):
    forge(tmp_path / "a", {}, "top1", values=[0.5, 0.75])
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        for step, ranks in ((4, 1), (8, 2)):
            record = {"kind": "event", "event": "resumed", "step": step, "world_size": ranks}
            print("\n" + json.dumps(record), file=file)
    assert show("--plot", tmp_path / "a.svg", "--title", "killed twice")[0] == 0
    texts = [text.text for text in ET.parse(tmp_path / "a.svg").getroot().iter("{http://www.w3.org/2000/svg}text")]
    for words in ("killed twice", "resumed on 1 rank", "resumed on 2 ranks", "optimizer step", "top-1 accuracy"):
        assert words in texts


def test_a_terminal_picture_has_the_command_and_the_first_20_lines():
    lines = [f"line {k} <{'x' * 200 if k == 3 else ''}>" for k in range(30)]
    root = ET.fromstring(draw_terminal("train.py --epochs 1", lines))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["$ train.py --epochs 1", "line 0 <>"] and texts[-1] == "line 19 <>"
    assert len(texts) == 21 and max(map(len, texts)) == COLUMNS and texts[4].endswith("…")


def test_fifteen_runs_have_fifteen_colors(tmp_path, show):
    for k in range(15):
        forge(tmp_path / f"run{k:02d}", {"lr": k}, values=[1.0 / (k + 1), 2.0 / (k + 1)])
    assert show("--plot", tmp_path / "a.svg")[0] == 0
    lines = ET.parse(tmp_path / "a.svg").getroot().findall("{http://www.w3.org/2000/svg}polyline")
    solid, dashed = ([line for line in lines if ("stroke-dasharray" in line.attrib) == has] for has in (False, True))
    assert [line.get("stroke") for line in solid] == [line.get("stroke") for line in dashed]
    assert len({line.get("stroke") for line in solid}) == 15 and len(dashed) == 15


def test_a_file_that_a_live_run_replaces_while_sizes_are_read_is_left_out(tmp_path, monkeypatch):
    forge(tmp_path / "a", {}, values=[1.0])
    before, stat = script.RunInfo(tmp_path / "a").size(), script.os.stat
    (tmp_path / "a" / ".status.json.tmp").write_text("{}")

    def disappears(path, *args, **kwargs):
        if str(path).endswith(".tmp"):
            raise FileNotFoundError(path)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(script.os, "stat", disappears)
    assert before == script.RunInfo(tmp_path / "a").size() > 0


KEYS = (
    "run folder state error epochs steps world_size restarts started ended wall_s samples_per_s best_metric best_value"
)
KEYS += " best_epoch best final test settings git_commit git_dirty"
KEYS += " verified"  # extra: verify
KEYS += " bytes"


def list_of(*words):
    """As a shell sees it: the exit code, what is on standard output, and standard error."""
    command = [sys.executable, Path(script.__file__), *words, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


def damage(folder, name, text):
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("status.json", '{"state": "completed", "epoch": 1, "step": 5}', {"final": {"rmse": 0.5}, "wall_s": 60}),
        ("summary.json", None, {"state": "completed", "best_value": None, "best": {}, "wall_s": None}),
        ("summary.json", '{"state": "comp', {"best_value": None, "final": {}, "steps": 5}),
        ("summary.json", '{"state": "failed", "best_value": 3}', {"best_value": None}),  # of an earlier attempt
        ("summary.json", '{"state": "completed", "best_value": NaN, "final": {"a": Infinity}}', {"best_value": None}),
        ("summary.json", '{"state": "completed", "best": 7, "test": [8], "wall_s": "long"}', {"best": {}, "test": []}),
        ("config.json", None, {"settings": {}}),
        ("config.json", "[1]", {"settings": {}}),
        ("metrics.jsonl", None, {"samples_per_s": None, "best_value": 0.5}),
        ("metrics.jsonl", '\n{"kind": "train", "step": 5, "samples_per_s": 7}\n\x00{"kind"', {"samples_per_s": 7}),
        ("provenance.json", '{"git_commit": "abc", "git_dirty": true, "world_size": 2}', {"git_commit": "abc"}),
        ("provenance.json", '{"git_commit": 3, "world_size": true}', {"git_commit": None, "world_size": None}),
        ("status.json", "", {"state": None, "steps": None, "ended": None}),
    ],
)
def test_the_list_has_all_keys_also_for_a_damaged_run(tmp_path, monkeypatch, capsys, name, text, expected):
    forge(tmp_path / "run", {"lr": 0.1}, values=[0.5])
    forge(tmp_path / "sound", {"lr": 0.2}, values=[0.25], state="running")
    summary = json.loads((tmp_path / "run/summary.json").read_text()) | {"state": "completed"}
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    damage(tmp_path / "run", name, text)
    words = ["--json", "--metric", "rmse", "--plot", str(tmp_path / "a.svg")]
    monkeypatch.setattr("sys.argv", ["runs.py", str(tmp_path), *words])
    code, printed = script.main(), capsys.readouterr()
    run, sound = json.loads(printed.out, parse_constant=pytest.fail)
    assert code == 0 and list(run) == list(sound) == KEYS.split() and printed.err.startswith("The plot was written to ")
    assert {key: run[key] for key in expected} == expected
    assert (sound["state"], sound["settings"], sound["ended"]) == ("running", {"lr": 0.2}, None)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere"], "/nowhere. Give a run folder."),
        (["run", "--metric", "top1"], '--metric must be a metric that a run has recorded, got "top1".'),
        (["run", "--compare"], "--compare needs two runs."),
        (["run", "copy", "--compare"], "holds no checkpoint"),
        (["run", "folder"], "metrics.jsonl cannot be used (Is a directory). Fix that, or leave this path out."),
        (["run", "--colour"], "unrecognized arguments"),
        (["run", "copy", "--diverge"], "--json does not go with --diverge, which prints text only."),  # extra: replay
    ],
)
def test_what_cannot_be_listed_or_compared_exits_with_2_and_prints_nothing(tmp_path, words, reason):
    for name in ("run", "copy", "folder"):
        forge(tmp_path / name, {}, values=[0.5])
    (tmp_path / "folder/metrics.jsonl").unlink()
    (tmp_path / "folder/metrics.jsonl").mkdir()
    code, out, err = list_of(*(word if word.startswith("--") or word == "top1" else tmp_path / word for word in words))
    assert (code, out) == (2, "") and reason in err and "Traceback" not in err


def test_an_error_of_the_script_is_no_difference(tmp_path, show, monkeypatch):
    forge(tmp_path / "a", {}, values=[0.5])
    monkeypatch.setattr(script.RunInfo, "size", lambda _: 1 / 0)
    code, _, text = show("--json")
    assert code == 2 and "ZeroDivisionError" in text
