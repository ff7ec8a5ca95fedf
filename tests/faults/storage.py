# extra: template
"""Storage that fills up, fails or disappears: the previous checkpoint stays valid, training continues, and ends after
a time limit."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fuse_disk
from disks import Disk, are_whole, tracing
from drill import HOST, Drill, Job, fault
from ranks import lack
from training import attempts_in, wait_until

# 50 steps of two ranks
RUN = "--dataset_size 200 --epochs 2 --save_every 0 --save_every_steps 10 --eval_every 0 --num_workers 1".split()
LARGE = """
plain_model = train.your_model.create_model
def create_model(config, device):
    net = plain_model(config, device)
    net.frozen = torch.nn.Parameter(torch.zeros(2_000_000), requires_grad=False)
    return net
train.your_model.create_model = create_model
"""  # checkpoints of 8 MB, so that all other files can still fit
# 1.5 s instead of ten minutes
GIVES_UP = f"{LARGE}\nfrom utils.run import checkpoints\ncheckpoints.SECONDS_UNTIL_WRITE_FAILS = 1.5\n"
SPACE = r"The checkpoint needs 8\.0 MB, and [\d,.]+ MB are free\. Make room or repair the storage\."
NO_INODES = r"No inodes are free, so the file system can hold no more files\. Delete some files\."
FOR_GOOD = r" No checkpoint could be written for 0 min, so training ends\."


def not_written(step: int | str, why: str) -> str:
    """A pattern of the message."""
    return rf"/checkpoints/step_000000{step}\.pt cannot be written \({why}\)\. "


def written_later(drill: Drill, job: Job) -> None:
    """The next checkpoint, of step 30, is written automatically, and the run equals the one without a fault."""
    job.wait_for(lambda: 30 in [event["step"] for event in drill.events("checkpoint")])
    drill.run_on()
    drill.has_completed(job)
    drill.no_partial_files()
    drill.is_whole(2, *RUN, code=LARGE)


def held_on_a_disk(
    drill: Drill, code: str, step: int = 14, checkpoint_of: int = 10, **options: object
) -> tuple[Disk, Job]:
    disk = Disk(drill, **options)
    return disk, disk.held(2, step, *RUN, code=code, checkpoint_of=checkpoint_of)


@fault("disk full at a save", is_default=True, guarantees="disk")
def disk_full(drill: Drill) -> None:
    disk, job = held_on_a_disk(drill, LARGE)
    disk.fill(leave=5)
    drill.let_go(is_slow=True)
    pattern = not_written(20, "No space left on device") + SPACE + " Training continues"
    job.wait_for(lambda: re.search(pattern, job.text()))
    job.wait_for_step(22)
    assert are_whole(job) == [10]
    disk.make_room()
    written_later(drill, job)


@fault("inode table full", guarantees="disk")
def no_inodes(drill: Drill) -> None:
    """Saves fail every few milliseconds; the time limit is the default one of ten minutes."""
    flags = (*RUN, "--save_every_steps", 2)
    disk = Disk(drill, inodes=500)
    job = disk.held(2, 14, *flags, code=LARGE, checkpoint_of=12)
    disk.take_inodes()
    drill.let_go()
    pattern = not_written(r"\d\d", "No space left on device") + NO_INODES + " Training continues"
    job.wait_for(lambda: len(re.findall(pattern, job.text())) > 7)
    disk.make_room()
    drill.has_completed(job)
    assert are_whole(job)[-1] == 50
    drill.no_partial_files()
    drill.is_whole(2, *flags, code=LARGE)


@fault("checkpoints folder deleted", guarantees="disk")
def checkpoints_deleted(drill: Drill) -> None:
    job = drill.held(2, 14, *RUN, checkpoint_of=10)
    shutil.rmtree(job.checkpoint(10).parent)
    drill.let_go()
    drill.has_completed(job)
    assert are_whole(job) == [30, 40, 50]
    drill.is_whole(2, *RUN)


@fault("disk full for good", "full", guarantees="disk")
@fault("inode table full for good", "inodes", guarantees="disk")
@fault("run folder turns read-only", "read-only", guarantees="disk")
def not_writable(drill: Drill, kind: str) -> None:
    disk, job = held_on_a_disk(drill, GIVES_UP)
    spoil, repair, why, space = {
        "full": (lambda: disk.fill(leave=5), disk.make_room, "No space left on device", SPACE),
        "inodes": (disk.take_inodes, disk.make_room, "No space left on device", NO_INODES),
        "read-only": (disk.turn_read_only, lambda: disk.unmount(disk.run), "Read-only file system", SPACE),
    }[kind]
    spoil()
    drill.let_go(is_slow=True)
    job.wait_for_step(21)
    drill.fails(job, not_written("30", why) + space + FOR_GOOD, rank=0, has_status=kind != "read-only")
    assert are_whole(job) == [10]
    drill.no_partial_files()
    repair()
    disk.completes(2, *RUN, "--resume_from", "auto", code=LARGE)
    assert drill.json("status.json")["state"] == "completed"
    drill.is_whole(2, *RUN, code=LARGE)


@fault("records on a full disk", guarantees="disk")
def records_on_a_full_disk(drill: Drill) -> None:
    flags = (*RUN, "--save_every_steps", 0, "--epochs", 4, "--log_interval", 1)  # 100 steps
    disk = Disk(drill)
    job = disk.held(2, 14, *flags, code=LARGE, is_real=True)  # forked ranks do not write TensorBoard files
    disk.fill(leave=0)
    drill.let_go()
    job.wait_for_step(60)
    disk.make_room()
    drill.has_completed(job)
    drill.no_partial_files()
    steps = list(range(1, 101))
    assert [record["step"] for record in drill.runs.records("run", "train")] == steps
    lines = (job.folder / "logs/rank0.log").read_text().splitlines()
    assert [line for line in lines if not re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z 0 \S+ ", line)] == []
    assert [int(match[1]) for line in lines if (match := re.search(r" \| step (\d+)/100 \| ", line))] == steps
    events = EventAccumulator(str(job.folder / "tensorboard"))
    events.Reload()
    # TensorBoard starts a new file, without the lost records
    shown = [event.step for event in events.Scalars("train/loss")]
    assert shown == sorted({*shown} & {*steps}) and {*range(1, 14), *range(62, 101)} <= {*shown}
    assert drill.json("status.json")["state"] == "completed"
    (attempt,) = attempts_in(job.folder)
    assert abs(sum(drill.json("summary.json")["time"].values()) - (attempt.ended_at - attempt.started_at)) < 1
    drill.is_whole(2, *flags, code=LARGE)


@fault("run folder vanishes", False, guarantees="disk")
@fault("run folder unmounted", True, guarantees="disk")
def goes_away(drill: Drill, is_unmounted: bool) -> None:
    disk, job = held_on_a_disk(drill, GIVES_UP, is_run_folder=is_unmounted)
    if is_unmounted:
        disk.unmount(disk.place)
    while job.folder.exists() and not is_unmounted:  # status.json may be written meanwhile
        subprocess.run(["rm", "-rf", disk.seen / "run"], capture_output=True)
    drill.let_go(is_slow=True)
    pattern = (
        not_written("30", "No such file or directory")
        + r"The checkpoint needs 8\.0 MB, and its folder cannot be accessed \(No such file or directory\)"
    )
    drill.fails(job, pattern + ".*" + FOR_GOOD, has_status=False)
    left = list(disk.seen.rglob("*"))
    assert left == [], left


@fault("EIO at the fsync of a checkpoint", 1, [10], guarantees="disk")
@fault("EIO at the fsync of the folder", 2, [10, 20], guarantees="disk")
def flush_fails(drill: Drill, number: int, whole: list[int]) -> None:
    """One failure, in the second save. number: which fsync of the save fails. whole: the checkpoints that exist until
    the retry."""
    job = drill.held(2, 14, *RUN, code=LARGE, checkpoint_of=10)
    tracing(drill, job.writer(), "-e", "trace=fsync", "-e", f"inject=fsync:error=EIO:when={number}")
    drill.let_go(is_slow=True)
    job.wait_for(lambda: re.search(not_written(20, "Input/output error") + SPACE, job.text()))
    assert are_whole(job)[: len(whole)] == whole
    written_later(drill, job)


# a write without progress: seconds instead of a minute and of 20 s
STALLS = """
from utils.run import checkpoints
checkpoints.SECONDS_TO_WARN, checkpoints.SECONDS_AFTER_STOP, checkpoints.SECONDS_UNTIL_WRITE_FAILS = 2.0, 3.0, {}
"""
# the thread waits in a system call, in the middle of the file of step 20
HANGS = """
from utils.checkpoint import archive
plain_fsync = os.fsync
def fsync(descriptor):
    if 'step_00000020' in os.readlink(f'/proc/self/fd/{descriptor}'):
        os.close(os.open(f'{FOLDER}/answer', os.O_RDONLY))  # waits until it is opened for writing, too
    plain_fsync(descriptor)
