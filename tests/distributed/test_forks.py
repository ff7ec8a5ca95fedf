# extra: template
"""Loader workers that are forked from a process with gloo's threads.

The first test forks them right after a collective, while the thread that writes checkpoints is at work. The hang is
rare and depends on the machine. Without the wait of utils/signals.py (`waits=False`), 10 of 4,000 processes hung
once; on another day none of 2,000 loader workers (1,135 checkpoints were written meanwhile), and none of 2,000
processes that were forked with os.fork right after the collective (two cores, CPython 3.11.7, torch 2.15.0). So if it
fails there is a hang; if it passes, that alone does not show that the wait is needed.
"""

import multiprocessing
import sys
import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ranks import launch, run_ranks
from test_checkpoint import payload
from utils import signals
from utils.checkpoint import archive

FORKS = 2_000  # of both ranks
SECONDS_OF_A_HANG = 30


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.full((64,), float(index)).sum()


def fork_after_collectives(folder, forks, waits=True):
    """How many of a rank's loader workers hung. waits: False takes out the wait of utils/signals.py."""
    dist.init_process_group("gloo")
    rank, is_over, writes = dist.get_rank(), threading.Event(), []
    saved = payload(10) | {"model": {f"weight{k}": torch.randn(40_000) for k in range(300)}}

    def write():
        while not is_over.is_set():
            writes.append(archive.write_archive(folder / f"rank{rank}.pt", saved))

    writer = threading.Thread(target=write)
    writer.start()
    hung, sums, more = 0, torch.ones(4_000), [torch.empty(100) for _ in range(dist.get_world_size())]
    without = mock.patch.object(signals.time, "sleep", lambda seconds: None)
    for _ in range(forks):
        options = {"timeout": SECONDS_OF_A_HANG, "worker_init_fn": signals.ignore_signals_in_worker}
        loader = DataLoader(Numbers(), num_workers=1, **options)
        with signals.signals_blocked(), nullcontext() if waits else without:
            dist.all_reduce(sums, async_op=True).wait()
            dist.all_gather(more, torch.ones(100))
            batches = iter(loader)  # forks
        try:
            assert [batch.item() for batch in batches] == [0.0, 64.0]
        except RuntimeError as error:
            assert "timed out" in str(error), error
            hung += 1
            for child in multiprocessing.active_children():
                child.kill()
    is_over.set()
    writer.join()
    dist.barrier()
    dist.destroy_process_group()
    return hung, len(writes)


@pytest.mark.slow
def test_no_worker_hangs_that_is_forked_after_a_collective_while_a_checkpoint_is_written(tmp_path):
    results = run_ranks(2, fork_after_collectives, tmp_path, FORKS // 2, deadline=1500)
    assert [hung for hung, _ in results] == [0, 0]
    assert min(written for _, written in results) > 10


WITH_A_GROUP_THAT_IS_GARBAGE = """
import gc
import torch
import torch.distributed as dist
from config import TrainingConfig
from ddp_utils import DistributedContext
from utils.data.loader import create_evaluation_dataloader

class Collecting(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        gc.collect()
        return torch.ones(2)

gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
cycle = [dist.new_group([0], backend="gloo")]
cycle.append(cycle)
dist.all_reduce(torch.ones(1), group=cycle[0])
dist.destroy_process_group()
del cycle
context = DistributedContext(0, 0, 1, torch.device("cpu"))
loader = create_evaluation_dataloader(Collecting(), TrainingConfig(batch_size=2, num_workers=1), context)
print("batches:", len(list(loader.micro_batches(0))))
loader.close()
"""


def test_no_worker_hangs_that_collects_a_copy_of_a_process_group():
    """As of a run in this process that has ended. Without `gc.freeze` the worker hangs each time."""
    ended = launch([sys.executable, "-c", WITH_A_GROUP_THAT_IS_GARBAGE], deadline=60)
    assert ended.code == 0 and "batches: 2" in ended.out, ended.text
