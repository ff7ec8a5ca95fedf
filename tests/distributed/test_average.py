"""Averages of 16-bit weights are float32: updates are not rounded away, and the model's own weights are not either."""

import contextlib
import copy
import io
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from ranks import run_ranks, slow
from scripts import export, predict
from tasks import TASKS, train_task, using
from test_exact_resume import FLAGS
from utils.checkpoint import format as checkpoint
from utils.training.parts.weight_average import WeightAverage
from utils.training.schedule import Progress

WIDE = {torch.float64: torch.float64, torch.float32: torch.float32}  # others: float32
WIDE |= {torch.bfloat16: torch.float32, torch.float16: torch.float32}
TAKEN = torch.ones(())


class Net(nn.Module):
    """With a tied weight, a view of a weight, a view of a buffer, an integer and a mask beside the weights."""

    def __init__(self, dtype):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.two.weight = self.one.weight
        self.to(dtype)
        self.register_buffer("view", torch.arange(12, dtype=dtype).view(3, 4)[:, ::2])
        self.register_buffer("rows", self.one.weight.detach()[1:])
        self.register_buffer("mask", torch.tensor([True, False]))


def change(net, generator):
    """As a training step, whose updates are smaller than the spacing of 16-bit numbers."""
    with torch.no_grad():
        for value in {value.data_ptr(): value for value in net.state_dict().values()}.values():
            if value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=generator).to(value.dtype), alpha=0.01)
        net.norm.num_batches_tracked += 1


@pytest.mark.guarantee("weights")
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_average_equals_that_of_wide_copies_of_the_weights(dtype):
    torch.manual_seed(0)
    net, generator = Net(dtype), torch.Generator().manual_seed(1)
    average = WeightAverage(net, 0.99)
    expected = {name: value.to(WIDE[dtype]) for name, value in net.state_dict().items() if value.is_floating_point()}
    for number in range(40):
        change(net, generator)
        average.update(TAKEN)
        rate = (9 / (9 + torch.tensor(number, dtype=torch.float64))).clamp(min=1.0 - 0.99).to(WIDE[dtype])
        weights = net.state_dict()
        expected = {name: old + (weights[name].to(WIDE[dtype]) - old) * rate for name, old in expected.items()}
    state = average.state_dict()
    assert state.keys() == net.state_dict().keys()
    assert all(torch.equal(state[name], value) and state[name].dtype is WIDE[dtype] for name, value in expected.items())
    assert state["norm.num_batches_tracked"].item() == 40 and torch.equal(state["mask"], net.mask)


@pytest.mark.guarantee("weights")
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_an_average_goes_as_far_as_its_decay_says(dtype):
    """After 2,000 updates that follow the warm-up, of a decay of 0.999: 1 - 0.999 ** 2000 = 86.5 %."""
    net = nn.Linear(1, 1, bias=False).to(dtype)
    average = WeightAverage(net, 0.999)
    with torch.no_grad():
        net.weight.fill_(1.0)
        average.update(TAKEN)
        average.after_load({"ema": average.state_dict()}, Progress(step=9000))
        net.weight.fill_(2.0)
    for _ in range(2000):
        average.update(TAKEN)
    assert average.state_dict()["weight"].item() == pytest.approx(2 - 0.999**2000, abs=1e-4)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_a_swap_rounds_neither_the_weights_nor_the_average(dtype):
    net, generator = Net(dtype), torch.Generator().manual_seed(1)
    average = WeightAverage(net, 0.99)
    for _ in range(20):
        change(net, generator)
        average.update(TAKEN)
    weights, averages = copy.deepcopy(net.state_dict()), copy.deepcopy(average.state_dict())
    for _ in range(2):
        with average.swap_weights():
            shown = net.state_dict()
            assert all(torch.equal(shown[name], averages[name].to(value.dtype)) for name, value in weights.items())
            assert all(shown[name].dtype is value.dtype for name, value in weights.items())
        assert all(torch.equal(net.state_dict()[name], value) for name, value in weights.items())
        assert all(torch.equal(average.state_dict()[name], value) for name, value in averages.items())
    with pytest.raises(ValueError), average.swap_weights():
        raise ValueError
    assert all(torch.equal(average.state_dict()[name], value) for name, value in averages.items())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("stored", WIDE, ids=str)
