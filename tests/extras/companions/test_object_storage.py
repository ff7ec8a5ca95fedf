"""A run without a shared disk: it is stopped, its folder is lost, and it goes on from its mirror, bit for bit."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import urllib.request
import uuid
from pathlib import Path
from unittest import mock

import pytest
import torch

import replay  # extra: replay
import tasks
from nodes import Nodes
from ranks import PATH, ROOT, finish, lack, marked, run_ranks, slow, start, stop
from scripts import export, predict
from scripts import runs as runs_script  # extra: reports
from scripts.companions.owner import Mirror
from tasks import train_task, using
from training import assert_same_state, difference, wait_until
from utils.checkpoint import format as checkpoint
from utils.run import run_lock
from utils.training.schedule import Progress

FLAGS = "--epochs 2 --lr 0.02 --record_samples --save_every_steps 3 --dataset_size 60".split()
FLAGS += ["--ema_decay", "0.9"]
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "geheim", "AWS_DEFAULT_REGION": "us-east-1"}


def train_with(env, *args):
    """The latest checkpoint is the best one."""
    os.environ.update(env)
    plain = Progress.record_value
    with mock.patch.object(Progress, "record_value", lambda self, value, sign: plain(self, self.step, 1)):
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
    soon = mock.patch.object(run_lock, "SECONDS_UNTIL_VISIBLE", 1.0)  # each disk is its own
    with soon, mock.patch.dict(tasks.TASKS["images"], {"create_dataset": with_a_test_set}):
        return train_with({}, *args)


def attempt(runs, name, env, *flags, stops=(), ranks=2):
    words = runs.words(name, *FLAGS, *flags)
    return run_ranks(ranks, train_with, env, "images", words, torch.float32, stops, False)


def need_s3():
    for name in ("moto", "s3fs"):
        if importlib.util.find_spec(name) is None:
            lack(name)


@contextlib.contextmanager
def s3_server(given):
    """The variables with which processes reach an S3 server: the given one, with keys in the environment, or moto's."""
    need_s3()
    if given:
        yield {"AWS_ENDPOINT_URL": given}
        return
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start([sys.executable, "-c", code, "-p", str(port)])
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}"))
        yield KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    finally:
        stop(server)


@pytest.fixture
def bucket(request, tmp_path, monkeypatch):
    """A URL at which nothing is, and the variables with which ranks reach it."""
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/runs/a", {}
        return
    given = os.environ.get("TEST_ENDPOINT_URL") if request.param == "s3" else ""  # "moto" is on this machine
    with s3_server(given) as env:
        for variable, value in env.items():
            monkeypatch.setenv(variable, value)
        storage = __import__("s3fs").S3FileSystem
        storage.clear_instance_cache()  # of another server
        name = uuid.uuid4().hex
        storage().mkdir(name)
        yield f"s3://{name}/runs/a", env
        if given:
            storage().rm(name, recursive=True)


def answers(url):
    try:
        return urllib.request.urlopen(url).status == 200
    except OSError:
        return False


@pytest.mark.guarantee("mirror-resume")
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
        state, *_ = attempt(runs, "parts", env, *flags, stops=stop_at)
        assert state == ("preempted" if stop_at else "completed")
        if stop_at:
            shutil.rmtree(runs.folder("parts"))
    assert [record["step"] for record in runs.events("parts", "resumed")] == [6, 12]
    runs.assert_same("whole", "parts")
    assert runs.records("whole", "train")[-1]["fingerprint"] == runs.records("parts", "train")[-1]["fingerprint"]
    assert_same_state(runs.last("whole"), runs.last("parts"))
    last = Mirror(url).read_manifests()[-1]
    assert last["step"] == 16 and len(last["files"]) == (2 if sharding == "zero3" else 1)
    written = "".join(path.read_text(errors="ignore") for path in runs.folder("parts").rglob("*") if path.is_file())
    assert os.environ.get("AWS_SECRET_ACCESS_KEY", "geheim") not in written
    status = Mirror(url).read_json(f"{last['manifest'][:8]}/records/status.json")
    assert status["state"] == "completed" and json.loads((runs.folder("parts") / "status.json").read_text()) == status


