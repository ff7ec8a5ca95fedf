"""Programs beside training: what they see of a run, how they are kept alive, and that nothing of them is left."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from plans import CTX, plan_for, save

from config import TrainingConfig
from ranks import ROOT, is_gone
from scripts.companions import follow, on_checkpoint, trackers
from scripts.companions.follow import Companion, OtherOwnerError, RecordReader
from scripts.companions.mirror import MirrorUploader
from scripts.companions.on_checkpoint import CheckpointCommand
from scripts.companions.track import TrackCompanion
from training import wait_until
from utils.checkpoint import format as checkpoint
from utils.extras.companions import programs
from utils.extras.companions import sidecar as companions_module
from utils.extras.companions.sidecar import Companions
from utils.files import read_json, replace_json
from utils.settings.errors import TrainingError


@pytest.fixture
def plan(tmp_path):
    """Of a run that trains, as the first attempt."""
    return plan_for(tmp_path)


def text_of(numbers):
    return "".join(f'{{"n": {n}}}\n' for n in numbers)


@pytest.mark.guarantee("companion")
@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (["", text_of([1]), text_of([1, 2])], [1, 2]),
        ([text_of([1]) + '{"n"', text_of([1, 2])], [1, 2]),  # a line that is being written
        ([text_of([1, 2, 3]), text_of([1])], [1, 2, 3, 1]),  # a resume has cut it
        ([text_of([1, 2, 3]), text_of([1, 7, 8, 9])], [1, 2, 3, 1, 7, 8, 9]),  # and has already written more
        ([text_of([1]) + "damaged\n", text_of([1]) + "damaged\n" + text_of([2])], [1, 2]),
        ([None, text_of([1])], [1]),
    ],
)
def test_each_record_of_a_growing_file_is_read_and_a_file_that_a_resume_has_cut_is_read_from_its_start(
    tmp_path, contents, expected
):
    lines, numbers = RecordReader(tmp_path / "metrics.jsonl"), []
    for content in contents:
        if content is not None:
            (tmp_path / "metrics.jsonl").write_text(content)
        numbers += [record["n"] for record in lines.read_new()]
    assert numbers == expected


@pytest.mark.guarantee("companion")
@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_checkpoint_in_work_outlives_its_deletion(plan, monkeypatch, has_links, is_folder):
    path = save(plan, 10)
    if is_folder:
        path.with_suffix("").mkdir()
        path = path.rename(path.with_suffix("") / "part_00000.pt").parent
        replace_json(path / "manifest.json", {"step": 10, "files": {"part_00000.pt": "0"}})
    if not has_links:
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    before = {file.name: file.read_bytes() for file in path.rglob("*")} if is_folder else path.read_bytes()
    companion = Companion(plan)
    with companion.temporary_copy(path) as copy:
        checkpoint.remove_checkpoint(path)
        assert not checkpoint.list_step_checkpoints(companion.checkpoints)
        after = {file.name: file.read_bytes() for file in copy.rglob("*")} if is_folder else copy.read_bytes()
        assert after == before
        (temporary,) = companion.checkpoints.iterdir()
        assert temporary.name.endswith(".tmp")  # which the next start deletes, should this program be killed
    assert not list(companion.checkpoints.iterdir())
    with pytest.raises(FileNotFoundError), companion.temporary_copy(path):  # deleted first: the next one is taken
        pass


def test_without_links_no_copy_is_made_onto_a_full_disk(plan, monkeypatch):
    path, companion = save(plan, 10), Companion(plan)
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    monkeypatch.setattr(follow.shutil, "disk_usage", lambda path: SimpleNamespace(free=path.stat().st_size))
    with pytest.raises(OSError, match="not supported"), companion.temporary_copy(path):
        pass
    assert list(companion.checkpoints.iterdir()) == [path]


@pytest.mark.guarantee("companion")
@pytest.mark.parametrize(
    ("lock", "expected"),
    [
        ({"token": "t", "has_trained": True}, ""),
        ({"token": "t", "has_trained": True, "ended": ""}, ""),
        ({"token": "t", "has_trained": True, "ended": "completed"}, "completed"),
        ({"token": "of another attempt", "has_trained": True, "ended": "completed"}, ""),
        ({}, ""),
    ],
)
def test_an_end_counts_only_with_the_token_of_this_attempt(plan, lock, expected):
    """status.json is that of the attempt before until this one writes, and after a SIGKILL."""
    companion = Companion(plan)
    replace_json(companion.folder / "status.json", {"state": "completed"})
    replace_json(companion.folder / "lock.json", lock)
    assert companion.read_final_state() == expected


@pytest.mark.guarantee("companion")
def test_a_companion_waits_until_the_folder_is_at_the_step_of_its_attempt(plan):
    companion = Companion(plan)
    replace_json(companion.folder / "lock.json", {"token": "t"})
    assert not companion.has_training_begun()
    replace_json(companion.folder / "lock.json", {"token": "t", "has_trained": True})
    assert companion.has_training_begun()
    replace_json(companion.folder / "lock.json", {"token": "other", "has_trained": True})
    with pytest.raises(OtherOwnerError):
        companion.has_training_begun()


# ---- how they are kept alive ----


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A function that replaces the program of `--on_checkpoint`, and starts it. The code finds its plan in `plan`."""
    started = []
    monkeypatch.setattr(programs, "COMPANIONS_FOLDER", tmp_path)
    monkeypatch.setattr(companions_module, "SECONDS_TO_STOP", 0.5)

    def begin(code, **flags):
        head = "import json, os, signal, subprocess, sys, time\nplan = json.load(sys.stdin)\n"
        head += "log = open(plan['folder'] + '/log', 'a')\nprint(os.getpid(), time.time(), file=log, flush=True)\n"
        (tmp_path / "on_checkpoint.py").write_text(head + code)
        plan = plan_for(tmp_path, on_checkpoint="true", **flags)
        started.append(Companions(TrainingConfig(run_dir=str(tmp_path / "run"), on_checkpoint="true"), plan, CTX))
        return started[-1]

    begin.log = tmp_path / "run/log"
    begin.starts = lambda: [line.split() for line in begin.log.read_text().splitlines()] if begin.log.exists() else []
    yield begin
    for companions in started:
        companions.stop()


