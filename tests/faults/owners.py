"""One run, one owner: a second job on the same folder, owners that are dead, and one that wakes up."""

import os
import signal
import time

from drill import HOST, Drill, fault, says, slow_writer
from processes import RUN

ELSEWHERE = "import socket\nsocket.gethostname = lambda: 'elsewhere'\n"
NO_LOCKS = "import fcntl\nfcntl.lockf = lambda *args: None\n"  # as where locks do not reach from host to host


@fault(
    "second job on the folder",
    "the same command while the run is under way",
    "refused with the owner's process, host and age; the run completes to the same bits",
    "s until it had ended",
    "",
    is_default=True,
)
@fault(
    "second job from another host",
    "the same where locks do not reach from host to host",
    "refused by the owner's signs of life; the run completes to the same bits",
    "s until it had ended",
    ELSEWHERE + NO_LOCKS,
)
def second_job(drill: Drill, code: str) -> float:
    job = drill.held(2, 20, *RUN)
    begin = time.monotonic()
    second = drill.start(2, *RUN, "--resume_from", "auto", code=code).end()
    seconds = time.monotonic() - begin
    assert (second.code, second.left) == (1, 0) and job.program.poll() is None
    who = rf"process {job.pid(0)} on {HOST} since \S+, for \d+\.\d min"
    says(second.text, rf"run_dir={job.folder}: is in use by {who}; end that job or give another --run_dir")
    drill.let_go()
    drill.has_completed(job)
    drill.is_whole(2, *RUN)
    return seconds


@fault(
    "owner on another host is dead",
    "SIGKILL to all processes of the run, the same command on another host",
    "goes on after a look for signs of life, to the same bits",
    "s until it trains",
)
def dead_owner(drill: Drill) -> float:
    job = drill.held(2, 20, *RUN)
    for pid in job.members():
        os.kill(pid, signal.SIGKILL)
    job.end()
    begin = time.monotonic()
    second = drill.start(2, *RUN, "--resume_from", "auto", code=ELSEWHERE)
    second.wait_for_step(1)
    seconds = time.monotonic() - begin
    drill.has_completed(second)
    assert drill.json("claim.json")["host"] == "elsewhere" and drill.json("claim.json")["number"] == 2
    drill.is_whole(2, *RUN)
    return seconds


@fault(
    "former owner wakes up",
    "SIGSTOP to all processes in a save, another job completes the run, SIGCONT",
    "commits nothing, changes nothing, ends with a sentence",
    "s until it ended",
)
def owner_wakes_up(drill: Drill) -> float:
    job = drill.start(2, *RUN, code=slow_writer(1.0))
    job.wait_for(lambda: drill.runs.checkpoints("run"))
    job.wait_for_partial_file()
    for pid in job.members():
        os.kill(pid, signal.SIGSTOP)
    drill.completes(2, *RUN, "--resume_from", "auto", code=ELSEWHERE + NO_LOCKS)
    drill.is_whole(2, *RUN)
    begin = time.monotonic()
    with drill.unchanged():
        for pid in job.members():
            os.kill(pid, signal.SIGCONT)
        drill.fails(job, r": another job has taken over this run.*; end this one", has_status=False)
    return time.monotonic() - begin
