# extra: template
"""Checkpoints that are damaged, truncated, partial or untrusted, and the command that runs after each checkpoint."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from disks import tracing
from drill import FLAGS, Drill, fault
from ranks import run_ranks
from storage import RUN
from tasks import train_task
from training import says
from utils.checkpoint import format as checkpoint
from utils.checkpoint.format import list_step_checkpoints, step_checkpoint_path


def stopped_at_30(drill: Drill) -> Path:
    """A run stopped at step 30; returns its folder with the checkpoints of steps 10, 20 and 30."""
    words = [*FLAGS, "--run_dir", drill.folder / "run", *RUN]
    run_ranks(2, train_task, "images", words, torch.float32, [29], False)
    folder = drill.folder / "run/checkpoints"
    assert [checkpoint.verify_checkpoint(path).step for path in list_step_checkpoints(folder)] == [10, 20, 30]
    return folder


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


CUT = r"step_00000030\.pt has no checksum at its end, so it is truncated or not a checkpoint"
FLIPPED = r"step_00000020\.pt is damaged: its bytes do not match the checksum at its end"


def damage_two(drill: Drill, folder: Path) -> None:
    cut(step_checkpoint_path(folder, 30))
    flip(step_checkpoint_path(folder, 20))


def drop_another_runs(drill: Drill, folder: Path) -> None:
    drill.fork(2, *RUN, "--seed", 7, "--max_steps", 10, name="other")
    shutil.copy(drill.runs.checkpoints("other")[0], step_checkpoint_path(folder, 40))


@fault("newest checkpoints damaged", damage_two, 10, CUT, FLIPPED, is_default=True, guarantees="damaged")
@fault(
    "checkpoint of another run in the folder",
    drop_another_runs,
    30,
    r"step_00000040\.pt is the checkpoint of step 10 under another name",
    guarantees="untrusted",
)
def passed_over(drill: Drill, spoil: Callable[[Drill, Path], None], taken: int, *sentences: str) -> None:
    """The run resumes from the checkpoint of step `taken`, logs the reason, and ends bitwise equal."""
    spoil(drill, stopped_at_30(drill))
    ended = drill.completes(2, *RUN, "--resume_from", "auto")
    for sentence in sentences:
        says(ended.text, sentence)
    assert drill.events("resumed")[-1]["step"] == taken
    drill.is_whole(2, *RUN)


@fault("newest checkpoint unreadable", guarantees="damaged")
def newest_unreadable(drill: Drill) -> None:
    path = step_checkpoint_path(stopped_at_30(drill), 30)
    code = "while not os.path.exists(f'{FOLDER}/traced'):\n    time.sleep(0.01)\n"
    job = drill.start(2, *RUN, "--resume_from", "auto", code=code)
    for pid in job.wait_for(lambda: len(pids := job.children(job.program.pid)) == 2 and pids):
        tracing(drill, pid, "-f", "-qq", "-P", path, "-e", "trace=read,mmap", "-e", "inject=read:error=EIO")
    (drill.folder / "traced").touch()
    unread = r"step_00000030\.pt cannot be read in three tries \(Input/output error\)\. Repair the storage"
    drill.fails(job, unread, has_status=False)
    assert path.exists()  # it is not taken for damaged
    drill.resumes(2, *RUN)
    assert drill.events("resumed")[-1]["step"] == 30


@fault("command after a checkpoint fails")  # extra: companions
def command_fails(drill: Drill) -> None:
    command = drill.folder / "command"
    command.write_text("#!/bin/sh\nexit 3\n")
    command.chmod(0o755)
    job = drill.held(2, 24, *RUN, "--on_checkpoint", command, checkpoint_of=20)
    command.unlink()
    drill.let_go()
    ended = drill.has_completed(job)
    for problem in ("ended with exit code 3", r"cannot be run \(No such file or directory\)"):
        says(ended.text, rf"The command of --on_checkpoint \({command}\) {problem}\. The checkpoint is valid\.")


@fault("command after a checkpoint hangs", guarantees="command")  # extra: companions
def command_is_slow(drill: Drill) -> None:
    command, copies, go = drill.folder / "command", drill.folder / "copies", drill.folder / "release"
    copies.mkdir()
    command.write_text(f'#!/bin/sh\ncp "$1" {copies}\nwhile [ ! -e {go} ]; do sleep 0.1; done\n')
    command.chmod(0o755)
    job = drill.held(2, 44, *RUN, "--on_checkpoint", command, checkpoint_of=40)
    assert [path.name for path in copies.iterdir()] == ["step_00000010.pt"]
    go.touch()
    drill.let_go()
    drill.has_completed(job)
    steps = sorted(checkpoint.verify_checkpoint(path).step for path in copies.iterdir())
    assert {10, 50} <= set(steps) <= {10, 30, 40, 50}, steps  # 20 was superseded before its command started
