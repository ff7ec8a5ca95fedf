# extra: template
"""What a step sends, to the byte; --comm_hook changes nothing but the rounding of the gradient."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed, wrap_ddp
from ranks import run_ranks, slow
from tasks import train_task, training_under
from training import TINY, difference
from utils import assembly
from utils.data.sampler import MicroBatch
from utils.settings.errors import UserError

PARAMETERS, STATISTICS = 2090, 2 * (8 + 16)  # of tasks.SmallNet
SUMS = 4  # sum and count of loss and top1
WIDTHS = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLAGS = "--dataset_size 34 --epochs 2 --grad_accum_steps 2 --log_interval 1 --no-use_amp --lr 0.02".split()


class Sent(TorchDispatchMode):
    """Collectives of floating-point tensors (votes are integers), and their bytes by type."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = args[0] if function._schema.name.startswith("c10d::") and isinstance(args[0], list) else []
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.calls += 1
                self.bytes[str(tensor.dtype)] = self.bytes.get(str(tensor.dtype), 0) + tensor.nbytes
        return function(*args, **(kwargs or {}))


def sent_by_step(task, flags, dtype):
    """The collectives of each optimizer step and their bytes."""
    mode, steps = Sent(), []

    def done(step):
        steps.append((mode.calls, mode.bytes))
        mode.calls, mode.bytes = 0, {}

    with training_under(mode, done):
        train_task(task, flags, dtype)
    return steps


@pytest.mark.guarantee("collectives", "comm-hook")
@pytest.mark.parametrize(
    ("ranks", "task", "hook", "width", "dtype"),
    [
        (2, "images", "bf16", 2, torch.float32),
        (2, "plain", "none", 4, torch.float32),
        slow(4, "images", "none", 4, torch.float32),
        slow(4, "plain", "none", 4, torch.float32),
        slow(2, "images", "fp16", 2, torch.float32),
        slow(2, "images", "fp16", 2, torch.float64),
    ],
)
def test_gradients_are_sent_once_in_the_hooks_type_all_else_in_one_collective(runs, ranks, task, hook, width, dtype):
    """Gradients: once for all micro-batches, in several buckets. Optimizer state keeps its type."""
    name, numbers = str(WIDTHS[hook]), SUMS + (STATISTICS if task == "images" else 0)
    expected = {"torch.float64": 8 * numbers}
    expected[name] = expected.get(name, 0) + width * PARAMETERS
    words = runs.words("run", *FLAGS, "--dataset_size", 17 * ranks, "--comm_hook", hook)
    steps = run_ranks(ranks, sent_by_step, task, words, dtype)
    calls = steps[0][0][0]
    assert steps == [[(calls, expected)] * 6] * ranks and 2 < calls - 1 < 10
    rounded = "" if hook == "none" else f", rounded to {hook}"
    size = f"{dtype.itemsize * PARAMETERS / 2**20:.2f} MB"
    assert f" {size} per rank and step, all-reduced in buckets of about " in runs.log("run")
    assert f" MB{rounded}\n" in runs.log("run")
    kept = runs.last("run")
    states = [value for state in kept["optimizer"]["state"].values() for value in state.values()]
    types = {value.dtype for value in [*kept["model"].values(), *states] if isinstance(value, torch.Tensor)}
    assert types <= {dtype, torch.int64}


@pytest.mark.guarantee("collectives")
def test_one_rank_has_no_collective(runs):
    assert run_ranks(1, sent_by_step, "images", runs.words("run", *FLAGS), torch.float32) == [[(0, {})] * 10]


def train_with_a_huge_gradient(flags, huge_step):
    """On rank 1 the loss of one step is 10^8 times as large: its gradient is finite, but not in float16."""
    passes, plain = [], assembly.TrainState.backward

    def backward(self, loss, loss_scale):
        passes.append(1)
        plain(self, loss * 1e8 if len(passes) == huge_step and dist.get_rank() == 1 else loss, loss_scale)

    with mock.patch.object(assembly.TrainState, "backward", backward):
        return train_task("images", flags)


@pytest.mark.guarantee("comm-hook")
@pytest.mark.slow
@pytest.mark.parametrize(("hook", "skipped"), [("fp16", 1), ("none", 0), ("bf16", 0)])
def test_a_gradient_that_overflows_in_the_all_reduce_is_skipped_by_all_ranks(runs, hook, skipped):
    """Weights, average and momentum stay bitwise equal; with float32 or bfloat16 the step is not skipped."""
    flags = "--grad_accum_steps 1 --epochs 1 --save_every_steps 1 --keep_last 99 --clip_grad_norm 1".split()
    flags += ["--ema_decay", "0.9"]
    words = runs.words("run", *FLAGS, *flags, "--comm_hook", hook)
    run_ranks(2, train_with_a_huge_gradient, words, 3)
    before, after = (torch.load(path, weights_only=True) for path in runs.checkpoints("run")[1:3])
    assert before["progress"]["step"] == 2
    keys = ["model"]
    keys += ["ema"]
    for key in keys:
        assert (difference(before[key], after[key]) == []) == bool(skipped)
    assert (difference(before["optimizer"]["state"], after["optimizer"]["state"]) == []) == bool(skipped)
    summary = runs.json("run", "summary.json")
    assert (summary["steps"], summary["skipped_steps"]) == (5, skipped)
    assert all(value.isfinite().all() for value in runs.last("run")["model"].values())