@pytest.mark.guarantee("mirror-resume")
@pytest.mark.parametrize(
    ("bucket", "sharding"), [("file", "none"), ("file", "zero3"), slow("file", "hybrid")], indirect=["bucket"]
)
def test_nodes_without_a_shared_disk_are_given_the_checkpoint_and_end_alike(runs, bucket, sharding):
    url, _ = bucket
    flags = ["--sharding", sharding]
    attempt(runs, "whole", {}, *flags)
    words = [*runs.words("parts", *FLAGS, *flags, "--mirror", url, "--resume_from", "auto"), "--run_dir", "runs/parts"]
    nodes = [runs.root / f"node{rank}" / "runs/parts" for rank in range(2)]
    for number, stops in enumerate([(5,), (11,), ()]):
        states = run_ranks(2, train_on_its_own_disk, runs.root, "images", words, torch.float32, stops, False)
        state = "preempted" if stops else "completed"
        assert states == [state, state]
        assert [json.loads((node / "status.json").read_text())["state"] for node in nodes] == [state, state]
        if number == 0:
            shutil.rmtree(nodes[1])  # this node is replaced
        elif number == 1 and sharding == "none":  # rank 0 has what the mirror lacks
            shutil.rmtree(url.removeprefix("file://"))
        elif number == 1:
            shutil.rmtree(nodes[0])
    (last,) = [manifest for manifest in Mirror(url).read_manifests() if manifest["step"] == 16]
    assert_same_state(runs.last("whole"), checkpoint.read_checkpoint(Mirror(url).fetch_checkpoint(last, runs.root))[0])
    resumed = [json.loads(line) for line in (nodes[0] / "metrics.jsonl").read_text().splitlines() if "resumed" in line]
    assert [record["step"] for record in resumed] == [6, 12]
    assert not (nodes[1] / "metrics.jsonl").exists()
    assert len(json.loads((nodes[0] / "summary.json").read_text())["test"]) == 1
    best = (nodes[0] / "checkpoints/best.pt").resolve().name
    digests = [checkpoint.verify_checkpoint(node / "checkpoints" / best).checksum for node in nodes]
    assert digests[0] == digests[1]  # which the test set was evaluated with
    for rank, node in enumerate(nodes):  # a disk was lost after step 6 or 12
        samples = (node / f"samples/rank{rank}.jsonl").read_text()
        assert [json.loads(line)["step"] for line in samples.splitlines()] == [*range(1, 17)]
        Mirror(url).restore_rank_records(runs.root / "copy", [rank])
        assert (runs.root / f"copy/samples/rank{rank}.jsonl").read_text() == samples


def use_tools(env, *commands):
    """What these scripts print, each given as its name and its words."""
    os.environ.update(env)
    texts = []
    scripts = {
        "export": export,
        "predict": predict,
        "replay": replay,  # extra: replay
        "runs": runs_script,  # extra: reports
    }
    for name, *words in commands:
        script, printed = scripts[name], io.StringIO()
        argv = mock.patch.object(sys, "argv", [name, *map(str, words)])
        outputs = mock.patch("model.predict", lambda net, batch: {"logits": net(batch[0])}, create=True)
        with argv, outputs, using("images"), contextlib.redirect_stdout(printed):
            assert not script.main(), printed.getvalue()
        texts.append(printed.getvalue())
    return texts


@pytest.mark.guarantee("mirror-resume")
@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["file", "s3"], indirect=True)
def test_the_scripts_and_init_from_take_the_url_of_a_run(runs, bucket, tmp_path):
    url, env = bucket
    for stops in ((11,), ()):  # only the checkpoint at the end of an attempt is certainly uploaded
        attempt(runs, "run", env, "--mirror", url, "--keep_every", 3, "--resume_from", "auto", stops=stops)
    run, (at_12, *_) = runs.folder("run"), [path for path in runs.checkpoints("run") if "12" in path.name]
    commands = [
        ("export", url, tmp_path / "best.pt", "--no-ema"),
        ("runs", "--compare", url, run),  # extra: reports
        ("runs", "--diverge", url, run),  # extra: reports and replay
        ("replay", url, "--step", 14),  # extra: replay
    ]
    commands += [("export", f"{url}/checkpoints/{at_12.name}", tmp_path / "12.pt", "--no-ema")]
    commands += [("predict", f"{url}/checkpoints/best.pt", "--out", tmp_path / "predictions.pt")]
    env = {**env, "TORCH_HOME": str(tmp_path / "copies")}  # the server that forks ranks may be older than the bucket
    (texts,) = run_ranks(1, use_tools, env, *commands)
    printed = "".join(texts)
    assert str(tmp_path / "best.pt") in printed
    assert url in printed and "The weights are bitwise equal." in printed  # extra: reports
    assert "no difference" in printed  # extra: reports and replay
    assert "is replayed from step_00000012.pt." in printed  # extra: replay
    exports = [torch.load(tmp_path / name, weights_only=True)["model"] for name in ("best.pt", "12.pt")]
    for exported, path in zip(exports, [run / "checkpoints/best.pt", at_12], strict=True):
        assert difference(exported, checkpoint.read_checkpoint(path)[0]["model"]) == []
    (outputs,) = torch.load(tmp_path / "predictions.pt", weights_only=True).values()
    assert len(outputs) == 12
    for name, source in (("a", f"{url}/checkpoints/{at_12.name}"), ("b", at_12), ("c", f"{url}/12.pt")):
        if name == "c":
            Mirror(url).upload(tmp_path / "12.pt", "12.pt")
        attempt(runs, name, env, "--init_from", source, "--max_steps", 2)
    assert difference(runs.last("a")["model"], runs.last("b")["model"]) == []
    assert difference(runs.last("c")["model"], runs.last("b")["model"]) == []


