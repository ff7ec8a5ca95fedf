# extra: launcher or benchmark or chaos or judge
"""scripts/lib/processes.py: no process that a program started outlives its deadline."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib.processes import list_children, run_process, running_process
from training import wait_until

PARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"


def test_output_and_exit_code_are_returned():
    ended = run_process([sys.executable, "-c", "import sys; print('out'); sys.exit('err')"], seconds=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "out\n", "err\n")


def test_the_deadline_ends_the_whole_group():
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run_process([sys.executable, "-c", PARENT], seconds=2, stdin=subprocess.PIPE)
    wait_until(lambda: not Path(f"/proc/{int(late.value.stdout)}").exists())


def test_the_end_of_the_block_ends_the_whole_group():
    with running_process([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        child = int(program.stdout.readline())
        assert list_children(program.pid) == [child]
    wait_until(lambda: not Path(f"/proc/{child}").exists())
