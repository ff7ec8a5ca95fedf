# extra: template
"""Which run a start continues, moves aside or rejects."""

import dataclasses
import errno
import logging
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from config import TrainingConfig
from test_checkpoint import payload
from test_run_folder import commit, commit_best, contents, fill, from_step_10, names, open_run, with_
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.checkpoint.remote import local_checkpoint
from utils.files import read_json, replace_json
from utils.logger import LOGGER_NAME
from utils.run import run_status, start_decision
from utils.run.folder import RunFolder
from utils.run.run_lock import RunLock
from utils.settings.errors import TrainingError, UserError

IS_HELD = (
    r"holds a run already\. Add --resume_from auto to continue it, or --overwrite to rename it to \w+\.1 \(\.2, "
    r"\.\.\.\) and begin a new one, or give another --run_dir\."
)
HOLDS_MORE = "contains the files of more than one run. Give a separate folder"


@pytest.mark.guarantee("nothing-lost")
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, IS_HELD),
        ({"run_dir": "runs/new", "checkpoint_dir": "runs/mine/checkpoints"}, IS_HELD),  # two runs in one folder
        *[({"run_dir": folder, "overwrite": True}, HOLDS_MORE) for folder in (".", "..", "/", "runs")],
        ({"run_dir": "runs/new", "resume_from": "nowhere.pt"}, "nowhere.pt cannot be read .*. Give"),
        ({"run_dir": "runs/mine/metrics.jsonl/x"}, "cannot be written .Not a directory.. Give"),
        ({"run_dir": "runs/new", "checkpoint_dir": "runs/mine/metrics.jsonl/x"}, "cannot be written .Not a directory"),
    ],
)
def test_a_start_in_an_unusable_folder_is_rejected_and_changes_nothing(config, changes, problem):
    fill(open_run(config))
    before = contents(config.run_folder)
    with pytest.raises(UserError, match=problem):
        open_run(with_(config, **changes))
    assert contents(config.run_folder) == before


REPLACING = [{"run_dir": "runs/default"}, {"overwrite": True}, {"overwrite": True, "checkpoint_dir": "ckpt"}]


@pytest.mark.guarantee("nothing-lost")
@pytest.mark.parametrize("changes", REPLACING)
def test_an_earlier_run_is_moved_aside_with_its_checkpoints(config, changes):
    config = with_(config, **changes)
    for number in (1, 2):
        fill(open_run(config))
        (config.run_folder / "notes.txt").write_text("mine")
        run = open_run(config)
        assert not contents(run.folder) and not names(run.checkpoint_folder) and run.start_decision.attempt == 1
        run.close()
        asides = [f"{config.checkpoint_folder}.{number}"] * bool(config.checkpoint_dir) + [f"{run.folder}.{number}"]
        kept = Path(asides[0]) if config.checkpoint_dir else Path(asides[0], "checkpoints")
        assert names(kept) == ["step_00000010.pt", "step_00000020.pt"] and Path(asides[-1], "notes.txt").exists()
        where = " and ".join(asides)
        assert run.notes == [
            f"The earlier run was moved to {where} (0.0 GB). "
            f"This command deletes the earlier run: rm -r {' '.join(asides)}"
        ]


def test_a_start_that_finds_the_folder_in_use_leaves_it_to_the_start_that_made_it(config, monkeypatch):
    """Both have found no folder."""
    plain = RunLock.__init__

    def lock_second(lock, folder, host, token=""):
        (folder / "lock.json").write_text("of the first start")
        raise UserError("is in use")

    monkeypatch.setattr(RunLock, "__init__", lock_second)
    with pytest.raises(UserError, match="is in use"):
        open_run(config)
    assert [path.name for path in contents(Path(config.run_dir))] == [] and (config.run_folder / "lock.json").exists()
    shutil.rmtree(config.run_folder)
    monkeypatch.setattr(RunLock, "__init__", plain)
    open_run(config).close()


def test_once_it_trains_no_failure_undoes_a_start(config):
    """A run that was fetched from its mirror stays."""
    lock, start = start_decision.decide_start(config, "here", "", False)
    start = dataclasses.replace(start, renamed_folders=[[config.run_dir, ""]])
    run = RunFolder(config.run_folder, config.checkpoint_folder, 0, "here", start, lock)
    run.mark_training()
    run.report_failure(UserError("data: sample 8 is broken; repair it", 0, "here"))
    assert config.run_folder.exists()


