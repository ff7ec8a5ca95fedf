"""For all tests: the repository on the path, one thread a process, nothing left of one test in the next."""

import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "multiprocess"), str(ROOT / "tests" / "faults")]
sys.path[:0] = PATHS
os.environ |= {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # for processes started here
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

import random
import time

import pytest
import torch

torch.set_num_threads(1)


DRILLS = {"drill": 3, "fault": 7, "misconfiguration": 7}  # of the slow ones, that a run of the tests takes
DRILL_SEED = os.environ.get("DRILL_SEED", time.strftime("%Y-%m-%d"))


def pytest_addoption(parser):
    parser.addoption("--drills", action="store_true", help="run all slow drills, not a sample of them")


def pytest_report_header(config):
    sample = " and ".join(f"{number} of {marker}" for marker, number in DRILLS.items())
    return "drills: all" if config.getoption("drills") else f"drills: {sample}, chosen by DRILL_SEED={DRILL_SEED} (--drills runs all)"


def pytest_collection_modifyitems(config, items):
    for marker, number in DRILLS.items():
        drills = [item for item in items if item.get_closest_marker(marker)]
        if len(drills) > number and not config.getoption("drills"):
            chosen = random.Random(DRILL_SEED).sample(drills, number)
            left_out = [item for item in drills if item not in chosen]
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter):
    """The scoreboard of the faults that were injected."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name) if "test_fault[" in report.nodeid]
    rows = []
    for report in reports:
        kind = report.nodeid.split("[")[1].rstrip("]")
        group, kind, end, figure = dict(report.user_properties).get("fault", ("", kind, "", ""))
        rows.append((group, kind, "held" if report.passed else "BROKEN", f"{report.duration:.0f} s", figure, end))
    if rows:
        terminalreporter.section(f"faults: {sum(row[2] == 'held' for row in rows)} of {len(rows)} held")
        widths = [max(len(row[k]) for row in rows) for k in range(6)]
        for row in sorted(rows):
            terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@pytest.fixture(autouse=True)
def no_trace():
    """A test that computes in float64 or sets up the logger leaves no trace."""
    yield
    torch.set_default_dtype(torch.float32)
    logger = logging.getLogger("ddp")
    logger.propagate = True
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def runs(tmp_path):
    """Training with real ranks in a folder of the test's own (multiprocess/training.py)."""
    from training import Runs

    return Runs(tmp_path)
