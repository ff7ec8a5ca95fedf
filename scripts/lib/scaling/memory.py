"""Estimate the memory of a rank for each --sharding and number of ranks.

Activations are measured: a micro-batch passes through the model, and each block runs forward and backward by itself, so
that only one block at a time is on the device. All else is computed. Counted are tensors, not what kernels, CUDA and
the allocator use for themselves.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import train
from config import TrainingConfig
from ddp_utils import DistributedContext
from utils.batch import map_tensors, tensors_in
from utils.data.loader import create_distributed_dataloader
from utils.data.sets import load_data
from utils.table import format_table
from utils.training.activation import checkpoint_blocks
from utils.training.optimizer import prepare
from utils.training.precision import Precision
from utils.training.seams import Seams

SHARDINGS = ("none", "zero2", "hybrid", "zero3")  # the later ones gather more often
USABLE = 0.9  # of a device's memory; the rest is for kernels and the allocator


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors on a device that operations have created: those alive now, and at most."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.now = self.most = 0
        self.gradients = self.most_without = 0  # gradients of parameters that are alive; at most without these
        self._device, self._known = device, WeakIdKeyDictionary()

    def restart(self) -> None:
        """Begin another maximum, without gradients."""
        self.gradients, self.most, self.most_without = 0, self.now, self.now

    def note_gradient(self, parameter: Tensor) -> None:
        self.gradients += parameter.grad.nbytes

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            self._known[tensor.untyped_storage()] = True
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if storage not in self._known and storage.device.type == self._device.type:
                self._known[storage] = True
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)
        self.most_without = max(self.most_without, self.now - self.gradients)


@dataclass
class Part:
    """A block, or the rest of the model, with the bytes of its activations on the device."""

    parameters: list[Tensor]
    kept: int = 0  # from the forward to the backward pass
    cast: int = 0  # until the end of the forward pass of the model: weights in 16 bits
    forward: int = 0  # at most in the forward pass, beside the above
    backward: int = 0  # at most in the backward pass, beside what is kept, with gradients of its parameters
    backward_without: int = 0  # the same without these gradients

    def size(self, ranks: int = 1, is_trained: bool = False) -> int:
        """Bytes of a shard of its parameters: FSDP divides the first dimension, rounded up."""
        parameters = [p for p in self.parameters if p.requires_grad or not is_trained]
        return sum(math.ceil(p.shape[0] / ranks) * p[:1].nbytes if p.ndim else p.nbytes for p in parameters)


@dataclass(frozen=True)
class Measured:
    blocks: list[Part]  # in the order of the forward pass
    rest: Part
    states: float  # bytes of optimizer state per byte of a trained parameter
    has_average: bool
    buffers: int


def measure(config: TrainingConfig, ctx: DistributedContext) -> Measured:
    """Run a micro-batch of the training set through the fork's model. Raises UserError."""
    seams, sets = Seams.of(train.your_model), load_data(train.your_data, config, ctx)
    torch.manual_seed(config.seed)
    model = seams.create_model(sets.config, torch.device("cpu"))
    blocks = seams.blocks(model)
    if config.activation_checkpointing:
        checkpoint_blocks(model, blocks)
    config = sets.config
    batch = create_distributed_dataloader(sets.train, config, ctx)[0].sample_batch()
    uses = _uses(model)
    whole = [block for block in blocks if block is not model and _uses(block).items() <= uses.items()]
    parts = {block: Part([*_uses(block)]) for block in whole}  # as utils/training/sharding.py groups them
    inside = {p for part in parts.values() for p in part.parameters}
    rest = Part([p for p in uses if p not in inside])
    live = LiveBytes(ctx.device)
    for block, part in parts.items():
        block.forward = _measured(block, part, live, ctx.device)
    modules = {module for block in parts for module in block.modules()}
    for module in model.modules():
        if module not in modules:
            module._apply(lambda tensor: tensor.to(ctx.device), recurse=False)
    for parameter in uses:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(live.note_gradient)
    precision = Precision.choose(config, ctx.device, ctx.fast_bf16)
    model.train()
    with live:
        with precision.autocast():
            loss = seams.compute_loss(model, batch)["loss"][0]
            held = live.now
        rest.kept = live.now
        rest.cast, rest.forward = held - rest.kept, live.most - held
        live.restart()
        loss.backward()
    rest.backward, rest.backward_without = live.most - rest.kept, live.most_without - rest.kept
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    states = _optimizer_states(seams, model, config, ctx.device)
    return Measured([*parts.values()], rest, states, config.ema_decay > 0, buffers)


