"""Requests to stop: all ranks stop after the same step and save, whenever they come; nothing is lost."""

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drill import FLAGS, Drill, Fault, Job, slow_writer, until
from ranks import need

RUN = ("--dataset_size", 200, "--epochs", 2, "--num_workers", 2)
MOMENTS, BY_TORCHRUN = 20, (3, 10, 17)
HEARD = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SLOW_EVALUATION = """
from torch.utils.data._utils import signal_handling
plain_handlers = signal_handling._set_worker_signal_handlers
def set_handlers():
    plain_handlers()
    time.sleep(0.5)
signal_handling._set_worker_signal_handlers = set_handlers
fast_loss = train.compute_loss
def compute(net, batch):
    time.sleep(0 if net.training else 0.5)
    return fast_loss(net, batch)
train.compute_loss = compute
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


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def terminate_like_torchrun(job: Job, steps: int, seconds: float) -> None:
    """SIGTERM to each rank's process group, at so many steps from where it begins and so many seconds later."""
    pids = [job.wait_for(lambda rank=rank: job.place(rank)).pid for rank in range(2)]
    until(lambda: all(catches(pid, signal.SIGTERM) for pid in pids))
    if steps:
        first = job.wait_for_step(1).step
        job.wait_for_step(first + steps - 1)
    time.sleep(seconds)
    for pid in pids:
        for each in (pid, *(child for child in job.children(pid) if os.getsid(child) == os.getsid(pid))):
            os.kill(each, signal.SIGTERM)


def terminated_at_random_moments(drill: Drill) -> float:
    """Most launches are ranks that are forked, and the signal comes from here; three are torchrun's."""
    flags = ("--dataset_size", 480, "--epochs", 4, "--num_workers", 2, "--save_every_steps", 5, "--resume_from", "auto")
    lost, forked = [], drill.launch(["sleep", 600])
    for moment in range(MOMENTS):
        steps, seconds = drill.random.randrange(6), drill.random.uniform(0, 0.03)
        if moment in BY_TORCHRUN:
            job = drill.start(2, *flags)
            if steps:
                job.wait_for_step(job.wait_for_step(1).step + steps - 1)
            else:
                job.wait_for_phase("start")
            time.sleep(seconds)
            job.signal_launcher(signal.SIGTERM)
            ended = job.end()
            assert (ended.code, ended.left) == (1, 0), ended.text
        else:
            with ThreadPoolExecutor(1) as thread:
                forked.former = drill.former()
                signalled = thread.submit(terminate_like_torchrun, forked, steps, seconds)
                drill.fork(2, *flags)
                signalled.result()
        lost.append(drill.is_stopped_in_time())
    assert lost == [0] * MOMENTS
    assert drill.json("status.json")["step"] > MOMENTS
    drill.fork(2, *flags)
    drill.is_whole(2, *flags)
    return sum(lost)


def stopped(drill: Drill, job: Job, ranks: int = 2) -> int:
    """Whatever the launch has been sent, it ends as one that was asked to stop."""
    ended = job.end()
    assert (ended.code, ended.left) == (1 if ranks else 75, 0), ended.text
    return drill.is_stopped_in_time()


def terminated_in_an_evaluation(drill: Drill) -> float:
    """The workers of the evaluation's loader have just been started, and do not ignore the signal yet."""
    job = drill.start(2, *RUN, "--save_every", 0, code=SLOW_EVALUATION)
    job.wait_for_step(25)
    job.wait_for_phase("evaluation")
    job.signal_launcher(signal.SIGTERM)
    lost = stopped(drill, job)
    assert drill.json("status.json")["step"] == 25 and not drill.runs.records("run", "eval")
    drill.fork(2, *RUN, "--resume_from", "auto")
    assert [record["step"] for record in drill.runs.records("run", "eval")] == [25, 50]
    drill.is_whole(2, *RUN)
    return lost


def terminated_in_a_save(drill: Drill) -> float:
    """The one under way is waited for, and the one of the last step follows."""
    job = drill.start(2, *RUN, "--save_every_steps", 10, code=slow_writer(2.0))
    job.wait_for_partial_file()
    job.signal_launcher(signal.SIGTERM)
    lost = stopped(drill, job)
    first, *others = drill.runs.checkpoints("run")
    assert first.name == "step_00000010.pt" and len(others) == 1
    drill.fork(2, *RUN, "--resume_from", "auto")
    drill.is_whole(2, *RUN)
    return lost


def terminated_at_the_start(drill: Drill) -> float:
    """Before the first step under torchrun; and while torch is imported, where no more than python is there."""
    code = "plain_state = train.create_state\ndef create(*args):\n    time.sleep(1)\n    return plain_state(*args)\ntrain.create_state = create\n"
    job = drill.start(2, *RUN, code=code)
    job.wait_for_phase("start")
    job.signal_launcher(signal.SIGTERM)
    lost = stopped(drill, job)
    assert drill.json("status.json")["step"] == 0
    drill.fork(2, *RUN, "--resume_from", "auto")
    drill.is_whole(2, *RUN)
    alone = drill.launch([sys.executable, "train.py", *FLAGS, "--run_dir", drill.folder / "alone", *RUN], "alone")
    alone.wait_for(lambda: "libtorch" in Path(f"/proc/{alone.program.pid}/maps").read_text())
    assert not (alone.folder / "watch").exists()
    os.kill(alone.program.pid, signal.SIGTERM)
    ended = alone.end()
    assert (ended.code, ended.left) == (75, 0), ended.text
    assert drill.is_stopped_in_time("alone") == 0 and drill.json("status.json", "alone")["step"] == 0
    return lost


