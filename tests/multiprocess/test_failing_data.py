"""Runs of two ranks whose data fails: each ends within seconds with the cause, or goes on where it can."""

import os
import re
import sys
import time
from unittest import mock

import pytest
import torch

import dataset
from images import folder_of_images
from ranks import ROOT, Ended, lack, launch, need, run_ranks, torchrun
from training import TINY, train_flags

HANG_TIMEOUT = 8  # seconds; a loader gives up before a watchdog would, after 7.2

pytestmark = pytest.mark.drill  # rows of the table of faults (tests/faults/data.py) have most of it


def failing_program(path, rank, split, fault):
    """The program is ours; on one rank, where a worker fetches the third micro-batch of a split, something happens to it."""
    path.write_text(
        f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'train.py'\n"
        "import dataset, model, multiprocessing, train\n"
        "from torch.utils.data import get_worker_info\n"
        "plain, calls = dataset.InMemoryImages.__getitems__, []\n"
        "def fetch(self, indices):\n"
        "    if get_worker_info():\n"
        f"        calls.append(1 if self.split == {split!r} else 0)\n"
        f"        if sum(calls) == 3 and os.environ['RANK'] == '{rank}':\n"
        f"            {fault}\n"
        "    return plain(self, indices)\n"
        "dataset.InMemoryImages.__getitems__ = fetch\n"
        "train.run_as_script()\n"
    )
    return str(path)


def ends_with(runs, program, said, *flags):
    """Both ranks of a run of the program end, long before a collective times out, nothing stays behind, and the sentence is in the status and in the output."""
    words = [*TINY, "--dataset_size", "160", "--num_workers", "1", "--run_dir", runs.folder("run"), *flags]
    ended = torchrun(2, *words, script=program)
    assert ended.code == 1 and ended.left == 0, ended.text
    status = runs.json("run", "status.json")
    assert (status["state"], status["rank"]) == ("failed", 1) and re.search(said, status["error"]), str(status)
    assert re.search(said, ended.text)


WORKER = r"rank 1: loader worker \d+ "
KILLED = WORKER + r"(was killed by a signal \(Killed\), as a rule|died, as a rule killed) by the system for want of memory; give fewer"


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_killed_worker_ends_the_run_by_its_name(runs, split):
    program = failing_program(runs.root / "fork.py", 1, split, "time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)")
    ends_with(runs, program, KILLED, "--epochs", 1)


def test_a_worker_killed_while_the_rank_computes_ends_the_run_by_its_name(runs):
    """DataLoader raises in its handler of SIGCHLD, far from the loader."""
    path = runs.root / "fork.py"
    path.write_text(
        f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'train.py'\n"
        "import multiprocessing, train\n"
        "plain, calls = train.compute_loss, []\n"
        "def compute(net, batch):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 8 and os.environ['RANK'] == '1':\n"
        "        os.kill(next(c.pid for c in multiprocessing.active_children() if c.daemon), signal.SIGKILL)\n"
        "        time.sleep(20)\n"
        "    return plain(net, batch)\n"
        "train.compute_loss = compute\n"
        "train.run_as_script()\n"
    )
    ends_with(runs, str(path), KILLED)


