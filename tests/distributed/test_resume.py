"""How a run ends, stops and continues."""

import json
import os
import signal
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import utils.run.start
from config import TrainingConfig
from ranks import run_ranks
from tasks import train_task
from test_run_folder import contents
from training import difference, train_flags
from utils.checkpoint import format as checkpoint
from utils.report.reporter import Reporter
from utils.run.checkpoints import Checkpoints

# the loss falls, so with max:loss the first epoch is the best
FLAGS = "--dataset_size 60 --epochs 4 --global_batch_size 8 --no-use_amp --lr 0.02 --best_metric max:loss".split()
FLAGS += ["--keep_last", "99"]


@pytest.mark.guarantee("schedule-end")
def test_max_steps_ends_a_run_as_completed_and_more_steps_continue_it(runs):
    flags = "--dataset_size 80 --epochs 9 --max_steps".split()
    outcome = runs.train(2, "steps", *flags, 13)[0]
    assert (outcome["state"], outcome["steps"]) == ("completed", 13)
    assert runs.records("steps", "eval")[-1]["step"] == 13 and runs.records("steps", "train")[-1]["lr"] < 0.01
    progress = runs.last("steps")["progress"]  # a run that continues here keeps the evaluation
    assert (progress["step"], progress["evaluated_step"]) == (13, 13)
    assert progress["best_value"] == max(entry["top1"] for entry in runs.records("steps", "eval"))
    last = runs.checkpoints("steps")[-1]
    runs.train(2, "steps", *flags, 13, "--resume_from", last)  # nothing left to do
    assert [record["step"] for record in runs.records("steps", "eval")] == [10, 13]
    runs.train(2, "steps", *flags, 15, "--lr", 1e-9, "--resume_from", last)
    assert [record["step"] for record in runs.records("steps", "eval")] == [10, 13, 15]
    assert runs.json("steps", "summary.json")["best_value"] == max(r["top1"] for r in runs.records("steps", "eval"))


def test_max_steps_alone_sets_the_length_and_of_two_limits_the_banner_names_the_shorter(runs):
    # a step per epoch
    flags = "--dataset_size 16 --batch_size 8 --eval_every 0 --log_interval 1 --max_steps 13".split()
    outcome = runs.train(2, "alone", *flags, "--schedule_steps", 8, "--min_lr", 0.05, "--warmup_steps", 2)[0]
    assert (outcome["state"], outcome["steps"], outcome["epochs"]) == ("completed", 13, 13)
    lrs = [record["lr"] for record in runs.records("alone", "train")]
    assert lrs[:3] == [0.05, 0.1, 0.1] and lrs[3:9] == sorted(lrs[3:9], reverse=True) and {*lrs[8:]} == {0.05}
    assert runs.train(2, "both", *flags, "--epochs", 3)[0]["steps"] == 3
    assert "3 optimizer steps, 1 per epoch (--epochs 3 ends the run before --max_steps 13)" in runs.log("both")


def train_until_time_is_up(flags):
    """Train; on rank 1 the clock jumps by an hour after step 7."""
    clock, plain = SimpleNamespace(monotonic=time.monotonic, perf_counter=time.perf_counter), Reporter.record_step

    def done(self, samples, indices):
        plain(self, samples, indices)
        if self._state.progress.step == 7 and os.environ["RANK"] == "1":
            clock.monotonic = lambda: time.monotonic() + 3600

    with mock.patch.object(utils.run.start, "time", clock), mock.patch.object(Reporter, "record_step", done):
        outcome = train_flags(flags)
        return outcome["state"], outcome["steps"]


@pytest.mark.guarantee("stop")
def test_all_ranks_stop_after_the_same_step_when_one_reaches_the_time_limit(runs):
    words = runs.words("run", *"--dataset_size 400 --no-use_amp --max_time 30".split())
    (state, step), other = run_ranks(2, train_until_time_is_up, words)
    assert other == (state, step) and state == "preempted"
    assert 7 < step <= 100 and step == runs.last("run")["progress"]["step"]


@pytest.mark.guarantee("stop")
@pytest.mark.parametrize(("requested", "stopped"), [(2, 3), (4, 4)])
def test_a_stop_request_takes_effect_one_step_later_but_within_the_epoch(runs, requested, stopped):
    """A vote in flight at the end of an epoch is flushed; otherwise the run would stop in the next epoch."""
    flags = runs.words("run", *"--dataset_size 32 --epochs 2 --eval_every 0 --no-use_amp".split())
    assert run_ranks(2, train_task, "images", flags, torch.float32, [requested], False) == ["preempted"] * 2
    assert runs.last("run")["progress"]["step"] == stopped


def train_after_a_signal(flags):
    """Train; before the first step the last rank is asked to stop."""
    plain = Reporter.start

    def start(self, *args):
        plain(self, *args)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)

    with mock.patch.object(Reporter, "start", start):
        outcome = train_flags(flags)
        return outcome["state"], outcome["steps"]


@pytest.mark.guarantee("stop")
def test_a_stop_request_from_before_the_first_step_takes_no_step(runs):
    assert run_ranks(2, train_after_a_signal, runs.words("run", "--dataset_size", 32)) == [("preempted", 0)] * 2


def train_with_a_quick_disk(flags):
    """Train; each save is on disk before the next one is requested."""
    plain = Checkpoints.is_save_due
    with mock.patch.object(Checkpoints, "is_save_due", lambda self: (self.report_if_written(60.0), plain(self))[1]):
        return train_flags(flags)


