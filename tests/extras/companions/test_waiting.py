"""A run ends whatever hangs beside it: a program without a sign of life is ended, one that works keeps its time."""

import logging
import os
import signal
import threading
from pathlib import Path

import pytest
from plans import CTX, plan_for, save

from config import TrainingConfig
from ranks import ROOT, is_gone, run_ranks, slow
from tasks import BUCKETS
from training import train_flags, wait_until
from utils.extras.companions import programs, sidecar
from utils.extras.companions.sidecar import Companions
from utils.files import replace_json

SETTINGS = {"on_checkpoint": "true", "mirror": "", "track": "wandb"}
FOLLOWED = {"on_checkpoint": "CheckpointCommand", "mirror": "MirrorUploader", "track": "TrackCompanion"}
# a program whose code is replaced before it follows the run; `marks` is a folder of the test
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
marks = Path({marks!r})
def mark(name):
    (marks / name).write_text(str(os.getpid()))
{before}
sys.path[:0] = [{root!r}]
from scripts.companions import follow, {name} as it
Followed = it.{followed}
{hang}
companion = Followed(follow.read_plan())
mark("begun")
sys.exit(follow.follow_run(companion))
"""
IN_LOOK = "def look(self, state):\n    mark('hangs')\n    {}\nFollowed.look = look"
HANGS = {
    "before its start": ("mark('begun'); mark('hangs')\ntime.sleep(600)", ""),
    "stopped": ("", IN_LOOK.format("os.kill(os.getpid(), signal.SIGSTOP)")),
    "system call": ("", IN_LOOK.format("os.mkfifo(marks / 'fifo'); open(marks / 'fifo').read()")),
    "library": ("", IN_LOOK.format("\n    while True: time.sleep(0.01)")),
    "signals ignored": (
        "",
        IN_LOOK.format("[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGUSR2, signal.SIGTERM)]; time.sleep(600)"),
    ),
    "its exit": (
        "",
        "import atexit\natexit.register(time.sleep, 600)\nFollowed.look = lambda *_: mark('hangs') or True",
    ),
    "dies again and again": ("", IN_LOOK.format("os._exit(1)")),
}
CASES = []
for program in FOLLOWED:
    for hang in HANGS:
        for state in ("completed", "preempted", "failed"):
            is_quick = hang == "stopped" if state != "completed" or program != "on_checkpoint" else True
            CASES.append((program, hang, state) if is_quick else slow(program, hang, state))


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """A function that starts a companion with this code in a run that trains, and returns its Companions."""
    monkeypatch.setattr(programs, "COMPANIONS_FOLDER", tmp_path)
    monkeypatch.setattr(sidecar, "SECONDS_TO_STOP", 0.5)
    monkeypatch.setattr(sidecar, "SECONDS_BEFORE_NOTICE", 0.2)
    started = []

    def start(name, hang, before="", **flags):
        write_program(tmp_path, name, hang, before)
        config = {name: SETTINGS[name] or f"file://{tmp_path}/bucket/a"} | flags
        plan = plan_for(tmp_path, **config) | {"decision": {"generation": 1, "run": "r"}}
        replace_json(Path(plan["folder"], "metrics.jsonl"), {})
        save(plan, 10)
        started.append(Companions(TrainingConfig(**plan["config"]), plan, CTX))
        return started[-1]

    yield start
    for companions in started:
        companions.stop()


def write_program(folder, name, hang, before=""):
    values = {"marks": str(folder), "root": str(ROOT), "name": name, "followed": FOLLOWED[name]}
    (folder / f"{name}.py").write_text(PROGRAM.format(hang=hang, before=before, **values))


def end_run(companions, tmp_path, state, seconds, deadline=8):
    """End the run as a rank does. Its end must not take longer than the deadline."""
    if state == "failed":
        ending = threading.Thread(target=companions.stop, daemon=True)
    else:
        replace_json(tmp_path / "run/lock.json", {"token": "t", "has_trained": True, "ended": state})
        companions._max_silence_s = seconds or sidecar.SECONDS_WITHOUT_HEARTBEAT
        ending = threading.Thread(target=companions.finish, args=(lambda: None,), daemon=True)
    ending.start()
    ending.join(deadline)
    assert not ending.is_alive()


@pytest.mark.guarantee("companion")
@pytest.mark.parametrize(("name", "hang", "end"), CASES)
def test_a_run_ends_whichever_program_hangs(tmp_path, begin, caplog, name, hang, end):
    before, code = HANGS[hang]
    companions = begin(name, code, before)
    wait_until((tmp_path / "begun").exists)
    if hang != "its exit":
        wait_until((tmp_path / "hangs").exists)
    caplog.set_level(logging.INFO)
    end_run(companions, tmp_path, end, 1)
    wait_until(lambda: is_gone(int((tmp_path / "begun").read_text())), 5)
    if end == "failed":
        return
    assert f"waits for --{name}. A program that gives no sign of life for 1 s is ended." in caplog.text
    message = f"records after 1 s and is ended. The run folder {tmp_path}/run has them."
    assert f"--{name} " in caplog.messages[-1] and message in caplog.messages[-1]


@pytest.mark.guarantee("command")
@pytest.mark.parametrize("state", ["completed", slow("preempted")])
def test_a_command_that_runs_keeps_its_time(tmp_path, begin, caplog, state):
    companions = begin("on_checkpoint", "", on_checkpoint=f"sh -c 'sleep 6; touch {tmp_path}/done'")
    wait_until((tmp_path / "begun").exists)
    end_run(companions, tmp_path, state, 4, deadline=30)
    assert (tmp_path / "done").exists() and "sign of life and is ended" not in caplog.text


@pytest.mark.guarantee("command")
def test_the_command_of_a_program_that_is_ended_ends_with_it(tmp_path, begin):
    companions = begin("on_checkpoint", "", on_checkpoint=f"sh -c 'echo $$ > {tmp_path}/command; sleep 600; true'")
    command = int(wait_until(lambda: (tmp_path / "command").exists() and (tmp_path / "command").read_text()))
    os.kill(int((tmp_path / "begun").read_text()), signal.SIGSTOP)
    end_run(companions, tmp_path, "completed", 1)
    wait_until(lambda: is_gone(command), 5)


UPLOAD = """
def put(self, path, name, on_progress):
    for block in range({blocks}):
        time.sleep(0.2)
        {on_progress}
    mark("uploaded")
