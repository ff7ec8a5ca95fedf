"""The account of time over all attempts of a run."""

import json
import time
from types import SimpleNamespace

import utils.clock
from config import TrainingConfig
from test_run_folder import open_run, with_
from utils.clock import Clock
from utils.run import goodput
from utils.run.goodput import ACCOUNTS, Goodput, share_in_training


def test_each_second_is_counted_once_over_restarts(tmp_path, monkeypatch):
    """A second attempt: the gap counts as down time, a repeated step does not count as training. The system's clock
    jumps by an hour during each attempt, and is right when one starts."""
    fake = SimpleNamespace(now=1000.0, jump=0)
    fake.time, fake.perf_counter = (lambda: fake.now + fake.jump), (lambda: fake.now - 900)
    monkeypatch.setattr(utils.clock, "time", fake)
    monkeypatch.setattr(goodput, "time", fake)
    config = TrainingConfig(run_dir=str(tmp_path))

    def attempt(resume_from, *steps, first=0):
        run, clock = open_run(with_(config, resume_from=resume_from)), Clock()
        fake.jump = 0
        found = Goodput(run, clock, fake.perf_counter())
        found.resume(None, first)
        fake.jump = -3600 if first else 3600
        for step, phases in steps:
            for phase in phases.split():
                clock.begin_step(step) if phase == "data" else clock.enter(phase)
                fake.now += 1
        run.record("train", step=1)
        now = found.now()
        found.close()
        run.close()
        return now

    attempt("", (1, "data forward backward update save evaluation"), (2, "data forward"))
    fake.now += 4  # killed
    found = attempt("auto", (2, "data forward"), (3, "data forward"), first=1)
    expected = [5, 3, 1, 1, 0, 2, 4]
    assert [found[name] for name in ACCOUNTS] == expected and sum(expected) == found["until"] - 1000
    assert found["step"] == 3 and share_in_training(found) == 5 / 16
    attempts = [[each[name] - 1000 for name in ("started_at", "training_from", "until")] for each in found["attempts"]]
    assert attempts == [[0, 0, 8], [12, 12, 16]]
    assert [(each["resumed_at_step"], each["step"]) for each in found["attempts"]] == [(0, 2), (1, 3)]
    file = tmp_path / "goodput.json"
    assert json.loads(file.read_text()) == found
    file.write_text('{"training": "much"}')
    assert attempt("auto")["training"] == 0


def test_a_run_shorter_than_a_second_is_recorded_too(tmp_path):
    run = open_run(TrainingConfig(run_dir=str(tmp_path)))
    accounts = Goodput(run, Clock(), time.perf_counter())
    accounts.resume(None)
    accounts.close()
    run.close()
    assert (tmp_path / "goodput.json").exists()