def interrupted(drill: Drill) -> float:
    """Ctrl-C goes to all processes in the foreground."""
    job = drill.start(0, *RUN)
    job.wait_for_step(8)
    os.killpg(job.program.pid, signal.SIGINT)
    lost = stopped(drill, job, ranks=0)
    drill.fork(1, *RUN, "--resume_from", "auto")
    drill.is_whole(1, *RUN)
    return lost


def interrupted_twice(drill: Drill) -> float:
    """The step under way takes a minute."""
    code = "fast_loss = train.compute_loss\ncalls = []\ndef compute(net, batch):\n    calls.append(1)\n    time.sleep(60 if len(calls) > 10 else 0)\n"
    job = drill.start(0, *RUN, code=f"{code}    return fast_loss(net, batch)\ntrain.compute_loss = compute\n")
    job.wait_for(lambda: (place := job.place(0)) and place.phase == "forward" and place.step >= 8)
    time.sleep(1)  # it sleeps by now
    os.killpg(job.program.pid, signal.SIGINT)
    time.sleep(1)
    assert job.program.poll() is None  # it would save after this step
    begin = time.monotonic()
    os.killpg(job.program.pid, signal.SIGINT)
    ended = job.end()
    seconds = time.monotonic() - begin
    assert (ended.code, ended.left) == (1, 0) and seconds < 10
    status = drill.json("status.json")
    assert (status["state"], status["error"]) == ("failed", "KeyboardInterrupt")
    drill.no_partial_files()
    return seconds


def signals_through_torchrun(drill: Drill) -> float:
    """SIGUSR1, which Slurm sends ahead of the limit, and SIGINT."""
    lost = 0
    for name, number in (("first", signal.SIGUSR1), ("second", signal.SIGINT)):
        job = drill.start(2, *RUN, name=name, how=("--standalone", "--signals-to-handle", HEARD))
        job.wait_for_step(8)
        job.signal_launcher(number)
        ended = job.end()
        assert (ended.code, ended.left) == (1, 0), ended.text
        lost += drill.is_stopped_in_time(name)
    return lost


def terminal_closed(drill: Drill) -> float:
    job = drill.start(0, *RUN, before=(sys.executable, "-c", TERMINAL))
    job.wait_for_step(8)
    job.signal_launcher(signal.SIGUSR1)
    lost = stopped(drill, job, ranks=0)
    drill.fork(1, *RUN, "--resume_from", "auto")
    drill.is_whole(1, *RUN)
    return lost


def shell_closed(drill: Drill) -> float:
    """An interactive shell hands the SIGHUP of its terminal on to its jobs."""
    need("bash")
    line = f'nohup "$@" >{drill.folder}/nohup.txt 2>&1 & sleep 600'
    job = drill.start(0, *RUN, before=(sys.executable, "-c", TERMINAL, "bash", "--norc", "-ic", line, "bash"))
    step = job.wait_for_step(8).step
    job.signal_launcher(signal.SIGUSR1)
    job.program.wait(30)
    assert drill.json("status.json")["state"] == "running"
    until(lambda: drill.json("status.json")["state"] != "running")
    until(lambda: not job.members())
    assert drill.json("status.json")["state"] == "completed"
    drill.is_whole(1, *RUN)
    return drill.json("summary.json")["steps"] - step


def row(kind: str, injection: str, end: str, figure: str, drill) -> Fault:
    return Fault(kind, "processes", injection, end, figure, drill)


FAULTS = [
    row(
        "SIGTERM at any moment",
        "SIGTERM at 20 random moments of one run of two ranks with two workers each",
        "preempted each time, with the last committed step in the checkpoint; goes on to the same bits",
        "steps lost in all",
        terminated_at_random_moments,
    ),
    row(
        "SIGTERM in an evaluation",
        "SIGTERM to torchrun while the ranks evaluate",
        "the evaluation is left, the run saves; gone on with, it evaluates at the same steps",
        "steps lost",
        terminated_in_an_evaluation,
    ),
    row(
        "SIGTERM in a save",
        "SIGTERM to torchrun while the writer takes 2 s",
        "this checkpoint and the one of the last step are on the disk",
        "steps lost",
        terminated_in_a_save,
    ),
    row(
        "SIGTERM at the start",
        "SIGTERM to torchrun before the first step; to python train.py while it imports torch",
        "preempted at step 0, exit as after any request to stop",
        "steps lost",
        terminated_at_the_start,
    ),
    row("SIGINT", "Ctrl-C once, python train.py", "saves, exits 75; goes on to the same bits", "steps lost", interrupted),
    row("SIGINT twice", "Ctrl-C twice in a step of a minute", "ends at once, exit code 1", "s until it ended", interrupted_twice),
    row(
        "SIGUSR1 or SIGINT to torchrun",
        f"the signal to torchrun --signals-to-handle {HEARD}",
        "all ranks save and stop, none is left",
        "steps lost",
        signals_through_torchrun,
    ),
    row(
        "terminal closed",
        "SIGHUP to python train.py in a terminal",
        "saves, exits 75; goes on to the same bits",
        "steps lost",
        terminal_closed,
    ),
    row(
        "shell closed beside nohup",
        "the shell of nohup python train.py & closes with its terminal",
        "the run lives on and completes",
        "steps made after the shell was gone",
        shell_closed,
    ),
]
