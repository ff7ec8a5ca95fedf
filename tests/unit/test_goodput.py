# extra: template
"""The account of time over all attempts of a run, from its records."""

import json
from types import SimpleNamespace

import pytest

from config import TrainingConfig
from test_run_folder import open_run, with_
from training import attempts_in
from utils.report.goodput import TIME_ACCOUNTS, sum_account_seconds
from utils.run import run_records, run_status

FIRST = 1.8e9
SECONDS = {"start": 2, "step": 1, "save": 0.5, "wait": 5, "evaluate": 3, "hang": 7}
GAP = 4  # seconds between two attempts


class Story:
    """A run with a clock of its own. What its attempts do is a list of words; `wait` is for the disk, after a save."""

    def __init__(self, place, monkeypatch):
        self.now, self.jump = 0.0, 0
        self.config = TrainingConfig(run_dir=str(place), resume_from="auto")
        clock = SimpleNamespace(time=lambda: FIRST + self.now + self.jump, monotonic=lambda: self.now)
        monkeypatch.setattr(run_records, "time", clock)
        monkeypatch.setattr(run_status, "time", clock)

    def attempt(self, step, words):
        run, began = open_run(self.config), self.now
        run.status.mark_running()
        for word in words.split():
            self.now += SECONDS.get(word, 0)
            if word == "start":
                run.rewind(step, keeps_evaluation=True)
                run.mark_training()
                run.record_start(began, {"epoch": 0, "step": step, "samples_seen": 4 * step})
            elif word == "step":
                step += 1
                run.status.update_progress(step=step)
            elif word == "log":
                run.records.append("train", step=step, data_wait_s=0.25)
            elif word in ("save", "wait"):
                run.records.append_event(
                    "checkpoint", step, **{"blocked_s" if word == "save" else "waited_s": SECONDS[word]}
                )
            elif word == "evaluate":
                run.records.append_event("evaluation", step, split="val", seconds=SECONDS[word])
            elif word in ("forward", "back"):  # the system's clock, which is right when the next attempt begins
                self.jump = 3600 if word == "forward" else -3600
            else:
                run.status.write(word)
        run.close()
        self.jump = 0


STORIES = {  # attempts: the first step and what follows; those that do not end with a state are killed
    "one attempt": ([(0, "start step step step step log evaluate")], [3, 1, 3, 0, 2, 0, 0]),
    "two intervals": ([(0, "start step step log step log step")], [3.25, 0.75, 0, 0, 2, 0, 0]),
    "the rest of an interval": (
        [(0, "start step step log step save preempted"), (3, "start step log")],
        [3.25, 0.75, 0, 0.5, 4, 0, 4],
    ),
    "killed": (
        [(0, "start step step save step step log"), (2, "start step step log evaluate")],
        [3.5, 0.5, 3, 0.5, 4, 2, 4],
    ),
    "failed in an evaluation after a save": (
        [(0, "start step save hang failed"), (1, "start step")],
        [2, 0, 0, 0.5, 4, 7, 4],
    ),
    "killed before a save": ([(0, "start step step log"), (0, "start step")], [1, 0, 0, 0, 4, 2, 4]),
    "killed after an evaluation": (
        [(0, "start step evaluate save step"), (1, "start step")],
        [2, 0, 3, 0.5, 4, 1, 4],
    ),
    "failed after a hang": ([(0, "start step save step hang failed"), (1, "start step")], [2, 0, 0, 0.5, 4, 8, 4]),
    "a slow save": ([(0, "start step step log save wait preempted"), (2, "start step")], [2.5, 0.5, 0, 5.5, 4, 0, 4]),
    "back before the previous beginning": (
        [(0, "start step step save step step save step"), (4, "start step step"), (2, "start step")],
        [3, 0, 0, 0.5, 6, 5.5, 8],
    ),
    "back to the same step twice": (
        [(0, "start step step save step"), (2, "start step step"), (2, "start step")],
        [3, 0, 0, 0.5, 6, 3, 8],
    ),
    "the clock jumps": (
        [(0, "start forward step step save step"), (2, "start step back step")],
        [4, 0, 0, 0.5, 4, 1, 4],
    ),
    "failed before training": (
        [(0, "start step step save step"), (2, "failed"), (2, "failed"), (2, "start step")],
        [3, 0, 0, 0.5, 4, 1, 12],
    ),
    "from another run": ([(8, "start step log")], [0.75, 0.25, 0, 0, 2, 0, 0]),
}


@pytest.mark.guarantee("clock-jump", "goodput")
@pytest.mark.parametrize("name", STORIES)
def test_each_second_is_counted_once_over_restarts(tmp_path, monkeypatch, name):
    attempts, expected = STORIES[name]
    story = Story(tmp_path / "run", monkeypatch)
    for number, attempt in enumerate(attempts):
        story.now += GAP * (number > 0)
        story.attempt(*attempt)
    loaded = attempts_in(tmp_path / "run")
    accounts = sum_account_seconds(loaded)
    assert list(accounts) == list(TIME_ACCOUNTS)
    assert [*accounts.values()] == pytest.approx(expected, abs=2e-3)
    assert sum(expected) == story.now  # from the first start to the end
    assert loaded[0].started_at == FIRST and loaded[0].start_event["samples_seen"] == 4 * attempts[0][0]


def test_records_of_an_earlier_version_are_left_out(tmp_path, monkeypatch):
    """Its goodput.json, too; the attempts of this version count."""
    place = tmp_path / "run"
    story = Story(place, monkeypatch)
    place.mkdir()
    rows = [{"kind": "train", "step": 1, "loss": 1.0}, {"kind": "event", "event": "resumed", "step": 1, "changed": []}]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (place / "goodput.json").write_text(json.dumps({"training": 5.0, "attempts": [{"started_at": FIRST - 9}]}))
    (place / "status.json").write_text('{"state": "failed", "step": "?", "time": null}')
    assert attempts_in(place) == [] and sum(sum_account_seconds([]).values()) == 0
    for first in (1, 2):
        story.attempt(first, "start step save")
    assert [*sum_account_seconds(attempts_in(place)).values()] == pytest.approx([2, 0, 0, 1, 4, 0, 0], abs=2e-3)


def test_a_start_that_recorded_no_step_is_not_a_run_to_continue(tmp_path, monkeypatch):
    """Nor does its time count in the run that begins in its folder."""
    story = Story(tmp_path / "run", monkeypatch)
    story.attempt(0, "start step failed")
    story.config = with_(story.config, resume_from="")
    story.attempt(0, "start step log")
    (attempt,) = attempts_in(tmp_path / "run")
    assert attempt.started_at == FIRST + 3


def test_what_is_noted_never_exceeds_the_time(tmp_path, monkeypatch):
    """As for a wait that is noted twice."""
    story = Story(tmp_path / "run", monkeypatch)
    story.attempt(0, "start step log")
    (attempt,) = attempts = attempts_in(tmp_path / "run")
    attempt.records.extend([{"kind": "event", "event": "evaluation", "step": 1, "seconds": 9}] * 2)
    assert [*sum_account_seconds(attempts).values()] == pytest.approx([0, 0.25, 0.75, 0, 2, 0, 0], abs=2e-3)
