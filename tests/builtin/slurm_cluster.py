# extra: slurm and launcher and template
"""A real Slurm with one controller and two nodes on this machine: munged, slurmctld and two slurmd in namespaces.

Each node has its own network, address and host name. Everything runs below one process, in a private process and mount
namespace: when that process ends (with pytest at the latest), the kernel ends the daemons and every job.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from ranks import ROOT, Ended, finish, lack, launch, need, start

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter", "setpriv")
HOSTS = "127.0.0.1 localhost\n10.77.0.254 controller\n10.77.0.10 node0\n10.77.0.11 node1\n"
CONF = """
ClusterName=virtual
SlurmctldHost=controller
SlurmUser=root
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=20
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
ReturnToService=2
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/ended.txt
NodeName=node[0-1] CPUs=4
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=60 PreemptMode=OFF
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=9 PreemptMode=OFF
PartitionName=requeue Nodes=ALL MaxTime=60
PartitionName=grace Nodes=ALL MaxTime=60 PreemptMode=CANCEL GraceTime=60
PartitionName=cancel Nodes=ALL MaxTime=60 PreemptMode=CANCEL
"""
DAEMONS = """
set -e
cd {folder}
mount -t tmpfs none /run # what ip and munged leave there
mkdir /run/munge
mount --bind hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf # no name server answers here: nobody waits for one
hostname controller
ip link set lo up
ip link add bridge0 type bridge
ip addr add 10.77.0.254/24 dev bridge0
ip link set bridge0 up
for n in 0 1; do
    ip netns add node$n
    ip link add veth$n type veth peer name eth0 netns node$n
    ip link set veth$n master bridge0 up
    ip -n node$n addr add 10.77.0.1$n/24 dev eth0
    ip -n node$n link set lo up
    ip -n node$n link set eth0 up
done
munged --foreground --force --key-file=$PWD/munge.key --log-file=$PWD/munged.log --seed-file=$PWD/munged.seed &
while [ ! -S /run/munge/munge.socket.2 ]; do sleep 0.1; done
slurmctld -D -f $PWD/slurm.conf &
for n in 0 1; do
    start='hostname node$0; exec slurmd -D -N node$0 -f $PWD/slurm.conf'
    nsenter --net=/run/netns/node$n unshare --uts bash -c "$start" $n &
done
wait
"""


class Cluster:
    """Two nodes, node0 and node1, with four CPUs each. A context manager; needs root."""

    def __init__(self, folder: Path) -> None:
        for tool in TOOLS:
            need(tool)
        if os.geteuid() != 0:
            lack("a network for each node needs root")
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        (folder / "hosts").write_text(HOSTS)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "munge.key").write_bytes(bytes(range(128)))
        (folder / "munge.key").chmod(0o600)
        self._env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        own = "setpriv --pdeathsig KILL unshare --mount --net --uts --pid --fork --kill-child --mount-proc".split()
        self._program = start([*own, "bash", "-c", DAEMONS.format(folder=self.folder)], env=self._env)
        try:
            self.wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._program.kill()  # the kernel then ends its namespace
        finish(self._program)

    def run(self, *command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Ended:
        """Run a command on the controller."""
        children = Path(f"/proc/{self._program.pid}/task/{self._program.pid}/children").read_text().split()
        into = ["nsenter", "--mount", "--net", "--uts", "--pid", f"--wd={cwd}", "--target", *children[:1]]
        return launch([*into, *command], env=self._env | (env or {}))

    def submit(self, *words: str | Path, **options) -> int:
        ended = self.run("sbatch", "--parsable", *words, **options)
        assert ended.code == 0, ended.text
        return int(ended.out)

    def job(self, number: int | str) -> dict[str, str]:
        """Slurm's record of a job, or of a task of an array ("7_1"): JobState, Restarts, ExitCode, RunTime, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "--oneliner", str(number)).out))

    def wait_for(self, number: int | str, *states: str, deadline: float) -> dict[str, str]:
        ends = time.monotonic() + deadline
        while (job := self.job(number)).get("JobState") not in states:
            assert time.monotonic() < ends, f"job {number} is {job} after {deadline} s\n{self.story()}"
            time.sleep(0.3)
        return job

    def limit(self, number: int, minutes: int) -> None:
        """Change a job's time limit."""
        ended = self.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
        assert ended.code == 0, ended.text

    def wait_until_idle(self, deadline: float = 40) -> None:
        ends = time.monotonic() + deadline
        while self.run("sinfo", "--noheader", "--format=%T %D").out != "idle 2\n":
            assert self._program.poll() is None and time.monotonic() < ends, self.story()
            time.sleep(0.2)

    def story(self) -> str:
        """The last output of the daemons and the jobs."""
        texts = []
        for file in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            with contextlib.suppress(OSError):
                texts.append(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)
