# extra: template
"""The owner of a run's folder."""

import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from config import TrainingConfig
from ranks import CONTEXT
from test_run_folder import open_run, with_
from utils.run import run_lock, start_decision
from utils.run.run_lock import RunLock
from utils.run.start_decision import decide_start
from utils.settings.errors import StartError, TrainingError, UserError


@pytest.fixture
def quick(monkeypatch):
    """A fraction of the seconds."""
    for name, divisor in {"BETWEEN_HEARTBEATS": 50, "TO_SEE_HEARTBEAT": 15, "TO_READ_BACK": 10}.items():
        monkeypatch.setattr(run_lock, f"SECONDS_{name}", getattr(run_lock, f"SECONDS_{name}") / divisor)


@pytest.mark.guarantee("one-owner")
def test_a_former_owner_writes_nothing_after_another_job_has_taken_over(tmp_path):
    config = TrainingConfig(run_dir=str(tmp_path))
    former = open_run(config)
    former.records.append("train", step=1, loss=1.0)
    owner = open_run(with_(config, resume_from="auto"))
    assert owner.ownership.may_be_owner() and not former.ownership.may_be_owner()
    writes = [
        former.mark_training,
        lambda: former.status.write("running", step=2),
        lambda: former.checkpoint_files.link_best(1),
        lambda: former.checkpoint_files.restore_best(-1),
        lambda: former.rewind(0),
    ]
    for write in writes:
        with pytest.raises(
            TrainingError, match="Another job has taken over the run in .*, so this job ends. Start one job for each"
        ):
            write()
    owner.status.write("running", step=1)
    former.report_failure(RuntimeError("lost"))
    assert '"running"' in (tmp_path / "status.json").read_text()


def hold(folder, connection):
    lock = RunLock(folder, "here")
    lock.write()
    connection.send(lock.token)
    connection.recv()


@pytest.mark.guarantee("one-owner")
def test_a_folder_in_use_is_rejected_with_its_owner_and_a_dead_owner_does_not_block(tmp_path):
    ours, child_end = CONTEXT.Pipe()
    owner = CONTEXT.Process(target=hold, args=(tmp_path, child_end))
    owner.start()
    try:
        token = ours.recv()
        problem = (
            rf"in use by process {owner.pid} on here since \S+, for 0\.\d min\. End that job or give another --run_dir"
        )
        with pytest.raises(UserError, match=problem):
            RunLock(tmp_path, "here")
    finally:
        owner.kill()
        owner.join()
    assert RunLock(tmp_path, "here").previous_owner["token"] == token


@pytest.mark.guarantee("one-owner")
def test_a_file_lock_that_outlives_its_machine_is_waited_for(tmp_path, monkeypatch, quick):
    """As on NFS, where the server keeps it for a while. The machine is this one before a reboot."""
    ours, child_end = CONTEXT.Pipe()
    owner = CONTEXT.Process(target=hold, args=(tmp_path, child_end))
    owner.start()
    try:
        token = ours.recv()
        (tmp_path / "boot_id").write_text("another")
        monkeypatch.setattr(run_lock, "BOOT_ID_FILE", tmp_path / "boot_id")
        monkeypatch.setattr(run_lock, "SECONDS_OF_NFS_LEASE", 0)
        with pytest.raises(UserError, match="is in use by"):
            RunLock(tmp_path, "here")
        monkeypatch.setattr(run_lock, "SECONDS_OF_NFS_LEASE", 60)
        threading.Timer(0.5, owner.kill).start()
        assert RunLock(tmp_path, "here").previous_owner["token"] == token
    finally:
        owner.kill()
        owner.join()


