# extra: template
"""Runs of two ranks whose data fails: each ends with the cause (more in tests/faults/data.py)."""

import re
import sys
import time

import pytest

from disks import mounting
from ranks import WarmLaunch, finish, launch

HANGS = """
from torch.utils.data import get_worker_info
plain, calls = tasks.Images.__getitems__, []
def fetch(self, indices):
    if get_worker_info():
        calls.append(self.split)
        if calls == ['train'] * 3 and os.environ['RANK'] == '1':
            time.sleep(600)
    return plain(self, indices)
tasks.Images.__getitems__ = fetch
"""  # where a worker of rank 1 fetches its third micro-batch


@pytest.mark.guarantee("hang")
@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_run_with_its_rank(runs):  # extra: watch
    """Both ranks end long before a collective times out, and no process is left."""
    words = runs.words("run", *"--dataset_size 160 --epochs 1 --num_workers 1 --hang_timeout 6".split())
    ended = finish(WarmLaunch(2, runs.program(HANGS), words))
    assert ended.code == 1 and ended.left == 0, ended.text
    status = runs.json("run", "status.json")
    expected = r"There was no progress for \d+ s: rank 1 on \S+ hangs in data of step 3 "
    assert (status["state"], status["rank"]) == ("failed", 1) and re.search(expected, status["error"]), str(status)
    assert re.search(expected, ended.text)


UNSENDABLE = """
from torch.utils.data import get_worker_info
plain, calls = tasks.Images.collate, []
def collate(self, batch):
    if get_worker_info():
        calls.append(self.split)
        if calls == ['train'] * 3 and int(os.environ.get('RANK', 1)) == 1:
            return (part for part in batch)
    return plain(self, batch)
tasks.Images.collate = collate
"""  # the third micro-batch of a worker of rank 1, or of the only one


@pytest.mark.guarantee("worker-killed")
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_batch_that_a_worker_cannot_send_ends_the_run_at_once(runs, ranks):
    words = runs.words("run", *"--dataset_size 160 --epochs 1 --num_workers 1".split())
    began = time.monotonic()
    ended = finish(WarmLaunch(ranks, runs.program(UNSENDABLE), words), 60)
    assert (ended.code, ended.left) == (1 if ranks else 2, 0) and time.monotonic() - began < 20, ended.text
    status, rank = runs.json("run", "status.json"), 1 if ranks else 0
    assert (status["state"], status["rank"]) == ("failed", rank) and status["error"] in ended.text
    assert re.match(
        rf"Rank {rank} failed: A loader worker cannot send what collate returns .* cannot pickle 'generator' object.*\."
        " Return tensors",
        status["error"],
    )


SLOW = """
import line_tasks
plain = line_tasks.Lines.__getitem__
def getitem(self, index):
    time.sleep(0.01)
    return plain(self, index)
line_tasks.Lines.__getitem__ = getitem
"""


def test_slow_data_is_a_warning_with_the_flags_that_help(runs):
    words = runs.words("run", *"--dataset_size 40 --epochs 1 --num_workers 0 --log_interval 2".split())
    ended = finish(WarmLaunch(0, runs.program(SLOW, task="lines"), words))
    assert ended.code == 0, ended.text
    assert re.search(
        r"Data loading takes \d+% of the time\. Try more --num_workers \(now 0 per rank, with ", ended.text
    )


BROKEN = """
import line_tasks
plain = line_tasks.Lines.__getitem__
def getitem(self, index):
    if index == 13:
        return {'the_line': None}['the_' + 'word']
    return plain(self, index)
line_tasks.Lines.__getitem__ = getitem
line_tasks.Lines.path = lambda self, index: f'/texts/{index}.txt'
"""


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_error_in_getitem_names_the_sample_and_its_file_beside_the_authors_traceback(runs, workers):
    words = runs.words("run", *f"--dataset_size 20 --epochs 1 --num_workers {workers}".split())
    ended = finish(WarmLaunch(2, runs.program(BROKEN, task="lines"), words))
    status, where = runs.json("run", "status.json"), "sample 13 (/texts/13.txt)"
    assert ended.code == 1 and where in status["error"] and "the_word" in status["error"], ended.text
    assert ", in getitem" in ended.text
    *_, last = re.finditer(rf"Rank {status['rank']} on \S+ failed: (KeyError: )?", ended.text)
    assert last[1] and where in ended.text[last.end() :]


ONE_SLOW_BATCH = """
import utils.extras.watch.watchdog as watchdog
watchdog.MIN_REPORT_SECONDS = watchdog.SECONDS_TO_OBSERVE = 0.4
plain_loss, calls = train.your_model.compute_loss, []
def compute_loss(net, batch):
    calls.append(net.training)
    if len(calls) == 20 and os.environ.get('RANK', '1') == '1':
        time.sleep(3)
    return plain_loss(net, batch)
train.your_model.compute_loss = compute_loss
"""  # extra: watch


@pytest.mark.guarantee("hang")
@pytest.mark.parametrize("ranks", [0, 2])
def test_one_slow_step_is_called_slow_and_training_continues(runs, ranks):  # extra: watch
    ended = finish(
        WarmLaunch(ranks, runs.program(ONE_SLOW_BATCH), runs.words("run", *"--dataset_size 200 --epochs 1".split()))
    )
    assert (ended.code, ended.left) == (0, 0), ended.text
    regex = rf"WARN.*no progress for \d s: rank {min(ranks, 1)} on \S+ is slow in forward of step \d+ \(process \d+\)\."
    assert len(re.findall(regex, runs.log("run"))) == ended.text.count("no progress") == 1, ended.text
    assert " hangs " not in ended.text and not list(runs.folder("run").glob("hang-*"))


# ---- shared memory ----


OVERFLOWS = """
import torch
from config import TrainingConfig
from utils.settings.errors import TrainingError
from ddp_utils import DistributedContext
from utils.data.loader import create_evaluation_dataloader

class Growing(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.zeros(10 if index < 4 else 400_000)

config = TrainingConfig(batch_size=4, num_workers=2)
loader = create_evaluation_dataloader(Growing(), config, DistributedContext(0, 0, 1, torch.device("cpu")))
try:
    for micro_batch in loader.micro_batches(0):
        pass
except TrainingError as error:
    print(error)
"""


def test_a_dev_shm_that_fills_up_is_named_as_the_cause():
    code = mounting("-t", "tmpfs", "-o", "size=2m", "tmpfs", "/dev/shm") + OVERFLOWS
    ended = launch([sys.executable, "-c", code], deadline=60)
    regex = r"Rank 0 failed: .*shared memory.*\. If .*, give the job more memory or a larger --shm-size, or"
    assert re.match(regex, ended.out), ended.text
