"""What needs a second process and no training: the owner of a folder, workers and writer at the end."""

import os
import signal
import time
from pathlib import Path

import pytest

from config import TrainingConfig, UserError
from ranks import CONTEXT, DEADLINE, WarmLaunch, finish
from test_run_folder import open_run, with_
from training import wait_until
from utils.checkpoint.writer import Writer


def own_a_folder(folder, connection):
    os.chdir(folder)
    run = open_run(TrainingConfig(run_dir="runs/mine"))
    connection.send(run.start.lock_number)
    connection.recv()


def test_a_folder_in_use_is_rejected_with_its_owner_and_a_dead_owner_does_not_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainingConfig(run_dir="runs/mine")
    ours, theirs = CONTEXT.Pipe()
    owner = CONTEXT.Process(target=own_a_folder, args=(tmp_path, theirs))
    owner.start()
    try:
        assert ours.recv() == 1
        said = rf"in use by process {owner.pid} on here since .*; end that job or give another --run_dir"
        with pytest.raises(UserError, match=said):
            open_run(with_(config, overwrite=True))
    finally:
        owner.kill()
        owner.join()
    assert open_run(config).start.attempt == 1


def make_a_writer_and_die(file):
    writer = Writer()
    if not (holder := os.fork()):  # as a loader's worker it has a copy of the connection, which does not end then
        time.sleep(DEADLINE)
        os._exit(0)
    file.write_text(f"{writer.pid} {holder}")
    os.kill(os.getpid(), signal.SIGKILL)


def is_there(stat):
    """Whether a process still runs: one that nobody waits for stays as a zombie."""
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_writer_ends_when_the_training_process_was_killed_though_a_worker_lives_on(tmp_path):
    process = CONTEXT.Process(target=make_a_writer_and_die, args=(tmp_path / "pids",))
    process.start()
    process.join(DEADLINE)
    writer, holder = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    wait_until(lambda: not is_there(Path(f"/proc/{writer}/stat")))
    assert is_there(Path(f"/proc/{holder}/stat"))
    os.kill(holder, signal.SIGKILL)


HOLDS_WORKERS = """
import sys
from torch.utils.data import DataLoader
from utils.signals import ignore_in_worker
batches = iter(DataLoader(range(100), num_workers=2, worker_init_fn=ignore_in_worker))
next(batches)
sys.kept = batches  # nothing shuts them down before the interpreter ends
print("done", flush=True)
"""


def test_workers_that_ignore_sigterm_do_not_keep_the_process_from_its_end(tmp_path):
    """multiprocessing ends daemonic children by SIGTERM and joins them without a limit."""
    file = tmp_path / "program.py"
    file.write_text(HOLDS_WORKERS)
    ended = finish(WarmLaunch(0, file, []))
    assert (ended.code, ended.out, ended.left) == (0, "done\n", 0), ended.text
