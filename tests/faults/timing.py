# extra: template
"""Slow operations that must not end a run, stragglers that are reported, and the time limit."""

import os
import signal
import time

from drill import HOST, Drill, fault
from training import attempts_in, says

RUN = "--dataset_size 120 --epochs 2 --num_workers 1".split()  # 30 steps of two ranks
HANG_TIMEOUT = "--hang_timeout 12".split()
# 400 samples to evaluate on, in 50 steps
LONG_EVALUATION = "--dataset_size 2000 --max_steps 10 --num_workers 1".split()
HELD_UP = """
def hold_up(seconds):
    (RUN / 'began').exists() or (RUN / 'began').touch()
    time.sleep(seconds)
    (RUN / 'ended').touch()
"""
SLOW_EVALUATION = """
def before_loss(net):
    if not net.training and STEP and RANK == 0:
        hold_up(0.3)
"""
STALL = """
from torch.utils.data import get_worker_info
plain_fetch = Images.__getitems__
def stalling(self, indices):
    is_later = (RUN / 'metrics.jsonl').exists() and '"train"' in (RUN / 'metrics.jsonl').read_text()
    if RANK == 1 and get_worker_info() and self.split == 'train' and is_later and not (RUN / 'began').exists():
        hold_up(30)
    return plain_fetch(self, indices)
Images.__getitems__ = stalling
"""
SLOW_SAVE = """
from utils.checkpoint import archive
plain_write = archive.write_archive
def slow_write(*args, **options):
    if not (RUN / 'began').exists():
        hold_up(20)
    return plain_write(*args, **options)
archive.write_archive = slow_write
"""
RECOMPILE = """
def before_loss(net):
    if STEP == 20 and net.training:
        hold_up(15)
"""
PREPARES = """
plain_init = Images.__init__
def preparing(self, *args, **options):
    plain_init(self, *args, **options)
    if RANK == 1 and self.split == 'train' and not (RUN / 'ended').exists():
        hold_up(15)
Images.__init__ = preparing
"""


@fault("long evaluation", SLOW_EVALUATION, 14.9, LONG_EVALUATION, HANG_TIMEOUT, guarantees="hang")
@fault("read stall", STALL, 29.9, guarantees="hang")
@fault("slow save", SLOW_SAVE, 19.9, RUN, HANG_TIMEOUT, guarantees="hang")
@fault("recompile", RECOMPILE, 14.9, guarantees="hang")
@fault("long preparation", PREPARES, 14.9, RUN, ("--hang_timeout", 5, "--timeout", 8))
def goes_on(drill: Drill, code: str, is_held: float, run: list[str] = RUN, flags: list[str] = ()) -> None:
    """The code blocks the run for at least `is_held` seconds. A report is allowed, below half of --hang_timeout that it
    is slow."""
    ended = drill.completes(2, *run, *flags, code=HELD_UP + code, seconds=150)
    took = (drill.folder / "run/ended").stat().st_mtime - (drill.folder / "run/began").stat().st_mtime
    assert took > is_held
    assert drill.json("summary.json")["restarts"] == 0
    if not flags:
        says(ended.text, r"no progress for \d+ s: (rank 1 on \S+ is|all ranks are) slow in ")  # extra: watch
        assert " hangs " not in ended.text and not list((drill.folder / "run").glob("hang-*"))
    drill.is_whole(2, *run)


READS_SLOWLY = """
from torch.utils.data import get_worker_info
plain_fetch = Images.__getitems__
def waiting(self, indices):
    while RANK == 1 and get_worker_info() and self.split == 'train' and not os.path.exists(f'{FOLDER}/go'):
        time.sleep(0.01)
    return plain_fetch(self, indices)
Images.__getitems__ = waiting
"""


@fault("job suspended", 12, "forward")
@fault("job suspended while it reads", 1, "data", READS_SLOWLY)
def job_suspended(drill: Drill, step: int, phase: str, code: str = "") -> None:
    """As by `scontrol suspend` or a laptop's lid: all processes of the launch, for longer than --hang_timeout."""
    job = drill.start(2, *RUN, "--hang_timeout", 5, held_at=step, code=code)
    job.wait_for(lambda: (status := job.status(1)) and (status.step, status.phase) == (step, phase))
    for number, seconds in ((signal.SIGSTOP, 7), (signal.SIGCONT, 2)):
        for pid in job.members():
            os.kill(pid, number)
        time.sleep(seconds)
    drill.let_go()
    drill.has_completed(job)
    drill.is_whole(2, *RUN)


@fault("clock set forward", 3600, guarantees="clock-jump")
@fault("clock set back", -3600, guarantees="clock-jump")
def clock_jumps(drill: Drill, seconds: int) -> None:
    """Python's system clock jumps in step 12 on both ranks."""
    jump = f"plain_time = time.time\ntime.time = lambda: plain_time() + ({seconds} if STEP >= 12 else 0)\n"
    drill.completes(2, *RUN, "--max_time", 30, code=jump)
    assert [event["step"] for event in drill.events("checkpoint")] == [15, 30]  # none because of the time
    summary, (attempt,) = drill.json("summary.json"), attempts_in(drill.folder / "run")
    assert 0.5 < summary["wall_s"] < 60 and 0.5 < attempt.ended_at - attempt.started_at < 60
    assert sum(summary["time"].values()) < 60 and list((drill.folder / "run").glob("hang-*")) == []
    drill.is_whole(2, *RUN)


@fault("long upload", guarantees="command")  # extra: companions
def long_upload(drill: Drill) -> None:
    """The command of the last checkpoint takes longer than a hang or a collective may."""
    command = drill.folder / "upload"
    command.write_text(f"#!/bin/sh\nsleep 15\ntouch {drill.folder}/done\n")
    command.chmod(0o755)
    short = "--dataset_size 120 --epochs 1 --num_workers 0 --timeout 8 --hang_timeout 8".split()
    drill.completes(2, *short, "--on_checkpoint", command)
    assert (drill.folder / "done").exists() and drill.json("status.json")["state"] == "completed"


SLOW_COMPUTE = """
def before_loss(net):
    time.sleep(0.3 if net.training and (RANK == 1 or STEP <= 10) else 0)
"""
SLOW_DATA = """
plain_fetch = Images.__getitems__
def slow_fetch(self, indices):
    time.sleep(0.3 if self.split == 'train' and (RANK == 1 or STEP <= 10) else 0)
    return plain_fetch(self, indices)
Images.__getitems__ = slow_fetch
"""


@fault("straggler by its compute", SLOW_COMPUTE, "compute", is_default=True, guarantees="straggler")
@fault("straggler by its data", SLOW_DATA, "data", guarantees="straggler")
def straggles(drill: Drill, code: str, cause: str) -> None:
    """Both ranks take 0.3 s per step; rank 0 is fast after step 10, so that rank 1 is the straggler from then on."""
    ended = drill.completes(2, *"--dataset_size 160 --epochs 1 --num_workers 0".split(), code=code)
    events = drill.events("straggler")
    assert [event["step"] for event in events] == [15, 20], events
    assert all((event["rank"], event["cause"]) == (1, cause) for event in events), events
    says(ended.text, rf"Rank 1 on {HOST} is \d+\.\d times slower than the median rank because of its {cause}\.\n")
