"""A gradient that is not finite on one rank: all ranks skip the step alike, at the first step too, and go on."""

import pytest
import torch

import train
from config import TrainingConfig
from ranks import run_ranks
from training import TINY, difference

FLAGS = [
    *TINY,
    "--dataset_size",
    "48",
    "--epochs",
    "1",
    "--ema_decay",
    "0.9",
    "--save_every_steps",
    "1",
    "--keep_last",
    "99",
    "--record_samples",
]
STATE = ("model", "ema", "optimizer")


def train_with_nan(folder, flags, bad_step):
    """Rank 1's loss is not a number in one step."""
    plain, steps = train.compute_loss, []

    def loss(model, batch):
        loss_sum, metrics = plain(model, batch)
        if model.training and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            steps.append(1)
            is_bad = len(steps) == bad_step + 2 and torch.distributed.get_rank() == 1  # two passes come before the first step
            loss_sum = loss_sum * float("nan") if is_bad else loss_sum
        return loss_sum, metrics

    train.compute_loss = loss
    train.train(TrainingConfig.from_args([*FLAGS, *flags, "--run_dir", folder]))
    model = {name: value.numpy() for name, value in kept[0].model.state_dict().items()}
    return model


kept = []


def train_and_keep(folder, flags, bad_step):
    plain = train.create_state

    def keep(*args):
        kept.append(plain(*args))
        return kept[0]

    train.create_state = keep
    return train_with_nan(folder, flags, bad_step)


@pytest.mark.parametrize("bad_step", [1, 3])
@pytest.mark.parametrize("flags", [["--no-use_amp"], ["--optimizer", "adamw", "--lr", "0.001"]], ids=["sgd", "adamw bf16"])
def test_all_ranks_skip_the_step_and_agree_after_it(runs, bad_step, flags):
    ranks = run_ranks(2, train_and_keep, str(runs.folder("run")), flags, bad_step)
    assert all((ranks[0][name] == ranks[1][name]).all() for name in ranks[0])
    assert all(torch.tensor(value).isfinite().all() for value in ranks[0].values())
    saved = {path.name: torch.load(path, weights_only=True) for path in runs.checkpoints("run")}
    assert len(saved) == 6
    if bad_step > 1:
        before, after = (saved[f"step_{step:08d}.pt"] for step in (bad_step - 1, bad_step))
        state = {key: before[key] if key != "optimizer" else before[key]["state"] for key in STATE}
        state_after = {key: after[key] if key != "optimizer" else after[key]["state"] for key in STATE}
        assert difference(state, state_after) == []
    assert runs.json("run", "summary.json")["skipped_steps"] == 1
    assert "(1 of them skipped, their loss or gradient was not finite)" in (runs.folder("run") / "logs" / "rank0.log").read_text()
    skips = [record for record in runs.records("run", "event") if record["event"] == "skipped_step"]
    assert [record["step"] for record in skips] == [bad_step] and sorted(skips[0]["indices"]) == runs.samples("run")[bad_step]
    if bad_step == 3:  # a resume from between the skip and its log point says it once more, and once
        path = runs.folder("run") / "checkpoints" / "step_00000004.pt"
        run_ranks(2, train_and_keep, str(runs.folder("run")), [*flags, "--resume_from", str(path)], 99)
        assert skips == [record for record in runs.records("run", "event") if record["event"] == "skipped_step"]
    assert runs.records("run", "train")[0]["loss"] is None  # the interval's loss says it; the others are numbers
    assert runs.records("run", "train")[-1]["loss"] is not None and runs.records("run", "eval")[-1]["loss"] is not None
