"""Storage that fills up, fails or goes away: the checkpoint before stays whole, training goes on, and stops after a limit."""

import re
import subprocess
import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from disks import Disk, are_whole, tracing
from drill import SAME_BITS, Drill, Job, fault
from utils.ledger import ACCOUNTS

RUN = "--dataset_size 200 --epochs 2 --save_every 0 --save_every_steps 10 --eval_every 0 --num_workers 1".split()  # 50 steps of two ranks
LARGE = """
plain_model = train.create_model
def create_model(config, device):
    net = plain_model(config, device)
    net.frozen = torch.nn.Parameter(torch.zeros(2_000_000), requires_grad=False)
    return net
train.create_model = create_model
"""  # checkpoints of 8 MB, so that there may be room for everything else
KEEPS_ON = f"{LARGE}\nimport utils.saving\nutils.saving.FIRST_RETRY, utils.saving.MOST_FAILURES, utils.saving.LAST_TRIES = 0.0, 1000, 10\n"
GIVES_UP = f"{LARGE}\nimport utils.saving\nutils.saving.FIRST_RETRY, utils.saving.MOST_FAILURES = 0.1, 3\n"
SPACE = r"it needs 8\.0 MB, [\d,.]+ MB are free; make room or mend the storage"
FOR_GOOD = r" \(3 times in a row, training without a checkpoint ends here\)"
UNTIL_THE_LIMIT = "after the limit the run fails with the sentence, rank and host, the checkpoint before whole"
AGAIN = "the sentence has the cause; the save succeeds when it is tried again"


def not_written(step: int | str, why: str) -> str:
    """A pattern of the sentence."""
    return rf"/checkpoints/step_000000{step}\.pt: cannot be written \({why}\); "


def written_later(drill: Drill, job: Job) -> float:
    """The checkpoint of step 20 is there in the end without anybody's doing, and the run is the one without a fault."""
    job.wait_for(lambda: 20 in [event["step"] for event in drill.events("checkpoint")])
    drill.run_on()
    ended = drill.has_completed(job)
    drill.no_partial_files()
    drill.is_whole(2, *RUN, code=LARGE)
    return len(re.findall("it is tried again", ended.text))


def held_on_a_disk(drill: Drill, code: str, step: int = 14, checkpoint_of: int = 10, **options: object) -> tuple[Disk, Job]:
    disk = Disk(drill, **options)
    return disk, disk.held(2, step, *RUN, code=code, checkpoint_of=checkpoint_of)


@fault(
    "disk full at a save",
    "a tmpfs of 64 MB is filled but for 5 MB between two saves, and emptied while the save is tried again",
    "the sentence has path, needed and free space; training goes on; the save succeeds by itself",
    "tries in vain",
    is_default=True,
)
def disk_full(drill: Drill) -> float:
    disk, job = held_on_a_disk(drill, KEEPS_ON)
    disk.fill(leave=5)
    drill.let_go(is_slow=True)
    said = not_written(20, "No space left on device") + SPACE + "; training goes on, and it is tried again in 0 s"
    job.wait_for(lambda: re.search(said, job.text()))
    job.wait_for_step(22)
    assert are_whole(job) == [10]
    disk.make_room()
    return written_later(drill, job)


@fault("disk full for good", "the tmpfs stays full", f"{UNTIL_THE_LIMIT}; with room, {SAME_BITS}", "steps redone", is_default=True)
def disk_full_for_good(drill: Drill) -> float:
    disk, job = held_on_a_disk(drill, GIVES_UP)
    disk.fill(leave=5)
    drill.let_go(is_slow=True)
    step = job.wait_for_step(21).step
    drill.fails(job, not_written("[23]0", "No space left on device") + SPACE + FOR_GOOD, rank=0)
    assert are_whole(job) == [10]
    drill.no_partial_files()
    disk.make_room()
    disk.completes(2, *RUN, "--resume_from", "auto", code=LARGE)
    drill.is_whole(2, *RUN, code=LARGE)
    return drill.steps_lost(step)


@fault(
    "records on a full disk",
    "the tmpfs is filled to the last byte for some fifty steps that are logged each",
    "training goes on; metrics, samples, log, TensorBoard, status and ledger lack no record, and none is twice or cut",
    "steps on a full disk",
)
def records_on_a_full_disk(drill: Drill) -> float:
    flags = (*RUN, "--save_every_steps", 0, "--epochs", 4, "--log_interval", 1)  # 100 steps
    disk = Disk(drill)
    job = disk.held(2, 14, *flags, code=KEEPS_ON, is_real=True)  # forked ranks have no TensorBoard
    disk.fill(leave=0)
    drill.let_go()
    full = job.wait_for_step(60).step - 14
    disk.make_room()
    drill.has_completed(job)
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
    drill.is_whole(2, *flags, code=LARGE)
    return full


