"""A rank that really cannot allocate, by a limit of the kernel: the run ends in one sentence with the flags that help."""

import re
import sys

import pytest

from ranks import WarmLaunch, finish

BATCH = 512
LIMITED = """
import resource, torch
from utils.memory import own_memory
plain, plain_loss = train.first_passes, train.compute_loss
def first_passes(*args, **options):
    if os.environ.get('RANK') == '1':
        most = own_memory('VmData') + 2**26
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return plain(*args, **options)
def large_loss(net, batch):
    torch.empty(2**26)
    return plain_loss(net, batch)
train.first_passes, train.compute_loss = first_passes, large_loss
"""  # each micro-batch takes 256 MiB; rank 1 may take 64 MiB more than it has


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits of a process")
def test_one_rank_of_two_that_has_too_little_memory_is_named_with_the_flags_that_help(runs):
    flags = f"--batch_size {BATCH} --dataset_size {2 * BATCH} --epochs 2 --save_every 0 --no-use_amp".split()
    ended = finish(WarmLaunch(2, runs.program(LIMITED), runs.words("run", *flags)))
    assert (ended.code, ended.left) == (1, 0), ended.text
    status = runs.json("run", "status.json")
    assert (status["state"], status["rank"]) == ("failed", 1) and status["error"] in ended.text
    remedy = (
        rf"use --batch_size {BATCH // 2} --global_batch_size {2 * BATCH} \(the same global batch; .* or --activation_ch"
    )
    assert re.match(rf"rank 1 on \S+ ran out of memory: .*; {remedy}", status["error"])
