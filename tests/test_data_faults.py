"""Data that fails: corrupt samples named or replaced alike everywhere; workers that die, hang or run out of shared memory, explained."""

import errno
import multiprocessing
import os
import random
import re
import signal
import struct
import sys
import time
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from config import Refused, RunFailed, TrainingConfig, UnreadableSample
from dataset import create_dataset, read_image
from ddp_utils import DistributedContext
from images import folder_of_images
from ranks import launch
from utils.loading import create_distributed_dataloader, create_evaluation_dataloader
from utils.workers import check_shared_memory, explain

CPU = torch.device("cpu")
SIZE, BAD = 30, (3, 4, 17, 29)  # two in a row, and the last one, after which comes the first


class Holes(Dataset):
    """A forker's own set, with random transforms on the CPU and on the device, some of whose samples cannot be read."""

    def __init__(self, size=SIZE, bad=BAD):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = [random.random(), torch.rand(()).item()]
        if index in self.bad:
            raise UnreadableSample(f"line {index}: is cut short; write it anew")
        return torch.tensor([index, *drawn], dtype=torch.float64)

    @staticmethod
    def device_transform(batch, seed, epoch, indices):
        return torch.cat([batch, indices[:, None].double()], 1)  # whose draws these are


def context(rank=0, world_size=1):
    return DistributedContext(rank, rank, world_size, CPU)


def epoch_of_all_ranks(dataset, world_size, workers, epochs, create=create_distributed_dataloader, **changes):
    """For each epoch ({index: sample}, how often each index was replaced, what was said of it), of all ranks together."""
    config = TrainingConfig(batch_size=4, num_workers=workers, **changes)
    loaders = [create(dataset, config, context(rank, world_size)) for rank in range(world_size)]
    found = []
    for epoch in epochs:
        samples, counts, texts = {}, Counter(), {}
        for loader in loaders:
            loader = loader[0] if isinstance(loader, tuple) else loader
            for window in loader.windows(epoch):
                for m in window:
                    if m.is_counted:
                        samples |= dict(zip(m.indices, m.batch, strict=True))
            replaced = loader.take_replaced()
            assert loader.take_replaced() == []
            counts.update(index for index, _ in replaced)
            texts |= dict(replaced)
        found.append((samples, counts, texts))
    return found


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_stands_for_a_corrupt_sample_is_the_same_on_any_ranks_and_workers_and_is_counted(workers):
    epochs = (0, 1)
    whole = epoch_of_all_ranks(Holes(bad=()), 1, 0, epochs)
    for world_size in (1, 2, 4):
        found = epoch_of_all_ranks(Holes(), world_size, workers, epochs, corrupt_images="replace")
        for epoch in epochs:
            samples, counts, texts = found[epoch]
            assert counts == Counter(BAD) and whole[epoch][1] == Counter()
            assert texts[3] == "sample 3 replaced by 5: line 3: is cut short; write it anew" and "sample 29 replaced by 0: " in texts[29]
            for index in range(SIZE):
                stands_in = {3: 5, 4: 5, 17: 18, 29: 0}.get(index, index)
                draws = whole[epoch][0][index][1:]  # of the sample that was asked for
                assert samples[index].tolist() == [stands_in, *draws], (world_size, epoch, index)


def test_a_sample_that_an_idle_rank_only_stands_in_with_is_not_counted_twice():
    """9 samples in order by 4 on 2 ranks: rank 1 has nothing of the last window, and repeats rank 0's."""
    ((_, counts, _),) = epoch_of_all_ranks(Holes(9, (8,)), 2, 0, [0], create_evaluation_dataloader, corrupt_images="replace")
    assert counts == Counter([8])


def test_replacing_ends_where_sixteen_in_a_row_cannot_be_read():
    (samples, counts, _), = epoch_of_all_ranks(Holes(40, range(10, 25)), 1, 0, [0], corrupt_images="replace")  # fmt: skip
    assert samples[10][0] == 25 and len(counts) == 15
    for size, bad, said in ((40, range(10, 26), "samples 10 to 25"), (5, range(5), r"samples \d to \d")):
        with pytest.raises(Refused, match=f"{said}: none can be read, the first for this reason: line .*; write it anew"):
            epoch_of_all_ranks(Holes(size, bad), 1, 0, [0], corrupt_images="replace")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_sample_ends_the_rank_that_met_it_by_its_name(workers):
    with pytest.raises(Refused) as refused:
        epoch_of_all_ranks(Holes(bad=(5,)), 1, workers, [0])
    said = "rank 0 met a corrupt sample (--corrupt_images replace goes on without it): line 5: is cut short; write it anew"
    assert str(refused.value) == said


