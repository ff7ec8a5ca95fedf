"""--eval_every_steps: evaluations within an epoch leave training as it is, and a resume around them changes nothing."""

import pytest
import torch

from ranks import slow
from training import assert_same_state

FLAGS = "--epochs 2 --ema_decay 0.9 --num_workers 1 --log_interval 3 --lr 0.02 --record_samples --keep_last 99".split()
FLAGS += "--no-use_amp --save_every 0 --eval_every_steps 3".split()
DATA = ["--dataset_size", 61]  # on 2 ranks 8 steps per epoch, the last with a short micro-batch
DUE = [3, 6, 8, 9, 12, 15, 16]  # by steps, and at the end of both epochs
OUTSIDE = ("best_value", "best_epoch", "best_step", "evaluations_since_best", "evaluated_step")  # of training


def evaluated(runs, name):
    return [record["step"] for record in runs.records(name, "eval") if record["weights"] == "ema"]


@pytest.mark.guarantee("evaluation-by-steps")
def test_training_is_the_same_bits_with_and_without_evaluations_within_an_epoch(runs):
    """Batches that a worker has fetched are not lost: the samples and losses of each step are the same."""
    runs.train(2, "few", *FLAGS, *DATA, "--eval_every_steps", 0, "--log_interval", 1)
    runs.train(2, "many", *FLAGS, *DATA, "--eval_batch_size", 3, "--log_interval", 1)
    assert evaluated(runs, "few") == [8, 16] and evaluated(runs, "many") == DUE
    few, many = (
        [{name: record[name] for name in ("step", "loss", "top1", "lr", "grad_norm")} for record in records]
        for records in (runs.records("few", "train"), runs.records("many", "train"))
    )
    assert len(few) == 16 and few == many
    assert len(runs.samples("few")) == 16 and runs.samples("few") == runs.samples("many")
    few, many = runs.last("few"), runs.last("many")
    for payload in (few, many):
        payload["progress"] |= dict.fromkeys(OUTSIDE)
    assert_same_state(few, many)
    few, many = (
        {(record["step"], record["weights"]): record for record in runs.records(name, "eval")}
        for name in ("few", "many")
    )
    for key, record in few.items():  # batches of 3 instead of 4: the order of float32 sums
        assert many[key]["loss"] == pytest.approx(record["loss"], rel=1e-6)
        assert (many[key]["top1"], many[key]["count"]) == (record["top1"], record["count"])
    best = max(value["top1"] for (_, weights), value in many.items() if weights == "ema")
    summary = runs.json("many", "summary.json")
    assert summary["best_value"] == best == summary["best"]["top1"]
    chosen = torch.load(runs.folder("many") / "checkpoints/best.pt", weights_only=True)["progress"]["step"]
    assert chosen in DUE and many[chosen, "ema"]["top1"] == best


@pytest.mark.guarantee("evaluation-by-steps")
@pytest.mark.parametrize(
    ("ranks", "task", "more"),
    [
        (2, "images", ""),
        slow(2, "blocks", "--sharding zero3 --grad_accum_steps 2"),
        slow(4, "images", "--reduction exact"),
        slow(1, "lines", "--grad_accum_steps 2"),
    ],
)
def test_stops_before_at_and_after_an_evaluation_within_an_epoch_change_nothing(runs, ranks, task, more):
    """Evaluations at steps 3 and 6 are due when the run stops there: the resumed run makes them."""
    accumulation = 2 if "accum" in more else 1
    size = 7 * 4 * ranks * accumulation + 5  # 8 steps per epoch
    flags = [*FLAGS, *more.split(), "--dataset_size", size, "--patience", 9]
    runs.train(ranks, "whole", *flags, task=task)
    runs.train_with_stops(ranks, "parts", *flags, task=task, stops=(2, 6, 10, 13))
    # a stop takes effect a step later, but before an evaluation
    assert [record["step"] for record in runs.events("parts", "resumed")] == [3, 6, 11, 14]
    assert evaluated(runs, "whole") == DUE
    runs.assert_same("whole", "parts")


@pytest.mark.guarantee("evaluation-by-steps")
def test_patience_counts_evaluations_within_an_epoch_and_a_resume_from_a_saved_step_repeats_none(runs):
    flags = "--epochs 3 --dataset_size 78 --num_workers 1 --no-use_amp --lr 1e-30 --eval_every_steps 2".split()
    flags += "--save_every_steps 1 --keep_last 99 --best_metric min:loss --log_interval 1 --patience 3".split()
    runs.train(2, "run", *flags, task="plain")
    steps = [record["step"] for record in runs.records("run", "eval")]
    assert runs.json("run", "summary.json")["state"] == "completed" and steps == [2, 4, 6, 8]
    assert "no improvement in 3 evaluations" in runs.log("run")
    for path in runs.checkpoints("run")[3:5]:
        name = f"from_{path.stem}"
        runs.train(2, name, *flags, "--resume_from", path, task="plain")
        assert_same_state(runs.last("run"), runs.last(name))
        first = int(path.stem.removeprefix("step_"))
        assert [record["step"] for record in runs.records(name, "eval")] == [step for step in steps if step >= first]
