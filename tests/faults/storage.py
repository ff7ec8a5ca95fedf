"""Storage that fills up, fails or goes away: the checkpoint before stays whole, training goes on, and stops after a limit."""

import re
import socket
import subprocess
import time
from functools import partial

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from disks import Disk, are_whole, held_at, let_go, run_on, tracing, wait_until_held
from drill import Drill, Fault, Job, says
from utils.ledger import ACCOUNTS

RUN = ("--dataset_size", 200, "--epochs", 2, "--save_every", 0, "--save_every_steps", 10, "--eval_every", 0, "--num_workers", 1)  # 50 steps
KEEPS_ON = "import utils.saving\nutils.saving.FIRST_RETRY, utils.saving.MOST_FAILURES, utils.saving.LAST_TRIES = 0.0, 1000, 10\n"
GIVES_UP = "import utils.saving\nutils.saving.FIRST_RETRY, utils.saving.MOST_FAILURES = 0.1, 3\n"
SPACE = r"it needs 22\.\d MB, [\d,.]+ MB are free; make room or mend the storage"
FOR_GOOD = r" \(3 times in a row, training without a checkpoint ends here\)"


def not_written(step: int, why: str) -> str:
    """A pattern of the sentence."""
    return rf"/checkpoints/step_{step:08d}\.pt: cannot be written \({why}\); "


def goes_on(job: Job, step: int, said: str) -> None:
    """The save failed, which is said, what was there before is whole, and the training comes to this step all the same."""
    job.wait_for(lambda: re.search(said + "; training goes on, and it is tried again in 0 s", job.text()))
    job.wait_for_step(step)
    assert are_whole(job) == [10]


def written_later(drill: Drill, job: Job, *flags: object, step: int = 20) -> float:
    """The checkpoint of this step is there in the end without anybody's doing, and the run is the one that nothing befell."""
    job.wait_for(lambda: step in [event["step"] for event in drill.events("checkpoint")])
    run_on(drill)
    ended = job.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    drill.no_partial_files()
    drill.is_whole(2, *flags)
    return len(re.findall("it is tried again", ended.text))


def ended_with(drill: Drill, job: Job, said: str, has_status: bool = True) -> None:
    """The launch stopped with this sentence of rank 0, and nothing is left behind."""
    ended = job.end()
    assert (ended.code, ended.left) == (1, 0), ended.text
    says(ended.text, said)
    says(ended.text, r"Root Cause \(first observed failure\):(?s:.*)rank      : 0 ")
    if has_status:
        status = drill.json("status.json")
        assert [status[name] for name in ("state", "rank", "host")] == ["failed", 0, socket.gethostname()], status
        says(status["error"], said)


def disk_full(drill: Drill) -> float:
    disk = Disk(drill)
    job = disk.start(2, *RUN, code=KEEPS_ON + held_at(drill, 14))
    wait_until_held(drill, job, 14, checkpoint_of=10)
    disk.fill(leave=5)
    let_go(drill, crawling=True)
    goes_on(job, 22, not_written(20, "No space left on device") + SPACE)
    disk.make_room()
    return written_later(drill, job, *RUN)


def disk_full_for_good(drill: Drill) -> float:
    disk = Disk(drill)
    job = disk.start(2, *RUN, code=GIVES_UP + held_at(drill, 14))
    wait_until_held(drill, job, 14, checkpoint_of=10)
    disk.fill(leave=5)
    let_go(drill, crawling=True)
    step = job.wait_for_step(21).step
    ended_with(drill, job, not_written(20, "No space left on device") + SPACE + FOR_GOOD)
    assert are_whole(job) == [10]
    drill.no_partial_files()
    disk.make_room()
    run_on(drill)
    assert disk.start(2, *RUN, "--resume_from", "auto").end().code == 0
    drill.is_whole(2, *RUN)
    return drill.steps_lost(step)


