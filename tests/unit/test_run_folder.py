"""The run's folder: when a run in it is continued, moved aside, replaced or rejected, and its records."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from config import TrainingConfig, TrainingError, UserError
from test_checkpoint import payload
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.files import read_json
from utils.run import folder as run_folder
from utils.run.folder import Run, claim


def open_run(config, launch_id="", may_restart=False, replaces=True, host="here"):
    lock, start = claim(config, host, launch_id, may_restart)
    run = Run(config.run_folder, config.checkpoint_folder, 0, (host,), start, lock)
    if run.is_replacing and replaces:
        run.replace_old_run(config)
    return run


def commit(run, step, keep_last=9):
    path = checkpoint.step_path(run.checkpoints, step)
    archive.write(path, payload(step))
    checkpoint.prune(run.checkpoints, keep_last)
    return path


def commit_best(run, step):
    run.link_best(step)
    return run.checkpoints / checkpoint.BEST


def fill(run, steps=(10, 20), state="running"):
    """Write the files that a run leaves."""
    run.mark_training()
    run.status(state, epoch=0, step=steps[-1], error=None)
    for step in steps:
        run.record("train", epoch=0, step=step, loss=1.0)
        run.event("checkpoint", step)
        run.record("eval", epoch=0, step=step, split="val", loss=1.0)
        commit(run, step)
    run.close()


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return TrainingConfig(run_dir="runs/mine")


def with_(config, **changes):
    return dataclasses.replace(config, **changes)


def from_step_10(config):
    return with_(config, resume_from=str(config.checkpoint_folder / "step_00000010.pt"))


def contents(folder):
    """{file: its bytes}, without those of the lock and the watchdog."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "watch"]
    return {path: path.read_bytes() for path in files if path.name not in ("lock.json", ".lock")}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- which run a start continues or replaces ----


IS_HELD = "holds a run already; add --resume_from auto to continue it, --overwrite to replace it, or give another --run"
HOLDS_MORE = "contains more than one run's files; give a separate folder"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, IS_HELD),
        ({"run_dir": "runs/new", "checkpoint_dir": "runs/mine/checkpoints"}, IS_HELD),  # two runs in one folder
        *[({"run_dir": folder, "overwrite": True}, HOLDS_MORE) for folder in (".", "..", "/", "runs")],
        ({"run_dir": "runs/new", "resume_from": "nowhere.pt"}, "nowhere.pt: cannot be read .*; give"),
        ({"run_dir": "runs/mine/metrics.jsonl/x"}, "cannot be written .Not a directory.; give"),
        ({"run_dir": "runs/new", "checkpoint_dir": "runs/mine/metrics.jsonl/x"}, "cannot be written .Not a directory"),
    ],
)
def test_a_start_in_an_unusable_folder_is_rejected_and_changes_nothing(config, changes, problem):
    fill(open_run(config))
    before = contents(config.run_folder)
    with pytest.raises(UserError, match=problem):
        open_run(with_(config, **changes))
    assert contents(config.run_folder) == before


def test_an_earlier_run_in_the_default_folder_is_moved_aside(config):
    for number in (1, 2):
        fill(open_run(TrainingConfig()))
        run = open_run(TrainingConfig())
        assert not checkpoint.step_checkpoints(run.checkpoints) and run.start.attempt == 1
        run.close()
        aside = run.folder.with_name(f"default.{number}")
        assert names(aside / "checkpoints") == ["step_00000010.pt", "step_00000020.pt"]
        assert run.notes == [f"moved the earlier run to {aside}"]


def test_overwrite_replaces_what_a_run_wrote_and_keeps_other_files(config):
    fill(open_run(config))
    (config.run_folder / "notes.txt").write_text("mine")
    run = open_run(with_(config, overwrite=True))
    assert run.start.attempt == 1 and not contents(run.folder)
    aside = config.run_folder.with_name("mine.1")
    assert names(aside) == ["notes.txt"] and run.notes == [
        f"replaced the run in {run.folder}; other files are in {aside}"
    ]


@pytest.mark.parametrize("changes", [{"overwrite": True}, {"run_dir": "runs/default"}])
def test_a_run_is_replaced_only_after_the_new_start_was_validated(config, changes):
    config = with_(config, **changes)
    fill(open_run(config))  # it was killed
    before = contents(config.run_folder)
    run = open_run(config, "job-7", replaces=False)
    assert run.is_replacing
    run.failed(UserError("data_dir=typo: has no train/<class>/ folders; give the folder that holds train/", 0, "here"))
    run.close()
    assert contents(config.run_folder) == before
    run = open_run(config, "job-7", replaces=False)  # a restart of this launch, which does not own the old run
    assert run.is_replacing and run.resume_path is None
    run.watch_folder.mkdir()
    with (run.watch_folder / "rank0").open("w") as file:  # the ranks open it before the old run is moved
        run.replace_old_run(config)
        file.write("here")
    assert (run.watch_folder / "rank0").read_text() == "here"


