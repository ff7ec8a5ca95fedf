"""--compile: the same run up to rounding, with the same keys, all of it compiled before the first step."""

import os
import shutil
import sysconfig
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import train
from ranks import lack, package, run_ranks, torchrun
from tasks import TASKS, SmallNet, train_task
from training import assert_same_state
from utils.extras.compile import compiled
from utils.training.updater import Updater

# micro-batches of 3 and, in the last global batch, one of 2, which leaves a rank idle; the evaluation has 8 samples:
# 3, 3 and 2
FLAGS = "--dataset_size 38 --batch_size 3 --grad_accum_steps 2 --epochs 2 --log_interval 1 --lr 0.02".split()
FLAGS += "--no-use_amp --save_every_steps 1 --keep_last 99".split()
FLAGS += ["--ema_decay", "0.9"]
SECONDS = 250.0  # with an empty inductor cache and other programs running
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def need_compiler(device=CPU):
    """Require what torch.compile builds its kernels with."""
    named = os.environ.get("CXX" if device == CPU else "CC")
    compilers = ["g++"] if device == CPU else ["gcc", "clang"]
    if not any(shutil.which(tool) for tool in ([named] if named else compilers)):
        lack(f"there is no compiler ({named or ' or '.join(compilers)})")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        lack("the headers of this Python are not installed (python3-dev)")
    if device != CPU:
        package("triton")


class WideNet(SmallNet):
    """Wide enough for two buckets of 1 MB in float64; without dropout, whose draws change when compiled."""

    def __init__(self, width):
        super().__init__(True, 10)
        self.dropout.p, self.wide, self.head = 0.0, nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.wide(self.features(x).flatten(1)).relu())


def train_net(width, flags, backend="inductor"):
    """Train in float64; returns the graphs compiled before the first step and in total, and the parts of each."""
    from torch._dynamo.utils import counters

    counters.clear()
    graphs, plain, plain_compile = [], train.train_one_epoch, nn.Module.compile

    def epoch(training):
        graphs.append(counters["stats"]["unique_graphs"])
        return plain(training)

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


def assert_near(a, b):
    """Two checkpoints are equal up to rounding; their counts and keys are equal."""
    for key in ("model", "ema"):
        assert list(a[key]) == list(b[key])
        torch.testing.assert_close(dict(a[key]), dict(b[key]), rtol=1e-9, atol=1e-12)
    for number, state in a["optimizer"]["state"].items():
        torch.testing.assert_close(state, b["optimizer"]["state"][number], rtol=1e-9, atol=1e-12)


@pytest.mark.guarantee("compile")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_equals_the_eager_one_and_compiles_nothing_after_the_first_step(runs, backend):
    """Two ranks, accumulation, a short last global batch, averaged weights, BatchNorm, evaluation. aot_eager: all but
    the generated kernels."""
    need_compiler()
    for name, mode in (("eager", "off"), ("compiled", "default")):
        words = runs.words(name, *FLAGS, "--bucket_cap_mb", 1, "--compile", mode)
        counts = run_ranks(2, train_net, 3000, words, backend, deadline=SECONDS)
        # batches of 3 and 2: in training in two parts each, one per bucket; in evaluation whole
        assert counts == [(0, 0, 0) if mode == "off" else (4, 4, 2 * 2 + 2)] * 2
    assert_near(runs.last("eager"), runs.last("compiled"))
    assert not any("_orig_mod" in key or key.startswith("module.") for key in runs.last("compiled")["model"])
    for kind in ("train", "eval"):
        eager, compiled = ([r["loss"] for r in runs.records(name, kind)] for name in ("eager", "compiled"))
        assert compiled == pytest.approx(eager, rel=1e-9) and len(eager) > 3
    text = runs.log("compiled")
    shown = "3 in training, 2 in training, 3 in evaluation, 2 in evaluation"
    begin = text.index(f"torch compiles the model (--compile default) for 4 batch sizes: {shown}.\n")
    done = [(size, kind) for kind in ("training", "evaluation") for size in (3, 2)]
    places = [text.index(f"compiled for batches of {size} in {kind}, after ") for size, kind in done]
    assert sorted(places) == places and begin < places[0]