@pytest.mark.parametrize("fault", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(3600)"])
def test_a_worker_that_hangs_ends_the_run_by_what_it_was_to_read(runs, fault):
    program = failing_program(runs.root / "fork.py", 1, "train", fault)
    said = r"rank 1: a loader worker hangs: in 7 s nothing came of samples (\d+, ){3}\d+ of train in epoch 0; .*, or raise --hang_timeout"
    ends_with(runs, program, said, "--hang_timeout", HANG_TIMEOUT)


def slow_for(seconds, flags):
    """Train, where one worker of rank 1 takes so long for its third micro-batch."""
    plain, calls = dataset.InMemoryImages.__getitems__, []

    def fetch(self, indices):
        calls.append(self.split)
        if calls.count("train") == 3 and os.environ["RANK"] == "1" and torch.utils.data.get_worker_info():
            time.sleep(seconds)
        return plain(self, indices)

    with mock.patch.object(dataset.InMemoryImages, "__getitems__", fetch):
        begin = time.monotonic()
        return train_flags(flags)["state"], time.monotonic() - begin


def test_a_read_of_20_seconds_is_no_hang(runs):
    flags = [*TINY, "--dataset_size", "64", "--epochs", "1", "--num_workers", "1", "--run_dir", str(runs.folder("run"))]
    for state, seconds in run_ranks(2, slow_for, 20, flags):
        assert state == "completed" and seconds > 20


# ---- corrupt images ----


def test_a_corrupt_image_ends_a_launch_with_its_path_class_and_rank(runs):
    """Image 7 of 12 in order is in the second micro-batch of the evaluation, rank 1's; rank 0 does not meet it."""
    words = folder_of_images(runs.root / "images")
    path = runs.root / "images/val/dog/001.png"
    path.write_bytes(path.read_bytes()[:60])
    said = rf"rank 1 met a corrupt sample \(--corrupt_images replace goes on without it\): {path}: cannot be read as an image \(class dog; .*\); "
    ended = torchrun(2, *TINY, *words, "--epochs", 1, "--run_dir", runs.folder("run"))
    assert ended.code == 1 and ended.left == 0
    assert re.search(said + "replace or delete it", ended.text)
    status = runs.json("run", "status.json")
    assert status["rank"] == 1 and re.search(said, status["error"]), str(status)


def test_with_replace_a_run_goes_on_without_corrupt_images(runs):
    """The same weights on one rank without workers and on two ranks with two: the first image of all is corrupt, and one held out."""
    words = folder_of_images(runs.root / "images", count=12)
    for name in ("train/cat/000", "train/dog/007", "val/dog/001"):
        (runs.root / f"images/{name}.png").write_bytes(b"no image")
    words += ["--corrupt_images", "replace", "--epochs", 2, "--global_batch_size", 8, "--no-use_amp"]
    for ranks, workers in ((1, 0), (2, 2)):
        (outcome, *_) = runs.train(ranks, f"on {ranks}", *words, "--num_workers", workers, dtype=torch.float64)
        assert outcome["state"] == "completed" and runs.records(f"on {ranks}", "eval")[-1]["count"] == 24
    weights = [runs.last(f"on {ranks}")["model"] for ranks in (1, 2)]
    assert all(torch.allclose(weights[0][name], weights[1][name], rtol=1e-10) for name in weights[0])


# ---- shared memory ----


def with_shared_memory(megabytes, command, **options) -> Ended:
    """Run a command that sees so small a /dev/shm, in a mount namespace of its own."""
    need("unshare")
    mine = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "-m"]
    mount = [*mine, "sh", "-c", f'mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && exec "$@"', "sh"]
    if launch([*mount, "true"]).code:
        lack("this machine allows no mount namespaces")
    return launch([*mount, *command], **options)


@pytest.mark.parametrize(("workers", "more", "fits"), [(2, [], False), (1, [], True), (1, ["--max_steps", 4], False), (0, [], True)])
def test_a_small_dev_shm_is_refused_before_the_first_step_or_suffices(runs, workers, more, fits):
    """Batches of 148 kB, two a worker and one in use on each of 2 ranks: 0.9 MB for one worker, 1.4 for two, or in mid-epoch evaluations."""
    flags = ["--batch_size", 48, "--image_size", 32, "--dataset_size", 768, "--epochs", 1, "--num_workers", workers, *more]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", *TINY, *flags]
    ended = with_shared_memory(1, [*command, "--run_dir", runs.folder("run")])
    if fits:
        assert ended.code == 0, ended.text
        return
    said = f"/dev/shm: has 1.0 MB free, and {workers} loader .* of each of 2 .* may put 1.4 MB there; .*, or --num_workers {workers - 1}"
    assert ended.code == 1 and re.search(said, ended.text) and re.search(said, runs.json("run", "status.json")["error"])


OVERFLOWS = """
import torch
from config import RunFailed, TrainingConfig
from ddp_utils import DistributedContext
from utils.loading import create_evaluation_dataloader

class Growing(torch.utils.data.Dataset):
    collate = staticmethod({collate})
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.zeros(10 if index < 4 else 400_000)

config = TrainingConfig(batch_size=4, num_workers=2, hang_timeout=8)
loader = create_evaluation_dataloader(Growing(), config, DistributedContext(0, 0, 1, torch.device("cpu")))
loader.sample_batch()
try:
    for window in loader.windows(0):
        for micro_batch in window:
            pass
except RunFailed as failed:
    print(failed)
"""


@pytest.mark.parametrize("collate", ["torch.utils.data.default_collate", "lambda samples: {'lines': samples}"])
def test_a_dev_shm_that_overflows_later_is_the_cause_that_is_said(collate):
    """By torch's collate, which writes there itself, and by a forker's, whose tensors the worker's queue would bring there."""
    ended = with_shared_memory(2, [sys.executable, "-c", OVERFLOWS.format(collate=collate)], deadline=60)
    said = "rank 0: a loader worker could not hand over its batch, since /dev/shm is full; give it more room (docker run --shm-size, "
    assert ended.out.startswith(said), ended.text
