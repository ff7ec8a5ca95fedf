# extra: template
"""Processes that die: ranks, the launcher, the writer; once, or at the same step each time."""

import os
import signal

from drill import NO_SHARED_STORE, Drill, fault, slow_writer
from training import wait_until

RUN = "--dataset_size 200 --epochs 2 --save_every_steps 5 --num_workers 1".split()  # 50 steps of two ranks
FAILS_AT_7 = """
def before_loss(net):
    if (STEP, RANK) == (7, 1) and not os.path.exists(f'{FOLDER}/fixed'):
        raise KeyError('a bug of the fork')
"""
KILLED = r"Rank {} on \S+ was killed or cut off, last seen in .*\. Look for .* --resume_from auto"  # extra: watch


@fault("rank killed under default settings", guarantees="rank-killed")  # extra: watch
def killed_under_defaults(drill: Drill) -> None:
    """Three kills, at random steps after the first epoch; each repeats at most one epoch and the steps during a
    write."""
    run = "--dataset_size 200 --epochs 4 --num_workers 1 --resume_from auto".split()
    first, most = 30, 0
    for _ in range(3):
        step = drill.random.randrange(first + 5, first + 25)
        job = drill.held(2, step, *run)
        job.signal(drill.random.randrange(2), signal.SIGKILL)
        drill.let_go()
        drill.fails(job, KILLED.format(r"\d"), "checkpoints  every 10 min or 1 epoch, whichever comes first")
        drill.completes(2, *run, "--max_time", 0.001)  # prints where it resumes, and stops
        first = max(first, drill.events("resumed")[-1]["step"])
        most = max(most, drill.steps_lost(step))
        assert most <= 25 + 10, most
    drill.resumes(2, *run)


def rank_killed_at_12(drill: Drill, pattern: str = "", **options: object) -> None:  # extra: watch
    drill.fork(2, *RUN, "--max_steps", 1)
    # the ranks of a run that replaces another are watched too
    job = drill.held(2, 12, *RUN, "--overwrite", checkpoint_of=10, **options)
    job.signal(1, signal.SIGKILL)
    drill.let_go()
    drill.fails(job, KILLED.format(1), pattern, rank=1)
    drill.resumes(2, *RUN)


@fault("rank killed", is_default=True, guarantees="rank-killed")  # extra: watch
def rank_killed(drill: Drill) -> None:
    rank_killed_at_12(drill)


@fault("rank killed under torchrun", guarantees="rank-killed")  # extra: watch
def rank_killed_under_torchrun(drill: Drill) -> None:
    rank_killed_at_12(drill, r"Root Cause \(first observed failure\):(?s:.*)rank      : 1 ", is_real=True)


@fault("rank 0 killed in a save", guarantees="rank-killed")  # extra: watch
def rank_0_killed_in_a_save(drill: Drill) -> None:
    """Rank 0 normally writes status.json. The checkpoint is lost, not the one before."""
    job = drill.start(2, *RUN, code=slow_writer("60 * (path.name == 'step_00000010.pt')"))
    job.wait_for(lambda: len(drill.runs.checkpoints("run")) == 1)
    job.wait_for_partial_file()
    job.signal(0, signal.SIGKILL)
    drill.fails(job, KILLED.format(0), rank=0)
    drill.resumes(2, *RUN)


@fault("launcher killed", is_default=True, guarantees="launcher-killed")
def launcher_killed(drill: Drill) -> None:
    job = drill.held(2, 8, *RUN, code=slow_writer(60.0))
    job.wait_for_partial_file()
    assert len(job.members()) >= 5  # launcher, two ranks, their loaders' workers
    job.signal_launcher(signal.SIGKILL)
    job.program.wait()
    wait_until(lambda: not job.members(), 20)
    drill.resumes(2, *RUN)


@fault("rank killed under torchrun's restarts", guarantees="rank-killed")
def restarted_by_torchrun(drill: Drill) -> None:
    how = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --rdzv-id drill --max-restarts 3".split()
    job = drill.held(2, 12, *RUN, how=how, env=NO_SHARED_STORE)
    job.former = {status.pid for status in job.statuses(2)}
    os.kill(max(job.former), signal.SIGKILL)
    drill.let_go()
    drill.has_completed(job)
    assert drill.json("status.json")["state"] == "completed" and drill.json("summary.json")["restarts"] == 1
    drill.is_whole(2, *RUN)


@fault("fails at the same step each time", is_default=True, guarantees="own-error")
def relaunches_in_vain(drill: Drill) -> None:
    flags = (
        "--dataset_size 78 --epochs 2 --save_every 0 --save_every_steps 5 --num_workers 1 --resume_from auto".split()
    )
    pattern = "Rank 1 on .* failed: KeyError: 'a bug of the fork'"
    for _ in range(2):
        drill.fails(drill.start(2, *flags, code=FAILS_AT_7), "'a bug of the fork'", pattern, rank=1)
        assert drill.json("status.json")["step"] == 6
    (drill.folder / "fixed").touch()
    drill.completes(2, *flags, code=FAILS_AT_7)
    drill.is_whole(2, *flags)