def test_a_rejected_start_leaves_the_status_of_the_run(config):
    fill(open_run(config), state="preempted")
    run = open_run(with_(config, resume_from="auto"))
    file = run.folder / "status.json"
    before = read_json(file)
    run.begin()
    assert (read_json(file)["state"], read_json(file)["step"]) == ("running", 20)
    run.failed(UserError("seed=1: the checkpoint has seed=2", 0, "here"))
    assert read_json(file) == before
    run.begin()
    run.status("running", step=21)  # it trains
    run.failed(UserError("a.png: cannot be read", 0, "here"))
    assert read_json(file)["state"] == "failed"


def test_the_cause_of_a_failure_is_written_where_no_file_can_be_created(config, monkeypatch):
    run, nothing = open_run(config), mock.Mock(side_effect=OSError(28, "No space left on device"))
    run.status("running", step=7, checkpoint="x" * 999)
    monkeypatch.setattr(run_folder, "replace_json", nothing)
    run.failed(TrainingError("no inodes are free"))
    status = read_json(run.folder / "status.json")
    assert nothing.called and (status["state"], status["error"], status["step"]) == ("failed", "no inodes are free", 7)


def test_a_run_without_records_or_checkpoints_is_started_again_in_its_folder(config):
    run = open_run(config)
    run.status("running")
    run.failed(UserError("bad data; fix it"))
    run.close()
    run = open_run(config)
    assert run.start.attempt == 1
    run.record("train", step=3, loss=1.0)
    run.close()
    run = open_run(with_(config, resume_from="auto"))
    assert run.resume_path is None
    run.rewind(0)
    assert run.records("train") == []


def test_a_run_whose_checkpoints_are_gone_is_not_started_over(config):
    """Their disk may not be mounted."""
    config = with_(config, resume_from="auto")
    run = open_run(config)
    fill(run)
    path = checkpoint.step_checkpoints(config.checkpoint_folder)[-1]
    run = open_run(config)
    run.status("running", checkpoint=str(path))
    run.close()
    shutil.move(config.checkpoint_folder, config.run_folder / "elsewhere")
    before = contents(config.run_folder)
    with pytest.raises(UserError, match=f"has no checkpoint, but the run has written {path}; put it back"):
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
    assert run.resume_path.name == "step_00000010.pt" and run.start.attempt == 1
    fill(run)
    with pytest.raises(UserError, match=IS_HELD):
        open_run(other)


def test_a_restart_of_the_same_launch_continues_even_with_overwrite(config):
    first = with_(config, overwrite=True)
    fill(open_run(first, launch_id="job-7"))
    run = open_run(first, launch_id="job-7")
    assert run.resume_path.name == "step_00000020.pt" and run.start.attempt == 2
    run.close()
    with pytest.raises(UserError, match=IS_HELD):
        open_run(config, launch_id="job-8")


def test_a_restart_before_the_first_checkpoint_starts_from_the_path_again(config):
    fill(open_run(with_(config, run_dir="runs/other")))
    given = with_(config, resume_from="runs/other/checkpoints/step_00000010.pt")
    for attempt in (1, 2):
        run = open_run(given, launch_id="job-7")
        assert str(run.resume_path) == given.resume_from and run.start.attempt == attempt
        run.mark_training()
        run.record("train", epoch=0, step=11, loss=1.0)
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
        assert not run.start.is_completed and run.start.attempt == attempt
        run.close()
    with pytest.raises(UserError, match=IS_HELD):
        open_run(config, launch_id="job-7")


def test_a_restart_that_looks_like_a_new_run_is_rejected(config):
    fill(open_run(TrainingConfig()))
    with pytest.raises(
        UserError, match="holds a run, and restarts look like new launches; give torchrun --rdzv-id NAME"
    ):
        open_run(TrainingConfig(), may_restart=True)


# ---- records and checkpoints of a continued run ----


def test_a_non_finite_number_becomes_null(config):
    run = open_run(config)
    run.record("train", step=1, loss=float("nan"), lr=0.1)
    assert run.records("train") == [{"kind": "train", "step": 1, "loss": None, "lr": 0.1}]


def test_rewinding_drops_later_samples_and_an_incomplete_last_line(config):
    run = open_run(config)
    for step in (1, 2, 3):
        run.record_samples(0, step, [step])
    (run.folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    run.rewind(2)
    assert len((run.folder / "samples" / "rank0.jsonl").read_text().splitlines()) == 2
    assert run.records("train") == [{"kind": "train", "step": 1}]


def test_resuming_from_an_earlier_checkpoint_of_the_run_sets_later_ones_aside(config):
    run = open_run(config)
    fill(run, steps=(10, 20, 30))
    commit_best(run, 20)
    run = open_run(from_step_10(config))
    assert run.resume_path.name == "step_00000010.pt" and run.start.attempt == 2
    run.rewind(10)
    assert not run.restore_best(20) and run.restore_best(-1)
    assert names(run.folder / "superseded-2") == ["step_00000020.pt", "step_00000030.pt"]
    assert names(run.checkpoints) == ["step_00000010.pt"]
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(record["kind"], record["step"]) for record in records] == [("train", 10), ("event", 10)]


