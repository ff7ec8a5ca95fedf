"""`--track` with the packages themselves: what they have afterwards is each record once, in one run."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_trackers import FLAGS, PROGRAM, assert_one_curve, write_run

from ranks import ROOT, lack, run_ranks, start, stop
from tasks import train_task
from training import wait_until
from utils.files import read_json
from utils.run import start_decision

pytestmark = pytest.mark.slow
PYTHON = ROOT / ".venv-trackers/bin/python"  # their requirements are not those of the other tests
TRACKERS = ["wandb", "mlflow", "trackio"]
READ = """
import json, os, sys
from pathlib import Path
kind, run = sys.argv[1], Path(sys.argv[2])
note, ids = json.loads((run / "track.json").read_text()), []
if kind == "wandb":
    sys.path.insert(0, sys.argv[3])
    from scripts.companions.trackers import read_offline_rows
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    rows, ids = [row for file in files for row in read_offline_rows(file)], [file.stem for file in files]
elif kind == "trackio":
    from trackio import Api, SQLiteStorage
    rows, ids = SQLiteStorage.get_logs(note["project"], note["id"]), [each.name for each in Api().runs(note["project"])]
else:
    from mlflow import MlflowClient
    client = MlflowClient()
    found = client.search_runs([client.get_experiment_by_name(note["project"]).experiment_id])
    rows, ids = [], [run.info.run_id for run in found]
    for group in note["sent"]:
        loss, step = (client.get_metric_history(note["id"], f"{group}/{name}") for name in ("loss", "step"))
        rows += [{f"{group}/loss": a.value, f"{group}/step": int(b.value)} for a, b in zip(loss, step, strict=True)]
        assert all(a.step == b.step == b.value for a, b in zip(loss, step, strict=True))
    rows.append({"params": found[0].data.params, "status": found[0].info.status})
print(json.dumps([rows, sorted(set(ids))]))
"""


@contextlib.contextmanager
def mlflow_server(folder, port):
    words = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--port", port, "--workers", 1]
    server = start([PYTHON, "-m", "mlflow", "server", *words], cwd=folder)
    try:
        wait_until(lambda: is_open(port), 120)
        yield
    finally:
        stop(server)


def is_open(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def where(request, tmp_path):
    """The tracker, and the variables with which programs reach it. For MLflow: a server on this machine."""
    if not PYTHON.exists():
        lack("wandb, mlflow and trackio are not installed in .venv-trackers (scripts/test.sh --all)")
    kind, port = request.param, free_port()
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": f"{tmp_path}/trackio", "HF_HUB_OFFLINE": "1"}
    env |= {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
    with mlflow_server(tmp_path, port) if kind == "mlflow" else contextlib.nullcontext():
        yield SimpleNamespace(kind=kind, env=env)


def read(where, run):
    """The rows and the runs that the tracker has."""
    command = [PYTHON, "-c", READ, where.kind, run, ROOT]
    ended = subprocess.run(command, env=os.environ | where.env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def assert_whole(where, run):
    rows, ids = read(where, run)
    assert_one_curve(rows, run)
    (run_id,) = ids
    assert read_json(run / "track.json")["id"] == run_id.removeprefix("run-" if where.kind == "wandb" else "")
    return rows


def by_hand(where, run, *words, **env):
    everything = os.environ | where.env | env
    command = [PYTHON, PROGRAM, run, *words]
    return subprocess.run(
        command, env=everything, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def train_tracked(env, *args):
    os.environ.update(env)
    sys.executable = str(PYTHON)
    with mock.patch.object(start_decision, "find_spec", lambda name: SimpleNamespace(origin=name)):
        return train_task(*args)


@pytest.mark.guarantee("tracker")
@pytest.mark.parametrize("where", TRACKERS, indirect=True)
def test_a_run_over_two_resumes_is_one_curve(runs, where):
    for stops in ((5,), (11,), ()):
        flags = [*FLAGS, "--track", where.kind, "--resume_from", "auto", "--on_checkpoint", "true --password geheim"]
        run_ranks(1, train_tracked, where.env, "images", runs.words("run", *flags), torch.float32, stops, False)
    rows = assert_whole(where, runs.folder("run"))
    if where.kind == "mlflow":
        assert rows[-1]["status"] == "FINISHED" and rows[-1]["params"]["lr"] == "0.02"
        assert "geheim" not in str(rows[-1]) and "--password" in rows[-1]["params"]["on_checkpoint"]
    if where.kind == "wandb":
        assert all(row["_step"] == row["train/step"] for row in rows if "train/step" in row)


@pytest.mark.guarantee("tracker")
@pytest.mark.parametrize("where", TRACKERS, indirect=True)
def test_kills_at_any_moment_lose_and_repeat_nothing(tmp_path, where):
    run = write_run(tmp_path / "run", config={"track": where.kind})
    lines = (run / "metrics.jsonl").read_text().splitlines()
    plan = {"config": {"track": where.kind}, "folder": str(run), "checkpoints": str(run / "checkpoints"), "rank": 0}
    plan |= {"token": "1", "parent": os.getpid()}
    chance, ended = random.Random(7), threading.Event()
    (run / "metrics.jsonl").write_text("")

    def go_on():
        with (run / "metrics.jsonl").open("a") as file:
            for line in lines:
                print(line, file=file, flush=True)
                time.sleep(0.5)
        (run / "lock.json").write_text(json.dumps({"token": "1", "has_trained": True, "ended": "completed"}))
        ended.set()

    threading.Thread(target=go_on).start()
    kills, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL and kills < 50:
        program = subprocess.Popen(
            [PYTHON, PROGRAM, run], env=os.environ | where.env, stdin=subprocess.PIPE, start_new_session=True
        )
        with program.stdin:
            program.stdin.write(json.dumps(plan).encode())
        try:
            code = program.wait(60 if ended.is_set() else chance.uniform(2, 7))
        except subprocess.TimeoutExpired:
            program.kill()
            code, kills = program.wait(), kills + 1
    assert code == 0 and kills >= 2
    assert_whole(where, run)


class Answer(BaseHTTPRequestHandler):
    """A server that answers each request with the status code of its class."""

    code = 500

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(self.code)

    do_POST = do_PATCH = do_GET


@pytest.mark.guarantee("tracker")
@pytest.mark.parametrize("where", ["mlflow"], indirect=True)
def test_a_server_that_fails_or_rejects_is_one_sentence_and_a_later_try_sends_all(tmp_path, where):
    run = write_run(tmp_path / "run")
    for code, exit_code, sentence in (
        (500, 1, "--track mlflow cannot send records ("),
        (401, 2, "Set MLFLOW_TRACKING_URI"),
        (0, 1, "refused"),
    ):
        port = free_port()
        with ThreadingHTTPServer(("127.0.0.1", port), type("Answers", (Answer,), {"code": code})) as server:
            if code:
                threading.Thread(target=server.serve_forever, daemon=True).start()
            else:
                server.server_close()
            ended = by_hand(where, run, "mlflow", MLFLOW_TRACKING_URI=f"http://user:geheim@127.0.0.1:{port}")
            if code:
                server.shutdown()
        assert ended.returncode == exit_code and sentence in ended.stderr, ended.stderr
        assert "geheim" not in ended.stderr
    assert read_json(run / "track.json")["sent"] == {}
    ended = by_hand(where, run)
    assert ended.returncode == 0, ended.stderr
    assert_whole(where, run)
