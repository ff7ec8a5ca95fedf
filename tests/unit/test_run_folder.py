"""The run folder: records and checkpoints of a continued run."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest

from test_checkpoint import payload
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.run import run_records
from utils.run.folder import RunFolder
from utils.run.start_decision import decide_start
from utils.settings.errors import TrainingError


def open_run(config, launch_id="", may_restart=False, host="here"):
    lock, start = decide_start(config, host, launch_id, may_restart)
    return RunFolder(config.run_folder, config.checkpoint_folder, 0, host, start, lock)


def commit(run, step, keep_last=9):
    path = checkpoint.step_checkpoint_path(run.checkpoint_folder, step)
    archive.write_archive(path, payload(step))
    checkpoint.prune_checkpoints(run.checkpoint_folder, keep_last)
    return path


def commit_best(run, step):
    run.checkpoint_files.link_best(step)
    return run.checkpoint_folder / checkpoint.BEST_NAME


def fill(run, steps=(10, 20), state="failed"):
    """Write the files that a run leaves."""
    run.mark_training()
    run.status.write(state, epoch=0, step=steps[-1], error=None)
    for step in steps:
        run.records.append("train", epoch=0, step=step, loss=1.0)
        run.records.append_event("checkpoint", step)
        run.records.append("eval", epoch=0, step=step, split="val", loss=1.0)
        commit(run, step)
    run.close()


def with_(config, **changes):
    return dataclasses.replace(config, **changes)


def from_step_10(config):
    return with_(config, resume_from=str(config.checkpoint_folder / "step_00000010.pt"))


def contents(folder):
    """{file: its bytes}, without those of the lock."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name not in ("lock.json", ".lock")}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_non_finite_number_becomes_null(config):
    run = open_run(config)
    run.records.append("train", step=1, loss=float("nan"), lr=0.1)
    assert run.records.read("train") == [{"kind": "train", "step": 1, "loss": None, "lr": 0.1}]


@pytest.mark.guarantee("records-once")
def test_rewinding_drops_later_samples_and_an_incomplete_last_line(config):
    run = open_run(config)
    for step in (1, 2, 3):
        run.records.append_samples(0, step, [step])
    (run.folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    run.rewind(2)
    assert len((run.folder / "samples" / "rank0.jsonl").read_text().splitlines()) == 2
    assert run.records.read("train") == [{"kind": "train", "step": 1}]


def test_resuming_from_an_earlier_checkpoint_of_the_run_sets_later_ones_aside(config):
    run = open_run(config)
    fill(run, steps=(10, 20, 30))
    commit_best(run, 20)
    run = open_run(from_step_10(config))
    assert run.resume_path.name == "step_00000010.pt" and run.start_decision.attempt == 2
    run.rewind(10)
    assert not run.checkpoint_files.restore_best(20) and run.checkpoint_files.restore_best(-1)
    assert names(run.folder / "superseded-2") == ["step_00000020.pt", "step_00000030.pt"]
    assert names(run.checkpoint_folder) == ["step_00000010.pt"]
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(record["kind"], record["step"]) for record in records] == [("train", 10), ("event", 10)]


@pytest.mark.guarantee("records-once")
def test_records_of_an_evaluation_that_will_be_repeated_are_dropped(config):
    fill(open_run(config))
    run = open_run(with_(config, resume_from="auto"))
    run.records.append_event("best", 20)

    def of_step_20():
        records = run.records.read("eval") + run.records.read("event")
        return [record.get("event", "eval") for record in records if record["step"] == 20]

    run.rewind(20, keeps_evaluation=True)
    assert of_step_20() == ["eval", "checkpoint", "best"]
    run.rewind(20)
    assert of_step_20() == ["checkpoint"]
    for split in ("val", "test"):
        run.records.append("eval", epoch=0, step=30, split=split, loss=1.0)
    run.rewind(30, keeps_evaluation=True, has_test=True)  # the test set is evaluated again after the validation set
    assert [record["split"] for record in run.records.read("eval")] == ["val", "val"]
    run.records.append(
        "eval", epoch=0, step=20, split="test", loss=1.0
    )  # of the best weights, in a run that is now longer
    run.rewind(40, keeps_evaluation=True, has_test=True)
    assert [record["split"] for record in run.records.read("eval")] == ["val", "val"]


