"""An error that only the short last micro-batch has is known before the first step, of training and of evaluation."""

from unittest import mock

import pytest
import torch

from plain_loop import plain_loop
from ranks import run_ranks, slow
from tasks import BUCKETS, TASKS, Images, SmallNet, config_of, image_loss, using
from training import relative, train_flags
from utils.data.sampler import GlobalBatchSampler
from utils.logger import error_text

FLAGS = "--epochs 2 --num_workers 0 --batch_size 4 --log_interval 1 --no-use_amp".split()


def third(net, batch):
    """The third sample is taken for granted."""
    metrics = image_loss(net, batch)
    return metrics | {"third": (batch[1][2], 1)}


def third_in(training):
    return lambda net, batch: (third if net.training == training else image_loss)(net, batch)


def other_metrics(net, batch):
    metrics = image_loss(net, batch)
    return metrics | ({"extra": (1.0, 1)} if len(batch[1]) < 4 else {})


def other_shape(net, batch):
    return image_loss(net, batch) | {"per_sample": (torch.zeros(len(batch[1])), 1)}


class LeavesOutFeatures(SmallNet):
    def forward(self, x):
        return super().forward(x) if len(x) > 2 else self.head(x.flatten(1)[:, :64])


class ThirdCollate(Images):
    def collate(self, batch):
        images, labels = batch
        return images, labels + 0 * labels[2]


def create_third(config, split):
    return ThirdCollate(config.dataset_size if split == "train" else 8, split) if split != "test" else None


FUNCTIONS = {
    "always": {"compute_loss": third},
    "training": {"compute_loss": third_in(True)},
    "evaluation": {"compute_loss": third_in(False)},
    "metrics": {"compute_loss": other_metrics},
    "shapes": {"compute_loss": other_shape},
    "gradient": {"create_model": lambda config, device: LeavesOutFeatures(False, 10).to(device)},
    "collate": {"create_dataset": create_third},
}
SMALLEST = "The smallest micro-batch has {}. Use another --batch_size or --drop_last if that is too few."
IN_EVALUATION = "The smallest micro-batch has 1 sample. Use another --eval_batch_size if that is too few."
CASES = [  # what fails, flags, what the start says ("completed": nothing)
    ("always", "--dataset_size 22", SMALLEST.format("2 samples")),
    ("always", "--dataset_size 17", SMALLEST.format("1 sample")),
    ("always", "--dataset_size 17 --max_steps 99 --epochs 9", SMALLEST.format("1 sample")),
    ("training", "--dataset_size 22", SMALLEST.format("2 samples")),
    ("training", "--dataset_size 22 --grad_accum_steps 2", SMALLEST.format("2 samples")),
    ("training", "--dataset_size 22 --drop_last", "completed"),
    ("training", "--dataset_size 24", "completed"),
    ("training", "--dataset_size 23", "completed"),
    ("training", "--dataset_size 66 --max_steps 2", "completed"),  # ends before that micro-batch
    ("evaluation", "--dataset_size 20", "completed"),
    ("evaluation", "--dataset_size 20 --eval_batch_size 3", IN_EVALUATION),
    ("metrics", "--dataset_size 22", SMALLEST.format("2 samples")),
    ("shapes", "--dataset_size 22", SMALLEST.format("2 samples")),
    ("gradient", "--dataset_size 22", SMALLEST.format("2 samples")),
    ("gradient", "--dataset_size 22 --find_unused_parameters", "completed"),
    ("collate", "--dataset_size 22", SMALLEST.format("2 samples")),
    ("collate", "--dataset_size 24", "completed"),
]


def starts(cases):
    """What each start says: the error with its notes, or the state at the end."""
    outcomes = []
    for functions, words in cases:
        with mock.patch.dict(TASKS["plain"], FUNCTIONS[functions]):
            try:
                outcomes.append(train_flags(words, task="plain")["state"])
            except Exception as error:
                outcomes.append(error_text(error))
    return outcomes


@pytest.mark.guarantee("smallest")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_the_smallest_micro_batch_ends_the_start(runs, ranks):
    words = [(name, runs.words(f"run{k}", *FLAGS, *flags.split())) for k, (name, flags, _) in enumerate(CASES)]
    for outcomes in run_ranks(ranks, starts, words):
        for text, case in zip(outcomes, CASES, strict=True):
            assert case[-1] in text, (case, text)
    for k, (*_, expected) in enumerate(CASES):
        assert bool(runs.checkpoints(f"run{k}")) == (expected == "completed")


def train_unchecked(words, task):
    with mock.patch.object(GlobalBatchSampler, "find_smallest_micro_batch", lambda *_: []):
        train_flags(words, task=task)


@pytest.mark.guarantee("smallest")
@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("images", ""),
        slow("images", "--amp_dtype fp16 --use_amp"),
        ("images", "--sharding zero3"),  # extra: sharding
        ("terms", ""),
        slow("moved", ""),
        slow("taught", ""),
    ],
)
def test_the_smallest_micro_batch_changes_no_bit_of_a_run(runs, task, flags):
    """With BatchNorm and dropout."""
    words = [*FLAGS, "--dataset_size", "17", *flags.split()]
    runs.train(2, "checked", *words, task=task)
    run_ranks(2, train_unchecked, runs.words("unchecked", *BUCKETS, *words), task)
    runs.assert_same("checked", "unchecked")


@pytest.mark.guarantee("smallest")
def test_no_pass_before_the_first_step_moves_a_buffer(runs):
    """On one rank, since a buffer that depends on a rank's own samples differs between ranks.

    1e-12 allows for rounding: the backward pass of the run begins at a scaled loss.
    """
    words = [*FLAGS, "--dataset_size", "17"]
    runs.train(1, "ours", *words, task="moved", dtype=torch.float64)
    with using("moved"):
        *_, (model, *_) = plain_loop(config_of(runs.words("ours", *words), torch.float64), 1)
    assert relative(runs.last("ours")["model"], model.state_dict()) < 1e-12
