"""What a step sends, to the byte, and what rounding on the way does to a run: nothing but that."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import train
from config import Refused, TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from ranks import run_ranks
from tasks import train_task
from test_exact_resume import FLAGS as RESUME_FLAGS
from test_exact_resume import same_run
from training import TINY, difference
from utils.report import Reporter

PARAMETERS, STATISTICS = 2090, 2 * (8 + 16)  # of tasks.SmallNet
WIDTHS = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLAGS = [*TINY, "--dataset_size", "34", "--epochs", "2", "--grad_accum_steps", "2", "--log_interval", "1", "--no-use_amp", "--lr", "0.02"]


class Sent(TorchDispatchMode):
    """Bytes that go into an all-reduce, by their type; whoever asks for it, DDP's own reducer, a hook or BatchNorm's rule."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name == "c10d::allreduce_":
            for tensor in args[0]:
                if tensor.is_floating_point():  # words are not
                    self.bytes[str(tensor.dtype)] = self.bytes.get(str(tensor.dtype), 0) + tensor.nbytes
        return function(*args, **(kwargs or {}))


def bytes_by_step(flags, dtype=torch.float32):
    """Of each optimizer step."""
    mode, steps, plain_epoch, plain_done = Sent(), [], train.train_one_epoch, Reporter.step_done

    def epoch(*args):
        with mode:
            return plain_epoch(*args)

    def done(self, samples, step):
        steps.append(mode.bytes)
        mode.bytes = {}
        plain_done(self, samples, step)

    with mock.patch.object(train, "train_one_epoch", epoch), mock.patch.object(Reporter, "step_done", done):
        train_task("images", flags, dtype)
    return steps


@pytest.mark.parametrize(("hook", "width"), [("none", 4), ("fp16", 2), ("bf16", 2)])
def test_a_step_sends_its_gradient_once_in_the_hooks_width_and_the_statistics(runs, hook, width):
    """Two ranks, two micro-batches each: what is accumulated is not sent. The statistics stay float32."""
    flags = [*FLAGS, "--comm_hook", hook, "--data_dir", runs.root / "data", "--run_dir", runs.folder("run")]
    expected = {"torch.float32": 4 * STATISTICS}
    name = str(WIDTHS[hook])
    expected[name] = expected.get(name, 0) + width * PARAMETERS
    for steps in run_ranks(2, bytes_by_step, [*map(str, flags)]):
        assert steps == [expected] * 6
    kept = runs.last("run")
    tensors = [*kept["model"].values(), *(value for state in kept["optimizer"]["state"].values() for value in state.values())]
    assert {value.dtype for value in tensors if isinstance(value, torch.Tensor)} == {torch.float32, torch.int64}
    size, said = 4 * PARAMETERS / 2**20, "" if hook == "none" else f", rounded to {hook} on the way"
    text = (runs.folder("run") / "logs" / "rank0.log").read_text()
    assert f"gradients     {size:.2f} MB in 3 bucket(s) of up to " in text and f" MB{said}\n" in text


def test_a_float64_model_is_rounded_on_the_way_and_stays_float64(runs):
    flags = [*map(str, [*FLAGS, "--epochs", 1, "--comm_hook", "fp16", "--run_dir", runs.folder("run"), "--data_dir", runs.root / "data"])]
    for steps in run_ranks(2, bytes_by_step, flags, torch.float64):
        assert steps == [{"torch.float16": 2 * PARAMETERS, "torch.float64": 8 * STATISTICS}] * 3
    floats = [value for value in runs.last("run")["model"].values() if value.is_floating_point()]
    assert {value.dtype for value in floats} == {torch.float64}


def test_losses_are_those_without_a_hook_up_to_its_rounding(runs):
    """A value rounded to p bits of mantissa is off by 2^-p/2 at most: 2^-11 for fp16, 2^-8 for bf16. Each step's gradient has it once in
    each rank's part and once in the sum; the learning rate then makes it a small part of what the six steps change in the loss."""
    losses = {}
    for hook in WIDTHS:
        flags = [*FLAGS, "--comm_hook", hook, "--data_dir", runs.root / "data", "--run_dir", runs.folder(hook)]
        run_ranks(2, train_task, "images", [*map(str, flags)])
        losses[hook] = torch.tensor([record["loss"] for record in runs.records(hook, "train")], dtype=torch.float64)
    change = (losses["none"] - losses["none"][0]).abs().max().item()
    for hook, rounding in (("fp16", 2**-11), ("bf16", 2**-8)):
        off = (losses[hook] - losses["none"]).abs()
        assert off[0] == 0  # before the first update
        assert 0 < off.max() <= 4 * rounding * max(1.0, change), (hook, off)


def train_with_a_huge_gradient(flags, huge_step):
    """On rank 1 the loss of one step is 10^8 times what it is: finite, but its gradient is not in float16."""
    plain, passes = train.compute_loss, []

    def loss(model, batch):
        loss_sum, metrics = plain(model, batch)
        if model.training:
            passes.append(1)
            is_huge = len(passes) == huge_step + 2 and dist.get_rank() == 1  # two passes come before the first step
            loss_sum = loss_sum * 1e8 if is_huge else loss_sum
        return loss_sum, metrics

    with mock.patch.object(train, "compute_loss", loss):
        return train_task("images", flags)


