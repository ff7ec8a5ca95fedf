"""Data that is corrupt, other than it was, not there, or that no worker brings."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import torch

from drill import Drill, Fault, Job, says
from images import folder_of_images
from ranks import Ended, lack, launch, need
from utils.streams import derive_seed

HOST = socket.gethostname()
RUN = ("--dataset_size", 200, "--epochs", 2, "--save_every_steps", 5, "--num_workers", 1)  # 50 steps of two ranks
HANG_TIMEOUT = 12  # seconds; a loader gives up after nine tenths of it


def fails(drill: Drill, ended: Ended, sentence: str, rank: int | None = None) -> re.Match:
    """The launch failed with the sentence, on the terminal and in status.json, and left nothing behind."""
    assert (ended.code, ended.left) == (1, 0), ended.text
    status = drill.json("status.json")
    assert status["state"] == "failed" and status["host"] == HOST and rank in (None, status["rank"]), status
    says(status["error"], sentence)
    says(ended.text, sentence)
    return re.search(sentence, status["error"])


def loses(drill: Drill, job: Job, *run: object) -> float:
    """The run goes on to the undisturbed bits; the steps that this makes again."""
    reached = max(place.step for place in job.places(2)) - 1
    drill.fork(2, *run, "--resume_from", "auto")
    drill.is_whole(2, *run)
    resumed = drill.events("resumed")  # none: it was killed before its first checkpoint was on the disk
    return reached - (resumed[-1]["step"] if resumed else 0)


# ---- images ----


def image_flags(drill: Drill) -> tuple:
    """48 images: 6 steps an epoch."""
    return (*folder_of_images(drill.folder / "images", count=24), "--epochs", 2, "--save_every_steps", 2)


def spoil(path: Path) -> bytes:
    """Zeros in the middle of a file, as after a bad block: its size is what it was. What it held."""
    before = path.read_bytes()
    path.write_bytes(before[:50] + bytes(len(before) - 70) + before[-20:])
    return before


def corrupt_image(drill: Drill) -> float:
    run = image_flags(drill)
    number = int(torch.randperm(48, generator=torch.Generator().manual_seed(derive_seed("order", 42, 0)))[44])  # read in step 6
    kind = ("cat", "dog")[number // 24]
    path = drill.folder / f"images/train/{kind}/{number % 24:03d}.png"
    before = spoil(path)
    job = drill.start(2, *run)
    sentence = rf"rank (\d) met a corrupt sample \(--corrupt_images replace goes on without it\): {path}: cannot be read as an image \(class {kind}; "
    found = fails(drill, job.end(), sentence)
    assert drill.json("status.json")["rank"] == int(found[1])
    path.write_bytes(before)
    return loses(drill, job, *run)


def corrupt_images_replaced(drill: Drill) -> float:
    """The first of all, and one of each class beside it; one that is held out. The same with workers and without."""
    run = (*image_flags(drill), "--corrupt_images", "replace")
    for name in ("train/cat/000", "train/cat/007", "train/dog/013", "val/dog/001"):
        spoil(drill.folder / f"images/{name}.png")
    ended = drill.run(2, *run)
    assert (ended.code, ended.left) == (0, 0), ended.text
    replaced = {(event["step"], event["index"]) for event in drill.events("replaced_sample")}
    assert sorted(index for _, index in replaced) == [0, 0, 7, 7, 37, 37]
    assert drill.json("summary.json")["replaced_samples"] == 6
    says(ended.text, r"replaced sample 37 on rank \d: sample 37 replaced by 38: \S+/train/dog/013.png: cannot be read as an image")
    drill.is_whole(2, *run, "--num_workers", 0)
    return len(replaced)


def image_added(drill: Drill) -> float:
    """Between two attempts: refused, and the run is as it was."""
    run = image_flags(drill)
    job = drill.start(2, *run)
    job.wait_for_step(4)
    job.signal_launcher(signal.SIGTERM)
    job.end()
    seen = [drill.folder / "run/status.json", *drill.runs.checkpoints("run")]
    before = [path.read_bytes() for path in seen]
    added = drill.folder / "images/train/dog/100.png"
    added.write_bytes((drill.folder / "images/train/dog/000.png").read_bytes())
    ended = drill.run(2, *run, "--resume_from", "auto")
    assert (ended.code, ended.left) == (1, 0)
    says(ended.text, r"the training set is not the one of the checkpoint \(other files, sizes or values\)\s+resume_from: these must match")
    changed = sum(old != path.read_bytes() for path, old in zip(seen, before, strict=True))
    assert changed == 0 and "preempted" in seen[0].read_text()
    added.unlink()
    drill.fork(2, *run, "--resume_from", "auto")
    drill.is_whole(2, *run)
    return changed


# ---- workers ----


def worker_of(job: Job, rank: int) -> int:
    """The rank's loader worker, once it reads for the training."""
    job.wait_for_step(8, rank)
    return next(child for child in job.children(job.pid(rank)) if os.getsid(child) != child)


def worker_killed(drill: Drill) -> float:
    job = drill.start(2, *RUN)
    os.kill(worker_of(job, 1), signal.SIGKILL)
    sentence = (
        r"rank 1: loader worker \d+ was killed by a signal \(Killed\), as a rule by the system for want of memory; give fewer --num_workers"
    )
    fails(drill, job.end(), sentence, 1)
    return loses(drill, job, *RUN)


