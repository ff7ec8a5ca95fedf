"""A run without a shared disk: it is stopped, its folder is lost, and it goes on from its mirror, bit for bit."""

import json
import os
import shutil
import socket
import sys
import urllib.request
from pathlib import Path
from unittest import mock

import pytest
import torch

import tasks
from ranks import lack, run_ranks, slow, start, stop
from tasks import train_task
from training import assert_same_state, wait_until
from utils.checkpoint import format as checkpoint
from utils.run import start_checks
from utils.run.mirror import Mirror

FLAGS = "--epochs 2 --ema_decay 0.9 --lr 0.02 --record_samples --save_every_steps 3 --dataset_size 60".split()
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "geheim", "AWS_DEFAULT_REGION": "us-east-1"}


def train_with(env, *args):
    os.environ.update(env)
    return train_task(*args)


def with_a_test_set(config, split):
    return tasks.Images(40, split) if split == "test" else tasks.create_images(config, split)


def train_on_its_own_disk(root, *args):
    """Each rank is a node, with a folder of its own. There is a test set."""
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    folder = Path(root, f"node{rank}")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    soon = mock.patch.object(start_checks, "SECONDS_TO_SEE", 1.0)  # each disk is its own
    with soon, mock.patch.dict(tasks.TASKS["images"], {"create_dataset": with_a_test_set}):
        return train_task(*args)


def attempt(runs, name, env, *flags, stops=(), ranks=2):
    words = runs.words(name, *FLAGS, *flags)
    return run_ranks(ranks, train_with, env, "images", words, torch.float32, stops, False, False)


@pytest.fixture
def bucket(request, tmp_path, monkeypatch):
    """The URL of an empty bucket, and the variables with which ranks reach it."""
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/runs/a", {}
        return
    for name in ("moto", "s3fs", "boto3"):
        try:
            __import__(name)
        except ImportError:
            lack(name)
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start([sys.executable, "-c", code, "-p", str(port)])
    try:
        env = KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        for variable, value in env.items():
            monkeypatch.setenv(variable, value)
        put = urllib.request.Request(f"{env['AWS_ENDPOINT_URL']}/bucket", method="PUT")
        wait_until(lambda: answers(put))
        __import__("s3fs").S3FileSystem.clear_instance_cache()  # of another server
        yield "s3://bucket/runs/a", env
    finally:
        stop(server)


def answers(request):
    try:
        return urllib.request.urlopen(request).status == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    ("bucket", "sharding"),
    [("file", "none"), slow("s3", "none"), slow("file", "zero3"), slow("s3", "zero3")],
    indirect=["bucket"],
)
def test_a_run_that_loses_its_folder_goes_on_from_its_mirror_bit_for_bit(runs, bucket, sharding):
    url, env = bucket
    flags = ["--sharding", sharding]
    attempt(runs, "whole", {}, *flags)
    flags += ["--mirror", url, "--resume_from", "auto"]
    for stop_at in ((5,), (11,), ()):
        (state, _), *_ = attempt(runs, "parts", env, *flags, stops=stop_at)
        assert state == ("preempted" if stop_at else "completed")
        if stop_at:
            shutil.rmtree(runs.folder("parts"))
    assert [record["step"] for record in runs.events("parts", "resumed")] == [6, 12]
    runs.assert_same("whole", "parts")
    assert runs.records("whole", "train")[-1]["fingerprint"] == runs.records("parts", "train")[-1]["fingerprint"]
    assert_same_state(runs.last("whole"), runs.last("parts"))
    last = Mirror(url).checkpoints()[-1]
    assert last["step"] == 16 and len(last["files"]) == (2 if sharding == "zero3" else 1)
    written = "".join(path.read_text(errors="ignore") for path in runs.folder("parts").rglob("*") if path.is_file())
    assert "geheim" not in written
    status = Mirror(url).read_json(f"{last['manifest'][:8]}/records/status.json")
    assert status["state"] == "completed" and json.loads((runs.folder("parts") / "status.json").read_text()) == status


@pytest.mark.parametrize("bucket", ["file"], indirect=True)
def test_nodes_without_a_shared_disk_are_given_the_checkpoint_and_end_alike(runs, bucket):
    url, _ = bucket
    attempt(runs, "whole", {})
    words = [*runs.words("parts", *FLAGS, "--mirror", url, "--resume_from", "auto"), "--run_dir", "runs/parts"]
    nodes = [runs.root / f"node{rank}" / "runs/parts" for rank in range(2)]
    for number, stops in enumerate([(5,), (11,), ()]):
        found = run_ranks(2, train_on_its_own_disk, runs.root, "images", words, torch.float32, stops, False, False)
        state = "preempted" if stops else "completed"
        assert [each[0] for each in found] == [state, state]
        assert [json.loads((node / "status.json").read_text())["state"] for node in nodes] == [state, state]
        if number == 0:
            shutil.rmtree(nodes[1])  # this node is replaced
        elif number == 1:  # rank 0 has what the mirror lacks
            shutil.rmtree(url.removeprefix("file://"))
    assert_same_state(runs.last("whole"), checkpoint.read(nodes[0] / "checkpoints/step_00000016.pt")[0])
    resumed = [json.loads(line) for line in (nodes[0] / "metrics.jsonl").read_text().splitlines() if "resumed" in line]
    assert [record["step"] for record in resumed] == [6, 12]
    assert (nodes[1] / "checkpoints/step_00000012.pt").exists() and not (nodes[1] / "metrics.jsonl").exists()
    assert len(json.loads((nodes[0] / "summary.json").read_text())["test"]) == 1
    files = [node / "checkpoints/best.pt" for node in nodes]
    assert files[0].read_bytes() == files[1].read_bytes()  # which the test set was evaluated with


@pytest.mark.parametrize("bucket", ["file"], indirect=True)
def test_sharding_without_a_shared_disk_is_rejected(runs, bucket):
    words = [*runs.words("run", *FLAGS, "--mirror", bucket[0], "--sharding", "zero3"), "--run_dir", "runs/run"]
    with pytest.raises(AssertionError, match="sharding=zero3: needs one run_dir for all nodes, also with --mirror;"):
        run_ranks(2, train_on_its_own_disk, runs.root, "images", words, torch.float32, (), False, False)
