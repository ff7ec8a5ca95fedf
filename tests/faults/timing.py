"""Ranks that stand still, hang or are slow: named in time, ended late, and never ended where they only take their time."""

import json
import re
import time
from pathlib import Path

from drill import AT_STEP, Drill, Fault, says
from standstills import HOST, stop_and_see, undisturbed

RUN = ("--dataset_size", 120, "--epochs", 2, "--num_workers", 1)  # 30 steps of two ranks
HANG_TIMEOUT = ("--hang_timeout", 12)
RESTART = {"how": ("--standalone", "--max-restarts=1"), "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}

# ---- a rank that is stopped ----


def rank_stopped(drill: Drill) -> float:
    cases = [("backward", 0), ("evaluation", 2)]
    longest = stop_and_see(drill, cases)
    drill.is_like(undisturbed(drill.folder / "undisturbed", len(cases)))
    return longest


# ---- a rank that hangs ----

HANGS = f"""{AT_STEP}
def hanging_loss(net, batch):
    if RANK == 1 and STEP[0] == 12 and not (RUN / 'hung').exists():
        (RUN / 'hung').touch()
        time.sleep(3600)
    return slow_loss(net, batch)
train.compute_loss = hanging_loss
"""
SENTENCE = rf"no progress for \d+ s: rank 1 on {HOST} hangs in forward of step 12 \(process \d+\) \(hang_timeout=12\); mend what the stacks in (\S+) show"


def since(file: Path) -> float:
    """Seconds since the file was made."""
    return time.time() - file.stat().st_mtime


def rank_hangs(drill: Drill) -> float:
    """For ever, in compute_loss."""
    job = drill.start(2, *RUN, *HANG_TIMEOUT, code=HANGS)
    ended = job.end(120)
    took = since(job.folder / "hung")
    assert (ended.code, ended.left) == (1, 0), ended.text
    status = drill.json("status.json")
    assert (status["state"], status["rank"], status["host"]) == ("failed", 1, HOST)
    says(status["error"], SENTENCE)
    says(ended.text, rf"(?s)Root Cause \(first observed failure\):.*RunFailed: {SENTENCE}")
    stacks = Path(re.search(SENTENCE, status["error"])[1]).read_text()
    line = 1 + (drill.folder / "program.py").read_text().splitlines().index("        time.sleep(3600)")
    says(stacks, rf'(?s)--- rank 1 on {HOST}\n.*program.py", line {line} in hanging_loss')
    return took


def rank_hangs_and_restarts(drill: Drill) -> float:
    ended = drill.run(2, *RUN, *HANG_TIMEOUT, "--save_every_steps", 5, code=HANGS, seconds=150, **RESTART)
    assert (ended.code, ended.left) == (0, 0), ended.text
    assert drill.json("status.json")["state"] == "completed" and drill.json("summary.json")["restarts"] == 1
    says(ended.text, rf"no progress for \d+ s: rank 1 on {HOST} hangs in forward of step 12 .*; the stacks of all ranks: ")
    drill.is_whole(2, *RUN, "--save_every_steps", 5)
    return drill.steps_lost(12)


# ---- what takes its time, and must not be ended ----


def goes_on(drill: Drill, code: str, *flags: object, is_held: float, run: tuple = RUN) -> float:
    """The run completes with the undisturbed bits, though it was held up for so long. The seconds that this took.

    The code says in RUN/began and RUN/ended when it held up the run. A report may be made.
    """
    ended = drill.run(2, *run, *flags, code=AT_STEP + code, seconds=150)
    assert (ended.code, ended.left) == (0, 0), ended.text
    took = (drill.folder / "run/ended").stat().st_mtime - (drill.folder / "run/began").stat().st_mtime
    assert took > is_held
    assert drill.json("summary.json")["restarts"] == 0
    drill.is_whole(2, *run)
    return took


def breakpoint_held(drill: Drill) -> float:
    """At pdb's prompt, whose input comes after 15 s."""
    code = """
import threading
def debugged_loss(net, batch):
    if RANK == 1 and STEP[0] == 12 and net.training:
        ours, its = os.pipe()
        sys.stdin = os.fdopen(ours)
        threading.Timer(15, lambda: ((RUN / 'ended').touch(), os.write(its, b'c\\n'))).start()
        (RUN / 'began').touch()
        breakpoint()
    return slow_loss(net, batch)
train.compute_loss = debugged_loss
"""
    return goes_on(drill, code, *HANG_TIMEOUT, is_held=14.9)


def long_evaluation(drill: Drill) -> float:
    """Of 50 steps, for each of which rank 1 waits."""
    code = """
def slow_evaluation(net, batch):
    if not net.training and STEP[0] and RANK == 0:
        (RUN / 'began').exists() or (RUN / 'began').touch()
        time.sleep(0.3)
        (RUN / 'ended').touch()
    return slow_loss(net, batch)
train.compute_loss = slow_evaluation
"""
    run = ("--dataset_size", 2000, "--max_steps", 10, "--num_workers", 1)  # 400 samples to evaluate on
    return goes_on(drill, code, *HANG_TIMEOUT, run=run, is_held=14.9)


def read_stall(drill: Drill) -> float:
    """Under default flags."""
    code = """
from dataset import InMemoryImages
from torch.utils.data import get_worker_info
plain_fetch = InMemoryImages.__getitems__
def stalling(self, indices):
    if RANK == 1 and get_worker_info() and self.split == 'train' and not (RUN / 'began').exists() and (RUN / 'metrics.jsonl').exists():
        (RUN / 'began').touch()
        time.sleep(30)
        (RUN / 'ended').touch()
    return plain_fetch(self, indices)
InMemoryImages.__getitems__ = stalling
"""
    return goes_on(drill, code, is_held=29.9)


def slow_save(drill: Drill) -> float:
    """The writer takes 20 s for the first checkpoint; the end of the run waits for it."""
    code = """
from utils import checkpoint
plain_write = checkpoint.write
def slow_write(*args, **options):
    if not (RUN / 'began').exists():
        (RUN / 'began').touch()
        time.sleep(20)
        (RUN / 'ended').touch()
    return plain_write(*args, **options)
checkpoint.write = slow_write
"""
    return goes_on(drill, code, *HANG_TIMEOUT, is_held=19.9)


def recompile(drill: Drill) -> float:
    """One step of 15 s on all ranks, under default flags."""
    code = """
def compiled_loss(net, batch):
    if STEP[0] == 20 and net.training:
        (RUN / 'began').touch()
        time.sleep(15)
        (RUN / 'ended').touch()
    return slow_loss(net, batch)
train.compute_loss = compiled_loss
"""
    return goes_on(drill, code, is_held=14.9)


# ---- a rank that is slow ----


def straggles(drill: Drill, code: str, cause: str) -> float:
    """All ranks take 0.3 s for a step; rank 0 no longer after step 10, which makes rank 1 the straggler from there on."""
    ended = drill.run(2, "--dataset_size", 160, "--epochs", 1, "--num_workers", 0, code=AT_STEP + code)
    assert ended.code == 0, ended.text
    events = drill.events("straggler")
    assert [event["step"] for event in events] == [15, 20], events
    assert all((event["rank"], event["host"], event["cause"]) == (1, HOST, cause) for event in events), events
    says(ended.text, rf"rank 1 on {HOST} is \d+\.\d times slower than the median of all ranks, by its {cause}\n")
    return min(event["times"] for event in events)


def straggler_by_data(drill: Drill) -> float:
    code = """
from dataset import InMemoryImages
plain_fetch = InMemoryImages.__getitems__
def slow_fetch(self, indices):
    time.sleep(0.3 if self.split == 'train' and (RANK == 1 or STEP[0] <= 10) else 0)
    return plain_fetch(self, indices)
InMemoryImages.__getitems__ = slow_fetch
"""
    return straggles(drill, code, "data")


def straggler_by_compute(drill: Drill) -> float:
    code = """
def uneven_loss(net, batch):
    time.sleep(0.3 if net.training and (RANK == 1 or STEP[0] <= 10) else 0)
    return slow_loss(net, batch)
train.compute_loss = uneven_loss
"""
    return straggles(drill, code, "compute")


# ---- the time limit ----


def time_is_up(drill: Drill) -> float:
    code = """
def slower_loss(net, batch):
    time.sleep(0.3 if net.training else 0)
    return plain_loss(net, batch)
train.compute_loss = slower_loss
"""
    run = ("--dataset_size", 400, "--epochs", 2, "--num_workers", 1)  # 100 steps, of 30 s at least
    ended = drill.run(2, *run, "--max_time", 0.2, code=code)
    assert (ended.code, ended.left) == (0, 0), ended.text
    status = drill.json("status.json")
    assert status["state"] == "preempted" and 0 < status["step"] < 100
    last = [json.loads((drill.folder / f"run/samples/rank{rank}.jsonl").read_text().splitlines()[-1])["step"] for rank in range(2)]
    assert last == [status["step"]] * 2
    assert drill.run(2, *run, "--resume_from", "auto").code == 0
    drill.is_whole(2, *run)
    lost = drill.steps_lost(status["step"])
    assert lost == 0
    return lost


FAULTS = [
    Fault(
        "rank stopped",
        "time",
        "SIGSTOP of rank 0 in a backward pass, of rank 2 in an evaluation (tests/multiprocess/test_hangs.py: 5 phases x 4 ranks)",
        "named once with host, phase and stacks of the others; after SIGCONT it goes on to the same bits",
        "s to the report",
        rank_stopped,
    ),
    Fault(
        "rank hangs",
        "time",
        "rank 1 sleeps for ever in compute_loss; hang_timeout 12 s",
        "ended; rank, host and phase in status.json and in torchrun's summary, the sleeping line in the stacks",
        "s to the end",
        rank_hangs,
    ),
    Fault(
        "rank hangs and is restarted",
        "time",
        "the same, once, under torchrun --max-restarts 1",
        "restarted by torchrun, completed to the same bits",
        "steps made again",
        rank_hangs_and_restarts,
    ),
    Fault(
        "breakpoint",
        "time",
        "breakpoint() in rank 1, 15 s at the prompt; hang_timeout 12 s",
        "not ended; completed to the same bits",
        "s at the prompt",
        breakpoint_held,
    ),
    Fault(
        "long evaluation",
        "time",
        "an evaluation of 50 steps, 0.3 s each on rank 0; hang_timeout 12 s",
        "not ended; completed to the same bits",
        "s of evaluation",
        long_evaluation,
    ),
    Fault(
        "read stall",
        "time",
        "a read of 30 s on rank 1, default flags",
        "not ended; completed to the same bits",
        "s of the read",
        read_stall,
    ),
    Fault(
        "slow save",
        "time",
        "the writer takes 20 s for a file; hang_timeout 12 s",
        "not ended; completed to the same bits",
        "s of the save",
        slow_save,
    ),
    Fault(
        "recompile",
        "time",
        "one step of 15 s on both ranks after steps of 0.02 s, default flags",
        "not ended; completed to the same bits",
        "s of the step",
        recompile,
    ),
    Fault(
        "straggler by its data",
        "time",
        "rank 1 reads for 0.3 s a step, from step 10 on rank 0 does not",
        "named with host and cause in events and log from there on, not before",
        "times the median",
        straggler_by_data,
    ),
    Fault(
        "straggler by its compute",
        "time",
        "rank 1 computes for 0.3 s a step, from step 10 on rank 0 does not",
        "named with host and cause in events and log from there on, not before",
        "times the median",
        straggler_by_compute,
    ),
    Fault(
        "time is up",
        "time",
        "--max_time of 12 s",
        "all ranks save and stop after the same step, preempted, exit code 0; goes on to the same bits",
        "steps made again",
        time_is_up,
    ),
]
