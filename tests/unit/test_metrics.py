"""Metrics: sums and counts, added over ranks, each read once."""

import math

import pytest
import torch

from utils.metrics import (
    MetricTracker,
    all_reduce_scalar,
    check_metrics,
    choose_best_metric,
    compute_accuracy,
    count_correct,
)
from utils.settings.errors import UserError

LOGITS = torch.tensor([[3.0, 1, 2], [1, 2, 3], [3, 2, 1], [1, 3, 2]])
LABELS = torch.tensor([0, 1, 0, 0])


def test_mixed_labels_count_by_their_largest_share_and_other_tensors_of_two_dimensions_are_rejected():
    shares = torch.eye(3)[LABELS] * 0.7 + 0.1
    assert count_correct(LOGITS, shares).item() == count_correct(LOGITS, LABELS).item() == 2
    assert count_correct(LOGITS, shares, k=5).item() == 4
    for wrong in (shares[:, :2], shares.long(), torch.ones(4, 4)):
        with pytest.raises(UserError, match=r"count_correct got targets .* for logits .*\. Give classes, int64 \[B\]"):
            count_correct(LOGITS, wrong)


def test_accuracy_is_a_fraction_and_count_correct_a_count():
    assert compute_accuracy(LOGITS, LABELS).item() == 0.5
    assert compute_accuracy(LOGITS, LABELS, k=2).item() == 0.75
    assert count_correct(LOGITS, LABELS).item() == 2
    assert count_correct(LOGITS, LABELS, k=5).item() == 4  # k above the number of classes


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
    tracker.update({"perplexity": (1e6, 0, math.exp)})
    assert tracker.means() == {"perplexity": math.inf}


def test_a_metric_that_counted_nothing_is_nan():
    tracker = MetricTracker()
    tracker.update({"loss": (torch.tensor(2.0), 0.0), "perplexity": (0.0, 0, math.log)})
    assert all(map(math.isnan, tracker.means().values()))


def test_a_function_maps_sums_and_counts_of_any_shape_to_one_or_several_numbers():
    tracker = MetricTracker()
    hits, union = torch.tensor([1, 0, 0]), torch.tensor([2, 4, 0])  # three classes, the last one without a pixel
    for _ in range(2):
        metrics = {"miou": (hits, union, lambda iou: iou.nanmean())}
        metrics["recall"] = (hits, union, lambda values: {"first": values[0], "last": values[2]})
        metrics["confusion"] = (torch.eye(2), 2, lambda matrix: {"00": matrix[0, 0], "01": matrix[0, 1]})
        tracker.update(metrics)
    means = tracker.means()
    assert means.pop("recall/last") != means.get("recall/last")  # NaN
    assert means == {"miou": 0.25, "recall/first": 0.5, "confusion/00": 0.5, "confusion/01": 0.0}


def test_a_metric_that_is_not_scalar_and_has_no_function_is_rejected():
    tracker = MetricTracker()
    tracker.update({"recall": (torch.ones(3), torch.ones(3))})
    with pytest.raises(
        UserError, match=r"recall of model.compute_loss has the shape \[3\]\. Give this metric a third entry"
    ):
        tracker.means()


def test_changed_names_or_shapes_are_rejected():
    tracker = MetricTracker()
    tracker.update({"loss": (1.0, 1), "miou": (torch.ones(3), torch.ones(3))})
    for other in ({"loss": (1.0, 1)}, {"loss": (1.0, 1), "miou": (torch.ones(2), torch.ones(2))}, {"top1": (1, 1)}):
        with pytest.raises(
            UserError, match="model.compute_loss returned metrics of names and shapes .*. Return the same"
        ):
            tracker.update(other)


