"""Metrics of a whole set: `summarize` gets what `predict` gave for each sample once, in order, on rank 0."""

import contextlib
from unittest import mock

import pytest
import torch

import model
from ranks import run_ranks, slow
from tasks import TASKS, SmallNet, create_images
from training import train_flags
from utils.settings.errors import UserError
from utils.training.parts import summary as parts_summary

FLAGS = "--dataset_size 46 --epochs 2 --num_workers 1 --no-use_amp --lr 0.02 --log_interval 1".split()
FLAGS += ["--ema_decay", "0.5"]
FLAGS += "--eval_every_steps 2 --global_batch_size 16 --reduction exact --best_metric max:auc --keep_last 99".split()


def scores(net, batch):
    assert not (torch.is_grad_enabled() or net.training)
    return {"score": net(batch[0]).softmax(1)[:, 0], "label": batch[1]}


def summarize(outputs):
    """The AUC of the first class, and a number that depends on the order."""
    score, label = outputs["score"], outputs["label"]
    assert score.device.type == "cpu"
    pairs = score[label == 0][:, None] > score[label != 0]
    return {"auc": pairs.double().mean(), "in_order": (score.double() * torch.arange(len(score))).sum()}


def train_summarizing(flags, task="images", **hooks):
    """Train in a rank with these functions; returns the state or the error."""
    with contextlib.ExitStack() as stack:
        for name, function in hooks.items():
            stack.enter_context(mock.patch.object(model, name, function, create=True))
        try:
            outcome = train_flags(flags, task=task)
            return outcome.get("state", outcome)
        except UserError as error:
            return str(error)


def train_scores(flags):
    return train_summarizing(flags, predict=scores, summarize=summarize)


