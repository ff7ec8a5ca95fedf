# extra: template
"""Cutting the records of a run that resumes: in little memory, from the end of the file, whole or not at all."""

import json
import os
import signal
import tracemalloc
from pathlib import Path
from unittest import mock

import pytest

from config import TrainingConfig
from test_run_folder import open_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = open_run(TrainingConfig(run_dir="runs/mine"))
    yield run
    run.close()


def long_records(folder, steps, late=()):
    """Write a train record per step, and after it the checkpoint events of the steps that `late` has for it."""
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {"kind": "train", "epoch": 0, "step": step, "loss": step / 7, "lr": 0.1, "grad_norm": 1 / step}
            file.write(json.dumps(record) + "\n")
            for late_step in dict(late).get(step, ()):
                file.write(json.dumps({"kind": "event", "event": "checkpoint", "step": late_step}) + "\n")
        file.write('{"kind": "train", "epoch": 0, "st')


def bytes_read():
    """Of this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("late", "kept", "most"),
    [
        ({}, 59_990, 2**21),
        ({59_995: [59_990], 59_999: [59_998]}, 59_990, None),  # written after later train records
        ({}, 50_000, None),
    ],
)
def test_rewinding_a_long_run_reads_from_the_end_and_holds_few_records(run, late, kept, most):
    long_records(run.folder, 60_000, late)
    path = run.folder / "metrics.jsonl"
    lines = [line for line in path.read_bytes().splitlines(keepends=True)[:-1] if json.loads(line)["step"] <= kept]
    samples = run.folder / "samples/rank0.jsonl"
    samples.parent.mkdir()
    samples.write_bytes(path.read_bytes())  # has steps, too
    size, before = path.stat().st_size, bytes_read()
    tracemalloc.start()
    run.rewind(kept, keeps_evaluation=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    read = bytes_read() - before
    assert path.read_bytes() == b"".join(lines) == samples.read_bytes()
    assert peak < 2**20, f"{peak:,} bytes of memory"
    assert read < (most or 4.5 * size), f"{read:,} of {size:,} bytes"
    assert not [*run.folder.rglob("*.tmp")]


@pytest.mark.parametrize("late", [{}, {28: [20]}])
@pytest.mark.parametrize("call", ["truncate", "fsync", "rename"])
def test_a_kill_while_records_are_cut_leaves_the_old_file_or_the_new_one(run, late, call):
    """Killed before the call, and after it."""
    long_records(run.folder, 30, late)
    path, aside = run.folder / "metrics.jsonl", run.folder / "aside"
    old = path.read_bytes()
    run.rewind(20)
    new = path.read_bytes()
    assert new.count(b"\n") == (21 if late else 20)
    plain = {"truncate": os.truncate, "fsync": os.fsync, "rename": Path.replace}[call]
    for is_before in (True, False):
        path.write_bytes(old)

        def killed(*args, is_before=is_before):
            aside.touch()
            if not is_before:
                plain(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        if not (child := os.fork()):
            where = (Path, "replace") if call == "rename" else (os, call)
            with mock.patch.object(*where, killed):
                run.rewind(20)
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        assert (ended == signal.SIGKILL) == aside.exists() == ((call == "truncate") == (not late))
        aside.unlink(missing_ok=True)
        assert path.read_bytes() in (old, new)
        run.rewind(20)
        assert path.read_bytes() == new