@pytest.mark.guarantee("compile")
@pytest.mark.slow
def test_a_compiled_run_resumes_an_eager_checkpoint_and_vice_versa(runs):
    """It also resumes its own checkpoint, bitwise equal."""
    need_compiler()

    def resume(name, mode, source=""):
        path = runs.checkpoints(source)[2] if source else ""
        words = runs.words(name, *FLAGS, "--compile", mode, "--resume_from", path)
        run_ranks(2, train_net, 16, words, deadline=SECONDS)
        return runs.last(name)

    eager = resume("eager", "off")
    compiled = resume("compiled", "default", "eager")
    assert_near(eager, compiled)
    assert_near(eager, resume("eager again", "off", "compiled"))
    assert_same_state(compiled, resume("compiled again", "default", "compiled"))


@pytest.mark.slow
def test_a_compiled_run_with_exact_sums_has_the_same_bits_on_one_and_two_ranks(runs):
    need_compiler()
    for ranks in (1, 2):
        flags = ["--compile", "default", "--reduction", "exact", "--grad_accum_steps", 4 // ranks]
        words = runs.words(f"on-{ranks}", *FLAGS, *flags, "--bucket_cap_mb", 1)
        run_ranks(ranks, train_net, 3000, words, deadline=SECONDS)
    assert_same_state(runs.last("on-1"), runs.last("on-2"))


def gradients_between_steps(flags):
    """Train with the rule for CUDA graphs, without the compiler; returns what each step leaves in the gradients."""
    left, plain = set(), Updater.zero_gradients

    def drop(self):
        plain(self)
        left.update("none" if p.grad is None else f"norm {p.grad.norm():g}" for p in self.parameters_by_tensor.values())

    with (
        mock.patch.object(Updater, "zero_gradients", drop),
        mock.patch.object(compiled, "compile_all_sizes", lambda *_, **__: None),
    ):
        train_task("images", flags)
    return left


@pytest.mark.guarantee("compile")
@pytest.mark.slow
def test_with_cuda_graphs_gradients_keep_their_memory_and_the_run_is_bitwise_equal(runs):
    """A new gradient would be in memory that the next replay overwrites, so DDP's gradients are zeroed and kept."""
    for mode, left in (("off", {"none"}), ("reduce-overhead", {"norm 0"})):
        assert run_ranks(2, gradients_between_steps, runs.words(mode, *FLAGS, "--compile", mode)) == [left] * 2
    assert_same_state(runs.last("off"), runs.last("reduce-overhead"))


def train_without_compiling(skipped, words):
    """Train with a compiler that compiles nothing, and counts this many parts without CUDA graphs as torch does."""
    from torch._dynamo.utils import counters

    def compile_in_place(self, mode, dynamic):
        counters["stats"]["unique_graphs"] += skipped
        counters["inductor"]["cudagraph_skips"] += skipped

    with mock.patch.object(nn.Module, "compile", compile_in_place):
        train_task("images", words)


@pytest.mark.guarantee("compile")
@pytest.mark.slow
def test_what_is_not_compiled_is_said(runs):
    need_compiler()
    words = runs.words("run", *FLAGS, "--compile", "reduce-overhead")
    with pytest.raises(AssertionError, match=r"found nothing to compile.*or use --compile off\."):
        run_ranks(1, train_without_compiling, 0, words)
    run_ranks(1, train_without_compiling, 2, [*words, "--overwrite"])
    assert "reduce-overhead 2 compiled parts cannot use CUDA graphs (TORCH_LOGS=cudagraphs" in runs.log("run")


@pytest.mark.slow
def test_without_a_compiler_torchs_error_ends_the_run_before_the_first_step(runs, tmp_path):
    missing = {"CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = torchrun(2, *runs.words("run", *FLAGS, "--compile", "default"), env=missing, deadline=SECONDS)
    status = runs.json("run", "status.json")
    assert (ended.code, ended.left, status["state"], status["step"]) == (1, 0, "failed", 0), ended.text
    assert "No working C++ compiler found" in status["error"] and "/nonexistent/c++" in status["error"]
