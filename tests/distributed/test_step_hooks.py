"""What a fork may know of the step, on real ranks: equal to the plain loop, and bitwise equal after a resume."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from ranks import run_ranks, slow
from tasks import TASKS, SmallNet, image_loss, ramped_loss, taught_loss, teach
from test_exact_resume import FLAGS as OF_RESUME
from test_oracle import ADAMW, SGD, check_against_the_oracle
from training import difference, train_flags
from utils.checkpoint import format as checkpoint
from utils.distributed.dtensor import gather_full_tensor
from utils.settings.errors import UserError
from utils.training.hooks import ModelHooks
from utils.training.parts.after_step import AfterStep
from utils.training.schedule import Progress

REQUIRED = {"create_model": None, "param_groups": None}
EXACT, SHARDED = ("--reduction", "exact"), ("--sharding", "zero3")
after_stops = pytest.mark.parametrize(
    ("ranks", "flags"), [(2, ("--amp_dtype", "bf16")), slow(2, EXACT), slow(2, SHARDED)]
)
on_other_ranks = pytest.mark.parametrize(
    ("ranks", "accumulation", "flags"),
    [(2, 2, ()), slow(4, 1, SHARDED), slow(4, 1, EXACT), slow(1, 4, ()), slow(4, 1, ()), slow(4, 2, ())],
)


@pytest.mark.guarantee("step-loss", "after-step", "group-factors", "terms")
@on_other_ranks
def test_what_a_fork_adds_equals_the_plain_loop(runs, ranks, accumulation, flags):
    """A loss of terms with counts of their own that knows the step, a teacher that follows each step, a bound on the
    weights, and a trunk that is trained from the eighth step on. Ranks are idle in short last global batches."""
    peak, per_epoch = 0.4, -(-11 // (ranks * accumulation))
    flags = (*SGD, "--lr", f"{peak}", "--max_steps", "20", "--log_interval", "1", *flags)
    check_against_the_oracle(runs, ranks, accumulation, torch.float64, flags, 1e-12, "joint")
    records, weights = runs.records("ours", "train"), runs.last("ours")["model"]
    places = [(step, *divmod(step, per_epoch)) for step in range(20)]
    seen = [42 * epoch + 4 * ranks * accumulation * k for _, epoch, k in places]
    ramps = [step / 20 + 0.5 * epoch + 0.001 * n for (step, epoch, _), n in zip(places, seen, strict=True)]
    assert [record["ramp"] for record in records] == pytest.approx(ramps, rel=1e-12)
    heads = [peak * 0.5 ** (epoch + step / 20) for step, epoch, _ in places]
    trunks = [peak / 2 * (1 - step / 20) * (step >= 7) for step in range(20)]
    rates = [pytest.approx([head, trunk, trunk]) for head, trunk in zip(heads, trunks, strict=True)]
    assert [record["lr_of_groups"] for record in records] == rates
    largest = [max(head, 2 * trunk) for head, trunk in zip(heads, trunks, strict=True)]
    assert [record["lr"] for record in records] == pytest.approx(largest)  # of --lr
    assert (
        max(gather_full_tensor(value).abs().max() for name, value in weights.items() if name.startswith("student"))
        == 0.3
    )
    assert weights["clock"] == sum(step + 100 * epoch for step, epoch, _ in places)
    for record in records:
        terms = sum(value for name, value in record.items() if name.startswith("loss/"))
        assert record["loss"] == pytest.approx(terms, rel=1e-12)


@pytest.mark.guarantee("step-loss", "after-step", "group-factors", "terms")
@after_stops
def test_stops_and_resumes_do_not_change_what_a_fork_adds(runs, ranks, flags):
    """A loss of terms that knows the step, after_step and lr_factor. Stops within an epoch; then a resume before the
    evaluation at an epoch's end, and an evaluation alone."""
    flags = [*OF_RESUME, "--dataset_size", 30 * ranks, *flags]
    runs.train(ranks, "whole", *flags, task="joint")
    runs.train_with_stops(ranks, "parts", *flags, task="joint", stops=(1, 3, 6))
    runs.assert_same("whole", "parts")
    assert "jumps" not in runs.log("parts")
    runs.train(ranks, "saved", *flags, "--save_every_steps", 1, task="joint")
    for path in runs.checkpoints("saved"):
        if checkpoint.parse_step(path) == 8:
            runs.train(ranks, "late", *flags, "--resume_from", path, task="joint")
    evaluated = runs.records("whole", "eval")
    assert [record["ramp"] for record in runs.records("late", "eval")] == [record["ramp"] for record in evaluated]
    ramps = [8 / 16 + 0.001 * 30 * ranks, 16 / 16 + 0.5 + 0.001 * 60 * ranks]  # the steps before the evaluation
    assert [record["ramp"] for record in evaluated] == pytest.approx([ramp for ramp in ramps for _ in "ab"])
    runs.train(ranks, "whole", *flags, "--eval_only", "--resume_from", runs.folder("whole"), task="joint")
    name = f"eval-{runs.checkpoints('whole')[-1].stem}.json"
    assert [entry["ramp"] for entry in runs.json("whole", name)["records"]] == pytest.approx(ramps[1:] * 2, rel=1e-6)


