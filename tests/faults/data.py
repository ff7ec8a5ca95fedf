# extra: template
"""Loader workers that die or hang."""

import os
import signal

from drill import Drill, fault

RUN = "--dataset_size 200 --epochs 2 --save_every_steps 5 --num_workers 1".split()  # 50 steps of two ranks


# torch says either, depending on which of its two checks comes first
DIED = (
    r" failed: DataLoader worker \(pid.* (is killed by signal: Killed|exited unexpectedly)\."
    r" If .* give the job more memory or a"
)
STOPPED = r"no progress for 1\d s: rank 1 on \S+ hangs in data of step \d+ \(process \d+\)"  # extra: watch


@fault("loader worker killed", 2, signal.SIGKILL, rf"Rank 1{DIED}", is_default=True, guarantees="worker-killed")
@fault("loader worker of one rank killed", 1, signal.SIGKILL, rf"Rank 0{DIED}", guarantees="worker-killed")
@fault("loader worker hangs", 2, signal.SIGSTOP, STOPPED, guarantees="hang")  # extra: watch
def worker_fails(drill: Drill, ranks: int, number: int, pattern: str) -> None:
    """The signal goes to a worker of the last rank. A rank that takes a batch from a stopped worker waits on the
    worker's socket, and the watchdog ends it."""
    flags = [*RUN]
    flags += ["--hang_timeout", "12"]  # extra: watch
    job = drill.held(ranks, 8, *flags)
    worker = next(child for child in job.children(job.pid(ranks - 1)) if os.getsid(child) != child)
    os.kill(worker, number)
    drill.let_go()
    drill.fails(job, pattern, rank=ranks - 1, seconds=90)
    drill.resumes(ranks, *RUN)
