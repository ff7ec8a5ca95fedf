"""What ranks check of each other before step 0: the same code, settings and versions, one folder, open files enough; in a table."""

import os
import re
import resource
import time
from pathlib import Path

import pytest

import ddp_utils
import train
import utils.alike
from config import TrainingConfig
from ranks import run_ranks
from training import TINY
from utils.together import exchange


def deny(path):
    raise OSError(30, "Read-only file system", str(path))


def unlike(words, what, folder):
    rank = int(os.environ["RANK"])
    if what == "config" and rank == 2:
        words = [*words, "--lr", "0.7"]
    if what == "versions" and rank == 1:
        plain = utils.alike.provenance.versions
        utils.alike.provenance.versions = lambda: plain() | {"torch": "2.11.0"}
    if what == "code" and rank == 3:
        plain_digests = utils.alike.provenance.code_digests
        utils.alike.provenance.code_digests = lambda: plain_digests() | {"model.py": "0123456789"}
    if what == "folder":
        os.chdir(folder / str(min(rank, 1)))
    if what == "read-only" and rank == 1:
        plain_touch = Path.touch
        Path.touch = lambda path: deny(path) if path.name == ".rank1" else plain_touch(path)
    if what == "limit" and rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    seconds = []
    plain_check = ddp_utils.check_alike

    def timed_check(*args):
        began = time.thread_time()  # not the wall's: other programs may have the cores
        try:
            plain_check(*args)
        finally:
            seconds.append(time.thread_time() - began)

    ddp_utils.check_alike = timed_check
    try:
        train.train(TrainingConfig.from_args(words))
    except train.Refused as refused:
        return str(refused), refused.rank, max(seconds, default=0.0)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    ("what", "said", "odd"),
    [
        ("config", r"start again\n\s+rank 0 on \S+\s+rank 2 on \S+\nlr\s+0.1\s+0.7$", 2),
        ("versions", r"start again\n\s+rank 0 on \S+\s+rank 1 on \S+\ntorch\s+\S+\s+2.11.0$", 1),
        ("code", r"the ranks do not run the same thing; give .*\n\s+rank 0 on \S+\s+rank 3 on \S+\nmodel.py\s+[0-9a-f]{8}\s+01234567$", 3),
        ("folder", r"run_dir=run: \S+ does not see there what rank 0 on \S+ has written; put the run folder on storage", 1),
        ("read-only", r"run_dir=\S+: \S+ cannot write there \(Read-only file system\); mount it for all nodes to write \(rank 1 on", 1),
        ("limit", r"open files: the limit is 100, and about \d+ are needed; raise it \(ulimit -n \d+.*\(rank 1 on \S+\)$", 1),
    ],
)
def test_every_rank_is_refused_with_what_differs(tmp_path, what, said, odd):
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    words = [*TINY, "--dataset_size", "16", "--epochs", "1", "--run_dir", "run" if what == "folder" else str(tmp_path / "run")]
    found = run_ranks(4, unlike, words, what, tmp_path)
    for text, rank, seconds in found:
        assert re.search(said, text), text
        assert rank == odd and seconds < 2, (rank, seconds)
        print(f"{what}: {seconds:.3f} s")
    if what not in ("folder", "read-only"):
        assert not (tmp_path / "run").exists()  # nothing was claimed


def test_ranks_that_are_alike_say_nothing_and_lose_no_time():
    rows = utils.alike.table([["", "rank 0 on a", "rank 1 on b"], ["lr", "0.1", "0.2"]])
    assert rows == "    rank 0 on a  rank 1 on b\nlr  0.1          0.2"


def talk(sizes):
    rank = int(os.environ["RANK"])
    ctx = train.setup_distributed(TrainingConfig(backend="gloo"))
    words = [{"rank": rank, "text": "ö" * (size * (rank + 1) // 4)} for size in sizes]
    heard = [exchange(word, ctx) for word in words]
    train.cleanup_distributed()
    return heard


def test_messages_short_and_long_come_as_they_were_given():
    sizes = [0, 1, 500, 505, 506, 507, 508, 509, 510, 2000, 60_000]  # around the length that goes in one collective
    expected = [[{"rank": rank, "text": "ö" * (size * (rank + 1) // 4)} for rank in range(4)] for size in sizes]
    assert run_ranks(4, talk, sizes) == [expected] * 4