it.Mirror.upload = put
it.Mirror.write_heartbeat = lambda self: None
it.SECONDS_BETWEEN_HEARTBEATS = {beats}
def look(self, state):
    if state:
        self._heartbeat_thread.start()
        self._upload_files(marks / "mirror.py", {{"mirror.py": "a"}}, "a")
    return bool(state)
Followed.look = look
"""


@pytest.mark.guarantee("companion")
@pytest.mark.parametrize(
    ("hang_timeout", "blocks", "on_progress", "beats", "is_done"),
    [
        (4.0, 8, "pass", 600, True),  # silent storage: the time of the mirror is hang_timeout
        (1.0, 600, "on_progress(block)", 0.1, False),  # and that is all of its time
        slow(0.0, 40, "on_progress(block)", 600, True),  # 0: progress
        (0.0, 40, "pass", 0.1, True),  # 0: a storage that tells none, but answers
        (0.0, 600, "pass", 600, False),
    ],
)
def test_a_mirror_that_uploads_keeps_its_time(
    tmp_path, begin, monkeypatch, hang_timeout, blocks, on_progress, beats, is_done
):
    monkeypatch.setattr(sidecar, "SECONDS_WITHOUT_HEARTBEAT", 4)
    code = UPLOAD.format(blocks=blocks, on_progress=on_progress, beats=beats)
    companions = begin("mirror", code, hang_timeout=hang_timeout)
    wait_until((tmp_path / "begun").exists)
    end_run(companions, tmp_path, "completed", hang_timeout, deadline=30)
    assert (tmp_path / "uploaded").exists() == is_done


def train_beside(folder, words):
    programs.COMPANIONS_FOLDER = folder
    return train_flags(words)


@pytest.mark.guarantee("companion")
@pytest.mark.parametrize(
    ("flags", "state"),
    [slow(("--epochs", 1), "completed"), slow(("--epochs", 1000, "--max_time", 0.02), "preempted")],
)
def test_training_beside_a_program_that_hangs_ends(runs, flags, state):
    write_program(runs.root, "on_checkpoint", IN_LOOK.format("os.kill(os.getpid(), signal.SIGSTOP)"))
    words = runs.words("run", *BUCKETS, "--on_checkpoint", "true", "--hang_timeout", 5, *flags)
    outcomes = run_ranks(2, train_beside, runs.root, words)
    assert [outcome["state"] for outcome in outcomes] == [state, state]
    message = "--on_checkpoint true lacks the latest checkpoint or records after 5 s and is ended."
    assert f"{message} The run folder {runs.folder('run')} has them." in runs.log("run")


@pytest.mark.guarantee("companion")
@pytest.mark.parametrize("name", ["on_checkpoint", slow("mirror"), slow("track")])
def test_a_program_that_is_started_again_for_ever_gets_no_more_time(tmp_path, begin, monkeypatch, name):
    """It lives long enough to give a sign of life."""
    monkeypatch.setattr(sidecar, "MAX_SECONDS_BEFORE_RESTART", 0.1)
    code = "import threading\nthreading.Timer(0.7, os._exit, [1]).start()\nFollowed.look = lambda *_: False"
    companions = begin(name, code)
    wait_until((tmp_path / "begun").exists)
    end_run(companions, tmp_path, "completed", 2, deadline=12)