def worker_stopped(drill: Drill) -> float:
    job = drill.start(2, *RUN, "--hang_timeout", HANG_TIMEOUT)
    os.kill(worker_of(job, 1), signal.SIGSTOP)
    begin = time.monotonic()
    ended = job.end(90)
    took = time.monotonic() - begin
    fails(
        drill,
        ended,
        r"rank 1: a loader worker hangs: in 11 s nothing came of samples (\d+, ){3}\d+ of train in epoch 0; mend the storage",
        1,
    )
    loses(drill, job, *RUN)
    return took


def small_shared_memory(drill: Drill) -> float:
    """1 MB, where two ranks with two workers each may hold 1.4, and with one 0.9."""
    need("unshare")
    mine = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "-m"]
    before = (*mine, "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh")
    if launch([*before, "true"]).code:
        lack("this machine allows no mount namespaces")
    run = ("--batch_size", 48, "--image_size", 32, "--dataset_size", 768, "--epochs", 1)
    ended = drill.run(2, *run, "--num_workers", 2, before=before)
    sentence = r"/dev/shm: has 1.0 MB free, and 2 loader worker.* of each of 2 rank.* may put 1.4 MB there; .*, or --num_workers (\d)"
    fits = fails(drill, ended, sentence)[1]
    assert not (drill.folder / "run/metrics.jsonl").exists()
    ended = drill.run(2, *run, "--num_workers", fits, "--overwrite", before=before)
    assert ended.code == 0, ended.text
    return int(fits)


# ---- sets ----


def refused(drill: Drill, sentence: str, rank: int | None, *run: object, code: str = "") -> float:
    """Before the first step, and nothing is left but the word of it."""
    fails(drill, drill.run(2, *(run or RUN), code=code), sentence, rank)
    assert not drill.runs.checkpoints("run") and not (drill.folder / "run/samples").exists()
    return len(drill.runs.checkpoints("run"))


def other_data_on_one_rank(drill: Drill) -> float:
    code = """
import dataclasses
plain_create = train.create_dataset
def create_less(config, split):
    return plain_create(dataclasses.replace(config, dataset_size=config.dataset_size - 8 * RANK), split)
train.create_dataset = create_less
"""
    return refused(drill, rf"holds other data on {HOST} \(rank 1\) than on {HOST} \(rank 0\); make them alike", 1, code=code)


def label_outside(drill: Drill) -> float:
    code = """
plain_create = train.create_dataset
def create_mislabelled(config, split):
    dataset = plain_create(config, split)
    if split == 'train':
        dataset.labels[5] = dataset.targets[5] = 10
    return dataset
train.create_dataset = create_mislabelled
"""
    return refused(drill, r"dataset: sample 5 has label 10, outside the 10 classes; mend the label or give num_classes", None, code=code)


def no_images(drill: Drill) -> float:
    run = image_flags(drill)
    for path in (drill.folder / "images/train/dog").iterdir():
        path.unlink()
    return refused(drill, rf"{drill.folder}/images/train/dog: holds no image \(.*\); put some there or delete the folder", None, *run)


FAULTS = [
    Fault(
        "corrupt image",
        "data",
        "zeros in the middle of an image that is trained on",
        "ends with path, class and rank; once it is mended the run goes on to the same bits",
        "steps made again",
        corrupt_image,
    ),
    Fault(
        "corrupt images replaced",
        "data",
        "three images that are trained on and one that is not; --corrupt_images replace",
        "completed, each replacement recorded; the same bits with workers and without",
        "samples replaced",
        corrupt_images_replaced,
    ),
    Fault(
        "data changed between attempts",
        "data",
        "one image more, when a preempted run is to go on",
        "refused, the run as it was; without the image it goes on to the same bits",
        "files changed",
        image_added,
    ),
    Fault(
        "loader worker killed",
        "data",
        "SIGKILL to the worker of rank 1",
        "ends with rank, worker and remedy; goes on to the same bits",
        "steps made again",
        worker_killed,
    ),
    Fault(
        "loader worker hangs",
        "data",
        "SIGSTOP to the worker of rank 1; hang_timeout 12 s",
        "ends with rank, samples and remedy; goes on to the same bits",
        "s to the end",
        worker_stopped,
    ),
    Fault(
        "small shared memory",
        "data",
        "/dev/shm of 1 MB",
        "refused before the first step with what fits, which then completes",
        "workers that fit",
        small_shared_memory,
    ),
    Fault(
        "other data on one rank",
        "data",
        "8 samples fewer on rank 1",
        "refused before the first step, names both ranks and hosts",
        "checkpoints left",
        other_data_on_one_rank,
    ),
    Fault(
        "label outside the classes",
        "data",
        "one label of 200 is 10 of 10 classes",
        "refused before the first step, names the sample",
        "checkpoints left",
        label_outside,
    ),
    Fault(
        "class without an image",
        "data",
        "one of two classes' folders is empty",
        "refused before the first step, names the folder",
        "checkpoints left",
        no_images,
    ),
]
