"""A loss of several terms, each divided by its own count over the global batch: equal to the plain loop on any number
of ranks."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ranks import run_ranks, slow
from tasks import TASKS, Images, SmallNet, image_loss, term_counts, term_loss
from training import assert_same_state, train_flags
from utils.example.augment import normalize
from utils.metrics import check_metrics
from utils.settings.errors import UserError
from utils.training.hooks import ModelHooks


@pytest.mark.guarantee("terms")
@pytest.mark.parametrize("worlds", [(1, 3), slow((1, 2, 4))])
def test_exact_sums_give_terms_the_same_bits_on_any_number_of_ranks(runs, worlds):
    """Counts that are no integers, so that the order of their sum matters: in float64, where that changes weights."""
    flags = "--dataset_size 46 --epochs 2 --num_workers 1 --no-use_amp --lr 0.02 --log_interval 1".split()
    flags += "--global_batch_size 24 --reduction exact".split()
    flags += ["--ema_decay", "0.5"]
    for ranks in worlds:
        assert run_ranks(ranks, train_shares, runs.words(f"on{ranks}", *flags)) == ["completed"] * ranks
    for ranks in worlds[1:]:
        assert_same_state(runs.last(f"on{worlds[0]}"), runs.last(f"on{ranks}"))
        assert runs.records(f"on{worlds[0]}", "eval") == runs.records(f"on{ranks}", "eval")


def train_shares(flags):
    """Counts as if a class were worth a part of its number."""

    def share_counts(batch):
        return {name: count / 7.1 for name, count in term_counts(batch).items()}

    def share_loss(net, batch):
        metrics = term_loss(net, batch)
        terms = {name: (total, count / 7.1, weight) for name, (total, count, weight) in metrics["loss"].items()}
        return metrics | {"loss": terms}

    with mock.patch.dict(TASKS["terms"], compute_loss=share_loss, loss_counts=share_counts):
        return train_flags(flags, torch.float64, "terms")["state"]


@pytest.mark.guarantee("terms")
def test_an_evaluation_divides_the_sums_over_the_set_for_each_term(runs):
    """9 validation samples in 3 micro-batches, one of them alone in the second step."""
    flags = "--dataset_size 42 --epochs 1 --no-use_amp --num_workers 1 --best_metric min:loss/rare".split()
    runs.train(2, "run", *flags, task="terms")
    [record], payload, data = runs.records("run", "eval"), runs.last("run"), Images(9, "val")
    net = SmallNet(True, 10).eval()
    net.load_state_dict(payload["model"])
    images = normalize(data.images, data.mean, data.std)
    terms = term_loss(net, (images, data.labels))["loss"]
    expected = {f"loss/{name}": (weight * total / count).item() for name, (total, count, weight) in terms.items()}
    expected["loss"] = sum(expected.values())
    assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert record["count"] == 9 and runs.json("run", "summary.json")["best_value"] == record["loss/rare"]


def change(batch, name, factor):
    counts = term_counts(batch)
    return counts | {name: counts[name] * factor}


BROKEN = {  # functions of model.py, and the error
    "lies": (
        {"loss_counts": lambda batch: change(batch, "classes", 2)},
        "loss_counts counts 20 for classes, and compute_loss counts 10,",
    ),
    "lies later": (
        {"loss_counts": lambda batch: change(batch, "size", 2 if 7 in batch[1] else 1)},
        "for size, and compute_loss",
    ),
    "no counts": (
        {"loss_counts": None},
        "compute_loss returned a loss of several terms, for which model.py must define",
    ),
    "no terms": ({"compute_loss": image_loss}, "compute_loss returned no terms, but model.py has loss_counts. Return"),
    "bare sums": (
        {"compute_loss": lambda net, batch: {"loss": {"classes": net(batch[0]).sum()}}},
        "compute_loss returned no terms, but model.py has loss_counts. Return",
    ),
    "other terms": (
        {"loss_counts": lambda batch: {"rare": 1}},
        "The loss has the terms rare, and had earlier classes, rare, size.",
    ),
}


def train_broken(flags, case):
    changed = {**TASKS["terms"], **BROKEN[case][0]}
    with mock.patch.dict(TASKS, terms={name: value for name, value in changed.items() if value}):
        with pytest.raises(UserError) as error:
            train_flags(flags, task="terms")
        return str(error.value)


@pytest.mark.guarantee("terms")
@pytest.mark.parametrize("case", BROKEN)
def test_a_count_that_lies_and_missing_terms_are_errors(runs, case):
    """The first batch is checked before the first step, and every step before its record and its checkpoint."""
    flags = runs.words("run", "--dataset_size", 40, "--epochs", 1, "--save_every_steps", 1)
    errors = run_ranks(2 if "later" in case else 1, train_broken, flags, case)
    assert all(BROKEN[case][1] in error for error in errors), errors
    if "later" in case:
        assert len(set(errors)) == 1 and runs.checkpoints("run") == []


@pytest.mark.guarantee("terms")
def test_a_loss_without_terms_costs_nothing():
    required = {"create_model": None, "param_groups": None}
    hooks = ModelHooks.from_module(SimpleNamespace(**required, compute_loss=image_loss))
    assert hooks.parts == () and hooks.compute_loss is image_loss


@pytest.mark.parametrize(
    ("total", "count", "problem"),
    [(torch.ones(2), 1, "whose sum is not a 0-dimensional"), (torch.ones(()), -1, "with a count of -1")],
)
def test_sums_and_counts_of_terms_are_checked(total, count, problem):
    required = {"create_model": None, "param_groups": None, "loss_counts": lambda batch: {"a": count}}
    hooks = ModelHooks.from_module(
        SimpleNamespace(**required, compute_loss=lambda *_: {"loss": {"a": (total, count, 1.0)}})
    )
    with pytest.raises(UserError, match=problem):
        check_metrics(hooks.compute_loss(None, None))