LOSS = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (LOSS, "returned a Tensor"),
        (1.5, "returned a float"),
        ((LOSS, {"top1": (1, 2)}), "returned a tuple"),
        ({"top1": (1, 2)}, "returned no loss"),
        ({"loss": LOSS}, "returned no .sum, count. or .sum, count, function. for loss"),
        ({"loss": (LOSS, 2), "top1": 0.5}, "returned no .sum, count. or .sum, count, function. for top1"),
        ({"loss": (LOSS, 2), "top1": (1, 2, 3)}, "returned no .sum, count. or .sum, count, function. for top1"),
        ({"loss": (LOSS, 2), "lr": (1, 2)}, "returned a metric named 'lr', which is not allowed"),
        ({"loss": (LOSS, 2), "loss/a": (1, 2)}, "returned a metric named 'loss/a', which is not allowed"),
        ({"loss": (LOSS, 2), "/a": (1, 2)}, "returned a metric named '/a', which is not allowed"),
        ({"loss": (LOSS, 2), "a//b": (1, 2)}, "returned a metric named 'a//b', which is not allowed"),
        ({"loss": (LOSS, 2), "a/": (1, 2)}, "returned a metric named 'a/', which is not allowed"),
        ({"loss": (LOSS, 2), "a/../b": (1, 2)}, "returned a metric named 'a/../b', which is not allowed"),
        ({"loss": (LOSS, 2), "": (1, 2)}, "returned a metric named '', which is not allowed"),
        ({"loss": (LOSS, 2), 3: (1, 2)}, "returned a metric named 3, which is not allowed"),
        ({"loss": (torch.ones(2), 2)}, "returned a loss whose sum is not a 0-dimensional float tensor"),
        ({"loss": (LOSS, float("nan"))}, "returned a loss with a count of nan"),
        ({"loss": (LOSS, torch.ones(2))}, "returned a loss whose count is not one number"),
    ],
)
def test_anything_but_a_dict_of_sums_and_counts_is_rejected(returned, problem):
    with pytest.raises(UserError, match=f"model.compute_loss {problem}.*. Return sums and their counts, e.g. "):
        check_metrics(returned)


@pytest.mark.parametrize(
    "name", ["rewards/margins", "eval/f1/macro", "a/step", "losses/a", "a/sum", "a/count", "a b/c"]
)
def test_a_metric_may_have_a_slash_in_its_name(name):
    metrics = {"loss": (LOSS, 2), "a": (3.0, 2), name: (1.0, 2)}
    tracker = MetricTracker()
    for _ in range(2):
        tracker.update(check_metrics(metrics))
    assert tracker.means() == {"loss": 0.5, "a": 1.5, name: 0.5}
    copied = MetricTracker()
    copied.allocate(metrics)
    copied.load_state(tracker.state())
    assert copied.means() == tracker.means() and choose_best_metric(f"max:{name}", [*tracker.means()]) == (name, 1)


@pytest.mark.parametrize("is_first", [True, False])
def test_two_metrics_of_one_name_are_refused(is_first):
    recall = {"recall": (torch.ones(2), torch.ones(2), lambda values: {"cat": values[0], "dog": values[1]})}
    dog = {"recall/dog": (1.0, 2)}
    tracker = MetricTracker()
    tracker.update({"loss": (LOSS, 2)} | (dog | recall if is_first else recall | dog))
    with pytest.raises(UserError, match="reports two metrics as recall/dog. Rename one of the two."):
        tracker.means()


@pytest.mark.parametrize(
    ("requested", "names", "expected"),
    [
        ("auto", ["loss", "top1", "top5"], ("top1", 1)),
        ("auto", ["loss", "perplexity"], ("loss", -1)),
        ("accuracy", ["loss", "accuracy"], ("accuracy", 1)),
        ("top5", ["loss", "top5"], ("top5", 1)),
        ("loss", ["loss"], ("loss", -1)),
        ("min:perplexity", ["loss", "perplexity"], ("perplexity", -1)),
        ("max:loss", ["loss"], ("loss", 1)),
    ],
)
def test_the_metric_and_direction_that_select_the_best_checkpoint(requested, names, expected):
    assert choose_best_metric(requested, names) == expected


def test_a_metric_of_unknown_direction_needs_min_or_max():
    with pytest.raises(UserError, match="--best_metric rmse needs a direction. Give min:rmse or max:rmse."):
        choose_best_metric("rmse", ["loss", "rmse"])


def test_all_reduce_scalar_in_one_process_is_the_value_and_an_unknown_operation_is_rejected():
    assert all_reduce_scalar(4.0) == 4.0
    with pytest.raises(ValueError, match="op must be one of mean, sum, min, max, got median."):
        all_reduce_scalar(1.0, "median")


def test_loading_state_restores_what_fits_and_keeps_the_functions():
    tracker, other = MetricTracker(), MetricTracker()
    metrics = {"perplexity": (2.0, 2, math.exp), "recall": (torch.ones(2), torch.ones(2), torch.mean)}
    tracker.update(metrics), other.update(metrics | {"recall": (torch.ones(3), torch.ones(3), torch.mean)})
    state = {name: value.clone() for name, value in tracker.state().items()}
    tracker.values.zero_()
    tracker.load_state(state), other.load_state(state)
    assert tracker.means() == {"perplexity": math.exp(1.0), "recall": 1.0}
    assert other.means()["perplexity"] == math.exp(1.0) and math.isnan(other.means()["recall"])
