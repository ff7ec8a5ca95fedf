"""What a fork may define, on real ranks: counts of a loss, shapes of metrics, schedules, optimizers, fields."""

import contextlib
import json
import os
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import model
from ranks import WarmLaunch, finish, run_ranks
from tasks import TASKS, Images, SmallNet, image_loss
from training import assert_same_state, train_flags
from utils.settings.errors import UserError

FLAGS = "--dataset_size 46 --epochs 2 --no-use_amp --save_every 0".split()


def train_with(flags, **hooks):
    """Train in a rank with these functions instead of the task's; returns the state or the error."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(TASKS["images"], hooks))
        # `using` replaces only existing functions
        for name in hooks.keys() & {"lr_factor", "create_optimizer", "log_images"}:
            stack.enter_context(mock.patch.object(model, name, hooks[name], create=True))
        try:
            return train_flags(flags)["state"]
        except UserError as error:
            return str(error)


def only_odd_steps(flags):
    """Train with all samples of every second global batch ignored."""

    def loss(net, batch):
        metrics = image_loss(net, batch)
        total, count = metrics["loss"]
        is_empty = net.training and bool(batch[1].sum() % 2)
        return metrics | {"loss": (total * (not is_empty), count * (not is_empty))}

    return train_with(flags, compute_loss=loss)


def test_a_global_batch_that_counts_nothing_is_a_skipped_step(runs):
    flags = "--dataset_size 46 --epochs 2 --log_interval 1 --no-use_amp --save_every_steps 1 --keep_last 99".split()
    assert run_ranks(1, only_odd_steps, runs.words("run", *flags)) == ["completed"]
    skipped = runs.events("run", "skipped_step")
    assert {event["reason"] for event in skipped} == {"empty"} and 3 < len(skipped) < 21
    losses = {record["step"]: record["loss"] for record in runs.records("run", "train")}
    assert all((losses[step] is None) == (step in {event["step"] for event in skipped}) for step in losses)


# ---- schedules and optimizers ----


def plateau(config, step, total_steps, warmup_steps, progress):
    """Divides by 10 each time the last evaluation was not the best one; state is in progress.user."""
    user = progress.user
    if progress.evaluations_since_best and user.get("seen") != progress.evaluated_step:
        user["seen"], user["cuts"] = progress.evaluated_step, user.get("cuts", 0) + 1
    return 0.1 ** user.get("cuts", 0)


def train_plateau(flags):
    return train_with(flags, lr_factor=plateau)


def test_a_schedule_that_follows_the_metric_resumes_exactly(runs):
    flags = [*FLAGS[:2], *"--epochs 6 --no-use_amp --lr 0.3 --best_metric max:loss --log_interval 1".split()]
    flags += ["--keep_last", "99"]
    run_ranks(2, train_plateau, runs.words("whole", *flags))
    rates = [record["lr"] for record in runs.records("whole", "train")]
    assert rates[0] == 0.3 and rates[-1] < 0.1 and runs.last("whole")["progress"]["user"]["cuts"] > 0
    middle = runs.checkpoints("whole")[2]
    run_ranks(2, train_plateau, runs.words("resumed", *flags, "--resume_from", middle))
    resumed = [record["lr"] for record in runs.records("resumed", "train")]
    assert resumed == rates[len(rates) - len(resumed) :]
    assert_same_state(runs.last("whole"), runs.last("resumed"))


class Signed(torch.optim.Optimizer):
    """Sign of the momentum, with a rate that falls with a count in the group; does not support found_inf."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + p.grad
                p.sub_(group["lr"] / group["count"] * state["momentum"].sign())


BEFORE = 4  # passes before the first step: two of a full micro-batch, two of the short one


def train_signed(flags, bad_step):
    passes = []

    def loss(net, batch):
        metrics = image_loss(net, batch)
        passes.append(net.training)
        is_bad = net.training and sum(passes) == bad_step + BEFORE and os.environ["RANK"] == "1"
        total, count = metrics["loss"]
        return metrics | {"loss": (total * (float("nan") if is_bad else 1.0), count)}

    hooks = {"create_optimizer": lambda groups, config: Signed(groups, config.lr), "compute_loss": loss}
    return train_with(flags, **hooks)