@pytest.mark.guarantee("companion")
def test_one_that_dies_is_started_again_with_growing_pauses_and_only_exit_code_76_ends_the_run(fake, caplog):
    companions = fake(
        "deaths = sum(1 for line in open(plan['folder'] + '/log'))\n"
        "if deaths < 3: os.kill(os.getpid(), signal.SIGKILL) if deaths == 1 else sys.exit(1)\n"
        "sys.exit(76)\n"
    )
    wait_until(lambda: len(fake.starts()) == 3)
    times = [float(at) for _, at in fake.starts()]
    assert 1 <= times[1] - times[0] < times[2] - times[1]
    title = "The program of --on_checkpoint true"
    assert f"{title} ended with exit code -9. It is started again in 1 s." in caplog.text
    assert f"{title} ended with exit code 1. It is started again in 2 s." in caplog.text

    def has_lost():
        try:
            companions.poll()
        except TrainingError as error:
            return str(error)

    problem = "Another job has taken over this run, as --on_checkpoint true shows. End this job."
    assert wait_until(has_lost) == problem


@pytest.mark.guarantee("companion")
def test_one_that_is_killed_leaves_no_process_that_it_has_started(fake):
    fake(
        "child = subprocess.Popen(['sleep', '600'], process_group=0)\n"
        "open(plan['folder'] + '/child', 'a').write(f'{child.pid}\\n')\ntime.sleep(600)\n"
    )
    file = fake.log.with_name("child")
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    child = int(file.read_text())
    os.kill(int(fake.starts()[0][0]), signal.SIGKILL)
    wait_until(lambda: is_gone(child), 10)
    wait_until(lambda: len(fake.starts()) == 2)


@pytest.mark.guarantee("companion")
def test_a_new_attempt_ends_the_companion_of_the_attempt_before(fake):
    first = fake("signal.pause()\n")
    wait_until(fake.starts)
    first._is_closed.set()  # as if its rank were gone, and the program stopped
    os.kill(int(fake.starts()[0][0]), signal.SIGSTOP)
    fake("signal.pause()\n")
    wait_until(lambda: is_gone(int(fake.starts()[0][0])), 10)
    wait_until(lambda: len(fake.starts()) == 2)


def test_after_a_failure_one_that_does_not_answer_is_killed(fake):
    companions = fake(
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\nprint('ready', file=log, flush=True)\nsignal.pause()\n"
    )
    wait_until(lambda: len(fake.starts()) == 2)
    began = time.monotonic()
    companions.stop()
    assert time.monotonic() - began < 5 and is_gone(int(fake.starts()[0][0]))


def test_the_end_waits_for_them_and_ticks(fake):
    companions, ticks = fake("time.sleep(1)\nprint('done', 0, file=log)\n"), []
    companions.finish(lambda: ticks.append(time.monotonic()))
    assert len(fake.starts()) == 2 and len(ticks) > 3 and companions._list_alive() == []


