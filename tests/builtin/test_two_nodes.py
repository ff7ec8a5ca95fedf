# extra: launcher and template
"""launch.sh on several nodes: the same training as on one node, a lost node, a bitwise equal result."""

import itertools
import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from misconfigurations import TABLE
from nodes import Nodes
from ranks import PATH, ROOT, finish
from training import Runs, difference, wait_for_step, wait_until

PAGE = (ROOT / "docs/multi-node.md").read_text()
TINY = "--image_size 8 --batch_size 4 --dataset_size 160 --num_workers 1 --save_every_steps 5 --log_interval 1".split()
TINY += "--global_batch_size 8 --deterministic".split()
LATE = "Node 0 at node0:29500 cannot be reached (connection refused, nothing is listening there)."


def launch(node, number, *flags, nodes=2, **variables):
    env = {
        "PATH": PATH,
        "NNODES": str(nodes),
        "NODE_RANK": str(number),
        "MASTER_ADDR": "node0",
        "NPROC_PER_NODE": "1",
        **variables,
    }
    return node.start([ROOT / "scripts" / "launch.sh", *TINY, *flags], env=env)


def as_documented(node, number, *flags):
    """Run the command of docs/multi-node.md for this node with other flags."""
    line = re.search(
        rf"^(NNODES=2 NODE_RANK={number} .*launch.sh --retries 10) .*# on {node.name}$", PAGE, re.MULTILINE
    )[1]
    words = shlex.join(map(str, [*TINY, *flags]))
    return node.start(["bash", "-c", f"cd {shlex.quote(str(ROOT))} && {line} {words}"], env={"PATH": PATH})


def difference_from_one_node(folder, epochs):
    """Where the run's weights differ from those of two ranks on one node."""
    runs = Runs(folder)
    runs.train(2, "uninterrupted", *TINY, "--epochs", epochs, task="")
    return difference(runs.last("run")["model"], runs.last("uninterrupted")["model"])


@pytest.mark.guarantee("nodes")
def test_two_nodes_train_the_same_as_one(tmp_path):
    """Node 0 starts late and node 1 reports that it waits; no other message of the table is printed."""
    with Nodes(2) as nodes:
        flags = ["--epochs", 1, "--run_dir", tmp_path / "run"]
        second = as_documented(nodes[1], 1, *flags)
        wait_until(lambda: LATE.encode() in os.pread(second.files[1].fileno(), 2**16, 0))
        first = as_documented(nodes[0], 0, *flags)
        ended = [finish(program, 240) for program in (first, second)]
    assert [result.code for result in ended] == [0, 0], ended[0].text + ended[1].text
    assert "[node0 0] " in ended[0].out and "GLOO_SOCKET_IFNAME=eth0" in ended[0].err
    assert difference_from_one_node(tmp_path, 1) == []
    output = "".join(line for result in ended for line in result.text.splitlines(keepends=True) if LATE not in line)
    # a rank may really be slower than the median while other tests use the cores
    assert {row.name for row in TABLE if row.is_in(output, is_named=False)} <= {"busy node"}


@pytest.mark.slow
def test_two_nodes_measure_the_speed_into_one_report(tmp_path):
    with Nodes(2) as nodes:
        flags = ["--scaling", tmp_path / "s.json", "--run_dir", tmp_path / "run"]
        ended = [finish(program, 240) for program in [launch(node, k, *flags) for k, node in enumerate(nodes)]]
    assert [result.code for result in ended] == [0, 0], ended[0].text + ended[1].text
    (job,) = json.loads((tmp_path / "s.json").read_text())["measured"]
    assert job["ranks"] == 2 and [*job["rows"]] == ["as given", "without communication"]
    assert {path.name for path in tmp_path.iterdir()} == {"s.json", "run.launch"}


@pytest.mark.guarantee("rank-killed", "nodes")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["the link is cut", "launch.sh and its torchrun are killed"])
def test_a_lost_node_returns_and_the_result_is_bitwise_equal(tmp_path, how):
    run = tmp_path / "run"
    with Nodes(2) as nodes:
        flags = ["--epochs", 6, "--run_dir", run, "--timeout", 10, "--hang_timeout", 20]
        programs = [launch(node, number, *flags, LAUNCH_RETRIES="4") for number, node in enumerate(nodes)]
        pid = wait_for_step(run, 1, 12)
        if "link" in how:
            nodes[1].link(up=False)
            time.sleep(25)
            nodes[1].link(up=True)
        else:
            agent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            script = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in (script, agent):
                os.kill(pid, signal.SIGKILL)
            programs[1].wait(20)
            programs[1] = launch(nodes[1], 1, *flags, LAUNCH_RETRIES="4")  # as a scheduler would
        ended = [finish(program, 240) for program in programs]
    assert [result.code for result in ended] == [0, 0], "".join(result.text for result in ended)
    assert difference_from_one_node(tmp_path, 6) == []


@pytest.mark.guarantee("nodes")
@pytest.mark.slow
def test_nodes_join_and_leave_while_the_global_batch_stays_the_same(tmp_path):
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
    assert [result.code for result in ended] == [0, 0], "".join(result.text for result in ended)
    samples = Runs(tmp_path).samples("run")
    for epoch in range(8):
        global_batches = [samples.pop(14 * epoch + k) for k in range(1, 15)]
        assert [*map(len, global_batches)] == [12] * 13 + [4] and sorted(itertools.chain(*global_batches)) == list(
            range(160)
        ), epoch
    assert not samples
