"""What train.py does before it imports torch, which takes seconds: print, reject, or announce the start."""

import json
import os
import subprocess
import sys

import pytest

from ranks import ROOT

PROGRAM = """
import sys, runpy
sys.modules['torch'] = None  # an import of it fails
sys.argv[0] = 'train.py'
runpy.run_path('train.py', run_name='__main__')
"""
REJECTED = '--lr must be a number or "auto", got "x".\n'
NO_TORCH = "ModuleNotFoundError: No module named 'torch.distributed'"


def start(flags, **env):
    command = [sys.executable, "-c", PROGRAM, *flags.split()]
    env = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)


@pytest.mark.parametrize(
    ("flags", "code", "out", "err"),
    [
        ("--help", 0, "--batch_size INT", ""),
        ("--lr x", 2, "", REJECTED),
        ("", 1, "Starting on 1 rank. Importing torch takes a few seconds.\n", NO_TORCH),
    ],
)
def test_one_process(flags, code, out, err):
    ended = start(flags)
    assert (ended.returncode, out in ended.stdout, err in ended.stderr) == (code, True, True), ended.stderr


@pytest.mark.parametrize(
    ("flags", "codes", "out", "err"),
    [
        ("--help", (0, 0), "--batch_size INT", ""),
        ("--lr x", (2, 0), "", REJECTED),  # torchrun reports each rank that fails
        ("", (1, 1), "Starting on 2 ranks.", ""),
    ],
)
def test_of_two_ranks_only_rank_0_prints(tmp_path, flags, codes, out, err):
    for rank, code in enumerate(codes):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "none"}
        report = tmp_path / f"error{rank}.json"
        ended = start(flags, **{name: str(n) for name, n in names.items()}, TORCHELASTIC_ERROR_FILE=str(report))
        is_shown = (out in ended.stdout) and (err in ended.stderr)
        assert (ended.returncode, is_shown) == (code, rank == 0), ended.stderr
        assert report.exists() == (code == 2)
        if report.exists():  # launchers read it for their summary
            message = json.loads(report.read_text())["message"]
            assert message["message"] == f"UserError: {REJECTED.strip()}"
            assert message["extraInfo"]["py_callstack"] == REJECTED.strip()


def test_of_two_ranks_only_rank_0_says_which_settings_of_a_file_are_ignored(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"minutes": 5.0, "max_steps": 9}))
    for rank in (0, 1):
        ended = start(f"--config {file}", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        assert (f"{file}: minutes=5.0 is ignored, since minutes was removed. " in ended.stderr) == (rank == 0), (
            ended.stderr
        )
