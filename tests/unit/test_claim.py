"""Who owns a run's folder: checkpoints of a former owner that do not count, attempts that end at the same step."""

import os

import pytest

from config import TrainingConfig, UserError
from test_checkpoint import payload
from test_run_folder import commit, fill, open_run, with_
from utils.checkpoint import format as checkpoint
from utils.clock import PHASES
from utils.run.lock import Claim, strikes_of
from utils.run.watchdog import BEAT, PLACE, Watch


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return TrainingConfig(run_dir="runs/mine")


def test_what_a_former_owner_writes_after_it_was_succeeded_does_not_count(config):
    fill(open_run(config))  # steps 10 and 20 under claim 1
    second = open_run(with_(config, resume_from="auto"))
    assert second.resume_path.name == "step_00000020.pt"
    checkpoint.write(checkpoint.step_path(second.checkpoints, 30), payload(30), claim=1)  # the first owner wakes up
    second.close()
    third = open_run(with_(config, resume_from="auto"))
    assert third.resume_path.name == "step_00000020.pt"
    assert "step_00000030.pt: was written by an earlier owner of the folder, after it had lost it" in "\n".join(
        third.notes
    )
    commit(third, 40, keep_last=9)
    third.close()
    fourth = open_run(with_(config, resume_from="auto"))
    assert fourth.resume_path.name == "step_00000040.pt"
    fourth.close()
    (fourth.checkpoints / "step_00000040.pt").unlink()  # what was inherited still is
    assert open_run(with_(config, resume_from="auto")).resume_path.name == "step_00000020.pt"


def test_checkpoints_brought_into_a_new_folder_count(config):
    fill(open_run(config))
    for _ in range(3):
        run = open_run(with_(config, resume_from="auto"))
        path = commit(run, 30 + run.claim_number, keep_last=9)
        run.close()
    new = with_(config, run_dir="runs/new", resume_from="auto")
    new.checkpoint_folder.mkdir(parents=True)
    (new.checkpoint_folder / path.name).write_bytes(path.read_bytes())
    assert open_run(new).resume_path.name == path.name


def put(folder, rank, beat, step=5):
    folder.mkdir(exist_ok=True)
    (folder / f"rank{rank}").write_bytes(BEAT.pack(beat, 0) + PLACE.pack(9, step, PHASES.index("backward"), 1))


def test_an_owner_on_another_host_is_seen_by_its_beat_where_the_lock_does_not_reach(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.lockf", lambda *_: None)
    first = Claim(tmp_path, "there")
    first.take(tmp_path, attempt=1)
    watch = Watch(tmp_path / "watch", 0, ("there",), 0, lambda *_: None, lambda *_: None)
    with pytest.raises(
        UserError, match=rf"is in use by process {os.getpid()} on there since \S+, for \d\.\d min; end that job"
    ):
        Claim(tmp_path, "here")
    watch.close()
    assert Claim(tmp_path, "here").number == 2
    put(tmp_path / "watch", 0, beat=7)  # killed: no beat any more
    monkeypatch.setattr("utils.run.lock.SECONDS_TO_SEE_A_BEAT", 0.6)
    assert Claim(tmp_path, "here").number == 2


def test_three_ends_at_the_same_step_in_a_row_are_counted(tmp_path):
    before = {"has_trained": True}
    for count in (1, 2, 3):
        put(tmp_path / "watch", 0, beat=1, step=7)
        put(tmp_path / "watch", 1, beat=1, step=6)
        strikes = strikes_of(before, {"state": "failed", "error": "boom", "step": 5}, tmp_path / "watch")
        assert [each["step"] for each in strikes] == [7] * count and strikes[-1]["error"] == "boom"
        before["strikes"] = strikes
    put(tmp_path / "watch", 0, beat=1, step=8)
    assert len(strikes_of(before, {"state": "running"}, tmp_path / "watch")) == 1  # further than before
    assert strikes_of(before, {"state": "preempted"}, tmp_path / "watch") == []
    assert strikes_of({"strikes": strikes}, {"state": "failed"}, tmp_path / "watch") == []  # refused before it trained
