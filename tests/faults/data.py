# extra: template
"""Loader workers that die or hang."""

import os
import signal

from drill import Drill, fault

RUN = "--dataset_size 200 --epochs 2 --save_every_steps 5 --num_workers 1".split()  # 50 steps of two ranks


# torch says either, depending on which of its two checks comes first
KILLED = (
    r"rank 1: DataLoader worker \(pid.* (is killed by signal: Killed|exited unexpectedly)\. Give the job more memory"
)
STOPPED = r"no progress for 1\d s: rank 1 on \S+ hangs in data of step \d+ \(process \d+\)"


@fault("loader worker killed", signal.SIGKILL, KILLED, is_default=True, guarantees="worker-killed")
@fault("loader worker hangs", signal.SIGSTOP, STOPPED, guarantees="worker-killed")
def worker_fails(drill: Drill, number: int, said: str) -> None:
    """A rank that takes a batch from a stopped worker waits on the worker's socket: the watchdog ends it."""
    job = drill.held(2, 8, *RUN, "--hang_timeout", 12)
    worker = next(child for child in job.children(job.pid(1)) if os.getsid(child) != child)
    os.kill(worker, number)
    drill.let_go()
    drill.fails(job, said, rank=1, seconds=90)
    drill.resumes(2, *RUN)
