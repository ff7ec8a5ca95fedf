# extra: template
"""One run, one owner: a second job on the same folder, owners that are dead, and one that wakes up."""

import os
import signal

from drill import HOST, Drill, fault, slow_writer
from processes import RUN
from training import says

ELSEWHERE = "import socket\nsocket.gethostname = lambda: 'elsewhere'\n"
REBOOTED = """
from utils.run import run_lock
run_lock.BOOT_ID_FILE = RUN.with_name("boot")
run_lock.BOOT_ID_FILE.write_text("another")
"""
NO_LOCKS = "import fcntl\nfcntl.lockf = lambda *args: None\n"  # as on storage where locks do not work across hosts


@fault("second job on the folder", "", is_default=True, guarantees="one-owner")
@fault("second job from another host", ELSEWHERE + NO_LOCKS, guarantees="one-owner")
@fault("second job from a host of the same name", REBOOTED + NO_LOCKS, guarantees="one-owner")
def second_job(drill: Drill, code: str) -> None:
    job = drill.held(2, 20, *RUN)
    holder = rf"process {job.pid(0)} on {HOST} since \S+, for \d+\.\d min"
    second = drill.start(2, *RUN, "--resume_from", "auto", code=code).end()
    assert (second.code, second.left) == (1, 0) and job.program.poll() is None
    says(second.text, rf"--run_dir {job.folder} is in use by {holder}\. End that job or give another --run_dir\.")
    drill.let_go()
    drill.has_completed(job)
    drill.is_whole(2, *RUN)


@fault("owner on another host is dead", ELSEWHERE, "host", "elsewhere", guarantees="one-owner")
@fault("node of the owner has rebooted", REBOOTED, "boot", "another", guarantees="one-owner")
def dead_owner(drill: Drill, code: str, name: str, value: str) -> None:
    job = drill.held(2, 20, *RUN)
    for pid in job.members():
        os.kill(pid, signal.SIGKILL)
    job.end()
    drill.completes(2, *RUN, "--resume_from", "auto", code=code)
    assert drill.json("lock.json")[name] == value
    drill.is_whole(2, *RUN)


@fault("former owner wakes up", guarantees="one-owner")
def owner_wakes_up(drill: Drill) -> None:
    job = drill.start(2, *RUN, code=slow_writer(1.0))
    job.wait_for(lambda: drill.runs.checkpoints("run"))
    job.wait_for_partial_file()
    for pid in job.members():
        os.kill(pid, signal.SIGSTOP)
    drill.completes(2, *RUN, "--resume_from", "auto", code=ELSEWHERE + NO_LOCKS)
    drill.is_whole(2, *RUN)
    with drill.unchanged():
        for pid in job.members():
            os.kill(pid, signal.SIGCONT)
        drill.fails(
            job,
            r"Another job has taken over .*, so this job ends\. Start one job for each --run_dir\.",
            has_status=False,
        )
