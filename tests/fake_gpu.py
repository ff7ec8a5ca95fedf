# extra: template
"""The loop on a device that exists only in name: what it launches, copies and reads on a GPU, without one.

    python tests/fake_gpu.py

Under torch's FakeTensorMode tensors have a device, a shape and a storage, but no values: a value that the host reads
raises an error. Streams and events are those of this file, which know what each stream waits for. torch takes only one
such device per process, for good, so tests run this program. It prints, as JSON:

launches  operators that change memory of the device, by part of the loop: views and allocations are none, a fused or
          foreach operator is one. Some are several kernels on CUDA (a padding is two), so these are lower bounds
copies    between host and device: part, operator, direction, and whether the host goes on ("async") or waits
races     operators that read what another stream wrote, without waiting for it
unkept    those that read another stream's memory, which may be freed before (`record_stream` would keep it)

of a step, a log point, an evaluation and the copy of a checkpoint, with the default flags, with more (MORE), with
batches that are objects, and with each fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import dataset
import model as your_model
import train
from config import TrainingConfig
from utils.checkpoint import archive
from utils.clock import PhaseClock
from utils.data.loader import create_distributed_dataloader, create_evaluation_dataloader
from utils.distributed.context import DistributedContext
from utils.metrics import MetricTracker
from utils.run import async_snapshot as copier_module
from utils.run.checkpoints import Checkpoints
from utils.run.resume import create_train_state
from utils.training import fingerprint
from utils.training import first_passes as first_passes_module
from utils.training.batchnorm import RunningStats
from utils.training.evaluation import Evaluation
from utils.training.first_passes import run_first_passes
from utils.training.gradient_strategy import wrap_ddp
from utils.training.hooks import ModelHooks
from utils.training.step_sums import StepSums

DEVICE, EPOCHS = "fakegpu", 2
MORE = "--optimizer adamw --clip_grad_norm 1".split()
MORE += ["--ema_decay", "0.9"]
MORE += ["--augment_repeats", "2"]  # extra: images
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


class Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class Fake(FakeTensorMode):
    avoid_device_init = True  # as for CUDA without a GPU; torch asks only whether there is such a device


class Stream:
    """What it has seen of each stream: the number of the last operator that is complete before its next one."""

    current: list[Stream] = []
    operators = 0

    def __init__(self, device=None):
        self.seen = defaultdict(int)

    def __enter__(self):
        Stream.current.append(self)

    def __exit__(self, *_):
        Stream.current.pop()

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        for stream, number in event.seen.items():
            self.seen[stream] = max(self.seen[stream], number)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        pass

    def is_capturing(self):
        return False


class Event:
    def __init__(self, *_, **__):
        self.seen = {}

    def record(self, stream=None):
        stream = stream or Stream.current[-1]
        self.seen = {**stream.seen, stream: Stream.operators}


class Graph:
    """A batch as an object, as those of torch_geometric: its `to` changes it in place."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def to(self, device, non_blocking=False):
        self.images = self.images.to(device, non_blocking=non_blocking)
        self.labels = self.labels.to(device, non_blocking=non_blocking)

    def __iter__(self):
        return iter((self.images, self.labels))


@contextlib.contextmanager
def batches_are_graphs():
    """Let the data set collate, and transform, batches that are such objects."""
    kind = type(dataset.create_dataset(TrainingConfig(), "train"))
    collate, transform = kind.collate, kind.device_transform
    with (
        mock.patch.object(kind, "collate", lambda *args: Graph(*collate(*args))),
        mock.patch.object(kind, "device_transform", lambda *args: Graph(*transform(*args))),
    ):
        yield


