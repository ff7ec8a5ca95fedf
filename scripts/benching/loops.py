"""What ours is compared with: the bare loop, the fewest operations that train, and the loop of the official DDP
tutorial."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dataset as fork_dataset
import model as fork_model
from config import TrainingConfig
from ddp_utils import DistributedContext, wrap_ddp
from utils.data.transfer import to_device
from utils.training.precision import Precision

ORACLE = Path(__file__).resolve().parents[2] / "tests" / "plain_loop.py"
TUTORIAL = "https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/multigpu_torchrun.py"


class Share(Dataset):
    """What a rank's bare loop trains on: every world_size-th sample, with the batches on the device. Ours deals them
    itself."""

    def __init__(self, source: Dataset, ctx: DistributedContext) -> None:
        self._source, self._rank, self._world_size, self._device = source, ctx.rank, ctx.world_size, ctx.device
        if transform := getattr(source, "device_transform", None):
            self.device_transform = lambda batch, seed, epoch, chosen: transform(
                batch, seed, epoch, self._numbers(chosen).to(self._device)
            )
        if hasattr(source, "__getitems__"):
            self.__getitems__ = lambda indices: source.__getitems__(
                [index * self._world_size + self._rank for index in indices] if self._world_size > 1 else indices
            )

    def _numbers(self, chosen: Tensor) -> Tensor:
        return chosen * self._world_size + self._rank if self._world_size > 1 else chosen

    def __len__(self) -> int:
        return len(self._source) // self._world_size

    def __getitem__(self, index: int) -> Any:
        return self._source[index * self._world_size + self._rank]

    def collate(self, samples: Any) -> Any:
        plain = getattr(self._source, "collate", torch.utils.data.default_collate)
        return to_device(plain(samples), self._device)


def bare(config: TrainingConfig, ctx: DistributedContext, precision: Precision) -> Iterator[tuple[Tensor, float]]:
    """tests/plain_loop.py a step at a time, in DDP where there are several ranks, in the precision of the run, its
    optimizer fused.

    Yields the loss summed over this rank's samples of the step (float64, on the device) and their weight.
    """
    spec = importlib.util.spec_from_file_location("bare_loop", ORACLE)
    loop = importlib.util.module_from_spec(spec)  # a module of its own, whose seams are given other functions for good
    spec.loader.exec_module(loop)
    create, compute = loop.create_model, loop.compute_loss
    last = itertools.cycle([False] * (config.grad_accum_steps - 1) + [True])

    def create_model(config: TrainingConfig, device: torch.device) -> nn.Module:
        net = create(config, device)
        return wrap_ddp(net, config, ctx) if ctx.world_size > 1 else net

    def compute_loss(net: nn.Module, batch: Any) -> tuple:
        net.require_backward_grad_sync = next(last)
        with precision.autocast():
            return compute(net, batch)

    loop.create_dataset = lambda config, split: Share(fork_dataset.create_dataset(config, split), ctx)
    loop.create_model, loop.compute_loss = create_model, compute_loss
    for _, _, loss, weight in loop.plain_loop(config, config.grad_accum_steps, ctx.device, fused=True):
        yield loss, weight


def least(config: TrainingConfig, ctx: DistributedContext, precision: Precision) -> Iterator[None]:
    """The fewest operations that train the same model on the same batches: no schedule, no norm, no seeds, stock
    BatchNorm."""
    data = Share(fork_dataset.create_dataset(config, "train"), ctx)
    transform = getattr(data, "device_transform", lambda batch, *_: batch)
    torch.manual_seed(config.seed)
    model = fork_model.create_model(config, ctx.device).train()
    net = wrap_ddp(model, config, ctx) if ctx.world_size > 1 else model
    optimizer = torch.optim.SGD(
        fork_model.param_groups(model, config), config.lr, config.momentum, nesterov=True, fused=True
    )
    for epoch in itertools.count():
        micro_batches = torch.randperm(len(data)).split(config.batch_size)
        for number, chosen in enumerate(micro_batches, start=1):
            is_last = number % config.grad_accum_steps == 0 or number == len(micro_batches)
            samples = (
                data.__getitems__(chosen.tolist())
                if hasattr(data, "__getitems__")
                else [data[k] for k in chosen.tolist()]
            )
            batch = transform(data.collate(samples), config.seed, epoch, chosen)
            net.require_backward_grad_sync = is_last
            with precision.autocast():
                loss, _ = fork_model.compute_loss(net, batch)
            (loss / (len(chosen) * config.grad_accum_steps)).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                yield


class FloatImages(Dataset):
    """The same images, decoded and normalised before any clock runs, and not augmented: the best case for a loop that
    fetches samples."""

    def __init__(self, source: Any) -> None:
        images = torch.stack([source[k][0] for k in range(len(source))]).float() / 255
        self._images = (images - source.mean.view(-1, 1, 1)) / source.std.view(-1, 1, 1)
        self._labels = list(source.targets)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], self._labels[index]


class Tutorial:
    """The loop of the official DDP tutorial (TUTORIAL), in the same operations, around our model and images: float32,
    stock DDP."""

    def __init__(self, config: TrainingConfig, ctx: DistributedContext) -> None:
        self._device = ctx.device
        plain = dataclasses.replace(config, channels_last=False, augment="none")
        train_data = FloatImages(fork_dataset.create_dataset(plain, "train"))
        torch.manual_seed(config.seed)
        model = fork_model.create_model(plain, ctx.device)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._model = DistributedDataParallel(
            model, device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None
        )
        pins, sampler = ctx.device.type == "cuda", DistributedSampler(train_data)
        self._train_data = DataLoader(
            train_data, batch_size=config.batch_size, pin_memory=pins, shuffle=False, sampler=sampler
        )

    def epoch(self) -> None:
        len(next(iter(self._train_data))[0])  # it looks at a batch for its size, and prints that
        for source, targets in self._train_data:
            source, targets = source.to(self._device), targets.to(self._device)
            self._optimizer.zero_grad()
            output = self._model(source)
            loss = torch.nn.CrossEntropyLoss()(output, targets)
            loss.backward()
            self._optimizer.step()
