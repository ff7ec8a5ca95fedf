# extra: template
"""The fields of the built-in model and data, which a fork may delete."""

import pytest

from config import TrainingConfig
from ranks import run_ranks
from test_config import rejection
from test_hooks import FLAGS, train_with


def test_the_published_names_exist():
    assert {"num_classes", "in_channels", "image_size"} <= TrainingConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--crop_scale 0.5,1.5",
            "--crop_scale must be two numbers above 0 and up to 1, the smaller one first, such as 1/2,1, got",
        ),  # extra: images
        ("--crop_scale 0,1", "--crop_scale must be two numbers above 0 and up to 1,"),  # extra: images
        ("--crop_ratio 4/3,3/4", "--crop_ratio must be two numbers above 0 and up to 100,"),  # extra: images
        ("--crop_ratio 1/0,1", "--crop_ratio must be two numbers above 0 and up to 100,"),  # extra: images
        ("--crop_ratio 1", "--crop_ratio must be two numbers above 0 and up to 100,"),  # extra: images
        ("--random_erase 1.1", "--random_erase must be from 0 to 1, got 1.1."),  # extra: images
        ("--num_classes many", '--num_classes must be an integer or "auto", got "many".'),
        ("--dataset cifar", "Did you mean cifar10?"),
    ],
)
def test_each_problem_is_one_line_of_whole_sentences(capsys, flags, expected):
    text = rejection(capsys, *flags.split())
    assert expected in text and len(text.splitlines()) == 1 and "; " not in text


def train_smoothed(flags):
    return train_with(flags, lr_factor=lambda config, *_: config.label_smoothing)


def test_a_field_may_be_read_by_the_schedule_alone(runs):
    words = runs.words("run", *FLAGS, "--label_smoothing", 0.1, "--lr", 2.0, "--log_interval", 1)
    assert run_ranks(2, train_smoothed, words) == ["completed"] * 2
    assert {record["lr"] for record in runs.records("run", "train")} == {0.2}