def relaunched(node, number, url, folder, *flags, ranks=2, nodes=2):
    env = KEYS | {"AWS_ENDPOINT_URL": url, "PATH": PATH, "NNODES": str(nodes), "NODE_RANK": str(number)}
    env |= {"MASTER_ADDR": "node0", "NPROC_PER_NODE": str(ranks)}
    words = ["--run_dir", folder, "--mirror", "s3://bucket/runs/a", "--resume_from", "auto", "--timeout", 20, *flags]
    return node.start([ROOT / "scripts/launch.sh", *words], env=env)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "then"), [("--reduction exact", (2, 2)), ("--reduction exact", (1, 1)), ("--sharding zero3", (2, 2))]
)
def test_two_nodes_share_only_the_server_and_node_0_loses_its_disk(runs, tmp_path, flags, then):
    """Then the run goes on from the server: on two new nodes, or in one process."""
    need_s3()
    disk = tmp_path / "disk"
    disk.mkdir()
    words = "--image_size 8 --batch_size 2 --dataset_size 160 --num_workers 1 --save_every_steps 2 --epochs 4".split()
    words += f"--log_interval 1 --record_samples --global_batch_size 8 --seed 5 {flags}".split()
    with Nodes(3) as nodes:
        for node in nodes:
            node.mount_tmpfs(disk, "200m")
        code = "import sys; from moto.server import main; main(sys.argv[1:])"
        nodes[2].start([sys.executable, "-c", code, "-H", "0.0.0.0", "-p", 5000])
        url = f"http://{nodes[2].address}:5000"
        put = f"import urllib.request as u; u.urlopen(u.Request('{url}/bucket', method='PUT'))"
        wait_until(lambda: nodes[0].run(sys.executable, "-c", put).code == 0)
        programs = [relaunched(nodes[k], k, url, disk / "run", *words) for k in range(2)]
        log = nodes[0].seen(disk / "run/logs/rank0.log")

        def is_uploaded():
            assert programs[0].poll() is None, finish(programs[0]).text
            return log.exists() and re.search(r"step_0000001\d\S* was uploaded to", log.read_text())

        wait_until(is_uploaded, 120)
        for pid in marked(programs[0]):
            os.kill(pid, signal.SIGKILL)
        for program in programs:
            stop(program)
        assert not nodes[1].seen(disk / "run/metrics.jsonl").exists()  # the disks are not one
        for node in nodes:
            node.do("umount", "-l", disk)
            node.mount_tmpfs(disk, "200m")
        count, ranks = then
        again = [relaunched(nodes[k], k, url, disk / "run", *words, ranks=ranks, nodes=count) for k in range(count)]
        ended = [finish(program, 240) for program in again]
        assert [result.code for result in ended] == [0] * count, "".join(result.text for result in ended)
        assert re.search(r"s3://bucket/runs/a/\S+ was fetched", ended[0].text)
        for node in nodes[:count]:  # each disk has the samples and the shards of its ranks
            shutil.copytree(node.seen(disk / "run"), runs.folder("parts"), dirs_exist_ok=True)
    runs.train(4 if "zero3" in flags else 1, "uninterrupted", *words, task="")
    assert_same_state(runs.last("uninterrupted"), runs.last("parts"))
    assert runs.samples("uninterrupted") == runs.samples("parts")