def records_on_a_full_disk(drill: Drill) -> float:
    flags = (*RUN, "--save_every_steps", 0, "--epochs", 4, "--log_interval", 1)  # 100 steps
    disk = Disk(drill)
    job = disk.start(2, *flags, code=KEEPS_ON + held_at(drill, 14))
    wait_until_held(drill, job, 14)
    disk.fill(leave=0)
    let_go(drill)
    full = job.wait_for_step(70).step - 14
    disk.make_room()
    ended = job.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    drill.no_partial_files()
    steps = list(range(1, 101))
    assert [record["step"] for record in drill.runs.records("run", "train")] == steps
    lines = (job.folder / "logs/rank0.log").read_text().splitlines()
    assert [line for line in lines if not re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z 0 \S+ ", line)] == []
    assert [int(found[1]) for line in lines if (found := re.search(r" \| step (\d+)/100 \| ", line))] == steps
    events = EventAccumulator(str(job.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == steps
    assert drill.json("status.json")["state"] == "completed"
    ledger = drill.json("ledger.json")
    assert abs(sum(ledger[name] for name in ACCOUNTS) - (ledger["until"] - ledger["started_at"])) < 1
    drill.is_whole(2, *flags)
    return full


def read_only(drill: Drill) -> float:
    disk = Disk(drill)
    job = disk.start(2, *RUN, code=GIVES_UP + held_at(drill, 14))
    wait_until_held(drill, job, 14, checkpoint_of=10)
    disk.turn_read_only()
    let_go(drill, crawling=True)
    step = job.wait_for_step(21).step
    ended_with(drill, job, not_written(20, "Read-only file system") + SPACE + FOR_GOOD, has_status=False)
    assert are_whole(job) == [10]
    disk.unmount(disk.run)
    run_on(drill)
    ended = disk.start(2, *RUN, "--resume_from", "auto").end()
    assert ended.code == 0 and drill.json("status.json")["state"] == "completed", ended.text
    drill.is_whole(2, *RUN)
    return drill.steps_lost(step)


def vanished(drill: Drill) -> float:
    job = drill.start(2, *RUN, code=GIVES_UP + held_at(drill, 14))
    wait_until_held(drill, job, 14, checkpoint_of=10)
    while job.folder.exists():  # the account of time is written meanwhile
        subprocess.run(["rm", "-rf", job.folder], capture_output=True)
    let_go(drill)
    said = not_written(20, "No such file or directory") + r"it needs 22\.\d MB, its folder cannot be seen \(No such file or directory\)"
    ended_with(drill, job, said + ".*" + FOR_GOOD, has_status=False)
    assert not job.folder.exists()
    return 0


def unmounted(drill: Drill) -> float:
    disk = Disk(drill, is_run_folder=True)
    job = disk.start(2, *RUN, code=GIVES_UP + held_at(drill, 14))
    wait_until_held(drill, job, 14, checkpoint_of=10)
    disk.unmount(disk.place)
    let_go(drill)
    ended_with(drill, job, not_written(20, "No such file or directory") + ".*" + FOR_GOOD, has_status=False)
    below = list(disk.place.rglob("*"))
    assert below == []
    return len(below)


def let_fail(drill: Drill, code: str, call: str, error: str) -> Job:
    """A run whose writer meets this error in the second save. call: "fsync:3" is the third fsync, "rename:2+" each from the second on."""
    job = drill.start(2, *RUN, code=code + held_at(drill, 5))
    wait_until_held(drill, job, 5)
    name, _, number = call.partition(":")
    writer = job.writer()
    only = ["-P", f"{job.checkpoint(20)}.{writer}.tmp"] if name == "write" else []
    tracing(drill, writer, *only, "-e", f"trace=/^({name})", "-e", f"inject=/^({name}):error={error}:when={number}")
    let_go(drill, crawling=True)
    return job


def call_fails(drill: Drill, call: str, error: str, why: str, whole: list[int]) -> float:
    """Once. whole: which checkpoints are there while it is to be tried again."""
    job = let_fail(drill, KEEPS_ON, call, error)
    job.wait_for(lambda: re.search(not_written(20, why) + SPACE, job.text()))
    assert are_whole(job)[: len(whole)] == whole
    return written_later(drill, job, *RUN)


def rename_fails_for_good(drill: Drill) -> float:
    job = let_fail(drill, GIVES_UP, "rename:2+", "EIO")
    ended_with(drill, job, not_written(20, "Input/output error") + SPACE + FOR_GOOD)
    assert are_whole(job) == [10]
    drill.no_partial_files()
    return 0


def final_save_meets_a_full_disk(drill: Drill) -> float:
    disk = Disk(drill)
    job = disk.start(2, *RUN, code=KEEPS_ON + held_at(drill, 44))
    wait_until_held(drill, job, 44, checkpoint_of=40)
    disk.fill(leave=1)
    let_go(drill)
    job.wait_for(lambda: re.search(not_written(50, "No space left on device") + SPACE, job.text()))
    time.sleep(1)
    disk.make_room()
    ended = job.end()
    assert (ended.code, ended.left) == (0, 0), ended.text
    assert drill.json("status.json")["state"] == "completed" and are_whole(job) == [30, 40, 50]
    drill.no_partial_files()
    return len(re.findall("it is tried again", ended.text))


def final_save_finds_no_room(drill: Drill) -> float:
    disk = Disk(drill)
    job = disk.start(2, *RUN, code=held_at(drill, 44))
    wait_until_held(drill, job, 44, checkpoint_of=40)
    disk.fill(leave=1)
    let_go(drill)
    ended_with(drill, job, not_written(50, "No space left on device") + SPACE + FOR_GOOD)
    assert are_whole(job) == [20, 30, 40]
    drill.no_partial_files()
    return 10


FAULTS = [
    Fault(
        "disk full at a save",
        "storage",
        "a tmpfs of 128 MB is filled but for 5 MB between two saves, and emptied while the save is tried again",
        "the sentence has path, needed and free space; training goes on; the save succeeds by itself",
        "tries in vain",
        disk_full,
    ),
    Fault(
        "disk full for good",
        "storage",
        "the tmpfs stays full",
        "after the limit the run fails with the sentence, rank and host, the checkpoint before whole; goes on once there is room",
        "steps made again",
        disk_full_for_good,
    ),
    Fault(
        "records on a full disk",
        "storage",
        "the tmpfs is filled to the last byte for some fifty steps that are logged each",
        "training goes on; metrics, samples, log, TensorBoard, status and ledger lack no record, and none is twice or cut",
        "steps on a full disk",
        records_on_a_full_disk,
    ),
    Fault(
        "run folder turns read-only",
        "storage",
        "a read-only bind mount over the run's folder",
        "after the limit the run fails with the sentence, the checkpoint before whole; goes on once it is writable",
        "steps made again",
        read_only,
    ),
    Fault(
        "run folder vanishes",
        "storage",
        "rm -rf of the run's folder",
        "after the limit the run fails with the sentence, and makes no new folder of that name",
        "files left",
        vanished,
    ),
    Fault(
        "run folder unmounted",
        "storage",
        "umount of the file system that is the run's folder",
        "after the limit the run fails with the sentence, and nothing is written below the mount point",
        "files left",
        unmounted,
    ),
    *[
        Fault(
            kind,
            "storage",
            f"{call} of the writer, by strace: {error}",
            "the sentence has the cause; the save succeeds when it is tried again",
            "tries in vain",
            partial(call_fails, call=call, error=error, why=why, whole=whole),
        )
        for kind, call, error, why, whole in (
            ("EIO at the fsync of a checkpoint", "fsync:3", "EIO", "Input/output error", [10]),
            ("EIO at the fsync of the folder", "fsync:4", "EIO", "Input/output error", [10, 20]),
            ("ENOSPC in the midst of a file", "write:3", "ENOSPC", "No space left on device", [10]),
        )
    ],
    Fault(
        "EIO at the rename for good",
        "storage",
        "each rename of the writer from the second on, by strace: EIO",
        "after the limit the run fails with the sentence, the checkpoint before is whole, no partial file is left",
        "files left",
        rename_fails_for_good,
    ),
    Fault(
        "final save meets a full disk",
        "storage",
        "the tmpfs is full when the last save is made, and has room a second later",
        "the save is tried again and the run completes",
        "tries in vain",
        final_save_meets_a_full_disk,
    ),
    Fault(
        "final save finds no room",
        "storage",
        "the tmpfs is full when the last save is made, and stays so",
        "the run fails with the sentence, rank and host, and the checkpoints before are whole",
        "steps lost",
        final_save_finds_no_room,
    ),
]
