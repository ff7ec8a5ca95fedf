# extra: template
"""Requests to stop: all ranks stop after the same step and save, whenever the request arrives; no step is lost."""

import os
import signal
import sys
import time
from pathlib import Path

from drill import Drill, fault, slow_writer
from ranks import need
from start_up import SLOW_START
from training import says, wait_until

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
# Runs a program in a new terminal, which closes at SIGUSR1; exits as the program does.
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


@fault("SIGTERM", is_default=True, guarantees="stop")
def terminated(drill: Drill) -> None:
    drill.stopped(8, *RUN)
    drill.resumes(2, *RUN)


@fault("SIGTERM at any moment", guarantees="stop")
def terminated_at_random_moments(drill: Drill) -> None:
    flags = "--dataset_size 480 --epochs 4 --num_workers 2 --save_every_steps 5 --resume_from auto".split()
    for _ in range(20):
        steps, seconds = drill.random.randrange(6), drill.random.uniform(0, 0.03)
        job = drill.start(2, *flags)
        if steps:
            job.wait_for_step(job.wait_for_step(1).step + steps - 1)
        else:
            job.wait_for_phase("start")
        time.sleep(seconds)
        job.signal_launcher(signal.SIGTERM)
        drill.has_stopped(job)
    assert drill.json("status.json")["step"] > 20
    drill.resumes(2, *flags)


@fault("SIGTERM in an evaluation", guarantees="stop")
def terminated_in_an_evaluation(drill: Drill) -> None:
    """The workers of the evaluation's loader have just started and do not ignore the signal yet."""
    job = drill.start(2, *RUN, "--save_every", 0, code=SLOW_EVALUATION)
    job.wait_for_step(25)
    job.wait_for_phase("evaluation")
    job.signal_launcher(signal.SIGTERM)
    drill.has_stopped(job)
    assert drill.json("status.json")["step"] == 25 and not drill.runs.records("run", "eval")
    drill.resumes(2, *RUN)
    assert [record["step"] for record in drill.runs.records("run", "eval")] == [25, 50]


@fault("SIGTERM in a save", guarantees="stop")
def terminated_in_a_save(drill: Drill) -> None:
    job = drill.start(2, *RUN, "--save_every_steps", 10, code=slow_writer(2.0))
    job.wait_for_partial_file()
    job.signal_launcher(signal.SIGTERM)
    drill.has_stopped(job)
    first, *others = drill.runs.checkpoints("run")
    assert first.name == "step_00000010.pt" and len(others) == 1
    drill.resumes(2, *RUN)


@fault("SIGTERM while a command hangs", guarantees="command")
def terminated_while_a_command_hangs(drill: Drill) -> None:  # extra: companions
    """The command ignores SIGTERM, and so does its child."""
    command, began = drill.folder / "command", drill.folder / "began"
    command.write_text(f"#!/bin/sh\ntrap '' TERM\necho $1 >> {began}\nsleep 600\n")
    command.chmod(0o755)
    program = drill.folder / "on_checkpoint.py"
    program.write_text(
        "import sys\nfrom scripts.companions import on_checkpoint as it\n"
        "it.SECONDS_TO_FINISH_AFTER_STOP = it.SECONDS_TO_TERMINATE = 0.5\n"
        "sys.exit(it.follow_run(it.CheckpointCommand(it.read_plan())))\n"
    )
    code = "from utils.extras.companions import programs\n"
    code += f"programs.COMPANIONS_FOLDER = __import__('pathlib').Path({str(drill.folder)!r})\n"
    job = drill.held(2, 14, *RUN, "--save_every_steps", 10, "--on_checkpoint", command, code=code, checkpoint_of=10)
    job.wait_for(began.exists)
    job.signal_launcher(signal.SIGTERM)
    drill.let_go(is_slow=True)
    drill.has_stopped(job)  # leaves no process
    last = drill.runs.checkpoints("run")[-1]
    assert began.read_text().splitlines() == [str(job.checkpoint(10)), str(last)]  # the last one got its time, too
    message = r"command of --on_checkpoint was ended after 0 min, since the run is over\. Run the command again for "
    says(drill.runs.log("run"), f"{message}{job.checkpoint(10)}(.|\n)*{message}{last}")
    drill.resumes(2, *RUN, "--save_every_steps", 10)


@fault("SIGTERM at the start", guarantees="stop")
def terminated_at_the_start(drill: Drill) -> None:
    job = drill.start(2, *RUN, code=SLOW_START)
    job.wait_for_phase("start")
    job.signal_launcher(signal.SIGTERM)
    drill.has_stopped(job)
    assert drill.json("status.json")["step"] == 0
    drill.resumes(2, *RUN)
    alone = drill.start(0, *RUN, name="alone", is_real=True)
    alone.wait_for(lambda: "libtorch" in Path(f"/proc/{alone.program.pid}/maps").read_text())
    assert not (alone.folder / "watch").exists()
    alone.signal_launcher(signal.SIGTERM)
    drill.has_stopped(alone, "alone", code=75)
    assert drill.json("status.json", "alone")["step"] == 0


@fault(
    "SIGINT, SIGUSR1 and SIGHUP",
    0,
    (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP),
    ("--standalone",),
    guarantees="stop exit-codes",
)
@fault(
    "signals to torchrun",
    2,
    (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT),
    ("--standalone", "--signals-to-handle", HEARD),
    guarantees="stop",
)
def stopped_by_each(drill: Drill, ranks: int, numbers: tuple[int, ...], how: tuple[str, ...]) -> None:
    step, flags = 3, (*RUN, "--epochs", 4)
    for number in numbers:
        drill.stopped(step, *flags, "--resume_from", "auto", ranks=ranks, number=number, how=how)
        step = drill.json("status.json")["step"] + 3
    drill.resumes(max(1, ranks), *flags)


@fault("SIGINT twice", guarantees="stop")
def interrupted_twice(drill: Drill) -> None:
    code = "def before_loss(net):\n    if STEP == 8:\n        (RUN / 'sleeps').touch()\n        time.sleep(60)\n"
    job = drill.start(0, *RUN, code=code)
    job.wait_for(lambda: (job.folder / "sleeps").exists())
    os.killpg(job.program.pid, signal.SIGINT)
    time.sleep(1)
    assert job.program.poll() is None  # it would save only after this step
    os.killpg(job.program.pid, signal.SIGINT)
    drill.fails(job, "KeyboardInterrupt", seconds=30)
    drill.no_partial_files()


@fault("terminal closed", guarantees="stop")
def terminal_closed(drill: Drill) -> None:
    drill.stopped(8, *RUN, ranks=0, number=signal.SIGUSR1, before=(sys.executable, "-c", TERMINAL))
    drill.resumes(1, *RUN)


@fault("shell closed beside nohup")
def shell_closed(drill: Drill) -> None:
    """An interactive shell forwards the SIGHUP of its terminal to its jobs."""
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
