# extra: template
"""Rehearsals of CUDA without a GPU: under torch's FakeTensorMode tensors have a device and a shape, but no values.

A value that the host reads raises an error. `Crossings` lists operators that mix devices. Here is the update of a step
with float16 and --cpu_offload; builtin/test_fake_gpu.py has the loop. distributed/test_cuda.py checks both on a GPU.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import TrainingConfig
from forged import MICRO_BATCH, SAMPLES
from utils.data.sampler import Assignment, GlobalBatchSampler
from utils.report.reporter import Reporter
from utils.training import state as training_state
from utils.training import step_sums
from utils.training.hooks import ModelHooks
from utils.training.parts.weight_average import WeightAverage
from utils.training.precision import Precision

AVERAGED = {}
AVERAGED["ema_decay"] = 0.9

CUDA = torch.device("cuda", 0)


class Crossings(TorchDispatchMode):
    """The operators whose tensors are on several devices, but for a number in host memory as an argument."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.name().removeprefix("aten::"), kwargs or {}
        result = None if name == "_fused_sgd_" else func(*args, **kwargs)  # has no kernel without values
        rows = [(args, kwargs, result)]
        if name.startswith("_foreach"):  # a row of each list at a time
            rows = zip(*[sequence for sequence in (*args, result) if isinstance(sequence, list | tuple)], strict=True)
        for row in rows:
            tensors = [leaf for leaf in tree_leaves(row) if isinstance(leaf, torch.Tensor)]
            if not name.startswith("_fused"):
                tensors = [leaf for leaf in tensors if leaf.ndim or leaf.is_cuda or leaf is result]
            if len({leaf.device for leaf in tensors}) > 1:
                self.found.append(name)
        return result


@pytest.fixture(scope="module", autouse=True)
def two_ranks():
    """Whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def crossings(monkeypatch):
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    for module in (training_state, step_sums):  # with --cpu_offload parameters are not there
        monkeypatch.setattr(module, "model_device", lambda model: CUDA)
    with FakeTensorMode(), Crossings() as mode:
        yield mode


def prepared(device="cuda", dtype=None, **changes):
    """The state before the first step, with gradients."""
    with torch.device(device):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    for name, buffer in model[1].named_buffers():
        setattr(model[1], name, buffer.to(CUDA))
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    config = TrainingConfig(warmup_epochs=0, clip_grad_norm=1.0, **AVERAGED, **changes)
    hooks = ModelHooks(create_model=None, param_groups=lambda *_: [{"params": model.parameters()}], compute_loss=None)
    state = training_state.TrainState(model, hooks, config, Precision("cuda", dtype))
    state.parts.append(WeightAverage(model, config.ema_decay))
    state.allocate_metrics({"loss": (0.0, 4)})
    state.plan_schedule(
        GlobalBatchSampler(range(40), batch_size=4, micro_batches_per_step=2, assignment=Assignment(0, 2))
    )
    return state


def step(state):
    loss = torch.ones((), device="cuda")
    state.scaler.scale(loss)
    state.step_sums.add({"loss": (loss, 4)}, MICRO_BATCH)
    state.step_sums.start_reduce(MICRO_BATCH)
    state.update_if_finite(SAMPLES)
    state.advance(SAMPLES)


@pytest.mark.guarantee("no-reads")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("device", "dtype", "copies"),
    [("cuda", torch.float16, 0), ("cpu", None, 2), ("cpu", torch.float16, 4)],
)
def test_a_step_reads_nothing_from_the_device(crossings, optimizer, device, dtype, copies):
    """With --cpu_offload (gradients on the CPU) it copies the divisor and whether to skip; with float16 also the scale,
    and whether there was an overflow."""
    changes = {"optimizer": optimizer}
    changes |= {"reduction": "exact"} if optimizer == "adamw" else {}  # extra: exact
    state = prepared(device, dtype, **changes)
    crossings.found.clear()
    step(state)
    assert crossings.found == ["_to_copy"] * copies
    if dtype is None:  # torch's scaler reads its scale
        payload = state.state_dict()
        keys = ["model"]
        keys += ["ema"]
        assert all({tensor.device.type for tensor in payload[key].values()} == {"cuda", device} for key in keys)


def test_the_rehearsal_notices_a_mix_of_devices(crossings, monkeypatch):
    state, update = prepared(), WeightAverage.update
    state.optimizer.state[state.model[3].weight]["momentum_buffer"] = torch.zeros(2, 16)
    monkeypatch.setattr(WeightAverage, "update", lambda self, taken: update(self, taken.cpu()))
    step(state)
    assert crossings.found[-2:] == ["_fused_sgd_", "_to_copy"]


def test_images_that_break_the_device_end_the_run():
    """A CUDA context computes nothing after a failed assertion: the next operation would be blamed for it."""
    reporter = mock.MagicMock()
    reporter._ctx.device = torch.device("cpu")
    for error, is_raised in ((torch.AcceleratorError("device-side assert"), True), (KeyError("images"), False)):
        log_images = mock.Mock(side_effect=error)
        if is_raised:
            with pytest.raises(torch.AcceleratorError):
                Reporter._show_images(reporter, log_images, "val", mock.MagicMock())
        else:
            Reporter._show_images(reporter, log_images, "val", mock.MagicMock())
            reporter._run.warn.assert_called_once()