def test_replacing_is_refused_where_samples_have_weights():
    data = Holes()
    data.weights = [1.0] * SIZE
    for create in (create_distributed_dataloader, create_evaluation_dataloader):
        create(data, TrainingConfig(), context())
        with pytest.raises(Refused, match="corrupt_images=replace: the data set has weights, .*; leave it fail"):
            create(data, TrainingConfig(corrupt_images="replace"), context())


# ---- images ----


def test_an_image_folder_whose_first_image_is_corrupt(tmp_path):
    folder_of_images(tmp_path)
    for name in ("000", "001"):
        (tmp_path / f"train/cat/{name}.png").write_bytes(b"")
    config = TrainingConfig(dataset="imagefolder", data_dir=str(tmp_path))
    with pytest.raises(Refused, match="cat/000.png: cannot be read as an image .class cat; .*; replace or delete it"):
        create_dataset(config, "train")
    config = TrainingConfig(dataset="imagefolder", data_dir=str(tmp_path), corrupt_images="replace")
    data = create_dataset(config, "train")
    assert data.image_size == 8 and len(data) == 12
    with pytest.raises(UnreadableSample, match="cat/001.png: .*class cat"):
        data[1]
    for path in (tmp_path / "train/cat").iterdir():
        path.write_bytes(b"")
    with pytest.raises(Refused, match="cat/005.png: cannot be read"):
        create_dataset(config, "train")


def damaged(data, draw):
    """Some bytes changed or lost, most of them in the header; a third is cut short as well."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(data), draw.choice((64, 4096))))
        data[at : at + 2] = draw.choice((b"", draw.randbytes(2)))
    return data[: draw.choice((len(data), len(data), draw.randrange(len(data))))]


def test_whatever_is_wrong_in_a_file_it_is_an_unreadable_sample(tmp_path):
    """Each of 1,600 broken files gives an image or a sentence, never another exception of PIL's many."""
    draw, outcomes = random.Random(0), Counter()
    for suffix in ("png", "jpg", "gif", "webp"):
        path = tmp_path / f"a.{suffix}"
        Image.frombytes("RGB", (24, 24), draw.randbytes(24 * 24 * 3)).save(path)
        whole = path.read_bytes()
        for _ in range(400):
            path.write_bytes(damaged(whole, draw))
            try:
                assert read_image(path, 3, 8).shape == (3, 8, 8)
                outcomes[suffix, "image"] += 1
            except UnreadableSample as error:
                assert str(error).startswith(f"{path}: cannot be read as an image (class {tmp_path.name}; ")
                outcomes[suffix, "sentence"] += 1
    assert len(outcomes) >= 7, outcomes  # a PNG has checksums


def test_a_file_that_pil_meets_with_another_exception(tmp_path):
    """A chunk too short for what it says, under a right checksum: ValueError, and no OSError as for most others."""
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path)
    chunk, whole = b"pHYs\0\0\0", path.read_bytes()
    path.write_bytes(whole[:33] + struct.pack(">I", 3) + chunk + struct.pack(">I", zlib.crc32(chunk)) + whole[33:])
    with pytest.raises(UnreadableSample, match="Truncated pHYs chunk"):
        read_image(path, 3)


def test_a_machine_that_is_short_of_files_is_no_corrupt_image(tmp_path, monkeypatch):
    folder_of_images(tmp_path)

    def no_more_files(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Image, "open", no_more_files)
    with pytest.raises(OSError, match="Too many open files"):
        read_image(tmp_path / "train/cat/000.png", 3)


# ---- workers ----