@pytest.mark.guarantee("stop")
def test_a_save_request_from_before_a_save_does_not_cause_another_save(runs):
    """A save is always due: requested at one step, done at the next. A stale request would cause an extra one."""
    flags = "--dataset_size 80 --epochs 1 --save_every 0 --eval_every 0 --save_every_minutes 1e-9".split()
    run_ranks(2, train_with_a_quick_disk, runs.words("often", *flags))
    assert [record["step"] for record in runs.events("often", "checkpoint")] == [2, 4, 6, 8, 10]


@pytest.mark.guarantee("completed")
def test_a_completed_run_is_left_unchanged(runs):
    flags = "--dataset_size 16 --epochs 1".split()
    runs.train(2, "done", *flags)
    before = contents(runs.folder("done"))
    assert runs.train(2, "done", *flags, "--resume_from", "auto")[0]["state"] == "completed"
    assert contents(runs.folder("done")) == before


CONFIG_DAMAGE = {
    "lost": lambda file: file.unlink(),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:99]),
    "empty": lambda file: file.write_bytes(b""),
    "with a BOM": lambda file: file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes()),
    "a list": lambda file: file.write_text("[]"),
    "edited": lambda file: file.write_text(file.read_text().replace('"epochs": 1,', '"epochs": 2,')),
}


@pytest.mark.parametrize("damage", CONFIG_DAMAGE)
def test_a_completed_run_whose_config_is_damaged_is_extended_and_not_repeated(runs, damage):
    flags = "--dataset_size 16 --epochs".split()
    runs.train(1, "run", *flags, 1)
    CONFIG_DAMAGE[damage](runs.folder("run") / "config.json")
    before = contents(runs.folder("run"))
    assert runs.train(1, "run", *flags, 1, "--resume_from", "auto") == [{"state": "completed"}]
    assert contents(runs.folder("run")) == before
    assert runs.train(1, "run", *flags, 2, "--resume_from", "auto")[0]["epochs"] == 2
    assert runs.json("run", "config.json")["epochs"] == 2


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_config_file_may_begin_with_a_byte_order_mark(tmp_path, suffix):
    text = json.dumps({"epochs": 3}) if suffix == ".json" else "epochs = 3"
    (tmp_path / f"a{suffix}").write_text(text, encoding="utf-8-sig")
    assert TrainingConfig.from_args(["--config", str(tmp_path / f"a{suffix}")]).epochs == 3


@pytest.mark.guarantee("resume")
def test_a_run_resumed_in_another_folder_starts_with_a_checkpoint_and_its_best_one(runs):
    runs.train(1, "whole", *FLAGS)
    runs.train(1, "moved", *FLAGS, "--resume_from", runs.checkpoints("whole")[1])
    best, moved = (
        checkpoint.read_checkpoint(runs.folder(name) / "checkpoints" / "best.pt")[0] for name in ("whole", "moved")
    )
    assert best["progress"]["step"] == moved["progress"]["step"] == 8
    assert difference(best["model"], moved["model"]) == []
    records = [record for record in runs.records("moved", "event") if record["event"] != "evaluation"]
    assert [(record["event"], record["step"]) for record in records[:2]] == [("resumed", 16), ("checkpoint", 16)]
    assert difference(runs.last("whole")["model"], runs.last("moved")["model"]) == []
    for name in ("best_value", "best_epoch", "steps"):
        assert runs.json("moved", "summary.json")[name] == runs.json("whole", "summary.json")[name]


def end_before_the_summary(flags):
    """Leave the state of a run that was killed directly before the summary."""
    with mock.patch.object(Reporter, "finish", lambda *_: os._exit(0)):
        train_task("images", flags)


def test_a_run_ended_by_patience_completes_without_more_steps(runs):
    flags = [*FLAGS, "--patience", "1", "--save_every", "0"]
    with pytest.raises(FileNotFoundError):  # the ranks ended without a result
        run_ranks(2, end_before_the_summary, runs.words("run", *flags))
    assert runs.json("run", "status.json")["state"] == "running"
    runs.train(2, "run", *flags, "--resume_from", "auto")
    assert runs.json("run", "summary.json")["steps"] == 16 and runs.json("run", "status.json")["state"] == "completed"
    assert [record["step"] for record in runs.records("run", "eval")] == [8, 16]


@pytest.mark.guarantee("build")
def test_a_changed_setting_that_changes_bits_is_recorded(runs):
    runs.train_with_stops(1, "run", *FLAGS, stops=(3,), goes_on=False)
    more = "--resume_from auto --bucket_cap_mb 0.004 --epochs 1".split()
    runs.train_with_stops(1, "run", *FLAGS, *more, stops=())
    changed = runs.events("run", "resumed")[0]["changed"]
    assert "--bucket_cap_mb is 0.004, but the checkpoint has --bucket_cap_mb 0.002." in changed


def test_a_start_records_a_digest_of_the_weights_which_depends_on_the_seed_alone(runs):
    """Not on the number of ranks. A resume has none."""
    flags = "--dataset_size 16 --epochs 1 --max_steps 2 --eval_every 0".split()
    of_seeds = {}
    for name, ranks, seed in (("one", 1, 1), ("two", 2, 1), ("other", 1, 2)):
        runs.train(ranks, name, *flags, "--seed", seed)
        of_seeds[name] = runs.events(name, "started")[0]["weights"]
    assert of_seeds["one"] == of_seeds["two"] != of_seeds["other"] and len(of_seeds["one"]) == 16
    runs.train(1, "one", *flags, "--seed", 1, "--max_steps", 3, "--resume_from", "auto")
    assert len(runs.events("one", "started")) == 1 and "weights" not in runs.events("one", "resumed")[0]
