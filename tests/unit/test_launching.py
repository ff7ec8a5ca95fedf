# extra: launcher
"""scripts/lib/launching: the command that launch.sh starts, what it rejects, and the exit code of an attempt."""

import dataclasses
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from config import TrainingConfig
from ranks import ROOT, launch
from scripts.lib.launching import __main__ as program
from scripts.lib.launching import hosts, supervise
from scripts.lib.launching import plan as planning
from scripts.lib.launching.rendezvous import Nodes
from scripts.lib.launching.supervise import determine_exit_code
from utils import cpus
from utils.settings.errors import UserError


@pytest.fixture
def plan(monkeypatch):
    """On a node at 10.0.0.2: the command that launch.sh would start, and the variables that it would set."""
    # so that torchrun is found
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(planning, "find_local_address", lambda address: "10.0.0.2")
    monkeypatch.setattr(planning, "find_interface", lambda address: "eth7")

    def make(*flags, **variables):
        options, rest = planning.read_flags([*map(str, flags)], variables)
        made = planning.create_launch_plan(options, rest, TrainingConfig.from_args(rest), variables)
        return made.command, made.settings

    return make


@pytest.mark.guarantee("launch")
def test_one_node(plan):
    words, settings = plan("--epochs", "3", "--data_dir", "my data", NPROC_PER_NODE="4")
    assert words[:3] == ["torchrun", "--nproc-per-node=4", "--standalone"]
    assert words[-5:] == ["train.py", "--epochs", "3", "--data_dir", "my data"]
    is_heard = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    assert "--tee=3" in words and ("SIGHUP" in settings["PET_SIGNALS_TO_HANDLE"]) == is_heard


def test_one_node_with_ipv6_alone_meets_at_its_loopback(plan, monkeypatch):
    """There torchrun's --standalone waits for the host's name, and gloo for 127.0.0.1."""
    monkeypatch.setattr(planning, "has_ipv4_loopback", lambda: False)
    words, settings = plan("--epochs", "3")
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:0", "--local-addr=::1"} < set(words)
    assert "--standalone" not in words and settings["GLOO_SOCKET_IFNAME"] == "eth7"
    assert plan()[0] != plan()[0]  # each launch has an id of its own, as with --standalone
    assert "GLOO_SOCKET_IFNAME" not in plan(GLOO_SOCKET_IFNAME="lo")[1]


@pytest.mark.guarantee("devices")
def test_gpus_without_nvidia_smi_are_counted_by_torch(plan, monkeypatch, tmp_path):
    """AMD's, and NVIDIA's in a container that lacks the tool."""
    (tmp_path / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(planning.shutil, "which", lambda name: None if name == "nvidia-smi" else f"/bin/{name}")
    monkeypatch.setattr(planning, "GPU_DRIVERS", (tmp_path / "kfd",))
    assert planning.count_gpus({}) == 0
    (tmp_path / "kfd").touch()
    assert planning.count_gpus({}) == 3 and planning.count_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}) == 2
    assert plan()[0][1] == "--nproc-per-node=3"


@pytest.mark.guarantee("devices")
@pytest.mark.parametrize("arguments", ["train.py", "-m scripts.lib.launching"])
def test_windows_is_rejected_in_one_sentence(arguments):
    """It lacks SIGUSR1."""
    how = f"runpy.run_path('{arguments}', run_name='__main__')"
    if arguments.startswith("-m "):
        how = f"runpy.run_module('{arguments[3:]}', run_name='__main__')"
    ended = launch([sys.executable, "-c", f"import signal, runpy; del signal.SIGUSR1; {how}"], cwd=ROOT)
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(r"Windows has no SIGUSR1, .*\. Start the training under WSL 2\.\n", ended.err), ended.err