def _uses(module: nn.Module) -> Counter[Tensor]:
    """How often the module uses each of its parameters."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _measured(block: nn.Module, part: Part, live: LiveBytes, device: torch.device) -> Callable[..., Any]:
    """A forward pass that also runs the block backward, and notes its bytes."""
    plain = block.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        block.to(device)
        inputs, options = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), (inputs, options))
        before = live.now
        output = plain(*inputs, **options)
        cast = live.now
        torch.clear_autocast_cache()
        live.restart()
        kept = live.now
        part.cast, part.kept = part.cast + cast - kept, part.kept + kept - before
        ends = [tensor for tensor in tensors_in((output,)) if tensor.requires_grad]
        if ends:
            with torch.autocast(device.type, enabled=False):
                torch.autograd.backward(ends, [torch.zeros_like(tensor) for tensor in ends])
        torch.clear_autocast_cache()  # of what activation checkpointing computed again
        part.backward = max(part.backward, live.most - kept)
        part.backward_without = max(part.backward_without, live.most_without - kept)
        block.zero_grad()
        output = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), output)
        del ends
        block.to("cpu")
        live.restart()
        return output

    return forward


def _optimizer_states(seams: Seams, model: nn.Module, config: TrainingConfig, device: torch.device) -> float:
    """Take a step with one small parameter."""
    parameter = nn.Parameter(torch.zeros(64, 64, device=device))
    group = seams.param_groups(model, config)[0] | {"params": [parameter]}
    optimizer = seams.create_optimizer([group], config)
    prepare(optimizer)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = tensors_in(dict(optimizer.state[parameter]))
    return sum(state.nbytes for state in states if state.shape == parameter.shape) / parameter.nbytes


@dataclass(frozen=True)
class Estimate:
    """Bytes of a rank. peak: at any moment of a step; less than the sum, as activations are freed for gradients."""

    parameters: int  # and buffers
    gradients: int
    optimizer: int  # and the moving average
    gathered: int  # whole parameters and gradients in the passes of a sharded model
    activations: int
    peak: int


def estimate(found: Measured, sharding: str, ranks: int, per_node: int, accumulates: bool) -> Estimate:
    """accumulates: more than one micro-batch per step and rank."""
    shards = {"none": 1, "hybrid": min(ranks, per_node)}.get(sharding, ranks)
    parts = [*found.blocks, found.rest]
    parameters = sum(part.size(shards) for part in parts)
    gradients = sum(part.size(shards, is_trained=True) for part in parts)
    average = found.has_average * parameters
    optimizer = round(gradients * found.states) + average
    phases = [*_phases(found, sharding, shards, ranks, accumulates)]
    buckets = gradients if sharding == "none" and ranks > 1 else 0  # DDP keeps them
    most = max(*map(sum, phases), gradients, buckets + average)  # the average's update has a copy of it
    parameters += found.buffers
    gathered, activations = (max(phase[k] for phase in phases) for k in (1, 2))
    return Estimate(parameters, gradients, optimizer, gathered, activations, parameters + optimizer + most)


def _phases(
    found: Measured, sharding: str, shards: int, ranks: int, accumulates: bool
) -> Iterator[tuple[int, int, int]]:
    """Gradients, gathered and activations in each phase of the passes of a micro-batch, as in torch's FSDP2."""
    blocks, rest, is_sharded = found.blocks, found.rest, sharding != "none"
    whole = [is_sharded * shards * block.size(shards) for block in blocks]
    grads = [is_sharded * block.size(is_trained=True) for block in blocks]
    ready = [part.size(shards, is_trained=True) for part in (*blocks, rest)]
    own = is_sharded * shards * rest.size(shards)  # gathered from forward to backward
    own_grads = is_sharded * rest.size(is_trained=True)
    has_buckets = ranks > 1 and not is_sharded  # DDP copies what has accumulated into them in the last micro-batch
    begin = sum(ready) * (accumulates + has_buckets)
    kept = sum(block.kept for block in blocks)
    last = whole[-1] if whole else own  # the buffer of the last all-gather is freed after the next one
    gathered = own + (sum(whole) if sharding == "zero2" else 0)
    cast = rest.cast + sum(block.cast for block in blocks)
    yield begin, gathered + last * (shards > 1), kept + rest.kept + cast + rest.forward
    has_gradients = begin and not is_sharded  # which those of a micro-batch are added to, one by one
    yield begin, gathered, kept + rest.kept + (rest.backward_without if has_gradients else rest.backward)
    for k in reversed(range(len(blocks))):
        gathered = own + own_grads
        if sharding == "zero2":
            gathered += sum(whole[: k + 1])
        else:  # its parameters, and the buffer of the all-gather for the block before it
            gathered += sum(whole[max(0, k - 1) : k + 1])
        kept, before = sum(block.kept for block in blocks[: k + 1]), begin or sum(ready[k + 1 :])
        most = blocks[k].backward_without if has_gradients else blocks[k].backward
        yield before, gathered + sum(grads[k + 1 : k + 2]), kept + most  # gradients of the block after it are reduced
        yield begin or sum(ready[k:]), gathered + 2 * grads[k], kept - blocks[k].kept
    yield sum(ready), own + 2 * own_grads, 0


def text(config: TrainingConfig, found: Measured, device: str, ranks: list[int], per_node: int, room: int) -> str:
    """The table, and the flag to paste: of the first strategy that fits on the most ranks.

    room: bytes of memory for each rank.
    """
    columns = ("parameters", "gradients", "optimizer", "gathered", "activations", "peak")
    rows, chosen = [("flags", "ranks", *columns)], None
    for count in ranks:
        for sharding in SHARDINGS if count > 1 else SHARDINGS[:1]:
            accumulates = config.micro_batches_per_step(count) > count
            sizes = vars(estimate(found, sharding, count, per_node, accumulates))
            rows.append((f"--sharding {sharding}", str(count), *(f"{sizes[name] / 1e6:,.1f}" for name in columns)))
            is_allowed = sharding != "hybrid" or (count > per_node and count % per_node == 0)
            if count == ranks[-1] and not chosen and is_allowed and sizes["peak"] <= USABLE * room:
                chosen = sharding
    head = f"MB per rank in a step with micro-batches of {config.batch_size} on {device}, {per_node} ranks per node"
    limit = f"{USABLE:.0%} of {room / 1e9:,.1f} GB per rank, on {ranks[-1]} rank{'s' * (ranks[-1] > 1)}"
    more = "use more ranks, a smaller --batch_size"
    more += "" if config.activation_checkpointing else ", or --activation_checkpointing"
    last = f"flags: --sharding {chosen}   (the first whose peak fits into {limit})"
    last = last if chosen else f"the model does not fit into {limit}; {more}"
    return "\n".join([head, format_table(rows, range(1, len(rows[0]))), last])