@pytest.mark.guarantee("one-owner")
@pytest.mark.parametrize("boot", ["", "another"])
def test_without_shared_file_locks_an_owner_on_another_machine_is_seen_by_its_heartbeat(
    tmp_path, monkeypatch, quick, boot
):
    """Its host name differs, or only its boot id: a machine of the same name, or this one before it was restarted. A
    second lock in the same process simulates this: file locks of one process do not conflict."""
    owner = RunLock(tmp_path, "here" if boot else "there")
    if boot:
        (tmp_path / "boot_id").write_text(boot)
        monkeypatch.setattr(run_lock, "BOOT_ID_FILE", tmp_path / "boot_id")
    with pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on t?here since"):
        RunLock(tmp_path, "here")
    owner.close()
    began = time.monotonic()
    assert RunLock(tmp_path, "here").previous_owner["token"] == owner.token
    assert time.monotonic() - began > run_lock.SECONDS_TO_SEE_HEARTBEAT


def test_an_owner_on_another_machine_that_has_reported_its_end_is_not_waited_for(tmp_path, quick):
    RunLock(tmp_path, "there").close()
    (tmp_path / "status.json").write_text('{"state": "preempted"}')
    began = time.monotonic()
    RunLock(tmp_path, "here")
    assert time.monotonic() - began < run_lock.SECONDS_TO_SEE_HEARTBEAT


@pytest.mark.guarantee("one-owner")
def test_a_status_from_before_the_owners_claim_does_not_show_that_it_has_ended(tmp_path, quick):
    (tmp_path / "status.json").write_text('{"state": "failed", "time": "2026-01-01T00:00:00.000+00:00"}')
    RunLock(tmp_path, "there").close()
    began = time.monotonic()
    RunLock(tmp_path, "here")
    assert time.monotonic() - began > run_lock.SECONDS_TO_SEE_HEARTBEAT


def test_an_owner_that_cannot_be_read_is_not_one_that_is_missing(tmp_path, monkeypatch):
    RunLock(tmp_path, "here").close()
    before = (tmp_path / "lock.json").read_bytes()

    def fails(path, *_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("utils.files.SECONDS_BETWEEN_TRIES", 0.0)
    with monkeypatch.context() as patches:
        patches.setattr(Path, "read_text", fails)
        with pytest.raises(StartError, match="cannot be written"):
            decide_start(TrainingConfig(run_dir=str(tmp_path)), "here", "", False)
    assert (tmp_path / "lock.json").read_bytes() == before


def test_the_process_and_the_token_in_the_lock_are_those_of_the_owner(tmp_path, quick):
    (tmp_path / "lock.json").write_text('{"token": "before", "host": "here", "pid": 1, "time": "before", "attempt": 3}')
    lock = RunLock(tmp_path, "here", token="mine")
    saved = json.loads((tmp_path / "lock.json").read_text())
    assert (saved["pid"], saved["token"], saved["attempt"]) == (os.getpid(), "mine", 3) and saved["time"] != "before"
    assert lock.previous_owner["pid"] == 1


@pytest.mark.parametrize("before", ["nothing", "a dead owner"])
def test_of_two_starts_at_the_same_time_without_file_locks_one_owns_the_run(tmp_path, monkeypatch, quick, before):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock.fcntl, "lockf", no_locks)
    if before != "nothing":
        RunLock(tmp_path, "dead").close()
    owners, rejected = [], []

    def start(host):
        try:
            owners.append(RunLock(tmp_path, host))
        except UserError as error:
            rejected.append(str(error))

    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(start, ("a", "b", "c", "d")))
        assert len(owners) == 1 and len(rejected) == 3, rejected
        assert json.loads((tmp_path / "lock.json").read_text())["token"] == owners.pop().token
        rejected.clear()
        (tmp_path / "status.json").write_text('{"state": "failed"}')


def test_the_token_is_written_before_the_newest_checkpoint_is_verified(tmp_path, monkeypatch):
    """Verifying takes seconds, in which another launch may start."""
    config, seen = TrainingConfig(run_dir=str(tmp_path)), []
    first = open_run(config)
    first.records.append("train", step=1)
    first.close()
    token = lambda: json.loads((tmp_path / "lock.json").read_text())["token"]  # noqa: E731
    monkeypatch.setattr(start_decision.checkpoint, "find_latest_valid", lambda _: (seen.append(token()), (None, []))[1])
    run = open_run(with_(config, resume_from="auto"))
    assert seen == [run.start_decision.token] != [first.start_decision.token]
