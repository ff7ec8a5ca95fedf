"""A step that is skipped for a non-finite loss on rank 1 is recorded once."""

import os
from unittest import mock

import pytest

from ranks import run_ranks
from tasks import TASKS, image_loss
from training import train_flags

FLAGS = "--dataset_size 48 --epochs 1 --save_every_steps 1 --keep_last 99 --record_samples --no-use_amp".split()


def train_with_nan(flags, bad_step):
    passes = []

    def loss(model, batch):
        metrics = image_loss(model, batch)
        loss_sum, count = metrics["loss"]
        passes.append(model.training)
        # two passes run before the first step
        is_bad = model.training and sum(passes) == bad_step + 2 and os.environ["RANK"] == "1"
        return metrics | {"loss": (loss_sum * float("nan") if is_bad else loss_sum, count)}

    with mock.patch.dict(TASKS["images"], {"compute_loss": loss}):
        train_flags(flags)


@pytest.mark.guarantee("not-finite")
def test_a_resume_between_the_skip_and_its_log_point_records_it_once(runs):
    words = runs.words("run", *FLAGS)
    run_ranks(2, train_with_nan, words, 3)
    skips = runs.events("run", "skipped_step")
    assert [record["step"] for record in skips] == [3] and sorted(skips[0]["indices"]) == runs.samples("run")[3]
    run_ranks(2, train_with_nan, [*words, "--resume_from", str(runs.checkpoints("run")[3])], 99)
    assert skips == runs.events("run", "skipped_step") and runs.json("run", "summary.json")["skipped_steps"] == 1
    assert "(1 skipped: non-finite loss or gradient)" in runs.log("run")
    train, *evaluated = runs.records("run", "train") + runs.records("run", "eval")
    assert [entry["loss"] is None for entry in (train, *evaluated)] == [False] * 3 and train["skipped_steps"] == 1
