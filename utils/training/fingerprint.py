"""64 bits that change with any bit of the training state: they compare ranks, a resume with its checkpoint, and runs.

A fingerprint is the sum, modulo 2^64, of each 32 bits of the state times a key that depends on their position. So
exchanged values are seen, and neither the order of chunks nor which rank has which rows matters. States that differ
have the same one by chance: once in 2^64, or in 2^33 if they differ in nothing but signs (Lemire and Kaser, "Strongly
universal string hashing is fast", 2014). A value of 0 adds nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.distributed.dtensor import find_shard_group, is_sharded, local_row_range, local_shard, model_device
from utils.rng import derive_seed, hash_bits
from utils.training.schedule import Progress
from utils.training.state import TrainState

NUM_KEYS = 2**21  # 16 MB on each device; those of later positions are these times a number
CHUNK_SIZES = {"cpu": 2**16}  # values at a time, in the processor's cache; elsewhere as many as keys, which takes 40 MB
WORD_TYPES = {1: torch.int8, 2: torch.int16}  # by element size; larger elements are several int32


@torch.no_grad()
def fingerprint_tensors(name: str, tensors: Iterable[Tensor], parameters: Iterable[Any] | None = None) -> int:
    """The fingerprint of a sequence of tensors, as a signed number. Reads from the device.

    parameters: for each tensor, the parameter of which it holds this rank's rows; the tensor itself if it is not
        sharded. The sum of the fingerprints over the shards is that of the whole tensors. What is not sharded, a
        0-dimensional tensor, counts on the first shard only.
    """
    return int(sum(total.cpu() for total in _sum_by_device(name, tensors, parameters).values()))


@torch.no_grad()
def fingerprint_on_device(
    name: str, tensors: Iterable[Tensor], device: torch.device, parameters: Iterable[Any] | None = None
) -> Tensor:
    """As `fingerprint_tensors`, on the device where most of the tensors are: int64, 0-dimensional. Reads nothing."""
    totals = _sum_by_device(name, tensors, parameters).values()
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return sum((total.to(device, non_blocking=True) for total in totals), zero)


def _sum_by_device(
    name: str, tensors: Iterable[Tensor], parameters: Iterable[Any] | None = None
) -> dict[torch.device, Tensor]:
    """The summands of a fingerprint by device: int64, 0-dimensional."""
    tensors, totals = list(tensors), defaultdict[torch.device, Any](int)
    for (device, *_), group in groupby(
        _split_pieces(zip(tensors, parameters or tensors, strict=True)), lambda piece: piece[:3]
    ):
        pieces = list(group)
        block, first = divmod(pieces[0][3], NUM_KEYS)
        products = torch.cat([words for *_, words in pieces]).long()
        products *= _random_keys(device)[first : first + len(products)]
        totals[device] += products.sum() * (derive_seed(name, block) | 1)
    return totals


def _split_pieces(pairs: Iterable[tuple[Tensor, Any]]) -> Iterator[tuple[torch.device, int, int, int, Tensor]]:
    """Flat integers, with the device, the chunk, the number of values skipped so far, and the position."""
    end = done = 0
    for tensor, parameter in pairs:
        per_element, kind = max(1, tensor.element_size() // 4), WORD_TYPES.get(tensor.element_size(), torch.int32)
        first, rows, position = 0, torch.atleast_1d(tensor.detach()), end
        if is_sharded(parameter):
            first = local_row_range(parameter)[0]
            position += first * (parameter.numel() // parameter.shape[0]) * per_element if tensor.ndim else 0
            rows = rows[: len(rows) if tensor.ndim else first == 0]
        end += (parameter.numel() if tensor.ndim else 1) * per_element
        chunk = CHUNK_SIZES.get(tensor.device.type, NUM_KEYS)
        max_rows = len(rows) if rows.is_contiguous() else chunk * len(rows) // rows.numel()  # else they are copied
        for row_block in rows.split(max(1, max_rows)):
            flat = row_block.reshape(-1).view(kind)
            while len(flat):
                count = min(len(flat), chunk - position % chunk)
                yield flat.device, position // chunk, position - done, position, flat[:count]
                position, done, flat = position + count, done + count, flat[count:]


@cache
def _random_keys(device: torch.device) -> Tensor:
    """Odd random numbers. The first passes of a run create them, before other streams of the device use them."""
    return hash_bits(torch.arange(NUM_KEYS, device=device), derive_seed("fingerprint")) | 1


def fingerprint_state(state: TrainState) -> Tensor:
    """The fingerprint of weights, buffers, optimizer state and position: int64, 0-dimensional, on the device. Reads
    nothing from it; a collective if sharded."""
    total = fingerprint_weights(state)
    if group := find_shard_group(state.parameters_by_tensor.values()):
        dist.all_reduce(total, group=group)
    return total + fingerprint_buffers(state.model) + fingerprint_position(state.progress)


def format_fingerprint(fingerprint: int) -> str:
    """As in records and checkpoints."""
    return f"{fingerprint % 2**64:016x}"


def fingerprint_weights(state: TrainState) -> Tensor:
    """The summand of weights and optimizer state; of sharded ones, those of this rank. On the device, as a digest."""
    states = [
        (state.optimizer.state.get(tensor, {}), parameter) for tensor, parameter in state.parameters_by_tensor.items()
    ]
    keys = sorted({key for param_state, _ in states for key in param_state})
    slots = [(param_state.get(key), parameter) for key in keys for param_state, parameter in states]
    pairs = [
        *state.parameters_by_tensor.items(),
        *((value, parameter) for value, parameter in slots if isinstance(value, Tensor)),
    ]
    tensors, parameters = zip(*pairs, strict=True)
    return fingerprint_on_device("weights", tensors, model_device(state.model), parameters)


def fingerprint_parameters(model: nn.Module) -> int:
    """The fingerprint of all parameters, frozen ones too, whole. Reads from the device; a collective if sharded."""
    parameters = list(model.parameters())
    total = fingerprint_on_device(
        "parameters", [local_shard(parameter) for parameter in parameters], model_device(model), parameters
    )
    if group := find_shard_group(parameters):
        dist.all_reduce(total, group=group)
    return int(total)


def fingerprint_position(progress: Progress) -> int:
    """The summand of the position."""
    return derive_seed("position", progress.epoch, progress.step, progress.samples_in_epoch, progress.samples_seen)


def fingerprint_buffers(model: nn.Module) -> Tensor:
    """The summand of the buffers that checkpoints hold, those of integers too. On the device, as a digest."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    buffers = [local_shard(x) for name, x in state.items() if isinstance(x, Tensor) and name not in names]
    return fingerprint_on_device("buffers", buffers, model_device(model))
