"""Checkpoints that are damaged, cut off or left over, and the command that runs after each."""

import os
import signal
import threading
from pathlib import Path

from disks import are_whole, held_at, let_go, run_on, tracing, wait_until_held
from drill import FLAGS, Drill, Fault, says
from ranks import need, run_ranks
from storage import RUN
from tasks import signals_after
from training import TINY, train_flags
from utils import checkpoint
from utils.checkpoint import step_checkpoints, step_path

STUCK = """
from utils import checkpoint
plain_replace = checkpoint.replace_file
def stuck(path, write, *rest, **options):
    plain_replace(path, lambda file: (write(file), file.flush(), time.sleep(60 * (path.name == "step_00000020.pt"))), *rest, **options)
checkpoint.replace_file = stuck
"""


def left_over(drill: Drill) -> float:
    job = drill.start(2, *RUN, code=STUCK)
    job.wait_for(lambda: list(job.folder.glob("checkpoints/step_00000020.pt.*.tmp")))
    writer = job.writer()
    job.signal(0, signal.SIGKILL)
    os.kill(writer, signal.SIGKILL)
    assert job.end().code == 1
    left = list(job.folder.glob("checkpoints/*.tmp"))
    assert len(left) == 1 and are_whole(job) == [10]
    drill.fork(2, *RUN, "--resume_from", "auto")
    drill.no_partial_files()
    drill.is_whole(2, *RUN)
    return len(left)


def train_until(step: int, flags: list[str]) -> str:
    """In a rank: the run is asked to stop, and saves, at this step."""
    with signals_after([step - 1]):
        return train_flags(flags)["state"]


def stopped_at_30(drill: Drill) -> Path:
    """The folder of the checkpoints of steps 10, 20 and 30."""
    words = [*map(str, (*TINY, *FLAGS, "--run_dir", drill.folder / "run", *RUN))]
    assert run_ranks(2, train_until, 30, words) == ["preempted"] * 2
    folder = drill.folder / "run/checkpoints"
    assert [checkpoint.verify(path).step for path in step_checkpoints(folder)] == [10, 20, 30]
    return folder


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


CUT = r"step_00000030\.pt: has no checksum at its end, it was cut short"
FLIPPED = r"step_00000020\.pt: is damaged, its bytes do not have the checksum at its end"


def newest_damaged(drill: Drill) -> float:
    folder = stopped_at_30(drill)
    cut(step_path(folder, 30))
    flip(step_path(folder, 20))
    ended = drill.run(2, *RUN, "--resume_from", "auto")
    assert ended.code == 0, ended.text
    says(ended.text, CUT)
    says(ended.text, FLIPPED)
    drill.is_whole(2, *RUN)
    return drill.steps_lost(30)


def all_damaged(drill: Drill) -> float:
    folder = stopped_at_30(drill)
    for step, damage in ((10, cut), (20, flip), (30, cut)):
        damage(step_path(folder, step))
    before = {path: path.read_bytes() for path in [*folder.parent.glob("*.json*"), *folder.glob("*.pt")] if path.name != "claim.json"}
    ended = drill.run(2, *RUN, "--resume_from", "auto")
    assert (ended.code, ended.left) == (1, 0), ended.text
    for said in (CUT, FLIPPED, "has no whole checkpoint; give one with --resume_from, or --overwrite to start anew"):
        says(ended.text, said)
    changed = [path for path, data in before.items() if not path.exists() or path.read_bytes() != data]
    assert changed == []
    return len(changed)


def newest_unreadable(drill: Drill) -> float:
    need("strace")
    path = step_path(stopped_at_30(drill), 30)
    trace = ("strace", "-f", "--seccomp-bpf", "-qq", "-o", drill.folder / "strace", "-P", path, "-e", "trace=read,mmap")
    ended = drill.run(2, *RUN, "--resume_from", "auto", before=(*trace, "-e", "inject=read:error=EIO"))
    assert ended.code == 0, ended.text
    says(ended.text, r"step_00000030\.pt: cannot be read \(Input/output error\)")
    drill.is_whole(2, *RUN)
    return drill.steps_lost(30)


