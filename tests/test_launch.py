"""scripts/launch.sh: the line it makes, what it refuses, and real runs with the contract's exit codes."""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from ranks import ROOT, finish, launch, start, stop
from utils.watchdog import read_place

SCRIPT = ROOT / "scripts" / "launch.sh"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
TINY = ["--image_size", "8", "--batch_size", "4", "--dataset_size", "40", "--epochs", "1", "--backend", "gloo"]


def line(*flags, **variables):
    ended = launch([SCRIPT, *flags, "--dry-run"], env={"PATH": PATH, **variables})
    return ended, shlex.split(ended.out)


def test_one_node():
    ended, words = line("--epochs", "3", "--data_dir", "my data", NPROC_PER_NODE="4")
    assert ended.code == 0
    assert words == ["torchrun", "--standalone", "--nproc-per-node=4", "train.py", "--epochs", "3", "--data_dir", "my data"]


def test_several_nodes():
    _, words = line(NNODES="3", NODE_RANK="2", MASTER_ADDR="node0", MASTER_PORT="1234", NPROC_PER_NODE="8")
    assert words[1:6] == ["--nnodes=3", "--node-rank=2", "--master-addr=node0", "--master-port=1234", "--nproc-per-node=8"]
    assert "--master-port=29500" in line(NNODES="2", MASTER_ADDR="node0", NPROC_PER_NODE="1")[1]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NNODES": "2"}, "MASTER_ADDR: is not set, with NNODES=2; give"),
        ({"NNODES": "two"}, "NNODES=two: is no whole number of at least 1; give"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK=2: is outside NNODES=2; give 0 to 1"),
        ({"NODE_RANK": "-1"}, "NODE_RANK=-1: is no whole number"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0: is no whole number of at least 1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: is no whole number"),
    ],
)
def test_variables_that_make_no_sense_are_refused(variables, said):
    ended, _ = line(**{"NPROC_PER_NODE": "1", **variables})
    assert ended.code == 2 and f"launch.sh: {said}" in ended.err


def test_help_is_that_of_the_script_and_of_train_py():
    ended = launch([SCRIPT, "--help"], env={"PATH": PATH})
    assert ended.code == 0 and "NPROC_PER_NODE" in ended.out and "--grad_accum_steps" in ended.out and "set -euo" not in ended.out


def test_a_bad_flag_is_refused_once_before_any_process_is_started(tmp_path):
    ended = launch([SCRIPT, "--epohs", "3"], env={"PATH": PATH, "NPROC_PER_NODE": "2"})
    assert (ended.code, ended.err) == (2, "--epohs: is not known; did you mean --epochs?\n")


def test_a_real_run_and_its_exit_codes(tmp_path):
    env = {"PATH": PATH, "NPROC_PER_NODE": "2"}
    ended = launch([SCRIPT, *TINY, "--run_dir", tmp_path / "done"], env=env)
    assert ended.code == 0 and "completed: 1 epochs" in ended.out, ended.text
    ended = launch([SCRIPT, *TINY, "--run_dir", tmp_path / "done"], env=env)
    assert ended.code == 2 and "holds a run already" in ended.err


def test_the_last_line_of_a_failed_run_names_the_rank_that_failed_first(tmp_path):
    flags = [*TINY, "--dataset_size", "4000", "--epochs", "50", "--run_dir", tmp_path / "run"]
    program = start([SCRIPT, *flags], env={"PATH": PATH, "NPROC_PER_NODE": "2"})
    try:
        file, ends = tmp_path / "run" / "watch" / "rank1", time.monotonic() + 60
        while not ((place := read_place(file)) and place.step > 2) and time.monotonic() < ends:
            time.sleep(0.05)
        os.kill(place.pid, signal.SIGKILL)
        ended = finish(program, 60)
    finally:
        stop(program)
    assert ended.code == 1
    assert re.fullmatch(r"launch.sh: failed: rank 1 on \S+: rank 1 on \S+ was killed or cut off in .*auto", ended.err.splitlines()[-1])


def test_sigterm_to_the_script_saves_and_exits_75(tmp_path):
    flags = [*TINY, "--dataset_size", "4000", "--epochs", "50", "--log_interval", "1", "--run_dir", tmp_path / "run"]
    program = start([SCRIPT, *flags], env={"PATH": PATH, "NPROC_PER_NODE": "2"})
    try:
        ends = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < ends:
            time.sleep(0.1)
        os.kill(program.pid, signal.SIGTERM)
        ended = finish(program, 60)
    finally:
        stop(program)
    assert ended.code == 75, ended.text
    assert list((tmp_path / "run" / "checkpoints").glob("step_*.pt"))
