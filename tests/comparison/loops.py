# extra: template
"""The loops that this template is compared with: plain loop, bare loop, and the official DDP tutorial's."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dataset as fork_dataset
import model as fork_model
from config import TrainingConfig
from ddp_utils import DistributedContext, wrap_ddp
from utils.data.transfer import SideStream, pin_batch, to_device
from utils.metrics import Metrics
from utils.training.optimizer import create_optimizer
from utils.training.precision import Precision

ORACLE = Path(__file__).resolve().parents[1] / "plain_loop.py"


class RankSubset(Dataset):
    """One rank's samples in the plain and the bare loop: every world_size-th one.

    On a GPU a batch is copied and transformed as in the template: from pinned memory, in a second stream.
    """

    def __init__(self, source: Dataset, ctx: DistributedContext) -> None:
        self._source, self._ctx = source, ctx
        self._side = SideStream(ctx.device) if ctx.device.type != "cpu" else None
        if self._side:
            self._side.wait_for_current_stream()
        self._indices = range(ctx.rank, len(source) - len(source) % ctx.world_size, ctx.world_size)
        self.collate = getattr(source, "collate", torch.utils.data.default_collate)
        self._transform = getattr(source, "device_transform", lambda batch, *_: batch)
        if hasattr(source, "__getitems__"):
            self.__getitems__ = lambda chosen: source.__getitems__(
                chosen if ctx.world_size == 1 else [self._indices[k] for k in chosen]
            )

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._source[self._indices[index]]

    def device_transform(self, batch: Any, seed: int, epoch: int, chosen: Tensor) -> Any:
        """Also copies the batch, which is on the host, and the indices, for which the host does not wait either."""
        chosen = self._ctx.rank + chosen * self._ctx.world_size
        if not self._side:
            return self._transform(batch, seed, epoch, chosen)
        on_host = pin_batch((batch, chosen))

        def move() -> Any:
            batch, indices = to_device(on_host, self._ctx.device)
            return self._transform(batch, seed, epoch, indices)

        batch, event = self._side.run(move)
        self._side.sync_to_current_stream(batch, event)
        return batch


def plain(
    config: TrainingConfig, ctx: DistributedContext, precision: Precision, data: Dataset | None = None
) -> Iterator[tuple[nn.Module, Tensor, float]]:
    """tests/plain_loop.py one step at a time: the run's precision, a fused optimizer, DDP on several ranks.

    Yields the model, the loss summed over this rank's samples of the step (float64, on the device) and its count.

    Args:
        data: the training set; by default the fork's.
    """
    spec = importlib.util.spec_from_file_location("plain_loop_for_comparison", ORACLE)
    loop = importlib.util.module_from_spec(spec)  # a copy of the module, because functions of it are replaced below
    spec.loader.exec_module(loop)
    hooks, create, compute = vars(fork_model), loop.create_model, loop.compute_loss
    compute = loop.fill_in(compute, config=config)
    is_last_micro_batch = itertools.cycle([False] * (config.grad_accum_steps - 1) + [True])

    def create_model(config: TrainingConfig, device: torch.device) -> nn.Module:
        model = create(config, device)
        return wrap_ddp(model, config, ctx) if ctx.world_size > 1 else model

    def compute_loss(model: nn.Module, batch: Any) -> Metrics:
        model.require_backward_grad_sync = next(is_last_micro_batch)
        with precision.autocast():
            return compute(model, batch)

    def create_scaled(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.Optimizer:
        """torch's fused kernels on CUDA round otherwise if they are given a scale, even 1, as those of a run are."""
        optimizer = hooks.get("create_optimizer", create_optimizer)(groups, config)
        optimizer.grad_scale = torch.ones((), device=ctx.device)
        return optimizer

    if ctx.device.type == "cuda":
        loop.your_model = SimpleNamespace(**hooks | {"create_optimizer": create_scaled})
    loop.create_dataset = lambda config, split: RankSubset(data or fork_dataset.create_dataset(config, split), ctx)
    loop.create_model, loop.compute_loss = create_model, compute_loss
    for model, _, loss, count in loop.plain_loop(config, config.grad_accum_steps, ctx.device, fused=True):
        yield model, loss, count


def bare(config: TrainingConfig, ctx: DistributedContext, precision: Precision) -> Iterator[None]:
    """What an expert writes by hand for speed: only what training needs, and nothing that waits for the device.

    No schedule, gradient norm, seeds or metrics, and stock BatchNorm. The loss is that of the built-in model.
    """
    data = RankSubset(fork_dataset.create_dataset(config, "train"), ctx)
    fetch = getattr(data, "__getitems__", lambda chosen: [data[k] for k in chosen])
    torch.manual_seed(config.seed)
    model = fork_model.create_model(config, ctx.device).train()
    wrapped = wrap_ddp(model, config, ctx) if ctx.world_size > 1 else model
    optimizer = create_optimizer(fork_model.param_groups(model, config), config)  # torch's, fused
    for epoch in itertools.count():
        micro_batches = torch.randperm(len(data)).split(config.batch_size)
        for number, chosen in enumerate(micro_batches, start=1):
            is_last_micro_batch = number % config.grad_accum_steps == 0 or number == len(micro_batches)
            host_batch = data.collate(fetch(chosen.tolist()))
            images, labels = data.device_transform(host_batch, config.seed, epoch, chosen)
            wrapped.require_backward_grad_sync = is_last_micro_batch  # as DDP.no_sync sets it
            with precision.autocast():
                loss = cross_entropy(wrapped(images), labels, label_smoothing=config.label_smoothing)
            (loss / config.grad_accum_steps).backward()
            if is_last_micro_batch:
                optimizer.step()
                optimizer.zero_grad()
                yield


class FloatImages(Dataset):
    """The images decoded and normalised before timing starts, without augmentation: the tutorial's best case."""

    def __init__(self, source: Any) -> None:
        images = torch.stack([source[k][0] for k in range(len(source))]).float() / 255
        self._images = (images - source.mean.view(-1, 1, 1)) / source.std.view(-1, 1, 1)
        self._labels = torch.as_tensor(source.targets).tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], self._labels[index]


class Tutorial:
    """The tutorial's loop around our model and images: float32, stock DDP, sampler and loader.

    As in the tutorial, the host waits for both copies of each batch, and so for all work queued before.

    Source: https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/multigpu_torchrun.py
    """

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        self._device, is_cuda = ctx.device, ctx.device.type == "cuda"
        data = FloatImages(fork_dataset.create_dataset(config, "train"))
        torch.manual_seed(config.seed)
        model = fork_model.create_model(config, ctx.device).to(memory_format=torch.contiguous_format)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._model = DistributedDataParallel(model, device_ids=[ctx.device.index] if is_cuda else None)
        self._loader = DataLoader(data, config.batch_size, sampler=DistributedSampler(data), pin_memory=is_cuda)

    def epoch(self) -> None:
        len(next(iter(self._loader))[0])  # the tutorial reads one batch to print its size
        for source, targets in self._loader:
            source, targets = source.to(self._device), targets.to(self._device)
            self._optimizer.zero_grad()
            output = self._model(source)
            loss = torch.nn.CrossEntropyLoss()(output, targets)
            loss.backward()
            self._optimizer.step()
