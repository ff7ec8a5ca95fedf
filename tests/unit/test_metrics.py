"""Metrics: sums and counts, added up over ranks, each read once."""

import math

import pytest
import torch

from config import UserError
from utils.metrics import MetricTracker, all_reduce_scalar, choose_best, compute_accuracy, count_correct

LOGITS = torch.tensor([[3.0, 1, 2], [1, 2, 3], [3, 2, 1], [1, 3, 2]])
LABELS = torch.tensor([0, 1, 0, 0])


def test_accuracy_is_a_fraction_and_correct_ones_are_counted():
    assert compute_accuracy(LOGITS, LABELS).item() == 0.5
    assert compute_accuracy(LOGITS, LABELS, k=2).item() == 0.75
    assert count_correct(LOGITS, LABELS).item() == 2
    assert count_correct(LOGITS, LABELS, k=5).item() == 4  # more than there are classes


def test_means_weigh_unequal_batches_by_their_counts():
    tracker = MetricTracker()
    tracker.update({"loss": (torch.tensor(6.0), 3), "hits": (torch.tensor(2), torch.tensor(3))})
    tracker.update({"loss": (torch.tensor(2.0), 1), "hits": (1, torch.tensor(1))})
    assert tracker.means() == {"loss": 2.0, "hits": 0.75}


def test_a_function_of_the_mean_is_applied_when_it_is_read():
    tracker = MetricTracker()
    for nll, tokens in ((4.0, 2), (2.0, 4)):
        tracker.update({"perplexity": (torch.tensor(nll), tokens, math.exp)})
    assert tracker.means() == {"perplexity": math.exp(1.0)}
    tracker.update({"perplexity": (1e6, 0)})
    assert tracker.means() == {"perplexity": math.inf}


def test_means_over_ranks_and_a_name_without_a_count():
    first, second = MetricTracker(), MetricTracker()
    first.update({"loss": (torch.tensor(6.0), 4.0)})
    second.update({"loss": (torch.tensor(2.0), 0.0)})
    assert first.means([first.totals(), second.totals()]) == {"loss": 2.0}
    assert math.isnan(second.means()["loss"])


@pytest.mark.parametrize(
    ("asked", "names", "expected"),
    [
        ("auto", ["loss", "top1", "top5"], ("top1", 1)),
        ("auto", ["loss", "perplexity"], ("loss", -1)),
        ("top5", ["loss", "top5"], ("top5", 1)),
        ("loss", ["loss"], ("loss", -1)),
        ("min:perplexity", ["loss", "perplexity"], ("perplexity", -1)),
        ("max:loss", ["loss"], ("loss", 1)),
    ],
)
def test_what_the_best_checkpoint_is_chosen_by(asked, names, expected):
    assert choose_best(asked, names) == expected


def test_an_unknown_metric_is_rejected_with_the_known_ones():
    with pytest.raises(UserError, match="best_metric=f1: an evaluation reports loss, top1; choose one of these"):
        choose_best("f1", ["loss", "top1"])


def test_all_reduce_scalar_in_one_process_is_the_value_and_an_unknown_operation_is_rejected():
    assert all_reduce_scalar(4.0) == 4.0
    with pytest.raises(ValueError, match="op=median: is not known; choose mean, sum, min, max"):
        all_reduce_scalar(1.0, "median")


def test_the_function_of_a_metric_outlives_the_interval_it_was_reported_in():
    tracker = MetricTracker()
    tracker.update({"perplexity": (2.0, 2, math.exp)})
    tracker.reset()
    tracker.add_state({"numbers": {"perplexity/sum": 3.0, "perplexity/count": 1}, "tensors": {}})
    assert tracker.means() == {"perplexity": math.exp(3.0)}
