"""What a fork may know of the step, on real ranks: equal to the plain loop, and bitwise equal after a resume."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from ranks import slow
from tasks import SmallNet, image_loss, ramped_loss
from test_exact_resume import FLAGS as OF_RESUME
from test_oracle import SGD, check_against_the_oracle
from utils.checkpoint import format as checkpoint
from utils.training.seams import Seams
from utils.training.state import Progress

SEAMS = {"create_model": None, "param_groups": None}
EXACT, SHARDED = ("--reduction", "exact"), ("--sharding", "zero3")


# ---- compute_loss(model, batch, progress) ----


@pytest.mark.parametrize(
    ("ranks", "accumulation", "flags"),
    [(2, 2, ()), (4, 1, SHARDED), slow(4, 1, EXACT), slow(1, 4, ()), slow(4, 1, ())],
)
def test_a_loss_that_knows_the_step_equals_the_plain_loop(runs, ranks, accumulation, flags):
    flags = (*SGD, "--max_steps", "20", *flags)
    check_against_the_oracle(runs, ranks, accumulation, torch.float64, flags, 1e-12, "ramped")
    micro_batches = ranks * accumulation
    per_epoch = -(-11 // micro_batches)
    seen = [divmod(step, per_epoch) for step in range(5)]
    ramps = [s / 20 + 0.5 * epoch + 0.001 * (42 * epoch + 4 * micro_batches * k) for s, (epoch, k) in enumerate(seen)]
    weights = [min(4 * micro_batches, 42 - 4 * micro_batches * k) for _, k in seen]
    expected = sum(ramp * weight for ramp, weight in zip(ramps, weights, strict=True)) / sum(weights)
    assert runs.records("ours", "train")[0]["ramp"] == pytest.approx(expected, rel=1e-12)  # of the first five steps


@pytest.mark.parametrize(("ranks", "flags"), [(2, ("--amp_dtype", "bf16")), slow(2, EXACT), slow(2, SHARDED)])
def test_stops_and_resumes_do_not_change_what_a_loss_knows(runs, ranks, flags):
    """Stops within an epoch; then a resume before the evaluation at an epoch's end, and an evaluation alone."""
    flags = [*OF_RESUME, "--dataset_size", 30 * ranks, *flags]
    runs.train(ranks, "whole", *flags, task="ramped")
    runs.train_with_stops(ranks, "parts", *flags, task="ramped", stops=(1, 3, 6))
    runs.assert_same("whole", "parts")
    runs.train(ranks, "saved", *flags, "--save_every_steps", 1, task="ramped")
    for path in runs.checkpoints("saved"):
        if checkpoint.step_of(path) == 8:
            runs.train(ranks, "late", *flags, "--resume_from", path, task="ramped")
    evaluated = runs.records("whole", "eval")
    assert [record["ramp"] for record in runs.records("late", "eval")] == [record["ramp"] for record in evaluated]
    ramps = [8 / 16 + 0.001 * 30 * ranks, 16 / 16 + 0.5 + 0.001 * 60 * ranks]  # the steps before the evaluation
    assert [record["ramp"] for record in evaluated] == pytest.approx([ramp for ramp in ramps for _ in "ab"])
    runs.train(ranks, "whole", *flags, "--eval_only", "--resume_from", runs.checkpoints("whole")[-1], task="ramped")
    name = f"eval-{runs.checkpoints('whole')[-1].stem}.json"
    assert [each["ramp"] for each in runs.json("whole", name)["records"]] == pytest.approx(ramps[1:] * 2, rel=1e-6)


def test_a_loss_that_does_not_ask_costs_nothing():
    seams = Seams.of(SimpleNamespace(**SEAMS, compute_loss=image_loss))
    assert seams.progress is None and seams.compute_loss is image_loss
    assert Seams.of(SimpleNamespace(**SEAMS, compute_loss=ramped_loss)).progress


class Ramped(SmallNet):
    def forward(self, x, step):
        return super().forward(x) * (1 + step)


@pytest.mark.parametrize(("is_number", "compiled"), [(False, 1), (True, 5)])
def test_a_step_that_is_passed_to_a_compiled_model_compiles_nothing_again(is_number, compiled):
    """A plain number does, in each step."""
    torch.compiler.reset()
    counter, net = CompileCounter(), Ramped(False, 10)
    net.compile(backend=counter, dynamic=False)
    seams = Seams.of(SimpleNamespace(**SEAMS, compute_loss=lambda model, batch, progress: model(batch, progress.step)))
    for step in range(5):
        seams.progress.fill(Progress(step=step), 5)
        batch = torch.randn(2, 3, 8, 8)
        found = net(batch, step) if is_number else seams.compute_loss(net, batch)
        with mock.patch.object(net, "_compiled_call_impl", None):
            torch.testing.assert_close(found, net(batch, torch.tensor(step)))
    assert counter.frame_count == compiled
    torch.compiler.reset()
