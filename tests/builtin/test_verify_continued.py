# extra: verify and template
"""scripts/verify.py finds data that are others in a run that is continued, by its folder or the attempt's number."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from config import TrainingConfig
from ddp_utils import DistributedContext
from lib.verify import data_checks
from lib.verify.fork import BrokenInvariant, Fork
from test_verify_data import MODEL, REGRESSION, broken, verified

ENVIRON = "int(os.environ.get('{}', 0))".format
LINES = "len((config.run_folder / 'train.jsonl').read_text().splitlines()) if config.run_folder.exists() else 0"
STAGE = "max([int(path.stem[5:]) for path in config.run_folder.glob('checkpoints/*')], default=0) // 500"
DATA = """
import os
import torch

CALLS = []

class Rows(torch.utils.data.Dataset):
    def __init__(self, config, count):
        CALLS.append(1)
        self.number = CREATED
        self.x = torch.arange(float(count + SIZE))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.number + FETCHED

    def epoch_order(self, seed, epoch, n):
        return torch.arange(n).roll(epoch + ORDERED)

    def device_transform(self, batch, seed, epoch, indices):
        return batch + TRANSFORMED

def is_prepared(config):
    return True

def create_dataset(config, split):
    config.run_folder.with_name("cache").mkdir(exist_ok=True)
    return {"train": Rows(config, 9), "val": Rows(config, 5)}.get(split)
"""
BROKEN = "Samples or their order differ in a run that is continued"
CASES = {  # what is put in place of a name in DATA, and the sentence
    "checkpoints": ({"CREATED": "len(list(config.run_folder.glob('checkpoints/*')))"}, BROKEN),
    "a fold for each checkpoint": ({"CREATED": "len(list(config.run_folder.glob('checkpoints/*'))) % 2"}, BROKEN),
    "a stage of many steps": ({"CREATED": STAGE}, BROKEN),
    "size": ({"SIZE": "config.run_folder.exists()"}, BROKEN),
    "records": ({"CREATED": LINES}, BROKEN),
    "resume_from": ({"CREATED": "len(config.resume_from)"}, BROKEN),
    "fetched": ({"FETCHED": ENVIRON("TORCHELASTIC_RESTART_COUNT")}, BROKEN),
    "order": ({"ORDERED": ENVIRON("SLURM_RESTART_COUNT")}, BROKEN),
    "transform": ({"TRANSFORMED": ENVIRON("SLURM_RESTART_COUNT")}, BROKEN),
    "epoch": ({"TRANSFORMED": f"epoch * {ENVIRON('SLURM_RESTART_COUNT')}"}, BROKEN),
    "one set": ({"SIZE": "(config.resume_from != '') * (count == 5)"}, BROKEN),
    "plain": ({}, None),
    "read": ({"CREATED": "0 * len(str(config.run_dir))"}, None),
    "name": ({"CREATED": "sum(map(ord, config.run_dir))"}, "since those of two new runs differ, too"),
    "calls": ({"CREATED": "len(CALLS)"}, "since those of two new runs differ, too"),
    "failure": ({"CREATED": "1 // (config.resume_from == '')"}, "Not checked: the data of a run that is continued"),
}


@pytest.mark.parametrize("kind", CASES)
def test_data_that_depend_on_the_attempt_are_found(tmp_path, kind, monkeypatch):
    changes, expected = CASES[kind]
    code = DATA
    for name in ("CREATED", "SIZE", "FETCHED", "ORDERED", "TRANSFORMED"):
        code = code.replace(name, changes.get(name, "0"))
    data = SimpleNamespace()
    exec(code, vars(data))
    monkeypatch.setattr(data_checks, "your_data", data)
    given = TrainingConfig(run_dir=str(tmp_path / "first"), data_dir=str(tmp_path))
    sets = [data.create_dataset(given, split) for split in ("train", "val")]
    fork = Fork(given, *sets, DistributedContext(0, 0, 1, torch.device("cpu")), tmp_path, None, given)
    folder = tmp_path / "whole"
    (folder / "checkpoints").mkdir(parents=True)
    for step in (1, 2):
        (folder / f"checkpoints/step_0000000{step}.pt").touch()
    (folder / "train.jsonl").write_text("{}\n")
    torch.set_default_dtype(torch.float64)
    fork = replace(fork, dtype=torch.float64)
    if expected is BROKEN:
        with pytest.raises(BrokenInvariant, match=BROKEN):
            data_checks.check_continued_data(fork)
    else:
        text = data_checks.check_continued_data(fork)
        assert expected in text if expected else text == "", text
    assert torch.get_default_dtype() == torch.float64


WAITS = """

import os, time
from utils.checkpoint import format

plain = format.list_step_checkpoints

def when_rank_0_goes_on(folder):
    ends = time.monotonic() + 1
    while os.environ.get("RANK") == "1" and time.monotonic() < ends:
        if (folder / "step_00012347.pt").is_symlink():
            break
        time.sleep(0.001)
    return plain(folder)

format.list_step_checkpoints = when_rank_0_goes_on
"""


@pytest.mark.slow
def test_no_other_rank_sees_the_checkpoint_that_one_adds(tmp_path):
    """Rank 1 lists the checkpoints once it is there, or after a second."""
    ended = verified(tmp_path, REGRESSION, MODEL + WAITS, ranks=2)
    assert ended.code == 0 and not broken(ended), ended.text
