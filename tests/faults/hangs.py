"""A rank that is stopped or hangs: named in time with the stacks of all ranks, and the run goes on or is ended."""

import os
import re
import signal
import time
from pathlib import Path

from drill import HOST, NO_SHARED_STORE, Drill, fault, says
from utils.watchdog import LEAST_LIMIT

STOPS = """
import signal
from utils.train_state import TrainState

def here(phase):
    asked = RUN / f'stop-{RANK}-{phase}'
    if asked.exists():
        asked.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)

def before(owner, name, phase_of):
    plain = getattr(owner, name)
    def stopping(*args):
        here(phase_of(args[0]))
        return plain(*args)
    setattr(owner, name, stopping)

train.compute_loss = plain_loss  # a step of four ranks takes 20 ms
before(train, 'compute_loss', lambda net: 'forward' if net.training else 'evaluation')
before(Images, '__getitems__', lambda dataset: 'data' if dataset.split == 'train' else 'evaluation')
before(TrainState, 'update_if_finite', lambda state: 'update')
plain_create = train.create_state
def create_state(*args):
    state = plain_create(*args)
    next(state.model.parameters()).register_hook(lambda gradient: here('backward'))
    return state
train.create_state = create_state

plain_look = Watch._look
def look(self, *args, **options):
    (RUN / f'limit-{RANK}').write_text(str(self.limit))
    return plain_look(self, *args, **options)
Watch._look = look
"""  # a rank stops itself where the folder has a file that asks for it; the limit that its watchdog has learned is in another
STEPS_APART = 110  # of two stops: a stop is the slowest hundredth of fewer steps, and would be learned as the run's own
RUN = "--dataset_size 120 --epochs 2 --num_workers 1 --save_every_steps 5".split()  # 30 steps of two ranks
HANGS = """
import utils.watchdog
utils.watchdog.SECONDS_OF_A_LAST_WORD = 4.0
def before_loss(net):
    if (RANK, STEP) == (1, 12) and not (RUN / 'hung').exists():
        (RUN / 'hung').touch()
        time.sleep(3600)
"""
HANG_TIMEOUT = ("--hang_timeout", 8)
SENTENCE = rf"no progress for \d+ s: rank 1 on {HOST} hangs in forward of step 12 \(process \d+\)"
ENDED = rf"{SENTENCE} \(hang_timeout=8\); mend what the stacks in (\S+) show"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def rank_stopped(drill: Drill, ranks: int, cases: list[tuple[str, int]]) -> float:
    """Stop each (phase, rank) in turn in one run, see it named once and in time, and let it go on. The longest time to a name.

    20 steps and an evaluation in each epoch; no workers: data is read by the rank that stops.
    """
    epochs = 4 + (len(cases) - 1) * (STEPS_APART // 20 + 2)
    flags = ("--dataset_size", 80 * ranks, "--epochs", epochs, "--save_every", 0, "--num_workers", 0)
    job = drill.start(ranks, *flags, code=STOPS)
    longest, next_stop, seen = 0.0, 20, set()
    for phase, rank in cases:
        job.wait_for_step(next_stop)
        (job.folder / f"stop-{rank}-{phase}").touch()
        pid = job.pid(rank)
        job.wait_for(lambda pid=pid: state_of(pid) == "T")
        began = time.monotonic()
        report = job.wait_for(lambda: sorted(set(job.folder.glob("hang-*.txt")) - seen) or None)[0]
        job.wait_for(lambda report=report: report.read_text().endswith("\n"))
        took = time.monotonic() - began
        seen.add(report)
        step = job.places(ranks)[rank].step
        next_stop = step + STEPS_APART
        sentence, *stacks = report.read_text().splitlines()
        where = rf"{phase} of step {step} \(process {pid}: stopped, killed or cut off\)"
        assert re.fullmatch(rf"no progress for \d+ s: rank {rank} on {HOST} stands still in {where}", sentence), (phase, rank, sentence)
        headings = [line for line in stacks if line.startswith("--- rank")]
        assert [re.fullmatch(rf"--- rank {each} on {HOST}", heading) is not None for each, heading in enumerate(headings)] == [True] * ranks
        assert stacks.count("gives no stack") == 1 and stacks[stacks.index(headings[rank]) + 1] == "gives no stack", stacks
        limits = [float(file.read_text()) for file in job.folder.glob("limit-*")]
        assert took < max(LEAST_LIMIT, *limits) + 15, (phase, rank, took, limits)  # 4 s on a quiet machine
        longest = max(longest, took)
        os.kill(pid, signal.SIGCONT)
    ended = drill.has_completed(job, 90)
    assert len(list(job.folder.glob("hang-*.txt"))) == ended.text.count("no progress for") == len(cases), ended.text
    drill.is_whole(ranks, *flags)
    return longest


NAMED = "named once with host, phase and the stacks of the others; after SIGCONT it goes on to the same bits"
stopped_once = [("backward", 0)]
fault("rank stopped", "SIGSTOP of rank 0 in a backward pass", NAMED, "s to the report", 2, stopped_once, is_default=True)(rank_stopped)
for each in ("data", "forward", "backward", "update", "evaluation"):
    cases = [(each, rank) for rank in range(4)]
    fault(f"each rank stopped, {each}", f"SIGSTOP of each of 4 ranks in its {each}", NAMED, "s to the report", 4, cases)(rank_stopped)


@fault(
    "rank hangs",
    "rank 1 sleeps for ever in compute_loss; hang_timeout 8 s",
    "ended; rank, host and phase in status.json, the sleeping line in the stacks",
    "s to the end",
    SENTENCE,
    False,
    is_default=True,
)
@fault(
    "rank hangs under torchrun",
    "the same under a real torchrun",
    "named in torchrun's summary, too",
    "s to the end",
    rf"(?s)Root Cause \(first observed failure\):.*RunFailed: {ENDED}",
    True,
)
def rank_hangs(drill: Drill, said: str, is_real: bool) -> float:
    job = drill.start(2, *RUN, *HANG_TIMEOUT, code=HANGS, is_real=is_real)
    drill.fails(job, SENTENCE, said, rank=1, seconds=120)
    took = time.time() - (job.folder / "hung").stat().st_mtime
    error = drill.json("status.json")["error"]
    says(error, ENDED)
    stacks = Path(re.search(ENDED, error)[1]).read_text()
    line = 1 + (drill.folder / "program.py").read_text().splitlines().index("        time.sleep(3600)")
    says(stacks, rf'(?s)--- rank 1 on {HOST}\n.*program.py", line {line} in before_loss')
    return took


@fault("rank hangs and is restarted", "the same, once, under torchrun --max-restarts 1", "completed to the same bits", "steps redone")
def rank_hangs_and_restarts(drill: Drill) -> float:
    how = ("--standalone", "--max-restarts=1")
    ended = drill.completes(2, *RUN, *HANG_TIMEOUT, code=HANGS, seconds=150, how=how, env=NO_SHARED_STORE)
    assert drill.json("status.json")["state"] == "completed" and drill.json("summary.json")["restarts"] == 1
    says(ended.text, rf"{SENTENCE}.*; the stacks of all ranks: ")
    drill.is_whole(2, *RUN)
    return drill.steps_lost(12)