@pytest.mark.guarantee("nothing-lost")
@pytest.mark.parametrize("changes", REPLACING)
def test_a_start_that_is_rejected_later_moves_the_earlier_run_back(config, changes):
    config = with_(config, **changes)
    fill(open_run(config))
    before = contents(config.run_folder), contents(config.checkpoint_folder)
    run = open_run(config, "job-7")
    run.status.write("running", step=0)
    run.log_file.parent.mkdir()
    with run.log_file.open("w"):
        run.report_failure(
            UserError("data_dir=typo: has no train/<class>/ folders; give the folder that holds it", 0, "here")
        )
    run.close()
    assert (contents(config.run_folder), contents(config.checkpoint_folder)) == before
    assert not list(Path("runs").glob("*.1")) and not list(Path("runs").glob("*.tmp"))
    with pytest.raises(TrainingError, match="Another job has taken over"):
        run.status.write("running", step=1)
    assert open_run(with_(config, overwrite=False, resume_from="auto")).resume_path.name == "step_00000020.pt"


@pytest.mark.guarantee("nothing-lost")
def test_an_earlier_run_is_named_if_the_start_that_moved_it_was_killed(config):
    replacing = with_(config, overwrite=True)
    fill(open_run(replacing))
    open_run(replacing, "job-7").close()
    for _ in range(2):
        with pytest.raises(
            UserError,
            match=r"has moved the run of --run_dir runs/mine to runs/mine\.1.*\. Rename it to runs/mine, or start over",
        ):
            open_run(with_(config, resume_from="auto"))
    run = open_run(replacing, "job-7")  # a restart of the same launch
    assert run.resume_path is None and run.start_decision.attempt == 1
    fill(run)
    run = open_run(with_(config, resume_from="auto"))
    assert run.resume_path.name == "step_00000020.pt" and run.start_decision.attempt == 2


@pytest.mark.parametrize("given", ["init_from", "resume_from"])
def test_a_run_is_not_moved_aside_if_the_new_one_starts_from_it(config, given):
    config = with_(config, run_dir="runs/default")
    fill(open_run(config))
    before = contents(config.run_folder)
    path = config.run_folder / ("checkpoints/step_00000010.pt" if given == "init_from" else "superseded-1/old.pt")
    path.parent.mkdir(exist_ok=True)
    archive.write_archive(path, payload(10))
    before = contents(config.run_folder)
    with pytest.raises(
        UserError, match=f"--{given} .* is in the run that would be moved aside. Give another --run_dir."
    ):
        open_run(with_(config, **{given: str(path)}))
    assert contents(config.run_folder) == before


def test_a_folder_that_cannot_be_moved_aside_is_left_as_it_is(config, monkeypatch):
    """As the mount point of a disk."""
    config = with_(config, overwrite=True, checkpoint_dir="ckpt")
    fill(open_run(config))
    before = contents(config.run_folder), contents(config.checkpoint_folder)

    def rename(place, aside, plain=os.rename):
        if Path(place).name == "mine":
            raise OSError(errno.EBUSY, "Device or resource busy")
        plain(place, aside)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(UserError, match="mine cannot be moved aside .Device or resource busy.. Give another --run"):
        open_run(config)
    assert (contents(config.run_folder), contents(config.checkpoint_folder)) == before


def test_a_rejected_start_leaves_the_status_of_the_run(config):
    fill(open_run(config), state="preempted")
    run = open_run(with_(config, resume_from="auto"))
    file = run.folder / "status.json"
    before = read_json(file)
    run.status.mark_running()
    assert (read_json(file)["state"], read_json(file)["step"]) == ("running", 20)
    run.report_failure(UserError("--seed is 1, but the checkpoint has --seed 2.", 0, "here"))
    assert read_json(file) == before
    run.status.mark_running()
    run.status.write("running", step=21)  # it trains
    run.report_failure(UserError("a.png: cannot be read", 0, "here"))
    assert read_json(file)["state"] == "failed"


@pytest.mark.parametrize(
    ("trains_from", "step", "checkpoint", "line"),
    [
        (None, 0, "", ""),
        (0, 0, "", ""),
        (20, 20, "", ""),  # a resumed attempt that has made no step of its own
        (0, 12, "", "Training failed at step 12. The run has no checkpoint yet."),
        (20, 21, "c/step_00000020.pt", "Training failed at step 21. The latest checkpoint is c/step_00000020.pt."),
    ],
)
def test_a_failure_names_step_and_checkpoint_only_after_a_step(config, caplog, trains_from, step, checkpoint, line):
    run = open_run(config)
    run.status.mark_running()
    if trains_from is not None:
        run.status.mark_started(epoch=0, step=trains_from, samples_seen=0)
        run.status.update_progress(checkpoint=checkpoint)
    with caplog.at_level(logging.INFO, LOGGER_NAME):
        run.report_failure(RuntimeError("division by zero"), step)
    assert "\n".join(caplog.messages) == line
    assert read_json(run.folder / "status.json")["state"] == "failed"


