# extra: template
"""Faults before the first step of a run: address, missing ranks, config, kills."""

import signal
import socket
from pathlib import Path

from drill import LOOKED, Drill, Job, fault, free_port
from training import says, wait_until

RUN = "--dataset_size 100 --epochs 2 --save_every_steps 5 --num_workers 1".split()  # 26 steps of two ranks
SLOW_START = (
    "plain_state = assembly.create_train_state\ndef create(*args, **options):\n    time.sleep(2)\n    return"
    " plain_state(*args, **options)\nassembly.create_train_state = create\n"
)
NOTES_LOADS = (
    "from utils.training.state import TrainState\nplain_load = TrainState.load_state_dict\n"
    "def load(self, *args):\n    open(f'{FOLDER}/loaded', 'w').close()\n    return plain_load(self, *args)\n"
    "TrainState.load_state_dict = load\n"
)


def by_hand(drill: Drill, world: int, port: int, *flags: object) -> list[Job]:
    """Start ranks 0 and 1 as a scheduler would, without torchrun."""
    env = {"WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return [drill.start(0, *RUN, *flags, env=env | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


@fault("port taken")
def port_taken(drill: Drill) -> None:
    """Rank 1 connects to a program at the address that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        first, second = (job.end() for job in by_hand(drill, 2, port, "--timeout", 5))
    assert [first.code, first.left, second.code, second.left] == [1, 0, 1, 0], first.text + second.text
    met = rf"at 127.0.0.1:{port} failed"
    says(first.err, rf"rendezvous of rank 0 {met} \(.*(EADDRINUSE|address already in use).*\)\. .*another MASTER_PORT")
    says(second.err, rf"rendezvous of rank 1 {met} \(.*\)\. Check that rank 0 is running and that its address is corr")
    assert not (drill.folder / "run").exists()


@fault("a rank never comes")
def peer_missing(drill: Drill) -> None:
    """Two of three ranks start; under torchrun, which has its own store, one of two hangs before it connects."""
    first, second = (job.end() for job in by_hand(drill, 3, free_port(), "--timeout", 10))
    outcomes = [first.code, first.left, second.code, second.left]
    assert outcomes == [1, 0, 1, 0], f"{outcomes}\n{first.text}{second.text}"
    says(first.err, r"Rank 2 of 3 did not start within 10 s\. Check its output, then start all")
    code = "import signal\nif RANK == 1:\n    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n    time.sleep(600)\n"
    job = drill.start(2, *RUN, "--timeout", 5, code=code)
    text = drill.fails(job, r"Rank 1 of 2 did not start within 5 s\. ", has_status=False)
    assert "ddp_utils.py" not in text, text  # a sentence, and no traceback
    assert not (drill.folder / "run").exists()


@fault("other config than the checkpoint's", is_default=True, guarantees="must-match")
def other_config(drill: Drill) -> None:
    drill.stopped(13, *RUN)
    pattern = (
        r"--seed is 7, but the checkpoint has --seed 42\.\n--batch_size is 2, but the checkpoint has --batch_size 4\.\n"
        r"(?s:.*)These values must be as they were for --resume_from\. Restore them"
    )
    with drill.unchanged(*LOOKED):
        other = ("--resume_from", "auto", "--seed", 7, "--batch_size", 2)
        drill.fails(drill.start(2, *RUN, *other, code=NOTES_LOADS), pattern, has_status=False)
    assert not (drill.folder / "loaded").exists()
    drill.completes(2, *RUN, "--resume_from", "auto", code=NOTES_LOADS)
    assert (drill.folder / "loaded").exists()
    drill.is_whole(2, *RUN)


@fault("rank killed at the start", guarantees="rank-killed")  # extra: watch
def killed_at_the_start(drill: Drill) -> None:
    job = drill.start(2, *RUN, code=SLOW_START)
    job.wait_for(lambda: (job.folder / "status.json").exists())
    job.signal(1, signal.SIGKILL)
    drill.fails(job, r"Rank 1 on \S+ was killed or cut off, last seen in start of step 0\. Look for", rank=1)
    assert drill.json("status.json")["step"] == 0
    drill.fork(2, *RUN)  # the same command: there is no run yet
    drill.is_whole(2, *RUN)


@fault("launcher killed at the start", guarantees="launcher-killed")
def launcher_killed_at_the_start(drill: Drill) -> None:
    """Before the ranks have executed a line, and while they import torch."""
    for is_late in (False, True):
        job = drill.start(2, *RUN, is_real=True)
        ranks = job.wait_for(lambda job=job: len(pids := job.children(job.program.pid)) == 2 and pids)
        for maps in (Path(f"/proc/{pid}/maps") for pid in ranks if is_late):
            job.wait_for(lambda maps=maps: "libtorch" in maps.read_text())
        job.signal_launcher(signal.SIGKILL)
        job.program.wait()
        wait_until(lambda job=job: not job.members(), 10)
    assert not (drill.folder / "run").exists()
    drill.fork(2, *RUN)
    drill.is_whole(2, *RUN)