os.fsync = fsync
"""
ENDS_IN_SECONDS, ENDS_AT_A_STOP = STALLS.format(4.0), STALLS.format(600.0)
NO_PROGRESS = r"The write of \S+/checkpoints/step_00000020\S* has made no progress for \d+ s"


def stalled_write(drill: Drill, code: str, *flags: object) -> Job:
    """A run whose file of step 20 is not flushed."""
    os.mkfifo(drill.folder / "answer")
    job = drill.held(2, 14, *RUN, *flags, code=HANGS + code, checkpoint_of=10)
    drill.let_go(is_slow=True)
    job.wait_for_partial_file()
    return job


@fault("write hangs and then continues", guarantees="stalled-write")
def write_stalls(drill: Drill) -> None:
    """Only the limit for the warning is shortened."""
    code = STALLS.format(600.0) + "assembly.Checkpoints = checkpoints.Checkpoints\n"  # saves need not wait
    job = stalled_write(drill, code, "--epochs", 4)
    job.wait_for(lambda: re.search(NO_PROGRESS + r"\. Check the storage\.", job.text()))
    job.wait_for_step(40)  # training continues
    (drill.folder / "answer").write_text("")
    drill.run_on()
    drill.has_completed(job)
    assert 20 in [event["step"] for event in drill.events("checkpoint")]
    drill.is_whole(2, *RUN, "--epochs", 4)


@fault("write hangs for good", False, is_default=True, guarantees="stalled-write")
@fault("SIGTERM while a write hangs", True, guarantees="stalled-write")
def write_hangs(drill: Drill, is_asked: bool) -> None:
    job = stalled_write(drill, ENDS_AT_A_STOP if is_asked else ENDS_IN_SECONDS)
    ends_without(drill, job, is_asked, rank=0)
    assert are_whole(job) == [10]
    drill.resumes(2, *RUN)


def ends_without(drill: Drill, job: Job, is_asked: bool, rank: int) -> None:
    """The run warns of the write, then ends with the cause and the latest checkpoint."""
    job.wait_for(lambda: re.search(NO_PROGRESS + r"\. Check the storage\.", job.text()))
    if is_asked:
        job.signal_launcher(signal.SIGTERM)
    latest = r"The latest checkpoint is \S+/checkpoints/step_00000010\S*\. Repair the storage, .* --resume_from auto\."
    pattern = rf"{NO_PROGRESS} on rank {rank} \({HOST}\), so training ends\. {latest}"
    drill.fails(job, pattern, rank=rank)


def on_fuse(drill: Drill, bytes_per_second: float) -> Path:
    """Mount a file system (fuse_disk.py) as the checkpoint folder of the run; returns the folder behind it."""
    python = fuse_disk.python()
    if not python:
        lack("no Python with fusepy (pip install fusepy, apt install libfuse2; FUSE_PYTHON names it), or no /dev/fuse")
    behind, mount = drill.folder / "behind", drill.folder / "run/checkpoints"
    behind.mkdir()
    mount.mkdir(parents=True)
    server = drill.beside(python, fuse_disk.__file__, behind, mount, bytes_per_second)
    unmount = 'umount -l "$0" || fusermount -uz "$0"'  # the second without root
    drill.ends.callback(lambda: subprocess.run(["sh", "-c", unmount, mount], capture_output=True))
    wait_until(lambda: mount.is_mount() or server.poll() is not None)
    if not mount.is_mount():
        lack("this machine allows no FUSE mounts")
    return behind


@fault("file system hangs in a write", "write")
@fault("file system hangs in fsync", "fsync")
@fault("file system hangs in rename", "rename")
def hangs_in(drill: Drill, call: str) -> None:
    """A thread in a call of the kernel cannot be killed: its process is gone when the call returns."""
    behind = on_fuse(drill, 1e9)
    job = drill.held(2, 14, *RUN, code=ENDS_IN_SECONDS, checkpoint_of=10)
    hangs = drill.folder / f"hang-{call}"
    hangs.touch()
    drill.let_go(is_slow=True)
    job.wait_for(lambda: re.search(NO_PROGRESS + r"\. Check the storage\.", job.text()))
    wait_until(lambda: drill.json("status.json")["state"] == "failed")
    hangs.unlink()
    ends_without(drill, job, False, rank=0)
    assert (behind / "step_00000010.pt").exists()
    drill.resumes(2, *RUN)


@fault("slow file system")
def slow_file_system(drill: Drill) -> None:
    """A write takes longer than the limit for one without progress, and each 4 MB of it takes less."""
    large, flags = LARGE.replace("2_000_000", "16_000_000"), (*RUN, "--save_every_steps", 25)
    on_fuse(drill, 8e6)
    ended = drill.completes(2, *flags, code=large + ENDS_IN_SECONDS)
    assert not re.search(r"write of \S*step_\d+\S* has made no progress", ended.text), ended.text
    seconds = [event["seconds"] for event in drill.events("checkpoint")]
    assert len(seconds) == 2 and min(seconds) > 6, seconds
    drill.is_whole(2, *flags, code=large)


@fault("final save, disk full", True, guarantees="disk")
@fault("final save finds no room", False, guarantees="disk")
def final_save_on_a_full_disk(drill: Drill, is_emptied: bool) -> None:
    disk, job = held_on_a_disk(drill, LARGE, 44, 40)
    disk.fill(leave=1)
    drill.let_go()
    pattern = not_written(50, "No space left on device") + SPACE
    if is_emptied:
        job.wait_for(lambda: re.search(pattern, job.text()))
        time.sleep(1)
        disk.make_room()
        drill.has_completed(job)
        assert drill.json("status.json")["state"] == "completed"
    else:
        drill.fails(job, r"The last checkpoint cannot be written to \S+/checkpoints\. Make room", rank=0)
    assert are_whole(job) == ([30, 40, 50] if is_emptied else [20, 30, 40])
    drill.no_partial_files()
