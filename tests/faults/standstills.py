"""A rank that stops itself in a phase of the loop, and what the others are to say of it."""

import os
import re
import signal
import socket
import time
from pathlib import Path

from drill import AT_STEP, FLAGS, Drill
from ranks import run_ranks
from tasks import BUCKETS, train_task
from utils.watchdog import LEAST_LIMIT

HOST = socket.gethostname()
STOPS = f"""{AT_STEP}
import signal
from dataset import InMemoryImages
from tasks import TASKS
from utils.train_state import TrainState

def here(phase):
    asked = RUN / f'stop-{{RANK}}-{{phase}}'
    if asked.exists():
        asked.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)

def before(owner, name, phase_of):
    plain = getattr(owner, name)
    def stopping(*args):
        here(phase_of(args[0]))
        return plain(*args)
    setattr(owner, name, stopping)

train.create_model, train.compute_loss = TASKS['images']['create_model'], plain_loss  # a step of four ranks takes 20 ms
before(train, 'compute_loss', lambda net: 'forward' if net.training else 'evaluation')
before(InMemoryImages, '__getitems__', lambda dataset: 'data' if dataset.split == 'train' else 'evaluation')
before(TrainState, 'update_if_finite', lambda state: 'update')
plain_create = train.create_state
def create_state(*args):
    state = plain_create(*args)
    next(state.model.parameters()).register_hook(lambda gradient: here('backward'))
    return state
train.create_state = create_state

plain_look = Watch._look
def look(self, *args, **options):
    (RUN / f'limit-{{RANK}}').write_text(str(self.limit))
    return plain_look(self, *args, **options)
Watch._look = look
"""  # a rank stops itself where the folder has a file that asks for it; the limit that its watchdog has learned is in another
PHASES = ("data", "forward", "backward", "update", "evaluation")
STEPS_APART = 110  # of two stops: a stop is the slowest hundredth of fewer steps, and would be learned as the run's own


def flags_of(cases: int) -> tuple:
    """For 4 ranks, 20 steps and an evaluation in each epoch, no workers: data is read by the rank that stops."""
    epochs = 2 + cases * (STEPS_APART // 20 + 2)
    return ("--dataset_size", 320, "--epochs", epochs, "--save_every", 0, "--num_workers", 0, *BUCKETS)


def undisturbed(folder: Path, cases: int) -> Path:
    """The run without a stop, in forked ranks."""
    run_ranks(4, train_task, "images", [*FLAGS, "--run_dir", folder, *flags_of(cases)])
    return folder


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop_and_see(drill: Drill, cases: list[tuple[str, int]]) -> float:
    """Stop each (phase, rank) in turn in one run, see it named once and in time, and let it go on. The longest time to a name."""
    job = drill.start(4, *flags_of(len(cases)), code=STOPS)
    longest, stopped_at, seen = 0.0, 20, set()
    for phase, rank in cases:
        job.wait_for_step(stopped_at + STEPS_APART)
        (job.folder / f"stop-{rank}-{phase}").touch()
        pid = job.pid(rank)
        job.wait_for(lambda pid=pid: state_of(pid) == "T")
        began = time.monotonic()
        report = job.wait_for(lambda: sorted(set(job.folder.glob("hang-*.txt")) - seen) or None)[0]
        job.wait_for(lambda report=report: report.read_text().endswith("\n"))
        took = time.monotonic() - began
        seen.add(report)
        stopped_at = job.places(4)[rank].step
        sentence, *stacks = report.read_text().splitlines()
        where = rf"{phase} of step {stopped_at} \(process {pid}: stopped, killed or cut off\)"
        assert re.fullmatch(rf"no progress for \d+ s: rank {rank} on {HOST} stands still in {where}", sentence), (phase, rank, sentence)
        headings = [line for line in stacks if line.startswith("--- rank")]
        assert headings == [f"--- rank {each} on {HOST}" for each in range(4)], stacks
        assert stacks.count("gives no stack") == 1 and stacks[stacks.index(headings[rank]) + 1] == "gives no stack", stacks
        limits = [float(file.read_text()) for file in job.folder.glob("limit-*")]
        assert took < max(LEAST_LIMIT, *limits) + 5, (phase, rank, took, limits)
        longest = max(longest, took)
        os.kill(pid, signal.SIGCONT)
    ended = job.end(90)
    assert (ended.code, ended.left) == (0, 0), ended.text
    assert len(list(job.folder.glob("hang-*.txt"))) == ended.text.count("no progress for") == len(cases), ended.text
    return longest
