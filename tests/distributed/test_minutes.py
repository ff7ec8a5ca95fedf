"""--minutes measures steps, sets max_steps, and starts at step 0: the run is the one that its config.json defines."""

import pytest

from ranks import WarmLaunch, finish

FLAGS = "--minutes 0.01 --dataset_size 61 --lr 0.02 --log_interval 3 --record_samples --save_every 0".split()


def repeat(runs, ranks, name, task):
    """Train again with the settings that a run has written. Their bits must be equal."""
    runs.train(ranks, "again", "--config", runs.folder(name) / "config.json", "--log_interval", 3, task=task)
    runs.assert_same(name, "again")


@pytest.mark.guarantee("minutes")
@pytest.mark.parametrize(
    ("ranks", "task", "flags"),
    [
        (1, "images", "--amp_dtype bf16"),
        (2, "images", "--num_workers 1 --grad_accum_steps 2 --clip_grad_norm 1"),
        (2, "images", "--optimizer adamw --amp_dtype fp16"),
        (2, "images", "--ema_decay 0.9 --optimizer adamw"),  # extra: average
        (3, "experts", "--find_unused_parameters"),
        (2, "joint", "--schedule wsd"),  # extra: steps and terms
        (2, "lines", "--reduction exact"),  # extra: exact
        (2, "blocks", "--sharding zero3 --optimizer adamw"),  # extra: sharding
    ],
)
def test_a_run_of_some_minutes_is_repeated_from_its_config(runs, ranks, task, flags):
    runs.train(ranks, "timed", *FLAGS, *flags.split(), task=task)
    config = runs.json("timed", "config.json")
    assert config["minutes"] == 0.01 and config["max_steps"] == runs.last("timed")["progress"]["step"] > 3
    assert config["epochs"] == "auto" and f"so max_steps={config['max_steps']}" in runs.log("timed")
    repeat(runs, ranks, "timed", task)


@pytest.mark.guarantee("minutes")
def test_a_resume_keeps_the_number_of_steps(runs):
    """Three attempts with one command; then the command of the completed run again, and with twice the time."""
    runs.train_with_stops(2, "timed", *FLAGS, stops=(2, 5))
    steps = runs.json("timed", "config.json")["max_steps"]
    assert runs.last("timed")["progress"]["step"] == steps and runs.log("timed").count("so max_steps=") == 1
    repeat(runs, 2, "timed", "images")
    resumed = [*FLAGS, "--resume_from", "auto"]
    assert runs.train(2, "timed", *resumed)[0] == {"state": "completed"}
    runs.train(2, "timed", *resumed, "--minutes", "0.02")
    assert runs.last("timed")["progress"]["step"] == runs.json("timed", "config.json")["max_steps"] == 2 * steps


def test_another_run_is_measured_again_and_one_without_minutes_is_refused(runs):
    runs.train(1, "timed", *FLAGS)
    file = runs.folder("timed") / "config.json"
    runs.train(1, "longer", "--config", file, "--minutes", "0.02")
    assert "so max_steps=" in runs.log("longer")
    runs.train(1, "plain", *FLAGS[2:], "--epochs", 1)
    with pytest.raises(AssertionError, match="was started without it; give --max_steps instead"):
        runs.train(1, "plain", *FLAGS, "--resume_from", "auto")
    runs.train(1, "both", *FLAGS, "--dataset_size", 8, "--epochs", 1)  # the smaller limit; several epochs are measured
    assert runs.last("both")["progress"]["step"] == 2


BROKEN = """
import line_tasks
plain = line_tasks.Lines.__getitem__
def getitem(self, index):
    if index > 3 and len(self) == 40:  # not in the first passes, nor in an evaluation
        raise ValueError('a broken line')
    return plain(self, index)
line_tasks.Lines.__getitem__ = getitem
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_fails_while_steps_are_measured_ends_the_run_with_its_cause(runs, workers):
    words = runs.words("run", *FLAGS, "--dataset_size", 40, "--num_workers", workers)
    ended = finish(WarmLaunch(2, runs.program(BROKEN, task="lines"), words))
    status = runs.json("run", "status.json")
    assert ended.code == 1 and ended.left == 0, ended.text
    assert (status["state"], status["step"]) == ("failed", 0) and "a broken line" in status["error"], status
