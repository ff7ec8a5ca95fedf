# extra: template
"""Loader workers that die, hang or lack shared memory."""

import os
import signal

from disks import mounting
from drill import Drill, fault

RUN = "--dataset_size 200 --epochs 2 --save_every_steps 5 --num_workers 1".split()  # 50 steps of two ranks


# torch says either, depending on which of its two checks comes first
KILLED = r"rank 1: loader worker \d+ (was killed|died), usually because the machine ran out of memory; use fewer"
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


@fault("small shared memory", guarantees="worker-killed")
def small_shared_memory(drill: Drill) -> None:
    """1 MB, while two ranks may need 1.5 MB with two workers each, and 0.9 MB with one."""
    code = mounting("-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    run = "--batch_size 768 --dataset_size 6144 --epochs 1".split()
    said = r"/dev/shm: 1.0 MB are free, but 2 workers of each of 2 ranks may need 1.5 MB; .*, or use --num_workers 1"
    drill.fails(drill.start(2, *run, "--num_workers", 2, code=code), said)
    assert not (drill.folder / "run/metrics.jsonl").exists()
    drill.completes(2, *run, "--num_workers", 1, "--overwrite", code=code)
