# extra: template
"""What ranks compare before step 0: code, settings, versions, the folder, the limit of open files."""

import contextlib
import os
import re
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

import train
import utils.run.start
from config import TrainingConfig
from ranks import run_ranks
from test_run_folder import contents, fill, open_run
from training import train_flags
from utils.distributed.collectives import all_gather_json
from utils.metrics import all_reduce_scalar
from utils.settings.errors import UserError

UNLIKE = [  # what differs; what all three ranks raise; the rank that is named
    ("config", r"start again\.\n\s+rank 0 on \S+\s+rank 2 on \S+\nlr\s+0.1\s+0.7$", 2),
    ("versions", r"start again\.\n\s+rank 0 on \S+\s+rank 1 on \S+\ntorch\s+\S+\s+2.11.0$", 1),
    ("code", r"start again\.\n\s+rank 0 on \S+\s+rank 2 on \S+\ntrain.py\s+[0-9a-f]{8}\s+01234567$", 2),
    ("folder", r"\S+ does not see what rank 0 on \S+ has written to --run_dir run\. Put the run folder on storage", 1),
    (
        "read-only",
        r"^Rank 1 on \S+ failed: \S+ cannot write to --run_dir \S+ \(Read-only file system\)\. Make this folder",
        1,
    ),
    (
        "limit",
        r"^Rank 1 on \S+ failed: The limit on open files is 100, but about \d+ are needed\. Raise the limit \(ulimit ",
        1,
    ),
]


def touch(path, plain=Path.touch):
    if path.name == ".rank1":
        raise OSError(30, "Read-only file system", str(path))
    plain(path)


def unlike(words, folder):
    """For each case: this rank's error, the rank that it names, and whether there was a run folder."""
    rank, errors, provenance = int(os.environ["RANK"]), [], utils.run.start.provenance
    torch_2_11 = provenance.collect_package_versions() | {"torch": "2.11.0"}
    changed = provenance.compute_code_checksums() | {"train.py": "0123456789"}
    patches = {
        "versions": mock.patch.object(provenance, "collect_package_versions", lambda: torch_2_11),
        "code": mock.patch.object(provenance, "compute_code_checksums", lambda: changed),
        "read-only": mock.patch.object(Path, "touch", touch),
    }
    for what, _, odd in UNLIKE:
        flags = [*words, *(["--lr", "0.7"] if (what, rank) == ("config", 2) else [])]
        if what == "folder":
            flags = [*flags, "--run_dir", "run"]
            os.chdir(folder / str(min(rank, 1)))
        if (what, rank) == ("limit", 1):
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        fault = patches[what] if what in patches and rank == odd else contextlib.nullcontext()
        with fault, pytest.raises(UserError) as error:
            train_flags(flags)
        errors.append((str(error.value), error.value.rank, (folder / "run").exists()))
    return errors


@pytest.mark.guarantee("alike")
def test_every_rank_raises_an_error_with_the_differences(runs):
    for name in ("0", "1"):
        (runs.root / name).mkdir()
    for errors in run_ranks(3, unlike, runs.words("run", "--dataset_size", 16, "--epochs", 1), runs.root):
        for (what, pattern, odd), (text, rank, is_made) in zip(UNLIKE, errors, strict=True):
            assert re.search(pattern, text) and rank == odd, (what, text, rank)
            assert not is_made or what not in ("config", "versions", "code")  # before the folder is locked


def overwrite(words):
    fault = mock.patch.object(Path, "touch", touch) if os.environ["RANK"] == "1" else contextlib.nullcontext()
    with fault, pytest.raises(UserError, match="cannot write to --run_dir"):
        train_flags([*words, "--overwrite"])


def test_a_run_that_a_start_has_moved_aside_is_moved_back_if_a_rank_cannot_write(runs):
    words = runs.words("run", "--dataset_size", 16, "--epochs", 1)
    fill(open_run(TrainingConfig.from_args(words)))
    before = contents(runs.root)
    run_ranks(2, overwrite, words)
    assert contents(runs.root) == before


def exchange(sizes):
    ctx = train.setup_distributed(TrainingConfig(backend="gloo"))
    gathered = [all_gather_json({"rank": ctx.rank, "text": "ö" * (size * (ctx.rank + 1) // 4)}, ctx) for size in sizes]
    sums = [all_reduce_scalar(float(ctx.rank + 1), op) for op in ("mean", "sum", "min", "max")]
    train.cleanup_distributed()
    return gathered, sums


def test_every_rank_receives_the_messages_and_the_sums_of_all_ranks():
    sizes = [0, 1, 500, 505, 506, 507, 508, 509, 510, 2000, 60_000]  # around the length that fits in one collective
    expected = [[{"rank": rank, "text": "ö" * (size * (rank + 1) // 4)} for rank in range(4)] for size in sizes]
    assert run_ranks(4, exchange, sizes) == [(expected, [2.5, 10.0, 1.0, 4.0])] * 4


def train_beside_an_xpu(words):
    with (
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu")),
        mock.patch.object(torch.cuda, "device_count", lambda: 0),
    ):
        return train_flags(words)["state"]


@pytest.mark.guarantee("devices")
def test_a_machine_with_another_accelerator_trains_on_the_cpu(runs):
    words = runs.words("run", "--dataset_size", 16, "--epochs", 1, "--num_workers", 1)
    assert run_ranks(1, train_beside_an_xpu, words) == ["completed"]
    assert re.search(r"ranks +1 rank on 1 node \(cpu\)$", runs.log("run"), re.MULTILINE)
