# extra: template and watch
"""A rank that is stopped or hangs is reported with the stacks of all ranks, and the run continues or is ended."""

import os
import re
import signal
import socket
import time
from pathlib import Path

from drill import HOST, LOOKED, NO_SHARED_STORE, Drill, Job, fault
from ranks import ROOT
from training import says
from utils.extras.watch.heartbeat import NO_STACK, read_process_state
from utils.extras.watch.watchdog import MIN_REPORT_SECONDS

STOPS = """
import signal
plain_enter = PhaseClock.enter_phase
def enter(self, phase):
    plain_enter(self, phase)
    asked = RUN / f'stop-{RANK}-{phase}'
    if asked.exists():
        asked.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
PhaseClock.enter_phase = enter
"""  # a rank stops itself if the folder has a file that requests it
RUN = "--dataset_size 120 --epochs 2 --num_workers 1 --save_every_steps 5".split()  # 30 steps of two ranks
HANGS = """
def before_loss(net):
    if (RANK, STEP) == (1, 12) and not (RUN / 'hung').exists():
        (RUN / 'hung').touch()
        time.sleep(3600)
"""
HANG_TIMEOUT = ("--hang_timeout", 6)
SENTENCE = rf"no progress for \d+ s: rank 1 on {HOST} hangs in forward of step 12 \(process \d+\)"
ENDED = rf"{SENTENCE}\. The limit is --hang_timeout 6\. Fix what the stacks in (\S+) show"

# as in a stream synchronisation under NCCL: no error, no signal handler of Python
BLOCK = """
import ctypes
def block():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
# an all-reduce of gradients whose peer has died
BLOCKS_AFTER_DEATH = f"""{BLOCK}
from utils.training.state import TrainState
def blocking(plain):
    def call(*args):
        try:
            return plain(*args)
        except RuntimeError:
            block()
    return call
TrainState.backward, TrainState.update_if_finite = map(blocking, (TrainState.backward, TrainState.update_if_finite))
"""
BLOCKS_AT_12 = f"""{BLOCK}
def before_loss(net):
    if STEP == 12:
        block()
"""


def rank_stopped(drill: Drill, phase: str, rank: int) -> None:
    """Stop the rank after enough steps to learn their duration. No workers: the stopped rank reads data itself."""
    flags = "--dataset_size 160 --epochs 3 --save_every 0 --num_workers 0".split()  # 60 steps
    job = drill.start(2, *flags, code=STOPS)
    job.wait_for_step(15)
    (job.folder / f"stop-{rank}-{phase}").touch()
    pid = job.pid(rank)
    job.wait_for(lambda: read_process_state(pid) == "T")
    began = time.monotonic()
    report = job.wait_for(lambda: next(job.folder.glob("hang-*.txt"), None))
    job.wait_for(lambda: report.read_text().endswith("\n"))
    took = time.monotonic() - began
    sentence, *stacks = report.read_text().splitlines()
    stopped = rf"was stopped, killed or cut off, last seen in \w+ of step \d+ \(process {pid}\)"
    assert re.fullmatch(rf"There was no progress for \d+ s: rank {rank} on {HOST} {stopped}\.", sentence), sentence
    heads = [f"--- rank {number} on {socket.gethostname()}" for number in range(2)]
    assert [line for line in stacks if line.startswith("--- rank")] == heads
    assert stacks.count(NO_STACK) == 1 and stacks[stacks.index(NO_STACK) - 1] == heads[rank], stacks
    assert took < MIN_REPORT_SECONDS + 15  # 4 s on a quiet machine
    os.kill(pid, signal.SIGCONT)
    ended = drill.has_completed(job, 90)
    assert len(list(job.folder.glob("hang-*.txt"))) == ended.text.count("no progress for") == 1, ended.text
    drill.is_whole(2, *flags)


fault("rank stopped", "backward", 0, guarantees="hang")(rank_stopped)
for phase, rank in (("data", 1), ("forward", 0), ("update", 1), ("evaluation", 0)):
    fault(f"rank stopped, {phase}", phase, rank, guarantees="hang")(rank_stopped)


@fault("rank hangs", is_default=True, guarantees="hang")
def rank_hangs(drill: Drill) -> None:
    job = drill.start(2, *RUN, *HANG_TIMEOUT, code=HANGS)
    drill.fails(job, SENTENCE, rank=1, seconds=120)
    error = drill.json("status.json")["error"]
    says(error, ENDED)
    stacks = Path(re.search(ENDED, error)[1]).read_text()
    line = 1 + (drill.folder / "program.py").read_text().splitlines().index("        time.sleep(3600)")
    says(stacks, rf'(?s)--- rank 1 on {HOST}\n.*program.py", line {line} in before_loss')


STOPS_AT_THE_START = """
import signal
plain_init = Images.__init__
def stopping(self, *args, **options):
    plain_init(self, *args, **options)
    if RANK == 1 and not (RUN / 'stopped').exists():
        (RUN / 'stopped').touch()
        os.kill(os.getpid(), signal.SIGSTOP)