def test_a_program_that_sends_over_a_network_is_waited_for_a_limited_time(fake, tmp_path, caplog):
    (tmp_path / "mirror.py").write_text("import signal\nsignal.pause()\n")
    config = TrainingConfig(run_dir=str(tmp_path / "run"), mirror="file:///tmp/no")
    companions = Companions(config, plan_for(tmp_path, mirror="file:///tmp/no"), CTX)
    companions._max_silence_s = 0.5
    companions.finish(lambda: None)
    text = "The program of --mirror file:///tmp/no lacks the latest checkpoint or records after"
    assert text in caplog.text and companions._list_alive() == []


@pytest.mark.parametrize("name", ["mirror", "on_checkpoint", "track"])
def test_companions_import_no_torch(name):
    code = f"import sys, scripts.companions.{name}\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_the_end_of_the_run_is_a_new_try_whatever_the_pause(plan, monkeypatch):
    """The rank waits for it."""
    for name in ("stop_with_rank", "setup_logger"):
        monkeypatch.setattr(follow, name, lambda *_: None)

    class Failing(Companion):
        seconds_per_poll, tries = 20.0, 0

        def look(self, state):
            self.tries += 1
            if not state:
                raise OSError(101, "Network is unreachable")
            return True

    companion = Failing(plan)
    program = threading.Thread(target=follow.follow_run, args=(companion,), daemon=True)
    program.start()
    wait_until(lambda: companion.tries)
    replace_json(companion.folder / "lock.json", {"token": "t", "has_trained": True, "ended": "completed"})
    program.join(5)
    assert not program.is_alive() and companion.tries == 2


@pytest.mark.parametrize("name", ["mirror", "on_checkpoint", "fetch"])
def test_a_companion_that_is_started_by_hand_names_its_page(name):
    ours, terminal = pty.openpty()
    words = [sys.executable, ROOT / f"scripts/companions/{name}.py"]
    ended = subprocess.run(words, stdin=terminal, capture_output=True, text=True, timeout=60)
    os.close(ours)
    os.close(terminal)
    text = "Do not start this program by hand: train.py starts it (docs/companions.md).\n"
    assert ended.returncode == 2 and ended.stderr == text


