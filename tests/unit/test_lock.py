"""The owner of a run's folder, and attempts that fail at the same step."""

import os
import threading

import pytest

from config import TrainingConfig, TrainingError, UserError
from ranks import CONTEXT
from test_run_folder import open_run, with_
from utils.clock import Clock
from utils.run import lock
from utils.run.lock import RunLock, repeated_failures
from utils.run.watchdog import Watchdog


def test_a_former_owner_writes_nothing_after_another_job_has_taken_over(tmp_path):
    config = TrainingConfig(run_dir=str(tmp_path))
    former = open_run(config)
    former.record("train", step=1, loss=1.0)
    owner = open_run(with_(config, resume_from="auto"))
    assert owner.is_ours() and not former.is_ours()
    for write in (lambda: former.status("running", step=2), lambda: former.link_best(1)):
        with pytest.raises(TrainingError, match="another job has taken over this run; end this one"):
            write()
    owner.status("running", step=1)
    former.failed(RuntimeError("lost"))
    assert '"running"' in (tmp_path / "status.json").read_text()


def hold(folder, connection):
    lock = RunLock(folder, "here")
    lock.write()
    connection.send(lock.number)
    connection.recv()


def test_a_folder_in_use_is_rejected_with_its_owner_and_a_dead_owner_does_not_block(tmp_path):
    ours, theirs = CONTEXT.Pipe()
    owner = CONTEXT.Process(target=hold, args=(tmp_path, theirs))
    owner.start()
    try:
        assert ours.recv() == 1
        problem = (
            rf"in use by process {owner.pid} on here since \S+, for 0\.\d min; end that job or give another --run_dir"
        )
        with pytest.raises(UserError, match=problem):
            RunLock(tmp_path, "here")
    finally:
        owner.kill()
        owner.join()
    assert RunLock(tmp_path, "here").number == 2


def test_a_file_lock_that_outlives_its_machine_is_waited_for(tmp_path, monkeypatch):
    """As on NFS, where the server keeps it for a while. The machine is this one before a reboot."""
    ours, theirs = CONTEXT.Pipe()
    owner = CONTEXT.Process(target=hold, args=(tmp_path, theirs))
    owner.start()
    try:
        assert ours.recv() == 1
        (tmp_path / "boot_id").write_text("another")
        monkeypatch.setattr(lock, "BOOT", tmp_path / "boot_id")
        monkeypatch.setattr(lock, "SECONDS_OF_A_LEASE", 0)
        with pytest.raises(UserError, match="is in use by"):
            RunLock(tmp_path, "here")
        monkeypatch.setattr(lock, "SECONDS_OF_A_LEASE", 60)
        threading.Timer(1, owner.kill).start()
        assert RunLock(tmp_path, "here").number == 2
    finally:
        owner.kill()
        owner.join()


@pytest.mark.parametrize("boot", ["", "another"])
def test_without_shared_file_locks_an_owner_on_another_machine_is_seen_by_its_heartbeat(tmp_path, monkeypatch, boot):
    """Its host name differs, or only its boot id: a machine of the same name, or this one before it was restarted. A
    second lock in the same process simulates this: file locks of one process do not conflict."""
    RunLock(tmp_path, "here" if boot else "there").write(attempt=1)
    if boot:
        (tmp_path / "boot_id").write_text(boot)
        monkeypatch.setattr(lock, "BOOT", tmp_path / "boot_id")
    clock = Clock(tmp_path / "watch" / "rank0")
    watchdog = Watchdog(clock, tmp_path / "watch", 0, ("there",), 0, *(lambda *_: None,) * 3)
    with pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on t?here since"):
        RunLock(tmp_path, "here")
    watchdog.close()
    assert RunLock(tmp_path, "here").number == 2


def test_consecutive_failures_at_the_same_step_are_counted(tmp_path):
    owner, status = {"has_trained": True}, {"state": "failed", "error": "boom"}
    clocks = [Clock(tmp_path / f"rank{rank}") for rank in (0, 1)]

    def failures_at(step):
        for clock in clocks:
            clock.begin_step(step - clocks.index(clock))
            clock.enter("forward")
        return repeated_failures(owner, status, tmp_path)

    for count in (1, 2, 3):
        owner["failures"] = failures_at(7)
        assert owner["failures"] == [{"step": 7, "error": "boom"}] * count
    assert len(failures_at(8)) == 1  # a later step than before
    assert repeated_failures(owner, {"state": "preempted"}, tmp_path) == []
    for changes in ({"has_trained": False}, {"has_diagnosed": True}):
        assert repeated_failures(owner | changes, status, tmp_path) == []