class Recorder(TorchDispatchMode):
    """Lists each operator under the current part."""

    def __init__(self):
        super().__init__()
        self.part, self.pinned = "start", set()
        self._written, self.kept = {}, defaultdict(set)  # by storage: the stream and number of the last write; streams
        self.take()

    def take(self):
        """What was recorded since the last call."""
        previous = vars(self).get("found")
        self.launches, self.copies, self.races, self.unkept = defaultdict(Counter), [], [], []
        self.found = {"launches": self.launches, "copies": self.copies, "races": self.races, "unkept": self.unkept}
        return previous

    @contextlib.contextmanager
    def within(self, part):
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def patch(self, owner, name, part):
        """Everything in this function belongs to the part."""
        function = getattr(owner, name)

        def recorded(*args, **kwargs):
            with self.within(part):
                return function(*args, **kwargs)

        setattr(owner, name, recorded)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        result = None if name.startswith("_fused_") else func(*args, **kwargs)  # they have no kernel without values
        if func.is_view or not name.isidentifier():  # that of a collective has a namespace
            return result
        given = {arg.name: value for arg, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        changes = [arg.name for arg in func._schema.arguments if arg.alias_info and arg.alias_info.is_write]
        written, read = tensors_of([given.get(key) for key in changes] or result), tensors_of([args, kwargs])
        for tensor in () if changes else written:  # new memory
            self._written[storage(tensor)] = (Stream.current[-1], 0)
            self.kept[storage(tensor)].clear()
            self.pinned.discard(storage(tensor))
        is_copy = name in COPIES and len({leaf.device for leaf in (*read, *written)}) > 1
        if is_copy:
            is_pinned = all(leaf.device.type != "cpu" or storage(leaf) in self.pinned for leaf in read)
            is_async = given.get("non_blocking") and (is_pinned or written[0].device.type == "cpu")
            to = "to device" if written[0].device.type == DEVICE else "to host"
            self.copies.append([self.part, name, to, "async" if is_async else "waits"])
        elif name not in NO_LAUNCH and any(leaf.device.type == DEVICE for leaf in written):
            self.launches[self.part][name] += 1
        if name not in NO_LAUNCH:
            self._order(name, read, written)
        return result

    def _order(self, name, read, written):
        current = Stream.current[-1]
        Stream.operators += 1
        for tensor in (leaf for leaf in read if leaf.device.type == DEVICE):
            stream, number = self._written.get(storage(tensor), (current, 0))
            if number > current.seen[stream] and stream is not current:
                self.races.append([self.part, name])
            elif stream is not current and current not in self.kept[storage(tensor)]:
                self.unkept.append([self.part, name])
        for tensor in written:
            self._written[storage(tensor)] = (current, Stream.operators)


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def moved(module, device=None, memory_format=torch.preserve_format, **_):
    """nn.Module.to, which would swap tensors that FakeTensorMode refers to."""
    for submodule in module.modules():
        for name, p in submodule._parameters.items():
            layout = memory_format if p is not None and p.ndim == 4 else torch.preserve_format
            submodule._parameters[name] = p if p is None else nn.Parameter(p.detach().to(device, memory_format=layout))
        for name, buffer in submodule._buffers.items():
            submodule._buffers[name] = buffer.to(device)
    return module


def reading(commit):
    def read(self, samples, is_finite):
        commit(self, samples, is_finite)
        bool(is_finite)

    return read


def copying(wait):
    def copy(self):
        wait(self)
        torch.zeros(3).to(DEVICE, non_blocking=True)  # not pinned

    return copy


FAULTS = {
    "read": (RunningStats, "commit", reading(RunningStats.commit)),
    "copy": (StepSums, "wait", copying(StepSums.wait)),
    "wait": (Stream, "wait_event", lambda *_: None),
    "keep": (torch.Tensor, "record_stream", lambda *_: None),
}


def made_of_stubs(recorder):
    """What torch cannot fake, and the parts of the loop that the recorder tells apart."""
    tensor, Tensor = torch.tensor, torch.Tensor

    def new_tensor(*args, pin_memory=False, **kwargs):
        made = tensor(*args, **kwargs)
        return made.pin_memory() if pin_memory else made

    def pin_memory(self):
        made = self.clone()
        recorder.pinned.add(storage(made))
        return made

    torch.tensor, Tensor.pin_memory, nn.Module.to = new_tensor, pin_memory, moved
    Tensor.record_stream = lambda self, stream: recorder.kept[storage(self)].add(stream)
    Tensor.data_ptr = lambda self: storage(self) + self.storage_offset() * self.element_size()
    torch.Stream, torch.Event, torch.accelerator.current_stream = Stream, Event, lambda *_: Stream.current[-1]
    torch.accelerator.set_device_index = lambda *_: None
    # what is read on purpose: digests of the first passes and of a checkpoint, and the result of an evaluation
    first_passes_module.fingerprint_tensors = lambda name, tensors: len(fingerprint._sum_by_device(name, tensors))
    copier_module.fingerprint_weights = lambda state: fingerprint.fingerprint_weights(state).numel()
    copier_module.fingerprint_buffers = lambda model: fingerprint.fingerprint_buffers(model).numel()
    copier_module.gather_rows = lambda row, ctx: [[0, 0]]
    archive.is_tensor = lambda value: type(value) in (FakeTensor, nn.Parameter)  # else no checkpoint can hold one
    MetricTracker.means = lambda self: {"loss": 0.0}


def autocast():
    """The casts of MiniResNet's operators, which torch has for the devices that it knows. Returns what keeps them."""
    key, keys = "AutocastPrivateUse1", torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    rest, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, key)

    def cast(function, dtype):
        def casting(*args):
            args = [value.to(dtype) if isinstance(value, torch.Tensor) else value for value in args]
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return function(*args)

        return casting

    for name in ("conv2d", "linear"):
        library.impl(name, cast(getattr(torch.ops.aten, name), torch.bfloat16), key)
    library.impl("log_softmax.int", cast(torch.ops.aten.log_softmax.int, torch.float32), key)
    return rest, library