STARTS_PROGRAM = """
import json, sys, time
from utils.extras.companions.programs import start_program
print(start_program("on_checkpoint", json.loads(sys.argv[1])).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.guarantee("companion")
def test_a_companion_is_gone_soon_after_its_rank_with_what_it_has_started(tmp_path):
    """The rank is killed. The command ignores SIGTERM."""
    plan = plan_for(tmp_path, on_checkpoint=f"sh -c 'trap : TERM; echo $$ > {tmp_path}/pid; sleep 600; sleep 600'")
    save(plan, 10)
    rank = subprocess.Popen(
        [sys.executable, "-c", STARTS_PROGRAM, json.dumps(plan)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    companion = int(rank.stdout.readline())
    command = int(wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):  # which are for training
        os.kill(companion, number)
    time.sleep(0.7)
    assert not is_gone(companion)
    rank.kill()
    rank.wait()
    wait_until(lambda: is_gone(companion) and is_gone(command), 10)


# ---- the command after a checkpoint ----


def finish(companion, state=""):
    """Look until the command has ended."""
    wait_until(lambda: time.sleep(0.05) or companion.look(state))


COMPANIONS = [CheckpointCommand, MirrorUploader, TrackCompanion]


@pytest.mark.parametrize("subclass", [*COMPANIONS, *trackers.TRACKERS.values()])
def test_what_a_companion_or_tracker_sets_its_base_class_reads(subclass):
    base = Companion if subclass in COMPANIONS else trackers.Tracker
    settings = [name for name, value in vars(subclass).items() if not name.startswith("_") and not callable(value)]
    assert settings
    assert [name for name in settings if not hasattr(base, name)] == []


@pytest.mark.guarantee("command")
def test_the_command_gets_the_latest_checkpoint_and_its_failure_is_a_warning(tmp_path, caplog):
    out, may_end = tmp_path / "out", tmp_path / "may_end"
    plan = plan_for(tmp_path, on_checkpoint=f"sh -c 'while ! [ -e {may_end} ]; do sleep 0.02; done; echo $0 >> {out}'")
    companion, paths = CheckpointCommand(plan), []
    for step in (1, 2, 3):
        paths.append(save(plan, step))
        assert not companion.look("")
    may_end.touch()
    finish(companion)
    assert out.read_text() == f"{paths[0]}\n{paths[2]}\n"  # 2 and 3 arrived while the first command ran; 3 is later
    commands = {
        "false": "ended with exit code 1. The checkpoint is valid.",
        "no-such-program": "cannot be run (No such file or directory). The checkpoint is valid.",
        f"cp {{}} {out}": None,
    }
    for command, problem in commands.items():
        caplog.clear()
        plan = plan_for(tmp_path / "a b", on_checkpoint=command)  # no shell: the space is part of the name
        Path(plan["folder"], ".on_checkpoint.json").unlink(missing_ok=True)
        path = save(plan, 4)
        finish(CheckpointCommand(plan))
        assert caplog.messages == ([f"The command of --on_checkpoint ({command}) {problem}"] if problem else [])
    assert out.read_bytes() == path.read_bytes()


@pytest.mark.guarantee("command")
def test_the_command_runs_once_per_checkpoint_whichever_process_and_attempt_looks(tmp_path):
    out = tmp_path / "out"
    plan = plan_for(tmp_path, on_checkpoint=f"sh -c 'echo $0 >> {out}'")
    first = save(plan, 10)
    finish(CheckpointCommand(plan))
    finish(CheckpointCommand(plan))  # the program was killed after the command
    assert out.read_text() == f"{first}\n"
    plan |= {"resume_from": str(first), "token": "of the next attempt"}
    replace_json(Path(plan["folder"], "lock.json"), {"token": plan["token"], "has_trained": True})
    finish(CheckpointCommand(plan))
    assert out.read_text() == f"{first}\n"
    Path(plan["folder"], ".on_checkpoint.json").unlink()
    finish(CheckpointCommand(plan))  # a run that was resumed with a command for the first time
    assert out.read_text() == f"{first}\n"
    second = save(plan, 20)
    finish(CheckpointCommand(plan))
    assert out.read_text() == f"{first}\n{second}\n"


@pytest.mark.guarantee("command")
def test_a_command_that_hangs_is_reported_and_ended_with_its_children_when_the_run_is_over(
    tmp_path, monkeypatch, caplog
):
    out, command = tmp_path / "out", tmp_path / "command"
    command.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep 600 &\necho $1 $! >> {out}\nwait\nwait\n")
    command.chmod(0o755)
    monkeypatch.setattr(on_checkpoint, "SECONDS_UNTIL_WARNING", 0.1)
    monkeypatch.setattr(on_checkpoint, "SECONDS_TO_TERMINATE", 0.1)
    plan = plan_for(tmp_path, on_checkpoint=str(command))
    companion, paths = CheckpointCommand(plan), []
    for step in (1, 2):
        paths.append(save(plan, step))
        companion.look("")
    wait_until(lambda: companion.look("") or caplog.messages)
    title = "The command of --on_checkpoint"
    assert caplog.messages == [f"{title} has been running for 0 min. Later checkpoints wait until it ends."]
    assert not companion.look("preempted") and len(caplog.messages) == 1  # it still has minutes
    for path in paths:  # that of the latest checkpoint gets its time, too
        wait_until(out.exists)
        wait_until(lambda: out.read_text().endswith("\n"))
        name, child = out.read_text().split()
        out.unlink()
        with monkeypatch.context() as over:
            over.setattr(on_checkpoint, "SECONDS_TO_FINISH", 0.0)
            over.setattr(companion, "_run_command", lambda path: None)
            companion.look("completed")
        message = f"was ended after 0 min, since the run is over. Run the command again for {path}."
        assert caplog.messages[-1] == f"{title} {message}"
        wait_until(lambda pid=int(child): is_gone(pid))
        assert name == str(path)
        companion.look("")
    assert read_json(companion.folder / ".on_checkpoint.json")["step"] == 2


@pytest.mark.guarantee("companion")
def test_the_companion_in_the_docs_logs_each_evaluation_once(plan, monkeypatch):
    page = (ROOT / "docs/companions.md").read_text()
    code = re.search(r"^```python\n(# scripts/companions/notify\.py.*?)^sys\.exit", page, re.DOTALL | re.MULTILINE)[1]
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(code, names := {"__file__": str(ROOT / "scripts/companions/notify.py")})
    plan["config"]["notify"] = "me"
    companion = names["Notify"](plan)
    companion.log = mock.Mock()
    records = [{"kind": "train", "loss": 2.0}, {"kind": "eval", "loss": 0.5}]
    (companion.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert companion.look("") and companion.look("completed")
    companion.log.info.assert_called_once_with("For %s: loss %.3f", "me", 0.5)
