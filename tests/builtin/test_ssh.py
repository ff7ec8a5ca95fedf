# extra: launcher and template
"""launch.sh --hosts with a real sshd on each of two nodes."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nodes import Nodes
from ranks import PATH, ROOT, finish, lack, need
from training import wait_for_step, wait_until

TINY = "--image_size 8 --batch_size 4 --num_workers 0 --backend gloo --timeout 10 --hang_timeout 20".split()
LONG = ["--dataset_size", 4000, "--epochs", 1000, "--save_every", 0, "--save_every_minutes", 0]
VALUE, SECRET = 'it\'s\n"here"', "not for ps"
SSHD = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
"""


class Cluster(Nodes):
    """Two nodes with sshd; the launcher runs on node 0."""

    def __init__(self, folder: Path) -> None:
        super().__init__(2)
        for tool in ("ssh", "sshd", "ssh-keygen"):
            need(tool)
        if os.geteuid() != 0:
            lack("sshd needs root")
        self.folder = folder / "ssh"
        self.folder.mkdir()

    def __enter__(self) -> "Cluster":
        super().__enter__()
        folder = self.folder
        self[0].do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
        (folder / "sshd_config").write_text(SSHD.format(folder=folder))
        wrapper = folder / "ssh"
        options = f"-i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F none {options} "$@"\n')
        wrapper.chmod(0o755)
        for node in self:
            self.serve(node)
        return self

    def serve(self, node) -> None:
        node.mount_tmpfs(Path("/run"), "1m")
        node.do("mkdir", "-p", "/run/sshd")
        self.daemon = node.start(["/usr/sbin/sshd", "-D", "-e", "-f", self.folder / "sshd_config"])
        wait_until(lambda: b"listening on 0.0.0.0" in os.pread(self.daemon.files[1].fileno(), 999, 0))

    def launch(self, *flags: object, hosts: str = "node0,node1"):
        env = {"PATH": f"{self.folder}:{PATH}", "NPROC_PER_NODE": "1", "A_VARIABLE": VALUE, "A_SECRET": SECRET}
        return self[0].start([ROOT / "scripts/launch.sh", "--hosts", hosts, *TINY, *flags], env=env)


@pytest.mark.slow
def test_ctrl_c_saves_and_stops_the_launch_on_all_hosts(tmp_path):
    with Cluster(tmp_path) as nodes:
        program = nodes.launch(*LONG, "--run_dir", tmp_path / "run")
        environ = Path(f"/proc/{wait_for_step(tmp_path / 'run', 1, 3)}/environ").read_bytes()
        listed = subprocess.check_output(["ps", "-e", "-o", "args"], text=True)
        os.killpg(program.pid, signal.SIGINT)
        ended = finish(program, 90)
    assert ended.code == 75 and ended.left == 0, ended.text
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "preempted"
    assert list((tmp_path / "run/checkpoints").glob("step_*.pt"))
    assert f"A_VARIABLE={VALUE}".encode() in environ and SECRET.encode() in environ
    assert SECRET not in ended.text + listed
    for line in (f"[{host}] launch.sh: The ranks get these variables: " for host in ("node0", "node1")):
        assert line in ended.err, ended.err
    assert "[node0 0] " in ended.out and "[node0] [node0" not in ended.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "flags", "code", "message"),
    [
        ("root@node0,node1", ["--dataset_size", 80, "--epochs", 1], 0, "completed: 1 epoch"),
        ("node0,node1", ["--dataset", "imagefolder", "--data_dir", "/nowhere"], 2, "--data_dir /nowhere has no"),
        ("node0,node9", [], 1, "launch.sh: node9 has no connection. Check that `ssh node9 true` works"),
    ],
)
def test_the_exit_code_is_that_of_the_job(tmp_path, hosts, flags, code, message):
    with Cluster(tmp_path) as nodes:
        ended = finish(nodes.launch("--run_dir", tmp_path / "run", *flags, hosts=hosts), 120)
    assert (ended.code, ended.left) == (code, 0) and message in ended.text, ended.text


@pytest.mark.slow
def test_a_host_that_reboots_under_the_same_name_continues_the_run(tmp_path):
    """All its processes are gone and its connections are not closed; ten seconds later it is back."""
    flags = ["--dataset_size", 160, "--epochs", 30, "--save_every_steps", 5, "--run_dir", tmp_path / "run"]
    with Cluster(tmp_path) as nodes:
        program = nodes.launch(*flags, "--retries", 4)
        wait_for_step(tmp_path / "run", 1, 12)
        nodes[1].link(up=False)
        own = os.readlink(f"/proc/{nodes[1].pid}/ns/uts")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if int(process.name) != nodes[1].pid and os.readlink(process / "ns/uts") == own:
                    os.kill(int(process.name), signal.SIGKILL)
        time.sleep(10)
        nodes[1].link(up=True)
        nodes.serve(nodes[1])
        ended = finish(program, 300)
    assert ended.code == 0 and "launch.sh: node1 has no connection." in ended.err, ended.text
    assert json.loads((tmp_path / "run/summary.json").read_text())["restarts"] == 1