Images.__init__ = stopping
"""
STOPPED_AT_THE_START = rf"rank 1 on {HOST} was stopped, killed or cut off, last seen in start of step 0 \(process \d+\)"


def stopped_at_the_start(drill: Drill, *flags: object) -> Job:
    job = drill.start(2, *RUN, *flags, code=STOPS_AT_THE_START)
    job.wait_for(lambda: job.status(1) and read_process_state(job.status(1).pid) == "T")
    return job


@fault("rank stopped at the start")
def rank_stopped_at_the_start(drill: Drill) -> None:
    """Rank 0 waits in a collective that has no time limit."""
    job = stopped_at_the_start(drill, "--hang_timeout", 4, "--timeout", 6)
    began = time.monotonic()
    job.wait_for(lambda: drill.json("status.json")["state"] == "failed")
    assert time.monotonic() - began < 20  # 6 s on a quiet machine
    job.signal(1, signal.SIGKILL)  # the launcher would wait for 30 s
    drill.fails(job, rf"no progress for \d+ s: {STOPPED_AT_THE_START}\. The limit is --hang_timeout 4\.", rank=1)
    drill.resumes(2, *RUN)


@fault("stop while a rank is stopped at the start")
def stop_while_a_rank_is_stopped_at_the_start(drill: Drill) -> None:
    job = stopped_at_the_start(drill)
    job.signal_launcher(signal.SIGTERM)
    drill.has_stopped(job)
    drill.resumes(2, *RUN)


PREDICTS = f"""
import runpy
sys.argv[:] = ['predict.py', str(RUN / 'checkpoints/best.pt'), '--out', str(RUN / 'out.pt'), '--hang_timeout', '4']
runpy.run_path({str(ROOT / "scripts/predict.py")!r}, run_name='__main__')
"""


@fault("rank stopped in --eval_only", "")
@fault("rank stopped in predict.py", PREDICTS)
def rank_stopped_without_a_run(drill: Drill, program: str) -> None:
    drill.fork(2, *RUN)
    with drill.unchanged(*LOOKED, "hang-"):
        job = drill.start(2, *RUN, "--eval_only", "--hang_timeout", 4, code=STOPS_AT_THE_START + program)
        pid = job.wait_for(lambda: next((pid for pid in job.members() if read_process_state(pid) == "T"), 0))
        job.wait_for(lambda: "The limit is --hang_timeout 4." in job.text())
        os.kill(pid, signal.SIGKILL)  # the launcher would wait for 30 s
        pattern = rf"no progress for \d+ s: {STOPPED_AT_THE_START}\. The limit is --hang_timeout 4\."
        text = drill.fails(job, pattern, has_status=False)
        assert Path(re.search(r"The stacks of all ranks are in (\S+)\.\n", text)[1]).exists()
        (drill.folder / "run/stopped").unlink()


@fault("rank killed under NCCL")
def rank_killed_under_nccl(drill: Drill) -> None:
    job = drill.held(3, 12, *RUN, code=BLOCKS_AFTER_DEATH)
    job.signal(2, signal.SIGKILL)
    drill.let_go()
    began = time.monotonic()
    drill.fails(job, rf"Rank 2 on {HOST} was killed or cut off, last seen in .*\. Look for", rank=2)
    assert time.monotonic() - began < 10
    drill.resumes(3, *RUN)


@fault("stop under NCCL")
def stop_under_nccl(drill: Drill) -> None:
    """The launcher would send SIGKILL after 30 s."""
    job = drill.start(2, *RUN, code=BLOCKS_AT_12)
    job.wait_for(
        lambda: [status and (status.step, status.phase) for status in job.statuses(2)] == [(12, "forward")] * 2
    )
    job.signal_launcher(signal.SIGTERM)
    drill.fails(job, r"no progress for \d+ s: all ranks wait in forward of step 12 for .*\. A stop signal came")
    drill.resumes(2, *RUN)


@fault("rank hangs and is restarted", guarantees="hang")
def rank_hangs_and_restarts(drill: Drill) -> None:
    how = ("--standalone", "--max-restarts=1")
    ended = drill.completes(2, *RUN, *HANG_TIMEOUT, code=HANGS, seconds=150, how=how, env=NO_SHARED_STORE)
    assert drill.json("status.json")["state"] == "completed" and drill.json("summary.json")["restarts"] == 1
    says(ended.text, rf"{SENTENCE}.*\. The stacks of all ranks are in ")
    drill.is_whole(2, *RUN)


@fault("torchrun stopped")
def torchrun_stopped(drill: Drill) -> None:
    """As by Ctrl-Z, for twice --hang_timeout. It hosts the store through which the ranks see each other."""
    job = drill.held(2, 12, *RUN, "--hang_timeout", 6, is_real=True)
    job.signal_launcher(signal.SIGSTOP)
    job.wait_for(lambda: re.search(rf"torchrun on {HOST} does not answer, so it may be stopped\.", job.text()))
    time.sleep(12)
    drill.let_go()
    job.wait_for(job.checkpoint(20).exists)
    job.signal_launcher(signal.SIGCONT)
    drill.has_completed(job)
    drill.is_whole(2, *RUN)


@fault("rank 0 stopped, which hosts the store", "stopped", 90)
@fault("rank 0 killed, which hosts the store", "killed", 10)
def store_lost(drill: Drill, how: str, seconds: float) -> None:
    job = drill.held(2, 12, *RUN, "--hang_timeout", 6, is_real=True, env=NO_SHARED_STORE)
    job.signal(0, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    drill.let_go()
    began = time.monotonic()
    pattern = rf"[Rr]ank 0 on {HOST} was {'killed or' if how == 'killed' else 'stopped, killed or'} cut off"
    drill.fails(job, pattern, rank=0, seconds=100)
    assert time.monotonic() - began < seconds  # torchrun ends a stopped rank after 30 s
    drill.resumes(2, *RUN)


OF_MODEL = """
model = train.your_model
def slow(value):
    def call(*_):
        time.sleep(SECONDS)
        return value
    return call
