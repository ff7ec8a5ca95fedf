"""One run, one owner: a second job on the same folder, owners that are dead, and one that wakes up."""

import os
import re
import signal
import socket
import time
from pathlib import Path

from drill import AT_STEP, Drill, Fault, Job, says, slow_writer

RUN = ("--dataset_size", 200, "--epochs", 2, "--save_every_steps", 5, "--num_workers", 1)
WAITS = (
    f"{AT_STEP}\nfast_loss = train.compute_loss\n"
    "def compute(net, batch):\n    while STEP[0] == 20 and not (RUN.parent / 'go').exists():\n        time.sleep(0.05)\n"
    "    return fast_loss(net, batch)\ntrain.compute_loss = compute\n"
)
ELSEWHERE = "import socket\nsocket.gethostname = lambda: 'elsewhere'\n"
NO_LOCKS = "import fcntl\nfcntl.lockf = lambda *args: None\n"  # as where locks do not reach from host to host


def files_of(folder: Path) -> dict[Path, bytes]:
    """All but the logs, in which each job says its own."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != "logs"}


def refused_beside(drill: Drill, job: Job, code: str = "") -> float:
    """A second job on the folder of the first, which waits at step 20; the seconds until it had ended, refused."""
    job.wait_for_step(20)
    begin = time.monotonic()
    second = drill.run(2, *RUN, "--resume_from", "auto", code=code)
    seconds = time.monotonic() - begin
    assert (second.code, second.left) == (1, 0) and job.program.poll() is None
    who = rf"process {job.pid(0)} on {re.escape(socket.gethostname())} since \S+, for \d+\.\d min"
    says(second.text, rf"run_dir={job.folder}: is in use by {who}; end that job or give another --run_dir")
    (drill.folder / "go").touch()
    ended = job.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    drill.is_whole(2, *RUN)
    return seconds


def second_job(drill: Drill) -> float:
    return refused_beside(drill, drill.start(2, *RUN, code=WAITS))


def second_job_from_another_host(drill: Drill) -> float:
    return refused_beside(drill, drill.start(2, *RUN, code=WAITS), ELSEWHERE + NO_LOCKS)


def dead_owner(drill: Drill) -> float:
    """The second job, on another host, looks for a sign of life of the first, and finds none."""
    job = drill.start(2, *RUN, code=WAITS)
    job.wait_for_step(20)
    for pid in job.members():
        os.kill(pid, signal.SIGKILL)
    job.end()
    begin = time.monotonic()
    second = drill.start(2, *RUN, "--resume_from", "auto", code=ELSEWHERE)
    second.wait_for_step(1)
    seconds = time.monotonic() - begin
    ended = second.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    assert drill.json("claim.json")["host"] == "elsewhere" and drill.json("claim.json")["number"] == 2
    drill.is_whole(2, *RUN)
    return seconds


def owner_wakes_up(drill: Drill) -> float:
    """Stopped in a save, with all its processes; meanwhile another job goes on with the run and completes it."""
    job = drill.start(2, *RUN, code=slow_writer(1.0))
    job.wait_for(lambda: drill.runs.checkpoints("run"))
    job.wait_for_partial_file()
    for pid in job.members():
        os.kill(pid, signal.SIGSTOP)
    second = drill.run(2, *RUN, "--resume_from", "auto", code=ELSEWHERE + NO_LOCKS)
    assert (second.code, second.left) == (0, 0), second.text
    drill.is_whole(2, *RUN)
    before = files_of(drill.folder / "run")
    begin = time.monotonic()
    for pid in job.members():
        os.kill(pid, signal.SIGCONT)
    ended = job.end()
    seconds = time.monotonic() - begin
    assert (ended.code, ended.left) == (1, 0)
    says(ended.text, r": another job has taken over this run.*; end this one")
    after = files_of(drill.folder / "run")
    changed = {str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert not changed, changed
    return seconds


FAULTS = [
    Fault(
        "second job on the folder",
        "processes",
        "the same command while the run goes on",
        "refused with the owner's process, host and age; the run completes to the same bits",
        "s until it had ended",
        second_job,
    ),
    Fault(
        "second job from another host",
        "processes",
        "the same where locks do not reach from host to host",
        "refused by the owner's signs of life; the run completes to the same bits",
        "s until it had ended",
        second_job_from_another_host,
    ),
    Fault(
        "owner on another host is dead",
        "processes",
        "SIGKILL to all processes of the run, the same command on another host",
        "goes on after a look for signs of life, to the same bits",
        "s until it trains",
        dead_owner,
    ),
    Fault(
        "former owner wakes up",
        "processes",
        "SIGSTOP to all processes in a save, another job completes the run, SIGCONT",
        "commits nothing, changes nothing, ends with a sentence",
        "s until it ended",
        owner_wakes_up,
    ),
]