def look(folder: Path) -> int | None:
    """How many checkpoints were in the folder at one instant, each of them whole. None: while it looked the oldest went."""
    opened = []
    try:
        for path in step_checkpoints(folder):  # oldest first: while that is there all are
            opened.append(os.open(path, os.O_RDONLY))
        return len([checkpoint.verify(Path(f"/proc/self/fd/{descriptor}")) for descriptor in opened])
    except FileNotFoundError:
        return None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def never_fewer_than_two(drill: Drill) -> float:
    flags = (*RUN, "--save_every_steps", 2, "--keep_last", 2, "--epochs", 4)
    job = drill.start(2, *flags, code=held_at(drill, 1))
    wait_until_held(drill, job, 1)
    tracing(drill, job.writer(), "-e", "trace=/^unlink", "-e", "inject=/^unlink:signal=SIGKILL:when=1")
    found: list[int] = []

    def watch() -> None:
        while job.program.poll() is None and len(found) < 100:
            if (number := look(job.folder / "checkpoints")) is not None and (found or number >= 2):
                found.append(number)

    thread = threading.Thread(target=watch)
    let_go(drill, crawling=True)
    thread.start()
    thread.join(60)
    run_on(drill)
    ended = job.end()
    assert ended.code == 0, ended.text
    says(ended.text, "the process that wrote it was killed; training goes on, and it is tried again in 0 s")
    assert len(found) == 100 and min(found) >= 2
    assert are_whole(job) == [98, 100]
    return min(found)


def command_fails(drill: Drill) -> float:
    command = drill.folder / "command"
    command.write_text("#!/bin/sh\nexit 3\n")
    command.chmod(0o755)
    job = drill.start(2, *RUN, "--on_checkpoint", command, code=held_at(drill, 24))
    wait_until_held(drill, job, 24, checkpoint_of=20)
    command.unlink()
    let_go(drill)
    ended = job.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    says(ended.text, f"on_checkpoint: {command} ended with exit code 3; the checkpoint itself is whole")
    says(ended.text, rf"on_checkpoint: {command} cannot be run \(No such file or directory\); the checkpoint itself is whole")
    return 0


def command_is_slow(drill: Drill) -> float:
    command, copies, go = drill.folder / "command", drill.folder / "copies", drill.folder / "release"
    copies.mkdir()
    command.write_text(f'#!/bin/sh\ncp "$1" {copies}\nwhile [ ! -e {go} ]; do sleep 0.1; done\n')
    command.chmod(0o755)
    job = drill.start(2, *RUN, "--on_checkpoint", command, code=held_at(drill, 44))
    wait_until_held(drill, job, 44, checkpoint_of=40)
    assert [path.name for path in copies.iterdir()] == ["step_00000010.pt"]
    go.touch()
    let_go(drill)
    ended = job.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    steps = sorted(checkpoint.verify(path).step for path in copies.iterdir())
    assert {10, 50} <= set(steps) <= {10, 30, 40, 50}, steps  # 20 was superseded before it had its turn
    return len(steps)


FAULTS = [
    Fault(
        "partial file left over",
        "storage",
        "SIGKILL to rank 0 and to the writer while a checkpoint is half written",
        "the next start deletes the partial file and goes on to the same bits",
        "partial files",
        left_over,
    ),
    Fault(
        "newest checkpoints damaged",
        "storage",
        "the newest is cut short, the one before has a flipped bit",
        "both are named with the reason, the third is taken, no sample is lost",
        "steps made again",
        newest_damaged,
    ),
    Fault(
        "all checkpoints damaged",
        "storage",
        "each is cut short or has a flipped bit",
        "refused with each one's reason and no fresh start; nothing of the run changes",
        "files changed",
        all_damaged,
    ),
    Fault(
        "newest checkpoint unreadable",
        "storage",
        "read of it, by strace: EIO",
        "it is named with the reason, the one before is taken, no sample is lost",
        "steps made again",
        newest_unreadable,
    ),
    Fault(
        "writer killed before it prunes",
        "storage",
        "SIGKILL at its first unlink, while the folder is looked at 100 times",
        "at no instant there are fewer than two whole checkpoints",
        "whole checkpoints at least",
        never_fewer_than_two,
    ),
    Fault(
        "command after a checkpoint fails",
        "storage",
        "--on_checkpoint ends with 3, then is gone",
        "warnings; the run completes",
        "exit code",
        command_fails,
    ),
    Fault(
        "command after a checkpoint hangs",
        "storage",
        "--on_checkpoint does not end before step 44",
        "training does not wait; the newest commit has its turn, and each path is that of a whole checkpoint",
        "commands run",
        command_is_slow,
    ),
]