class Waits(Dataset):
    """Ready at once but for the samples after the first eight, which never come."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= 8:
            time.sleep(1000)
        return torch.tensor(index)


def test_a_worker_killed_while_the_loop_computes_is_explained_too():
    """DataLoader raises in its handler of SIGCHLD, wherever the main process is."""
    before = set(multiprocessing.active_children())
    loader = create_evaluation_dataloader(Waits(), TrainingConfig(batch_size=4, num_workers=1), context())
    next(iter(next(loader.windows(0))))
    (worker,) = set(multiprocessing.active_children()) - before
    with pytest.raises(RuntimeError) as error:
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(20)
    failed = explain(error.value, rank=3)
    assert isinstance(failed, RunFailed)
    assert str(failed).startswith(f"rank 3: loader worker {worker.pid} was killed by a signal (Killed), as a rule by the system")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "worker 7 was killed .*want of memory; give fewer --num_workers"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible", "Bus error., .*/dev/shm is full; .*--shm-size"),
        ("DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", "Segmentation fault.; .* --num_workers 0 shows the place"),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details", "7 is gone .exit code 3.; see .* --num_workers 0"),
        (
            "DataLoader worker (pid(s) 7, 8) exited unexpectedly",
            "worker 7, 8 died, as a rule killed by the system for want of memory; give",
        ),
        (
            "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_9_8_0>: No space left on device (28)\n",
            "could not hand over its batch, since /dev/shm is full; give it more room .*, or fewer --num_workers, or 0",
        ),
        ("Caught KeyError in DataLoader worker process 0.", None),
        ("CUDA error: out of memory", None),
    ],
)
def test_what_torch_says_of_workers_becomes_a_sentence_with_a_remedy(text, said):
    failed = explain(RuntimeError(text), 1, "samples 1, 2")
    if said is None:
        assert failed is None
    else:
        assert str(failed).startswith("rank 1: ") and re.search(said, str(failed))


STOPPED_MEANWHILE = """
import os, signal, time, torch
from config import TrainingConfig
from ddp_utils import DistributedContext
from utils.loading import create_evaluation_dataloader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5:  # the loader waits for it, and is stopped meanwhile
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(3.0)
            os.kill(os.getppid(), signal.SIGCONT)
            time.sleep(0.5)
        return torch.tensor(index)

config = TrainingConfig(batch_size=2, num_workers=1, hang_timeout=4.0)
loader = create_evaluation_dataloader(Data(), config, DistributedContext(0, 0, 1, torch.device("cpu")))
print([m.batch.tolist() for window in loader.windows(0) for m in window])
"""


def test_a_rank_that_was_stopped_itself_does_not_blame_its_worker():
    """Ctrl-Z and fg, or a suspended job: the clock of the wait for the batch went on."""
    ended = launch([sys.executable, "-c", STOPPED_MEANWHILE], deadline=60)
    assert ended.out == "[[0, 1], [2, 3], [4, 5], [6, 7]]\n", ended.text


# ---- shared memory ----


@pytest.mark.parametrize(
    ("batch", "free_mb", "said"),
    [
        (
            torch.zeros(2**20, dtype=torch.uint8),
            17,
            "has 17.0 MB free, and 4 .* of each of 2 .* put 18.0 MB there; .*, or --num_workers 3$",
        ),
        ({"x": [torch.zeros(2**20, dtype=torch.uint8)]}, 5, "put 18.0 MB there; .*, or --num_workers 0$"),
        (torch.zeros(2**20, dtype=torch.uint8), 18, None),
        ([torch.zeros(10) for _ in range(64)], 4, "put 4.5 MB there"),  # each takes a page
        (torch.zeros(2**20, dtype=torch.uint8), 0, None),  # a tmpfs without a limit
        (torch.zeros(2**20, dtype=torch.uint8).share_memory_(), 1, None),  # the data set's own, in shared memory already
        (torch.zeros(2**23, dtype=torch.uint8)[:4], 64, None),  # of a view the whole, once for each of 8 workers
        (torch.zeros(2**23, dtype=torch.uint8)[:4], 63, "put 64.0 MB there"),
        (torch.zeros(2**20, dtype=torch.uint8, device="meta"), 1, None),
        (torch.zeros(2**20, dtype=torch.uint8).numpy(), 1, None),  # what is no tensor goes through a pipe
        (["text"] * 100, 1, None),
    ],
)
def test_shared_memory_is_refused_only_where_it_cannot_hold_what_travels_through_it(monkeypatch, batch, free_mb, said):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free_mb << 8, f_frsize=4096, f_blocks=free_mb << 8))
    if said is None:
        check_shared_memory(batch, workers=4, prefetched=2, ranks=2)
    else:
        with pytest.raises(Refused, match=f"^/dev/shm: .*{said}"):
            check_shared_memory(batch, workers=4, prefetched=2, ranks=2)


def test_a_machine_without_shared_memory_is_left_alone(monkeypatch):
    monkeypatch.setattr("utils.workers.SHARED_MEMORY", "/nowhere")  # macOS
    check_shared_memory(torch.zeros(2**40, device="meta"), workers=4, prefetched=2, ranks=2)
    check_shared_memory(torch.zeros(8), workers=10**9, prefetched=10**6, ranks=2)
