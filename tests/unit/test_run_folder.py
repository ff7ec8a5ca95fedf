"""The run's folder: who owns it, when a run is continued, moved aside, replaced or refused, and what its files say."""

import dataclasses
import json
from pathlib import Path

import pytest

from config import TrainingConfig, UserError
from test_checkpoint import payload
from utils.checkpoint import format as checkpoint
from utils.run import folder as run_folder
from utils.run.folder import Run


def open_run(config, launch_id="", may_restart=False, makes_room=True):
    run = Run(config.run_folder, config.checkpoint_folder, 0, ("here",))
    run.claim(config, launch_id, may_restart)
    if run.is_replacing and makes_room:
        run.make_room(config)
    return run


def commit(run, step, keep_last):
    path = checkpoint.step_path(run.checkpoints, step)
    checkpoint.write(path, payload(step), run.claim_number)
    checkpoint.prune(run.checkpoints, keep_last)
    return path


def commit_best(run, step):
    best = run.checkpoints / checkpoint.BEST
    if not run.link_best(step):
        checkpoint.write(best, payload(step), run.claim_number)
    return best


def fill(run, steps=(10, 20), state="running"):
    """What a run leaves behind."""
    run.own()
    run.status(state, epoch=0, step=steps[-1], error=None)
    for step in steps:
        run.record("train", epoch=0, step=step, loss=1.0)
        run.record("event", event="checkpoint", step=step)
        run.record("eval", epoch=0, step=step, split="val", loss=1.0)
        commit(run, step, keep_last=5)
    run.close()


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return TrainingConfig(run_dir="runs/mine")


def with_(config, **changes):
    return dataclasses.replace(config, **changes)


def read_json(run, name):
    return json.loads((run.folder / name).read_text())


def contents(config):
    """{file: its bytes}, but for the claim."""
    return {
        path: path.read_bytes() for path in config.run_folder.rglob("*") if path.is_file() and path.name != "claim.json"
    }


def test_a_named_folder_that_holds_a_run_is_refused_with_the_commands(config):
    fill(open_run(config))
    with pytest.raises(
        UserError, match="holds a run already; add --resume_from auto .* --overwrite .* another --run_dir"
    ):
        open_run(config)
    assert len(list(config.checkpoint_folder.glob("*.pt"))) == 2


def test_the_default_folder_moves_aside(config):
    default = TrainingConfig()
    for number in (1, 2):
        fill(open_run(default))
        run = open_run(default)
        assert not checkpoint.step_checkpoints(run.checkpoints) and run.attempt == 1
        run.close()
        assert len(list((run.folder.parent / f"default.{number}" / "checkpoints").glob("*.pt"))) == 2
        assert f"default.{number}" in run.notes[0]


@pytest.mark.parametrize("changes", [{"overwrite": True}, {"run_dir": "runs/default"}])
def test_ranks_stay_watched_where_their_run_replaces_another(config, changes):
    """They have opened their files before the earlier run makes room."""
    config = with_(config, **changes)
    fill(open_run(config))
    run = open_run(config, makes_room=False)
    run.watch_folder.mkdir(exist_ok=True)
    with (run.watch_folder / "rank0").open("w") as file:
        run.make_room(config)
        file.write("here")
    assert (run.watch_folder / "rank0").read_text() == "here"


def test_overwrite_replaces_what_a_run_wrote_and_nothing_else(config):
    fill(open_run(config))
    mine = [config.run_folder / name for name in ("notes.txt", "logs/mine.txt", "checkpoints/mine.pt")]
    theirs = [config.run_folder / name for name in ("logs/rank0.log", "tensorboard/events.out.tfevents.1")]
    for path in mine + theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    run = open_run(with_(config, overwrite=True))
    assert {path for path in run.folder.rglob("*") if path.is_file()} == {*mine, run.folder / "claim.json"}
    assert run.attempt == 1


@pytest.mark.parametrize("folder", [".", "..", "/", "runs"])
def test_a_folder_that_holds_more_than_one_run_is_refused(config, folder):
    fill(open_run(config))
    with pytest.raises(UserError, match="run_dir=.*: holds other things than one run; give a folder of the run's own"):
        open_run(with_(config, run_dir=folder, overwrite=True))


def test_a_refused_start_leaves_the_status_of_the_run(config):
    fill(open_run(config), state="preempted")
    run = open_run(with_(config, resume_from="auto"))
    before = read_json(run, "status.json")
    run.begin()
    assert read_json(run, "status.json")["step"] == 20
    run.failed(UserError("seed=1: the checkpoint has seed=2", 0, "here"))
    assert read_json(run, "status.json") == before
    run.begin()
    run.status("running", step=21)  # it goes on
    run.failed(UserError("a.png: cannot be read", 0, "here"))
    assert read_json(run, "status.json")["state"] == "failed"


