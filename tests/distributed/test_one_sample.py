"""A micro-batch of one sample, of which BatchNorm has no variance: known before the first step."""

from unittest import mock

import pytest
import torch
from torch import nn

from ranks import run_ranks
from tasks import TASKS, SmallNet, image_loss
from training import train_flags
from utils.settings.errors import UserError


class Normalized(SmallNet):
    """Its features have no pixels where they are normalized."""

    def __init__(self, norm):
        super().__init__(False, 10)
        self.last = norm

    def forward(self, x):
        return self.head(self.last(self.features(x).flatten(1)))


NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(64),
    "without statistics": lambda: nn.BatchNorm1d(64, track_running_stats=False),
    "1 x 1": lambda: nn.Sequential(nn.Unflatten(1, (64, 1, 1)), nn.BatchNorm2d(64), nn.Flatten()),
    "pixels": lambda: nn.Sequential(nn.Unflatten(1, (16, 2, 2)), nn.BatchNorm2d(16), nn.Flatten()),
    "LayerNorm": lambda: nn.LayerNorm(64),
    "frozen": lambda: Frozen(64),
}
ONE = "A micro-batch of the run has one sample, for which BatchNorm has no variance (Expected more"


class Frozen(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


def starts(cases):
    """What each start says: the error, or the state at the end."""
    outcomes = []
    for norm, words in cases:
        model = {"create_model": lambda config, device, norm=norm: Normalized(NORMS[norm]()).to(device)}
        with mock.patch.dict(TASKS["plain"], model):
            try:
                outcomes.append(train_flags(words, task="plain")["state"])
            except UserError as error:
                outcomes.append(str(error))
    return outcomes


CASES = [  # norm, flags, samples of an epoch, what a start says
    ("BatchNorm1d", "--dataset_size 9", ONE),
    ("without statistics", "--dataset_size 9", ONE),
    ("1 x 1", "--dataset_size 9", ONE),
    ("BatchNorm1d", "--dataset_size 9 --global_batch_size 8", ONE),
    ("BatchNorm1d", "--dataset_size 9 --reduction exact", ONE),
    ("BatchNorm1d", "--dataset_size 9 --max_steps 5", ONE),
    ("BatchNorm1d", "--dataset_size 8 --batch_size 1", ONE),
    ("BatchNorm1d", "--dataset_size 1", ONE),
    ("BatchNorm1d", "--dataset_size 9 --drop_last", "completed"),
    ("BatchNorm1d", "--dataset_size 9 --batch_size 5", "completed"),
    ("BatchNorm1d", "--dataset_size 90 --max_steps 2", "completed"),  # ends before that micro-batch
    ("pixels", "--dataset_size 9", "completed"),
    ("LayerNorm", "--dataset_size 9", "completed"),
    ("frozen", "--dataset_size 9", "completed"),
    ("frozen", "--dataset_size 8 --batch_size 1", "completed"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_norm_that_would_get_one_sample_is_rejected_at_the_start_and_no_other_model(runs, ranks):
    words = [
        (norm, runs.words(f"run{k}", "--epochs", 1, "--num_workers", 0, *flags.split()))
        for k, (norm, flags, _) in enumerate(CASES)
    ]
    for outcomes in run_ranks(ranks, starts, words):
        for text, (norm, flags, expected) in zip(outcomes, CASES, strict=True):
            assert text.startswith(expected) and len(text.splitlines()) == 1, (norm, flags, text)
            if expected != "completed":
                assert ". Use another --batch_size, --drop_last or another normalization." in text
    for k, (*_, expected) in enumerate(CASES):
        assert bool(runs.checkpoints(f"run{k}")) == (expected == "completed")


def penalized(net, batch):
    images = batch[0].detach().requires_grad_(net.training)
    metrics = image_loss(net, (images, batch[1]))
    if not net.training:
        return metrics
    (slope,) = torch.autograd.grad(metrics["loss"][0], images, create_graph=True)
    return metrics | {"loss": (metrics["loss"][0] + slope.square().sum(), len(images))}


def train_penalized(flags):
    with mock.patch.dict(TASKS["plain"], {"compute_loss": penalized}):
        return train_flags(flags, task="plain")["state"]


def test_a_loss_that_needs_gradients_in_training_is_not_rejected(runs):
    words = runs.words("run", *"--dataset_size 9 --epochs 1 --num_workers 0".split())
    assert run_ranks(1, train_penalized, words) == ["completed"]
