# extra: verify and template
"""verify.py --json FILE: a result in the file and in the exit code, however it ends (ok and broken: test_verify.py)."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from ranks import ROOT, WarmLaunch, copy_repository, finish, launch, slow, stop, torchrun
from scripts.lib.verify.result import Result, join_parts
from test_verify import FLAGS, INVARIANTS
from training import wait_until

KEYS = "version result exit_code text checks notes task samples ranks precision git_commit git_dirty versions flags"
KEYS = [*KEYS.split(), "not_checked", "started", "seconds"]


FORKS = """
import os, signal
codes = []
for number in range(2):
    if not (child := os.fork()):
        if number:
            os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
raise ValueError(f"in the parent of {codes}")
"""


def read(file):
    report = json.loads(file.read_text())
    assert sorted(report) == sorted(KEYS) and report["version"] == 1
    return report


def earlier(folder):
    """FILE as an earlier run has written it."""
    file = folder / "found.json"
    file.write_text('{"result": "ok", "exit_code": 0}')
    return file


@pytest.mark.parametrize("ranks", [0, slow(2)])
@pytest.mark.parametrize(
    ("name", "text", "flags", "reason"),
    [
        ("", "", "--epochs few", '--epochs must be an integer or "auto", got "few".'),
        ("model.py", "def f(:\n", "", "SyntaxError: invalid syntax (model.py, line"),
        slow("dataset.py", "import nowhere\n", "", "ModuleNotFoundError: No module named 'nowhere'"),
        slow("model.py", "raise SystemExit('no GPU')\n", "", "The program ended before the first check."),
        slow("config.py", "import nowhere\n", "", "ModuleNotFoundError: No module named 'nowhere'"),
        slow("", "", "--dataset csv --data_dir nowhere", "nowhere/train.csv: cannot be read"),  # extra: images
        slow("model.py", FORKS, "", "ValueError: in the parent of [1, 2]"),
        slow("dataset.py", "def create_dataset(*_):\n    return 1 / 0\n", "", "ZeroDivisionError: division by zero"),
    ],
)
def test_why_it_could_not_run_is_in_the_file_and_the_exit_code_is_2(tmp_path, ranks, name, text, flags, reason):
    fork = copy_repository(tmp_path)
    file, own, words = earlier(tmp_path), {"PYTHONPATH": str(fork)}, ["--json", "found.json", *flags.split()]
    if name:
        with (fork / name).open("a") as code:
            code.write(text)
    if ranks:
        ended = torchrun(ranks, *words, script="scripts/verify.py", cwd=fork, env=own)
    else:
        ended = launch([sys.executable, "scripts/verify.py", *words], cwd=fork, env=own)
    report = read(file)
    assert (report["result"], report["exit_code"], report["checks"]) == ("could not run", 2, []), ended.text
    assert reason in report["text"] and ended.code == (1 if ranks else 2), (report, ended.text)
    assert [path.name for path in tmp_path.glob("*.json*")] == ["found.json"]


@pytest.mark.parametrize("ranks", [0, slow(2)])
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--json"], "it is another kind of file"),
        (["--json", "--epochs", "3"], "it is another kind of file"),
        (["--json=model.py"], "it is another kind of file"),
        (["--json", "verified.json"], "it is another kind of file"),
        (["--epochs", "3", "--json", "nowhere/found.json"], "No such file or directory"),
        (["--json=folder.json"], "it is no regular file"),
        (["--json=link.json"], "it is no regular file"),
    ],
)
def test_a_file_that_cannot_be_written_is_rejected_at_once_in_one_sentence(tmp_path, ranks, given, reason):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to("model.py")
    kept = {name: (tmp_path / name).write_text("kept") for name in ("model.py", "verified.json")}
    script = ROOT / "scripts/verify.py"
    if ranks:
        ended = torchrun(ranks, *given, script=script, cwd=tmp_path)
    else:
        ended = launch([sys.executable, script, *given], cwd=tmp_path)
    sentence = (
        rf"--json.* cannot be written \({reason}\)\. Give the name of a \.json file in an existing folder, .*\.json\.\n"
    )
    assert len(re.findall(f"^{sentence}", ended.err, re.MULTILINE)) == 1 and ended.code == (1 if ranks else 2), (
        ended.text
    )
    assert ranks or (ended.out, len(ended.err.splitlines())) == ("", 1), ended.text
    assert all((tmp_path / name).read_text() == "kept" for name in kept)


@pytest.mark.parametrize("ranks", [slow(0), slow(2)])
@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGTERM, "Starting on"),  # while torch is imported
        (signal.SIGTERM, "Verifying"),
        (signal.SIGTERM, "schedule "),  # in or before a short run, which catches the signal
        (signal.SIGINT, "schedule "),
        (signal.SIGKILL, "schedule "),  # of the last rank
    ],
)
def test_an_interruption_is_in_the_file_with_the_checks_so_far(tmp_path, ranks, number, when):
    fork = copy_repository(tmp_path)
    file = earlier(tmp_path)
    program = WarmLaunch(
        ranks, ROOT / "tests/builtin/forks.py", [fork, "scripts/verify.py", "--json=found.json", *FLAGS]
    )
    try:
        wait_until(lambda: when in Path(program.files[0].name).read_text())
        is_killed = number == signal.SIGKILL
        ranks_of_agent = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        os.kill(int(ranks_of_agent[-1]) if is_killed and ranks else program.pid, number)
        ended = finish(program, 60)
    finally:
        stop(program)
    if is_killed and not ranks:
        assert not file.exists()
        return
    report = read(file)
    assert (report["result"], report["exit_code"], ended.code) == ("could not run", 2, 1 if ranks else 2), ended.text
    checked = [check["name"] for check in report["checks"]]
    assert report["text"] and checked == INVARIANTS[: len(checked)] and (len(checked) >= 5) == (when == "schedule ")


@pytest.mark.parametrize(
    ("text", "notes", "not_checked"),
    [
        ("All 3 samples.", [], []),
        ("All. Please check: A, so b. Do c.", ["A, so b. Do c."], []),
        ("All. Not checked: a.", [], ["a."]),
        ("Not checked: a. Not checked: b (c. D).", [], ["a.", "b (c. D)."]),
        ("All. Please check: A. Do b. Not checked: c. Please check: D.", ["A. Do b.", "D."], ["c."]),
    ],
)
def test_notes_and_parts_that_were_not_checked_are_lists(text, notes, not_checked):
    result = Result()
    for outcome in ("ok", "BROKEN", "skipped"):
        result.add_check("loss", outcome, text, 0.1)
    passed, *others = result.values["checks"]
    assert (passed["text"], passed["notes"], passed["not_checked"]) == (text, notes, not_checked)
    assert all((check["notes"], check["not_checked"]) == ([], []) for check in others)
    assert result.values["not_checked"] == len(not_checked)


def test_notes_come_after_other_parts_of_a_text():
    parts = "Please check: A.", "B.", "", "Not checked: c.", "D. Please check: E."
    assert join_parts(*parts) == "B. D. Please check: A. Not checked: c. Please check: E."


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("A is 0.5 for b (x.y; z). It does not add up. Let a.py return sums, or 1.5.", "Let a.py return sums, or 1.5."),
        ("A fails. Set b. (rank 1 on host)", "Set b. (rank 1 on host)"),
        ("--epochs must be at least 1, got 0.", None),
    ],
)
def test_the_fix_of_a_finding_is_its_last_sentence(text, fix):
    result = Result()
    for outcome in ("ok", "BROKEN", "skipped"):
        result.add_check("loss", outcome, text, 0.1)
    assert [check["fix"] for check in result.values["checks"]] == [None, fix, fix]


def test_the_first_result_stays(tmp_path, monkeypatch):
    """Of several ranks, the one that knows the cause ends first."""
    monkeypatch.chdir(tmp_path)
    earlier(tmp_path)
    for name in ("signal.signal", "atexit.register"):
        monkeypatch.setattr(name, lambda *_: None)
    results = [Result() for _ in range(3)]
    for rank, result in enumerate(results):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(sys, "argv", ["verify.py", "--epochs", "3", "--json", "found.json", "--lr=1"])
        assert result.take_json_flag() == "" and sys.argv == ["verify.py", "--epochs", "3", "--lr=1"]
        assert not (tmp_path / "found.json").exists()
    results[0].finish("ok", "not written", is_written=False)
    for rank, reason in ((2, "the cause"), (1, "lost its peers"), (2, "again"), (0, "again")):
        results[rank].finish("could not run", reason)
    assert read(tmp_path / "found.json")["text"] == "the cause" and results[0].exit_code == 0