def test_records_of_an_only_test_set_are_those_of_a_validation_set(config):
    run = open_run(config)
    for step in (10, 20):
        run.records.append("eval", epoch=1, step=step, split="test", loss=1.0)  # it selects the best
    run.rewind(10, keeps_evaluation=True)
    assert [record["step"] for record in run.records.read("eval")] == [10]


def test_a_kill_during_a_rewind_leaves_no_later_checkpoint(config, monkeypatch):
    fill(open_run(config), steps=(10, 20, 30))
    run = open_run(from_step_10(config))
    monkeypatch.delattr(run_records, "drop_records")
    with pytest.raises(NameError):
        run.rewind(10)
    run.close()
    assert open_run(with_(config, resume_from="auto")).resume_path.name == "step_00000010.pt"


@pytest.mark.guarantee("one-owner")
def test_a_checkpoint_appears_only_in_a_folder_that_is_still_owned(config):
    run = open_run(config)
    run.mark_training()
    run.ownership.check_owner()
    run.ownership.lock_file.write_text(json.dumps({"token": "another"}))
    with pytest.raises(
        TrainingError, match="Another job has taken over .*/checkpoints, so this job ends. Start one job for each"
    ):
        run.ownership.check_owner()
    for text in ("", "[]"):
        run.ownership.lock_file.write_text(text)
        with pytest.raises(OSError, match="cannot be read"):
            run.ownership.check_owner()
    run.ownership.lock_file.unlink()
    with pytest.raises(OSError):
        run.ownership.check_owner()


def test_best_pt_is_a_link_to_a_checkpoint_that_is_kept(config):
    run = open_run(config)
    path = commit(run, 10, keep_last=2)
    best = commit_best(run, 10)
    assert best.readlink() == Path(path.name)
    for step in (20, 30, 40):
        commit(run, step, keep_last=2)
    assert names(run.checkpoint_folder) == ["best.pt", *(f"step_000000{step}.pt" for step in (10, 30, 40))]
    commit_best(run, 40)
    commit(run, 50, keep_last=2)
    assert checkpoint.verify_checkpoint(best).step == 40 and not path.exists() and not list(run.folder.rglob("*.tmp"))
    with pytest.raises(OSError, match="there is no checkpoint of step 45"):
        commit_best(run, 45)


@pytest.mark.guarantee("keep-last")
def test_on_storage_without_links_best_pt_is_a_copy(config, monkeypatch):
    monkeypatch.setattr(Path, "symlink_to", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    run = open_run(config)
    for step in (10, 20):
        commit(run, step)
        best = commit_best(run, step)
        assert not best.is_symlink() and checkpoint.verify_checkpoint(best).step == step
    for step in (30, 40):
        commit(run, step, keep_last=1)
    assert names(run.checkpoint_folder) == ["best.pt", "step_00000020.pt", "step_00000040.pt"]
    assert run.checkpoint_files.restore_best(20)
    best.write_bytes(b"broken")
    assert not run.checkpoint_files.restore_best(15)
    assert not best.exists() and list(run.folder.glob("superseded-*/best.pt"))
    assert "best.pt has no checksum" in "\n".join(run.notes)


def test_the_best_checkpoint_is_restored_from_its_step_or_the_folder_resumed_from(config):
    run = open_run(config)
    path = commit(run, 10)
    commit(run, 20)
    best = commit_best(run, 20)
    run.rewind(10)
    assert not best.exists() and run.checkpoint_files.restore_best(10) and best.samefile(path)
    run.close()
    other = open_run(with_(from_step_10(config), run_dir="runs/other"))
    path.unlink()
    commit(run, 10)
    commit_best(run, 10)
    # a copy of it
    assert other.checkpoint_files.restore_best(10) and (other.checkpoint_folder / "best.pt").readlink() == Path(
        path.name
    )
    assert other.checkpoint_files.restore_best(-1) and not other.checkpoint_files.restore_best(15)
    assert other.notes == [
        "The best checkpoint so far, of step 15, is gone. The next evaluation starts a new best checkpoint."
    ]