def test_any_optimizer_trains_skips_and_resumes(runs):
    flags = [*FLAGS, *"--lr 0.001 --save_every_steps 1 --keep_last 99".split()]
    flags += ["--ema_decay", "0.9"]
    assert run_ranks(2, train_signed, runs.words("whole", *flags), 3) == ["completed"] * 2
    assert [event["step"] for event in runs.events("whole", "skipped_step")] == [3]
    before, bad = (torch.load(path, weights_only=True) for path in runs.checkpoints("whole")[1:3])
    assert all(torch.equal(before["model"][name], bad["model"][name]) for name in before["model"])
    assert "Signed, with one read from the device per step" in runs.log("whole")
    first = runs.checkpoints("whole")[4]
    run_ranks(2, train_signed, runs.words("resumed", *flags, "--resume_from", first), 99)
    assert_same_state(runs.last("whole"), runs.last("resumed"))


# ---- configurations that cannot be trained are rejected ----


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Empty(Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError


def lists_twice(net, config):
    return [{"params": [*net.parameters(), net.head.weight]}]


def of_split(wanted, replacement):
    plain = TASKS["images"]["create_dataset"]
    return lambda config, split: replacement if split == wanted else plain(config, split)


def with_table(config, device):
    net = SmallNet(True, 10).to(device)
    net.table = nn.Embedding(3, 4, sparse=True)
    return net


PROBLEMS = {
    "a tensor": ({"compute_loss": lambda net, batch: net(batch[0]).sum()}, "model.compute_loss returned a Tensor. "),
    "stream": ({"create_dataset": of_split("train", Stream())}, "The Stream of create_dataset (train) has no __len__"),
    "empty": (
        {"create_dataset": of_split("val", Empty())},
        "The Empty of create_dataset (val) has no samples. Return None",
    ),
    "twice": (
        {"param_groups": lists_twice},
        "param_groups lists head.weight twice, so the parameter would be updated twice",
    ),
    "closure": (
        {"create_optimizer": lambda groups, config: torch.optim.LBFGS(groups[0]["params"])},
        "LBFGS of create_optimizer needs a closure",
    ),
    "no groups": ({"param_groups": lambda net, config: net.parameters()}, "param_groups returned no list of groups. "),
    "sparse": (
        {"create_model": with_table},
        "table of the model has sparse gradients, which are not supported. Set sparse=False.",
    ),
}


def train_wrongly(flags):
    return [train_with([*flags, "--overwrite"], **hooks) for hooks, _ in PROBLEMS.values()]


def test_a_violated_contract_is_rejected_in_one_sentence(runs):
    for texts in run_ranks(2, train_wrongly, runs.words("run", *FLAGS)):
        for text, (_, expected) in zip(texts, PROBLEMS.values(), strict=True):
            assert text.startswith(expected), text


SHOWN = {  # what log_images returns for a batch: the warning
    "fails": (lambda batch: {}["images"], "KeyError: 'images'"),
    "floats": (
        lambda batch: {"x": batch[0]},
        "TypeError: x is torch.float32 [4, 3, 8, 8] instead of uint8 [B, 3, H, W]",
    ),
    "one": (lambda batch: {"x": batch[0][0].byte()}, "TypeError: x is torch.uint8 [3, 8, 8] instead of uint8"),
    "none": (lambda batch: None, "TypeError: got a NoneType instead of {name: uint8 [B, 3, H, W]}"),
    "array": (lambda batch: {"x": batch[0].byte().numpy()}, "TypeError: x is ndarray instead of uint8 [B, 3, H, W]"),
}


def train_showing(flags, folder):
    """The final states of runs whose log_images fails, one run per case."""
    return [
        train_with([*flags, "--run_dir", f"{folder}/{name}"], log_images=lambda net, batch, shown=shown: shown(batch))
        for name, (shown, _) in SHOWN.items()
    ]


@pytest.mark.slow
def test_images_that_cannot_be_shown_cause_one_warning(runs):
    """One warning for two evaluations, on rank 0 only."""
    for states in run_ranks(2, train_showing, runs.words("run", *FLAGS), runs.root):
        assert states == ["completed"] * len(SHOWN)
    for name, (_, warning) in SHOWN.items():
        assert f"log_images failed ({warning}" in runs.log(name), runs.log(name)
        assert runs.log(name).count("log_images") == 1 and len(runs.records(name, "eval")) == 2


SOMETIMES = """
from torch import nn
plain_model, plain_loss = train.your_model.create_model, train.your_model.compute_loss
calls = []
def create_model(config, device):
    net = plain_model(config, device)
    net.spare = nn.Linear(2, 3)
    return net
def compute_loss(net, batch):
    metrics = plain_loss(net, batch)
    inner = getattr(net, 'module', net)
    calls.append(net.training)
    if net.training and sum(calls) != 5:  # two passes before the first step
        total, count = metrics['loss']
        metrics['loss'] = total + 0 * sum(p.sum() for p in inner.spare.parameters()), count
    return metrics
train.your_model.create_model, train.your_model.compute_loss = create_model, compute_loss
"""


@pytest.mark.guarantee("unused")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_only_some_batches_use_is_named(runs, ranks):
    ended = finish(WarmLaunch(ranks, runs.program(SOMETIMES), runs.words("run", *FLAGS, "--log_interval", 1)), 60)
    assert ended.code == 1 and ended.left == 0
    assert "The model's spare.weight, spare.bias got no gradient in this step, while other batches use it" in ended.text
    assert "Traceback" not in ended.text.replace("traceback :", "")
    assert "parameter indices" not in ended.text.lower()


def test_init_from_and_dataset_size_work_for_any_fork(runs):
    """The task's create_model does not know init_from, its data set does not know subsets."""
    runs.train(1, "first", *FLAGS)
    source = runs.checkpoints("first")[-1]
    runs.train(1, "second", *FLAGS, "--init_from", source, "--max_steps", 1, "--lr", 1e-30)
    first, second = runs.last("first")["model"], runs.last("second")["model"]
    assert all(torch.equal(first[name], second[name]) for name in first if "running" not in name and "num_" not in name)
    assert "tensors were loaded from --init_from" in runs.log("second")
    (state,) = run_ranks(1, train_subset, runs.words("subset", "--dataset_size", 10, "--epochs", 1, "--record_samples"))
    assert state == "completed"
    indices = [index for step in runs.samples("subset").values() for index in step]
    assert sorted(indices) == list(range(10))
    log = json.loads((runs.folder("subset") / "provenance.json").read_text())
    assert log["global_batch_size"] == 4


def test_init_from_refuses_or_warns_before_the_first_step(runs):
    runs.train(1, "first", *FLAGS, "--max_steps", 1)
    content, edited, wrong = runs.last("first"), runs.root / "edited.pt", runs.root / "wrong.pt"
    names = content["provenance"]["classes"]
    content["provenance"]["classes"] = [*reversed(names)]
    torch.save(content, edited)
    torch.save({f"x_{name}": value for name, value in content["model"].items()}, wrong)
    for flags in (["--max_steps", 1], ["--eval_only"]):
        ended = launch(runs, *flags, "--init_from", edited)
        assert ended.code == 0, ended.text
        assert f"--init_from {edited} has no checksum, since another program has saved" in ended.text
        assert f"The first is {names[-1]!r} there and {names[0]!r} here." in ended.text
    ended = launch(runs, "--init_from", wrong, "--overwrite")
    assert ended.code == 2 and "Traceback" not in ended.text
    count = len(content["model"])
    assert (
        f"0 of the {count} tensors of --init_from {wrong} fit the model, which has {count}. Only the file has: x_"
        in ended.text
    )


def launch(runs, *flags):
    return finish(WarmLaunch(0, runs.program(), runs.words("run", *FLAGS, *flags)), 60)


def train_subset(flags):
    def create(config, split):
        return Images(100, split) if split == "train" else None

    return train_with(flags, create_dataset=create)
