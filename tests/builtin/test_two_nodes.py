"""launch.sh on real nodes: together they train what one process would, lose a node, and continue bit for bit."""

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from misconfigurations import TABLE
from nodes import Nodes
from ranks import ROOT, finish
from training import Runs
from utils.watchdog import read_place

README = (ROOT / "README.md").read_text()
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
TINY = "--image_size 8 --batch_size 4 --dataset_size 160 --num_workers 1 --save_every_steps 5 --log_interval 1".split()
TINY += "--global_batch_size 8 --deterministic".split()
LATE = "waiting for node 0 at node0:29500: refused: nothing listens there"


def launch(node, number, *flags, nodes=2, **variables):
    env = {"PATH": PATH, "NNODES": str(nodes), "NODE_RANK": str(number), "MASTER_ADDR": "node0", "NPROC_PER_NODE": "1", **variables}
    return node.start([ROOT / "scripts" / "launch.sh", *TINY, *flags], env=env)


def as_in_the_readme(node, number, *flags):
    """Its line for this node, with these flags in the place of its own."""
    line = re.search(rf"^(NNODES=2 NODE_RANK={number} .*launch.sh --retries 10) --detach .*# on {node.name}$", README, re.MULTILINE)[1]
    words = shlex.join(map(str, [*TINY, *flags]))
    return node.start(["bash", "-c", f"cd {shlex.quote(str(ROOT))} && {line} {words}"], env={"PATH": PATH})


def weights(run):
    newest = max((run / "checkpoints").glob("step_*.pt"))
    return torch.load(newest, weights_only=True)["model"]


def are_the_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def wait_for_step(run, rank, step, deadline=120):
    ends = time.monotonic() + deadline
    while not ((place := read_place(run / "watch" / f"rank{rank}")) and place.step >= step):
        assert time.monotonic() < ends, f"step {step} was not reached in {deadline} s"
        time.sleep(0.05)
    return place


def undisturbed(folder, epochs):
    """The weights of a run of two ranks on one node."""
    Runs(folder).train(2, "undisturbed", *TINY, "--epochs", epochs, task="")
    return weights(folder / "undisturbed")


def test_two_nodes_train_what_one_does(tmp_path):
    """Node 0 comes late, and is waited for by name; nothing else is found wrong with nodes that are set up well."""
    with Nodes(2) as nodes:
        flags = ["--epochs", 1, "--run_dir", tmp_path / "run"]
        second, ends = as_in_the_readme(nodes[1], 1, *flags), time.monotonic() + 60
        while LATE.encode() not in os.pread(second.files[1].fileno(), 2**16, 0):
            assert time.monotonic() < ends
            time.sleep(0.1)
        first = as_in_the_readme(nodes[0], 0, *flags)
        ended = [finish(program, 240) for program in (first, second)]
    assert [each.code for each in ended] == [0, 0], ended[0].text + ended[1].text
    assert "[node0 0] " in ended[0].out and "GLOO_SOCKET_IFNAME=eth0" in ended[0].err
    assert are_the_same(weights(tmp_path / "run"), undisturbed(tmp_path, 1))
    said = "".join(line for each in ended for line in each.text.splitlines(keepends=True) if LATE not in line)
    assert not [row.name for row in TABLE if row.pattern.search(said)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the link is cut", "launch.sh and its torchrun are killed"])
def test_a_lost_node_comes_back_and_the_run_continues_bit_for_bit(tmp_path, how):
    run = tmp_path / "run"
    with Nodes(2) as nodes:
        flags = ["--epochs", 6, "--run_dir", run, "--timeout", 10, "--hang_timeout", 20]
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
    assert are_the_same(weights(run), undisturbed(tmp_path, 6))


@pytest.mark.slow
def test_a_node_comes_and_another_leaves_while_the_global_batch_stays(tmp_path):
    run = tmp_path / "run"
    with Nodes(3) as nodes:
        flags = ["--epochs", 8, "--run_dir", run, "--global_batch_size", 12, "--record_samples", "--timeout", 10]
        variables = {"NNODES": "1:3", "MAX_RESTARTS": "5", "LAUNCH_RETRIES": "2"}
        programs = [launch(nodes[number], number, *flags, **variables) for number in (0, 1)]
        wait_for_step(run, 1, 10)
        programs.append(launch(nodes[2], 2, *flags, **variables))
        wait_for_step(run, 2, 15)
        programs[2].terminate()
        ended = [finish(program, 240) for program in programs[:2]]
    assert [each.code for each in ended] == [0, 0], "".join(each.text for each in ended)
    windows: dict[tuple[int, int], list[int]] = {}
    for file in (run / "samples").glob("rank*.jsonl"):
        for record in map(json.loads, file.read_text().splitlines()):
            windows.setdefault((record["epoch"], record["step"]), []).extend(record["indices"])
    for epoch in range(8):
        sizes = [len(indices) for (of, _), indices in sorted(windows.items()) if of == epoch]
        seen = [index for (of, _), indices in windows.items() if of == epoch for index in indices]
        assert sizes[:-1] == [12] * (len(sizes) - 1) and sorted(seen) == sorted(set(seen)) and len(seen) == sum(sizes), epoch
        assert set(seen) == {index for (of, _), indices in windows.items() if of == 0 for index in indices}, epoch
