"""scripts/launch.sh: the line it makes, what it refuses, and real runs with the contract's exit codes."""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from ranks import ROOT, finish, launch, need, start, stop
from scripts.network import addresses, interface_of
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
    assert words[:3] == ["torchrun", "--nproc-per-node=4", "--standalone"]
    assert words[-5:] == ["train.py", "--epochs", "3", "--data_dir", "my data"]
    assert "--tee=3" in words and any("SIGHUP" in word for word in words) == (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)


OWN = next((address.split("/")[0] for name, address in addresses().items() if name != "lo"), "")
two_nodes = pytest.mark.skipif(not OWN, reason="this machine has no address beside its loopback's")


@two_nodes
def test_several_nodes_by_variables_and_by_flags():
    variables = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": OWN, "MASTER_PORT": "1234", "NPROC_PER_NODE": "8"}
    ended, words = line(**variables)
    assert words[:6] == ["torchrun", "--nproc-per-node=8", "--nnodes=3", f"--local-addr={OWN}", "--node-rank=2", f"--master-addr={OWN}"]
    flags = [word for name, value in variables.items() for word in (f"--{name.lower().replace('_', '-')}", value)]
    assert line(*flags)[1] == words
    assert f"GLOO_SOCKET_IFNAME={interface_of(OWN)}" in ended.err and f"NCCL_SOCKET_IFNAME=={interface_of(OWN)}" in ended.err
    assert "--master-port=29500" in line(NNODES="2", NODE_RANK="1", MASTER_ADDR=OWN)[1]


@two_nodes
def test_what_the_user_has_set_stays():
    ended, _ = line(NNODES="2", NODE_RANK="1", MASTER_ADDR=OWN, OMP_NUM_THREADS="7", GLOO_SOCKET_IFNAME="lo", TORCH_GLOO_LAZY_INIT="0")
    assert "NCCL_SOCKET_IFNAME" in ended.err
    assert not any(name in ended.err for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT"))


@two_nodes
def test_restarts_and_a_changing_number_of_nodes_take_c10d():
    for variables in ({"NNODES": "2", "MAX_RESTARTS": "3"}, {"NNODES": "1:3"}):
        _, words = line(MASTER_ADDR=OWN, **variables)
        assert "--rdzv-backend=c10d" in words and f"--rdzv-endpoint={OWN}:29500" in words and "--rdzv-conf=is_host=1" in words
    assert "--max-restarts=3" in line(MAX_RESTARTS="3")[1]


@two_nodes
def test_a_node_that_comes_back_to_a_completed_run_does_not_wait_for_the_others(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "completed"}')
    flags = ["--resume_from", "auto", "--run_dir", tmp_path]
    ended = launch([SCRIPT, *flags], env={"PATH": PATH, "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": OWN}, deadline=20)
    assert ended.code == 0 and "this run is completed, nothing is left to do" in ended.err


def test_debug_records_collectives_into_the_runs_folder():
    ended, _ = line("--debug", "--run_dir", "runs/x")
    assert "TORCH_FR_DUMP_TEMP_FILE=runs/x/traces/flight-" in ended.err and "TORCH_DISTRIBUTED_DEBUG=INFO" in ended.err
    assert "NCCL_ALGO" not in ended.err and "NCCL_PROTO" not in ended.err


def test_preflight_takes_the_place_of_training():
    assert line("--preflight", "--epochs", "3")[1][-3:] == ["scripts/preflight.py", "--epochs", "3"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: is not set, with NNODES=2; give"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK: is not set, with NNODES=2; give this node its number, 0 to 1"),
        ({"NNODES": "3:2"}, "NNODES=2: is no whole number of at least 3"),
        ({"NNODES": "2", "NODE_RANK": "1", "RDZV_BACKEND": "static", "MAX_RESTARTS": "1"}, "MAX_RESTARTS=1: static rendezvous hangs"),
        ({"NNODES": "2", "NODE_RANK": "1", "RDZV_BACKEND": "etcd"}, "RDZV_BACKEND=etcd: is not known; give"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost: is (127.0.0.1|::1) on .*; give"),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no.invalid", "LAUNCH_PATIENCE": "1"},
            "MASTER_ADDR=no.invalid: .* cannot resolve",
        ),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.9", "GLOO_SOCKET_IFNAME": "eth77"},
            "GLOO_SOCKET_IFNAME=eth77: .* no interface",
        ),
        ({"NPROC_PER_NODE": "3", "CUDA_VISIBLE_DEVICES": "0,1"}, "NPROC_PER_NODE=3: .* shows 2 GPU.s.; give at most 2"),
        ({"LAUNCH_RETRIES": "x"}, "LAUNCH_RETRIES=x: is no whole number"),
        ({"NNODES": "two"}, "NNODES=two: is no whole number of at least 1; give"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK=2: is outside NNODES=2; give 0 to 1"),
        ({"NODE_RANK": "-1"}, "NODE_RANK=-1: is no whole number"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0: is no whole number of at least 1"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: is no port; give"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: is no whole number"),
    ],
)
def test_variables_that_make_no_sense_are_refused(variables, said):
    ended, _ = line(**{"NPROC_PER_NODE": "1", **variables})
    assert ended.code == 2 and re.search(rf"launch.sh: (\S+: )?{said}", ended.err), ended.err


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


