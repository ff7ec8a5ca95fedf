"""A process that ends or reports a hang does not wait for storage that stalls."""

import logging
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ranks import run_ranks
from training import wait_until
from utils.distributed.context import Launch
from utils.extras.watch import rank_supervisor
from utils.logger import LOGGER_NAME
from utils.run import command_line
from utils.run.exit import ExitReporter


class Stalled(logging.Handler):
    """Writes nothing until the storage answers, like a file on NFS."""

    def __init__(self):
        super().__init__()
        self.goes_on, self.texts = threading.Event(), []

    def emit(self, record):
        self.goes_on.wait()
        self.texts.append(record.getMessage())


@pytest.fixture
def stalled():
    logger, handler = logging.getLogger(LOGGER_NAME), Stalled()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    handler.goes_on.set()
    logger.removeHandler(handler)


def supervisor_of(folder, ctx):
    """Without a thread."""
    with mock.patch.object(rank_supervisor, "Watchdog"):
        return rank_supervisor.RankSupervisor(folder, 300, ctx, ExitReporter(ctx))


def test_a_report_does_not_hold_up_the_beats_when_the_storage_stalls(stalled, tmp_path):
    ctx = SimpleNamespace(rank=0, hosts=("a",), host="a", heartbeats=None, device=torch.device("cpu"))
    watcher, began = supervisor_of(tmp_path, ctx), time.monotonic()
    file = watcher.report_hang("no progress", "stacks")
    watcher.warn("torchrun does not answer")
    assert time.monotonic() - began < 1 and not stalled.texts
    stalled.goes_on.set()
    assert wait_until(lambda: file.exists() and file.read_text()) == "no progress\nstacks\n"
    assert wait_until(lambda: len(stalled.texts) == 3)


def end_on_stalled_storage(folder):
    rank_supervisor.SECONDS_TO_WRITE, command_line.SECONDS_TO_FLUSH = 0.5, 0.5
    logging.getLogger(LOGGER_NAME).addHandler(Stalled())
    ctx = SimpleNamespace(rank=0, hosts=("a",), host="a", heartbeats=None, device=torch.device("cpu"), launch=Launch())
    supervisor_of(folder, ctx).exit_hung("no progress", 0)


def test_a_rank_ends_although_its_log_is_on_storage_that_stalls(tmp_path):
    with pytest.raises(AssertionError, match=r"exit codes \[1\]"):
        run_ranks(1, end_on_stalled_storage, tmp_path, deadline=30)