def before_loss(net):
    if NAME == 'compute_loss' and RANK == 1 and not net.training:
        time.sleep(SECONDS)
model.log_images = slow({'x': torch.zeros(1, 3, 8, 8, dtype=torch.uint8)}) if NAME == 'log_images' else None
if NAME == 'summarize':
    model.predict = lambda net, batch: {'x': torch.zeros(len(batch[1]))}
    model.summarize = slow({'zero': 0.0})
"""


@fault("log_images takes longer than hang_timeout", "log_images", guarantees="hang")
@fault("summarize takes longer than hang_timeout", "summarize", guarantees="hang")
@fault("an evaluation takes longer than hang_timeout", "compute_loss", guarantees="hang")
def function_takes_long(drill: Drill, name: str) -> None:
    """The other ranks wait for it without a limit of their own."""
    flags = [*"--dataset_size 40 --epochs 2 --num_workers 1 --hang_timeout 3 --timeout 4".split()]
    drill.completes(2, *flags, code=f"NAME, SECONDS = {name!r}, 6\n{OF_MODEL}")
    assert not list((drill.folder / "run").glob("hang-*.txt"))


@fault("log_images hangs", guarantees="hang")
def function_hangs(drill: Drill) -> None:
    flags = [*"--dataset_size 40 --epochs 2 --num_workers 1 --hang_timeout 1.5".split()]
    job = drill.start(2, *flags, code=f"NAME, SECONDS = 'log_images', 3600\n{OF_MODEL}")
    where = rf"rank 0 on {HOST} hangs in evaluation of step 5, in log_images of model.py \(process \d+\)"
    limit = r"The limit for this function is 10 times --hang_timeout 1.5\."
    sentence = rf"no progress for \d+ s: {where}\. {limit} .*, or raise --hang_timeout, then"
    drill.fails(job, sentence, r"Training failed at step 5\. The latest checkpoint is .*/step_00000005\.pt\.", rank=0)
    status = drill.json("status.json")
    assert status["step"] == 5 and status["checkpoint"].endswith("step_00000005.pt")
    drill.resumes(2, *flags)