@fault("run folder turns read-only", "a read-only bind mount over it", f"{UNTIL_THE_LIMIT}; writable again, {SAME_BITS}", "steps redone")
def read_only(drill: Drill) -> float:
    disk, job = held_on_a_disk(drill, GIVES_UP)
    disk.turn_read_only()
    drill.let_go(is_slow=True)
    step = job.wait_for_step(21).step
    drill.fails(job, not_written("[23]0", "Read-only file system") + SPACE + FOR_GOOD, has_status=False)
    assert are_whole(job) == [10]
    disk.unmount(disk.run)
    disk.completes(2, *RUN, "--resume_from", "auto", code=LARGE)
    assert drill.json("status.json")["state"] == "completed"
    drill.is_whole(2, *RUN, code=LARGE)
    return drill.steps_lost(step)


@fault("run folder vanishes", "rm -rf of the run's folder", f"{UNTIL_THE_LIMIT}; no new folder of that name is made", "files left")
def vanished(drill: Drill) -> float:
    job = drill.held(2, 14, *RUN, code=GIVES_UP, checkpoint_of=10)
    while job.folder.exists():  # the account of time is written meanwhile
        subprocess.run(["rm", "-rf", job.folder], capture_output=True)
    drill.let_go()
    said = not_written("[23]0", "No such file or directory") + r"it needs 8\.0 MB, its folder cannot be seen \(No such file or directory\)"
    drill.fails(job, said + ".*" + FOR_GOOD, has_status=False)
    assert not job.folder.exists()
    return 0


@fault("run folder unmounted", "umount of the folder's file system", f"{UNTIL_THE_LIMIT}; the mount point stays empty", "files left")
def unmounted(drill: Drill) -> float:
    disk, job = held_on_a_disk(drill, GIVES_UP, is_run_folder=True)
    disk.unmount(disk.place)
    drill.let_go()
    drill.fails(job, not_written("[23]0", "No such file or directory") + ".*" + FOR_GOOD, has_status=False)
    below = list(disk.place.rglob("*"))
    assert below == []
    return len(below)


def let_fail(drill: Drill, code: str, call: str, error: str) -> Job:
    """A run whose writer gets this error in the second save. call: "fsync:3" is the third fsync, "rename:2+" each from the second on."""
    job = drill.held(2, 5, *RUN, code=code)
    name, _, number = call.partition(":")
    writer = job.writer()
    only = ["-P", f"{job.checkpoint(20)}.{writer}.tmp"] if name == "write" else []
    tracing(drill, writer, *only, "-e", f"trace=/^({name})", "-e", f"inject=/^({name}):error={error}:when={number}")
    drill.let_go(is_slow=True)
    return job


EIO, ENOSPC = ("EIO", "Input/output error"), ("ENOSPC", "No space left on device")


@fault("EIO at the fsync of a checkpoint", "by strace on the writer", AGAIN, "tries in vain", "fsync:3", *EIO, [10], is_default=True)
@fault("EIO at the fsync of the folder", "by strace on the writer", AGAIN, "tries in vain", "fsync:4", *EIO, [10, 20])
@fault("ENOSPC in the midst of a file", "by strace on the writer", AGAIN, "tries in vain", "write:3", *ENOSPC, [10])
def call_fails(drill: Drill, call: str, error: str, why: str, whole: list[int]) -> float:
    """Once. whole: which checkpoints are there while it is to be tried again."""
    job = let_fail(drill, KEEPS_ON, call, error)
    job.wait_for(lambda: re.search(not_written(20, why) + SPACE, job.text()))
    assert are_whole(job)[: len(whole)] == whole
    return written_later(drill, job)


@fault(
    "EIO at the rename for good", "every rename from the second on, by strace", f"{UNTIL_THE_LIMIT}; no partial file is left", "files left"
)
def rename_fails_for_good(drill: Drill) -> float:
    job = let_fail(drill, GIVES_UP, "rename:2+", "EIO")
    drill.fails(job, not_written("[23]0", "Input/output error") + SPACE + FOR_GOOD, rank=0)
    assert are_whole(job) == [10]
    drill.no_partial_files()
    return 0


@fault(
    "final save, disk full",
    "a full tmpfs at the last save, with room a second later",
    "tried again, and the run completes",
    "tries in vain",
)
def final_save_on_a_full_disk(drill: Drill) -> float:
    disk, job = held_on_a_disk(drill, KEEPS_ON, 44, 40)
    disk.fill(leave=1)
    drill.let_go()
    job.wait_for(lambda: re.search(not_written(50, "No space left on device") + SPACE, job.text()))
    time.sleep(1)
    disk.make_room()
    ended = drill.has_completed(job)
    assert drill.json("status.json")["state"] == "completed" and are_whole(job) == [30, 40, 50]
    drill.no_partial_files()
    return len(re.findall("it is tried again", ended.text))


@fault("final save finds no room", "the same, and the tmpfs stays full", f"{UNTIL_THE_LIMIT}", "steps lost")
def final_save_finds_no_room(drill: Drill) -> float:
    disk, job = held_on_a_disk(drill, LARGE, 44, 40)
    disk.fill(leave=1)
    drill.let_go()
    drill.fails(job, not_written(50, "No space left on device") + SPACE + FOR_GOOD, rank=0)
    assert are_whole(job) == [20, 30, 40]
    drill.no_partial_files()
    return 10
