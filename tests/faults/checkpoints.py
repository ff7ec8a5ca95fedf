"""Checkpoints that are damaged, cut off, left over or handed over by somebody else, and the command that runs after
each."""

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from disks import are_whole, tracing
from drill import FLAGS, LOOKED, SAME_BITS, Drill, fault, says, slow_writer
from forged import Call
from ranks import run_ranks
from storage import RUN
from tasks import train_task
from utils.checkpoint import format as checkpoint
from utils.checkpoint.format import step_checkpoints, step_path


@fault(
    "partial file left over",
    "SIGKILL to rank 0 and to the writer while a checkpoint is half written",
    f"the next start deletes the partial file; {SAME_BITS}",
    "partial files",
    is_default=True,
)
def left_over(drill: Drill) -> float:
    job = drill.start(2, *RUN, code=slow_writer("60 * (path.name == 'step_00000020.pt')"))
    job.wait_for(lambda: list(job.folder.glob("checkpoints/step_00000020.pt.*.tmp")))
    writer = job.writer()
    job.signal(0, signal.SIGKILL)
    os.kill(writer, signal.SIGKILL)
    drill.fails(job)
    left = list(job.folder.glob("checkpoints/*.tmp"))
    assert len(left) == 1 and are_whole(job) == [10]
    drill.resumes(2, *RUN)
    return len(left)


def stopped_at_30(drill: Drill) -> Path:
    """The folder of the checkpoints of steps 10, 20 and 30."""
    words = [*FLAGS, "--run_dir", drill.folder / "run", *RUN]
    run_ranks(2, train_task, "images", words, torch.float32, [29], False, False)
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


def damage_two(drill: Drill, folder: Path) -> None:
    cut(step_path(folder, 30))
    flip(step_path(folder, 20))


def drop_malicious(drill: Drill, folder: Path) -> None:
    """A checkpoint of step 40 whose seal is right, and which makes who unpickles it touch the marker."""
    marker, payload = drill.folder / "marker", checkpoint.read(step_path(folder, 30))[0]
    payload["model"], payload["progress"]["step"] = Call(os.system, f"touch {marker}"), 40
    pickle.loads(pickle.dumps(payload["model"]))
    assert marker.exists(), "the bomb is a dud"
    marker.unlink()
    checkpoint.write(step_path(folder, 40), payload, claim=drill.json("claim.json")["number"])


def drop_another_runs(drill: Drill, folder: Path) -> None:
    drill.fork(2, *RUN, "--seed", 7, "--max_steps", 10, name="other")
    shutil.copy(drill.runs.checkpoints("other")[0], step_path(folder, 40))


@fault(
    "newest checkpoints damaged",
    "the newest is cut short, the one before has a flipped bit",
    "both are named with the reason, the third is taken, no sample is lost",
    "steps redone",
    *(damage_two, 10, CUT, FLIPPED),
    is_default=True,
)
@fault(
    "malicious file in the folder",
    "a checkpoint, its checksum right, that runs a command when it is unpickled, as the newest step of a run",
    f"passed over with a line, no code runs; {SAME_BITS}",
    "steps redone",
    *(drop_malicious, 30, r"step_00000040\.pt: is no checkpoint"),
    is_default=True,
)
@fault(
    "checkpoint of another run in the folder",
    "under the name of a newer step",
    f"passed over with a line; {SAME_BITS}",
    "steps redone",
    *(drop_another_runs, 30, r"step_00000040\.pt: is the checkpoint of step 10 under another's name"),
)
def passed_over(drill: Drill, spoil: Callable[[Drill, Path], None], taken: int, *sentences: str) -> float:
    """The run goes on from this step's checkpoint, says why, and ends in the same bits."""
    spoil(drill, stopped_at_30(drill))
    ended = drill.completes(2, *RUN, "--resume_from", "auto")
    for sentence in sentences:
        says(ended.text, sentence)
    assert drill.events("resumed")[-1]["step"] == taken and not (drill.folder / "marker").exists()
    drill.is_whole(2, *RUN)
    return drill.steps_lost(30)


@fault(
    "all checkpoints damaged",
    "each is cut short or has a flipped bit",
    "refused with each one's reason and no fresh start; nothing of the run changes",
    "checkpoints named",
    is_default=True,
)
def all_damaged(drill: Drill) -> float:
    folder = stopped_at_30(drill)
    for step, damage in ((10, cut), (20, flip), (30, cut)):
        damage(step_path(folder, step))
    refused = "has no whole checkpoint; give one with --resume_from, or --overwrite to start anew"
    with drill.unchanged(*LOOKED):
        drill.fails(drill.start(2, *RUN, "--resume_from", "auto"), CUT, FLIPPED, refused, has_status=False)
    return 3


@fault(
    "newest checkpoint unreadable",
    "its read fails, by strace",
    "named, the one before is taken, no sample is lost",
    "steps redone",
)
def newest_unreadable(drill: Drill) -> float:
    path = step_path(stopped_at_30(drill), 30)
    code = "while not os.path.exists(f'{FOLDER}/traced'):\n    time.sleep(0.01)\n"
    job = drill.start(2, *RUN, "--resume_from", "auto", code=code)
    for pid in job.wait_for(lambda: len(found := job.children(job.program.pid)) == 2 and found):
        tracing(drill, pid, "-f", "-qq", "-P", path, "-e", "trace=read,mmap", "-e", "inject=read:error=EIO")
    (drill.folder / "traced").touch()
    ended = drill.has_completed(job)
    says(ended.text, r"step_00000030\.pt: cannot be read \(Input/output error\)")
    drill.is_whole(2, *RUN)
    return drill.steps_lost(30)


@fault(
    "command after a checkpoint fails",
    "--on_checkpoint ends with 3, then is gone",
    "warnings; the run completes",
    "warnings",
)
def command_fails(drill: Drill) -> float:
    command = drill.folder / "command"
    command.write_text("#!/bin/sh\nexit 3\n")
    command.chmod(0o755)
    job = drill.held(2, 24, *RUN, "--on_checkpoint", command, checkpoint_of=20)
    command.unlink()
    drill.let_go()
    ended = drill.has_completed(job)
    says(ended.text, f"on_checkpoint: {command} ended with exit code 3; the checkpoint itself is whole")
    says(
        ended.text,
        rf"on_checkpoint: {command} cannot be run \(No such file or directory\); the checkpoint itself is whole",
    )
    return ended.text.count("the checkpoint itself is whole")


@fault(
    "command after a checkpoint hangs",
    "--on_checkpoint does not end before step 44",
    "training does not wait; the newest commit has its turn, and each path is that of a whole checkpoint",
    "commands run",
)
def command_is_slow(drill: Drill) -> float:
    command, copies, go = drill.folder / "command", drill.folder / "copies", drill.folder / "release"
    copies.mkdir()
    command.write_text(f'#!/bin/sh\ncp "$1" {copies}\nwhile [ ! -e {go} ]; do sleep 0.1; done\n')
    command.chmod(0o755)
    job = drill.held(2, 44, *RUN, "--on_checkpoint", command, checkpoint_of=40)
    assert [path.name for path in copies.iterdir()] == ["step_00000010.pt"]
    go.touch()
    drill.let_go()
    drill.has_completed(job)
    steps = sorted(checkpoint.verify(path).step for path in copies.iterdir())
    assert {10, 50} <= set(steps) <= {10, 30, 40, 50}, steps  # 20 was superseded before it had its turn
    return len(steps)
