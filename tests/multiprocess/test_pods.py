"""The pods of both manifests on real nodes, with the image's files and rights: one is lost, another takes its place, all meet again."""

import os
import signal

import pytest

from dockerfile import POD, make_image, make_removable, process_1
from manifests import both, publish, started
from nodes import NETWORK, Nodes
from ranks import finish
from test_launch_nodes import wait_for_step

TINY = ["--image_size", 8, "--batch_size", 4, "--dataset_size", 160, "--epochs", 2, "--num_workers", 1, "--save_every_steps", 5]
TINY += ["--timeout", 10, "--hang_timeout", 20, "--nproc-per-node", 1]


def start_pod(node, job, index, app, shared, env):
    """What the kubelet would start, with the image and the claim at places of the test, and little to do."""
    words, variables = started(job, index)
    places = {"/app/": f"{app}/", "/shared/": f"{shared}/"}
    for place, here in places.items():
        words = [here + word.removeprefix(place) if word.startswith(place) else word for word in words]
    return node.start([*POD, *words, *TINY], env=env | variables, cwd=app)


@pytest.mark.drill
@pytest.mark.parametrize(("number", "lost", "how"), [(0, 1, "drained"), (1, 0, "killed")], ids=["Job-drained", "TrainJob-killed"])
def test_a_lost_pod_is_replaced_and_all_meet_again(tmp_path, number, lost, how):
    """The new one has the name of the lost one, and another address."""
    job, app, shared = both()[number], tmp_path / "app", tmp_path / "shared"
    shared.mkdir()
    env = make_image(app)
    with Nodes(2) as nodes:
        publish(nodes, job)
        pods = [start_pod(node, job, index, app, shared, env) for index, node in enumerate(nodes)]
        run = shared / "runs" / job["metadata"]["name"].removesuffix("-node-0")
        wait_for_step(run, 1, 12)
        os.kill(process_1(pods[lost]), signal.SIGTERM if how == "drained" else signal.SIGKILL)
        ended = finish(pods[lost], 60)
        assert ended.code == 75 or how == "killed", ended.text  # of the killed one unshare says nothing
        node = nodes[lost]
        node.do("ip", "address", "flush", "dev", "eth0")
        node.address = f"{NETWORK}.9"
        node.do("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        publish(nodes, job)
        pods[lost] = start_pod(node, job, lost, app, shared, env)
        ended = [finish(pod, 240) for pod in pods]
    make_removable(app)
    assert [each.code for each in ended] == [0, 0], "".join(each.text for each in ended)
    assert "start 2 of 101 follows" in ended[1 - lost].err and '"restarts": 1' in (run / "summary.json").read_text()