def test_averages_of_another_dtype_are_loaded(dtype, stored):
    """Those of checkpoints from before, which have the dtype of the weights."""
    net = Net(dtype)
    state = {name: value.to(stored) if value.is_floating_point() else value for name, value in net.state_dict().items()}
    state["norm.weight"] = torch.full((3,), 0.25, dtype=stored)
    average = WeightAverage(net, 0.9)
    average.load_state_dict(state)
    loaded = average.state_dict()["norm.weight"]
    assert loaded.dtype is WIDE[dtype] and loaded.tolist() == [0.25] * 3


SIXTEEN = [*FLAGS, "--no-use_amp", "--optimizer", "adamw"]


@pytest.mark.guarantee("resume")
@pytest.mark.parametrize(
    ("dtype", "flags"),
    [
        (torch.bfloat16, ""),
        (torch.bfloat16, "--sharding zero3"),  # extra: sharding
        slow(torch.float16, ""),
        slow(torch.bfloat16, "--sharding zero2"),  # extra: sharding
    ],
)
def test_a_resumed_run_of_a_16_bit_model_equals_the_uninterrupted_one(runs, dtype, flags):
    flags = [*SIXTEEN, "--dataset_size", 60, *flags.split()]
    runs.train(2, "whole", *flags, dtype=dtype, task="blocks")
    runs.train_with_stops(2, "parts", *flags, dtype=dtype, task="blocks", stops=(1, 3, 6))
    runs.assert_same("whole", "parts")
    saved = runs.last("whole")
    assert {value.dtype for value in saved["model"].values()} == {dtype}
    assert {value.dtype for value in saved["ema"].values()} == {torch.float32}
    rounded = [torch.equal(value, value.to(dtype).float()) for value in saved["ema"].values()]
    assert not any(rounded) and {record["weights"] for record in runs.records("whole", "eval")} == {"model", "ema"}


def resume_with_rounded_averages(words, path):
    """Resume from a checkpoint as earlier versions wrote it. Returns the final state of the run."""
    plain = checkpoint.read_checkpoint

    def read(*args, **options):
        payload, *rest = plain(*args, **options)
        payload["ema"] = {name: value.bfloat16() for name, value in payload["ema"].items()}
        return payload, *rest

    with mock.patch.object(checkpoint, "read_checkpoint", read):
        return train_in_16_bits([*words, "--resume_from", str(path)])


def train_in_16_bits(words):
    return train_task("blocks", words, torch.bfloat16)


def use_average(path, out):
    """What export.py and predict.py write for the averaged weights."""
    torch.set_default_dtype(torch.bfloat16)
    printed = io.StringIO()
    for script, words in ((export, [path, out / "e.pt", "--ema"]), (predict, [path, "--out", out / "p.pt", "--ema"])):
        with (
            using("blocks"),
            mock.patch("model.predict", lambda net, ids: {"logits": net(ids.clamp(min=0))[:, 0]}, create=True),
            mock.patch.object(sys, "argv", ["script", *map(str, words)]),
            contextlib.redirect_stdout(printed),
        ):
            script.main()
    net = TASKS["blocks"]["create_model"](None, torch.device("cpu"))
    net.load_state_dict(torch.load(out / "e.pt", weights_only=True)["model"])
    return torch.load(out / "p.pt", weights_only=True)["logits"], {k: v.detach() for k, v in net.state_dict().items()}


def test_the_average_of_a_16_bit_model_is_exported_predicted_with_and_resumed_from_older_checkpoints(runs):
    flags = runs.words("run", *SIXTEEN, "--dataset_size", 30)
    assert run_ranks(1, train_in_16_bits, flags) == ["completed"]
    path = runs.checkpoints("run")[-1]
    ((logits, exported),) = run_ranks(1, use_average, path, runs.root)
    saved = runs.last("run")
    assert logits.dtype is torch.bfloat16 and logits.isfinite().all()
    assert all(torch.equal(exported[name], value.bfloat16()) for name, value in saved["ema"].items())
    words = runs.words("older", *SIXTEEN, "--dataset_size", 30, "--epochs", 3)
    assert run_ranks(1, resume_with_rounded_averages, words, path) == ["completed"]
    assert {value.dtype for value in runs.last("older")["ema"].values()} == {torch.float32}
