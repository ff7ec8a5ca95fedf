"""Checkpoints and configs of the version before, with settings that this version no longer has."""

import json

import pytest

from ranks import run_ranks
from training import train_flags
from utils.checkpoint import archive

FLAGS = "--dataset_size 40 --no-use_amp --lr 0.02 --record_samples --num_workers 0 --save_every 0".split()


def give(runs, name, **settings):
    """Let the newest checkpoint and config.json of a run have these settings."""
    path, payload = runs.checkpoints(name)[-1], runs.last(name)
    archive.write_archive(path, payload | {"config": payload["config"] | settings})
    file = runs.folder(name) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def files_of(runs, name):
    """What a refused start must leave as it is."""
    kept = [path for path in runs.folder(name).rglob("*") if path.is_file() and path.suffix not in (".log", "")]
    return {path: path.read_bytes() for path in kept if path.name != "lock.json"}


def error_of(words):
    with pytest.raises(ValueError) as raised:
        train_flags(words)
    return str(raised.value)


@pytest.mark.guarantee("changed-settings")
def test_a_run_whose_length_came_from_minutes_goes_on_with_max_steps(runs):
    runs.train(2, "whole", *FLAGS, "--max_steps", "8")
    runs.train_with_stops(2, "run", *FLAGS, "--max_steps", "8", stops=(4,), goes_on=False)
    give(runs, "run", minutes=0.02)
    before = files_of(runs, "run")
    errors = run_ranks(2, error_of, runs.words("run", *FLAGS, "--resume_from", "auto"))
    message = "The run of --resume_from was started with --minutes 0.02, which was removed. Add --max_steps 8."
    assert errors == [message] * 2 and files_of(runs, "run") == before
    runs.train(2, "run", *FLAGS, "--max_steps", "8", "--resume_from", "auto")
    runs.assert_same("whole", "run")
    [resumed] = runs.events("run", "resumed")
    message = "minutes=0.02 of the checkpoint is ignored, since minutes was removed. max_steps is used."
    assert resumed["changed"] == [message]
