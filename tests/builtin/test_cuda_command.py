# extra: benchmark and template
"""scripts/test.sh --cuda: a drill of steps that fail, and every step on the CPU in tiny sizes."""

import json
import re
import sys
from unittest import mock

import pytest
import torch

from comparison import gpu
from ranks import ROOT, finish, launch, start
from training import wait_until

# what each step of the drill runs after `python`; a sleeping step notes figures, starts a process of another session,
# prints, and does not end
SLEEPS = """
import json, os, subprocess, sys
with open(os.environ["CUDA_STEP_FOLDER"] + "/found.json", "w") as file:
    json.dump({"finished": 7}, file)
orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("orphan", orphan.pid, flush=True)
if sys.argv[1] == "hangs":
    __import__("time").sleep(600)
"""
FAILS = """
import sys
print("the message")
print("\\n".join(["a warning"] * 60), file=sys.stderr)
print("x" * 5_000_000)
sys.exit(3)
"""
TESTS = """
import pytest, time
def test_that_passes(): pass
def test_that_hangs(): time.sleep(600)
"""
DRILL = """
import sys
sys.path[:0] = ["tests/comparison", "tests"]
from pathlib import Path
from comparison import gpu
gpu.SECONDS_TO_DUMP = 2.0
plan = {
    "hangs": gpu.Step(6, ["-c", sys.argv[2], "hangs"]),
    "tests": gpu.Step(8, ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", "/dev/null", sys.argv[4]]),
    "fails": gpu.Step(30, ["-c", sys.argv[3]]),
    "orphan": gpu.Step(30, ["-c", sys.argv[2], "ends"]),
    "last": gpu.Step(30, ["-c", "print('all is well')"]),
}
sys.exit(gpu.run("drill", plan, Path(sys.argv[1]), "data"))
"""


def test_a_drill_of_steps_that_fail_hang_and_leave_processes_behind(tmp_path):
    (tmp_path / "test_slow.py").write_text(TESTS)
    out = tmp_path / "report"
    ended = launch([sys.executable, "-c", DRILL, out, SLEEPS, FAILS, tmp_path / "test_slow.py"], cwd=ROOT)
    steps = json.loads((out / "drill.json").read_text())
    expected = {"hangs": "FAILED", "tests": "FAILED", "fails": "FAILED", "orphan": "ok", "last": "ok"}
    assert {name: step["outcome"] for name, step in steps.items()} == expected, ended.text
    assert ended.code == 1 and ended.left == 0
    assert steps["hangs"]["finished"] == steps["orphan"]["finished"] == 7 and steps["last"]["text"] == "all is well"
    assert list(steps["tests"]["tests"].values()) == ["PASSED"]
    assert all(re.search(rf"\n{name} +{outcome} ", ended.out) for name, outcome in expected.items())
    printed, errors = ((out / f"drill.{kind}").read_text() for kind in ("out", "err"))
    assert len(printed) < 1_600_000 and "the message" in printed
    assert re.findall(r"^==== (\w+) ====$", printed, re.MULTILINE) == list(expected)
    assert errors.count("Current thread") >= 2 and "a warning" in errors  # the stacks of the two that hang
    assert "---- fails: the end of stdout" in ended.out and "---- fails: the end of stderr\na warning" in ended.out
    assert sorted(file.name for file in out.iterdir()) == ["drill.err", "drill.json", "drill.out"]


def test_the_command_ends_with_all_that_it_has_started(tmp_path):
    program = start([sys.executable, "-c", DRILL, tmp_path, SLEEPS, FAILS, "none"], cwd=ROOT)
    wait_until(lambda: (tmp_path / "drill.out").exists() and "orphan" in (tmp_path / "drill.out").read_text())
    program.terminate()
    ended = finish(program)
    assert (ended.code, ended.left) == (143, 0), ended.text


@pytest.mark.parametrize(("last", "code"), [("ok", 0), ("skipped", 3), ("FAILED", 1)])
def test_a_step_may_use_what_others_left_and_a_skipped_one_is_no_success(tmp_path, monkeypatch, last, code):
    """The first step ends at once, the others use all of their time, so that the last one has no turn."""
    limits, now = {}, [0.0]

    def run_step(name, command, limit, log, data_dir):
        limits[name] = limit
        now[0] += limit if name != "a" else 1
        return last if name == "c" else "ok", "", {}

    monkeypatch.setattr(gpu, "run_step", run_step)
    monkeypatch.setattr(gpu, "time", mock.Mock(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu, "ctypes", mock.Mock())
    monkeypatch.setattr(gpu, "resource", mock.Mock())
    monkeypatch.setattr(gpu, "signal", mock.Mock())
    monkeypatch.setitem(gpu.TOTAL, "these", 100.0)
    plan = {name: gpu.Step(limit, []) for name, limit in (("a", 40), ("b", 30), ("c", 30))}
    assert gpu.run("these", plan, tmp_path, "") == code
    assert limits == {"a": 40, "b": 69, "c": 30}
    assert gpu.run("these", plan | {"d": gpu.Step(30, [])}, tmp_path, "") in (1, 3)
    assert "d" not in limits and json.loads((tmp_path / "these.json").read_text())["d"]["outcome"] == "skipped"


def test_both_calls_fit_their_time():
    assert sum(step.limit for step in gpu.FIRST.values()) == gpu.TOTAL["first"] == 200
    assert sum(step.limit for step in gpu.FULL.values()) == gpu.TOTAL["full"] == 300


@pytest.mark.slow
def test_every_step_runs_and_its_figures_are_written(tmp_path):
    for what, skipped in (("first", {"tests"}), ("full", {"compiled"})):
        words = ["scripts/test.sh", "--cuda", what, "--out", tmp_path, "--data_dir", tmp_path / "none"]
        ended = launch(words, env={"CUDA_TEST_ON_CPU": "1"}, cwd=ROOT, deadline=310)
        steps = json.loads((tmp_path / f"{what}.json").read_text())
        skipped = set() if torch.cuda.is_available() else skipped  # the tests of CUDA
        assert {name for name, step in steps.items() if step["outcome"] != "ok"} == skipped, ended.text
        assert ended.code == (3 if skipped else 0), ended.text
    assert steps["checkpoint"]["bytes"] > 4e7 and "8" in steps["loops"]["batches"]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) <= 8 and all(file.stat().st_size < 16 * 2**20 for file in files)