@pytest.mark.parametrize(("hook", "skipped"), [("fp16", 1), ("none", 0), ("bf16", 0)])
def test_a_gradient_that_overflows_on_the_way_is_skipped_by_all_ranks(runs, hook, skipped):
    """The weights, their average and the momentum stay to the bit; where float32 or bfloat16 is sent, the step is taken."""
    flags = [*FLAGS, "--comm_hook", hook, "--grad_accum_steps", 1, "--epochs", 1, "--save_every_steps", 1, "--keep_last", 99]
    flags += ["--ema_decay", 0.9, "--clip_grad_norm", 1, "--data_dir", runs.root / "data", "--run_dir", runs.folder("run")]
    run_ranks(2, train_with_a_huge_gradient, [*map(str, flags)], 3)
    before, after = (torch.load(path, weights_only=True) for path in runs.checkpoints("run")[1:3])
    assert before["progress"]["step"] == 2
    same = [difference(before[key], after[key]) == [] for key in ("model", "ema")]
    momenta = difference(before["optimizer"]["state"], after["optimizer"]["state"]) == []
    assert [*same, momenta] == [bool(skipped)] * 3
    summary = runs.json("run", "summary.json")
    assert (summary["steps"], summary["skipped_steps"]) == (5, skipped)
    assert all(value.isfinite().all() for value in runs.last("run")["model"].values())


@pytest.mark.parametrize(("ranks", "hook", "accumulation"), [(2, "bf16", 2), (4, "fp16", 1)])
def test_stops_and_resumes_with_a_hook_cannot_be_seen(runs, ranks, hook, accumulation):
    size = 4 * ranks * accumulation
    flags = [
        *RESUME_FLAGS,
        "--no-use_amp",
        "--comm_hook",
        hook,
        "--grad_accum_steps",
        accumulation,
        "--dataset_size",
        7 * size + size // 2 + 1,
    ]
    run_ranks(ranks, train_task, "images", [*flags, "--run_dir", runs.folder("whole")])
    run_ranks(ranks, train_task, "images", [*flags, "--run_dir", runs.folder("parts")], torch.float32, [1, 3, 11])
    same_run(runs, "whole", "parts")


def refusal(hook, at, error, folder):
    """What training says where torch (at: register) or the backend (at: all_reduce) does not take the type."""
    plain = dist.all_reduce

    def reduce(tensor, *args, **kwargs):
        if tensor.dtype == WIDTHS[hook]:
            raise error
        return plain(tensor, *args, **kwargs)

    patched = {
        "register": mock.patch.object(torch.nn.parallel.DistributedDataParallel, "register_comm_hook", side_effect=error),
        "all_reduce": mock.patch.object(dist, "all_reduce", reduce),
    }
    with patched[at], pytest.raises(Refused) as refused:
        train_task("images", [*FLAGS, "--comm_hook", hook, "--run_dir", folder])
    return str(refused.value)


@pytest.mark.parametrize(
    ("hook", "at", "error", "other"),
    [
        ("bf16", "register", TypeError("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+"), "fp16 or none"),
        ("bf16", "all_reduce", RuntimeError("Invalid scalar type"), "fp16 or none"),
        ("fp16", "all_reduce", RuntimeError("Invalid scalar type"), "none"),
    ],
)
def test_a_build_or_backend_that_cannot_is_refused_by_all_ranks(tmp_path, hook, at, error, other):
    said = run_ranks(2, refusal, hook, at, error, str(tmp_path / "run"))
    assert said[0] == said[1]
    assert said[0].startswith(f"comm_hook={hook}: torch {torch.__version__} cannot all-reduce {hook} over gloo ({error})")
    assert said[0].endswith(f"; give --comm_hook {other}")


def buckets(flags):
    """After the passes of the warm-up, and one more: bytes of the gradients, of their storages, and what DDP says of its buckets."""
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)
    state = train.create_state(dataclasses.replace(config, num_classes=10, in_channels=3), ctx)
    model = train.wrap_ddp(state.model, config, ctx)
    batch = (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    train.warm_up(model, batch, state, train.compute_loss)
    state.model.train()
    train.compute_loss(model, batch)[0].backward()
    gradients = [p.grad for p in model.parameters()]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}
    of_ddp = [bucket.buffer().nbytes for bucket in model.reducer._get_zeros_like_grad_buckets()]
    cleanup_distributed()
    return sum(g.nbytes for g in gradients), sorted(storages.values()), sorted(of_ddp)


def test_by_default_the_gradients_lie_in_several_buckets_and_nowhere_else():
    """MiniResNet: the storages of all .grad are the buckets, and these hold the gradient and nothing more."""
    for gradient, storages, of_ddp in run_ranks(2, buckets, [*TINY, "--no-use_amp"]):
        assert gradient == 4 * 2_777_674
        assert storages == of_ddp and sum(of_ddp) == gradient and 2 < len(of_ddp) < 10
