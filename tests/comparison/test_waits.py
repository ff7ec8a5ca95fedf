# extra: template
"""In the plain and the bare loop the host does not wait for the device, so their times on a GPU are comparable with
those of the template (builtin/test_fake_gpu.py).

The device is torch's "meta", whose tensors have no values: a read by the host raises an error, and copies from the host
are seen. Not shown: pinned memory and streams, which exist only where there is a GPU.
"""

import contextlib
import itertools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comparison import loops
from config import TrainingConfig
from utils.example import images as example_images
from utils.training.precision import Precision

META = torch.device("meta")
CTX = SimpleNamespace(rank=0, world_size=1, local_world_size=1, device=META, hosts=("here",), fast_bf16=True)
CONFIG = TrainingConfig(batch_size=4, dataset_size=24, image_size=8, grad_accum_steps=2, num_workers=0)
SIDE = mock.Mock(stream=contextlib.nullcontext(), run=lambda action: (action(), None))


class Waits(TorchDispatchMode):
    """Counts asynchronous copies from the host; the others are `waiting_operations`."""

    waiting_operations, copies = (), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.name().removeprefix("aten::"), kwargs or {}
        out = None if name.startswith("_fused") else func(*args, **kwargs)  # has no kernel without values
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        is_copy = name in ("_to_copy", "copy_")
        tensors = [leaf for leaf in tensors if is_copy or leaf.ndim or leaf.is_meta]  # else a kernel gets the number
        if len({leaf.device for leaf in tensors}) > 1:
            is_asynchronous = is_copy and (kwargs.get("non_blocking") or args[2:] == (True,))
            self.copies += is_asynchronous
            self.waiting_operations += () if is_asynchronous else (name,)
        return out


class Calls(TorchFunctionMode):
    """Finds device tensors made of Python numbers, a copy too. Pins nothing, which needs a GPU."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == META:
            self.waits.waiting_operations += ("tensor",)
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)


def other(loop, done):
    for _ in itertools.islice(loop(CONFIG, CTX, Precision("meta", None)), 3):
        done()


def waits_of(run):
    """What waits, and the number of copies that do not, from the second step of a loop on."""
    watch, steps = Waits(), []

    def done():
        steps.append((watch.waiting_operations, watch.copies))
        watch.waiting_operations, watch.copies = (), 0

    names = ["comparison.loops.SideStream", "utils.data.loader.SideStream"]
    with contextlib.ExitStack() as hooks, Calls(watch), watch:
        [hooks.enter_context(mock.patch(name, lambda device: SIDE)) for name in names]
        hooks.enter_context(mock.patch("torch.distributed.get_world_size", lambda: 1))
        hooks.enter_context(mock.patch("torch.accelerator.current_stream", lambda *_: None))
        hooks.enter_context(mock.patch.object(optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"]))
        run(done)
    return set(steps[1:])


RUNS = {"plain": partial(other, loops.plain), "bare": partial(other, loops.bare)}


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_for_nothing_in_a_step(name):
    """Of each of two micro-batches it copies images, labels and indices."""
    assert waits_of(RUNS[name]) == {((), 6)}


@pytest.mark.parametrize("name", RUNS)
def test_waits_are_noticed(name, monkeypatch):
    monkeypatch.setattr(example_images, "normalize", lambda images, *_: images.to(torch.tensor(1.0, device=META)))
    assert waits_of(RUNS[name]) == {(("tensor",) * 2, 6)}
    monkeypatch.setattr(example_images, "normalize", lambda images, *_: images / images.max().item())
    with pytest.raises(RuntimeError, match="meta tensors"):
        waits_of(RUNS[name])
