"""A best value is kept over a resume only with what it was measured on: the metric, the weights, the validation set."""

from unittest import mock

import pytest

from ranks import run_ranks
from tasks import TASKS, Images
from training import train_flags
from utils.checkpoint import archive

FLAGS = "--dataset_size 40 --epochs 2 --lr 0.02 --schedule constant --no-use_amp --num_workers 0".split()
FLAGS += "--keep_last 2 --patience 9".split()
LONGER = [*FLAGS, "--epochs", "3", "--resume_from", "auto"]
BEST = "The best value so far no longer counts, so the best checkpoint and patience start again."


def data_of(splits, wrong_labels=0, swapped=0):
    """create_dataset with these splits. Of the validation set, some labels are wrong and some images are others."""

    def create(config, split):
        if split != "train" and split not in splits:
            return None
        data = Images(40 if split == "train" else 8, split)
        if split == "val":
            data.labels[:wrong_labels] = (data.labels[:wrong_labels] + 1) % 10
            data.targets = data.labels.tolist()
            data.images[:swapped] = data.images[:swapped].flip(0, 2)
            data.fingerprint = data.targets
        return data

    return create


def loss_of(*names):
    """The compute_loss of the task that reports only these metrics."""
    plain = TASKS["images"]["compute_loss"]

    def compute_loss(net, batch):
        metrics = plain(net, batch)
        return {name: metrics[name] for name in names if name in metrics}  # top5 is of evaluations

    return compute_loss


def train_changed(words, data, metrics):
    functions = {"create_dataset": data_of(**data), "compute_loss": loss_of(*metrics)}
    with mock.patch.dict(TASKS["images"], functions):
        return train_flags(words)


def give_best(runs, is_saved_metric=True, **progress):
    """Let the newest checkpoint have a best value that no evaluation reaches."""
    path, payload = runs.checkpoints("run")[-1], runs.last("run")
    progress = payload["progress"] | progress
    if not is_saved_metric:
        del progress["best_metric"]
    archive.write_archive(path, payload | {"progress": progress})


def test_settings_without_a_validation_set_are_said_at_the_start_and_at_the_end(runs):
    words = runs.words("run", *FLAGS, "--best_metric", "max:nonsense")
    run_ranks(2, train_changed, words, {"splits": []}, ("loss",))
    expected = [
        f"--{setting} has no effect, since there is no validation set. Leave this flag out."
        for setting in ("patience 9", "best_metric max:nonsense")
    ]
    assert runs.json("run", "summary.json")["warnings"] == expected
    assert all(runs.log("run").count(f"WARNING {line}") == 2 for line in expected)


VAL = {"splits": ["val"]}
BOTH = {"splits": ["val", "test"]}
TOP1 = ("loss", "top1")
CASES = {  # data and metrics before and after, more flags, the lines of changes, whether the best value still counts
    "nothing": (VAL, VAL, TOP1, TOP1, [], [], True),
    "labels": (
        *(VAL, VAL | {"wrong_labels": 4}, TOP1, TOP1, []),
        ["The val set differs from the checkpoint's in names, number or labels."],
        False,
    ),
    "images": (
        *(VAL, VAL | {"swapped": 4}, TOP1, TOP1, []),
        ["The val set has samples that differ from the checkpoint's: 4 of 8 compared ones."],
        False,
    ),  # extra: sketches
    "val is gone": (
        *(VAL, {"splits": []}, TOP1, TOP1, []),
        ["The val set is gone, although the checkpoint was made with one."],
        False,
    ),
    "val is new": (
        *({"splits": []}, VAL, TOP1, TOP1, []),
        ["The val set is new, since the checkpoint was made without one."],
        False,
    ),
    "test is gone": (
        *(BOTH, VAL, TOP1, TOP1, []),
        ["The test set is gone, although the checkpoint was made with one."],
        True,
    ),
    "test is new": (
        VAL,
        BOTH,
        TOP1,
        TOP1,
        [],
        ["The test set is new, since the checkpoint was made without one."],
        True,
    ),
    "top1 is gone": (
        *(VAL, VAL, TOP1, ("loss",), []),
        ["The best checkpoint is selected by min:loss, but in the checkpoint by max:top1."],
        False,
    ),
    "top1 is new": (
        *(VAL, VAL, ("loss",), TOP1, []),
        ["The best checkpoint is selected by max:top1, but in the checkpoint by min:loss."],
        False,
    ),
    "top1 by its name": (
        *(VAL, VAL, TOP1, TOP1, ["--best_metric", "max:top1"]),
        ["--best_metric is max:top1, but the checkpoint has --best_metric auto."],
        True,
    ),
    "the other direction": (
        *(VAL, VAL, TOP1, TOP1, ["--best_metric", "min:top1"]),
        [
            "--best_metric is min:top1, but the checkpoint has --best_metric auto.",
            "The best checkpoint is selected by min:top1, but in the checkpoint by max:top1.",
        ],
        False,
    ),
    "averaged weights": (
        *(VAL, VAL, TOP1, TOP1, ["--ema_decay", "0.9"]),
        ["--ema_decay is 0.9, but the checkpoint has --ema_decay 0.0."],
        False,
    ),
    "a metric that was not asked for": (VAL, VAL, (*TOP1, "top5"), TOP1, [], [], True),
}