@pytest.mark.guarantee("disk")
def test_the_cause_of_a_failure_is_written_where_no_file_can_be_created(config, monkeypatch):
    run, nothing = open_run(config), mock.Mock(side_effect=OSError(28, "No space left on device"))
    run.status.write("running", step=7, checkpoint="x" * 999)
    monkeypatch.setattr(run_status, "replace_json", nothing)
    run.report_failure(TrainingError("no inodes are free"))
    status = read_json(run.folder / "status.json")
    assert nothing.called and (status["state"], status["error"], status["step"]) == ("failed", "no inodes are free", 7)


def test_a_run_without_records_or_checkpoints_is_started_again_in_its_folder(config):
    run = open_run(config)
    run.status.write("running")
    run.report_failure(UserError("bad data; fix it"))
    run.close()
    run = open_run(config)
    assert run.start_decision.attempt == 1
    run.records.append("train", step=3, loss=1.0)
    run.close()
    run = open_run(with_(config, resume_from="auto"))
    assert run.resume_path is None
    run.rewind(0)
    assert run.records.read("train") == []


@pytest.mark.guarantee("all-damaged")
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(config):
    """Their disk may not be mounted."""
    config = with_(config, resume_from="auto")
    run = open_run(config)
    fill(run)
    path = checkpoint.list_step_checkpoints(config.checkpoint_folder)[-1]
    run = open_run(config)
    run.status.write("failed", checkpoint=str(path))
    run.close()
    shutil.move(config.checkpoint_folder, config.run_folder / "elsewhere")
    before = contents(config.run_folder)
    with pytest.raises(UserError, match=f"has no checkpoint, but the run has written {path}. Put this checkpoint back"):
        open_run(config)
    assert before.items() <= contents(config.run_folder).items()
    config.checkpoint_folder.rmdir()
    shutil.move(config.run_folder / "elsewhere", config.checkpoint_folder)
    run = open_run(config)
    assert run.resume_path == path
    run.close()


def test_resuming_from_another_run_starts_a_new_run_but_not_in_a_folder_that_holds_one(config):
    fill(open_run(config))
    other = with_(from_step_10(config), run_dir="runs/other")
    run = open_run(other)
    assert run.resume_path.name == "step_00000010.pt" and run.start_decision.attempt == 1
    fill(run)
    with pytest.raises(UserError, match=IS_HELD):
        open_run(other)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("runs/mine", "runs/mine/checkpoints/step_00000020.pt"),
        ("runs/mine/", "runs/mine/checkpoints/step_00000020.pt"),
        ("runs/mine/checkpoints", "runs/mine/checkpoints/step_00000020.pt"),
        ("link", "link/checkpoints/step_00000020.pt"),
        ("runs/mine/checkpoints/step_00000010.pt", "runs/mine/checkpoints/step_00000010.pt"),
        ("runs/mine/checkpoints/best.pt", "runs/mine/checkpoints/best.pt"),
        ("moved", "moved/checkpoints/step_00000020.pt"),  # config.json names the folder it was moved from
        ("runs/apart", "elsewhere/step_00000020.pt"),  # of a run with a checkpoint_dir
        ("sharded", "sharded/checkpoints/step_00000030"),  # extra: sharding
        ("sharded/checkpoints/step_00000030", "sharded/checkpoints/step_00000030"),  # extra: sharding
        # a sharded checkpoint that was renamed  # extra: sharding
        ("kept", "kept"),  # extra: sharding
    ],
)
def test_a_run_folder_or_its_checkpoints_folder_stands_for_the_latest_valid_checkpoint(config, given, chosen):
    """The newest file of each run is damaged, and a note names it."""
    for name, changes in (("runs/mine", {}), ("runs/apart", {"checkpoint_dir": "elsewhere"})):
        one = with_(config, run_dir=name, **changes)
        run = open_run(one)
        fill(run)
        commit_best(run, 10)
        run.write_json("config.json", one.to_dict())
        (run.checkpoint_folder / "step_00000099.pt").write_text("damaged")
        run.close()
    shutil.copytree("runs/mine", "moved", symlinks=True)
    os.symlink("runs/mine", "link")
    for folder in (Path("sharded/checkpoints/step_00000030"), Path("kept")):
        folder.mkdir(parents=True)
        digest = archive.write_archive(folder / "part_00000.pt", payload(30))
        replace_json(folder / archive.MANIFEST_FILE, {"step": 30, "files": {"part_00000.pt": digest}})
    run = open_run(with_(config, run_dir="new", resume_from=given))
    assert str(run.resume_path) == chosen
    is_folder = "step_" not in given and "best" not in given and given != "kept"
    best = str(Path(chosen).with_name("best.pt"))  # for init_from, predict.py and export.py
    assert str(local_checkpoint(given)) == (best if is_folder and given != "sharded" else chosen)
    assert (f"{chosen} is used, since {Path(given)} is a folder." in run.notes) == is_folder
    assert any("step_00000099.pt" in note for note in run.notes) == (is_folder and given != "sharded")


