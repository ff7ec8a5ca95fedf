# extra: template
"""A run that ends without an error, although it has not learned or measured what was asked for, says so."""

from unittest import mock

import pytest
from torch.nn import functional as F

from ranks import run_ranks
from tasks import TASKS, Images
from training import train_flags

FLAGS = "--dataset_size 24 --epochs 2 --batch_size 4 --no-use_amp --lr 0.01 --log_interval 1".split()


def train_odd(flags, odd, value=float("nan"), count=1, more=None):
    """Train on images in which those of these numbers, by split, are black: each of their losses is `value` and counts
    as `count`. more: other metrics."""

    def create(config, split):
        if split == "test":
            return None
        data = Images(24, split, augment="none")
        data.images[odd.get(split, [])] = 0
        return data

    def loss(net, batch):
        is_odd = (batch[0] == batch[0].min()).flatten(1).all(1)  # black, normalized
        losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
        total = losses[~is_odd].sum() + (losses[is_odd] * value).sum()
        samples = (~is_odd).sum() + count * is_odd.sum()
        return {"loss": (total, samples), "top1": (0, len(batch[1])), **(more or {})}

    with mock.patch.dict(TASKS["images"], {"compute_loss": loss, "create_dataset": create}):
        return train_flags(flags)


@pytest.mark.guarantee("no-silence")
@pytest.mark.parametrize(("ranks", "flags"), [(1, ""), (2, "--reduction exact"), (2, "--grad_accum_steps 2")])
def test_an_evaluation_whose_loss_is_not_finite_is_a_warning(runs, ranks, flags):
    run_ranks(ranks, train_odd, runs.words("run", *FLAGS, *flags.split()), {"val": [13, 14]})
    lines = [line for line in runs.log("run").splitlines() if "The loss of the evaluation of val is nan" in line]
    assert len(lines) == 2 and all("WARNING" in line for line in lines), lines
    assert [record["loss"] for record in runs.records("run", "eval")] == [None, None]


@pytest.mark.guarantee("no-silence")
@pytest.mark.parametrize("interval", [2, 3, 6])
def test_the_loss_of_an_interval_is_that_of_its_finite_steps_and_skipped_ones_are_counted(runs, interval):
    flags = [*FLAGS, "--global_batch_size", "8", "--save_every_steps", "1", "--keep_last", "99"]
    run_ranks(1, train_odd, runs.words("steps", *flags), {"train": [5]})
    run_ranks(2, train_odd, runs.words("run", *flags, "--log_interval", interval), {"train": [5]})
    by_step = {record["step"]: record for record in runs.records("steps", "train")}
    skips = [event["step"] for event in runs.events("run", "skipped_step")]
    assert len(skips) == 2 and len(by_step) == 6
    for record in runs.records("run", "train"):
        steps = range(record["step"] - interval + 1, record["step"] + 1)
        losses = [by_step[step]["loss"] for step in steps if step not in skips]
        assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)  # another order of sums
        number = len({*steps} & {*skips})
        assert record.get("skipped_steps", 0) == number
        assert f"loss {record['loss']:.4f}{f' ({number} skipped)' * bool(number)} | " in runs.log("run")
    # a resume in the middle of an interval counts the steps before it, too
    before = counted(runs)
    words = [*flags, "--log_interval", interval, "--resume_from", runs.checkpoints("run")[-2]]
    run_ranks(2, train_odd, runs.words("run", *words), {"train": [5]})
    assert counted(runs) == before


def counted(runs):
    return [(record["step"], record["loss"], record.get("skipped_steps")) for record in runs.records("run", "train")]


@pytest.mark.guarantee("no-silence")
def test_training_without_targets_is_said_and_in_the_summary(runs):
    everything = {"train": list(range(24)), "val": list(range(24))}
    run_ranks(2, train_odd, runs.words("run", *FLAGS, "--patience", "0"), everything, 0.0, 0)
    log, summary = runs.log("run"), runs.json("run", "summary.json")
    assert "| loss without targets" in log and "The run skipped 1 optimizer step without targets: 1." in log
    assert "(6 skipped: without targets)" in log and "non-finite" not in log
    assert summary["warnings"] == [
        "All steps were without targets, so nothing was learned. Label the samples.",
        "These metrics were not finite in any evaluation: loss.",
        "--best_metric top1 was never finite, so there is no best.pt.",
    ]
    assert all(any(line in text and "WARNING" in text for text in log.splitlines()) for line in summary["warnings"])


def test_too_many_steps_without_targets_end_the_run_as_such(runs):
    words = runs.words("run", *FLAGS, "--max_skipped_steps", "3")
    with pytest.raises(AssertionError, match="The last 3 optimizer steps, up to step 3, had no targets. Look"):
        run_ranks(1, train_odd, words, {"train": list(range(24))}, 0.0, 0)


@pytest.mark.guarantee("no-silence")
def test_metrics_that_were_never_finite_are_named(runs):
    more = {"auc": (float("nan"), 1), "rmse": (1.0, 2)}
    run_ranks(1, train_odd, runs.words("run", *FLAGS, "--best_metric", "max:auc"), {}, 1.0, 1, more)
    expected = [
        "These metrics were not finite in any evaluation: auc.",
        "--best_metric auc was never finite, so there is no best.pt.",
    ]
    assert runs.json("run", "summary.json")["warnings"] == expected
    run_ranks(1, train_odd, runs.words("fine", *FLAGS, "--best_metric", "min:rmse"), {}, 1.0, 1, {"rmse": (1.0, 2)})
    assert "warnings" not in runs.json("fine", "summary.json")


@pytest.mark.guarantee("no-silence")
@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--warmup_epochs 100", "has 600 steps, but the run has 12, so the run ends at 2.0% of the learning rate"),
        ("--warmup_steps 13", "has 13 steps, but the run has 12, so the run ends at 92.3% of the learning rate"),
        ("--warmup_steps 13 --schedule_steps 20", ""),  # a part of a longer schedule
        ("--warmup_steps 12", ""),
        (
            "--warmup_epochs 1 --max_steps 5",
            "has 6 steps, but the run has 5, so the run ends at 83.3% of the learning rate",
        ),
    ],
)
def test_a_run_that_ends_within_its_warm_up_is_a_warning_at_the_start_and_at_the_end(runs, flags, warning):
    run_ranks(1, train_odd, runs.words("run", *FLAGS, *flags.split()), {})
    expected = [f"The warm-up {warning}. Use fewer --warmup_epochs."] * bool(warning)
    lines = [line for line in runs.log("run").splitlines() if "warm-up" in line]
    assert [line.partition("WARNING ")[2] for line in lines] == 2 * expected
    assert runs.json("run", "summary.json").get("warnings", []) == expected