@pytest.mark.guarantee("summary")
@pytest.mark.parametrize(("worlds", "reduction"), [((1, 2), "exact"), slow((3,), "fast"), slow((1, 3, 4), "exact")])
def test_a_summary_is_that_of_the_whole_set_in_order_and_the_same_bits_on_any_number_of_ranks(runs, worlds, reduction):
    """10 validation samples in 4 micro-batches: on 3 ranks, two ranks have padding in the second step."""
    flags = [*FLAGS, "--best_metric", "max:in_order", "--eval_batch_size", 3, "--reduction", reduction]
    for ranks in worlds:
        assert set(run_ranks(ranks, train_scores, runs.words(f"on{ranks}", *flags))) == {"completed"}
    last = f"on{worlds[-1]}"
    first = runs.records(f"on{worlds[0]}", "eval")
    assert [record["step"] for record in first] == [2, 2, 3, 3, 4, 4, 6, 6]
    assert all(runs.records(f"on{ranks}", "eval") == first for ranks in worlds)
    payload = runs.last(last)
    data = create_images(mock.Mock(dataset_size=46), "val")
    net = SmallNet(True, 10).eval()
    for record in first[-2:]:
        net.load_state_dict(payload["ema" if record["weights"] == "ema" else "model"])
        with torch.no_grad():
            batches = [data.__getitems__([*range(k, min(k + 3, 10))]) for k in (0, 3, 6, 9)]
            parts = [scores(net, data.device_transform(batch, 42, 0, None)) for batch in batches]
        expected = summarize({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        assert {name: record[name] for name in expected} == {name: value.item() for name, value in expected.items()}
    summary, chosen = runs.json(last, "summary.json"), [r["in_order"] for r in first if r["weights"] == "ema"]
    assert (summary["best_metric"], summary["best_value"]) == ("in_order", max(chosen)) and len(set(chosen)) > 1
    run_ranks(worlds[-1], train_scores, runs.words(last, *flags, "--eval_only"))
    evaluations = runs.json(last, "eval-best.json")["records"]
    assert evaluations[-1]["in_order"] == max(chosen)


def tokens(net, lines):
    return {"loss": net(lines.clamp(min=0)).logsumexp(2)}  # its length depends on the batch


def train_tokens(flags):
    lengths = lambda outputs: {"sum": sum(row.double().sum() for row in outputs["loss"]), "n": len(outputs["loss"])}  # noqa: E731
    return train_summarizing(flags, task="blocks", predict=tokens, summarize=lengths)


@pytest.mark.guarantee("summary")
def test_a_sharded_model_is_summarized_as_any_other(runs):
    """7 samples; outputs of different lengths are a list of rows."""
    flags = "--dataset_size 16 --epochs 1 --no-use_amp --optimizer adamw --best_metric max:sum".split()
    for name, more in {"whole": [], "sharded": ["--sharding", "zero3"]}.items():
        assert run_ranks(2, train_tokens, runs.words(name, *flags, *more)) == ["completed"] * 2
    whole, sharded = (runs.records(name, "eval")[-1] for name in ("whole", "sharded"))
    assert sharded["sum"] == pytest.approx(whole["sum"], rel=1e-5) and whole["n"] == sharded["n"] == 7


def fails(outputs):
    raise ValueError("only one class")


def growing(net, batch):
    """Returns little for the first batch."""
    outputs = scores(net, batch)
    width = 1 if batch[1][0] == 0 else 100
    return outputs | {"score": outputs["score"][:, None].expand(-1, width)}


def late(outputs):
    """Returns other names for a whole set than for the batch before the first step."""
    return {"auc" if len(outputs["score"]) <= 4 else "roc": 1.0}


PROBLEMS = {
    "error": (
        fails,
        "summarize failed (ValueError: only one class). Before the first step, summarize gets a single batch.",
    ),
    "no dict": (lambda outputs: 0.5, "summarize failed (AttributeError: "),
    "text": (lambda outputs: {"auc": "high"}, "summarize failed (ValueError: "),
    "name": (lambda outputs: {"count": 1}, "summarize returned a number named 'count', which is not allowed"),
    "term": (lambda outputs: {"loss/a": 1}, "summarize returned a number named 'loss/a', which is not allowed"),
    "both": (lambda outputs: {"auc": 1, "loss": 1}, "summarize and compute_loss both report loss. Rename one"),
    "late": (late, "--best_metric auc is missing in this evaluation. Report this metric in each evaluation."),
    "size": (
        summarize,
        "The outputs of the set for summarize of model.py take 1.12e-07 GiB or more on rank 0, where the limit",
    ),
    "total": (
        lambda outputs: {"auc": 1},
        "The outputs of the set for summarize of model.py take 2.32e-06 GiB or more on rank 0, where",
    ),
    "unknown": (lambda outputs: {"roc": 1}, "--best_metric must be a metric that evaluations report ("),
}


LIMITS = {"size": 100, "total": 2000}  # bytes: of the set, estimated from a batch; of the set, but not of a rank


def train_wrongly(flags, folder):
    outcomes = []
    for name, (function, _) in PROBLEMS.items():
        hooks = {"predict": growing if name == "total" else scores, "summarize": function}
        with mock.patch.object(parts_summary, "MAX_OUTPUT_BYTES", LIMITS.get(name, 2**30)):
            outcomes.append(train_summarizing([*flags, "--run_dir", f"{folder}/{name}"], **hooks))
    return outcomes


@pytest.mark.guarantee("summary")
def test_a_summary_that_cannot_be_used_is_rejected_in_one_sentence(runs):
    for texts in run_ranks(2, train_wrongly, runs.words("run", *FLAGS), runs.root):
        for text, (_, expected) in zip(texts, PROBLEMS.values(), strict=True):
            assert text.removeprefix("model.").startswith(expected), text
    begun = [name for name in PROBLEMS if (runs.folder(name) / "metrics.jsonl").exists()]
    assert begun == ["both", "late", "total"]  # the others are rejected before the first step


def train_without(flags):
    calls = []

    def count(net, batch):
        calls.append(batch)
        return scores(net, batch)

    return train_summarizing([*flags, "--best_metric", "auto"], predict=count), len(calls)


@pytest.mark.guarantee("summary")
def test_without_summarize_an_evaluation_makes_one_pass(runs):
    assert run_ranks(2, train_without, runs.words("run", *FLAGS)) == [("completed", 0)] * 2
    assert TASKS["images"].keys().isdisjoint({"predict", "summarize"})