@pytest.mark.guarantee("step-loss", "after-step")
def test_a_loss_that_does_not_ask_costs_nothing():
    hooks = ModelHooks.from_module(SimpleNamespace(**REQUIRED, compute_loss=image_loss))
    assert hooks.parts == () and hooks.after_step is None and hooks.compute_loss is image_loss
    assert ModelHooks.from_module(SimpleNamespace(**REQUIRED, compute_loss=ramped_loss)).find_part(AfterStep)
    hooks = ModelHooks.from_module(SimpleNamespace(**REQUIRED, compute_loss=image_loss, after_step=teach))
    assert hooks.find_part(AfterStep) and hooks.compute_loss is image_loss


class Ramped(SmallNet):
    def forward(self, x, step):
        return super().forward(x) * (1 + step)


@pytest.mark.guarantee("step-loss")
@pytest.mark.parametrize(("is_number", "compiled"), [(False, 1), (True, 5)])
def test_a_step_that_is_passed_to_a_compiled_model_compiles_nothing_again(is_number, compiled):
    """A plain number does, in each step."""
    torch.compiler.reset()
    counter, net = CompileCounter(), Ramped(False, 10)
    net.compile(backend=counter, dynamic=False)
    hooks = ModelHooks.from_module(
        SimpleNamespace(**REQUIRED, compute_loss=lambda model, batch, progress: model(batch, progress.step))
    )
    for step in range(5):
        hooks.find_part(AfterStep).see_progress(Progress(step=step), 5)
        batch = torch.randn(2, 3, 8, 8)
        actual = net(batch, step) if is_number else hooks.compute_loss(net, batch)
        with mock.patch.object(net, "_compiled_call_impl", None):
            torch.testing.assert_close(actual, net(batch, torch.tensor(step)))
    assert counter.frame_count == compiled
    torch.compiler.reset()


def train_with_a_nan(flags, bad_step):
    """A loss that is NaN in one step, on the last rank."""
    passes = []

    def loss(net, batch):
        metrics = taught_loss(net, batch)
        passes.append(net.training)
        is_bad = net.training and sum(passes) == bad_step + 2 and os.environ["RANK"] == "1"  # after two first passes
        return metrics | {"loss": (metrics["loss"][0] * (float("nan") if is_bad else 1.0), metrics["loss"][1])}

    with mock.patch.dict(TASKS["taught"], compute_loss=loss):
        return train_flags(flags, task="taught")["state"]


