"""Requests to stop: all ranks stop after the same step and save, whenever the request comes; nothing is lost."""

import os
import signal
import sys
import time
from pathlib import Path

from drill import SAME_BITS, Drill, fault, slow_writer
from ranks import need
from start_up import SLOW_START
from training import wait_until

RUN = "--dataset_size 200 --epochs 2 --num_workers 2".split()  # 50 steps of two ranks
HEARD = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SLOW_EVALUATION = """
from torch.utils.data._utils import signal_handling
plain_handlers = signal_handling._set_worker_signal_handlers
def set_handlers():
    plain_handlers()
    time.sleep(0.5)
signal_handling._set_worker_signal_handlers = set_handlers
def before_loss(net):
    time.sleep(0 if net.training else 0.5)
"""
# In a terminal of its own, which closes at SIGUSR1; ends as the program in it does.
TERMINAL = """
import os, pty, signal, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGUSR1, lambda *_: os.close(terminal))
try:
    while os.read(terminal, 65536):
        pass
except OSError:
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@fault(
    "SIGTERM",
    "SIGTERM to the launcher at step 8",
    f"both ranks save after the same step; {SAME_BITS}",
    "steps lost",
    is_default=True,
)
def terminated(drill: Drill) -> float:
    lost = drill.stopped(8, *RUN)
    drill.resumes(2, *RUN)
    return lost


@fault(
    "SIGTERM at any moment",
    "SIGTERM at 20 random moments of one run of two ranks with two workers each",
    f"preempted each time, with the last committed step in the checkpoint; {SAME_BITS}",
    "steps lost in all",
)
def terminated_at_random_moments(drill: Drill) -> float:
    flags = "--dataset_size 480 --epochs 4 --num_workers 2 --save_every_steps 5 --resume_from auto".split()
    lost = 0
    for _ in range(20):
        steps, seconds = drill.random.randrange(6), drill.random.uniform(0, 0.03)
        job = drill.start(2, *flags)
        if steps:
            job.wait_for_step(job.wait_for_step(1).step + steps - 1)
        else:
            job.wait_for_phase("start")
        time.sleep(seconds)
        job.signal_launcher(signal.SIGTERM)
        lost += drill.has_stopped(job)
    assert drill.json("status.json")["step"] > 20
    drill.resumes(2, *flags)
    return lost


@fault(
    "SIGTERM in an evaluation",
    "SIGTERM to the launcher while the ranks evaluate and the evaluation's workers start",
    "the evaluation is left, the run saves; resumed, it evaluates at the same steps",
    "steps lost",
    is_default=True,
)
def terminated_in_an_evaluation(drill: Drill) -> float:
    """The workers of the evaluation's loader have just been started, and do not ignore the signal yet."""
    job = drill.start(2, *RUN, "--save_every", 0, code=SLOW_EVALUATION)
    job.wait_for_step(25)
    job.wait_for_phase("evaluation")
    job.signal_launcher(signal.SIGTERM)
    lost = drill.has_stopped(job)
    assert drill.json("status.json")["step"] == 25 and not drill.runs.records("run", "eval")
    drill.resumes(2, *RUN)
    assert [record["step"] for record in drill.runs.records("run", "eval")] == [25, 50]
    return lost


@fault(
    "SIGTERM in a save",
    "SIGTERM while the writer takes 2 s",
    "this checkpoint and that of the last step are on the disk",
    "steps lost",
)
def terminated_in_a_save(drill: Drill) -> float:
    job = drill.start(2, *RUN, "--save_every_steps", 10, code=slow_writer(2.0))
    job.wait_for_partial_file()
    job.signal_launcher(signal.SIGTERM)
    lost = drill.has_stopped(job)
    first, *others = drill.runs.checkpoints("run")
    assert first.name == "step_00000010.pt" and len(others) == 1
    drill.resumes(2, *RUN)
    return lost


