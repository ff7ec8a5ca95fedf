"""--compile: the same run up to rounding, with the same keys, all of it compiled before the first step."""

import os
import shutil
import sysconfig
from unittest import mock

import pytest
import torch
from torch import nn

import train
from config import TrainingConfig, UserError
from ranks import lack, run_ranks
from tasks import TASKS, SmallNet, train_task
from training import assert_same_state
from utils.training.first_passes import Compiling, check_compiler
from utils.training.state import TrainState

# micro-batches of 3 and, in the last global batch, one of 2, which leaves a rank idle; the 8 samples of the evaluation
# are 3, 3 and 2
FLAGS = (
    "--dataset_size 38 --batch_size 3 --grad_accum_steps 2 --epochs 2 --log_interval 1 --lr 0.02 --no-use_amp"
    " --ema_decay 0.9".split()
)
FLAGS += "--save_every_steps 1 --keep_last 99".split()
SECONDS = 250.0  # where nothing is in inductor's cache, and other programs run
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def need_compiler():
    try:
        check_compiler("default", CPU, os.environ.get("CXX", ""))
    except UserError as refused:
        lack(str(refused))


class WideNet(SmallNet):
    """Wide enough for two buckets of a megabyte in float64; without dropout, whose draws are the compiler's own."""

    def __init__(self, width):
        super().__init__(True, 10)
        self.dropout.p, self.wide, self.head = 0.0, nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.wide(self.features(x).flatten(1)).relu())


def train_net(width, flags, backend="inductor"):
    """Train in float64. How many graphs were compiled before the first step, after it, and into how many parts DDP's
    buckets cut them."""
    from torch._dynamo.utils import counters

    counters.clear()
    graphs, plain, plain_compile = [], train.train_one_epoch, nn.Module.compile

    def epoch(*args):
        graphs.append(counters["stats"]["unique_graphs"])
        return plain(*args)

    def compile_in_place(self, mode, dynamic):
        plain_compile(self, dynamic=dynamic, **({"mode": mode} if backend == "inductor" else {"backend": backend}))

    net = {"create_model": lambda config, device: WideNet(width).to(device)}
    with (
        mock.patch.dict(TASKS["images"], net),
        mock.patch.object(train, "train_one_epoch", epoch),
        mock.patch.object(nn.Module, "compile", compile_in_place),
    ):
        train_task("images", flags, torch.float64)
    return graphs[0], counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]


