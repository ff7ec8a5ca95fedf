"""launch.sh on real nodes: they meet, train as one process would, lose a node and go on, bit for bit."""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from nodes import Nodes
from ranks import ROOT, finish
from utils.watchdog import read_place

README = (ROOT / "README.md").read_text()
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
TINY = ["--image_size", 8, "--batch_size", 4, "--dataset_size", 160, "--num_workers", 1, "--save_every_steps", 5, "--log_interval", 1]
TINY += ["--global_batch_size", 8, "--deterministic"]


def launch(node, number, *flags, nodes=2, **variables):
    env = {"PATH": PATH, "NNODES": str(nodes), "NODE_RANK": str(number), "MASTER_ADDR": "node0", "NPROC_PER_NODE": "1", **variables}
    return node.start([ROOT / "scripts" / "launch.sh", *TINY, *flags], env=env)


def as_in_the_readme(node, number, *flags):
    """Its line for this node, with these flags in the place of its own."""
    line = re.search(rf"^(NNODES=2 NODE_RANK={number} .*launch.sh --retries 10) --detach .*# on {node.name}$", README, re.MULTILINE)[1]
    return node.start(
        ["bash", "-c", shlex.join(map(str, ["cd", ROOT])) + f" && {line} {shlex.join(map(str, [*TINY, *flags]))}"], env={"PATH": PATH}
    )


def weights(run):
    newest = max((run / "checkpoints").glob("step_*.pt"))
    return torch.load(newest, weights_only=True)["model"]


def are_the_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def wait_for_step(run, rank, step, deadline=90):
    ends = time.monotonic() + deadline
    while not ((place := read_place(run / "watch" / f"rank{rank}")) and place.step >= step):
        assert time.monotonic() < ends, f"step {step} was not reached in {deadline} s"
        time.sleep(0.05)
    return place


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run of two ranks on one node."""
    run = tmp_path_factory.mktemp("one") / "run"
    with Nodes(1) as nodes:
        ended = finish(launch(nodes[0], 0, "--epochs", 2, "--run_dir", run, nodes=1, NPROC_PER_NODE="2"), 120)
        assert ended.code == 0, ended.text
    return weights(run)


def test_two_nodes_train_what_one_does(tmp_path, undisturbed):
    """Node 0 comes late, and is waited for by name."""
    with Nodes(2) as nodes:
        flags = ["--epochs", 2, "--run_dir", tmp_path / "run"]
        second = as_in_the_readme(nodes[1], 1, *flags)
        time.sleep(13)
        first = as_in_the_readme(nodes[0], 0, *flags)
        ended = [finish(program, 120) for program in (first, second)]
    assert [each.code for each in ended] == [0, 0], ended[0].text + ended[1].text
    assert "waiting for node 0 at node0:29500: refused: nothing listens there" in ended[1].err
    assert "[node0 0] " in ended[0].out and "GLOO_SOCKET_IFNAME=eth0" in ended[0].err
    assert are_the_same(weights(tmp_path / "run"), undisturbed)


def test_three_nodes_under_c10d_and_a_rank_killed(tmp_path):
    """torchrun restarts all ranks itself, in a store of their own."""
    with Nodes(3) as nodes:
        run = tmp_path / "run"
        flags = ["--epochs", 4, "--run_dir", run, "--global_batch_size", 12]
        programs = [launch(node, number, *flags, nodes=3, MAX_RESTARTS="2") for number, node in enumerate(nodes)]
        os.kill(wait_for_step(run, 1, 12).pid, signal.SIGKILL)
        ended = [finish(program, 180) for program in programs]
    assert [each.code for each in ended] == [0, 0, 0], "".join(each.text for each in ended)
    assert '"restarts": 1' in (run / "summary.json").read_text()


@pytest.mark.drill
@pytest.mark.parametrize("how", ["the link is cut", "launch.sh and its torchrun are killed"])
def test_a_lost_node_comes_back_and_the_run_goes_on_bit_for_bit(tmp_path, undisturbed, how):
    run = tmp_path / "run"
    with Nodes(2) as nodes:
        flags = ["--epochs", 2, "--run_dir", run, "--timeout", 10, "--hang_timeout", 20]
        programs = [launch(node, number, *flags, LAUNCH_RETRIES="4") for number, node in enumerate(nodes)]
        place = wait_for_step(run, 1, 12)
        if "link" in how:
            nodes[1].link(up=False)
            time.sleep(25)
            nodes[1].link(up=True)
        else:
            agent = int(Path(f"/proc/{place.pid}/stat").read_text().rpartition(")")[2].split()[1])
            script = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in (script, agent):
                os.kill(pid, signal.SIGKILL)
            programs[1].wait(20)
            programs[1] = launch(nodes[1], 1, *flags, LAUNCH_RETRIES="4")  # as a scheduler would
        ended = [finish(program, 240) for program in programs]
    assert [each.code for each in ended] == [0, 0], "".join(each.text for each in ended)
    assert are_the_same(weights(run), undisturbed)


@pytest.mark.drill
def test_a_node_comes_and_another_leaves_while_the_global_batch_stays(tmp_path):
    run = tmp_path / "run"
    with Nodes(3) as nodes:
        flags = ["--epochs", 8, "--run_dir", run, "--global_batch_size", 12, "--record_samples", "--timeout", 10]
        variables = {"NNODES": "1:3", "MAX_RESTARTS": "5", "LAUNCH_RETRIES": "2"}
        programs = [launch(nodes[number], number, *flags, **variables) for number in (0, 1)]
        wait_for_step(run, 1, 10)
        programs.append(launch(nodes[2], 2, *flags, **variables))
        place = wait_for_step(run, 2, 15)
        os.kill(place.pid, 0)
        programs[2].terminate()
        ended = [finish(program, 240) for program in programs[:2]]
    assert [each.code for each in ended] == [0, 0], "".join(each.text for each in ended)
    config = (run / "config.json").read_text()
    assert '"global_batch_size": 12' in config