def test_records_of_an_evaluation_that_will_be_repeated_are_dropped(config):
    fill(open_run(config))
    run = open_run(with_(config, resume_from="auto"))
    run.event("best", 20)

    def of_step_20():
        records = run.records("eval") + run.records("event")
        return [record.get("event", "eval") for record in records if record["step"] == 20]

    run.rewind(20, is_evaluated=True)
    assert of_step_20() == ["eval", "checkpoint", "best"]
    run.rewind(20)
    assert of_step_20() == ["checkpoint"]
    for split in ("val", "test"):
        run.record("eval", epoch=0, step=30, split=split, loss=1.0)
    run.rewind(30, is_evaluated=True, has_test=True)  # the test set is evaluated again after the validation set
    assert [record["split"] for record in run.records("eval")] == ["val", "val"]
    run.record("eval", epoch=0, step=20, split="test", loss=1.0)  # of the best weights, in a run that is now longer
    run.rewind(40, is_evaluated=True, has_test=True)
    assert [record["split"] for record in run.records("eval")] == ["val", "val"]


def test_records_of_an_only_test_set_are_those_of_a_validation_set(config):
    run = open_run(config)
    for step in (10, 20):
        run.record("eval", epoch=1, step=step, split="test", loss=1.0)  # it selects the best
    run.rewind(10, is_evaluated=True)
    assert [record["step"] for record in run.records("eval")] == [10]


def test_a_kill_during_a_rewind_leaves_no_later_checkpoint(config, monkeypatch):
    fill(open_run(config), steps=(10, 20, 30))
    run = open_run(from_step_10(config))
    monkeypatch.delattr(run_folder, "cut_lines")
    with pytest.raises(NameError):
        run.rewind(10)
    run.close()
    assert open_run(with_(config, resume_from="auto")).resume_path.name == "step_00000010.pt"


def test_a_checkpoint_appears_only_in_a_folder_that_is_still_owned(config):
    run = open_run(config)
    run.mark_training()
    run.check_owner()
    run.lock_file.write_text(json.dumps({"number": run.start.lock_number + 1}))
    with pytest.raises(TrainingError, match=r"another job has taken over this run \(owner \d+\); end this one"):
        run.check_owner()
    for text in ("", "[]"):
        run.lock_file.write_text(text)
        with pytest.raises(OSError, match="cannot be read"):
            run.check_owner()
    run.lock_file.unlink()
    with pytest.raises(OSError):
        run.check_owner()


def test_best_pt_is_a_link_to_a_checkpoint_that_is_kept(config):
    run = open_run(config)
    path = commit(run, 10, keep_last=2)
    best = commit_best(run, 10)
    assert best.readlink() == Path(path.name)
    for step in (20, 30, 40):
        commit(run, step, keep_last=2)
    assert names(run.checkpoints) == ["best.pt", *(f"step_000000{step}.pt" for step in (10, 30, 40))]
    commit_best(run, 40)
    commit(run, 50, keep_last=2)
    assert checkpoint.verify(best).step == 40 and not path.exists() and not list(run.folder.rglob("*.tmp"))
    with pytest.raises(OSError, match="there is no checkpoint of step 45"):
        commit_best(run, 45)


def test_on_storage_without_links_best_pt_is_a_copy_which_is_said_once(config, monkeypatch, caplog):
    monkeypatch.setattr(Path, "symlink_to", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    run = open_run(config)
    for step in (10, 20):
        commit(run, step)
        with caplog.at_level("INFO", logger="ddp"):
            best = commit_best(run, step)
        assert not best.is_symlink() and checkpoint.verify(best).step == step
    assert caplog.text.count("best.pt is a copy of step_00000010.pt: the storage has no links") == 1
    assert caplog.text.count("is a copy of") == 1
    assert run.restore_best(20)
    best.write_bytes(b"broken")
    assert not run.restore_best(15)
    assert not best.exists() and list(run.folder.glob("superseded-*/best.pt"))
    assert "best.pt: has no checksum" in "\n".join(run.notes)


def test_the_best_checkpoint_is_restored_from_its_step_or_the_folder_resumed_from(config):
    run = open_run(config)
    path = commit(run, 10)
    commit(run, 20)
    best = commit_best(run, 20)
    run.rewind(10)
    assert not best.exists() and run.restore_best(10) and best.samefile(path)
    run.close()
    other = open_run(with_(from_step_10(config), run_dir="runs/other"))
    path.unlink()
    commit(run, 10)
    commit_best(run, 10)
    assert other.restore_best(10) and (other.checkpoints / "best.pt").readlink() == Path(path.name)  # a copy of it
    assert other.restore_best(-1) and not other.restore_best(15)
    assert other.notes == ["the best checkpoint so far, of step 15, is gone: the next evaluation starts a new best"]
