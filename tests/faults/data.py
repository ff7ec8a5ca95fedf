"""Data that is corrupt, has changed or is missing, and loader workers that die or hang."""

import os
import signal
import time

from disks import mounting
from drill import HOST, LOOKED, SAME_BITS, Drill, Job, fault, says

RUN = "--dataset_size 200 --epochs 2 --save_every_steps 5 --num_workers 1".split()  # 50 steps of two ranks
REFUSED = "refused before the first step; "
CORRUPT = """
from config import UnreadableSample
from torch.utils.data import default_collate
def getitem(self, index):
    if index in BAD[self.split]:
        raise UnreadableSample(f'line {index} of {self.split}: is cut short; write it again')
    return self.images[index], self.targets[index]
del Images.__getitems__
Images.__getitem__, Images.collate = getitem, staticmethod(default_collate)
"""  # samples are read one by one, and those in BAD cannot be


@fault(
    "corrupt sample",
    "a sample of the training set that cannot be read",
    f"ends with what the data set says of it and the rank; with the sample written again, {SAME_BITS}",
    "steps redone",
    is_default=True,
)
def corrupt_sample(drill: Drill) -> float:
    code = "BAD = {'train': {44}, 'val': ()}" + CORRUPT
    said = r"rank (\d) met a corrupt sample \(--corrupt_images replace goes on without it\): line 44 of train: is cut short; write it again"
    job = drill.start(2, *RUN, code=code)
    drill.fails(job, said)
    rank = drill.json("status.json")["rank"]
    assert f"rank {rank} met" in drill.json("status.json")["error"]
    return drill.resumes(2, *RUN, after=job.place(rank).step)


@fault(
    "corrupt samples replaced",
    "samples of both sets cannot be read; --corrupt_images replace",
    "completed, each replacement recorded; the same bits with workers and without",
    "samples replaced",
)
def corrupt_samples_replaced(drill: Drill) -> float:
    run = (*RUN, "--corrupt_images", "replace")
    code = "BAD = {'train': {0, 7, 37}, 'val': {11}}" + CORRUPT
    ended = drill.completes(2, *run, code=code)
    replaced = [event["index"] for event in drill.events("replaced_sample")]
    assert sorted(replaced) == [0, 0, 7, 7, 37, 37]
    assert drill.json("summary.json")["replaced_samples"] == 6
    says(ended.text, r"replaced sample 37 on rank \d: sample 37 replaced by 38: line 37 of train: is cut short")
    drill.is_whole(2, *run, "--num_workers", 0, code=code)
    return len(replaced)


@fault(
    "data changed between attempts",
    "one pixel of the training set is another when a preempted run is resumed",
    f"refused, the run as it was; with the data as it was, {SAME_BITS}",
    "steps redone",
)
def data_changed(drill: Drill) -> float:
    drill.stopped(4, *RUN)
    code = """
plain_create = train.create_dataset
def create_changed(config, split):
    dataset = plain_create(config, split)
    if split == 'train':
        dataset.images[0, 0, 0, 0] += 1
        dataset.fingerprint += 'changed'
    return dataset
train.create_dataset = create_changed
"""
    said = r"the training set is not the one of the checkpoint \(other files, sizes or values\)\s+resume_from: these must match"
    with drill.unchanged(*LOOKED):
        drill.fails(drill.start(2, *RUN, "--resume_from", "auto", code=code), said, has_status=False)
    return drill.resumes(2, *RUN, after=drill.json("status.json")["step"])


# ---- workers ----


def worker_of(job: Job, rank: int) -> int:
    """The rank's loader worker."""
    return next(child for child in job.children(job.pid(rank)) if os.getsid(child) != child)


@fault(
    "loader worker killed", "SIGKILL to rank 1's worker", f"ends with rank, worker, remedy; {SAME_BITS}", "steps redone", is_default=True
)
def worker_killed(drill: Drill) -> float:
    job = drill.held(2, 8, *RUN)
    os.kill(worker_of(job, 1), signal.SIGKILL)
    drill.let_go()
    said = (
        r"rank 1: loader worker \d+ was killed by a signal \(Killed\), as a rule by the system for want of memory; give fewer --num_workers"
    )
    drill.fails(job, said, rank=1)
    return drill.resumes(2, *RUN, after=8)


@fault(
    "loader worker hangs", "SIGSTOP to rank 1's worker; hang_timeout 12 s", f"ends with rank, samples, remedy; {SAME_BITS}", "s to the end"
)
def worker_stopped(drill: Drill) -> float:
    """A loader gives up after nine tenths of hang_timeout."""
    job = drill.held(2, 8, *RUN, "--hang_timeout", 12)
    os.kill(worker_of(job, 1), signal.SIGSTOP)
    drill.let_go()
    begin = time.monotonic()
    said = r"rank 1: a loader worker hangs: in 11 s nothing came of samples (\d+, ){3}\d+ of train in epoch 0; mend the storage"
    drill.fails(job, said, rank=1, seconds=90)
    seconds = time.monotonic() - begin
    drill.resumes(2, *RUN)
    return seconds


@fault("small shared memory", "/dev/shm of 1 MB", f"{REFUSED}the --num_workers that it names completes", "workers that fit")
def small_shared_memory(drill: Drill) -> float:
    """1 MB, where two ranks with two workers each may hold 1.5, and with one 0.9."""
    code = mounting("-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    run = "--batch_size 768 --dataset_size 6144 --epochs 1".split()
    said = r"/dev/shm: has 1.0 MB free, and 2 loader worker.* of each of 2 rank.* may put 1.5 MB there; .*, or --num_workers 1"
    drill.fails(drill.start(2, *run, "--num_workers", 2, code=code), said)
    assert not (drill.folder / "run/metrics.jsonl").exists()
    drill.completes(2, *run, "--num_workers", 1, "--overwrite", code=code)
    return 1


# ---- sets ----


LESS_ON_RANK_1 = """
import dataclasses
plain_create = train.create_dataset
def create_less(config, split):
    return plain_create(dataclasses.replace(config, dataset_size=config.dataset_size - 8 * RANK), split)
train.create_dataset = create_less
"""
MISLABELLED = """
plain_create = train.create_dataset
def create_mislabelled(config, split):
    dataset = plain_create(config, split)
    if split == 'train':
        dataset.labels[5] = dataset.targets[5] = 10
    return dataset
train.create_dataset = create_mislabelled
"""


@fault(
    "other data on one rank",
    "8 samples fewer on rank 1",
    f"{REFUSED}names both ranks and hosts",
    "checkpoints left",
    LESS_ON_RANK_1,
    rf"holds other data on {HOST} \(rank 1\) than on {HOST} \(rank 0\); make them alike",
)
@fault(
    "label outside the classes",
    "one label of 200 is 10 of 10 classes",
    f"{REFUSED}names the sample",
    "checkpoints left",
    MISLABELLED,
    r"dataset: sample 5 has label 10, outside the 10 classes; mend the label or give num_classes",
)
def refused(drill: Drill, code: str, sentence: str) -> float:
    """Nothing is left but the sentence."""
    drill.fails(drill.start(2, *RUN, code=code), sentence)
    assert not drill.runs.checkpoints("run") and not (drill.folder / "run/samples").exists()
    return len(drill.runs.checkpoints("run"))
