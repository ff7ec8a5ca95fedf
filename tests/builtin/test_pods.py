# extra: kubernetes and launcher and template
"""Pods of both manifests with the image's files and permissions: one is lost, and the run continues."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from dockerfile import POD, instructions, make_image, make_removable, process_1
from manifests import both, publish, started
from nodes import NETWORK, Nodes
from ranks import finish, launch, start, stop
from training import wait_for_step

pytestmark = pytest.mark.slow
TINY = "--image_size 8 --batch_size 4 --dataset_size 160 --num_workers 1 --save_every_steps 5".split()
FEW = "--epochs 10 --timeout 10 --hang_timeout 20 --nproc-per-node 1".split()


@pytest.fixture
def pod(tmp_path):
    """The image's folder, a shared folder, and the environment variables."""
    app, shared = tmp_path / "app", tmp_path / "shared"
    shared.mkdir()
    yield app, shared, make_image(app)
    make_removable(app)


@pytest.mark.guarantee("kubernetes")
def test_a_drained_pod_saves_and_its_replacement_completes_the_run(pod):
    """The entrypoint as process 1: SIGTERM, exit code 75, and the same command again, as the Job would start it."""
    app, shared, env = pod
    entry = app / Path(json.loads(dict(instructions())["ENTRYPOINT"])[0]).relative_to("/app")
    command = [*POD, entry, *TINY, "--run_dir", shared / "run", "--data_dir", shared / "data", "--resume_from", "auto"]
    env |= {"NPROC_PER_NODE": "2", "LAUNCH_ID": "5fcf6d81"}
    program = start([*command, "--epochs", "5000"], cwd=app, env=env)
    try:
        wait_for_step(shared / "run", 1, 2)
        os.kill(process_1(program), signal.SIGTERM)
        ended = finish(program)
    finally:
        stop(program)
    assert ended.code == 75 and list((shared / "run" / "checkpoints").glob("step_*.pt")), ended.text
    ended = launch([*command, "--epochs", "1"], cwd=app, env=env)
    assert ended.code == 0 and "completed" in ended.out, ended.text
    origin = json.loads((shared / "run" / "provenance.json").read_text())
    assert origin["git_commit"] == "c0ffee"
    assert json.loads((shared / "run" / "summary.json").read_text())["restarts"] == 1


def start_pod(node, job, index, app, shared, env):
    """Start what the kubelet would start, with the test's paths for image and claim, and a short training."""
    words, variables = started(job, index)
    words = [re.sub("^/app/", f"{app}/", re.sub("^/shared/", f"{shared}/", word)) for word in words]
    return node.start([*POD, *words, *TINY, *FEW], env=env | variables, cwd=app)


@pytest.mark.parametrize(
    ("number", "lost", "how"), [(0, 1, "drained"), (1, 0, "killed")], ids=["Job-drained", "TrainJob-killed"]
)
def test_a_lost_pod_is_replaced_and_the_run_is_completed(pod, number, lost, how):
    """The new pod has the name of the lost one and another address."""
    job, (app, shared, env) = both()[number], pod
    with Nodes(2) as nodes:
        publish(nodes, job)
        pods = [start_pod(node, job, index, app, shared, env) for index, node in enumerate(nodes)]
        run = shared / "runs" / job["metadata"]["name"].removesuffix("-node-0")
        wait_for_step(run, 1, 12)
        os.kill(process_1(pods[lost]), signal.SIGTERM if how == "drained" else signal.SIGKILL)
        ended = finish(pods[lost], 60)
        assert ended.code == 75 or how == "killed", ended.text  # unshare does not report the code of a killed pod
        node = nodes[lost]
        node.do("ip", "address", "flush", "dev", "eth0")
        node.address = f"{NETWORK}.9"
        node.do("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        publish(nodes, job)
        pods[lost] = start_pod(node, job, lost, app, shared, env)
        ended = [finish(program, 240) for program in pods]
    assert [result.code for result in ended] == [0, 0], "".join(result.text for result in ended)
    assert "Attempt 2 of 101 starts" in ended[1 - lost].err and '"restarts": 1' in (run / "summary.json").read_text()