@pytest.mark.guarantee("after-step")
def test_a_skipped_step_is_not_taken(runs):
    flags = "--dataset_size 32 --epochs 1 --no-use_amp --save_every_steps 1 --keep_last 99".split()
    assert run_ranks(2, train_with_a_nan, runs.words("run", *flags), 3) == ["completed"] * 2
    assert [event["step"] for event in runs.events("run", "skipped_step")] == [3]
    before, bad = (checkpoint.read_checkpoint(path)[0]["model"] for path in runs.checkpoints("run")[1:3])
    assert difference(before, bad) == [] and runs.last("run")["model"]["clock"] == 0 + 1 + 3


def train_groups(flags, names, factor):
    """The error of a run whose groups have these names."""

    def groups(net, config):
        pairs = zip(names, net.head.parameters(), strict=True)
        return [{"params": [p]} | ({"name": name} if name else {}) for name, p in pairs]

    hooks = {"param_groups": groups, "lr_factor": lambda *_: factor}
    with mock.patch.dict(TASKS["thawing"], hooks), pytest.raises(UserError) as error:
        train_flags(flags, task="thawing")
    return str(error.value)


@pytest.mark.guarantee("group-factors")
@pytest.mark.parametrize(
    ("names", "factor", "expected"),
    [
        (
            ("a", ""),
            {"a": 1.0},
            'lr_factor returned a factor per group, but group 1 has no "name". Add a name in param_groups.',
        ),
        (("a", "b"), {"a": 1.0}, "The group b of lr_factor has no factor. Return one factor for each of a, b."),
        (
            ("a", "a"),
            {"a": 1.0, "c": 1.0},
            "The group c of lr_factor has no trainable parameters in param_groups. Return one factor for each of a.",
        ),
    ],
)
def test_a_factor_without_a_group_or_a_group_without_a_factor_is_named(runs, names, factor, expected):
    flags = runs.words("run", "--dataset_size", 16, "--epochs", 1)
    assert run_ranks(1, train_groups, flags, names, factor) == [expected]


# ---- parameters that a batch does not use ----

UNUSED = ("--find_unused_parameters", "--weight_decay", "0.1")


@pytest.mark.guarantee("unused")
@pytest.mark.parametrize(
    ("ranks", "accumulation", "flags"),
    [slow(4, 1, ADAMW), (2, 2, (*SGD, *EXACT)), slow(2, 2, SGD), slow(4, 2, (*ADAMW, *EXACT)), slow(1, 4, ADAMW)],
)
def test_parameters_that_a_global_batch_does_not_use_are_left_as_in_the_plain_loop(runs, ranks, accumulation, flags):
    """No decay and no momentum in that step; one that a single rank used is updated alike on all."""
    check_against_the_oracle(runs, ranks, accumulation, torch.float64, (*flags, *UNUSED), 1e-12, "experts")
    optimizer = runs.last("ours")["optimizer"]
    states = dict(zip(optimizer["names"], map(optimizer["state"].get, range(len(optimizer["names"]))), strict=True))
    if flags[:4] == ADAMW:  # each has its own count of steps
        steps = {name: int(state["step"]) if state else 0 for name, state in states.items()}
        last = runs.last("ours")["progress"]["step"]
        assert steps["spare.weight"] == 0 and steps["head.weight"] == last
        assert all(0 < steps[f"layers.{k}.weight"] < last for k in range(3)), steps
    assert not [event for event in runs.records("ours", "event") if event["event"] == "buffers_differ"]


@pytest.mark.guarantee("unused")
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "flags"), [(2, ("--optimizer", "adamw")), (3, EXACT)])
def test_stops_and_resumes_do_not_change_what_is_left(runs, ranks, flags):
    flags = [*OF_RESUME, "--dataset_size", 30 * ranks, *flags, *UNUSED]
    runs.train(ranks, "whole", *flags, task="experts")
    runs.train_with_stops(ranks, "parts", *flags, task="experts", stops=(1, 3, 6))
    runs.assert_same("whole", "parts")