def test_the_flight_recorder_finds_a_folder_to_write_into(tmp_path):
    ended = launch([SCRIPT, *TINY, "--debug", "--run_dir", tmp_path / "run"], env={"PATH": PATH, "NPROC_PER_NODE": "2"})
    assert ended.code == 0 and (tmp_path / "run" / "traces").is_dir(), ended.text


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


def wait_for(is_so, seconds=90, what=""):
    ends = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < ends, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found


def test_detached_with_a_retry_it_outlives_its_terminal_and_a_killed_rank(tmp_path):
    """The run is what an undisturbed one is; what is refused is not tried again."""
    run = tmp_path / "run"
    flags = [*TINY, "--dataset_size", "400", "--save_every_steps", "10", "--run_dir", run]
    env = {"PATH": PATH, "NPROC_PER_NODE": "2"}
    program = start([SCRIPT, *flags, "--detach", "--retries", "2"], env=env)
    try:
        assert program.wait(30) == 0
        program.files[0].seek(0)
        pid, log = re.search(r"process (\d+) goes on by itself; tail -f (\S+) ", program.files[0].read()).groups()
        place = wait_for(lambda: (place := read_place(run / "watch" / "rank1")) and place.step > 20 and place, what=Path(log).read_text())
        os.kill(place.pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), what=Path(log).read_text())
    finally:
        stop(program)
    text = Path(log).read_text()
    assert "launch.sh: ended with 1; start 2 of 3 follows in 5 s" in text and text.count("completed: 1 epochs") == 1, text
    ended = launch([SCRIPT, *flags, "--retries", "2"], env=env)
    assert ended.code == 2 and "follows in" not in ended.err


def test_as_process_1_it_passes_a_stop_on_and_exits_75(tmp_path):
    """As in a container: nobody else is there to reap or to signal."""
    need("unshare")
    run = tmp_path / "run"
    flags = [*TINY, "--dataset_size", "4000", "--epochs", "50", "--run_dir", run]
    program = start(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", SCRIPT, *flags], env={"PATH": PATH, "NPROC_PER_NODE": "2"}
    )
    try:
        wait_for(lambda: (place := read_place(run / "watch" / "rank1")) and place.step > 2)
        script = int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text())
        os.kill(script, signal.SIGTERM)
        ended = finish(program, 60)
    finally:
        stop(program)
    assert ended.code == 75, ended.text
    assert list((run / "checkpoints").glob("step_*.pt"))