def rejection(flags):
    """The error if the backend does not support the type."""
    plain = dist.all_reduce

    def reduce(tensor, *args, **kwargs):
        if tensor.dtype == torch.bfloat16:
            raise RuntimeError("Invalid scalar type")
        return plain(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", reduce), pytest.raises(UserError) as error:
        train_task("images", [*flags, "--comm_hook", "bf16"])
    return str(error.value)


@pytest.mark.guarantee("comm-hook")
@pytest.mark.slow
def test_a_type_that_the_backend_cannot_reduce_is_rejected_by_all_ranks(runs):
    reason = f"torch {torch.__version__} cannot all-reduce bf16 over gloo (Invalid scalar type)"
    expected = f"--comm_hook bf16 cannot be used: {reason}"
    for text in run_ranks(2, rejection, runs.words("run", *FLAGS)):
        assert text.startswith(expected) and text.endswith(". Give --comm_hook fp16 or none."), text


def gradient_storages(flags):
    """The bytes of the gradients and of their storages, after three passes."""
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)
    model = wrap_ddp(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), config, ctx)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(torch.ones(2, 512)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}
    cleanup_distributed()
    return sum(g.nbytes for g in gradients), list(storages.values())


@pytest.mark.guarantee("buckets")
def test_by_default_gradients_are_stored_in_several_buckets_without_a_copy():
    """The storages of all .grad are DDP's buckets; there are several, so that communication overlaps."""
    for size, storages in run_ranks(2, gradient_storages, [*TINY, "--no-use_amp"]):
        assert size == sum(storages) == 4 * 8 * (512 * 512 + 512) and 2 < len(storages) < 10


class Parts(nn.Module):
    """Three layers, each of which an input may use; the sum of their outputs."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x, used):
        return sum(self.parts[k](x).relu().sum() for k in used)


def accumulated(flags, used):
    """The gradients of two steps of three micro-batches, and the bytes beside the buckets after each but the last.

    used: the layers that each micro-batch of a step uses.
    """
    config = TrainingConfig.from_args(flags)
    ctx = setup_distributed(config)
    torch.manual_seed(1)
    model = Parts()
    wrapped, beside, gradients = wrap_ddp(model, config, ctx), [], []
    for _ in range(2):  # as the passes before the first step
        wrapped(torch.ones(2, 64), range(3)).backward()
    buckets = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    for step in range(2):
        model.zero_grad(set_to_none=True)
        for number, parts in enumerate(used):
            micro_batch = MicroBatch(0, number, [], is_padding=False, is_last=number == 2, micro_batches_in_step=3)
            with wrapped.accumulate(micro_batch):
                x = torch.randn(2, 64, generator=torch.Generator().manual_seed(9 * step + 3 * number + ctx.rank))
                wrapped(x, parts).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            outside = [g.nbytes for g in grads if g.untyped_storage().data_ptr() not in buckets]
            beside.append((sum(outside), sum(g.nbytes for g in grads)))
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    cleanup_distributed()
    return beside, gradients


LAYER = 4 * (64 * 64 + 64)  # bytes


@pytest.mark.guarantee("buckets")
@pytest.mark.parametrize(
    ("flags", "used", "sizes"),
    [
        ([], [(0, 1, 2)] * 3, (3, 3, 3)),
        (["--find_unused_parameters"], [(0,), (1,), (1,)], (1, 2, 2)),
    ],
)
def test_accumulated_gradients_lie_in_the_buckets_and_a_layer_without_use_has_none(flags, used, sizes):
    """From the second step on. The bits are those of plain DDP, which holds a second copy of all gradients."""
    flags = [*TINY, "--no-use_amp", *flags]
    kept = run_ranks(2, accumulated, [*flags, "--grad_accum_steps", "3"], used)
    plain = run_ranks(2, accumulated, flags, used)
    for (beside, gradients), (usual, expected) in zip(kept, plain, strict=True):
        assert [size for _, size in beside[3:]] == [LAYER * count for count in sizes]
        assert usual[4][0] == LAYER * sizes[1] and [outside for outside, _ in beside[3:]] == [0, 0, 0]
        for ours, reference in zip(gradients, expected, strict=True):
            for a, b in zip(ours, reference, strict=True):
                assert (a is None) == (b is None) and (
                    a is None or torch.equal(a.view(torch.int32), b.view(torch.int32))
                )
            assert [grad is None for grad in ours] == [k >= 2 * sizes[2] for k in range(6)]