def test_a_run_without_a_record_or_a_checkpoint_starts_anew_in_its_folder(config):
    run = open_run(config)
    run.status("running")
    run.failed(UserError("bad data; mend it"))
    run.close()
    run = open_run(config)
    assert run.attempt == 1
    run.record("train", step=3, loss=1.0)
    run.close()
    run = open_run(with_(config, resume_from="auto"))
    assert run.resume_path is None
    run.rewind(0)
    assert run.records("train") == []


def test_a_path_within_the_run_goes_back_and_sets_what_is_beyond_aside(config):
    run = open_run(config)
    commit_best(run, 20)
    fill(run, steps=(10, 20, 30))
    run = open_run(with_(config, resume_from=str(config.checkpoint_folder / "step_00000010.pt")))
    assert run.resume_path.name == "step_00000010.pt" and run.attempt == 2
    run.rewind(10)
    assert sorted(path.name for path in (run.folder / "superseded-2").iterdir()) == [
        "best.pt",
        "step_00000020.pt",
        "step_00000030.pt",
    ]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000010.pt"]
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in records] == [("train", 10), ("event", 10)]


def test_a_path_of_another_run_starts_a_new_one_and_never_in_a_folder_that_holds_one(config, tmp_path):
    fill(open_run(config))
    source = str(config.checkpoint_folder / "step_00000020.pt")
    other = open_run(TrainingConfig(run_dir="runs/other", resume_from=source))
    assert other.resume_path.name == "step_00000020.pt" and other.attempt == 1
    fill(other)
    with pytest.raises(UserError, match="holds a run already"):
        open_run(TrainingConfig(run_dir="runs/other", resume_from=source))
    with pytest.raises(UserError, match="cannot be read"):
        open_run(TrainingConfig(run_dir="runs/new", resume_from="nowhere.pt"))
    with pytest.raises(UserError, match="holds a run already"):  # checkpoints of another run are not mixed in
        open_run(TrainingConfig(run_dir="runs/new", checkpoint_dir=str(config.checkpoint_folder)))


def test_a_restart_of_the_same_launch_continues_even_where_overwrite_was_asked(config):
    first = with_(config, overwrite=True)
    fill(open_run(first, launch_id="job-7"))
    run = open_run(first, launch_id="job-7")
    assert run.resume_path.name == "step_00000020.pt" and run.attempt == 2
    run.close()
    with pytest.raises(UserError, match="holds a run already"):
        open_run(config, launch_id="job-8")


def test_a_restart_that_cannot_be_told_from_a_new_run_is_refused(config):
    fill(open_run(TrainingConfig()))
    with pytest.raises(UserError, match="whether this restarts it cannot be known; give torchrun --rdzv-id NAME"):
        open_run(TrainingConfig(), may_restart=True)


@pytest.mark.parametrize("where", ["run_dir", "checkpoint_dir"])
def test_an_unwritable_folder_is_refused(tmp_path, where):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written .Not a directory.; give"):
        open_run(TrainingConfig(**{"run_dir": str(tmp_path / "run"), where: str(tmp_path / "file" / "x")}))


# ---- records ----


def test_a_number_that_is_not_finite_becomes_null(config):
    run = open_run(config)
    assert run.record("train", step=1, loss=float("nan"), lr=0.1) == {
        "kind": "train",
        "step": 1,
        "loss": None,
        "lr": 0.1,
    }
    assert read_json(run, "metrics.jsonl")["loss"] is None


def test_rewinding_drops_later_samples_and_a_torn_last_line(config):
    run = open_run(config)
    for step in (1, 2, 3):
        run.record_samples(0, step, [step])
    with (run.folder / "metrics.jsonl").open("w") as file:
        file.write('{"kind": "train", "step": 1}\n{"kind": "tra')
    run.rewind(2)
    assert len((run.folder / "samples" / "rank0.jsonl").read_text().splitlines()) == 2
    assert run.records("train") == [{"kind": "train", "step": 1}]


def test_best_is_a_link_to_the_steps_checkpoint_or_a_file_of_its_own_and_set_aside_when_damaged(config):
    run = open_run(config)
    path = commit(run, 10, keep_last=2)
    best = commit_best(run, 10)
    assert best.samefile(path)
    # again, after a resume at this step
    assert commit_best(run, 10).samefile(path) and not list(run.folder.rglob("*.tmp"))
    commit(run, 20, keep_last=2), commit(run, 30, keep_last=2)
    assert not path.exists() and checkpoint.read(best)[0]["progress"]["step"] == 10
    commit_best(run, 25)
    assert checkpoint.read(best)[0]["progress"]["step"] == 25
    best.write_bytes(b"broken")
    run.rewind(30)
    assert not best.exists() and list(run.folder.glob("superseded-*/best.pt"))
    assert "best.pt: has no checksum" in "\n".join(run.notes)


