"""A gradient that is not finite on one rank: all ranks skip the step alike, at the first step too, and training continues."""

import os
from unittest import mock

import pytest
import torch

import train
from ranks import run_ranks
from tasks import TASKS, image_loss
from training import difference, train_flags

FLAGS = "--dataset_size 48 --epochs 1 --ema_decay 0.9 --save_every_steps 1 --keep_last 99 --record_samples".split()
SGD, ADAMW = "--no-use_amp", "--optimizer adamw --lr 0.001"


def train_with_nan(flags, bad_step):
    """Rank 1's loss is not a number in one step. Returns this rank's weights in the end."""
    plain_create, kept, passes = train.create_state, [], []

    def create(*args):
        kept.append(plain_create(*args))
        return kept[0]

    def loss(model, batch):
        loss_sum, metrics = image_loss(model, batch)
        passes.append(model.training)
        is_bad = model.training and sum(passes) == bad_step + 2 and os.environ["RANK"] == "1"  # two passes come before the first step
        return (loss_sum * float("nan") if is_bad else loss_sum), metrics

    with mock.patch.object(train, "create_state", create), mock.patch.dict(TASKS["images"], {"compute_loss": loss}):
        train_flags(flags)
    return {name: value.numpy() for name, value in kept[0].model.state_dict().items()}


@pytest.mark.parametrize(
    ("bad_step", "flags"), [(3, SGD), (1, ADAMW), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, SGD), (3, ADAMW)))]
)
def test_all_ranks_skip_the_step_and_agree_after_it(runs, bad_step, flags):
    words = runs.words("run", *FLAGS, *flags.split())
    ranks = run_ranks(2, train_with_nan, words, bad_step)
    assert all((ranks[0][name] == ranks[1][name]).all() for name in ranks[0])
    assert all(torch.tensor(value).isfinite().all() for value in ranks[0].values())
    saved = [torch.load(path, weights_only=True) for path in runs.checkpoints("run")]
    assert len(saved) == 6
    if bad_step > 1:
        before, after = ({**each, "optimizer": each["optimizer"]["state"]} for each in saved[bad_step - 2 : bad_step])
        assert [difference(before[key], after[key]) for key in ("model", "ema", "optimizer")] == [[]] * 3
    assert runs.json("run", "summary.json")["skipped_steps"] == 1
    assert "(1 of them skipped, their loss or gradient was not finite)" in runs.log("run")
    skips = runs.events("run", "skipped_step")
    assert [record["step"] for record in skips] == [bad_step] and sorted(skips[0]["indices"]) == runs.samples("run")[bad_step]
    if bad_step == 3:  # a resume from between the skip and its log point says it once more, and once
        run_ranks(2, train_with_nan, [*words, "--resume_from", str(runs.checkpoints("run")[3])], 99)
        assert skips == runs.events("run", "skipped_step")
    assert runs.records("run", "train")[0]["loss"] is None  # the interval's loss says it; the others are numbers
    assert runs.records("run", "train")[-1]["loss"] is not None and runs.records("run", "eval")[-1]["loss"] is not None