def main():
    _setup_privateuseone_for_python_backend(DEVICE, Backend())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    recorder, _casts = Recorder(), autocast()
    made_of_stubs(recorder)
    traces = {"plain": run(recorder), "more": run(recorder, *MORE)}
    with batches_are_graphs():
        traces["graphs"] = run(recorder)
    for name, (owner, function, fault) in FAULTS.items():
        with mock.patch.object(owner, function, fault):
            try:
                traces[name] = run(recorder)
            except DataDependentOutputException as error:
                traces[name] = f"read: {error}"
    print(json.dumps(traces))


def run(recorder, *flags):
    """What the first and the last step of the second epoch, a log point, an evaluation and a checkpoint do."""
    config = TrainingConfig.from_args(["--amp_dtype", "bf16", "--dataset_size", str(4 * 64), *flags])
    ctx, Stream.current = DistributedContext(0, 0, 1, torch.device(DEVICE, 0)), [Stream()]
    clock = PhaseClock(ctx.device)
    loader, _ = create_distributed_dataloader(dataset.create_dataset(config, "train"), config, ctx, clock)
    held_out = create_evaluation_dataloader(dataset.create_dataset(config, "val"), config, ctx, clock)
    for data_loader in (loader, held_out):
        planned(data_loader.sampler)
    with Fake(allow_non_fake_inputs=True), recorder:
        return train_and_save(recorder, loader, {"val": held_out}, config, ctx)


def planned(sampler):
    """Draw the orders now, with their values."""
    orders = [list(sampler.micro_batches(epoch)) for epoch in range(EPOCHS)]
    sampler.micro_batches = lambda epoch, start=0: iter(orders[epoch])


def train_and_save(recorder, loader, held_out, config, ctx):
    hooks, clock, sampler = ModelHooks.from_module(your_model, config, ctx.device), loader._clock, loader.sampler
    state = create_train_state(hooks, config, ctx)
    model = wrap_ddp(state.model, config, ctx)
    run_first_passes(
        model,
        state,
        loader,
        held_out,
        hooks,
        ctx,
        best_metric=config.best_metric,
        max_steps=config.max_steps,
    )
    state.plan_schedule(sampler)
    for owner, name, part in (
        (loader, "_fetch_micro_batch", "loader"),
        (loader, "_to_device", "augmentation"),
        (state, "backward", "backward"),
        (state.optimizer, "step", "optimizer"),
    ):
        recorder.patch(owner, name, part)
    compute_loss = SimpleNamespace(f=hooks.compute_loss)
    recorder.patch(compute_loss, "f", "forward")
    hooks = dataclasses.replace(hooks, compute_loss=compute_loss.f)
    attempt = SimpleNamespace(config=config, ctx=ctx, clock=clock)
    nothing = mock.MagicMock()
    nothing.step.return_value = False
    reporter = mock.Mock(is_log_due=False, record_step=lambda *_: steps.append(recorder.take()))
    training = SimpleNamespace(
        **{"attempt": attempt, "hooks": hooks, "loader": loader, "state": state, "model": model},
        **{"consensus": nothing, "checkpoints": nothing, "reporter": reporter},
    )
    recorder.part = "update"
    recorder.take()
    for _ in range(EPOCHS):
        steps = []
        train.train_one_epoch(training)
        state.schedule.end_epoch()
    recorder.take()
    recorder.part = "log point"
    state.log_window.begin_read(fingerprint.fingerprint_state(state))
    log_point, recorder.part = recorder.take(), "evaluation"
    Evaluation(state.model, hooks, state.precision, ctx, state.parts).evaluate_all_weights(
        "val", held_out["val"], state.weight_contexts(), state.progress
    )
    trace = {"first step": steps[0], "step": steps[-1], "log point": log_point, "evaluation": recorder.take()}
    recorder.part = "checkpoint"
    return trace | {"checkpoint": save(recorder, state, attempt)}


def save(recorder, state, attempt):
    """The copy of a checkpoint, whose thread is this one: modes of torch are those of their thread."""
    run = mock.MagicMock(is_node_leader=True, mirror=None, resume_path=None, checkpoint_folder=Path("checkpoints"))
    attempt = SimpleNamespace(run=run, **vars(attempt))
    checkpoints = Checkpoints(attempt, state, {}, before_save=lambda: None)
    recorder.take()

    def call(function, **options):
        return function(**options)

    with mock.patch.object(checkpoints._snapshot._thread, "submit", call):
        checkpoints._snapshot.start()
    return recorder.take()


if __name__ == "__main__":
    main()