def near(a, b):
    """Two checkpoints but for rounding; their counts and keys are the same."""
    for key in ("model", "ema"):
        assert list(a[key]) == list(b[key])
        torch.testing.assert_close(dict(a[key]), dict(b[key]), rtol=1e-9, atol=1e-12)
    for number, state in a["optimizer"]["state"].items():
        torch.testing.assert_close(state, b["optimizer"]["state"][number], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_is_the_eager_one_and_compiles_nothing_after_the_first_step(runs, backend):
    """Two ranks, accumulation, a short last global batch, averaged weights, BatchNorm, evaluation. aot_eager: all but
    the generated kernels."""
    need_compiler()
    for name, mode in (("eager", "off"), ("compiled", "default")):
        words = runs.words(name, *FLAGS, "--bucket_cap_mb", 1, "--compile", mode)
        found = run_ranks(2, train_net, 3000, words, backend, deadline=SECONDS)
        # 3 and 2 in training, in two parts each, and in evaluation, where no gradient waits for a bucket
        assert found == [(0, 0, 0) if mode == "off" else (4, 4, 2 * 2 + 2)] * 2
    near(runs.last("eager"), runs.last("compiled"))
    assert not any("_orig_mod" in key or key.startswith("module.") for key in runs.last("compiled")["model"])
    for kind in ("train", "eval"):
        losses = [
            torch.tensor([record["loss"] for record in runs.records(name, kind)]) for name in ("eager", "compiled")
        ]
        assert len(losses[0]) > 3
        torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    text = runs.log("compiled")
    assert " s, for batches of 3 and 2 in training, 3 and 2 in evaluation" in text and "compiled (default) in " in text
    assert "compiles again" not in text


@pytest.mark.slow
def test_a_compiled_run_resumes_an_eager_ones_checkpoint_and_the_other_way_round(runs):
    """And its own, to the bit."""
    need_compiler()

    def resume(name, mode, start=""):
        run_ranks(
            2, train_net, 16, runs.words(name, *FLAGS, "--compile", mode, "--resume_from", start), deadline=SECONDS
        )
        return runs.last(name)

    eager = resume("eager", "off")
    compiled = resume("compiled", "default", runs.checkpoints("eager")[2])
    near(eager, compiled)
    near(eager, resume("eager again", "off", runs.checkpoints("compiled")[2]))
    assert_same_state(compiled, resume("compiled again", "default", runs.checkpoints("compiled")[2]))


def gradients_between_steps(flags):
    """Train with CUDA graphs' rule and without their compiler. What stays of the gradients after a step."""
    left, plain = set(), TrainState.drop_gradients

    def drop(self):
        plain(self)
        left.add(
            tuple(sorted({"none" if p.grad is None else f"norm {p.grad.norm():g}" for p in self.model.parameters()}))
        )

    with (
        mock.patch.object(TrainState, "drop_gradients", drop),
        mock.patch.object(train, "compile_all_sizes", lambda *_: None),
    ):
        train_task("images", flags)
    return left


@pytest.mark.slow
def test_with_cuda_graphs_gradients_keep_their_memory_and_the_run_its_bits(runs):
    """A gradient that autograd would make anew is memory of the graph, which its next replay writes over: they stay
    DDP's, as zeros."""
    for mode, left in (("off", {("none",)}), ("reduce-overhead", {("norm 0",)})):
        assert run_ranks(2, gradients_between_steps, runs.words(mode, *FLAGS, "--compile", mode)) == [left] * 2
    assert_same_state(runs.last("off"), runs.last("reduce-overhead"))


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale * 2


@pytest.mark.slow
def test_what_is_compiled_later_is_said_once():
    need_compiler()
    model, said = Doubles(), []
    compiling = Compiling(model, TrainingConfig(compile="default"))
    model(torch.ones(4, 3))
    compiling.finish({"training": [4], "evaluation": []}, lambda *words: said.append(words[0] % words[1:]), said.append)
    assert said[0].startswith("compiled (default) in ") and said[0].endswith(" s, for batches of 4 in training")
    model(torch.ones(4, 3))
    assert len(said) == 1
    model(torch.ones(5, 3))
    assert len(said) == 2 and said[1].startswith("torch.compile compiles again in the middle of the run")
    model(torch.ones(6, 3))
    assert len(said) == 2
    torch.compiler.reset()


@pytest.mark.slow
def test_a_model_in_which_nothing_is_compiled_is_refused():
    compiling = Compiling(Doubles(), TrainingConfig(compile="default"))
    with pytest.raises(UserError, match="finds nothing to compile in the model.*or --compile off"):
        compiling.finish({"training": [4]}, print, print)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("device", "named", "lacks", "sentence"),
    [
        (
            CPU,
            "",
            "g++",
            "compile=default: needs a C++ compiler, and there is no g++; install g++, or give --compile off",
        ),
        (
            CPU,
            "no-such-c++",
            "",
            "compile=default: needs a C++ compiler, and there is no no-such-c++; install g++, or give --compile off",
        ),
        (
            CUDA,
            "",
            "gcc clang",
            "compile=default: needs a C compiler, and there is no gcc nor clang; install gcc, or give --compile off",
        ),
        (
            CPU,
            "sh",
            "Python.h",
            "compile=default: needs the headers of this Python (Python.h); install python3-dev, or give --compile off",
        ),
        (
            CUDA,
            "sh",
            "triton",
            "compile=default: needs triton, which is not installed; install it, or give --compile off",
        ),
    ],
)
def test_a_machine_without_a_compiler_gets_a_sentence(monkeypatch, tmp_path, device, named, lacks, sentence):
    plain, headers = shutil.which, tmp_path / "include"
    headers.mkdir()
    if lacks != "Python.h":
        (headers / "Python.h").touch()
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in lacks.split() else plain(tool))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(headers)})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as refused:
        check_compiler("default", device, named)
    assert str(refused.value) == sentence
    check_compiler("off", device, named)