@pytest.mark.guarantee("nodes")
def test_several_nodes_by_variables_and_by_flags(plan):
    variables = {
        "NNODES": "3",
        "NODE_RANK": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "NPROC_PER_NODE": "8",
    }
    words, settings = plan(**variables)
    assert words[:3] == ["torchrun", "--nproc-per-node=8", "--nnodes=3"]
    assert words[3:7] == ["--local-addr=10.0.0.2", "--node-rank=2", "--master-addr=10.0.0.1", "--master-port=1234"]
    flags = [word for name, value in variables.items() for word in (f"--{name.lower().replace('_', '-')}", value)]
    assert plan(*flags)[0] == words
    assert (settings["GLOO_SOCKET_IFNAME"], settings["NCCL_SOCKET_IFNAME"]) == ("eth7", "=eth7")
    words, _ = plan("--run_dir", "runs/x", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert {"--master-port=29500", "--rdzv-id=x"} <= set(words)


def test_no_flag_of_launch_sh_has_the_name_of_a_field_of_the_config():
    """It would never reach train.py."""
    own = {word.strip("-").replace("-", "_") for word in planning.create_parser({})._option_string_actions}
    fields = {field.name for field in dataclasses.fields(TrainingConfig)}
    assert {"nnodes", "hosts", "dry_run"} < own and not own & (fields | {"config", "print_config"})


def test_the_threads_of_a_process_follow_the_quota_of_the_container(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(cpus, "CGROUP_MOUNT", tmp_path)
    (tmp_path / "cpu.max").write_text("600000 100000\n")
    assert plan(NPROC_PER_NODE="2")[1]["OMP_NUM_THREADS"] == "3"


def test_variables_set_by_the_user_are_kept(plan):
    own = {"OMP_NUM_THREADS": "7", "NCCL_SOCKET_IFNAME": "^lo,docker", "TORCH_GLOO_LAZY_INIT": "0"}
    _, settings = plan(NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1", **own)
    assert "GLOO_SOCKET_IFNAME" in settings and not own.keys() & settings.keys()


@pytest.mark.parametrize("variables", [{"NNODES": "2", "MAX_RESTARTS": "3"}, {"NNODES": "1:3"}])
def test_restarts_and_a_changing_number_of_nodes_use_c10d(plan, variables):
    words, _ = plan(MASTER_ADDR="10.0.0.1", **variables)
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29500", "--rdzv-conf=is_host=0"} <= set(words)
    assert ("--max-restarts=3" in words) == ("MAX_RESTARTS" in variables)


PATIENCE = '{"epochs": 10, "max_steps": 0, "patience": 2, "best_metric": "auto"}'
RETURNS = [  # config.json, the flags of the start, whether nothing is left to do
    ("", [], True),  # it is lost
    ("", ["--epochs", "10"], True),
    ("", ["--epochs", "11"], False),
    (PATIENCE, ["--patience", "2"], True),
    (PATIENCE, ["--patience", "1"], True),
    (PATIENCE, ["--patience", "3"], False),
    (PATIENCE, [], False),
    (PATIENCE, ["--patience", "2", "--best_metric", "min:loss"], False),
]


@pytest.mark.parametrize(("saved", "more", "is_done"), RETURNS)
def test_a_node_that_returns_to_a_completed_run_does_not_wait_for_the_others(tmp_path, capsys, saved, more, is_done):
    """A start that asks for more is left to the ranks."""
    if saved:
        (tmp_path / "config.json").write_text(saved)
    (tmp_path / "status.json").write_text('{"state": "completed", "epoch": 10}')
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    code = program.main(["--resume_from", "auto", "--run_dir", str(tmp_path), "--dry-run", *more], nodes)
    is_said = "is completed. There is nothing left to do." in capsys.readouterr().err
    assert is_said == is_done and (code == 0 or not is_done)  # else it looks for torchrun, which may be there or not


CASES = [
    [],
    ["--dry-run"],
    ["--preflight"],  # extra: preflight
]


@pytest.mark.guarantee("nodes")
@pytest.mark.parametrize("more", CASES)
def test_each_node_creates_the_run_folder_before_its_ranks_look_for_it(plan, monkeypatch, tmp_path, more):
    """An NFS client remembers for up to 30 s that rank 0's folder does not exist."""
    exists, run = [], tmp_path / "run"
    monkeypatch.setattr(program.Launch, "run", lambda self: exists.append(run.is_dir()) or 0)
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NPROC_PER_NODE": "1"}
    assert program.main(["--run_dir", str(run), *more], variables) == 0
    assert exists == {"": [True], "--dry-run": [], "--preflight": [False]}["".join(more)] and run.is_dir() == (not more)


def test_debug_records_collectives_into_the_runs_folder(plan):
    _, settings = plan("--debug", "--run_dir", "runs/x")
    assert (
        settings["TORCH_FR_DUMP_TEMP_FILE"].startswith("runs/x/traces/flight-")
        and settings["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    )
    assert not {"NCCL_ALGO", "NCCL_PROTO"} & settings.keys()


def test_preflight_replaces_training(plan):  # extra: preflight
    assert plan("--preflight", "--epochs", "3")[0][-3:] == ["scripts/preflight.py", "--epochs", "3"]


def test_scaling_replaces_training(plan):  # extra: benchmark
    words = "scripts/benchmark.py --json s.json --run_dir r".split()
    assert plan("--scaling", "s.json", "--run_dir", "r")[0][-5:] == words


def test_hosts_starts_one_launch_per_host(capsys):
    words = ["--hosts", "me@a,b", "--lr", "1", "--dry-run", "--detach"]
    assert program.main(words, {}) == 0
    for rank, line in enumerate(capsys.readouterr().out.splitlines()):
        options, flags = planning.read_flags(shlex.split(line)[1:], {"NNODES": "7", "MASTER_ADDR": "c"})
        assert (options.nnodes, options.node_rank, options.master_addr) == ("2", str(rank), "a")
        assert (options.hosts, options.detach, flags) == ("", False, ["--lr", "1"])
    assert rank == 1


@pytest.mark.parametrize(("says", "code", "calls"), [("echo", 0, 2), ("", 255, 1)])
def test_a_host_is_connected_again_only_if_it_was_connected_before(tmp_path, monkeypatch, says, code, calls):
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\n{says}\necho >> {tmp_path}/calls\n[ `wc -l < {tmp_path}/calls` = 2 ] || exit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(hosts, "SIGNALS", ())
    monkeypatch.setattr(hosts, "RECONNECT_S", 0.1)
    options, words = planning.read_flags(["--hosts", "a"], {})
    assert hosts.Hosts(options, words, {}).run(reconnects=True) == (code and 1)
    assert (tmp_path / "calls").read_text() == "\n" * calls


def test_all_attempts_have_node_0s_id(tmp_path, monkeypatch):
    """Otherwise the second attempt takes the run in the folder for another launch's. Node 0 itself gets its own."""
    launch_ids = []
    monkeypatch.setattr(supervise, "find_nodes", lambda *args: launch_ids.append(args[2]) or "of node 0")
    nodes = Nodes(1, 2, -1, "a", 29500, "c10d")
    plan = planning.LaunchPlan(["true"], {}, nodes, tmp_path, retries=0, patience=0, is_training=False)
    env = {"LAUNCH_ID": "own", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error"), "PATH": os.environ["PATH"]}
    launch = supervise.Launch(plan, env)
    assert [launch._run_attempt(is_first) for is_first in (True, False)] == [0, 0] and launch_ids == [
        "own",
        "of node 0",
    ]


SECOND_OF_TWO = {"NNODES": "2", "NODE_RANK": "1"}


@pytest.mark.guarantee("misconfigured")
@pytest.mark.parametrize(
    ("variables", "pattern"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, r"MASTER_ADDR must be set, since NNODES is 2\. Give the name or address"),
        (
            {"NNODES": "2", "MASTER_ADDR": "a"},
            r"NODE_RANK must be set, since NNODES is 2\. Give each node its own number from 0 to 1\.",
        ),
        ({"NNODES": "3:2"}, r"NNODES must be an integer of at least 3, got 2\."),
        (
            SECOND_OF_TWO | {"RDZV_BACKEND": "static", "MAX_RESTARTS": "1"},
            r"MAX_RESTARTS=1 does not work .* static rendezvous hangs on a restart\. Unset",
        ),
        (SECOND_OF_TWO | {"RDZV_BACKEND": "etcd"}, r"RDZV_BACKEND must be static or c10d, got etcd\."),
        (SECOND_OF_TWO | {"MASTER_ADDR": "localhost"}, r"MASTER_ADDR=localhost is (127.0.0.1|::1) on .*\. Give"),
        (
            SECOND_OF_TWO | {"MASTER_ADDR": "no.invalid", "LAUNCH_WAIT": "1"},
            r"\S+ could not resolve MASTER_ADDR=no.invalid within .*\. Give",
        ),
        (
            SECOND_OF_TWO | {"MASTER_ADDR": "10.0.0.9", "GLOO_SOCKET_IFNAME": "eth77"},
            r"GLOO_SOCKET_IFNAME must name an interface of .*, got eth77\. Give",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "^lo"},
            r"GLOO_SOCKET_IFNAME must be interfaces such as eth0, .*, got \^lo\. Give one of .*lo",
        ),
        ({"GLOO_SOCKET_IFNAME": "=lo"}, r"GLOO_SOCKET_IFNAME must be interfaces such as eth0, .*, got =lo\. Give"),
        ({"NCCL_SOCKET_IFNAME": "=eth77"}, r"NCCL_SOCKET_IFNAME must name an interface of .*, got =eth77\. Give"),
        ({"LAUNCH_RETRIES": "x"}, r"LAUNCH_RETRIES must be an integer of at least 0, got x\."),
        ({"NNODES": "two"}, r"NNODES must be an integer of at least 1, got two\."),
        (
            {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"},
            r"NODE_RANK must be from 0 to 1, since NNODES is 2, got 2\.",
        ),
        ({"NODE_RANK": "-1"}, r"NODE_RANK must be an integer of at least 0, got -1\."),
        ({"NPROC_PER_NODE": "0"}, r"NPROC_PER_NODE must be an integer of at least 1, got 0\."),
        ({"MASTER_PORT": "99999"}, r"MASTER_PORT must be a port from 1024 to 65535, got 99999\."),
        ({"MASTER_PORT": "http"}, r"MASTER_PORT must be a port from 1024 to 65535, got http\."),
    ],
)
def test_invalid_variables_are_rejected(plan, variables, pattern):
    with pytest.raises(UserError, match=f"^{pattern}"):
        plan(**({"NPROC_PER_NODE": "1"} | variables))


OLD = '{"state": "preempted"}'
SAVED = '{"state": "preempted", "step": 9}'
FAILED = '{"state": "failed", "rank": 1, "host": "a", "error": "e"}'


@pytest.mark.guarantee("exit-codes")
@pytest.mark.parametrize(
    ("torchruns", "status", "message", "code", "expected"),
    [
        (0, '{"state": "completed"}', "", 0, ""),
        (1, OLD, 'UserError: --lr must be a number or "auto", got "x"', 2, ""),
        (1, OLD, "StartError: Rank 1 of 2 did not start within 5 s.", 1, ""),
        (1, SAVED, "", 75, ""),
        (0, SAVED, "", 75, ""),
        (1, OLD, "", 1, ""),  # the file of the previous attempt
        (1, FAILED, "", 1, "launch.sh: Rank 1 on a failed: e"),
        (1, '{"state": "running"}', "", 1, "Every rank was killed (torchrun's exit code: 1)."),
        (1, "", "", 1, ""),
    ],
)
def test_the_exit_code_of_an_attempt_follows_from_what_the_run_wrote(
    tmp_path, capsys, torchruns, status, message, code, expected
):
    file = tmp_path / "status.json"
    file.write_text(status)
    error = {"message": {"message": message}}
    assert determine_exit_code(torchruns, file, json.loads(OLD), error, is_alone=True) == code
    printed = capsys.readouterr().err
    assert expected in printed and bool(expected) == bool(printed)
    assert ("running" in status) == ('"failed"' in file.read_text() and status != FAILED)
