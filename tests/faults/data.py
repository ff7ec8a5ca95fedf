"""Data that is corrupt or has changed, and loader workers that die, hang or lack shared memory."""

import os
import signal

from disks import mounting
from drill import LOOKED, Drill, fault
from images import save_images

RUN = "--dataset_size 200 --epochs 2 --save_every_steps 5 --num_workers 1".split()  # 50 steps of two ranks
CORRUPT = """
from config import UserError
from torch.utils.data import default_collate
def getitem(self, index):
    if (index, self.split) == (44, 'train'):
        raise UserError('line 44 of train: is cut short; write it again')
    return self.images[index], self.targets[index]
del Images.__getitems__
Images.__getitem__, Images.collate = getitem, staticmethod(default_collate)
"""  # samples are read one by one


@fault("corrupt sample")
def corrupt_sample(drill: Drill) -> None:
    job = drill.start(2, *RUN, code=CORRUPT)
    drill.fails(job, r"rank \d: line 44 of train: is cut short; write it again")
    drill.completes(2, *RUN, "--resume_from", "auto", code=CORRUPT.replace("44, 'train'", "-1, 'train'"))
    drill.is_whole(2, *RUN)


FILES = """
from utils.data.images import Listing, read_image
class Files(Listing, torch.utils.data.Dataset):
    mean, std, image_size, in_channels, num_classes = Images.mean, Images.std, 8, 3, 2
    split, augment, classes, device_transform = 'train', 'none', ['cat', 'dog'], Images.device_transform
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, index):
        return read_image(self.path(index), 3), int(self.targets[index])
def create(config, split):
    data = Files()
    data.folder = Path(config.data_dir) / split
    return data if split == 'train' else None
train.your_data.create_dataset = create
"""


@fault("file repaired between attempts")
def file_repaired(drill: Drill) -> None:
    """It gets another size and the same pixels."""
    save_images(drill.folder / "data/train", {"cat": 100, "dog": 100})
    run = [*RUN, "--data_dir", drill.folder / "data"]
    drill.stopped(4, *run, code=FILES)
    path = drill.folder / "data/train/cat/007.png"
    path.write_bytes(path.read_bytes() + b"\0")
    drill.completes(2, *run, "--resume_from", "auto", code=FILES)
    line = "training files of another size than in the checkpoint: 1 of 200 (cat/007.png)"
    assert drill.events("resumed")[-1]["changed"] == [line] and f"changed: {line}" in drill.runs.log("run")
    drill.is_whole(2, *run, code=FILES)


@fault("another data set")
def another_data_set(drill: Drill) -> None:
    drill.stopped(4, *RUN)
    code = """
plain_init = Images.__init__
def init(self, *args):
    plain_init(self, *args)
    self.fingerprint += 'changed'
Images.__init__ = init
"""
    said = (
        r"the training set differs from the checkpoint's \(names, number or labels\)\s+resume_from: these must"
        r" match"
    )
    with drill.unchanged(*LOOKED):
        drill.fails(drill.start(2, *RUN, "--resume_from", "auto", code=code), said, has_status=False)
    drill.resumes(2, *RUN)


# ---- workers ----


KILLED = r"rank 1: loader worker \d+ was killed, usually because the machine ran out of memory; use fewer --num_workers"
STOPPED = r"no progress for 1\d s: rank 1 on \S+ hangs in data of step \d+ \(process \d+\)"


@fault("loader worker killed", signal.SIGKILL, KILLED, is_default=True)
@fault("loader worker hangs", signal.SIGSTOP, STOPPED)
def worker_fails(drill: Drill, number: int, said: str) -> None:
    """A rank that takes a batch from a stopped worker waits on the worker's socket: the watchdog ends it."""
    job = drill.held(2, 8, *RUN, "--hang_timeout", 12)
    worker = next(child for child in job.children(job.pid(1)) if os.getsid(child) != child)
    os.kill(worker, number)
    drill.let_go()
    drill.fails(job, said, rank=1, seconds=90)
    drill.resumes(2, *RUN)


@fault("small shared memory")
def small_shared_memory(drill: Drill) -> None:
    """1 MB, while two ranks may need 1.5 MB with two workers each, and 0.9 MB with one."""
    code = mounting("-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    run = "--batch_size 768 --dataset_size 6144 --epochs 1".split()
    said = r"/dev/shm: 1.0 MB are free, but 2 workers of each of 2 ranks may need 1.5 MB; .*, or use --num_workers 1"
    drill.fails(drill.start(2, *run, "--num_workers", 2, code=code), said)
    assert not (drill.folder / "run/metrics.jsonl").exists()
    drill.completes(2, *run, "--num_workers", 1, "--overwrite", code=code)