@pytest.mark.guarantee("changed-settings")
@pytest.mark.parametrize("case", CASES)
def test_a_best_value_counts_only_if_it_was_measured_on_the_same(runs, case):
    before, current, metrics, metrics_here, flags, changes, is_kept = CASES[case]
    run_ranks(2, train_changed, runs.words("run", *FLAGS), before, metrics)
    is_loss = "top1" not in metrics
    unbeatable = -9.0 if is_loss else 9.0
    has_best = "val" in before["splits"]
    if has_best:
        saved = runs.last("run")["progress"]
        assert saved["best_metric"] == ("min:loss" if is_loss else "max:top1")
        give_best(runs, best_value=unbeatable, evaluations_since_best=5)
    run_ranks(2, train_changed, runs.words("run", *LONGER, *flags), current, metrics_here)
    [resumed] = runs.events("run", "resumed")
    lines = ["--epochs is 3, but the checkpoint has --epochs 2.", *changes]
    if has_best and not is_kept:
        lines.append(BEST)
    assert sorted(resumed["changed"]) == sorted(lines)
    log = runs.log("run")
    assert all(f"WARNING changed: {line}" in log for line in lines)
    progress, summary = runs.last("run")["progress"], runs.json("run", "summary.json")
    if is_kept:
        assert summary["best_value"] == unbeatable and progress["evaluations_since_best"] > 5
    elif "val" in current["splits"]:
        assert abs(summary["best_value"]) < 9 and progress["evaluations_since_best"] < 3
        assert summary["best"] and (runs.folder("run") / "checkpoints" / "best.pt").exists()
    else:
        assert summary["best_value"] is None
    if has_best and not is_kept:  # nothing that was saved is lost
        assert [*runs.folder("run").glob("superseded-2/step_*.pt")]


@pytest.mark.guarantee("changed-settings")
@pytest.mark.parametrize(
    ("metric", "asked_here", "is_kept"),
    [("auto", "auto", False), ("max:top1", "max:top1", True), ("top1", "top1", True), ("top1", "max:top1", False)],
)
def test_a_checkpoint_without_the_metrics_name_keeps_the_best_value_if_it_was_named(runs, metric, asked_here, is_kept):
    run_ranks(2, train_changed, runs.words("run", *FLAGS, "--best_metric", metric), VAL, TOP1)
    give_best(runs, is_saved_metric=False, best_value=9.0)
    run_ranks(2, train_changed, runs.words("run", *LONGER, "--best_metric", asked_here), VAL, TOP1)
    assert (runs.json("run", "summary.json")["best_value"] == 9.0) is is_kept
    assert (BEST in runs.events("run", "resumed")[0]["changed"]) is not is_kept


STEPS = [*FLAGS, "--eval_every_steps", "3", "--save_every_steps", "3", "--max_steps"]


@pytest.mark.guarantee("changed-settings", "records-once")
def test_an_evaluation_that_is_due_at_the_step_is_made_again_and_no_other_record_is_lost(runs):
    """The first run ends at step 6, whose evaluation is due again. The second one ends with an epoch."""
    run_ranks(2, train_changed, runs.words("run", *STEPS, 6, "--best_metric", "max:top1"), VAL, TOP1)
    before = runs.records("run", "eval")
    words = runs.words("run", *STEPS, 9, "--best_metric", "min:loss", "--resume_from", "auto")
    run_ranks(2, train_changed, words, VAL | {"wrong_labels": 4}, TOP1)
    after = runs.records("run", "eval")
    assert [record["step"] for record in after] == [3, 5, 6, 9]
    assert after[:2] == before[:2] and after[2]["loss"] != before[2]["loss"]  # with the labels of this run
    saved = runs.last("run")["progress"]
    assert saved["best_step"] >= 6 and saved["best_metric"] == "min:loss"


@pytest.mark.guarantee("changed-settings", "records-once")
def test_the_records_of_an_evaluation_that_is_not_due_again_are_kept(runs):
    flags = [*FLAGS, "--save_every", "9", "--patience", "1"]
    run_ranks(2, train_changed, runs.words("run", *flags, "--epochs", "6", "--lr", "1e-9"), VAL, TOP1)
    before = [record["step"] for record in runs.records("run", "eval")]
    longer = runs.words("run", *flags, "--patience", 9, "--epochs", 8, "--best_metric", "min:loss")
    run_ranks(2, train_changed, [*longer, "--resume_from", "auto"], VAL, TOP1)
    after = [record["step"] for record in runs.records("run", "eval")]
    assert after[: len(before)] == before and after == sorted(set(after))