@fault(
    "SIGTERM at the start",
    "SIGTERM to the launcher before the first step; to one process while it imports torch",
    "preempted at step 0, exit as after any request to stop",
    "steps lost",
)
def terminated_at_the_start(drill: Drill) -> float:
    job = drill.start(2, *RUN, code=SLOW_START)
    job.wait_for_phase("start")
    job.signal_launcher(signal.SIGTERM)
    lost = drill.has_stopped(job)
    assert drill.json("status.json")["step"] == 0
    drill.resumes(2, *RUN)
    alone = drill.start(0, *RUN, name="alone", is_real=True)
    alone.wait_for(lambda: "libtorch" in Path(f"/proc/{alone.program.pid}/maps").read_text())
    assert not (alone.folder / "watch").exists()
    alone.signal_launcher(signal.SIGTERM)
    assert drill.has_stopped(alone, "alone", code=75) == 0 and drill.json("status.json", "alone")["step"] == 0
    return lost


@fault(
    "SIGINT, SIGUSR1 and SIGHUP",
    "each of them to a run of one process: Ctrl-C, Slurm's warning, a terminal that closes",
    f"saves and exits with 75 each time; {SAME_BITS}",
    "steps lost in all",
    *(0, (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP), ("--standalone",)),
    is_default=True,
)
@fault(
    "signals to torchrun",
    "SIGTERM, SIGUSR1 and SIGINT to torchrun",
    f"all ranks save and stop, none is left; {SAME_BITS}",
    "steps lost in all",
    *(2, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), ("--standalone", "--signals-to-handle", HEARD)),
)
def stopped_by_each(drill: Drill, ranks: int, numbers: tuple[int, ...], how: tuple[str, ...]) -> float:
    lost, step, flags = 0, 3, (*RUN, "--epochs", 4)
    for number in numbers:
        lost += drill.stopped(step, *flags, "--resume_from", "auto", ranks=ranks, number=number, how=how)
        step = drill.json("status.json")["step"] + 3
    drill.resumes(max(1, ranks), *flags)
    return lost


@fault("SIGINT twice", "Ctrl-C twice in a step of a minute", "ends at once, exit code 1", "s until it ended")
def interrupted_twice(drill: Drill) -> float:
    code = "def before_loss(net):\n    if STEP == 8:\n        (RUN / 'sleeps').touch()\n        time.sleep(60)\n"
    job = drill.start(0, *RUN, code=code)
    job.wait_for(lambda: (job.folder / "sleeps").exists())
    os.killpg(job.program.pid, signal.SIGINT)
    time.sleep(1)
    assert job.program.poll() is None  # it would save after this step
    begin = time.monotonic()
    os.killpg(job.program.pid, signal.SIGINT)
    drill.fails(job, "KeyboardInterrupt")
    seconds = time.monotonic() - begin
    assert seconds < 30
    drill.no_partial_files()
    return seconds


@fault("terminal closed", "the terminal of a run closes", f"saves, exits with 75; {SAME_BITS}", "steps lost")
def terminal_closed(drill: Drill) -> float:
    lost = drill.stopped(8, *RUN, ranks=0, number=signal.SIGUSR1, before=(sys.executable, "-c", TERMINAL))
    drill.resumes(1, *RUN)
    return lost


@fault(
    "shell closed beside nohup",
    "the shell of nohup python train.py & closes",
    "the run lives on and completes",
    "steps after it",
)
def shell_closed(drill: Drill) -> float:
    """An interactive shell hands the SIGHUP of its terminal on to its jobs."""
    need("bash")
    line = f'nohup "$@" >{drill.folder}/nohup.txt 2>&1 & sleep 600'
    job = drill.held(0, 8, *RUN, before=(sys.executable, "-c", TERMINAL, "bash", "--norc", "-ic", line, "bash"))
    job.signal_launcher(signal.SIGUSR1)
    job.program.wait(30)
    assert drill.json("status.json")["state"] == "running"
    drill.let_go()
    wait_until(lambda: drill.json("status.json")["state"] != "running")
    wait_until(lambda: not job.members())
    assert drill.json("status.json")["state"] == "completed"
    drill.is_whole(1, *RUN)
    return drill.json("summary.json")["steps"] - 8