def test_a_restart_before_the_first_checkpoint_starts_from_the_path_again(config, tmp_path):
    other = with_(config, run_dir="runs/other")
    fill(open_run(other))
    given = with_(config, resume_from=str(other.checkpoint_folder / "step_00000010.pt"))
    for attempt in (1, 2):
        run = open_run(given, launch_id="job-7")
        assert run.resume_path == other.checkpoint_folder / "step_00000010.pt" and run.attempt == attempt
        run.own()
        run.record("train", epoch=0, step=11, loss=1.0)
        run.close()
    run = open_run(given, launch_id="job-7")
    commit(run, 12, keep_last=2)
    run.close()
    assert open_run(given, launch_id="job-7").resume_path.name == "step_00000012.pt"


@pytest.mark.parametrize("changes", [{"overwrite": True}, {"run_dir": "runs/default"}])
def test_a_run_is_replaced_only_when_nothing_more_can_be_refused(config, changes):
    config = with_(config, **changes)
    fill(open_run(config), state="running")  # it was killed
    before = contents(config)
    run = open_run(config, "job-7", makes_room=False)
    assert run.is_replacing
    run.failed(UserError("data_dir=typo: has no train/<class>/ folders; give the folder that holds train/", 0, "here"))
    run.close()
    assert contents(config) == before
    restarted = open_run(config, "job-7", makes_room=False)
    assert restarted.is_replacing and restarted.resume_path is None  # the old run is not this launch's own


def test_what_an_evaluation_left_is_dropped_where_it_is_made_again(config):
    fill(open_run(config))
    run = open_run(with_(config, resume_from="auto"))
    run.record("event", event="best", step=20)

    def of_step_20():
        return [
            record.get("event", "eval") for record in run.records("eval") + run.records("event") if record["step"] == 20
        ]

    run.rewind(20, is_evaluated=True)
    assert of_step_20() == ["eval", "checkpoint", "best"]
    run.rewind(20)
    assert of_step_20() == ["checkpoint"]
    for split in ("val", "test"):
        run.record("eval", epoch=0, step=30, split=split, loss=1.0)
    run.rewind(30, is_evaluated=True)  # the test set beside the validation set is evaluated again
    assert [record["split"] for record in run.records("eval")] == ["val", "val"]
    run.record("eval", epoch=0, step=40, split="test", loss=1.0)  # the only held-out set, which chooses the best
    run.rewind(40, is_evaluated=True)
    assert [record["split"] for record in run.records("eval")] == ["val", "val", "test"]


def test_a_restart_of_a_launch_that_had_not_begun_starts_where_the_launch_was_told_to(config):
    """Its first attempt failed in start-up, or was refused: what lies in the folder is another run's, finished even."""
    fill(open_run(config, launch_id="job-6"), state="completed")
    given = with_(config, resume_from=str(config.checkpoint_folder / "step_00000010.pt"))
    for attempt in (2, 3):
        run = open_run(given, launch_id="job-7")
        assert run.resume_path.name == "step_00000010.pt" and not run.is_completed and run.attempt == attempt
        run.close()
    with pytest.raises(UserError, match="holds a run already"):
        open_run(config, launch_id="job-7")


def killed(*_):
    raise KeyboardInterrupt


def test_a_kill_while_records_are_cut_leaves_nothing_to_go_on_from_beyond_them(config, monkeypatch):
    fill(open_run(config), steps=(10, 20, 30))
    run = open_run(with_(config, resume_from=str(config.checkpoint_folder / "step_00000010.pt")))
    monkeypatch.setattr(run_folder, "keep_lines", killed)
    with pytest.raises(KeyboardInterrupt):
        run.rewind(10)
    run.close()
    assert open_run(with_(config, resume_from="auto")).resume_path.name == "step_00000010.pt"


def test_a_kill_while_a_run_is_replaced_leaves_none_of_its_checkpoints_without_its_records(config, monkeypatch):
    fill(open_run(config))
    run = open_run(with_(config, overwrite=True), makes_room=False)
    plain = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **_: killed() if path.name == "metrics.jsonl" else plain(path))
    with pytest.raises(KeyboardInterrupt):
        run.make_room(with_(config, overwrite=True))
    assert not list(config.checkpoint_folder.glob("*.pt")) and (config.run_folder / "metrics.jsonl").exists()


def test_the_best_checkpoint_comes_back_from_its_step_or_from_the_folder_resumed_from(config):
    run = open_run(config)
    fill_best = commit(run, 10, keep_last=9)
    commit(run, 20, keep_last=9)
    commit_best(run, 20)
    run.rewind(10)  # best.pt is from beyond
    best = config.checkpoint_folder / "best.pt"
    assert not best.exists() and run.restore_best(10) and best.samefile(fill_best)
    run.close()
    other = open_run(with_(config, run_dir="runs/other", resume_from=str(fill_best)))
    fill_best.rename(fill_best.with_name("gone"))
    assert other.restore_best(10) and checkpoint.read(other.checkpoints / "best.pt")[0]["progress"]["step"] == 10
    assert other.restore_best(-1) and not other.restore_best(15)
    assert other.notes[-1] == "the best checkpoint so far, of step 15, is gone: the best is looked for anew"