@pytest.mark.parametrize("given", ["runs", "runs/mine", "runs/mine/checkpoints", "empty"])
def test_a_folder_without_a_checkpoint_is_rejected_and_says_which_file_to_give(config, given):
    open_run(config).close()
    Path("empty").mkdir()
    with pytest.raises(
        UserError, match=rf"^{given} holds no checkpoint\. Give the path of one, .*step_00000100\.pt\.$"
    ):
        open_run(with_(config, run_dir="new", resume_from=given))


def test_the_folder_of_the_run_itself_continues_it_at_its_latest_checkpoint(config):
    fill(open_run(config))
    run = open_run(with_(config, resume_from=config.run_dir))
    assert (
        run.resume_path == run.checkpoint_folder / "step_00000020.pt"
        and run.start_decision.attempt == 2
        and not run.start_decision.renamed_folders
    )


def test_a_restart_of_the_same_launch_continues_even_with_overwrite(config):
    first = with_(config, overwrite=True)
    fill(open_run(first, launch_id="job-7"))
    run = open_run(first, launch_id="job-7")
    assert run.resume_path.name == "step_00000020.pt" and run.start_decision.attempt == 2
    run.close()
    with pytest.raises(UserError, match=IS_HELD):
        open_run(config, launch_id="job-8")


def test_a_restart_before_the_first_checkpoint_starts_from_the_path_again(config):
    fill(open_run(with_(config, run_dir="runs/other")))
    given = with_(config, resume_from="runs/other/checkpoints/step_00000010.pt")
    for attempt in (1, 2):
        run = open_run(given, launch_id="job-7")
        assert str(run.resume_path) == given.resume_from and run.start_decision.attempt == attempt
        run.mark_training()
        run.records.append("train", epoch=0, step=11, loss=1.0)
        run.close()
    run = open_run(given, launch_id="job-7")
    commit(run, 12)
    run.close()
    assert open_run(given, launch_id="job-7").resume_path.name == "step_00000012.pt"


def test_a_restart_of_a_launch_that_had_not_trained_starts_from_the_given_checkpoint(config):
    """Its first attempt failed before training; the folder holds the completed run of another launch."""
    fill(open_run(config, launch_id="job-6"), state="completed")
    for attempt in (2, 3):
        run = open_run(from_step_10(config), launch_id="job-7")
        assert run.resume_path.name == "step_00000010.pt"
        assert not run.start_decision.is_completed and run.start_decision.attempt == attempt
        run.close()
    with pytest.raises(UserError, match=IS_HELD):
        open_run(config, launch_id="job-7")


def test_a_restart_that_looks_like_a_new_run_is_rejected(config):
    fill(open_run(TrainingConfig()))
    with pytest.raises(
        UserError,
        match="holds a run, and a restart by torchrun would look like a new launch. Add --rdzv-id NAME to the flags",
    ):
        open_run(TrainingConfig(), may_restart=True)


@pytest.mark.parametrize("state", ["running", "failed", "preempted", "completed"])
@pytest.mark.parametrize("changes", [{"resume_from": "auto", "epochs": 99}, {"overwrite": True}, {}])
def test_the_start_after_an_attempt_that_left_the_state_running_writes_how_it_ended(config, state, changes):
    """Its lock is free: no rank survived to write it."""
    fill(open_run(config), state=state)
    before = read_json(config.run_folder / "status.json")
    if changes:
        notes = open_run(with_(config, **changes)).notes
        assert notes.count("Every rank of the previous attempt was killed.") == (state == "running")
    else:
        with pytest.raises(UserError, match=IS_HELD):
            open_run(config)
    moved = Path(f"{config.run_folder}.1")
    actual = read_json((moved if "overwrite" in changes else config.run_folder) / "status.json")
    killed = {"state": "failed", "error": "Every rank was killed.", "rank": 0, "host": "here"}
    assert actual == before | (killed if state == "running" else {})


def test_a_folder_that_has_only_the_status_of_a_completed_run_holds_no_run(tmp_path):
    """The records and checkpoints were deleted."""
    config = TrainingConfig(run_dir=str(tmp_path / "run"), resume_from="auto")
    config.run_folder.mkdir()
    replace_json(config.run_folder / "status.json", {"state": "completed"})
    run = open_run(config)
    assert not run.start_decision.is_completed and run.resume_path is None
    run.close()
