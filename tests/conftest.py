"""For all tests: the repository on the path, one thread per process, no state left from one test to the next."""

import logging
import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["tests", "tests/unit", "tests/distributed", "tests/builtin"]
FOLDERS += ["tests/faults", "tests/comparison"]  # extra: template
PATHS = [str(ROOT), str(ROOT / "scripts"), *(str(ROOT / folder) for folder in FOLDERS)]
PATHS += sorted(map(str, (ROOT / "tests/extras").glob("*")))
sys.path[:0] = PATHS
# inherited by started processes
os.environ |= {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# torch looks up the host names of connections: a name server that loses packets would cost 5 s each time
os.environ.setdefault("RES_OPTIONS", "timeout:1")
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED"):  # set by a shell
    os.environ.pop(name, None)

for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:  # under nohup or &: ignored here, not in processes that tests start
        signal.signal(number, lambda *_: None)

import pytest
import torch

from utils.settings.deleted_extras import read_deleted_extras

DELETED = read_deleted_extras()
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")
    parser.addoption("--alone", choices=["only", "no"], help="only: run the tests marked alone; no: run all others")


def pytest_collection_modifyitems(config, items):
    config.collected = [*items]  # also what is left out

    def is_left_out(item):
        is_slow, is_alone = (item.get_closest_marker(name) is not None for name in ("slow", "alone"))
        return (is_slow and not config.getoption("--all")) or {"only": not is_alone, "no": is_alone}.get(
            config.getoption("--alone"), False
        )

    deselected = [item for item in items if is_left_out(item)]
    if deselected:
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=deselected)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In a fork that has deleted extras (docs/extras.md), a test that uses one is skipped."""
    report = yield
    if DELETED and report.failed:
        names = "|".join(["-", *(name for fields in DELETED.values() for name in fields)])
        answers = r"needs the extra \w+, which this fork has deleted|this fork has no extra \w+"
        uses = rf"{answers}|(?:keyword argument|no attribute) '(?:{names})'"
        if match := re.search(uses, report.longreprtext + report.capstderr):
            report.outcome, report.longrepr = "skipped", (*item.location[:2], match[0])
    return report


@pytest.fixture(autouse=True)
def no_trace():
    """Undo changes of the default dtype and the logger, and end loader workers, after each test."""
    yield
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    # a loader that is garbage-collected in a cycle, for example after an exception, loses its queues and waits 10 s for
    # each of them
    if workers:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise here
        for worker in workers:
            worker.kill()
            worker.join()
        signal.signal(signal.SIGCHLD, handler)
    torch.set_default_dtype(torch.float32)
    logger = logging.getLogger("ddp")
    logger.propagate = True
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def runs(tmp_path):
    """Training with real ranks in a folder of this test (training.py)."""
    from ddp_utils import cleanup_distributed
    from training import Runs

    yield Runs(tmp_path)
    cleanup_distributed()  # of a training in this process that failed
