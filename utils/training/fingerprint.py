"""64 bits that change with any bit of the training state: they compare ranks, a resume with its checkpoint, and runs.

A fingerprint is the sum, modulo 2^64, of each 32 bits of the state times a key that depends on their position. So
exchanged values are seen, and neither the order of chunks nor which rank has which rows matters. States that differ
have the same one by chance: once in 2^64, or in 2^33 if they differ in nothing but signs (Lemire and Kaser, "Strongly
universal string hashing is fast", 2014). A value of 0 adds nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.distributed.dtensor import find_shard_group, is_sharded, local_row_range, local_shard, model_device
from utils.rng import derive_seed, hash_bits
from utils.training.schedule import Progress
from utils.training.state import TrainState

NUM_KEYS = 2**21  # 16 MB on each device; the keys of later positions are these times a number
CHUNK_SIZES = {"cpu": 2**16}  # words at a time, in the processor's cache; elsewhere NUM_KEYS, which takes 40 MB
WORD_TYPES = {1: torch.int8, 2: torch.int16}  # by element size; larger elements are several int32


class Piece(NamedTuple):
    """Consecutive words of the tensors, all in one chunk. A word is an integer of at most 32 bits."""

    device: torch.device
    chunk: int  # the number of the chunk
    skipped: int  # how many words before this piece are on other ranks only
    position: int  # of the first word among the words of all ranks
    words: Tensor  # flat

    @property
    def group(self) -> Hashable:
        """Successive pieces with an equal value have successive keys, so they are multiplied at once."""
        return self.device, self.chunk, self.skipped


@torch.no_grad()
def fingerprint_tensors(name: str, tensors: Iterable[Tensor], parameters: Iterable[Any] | None = None) -> int:
    """Return the fingerprint of a sequence of tensors, as a signed number. Reads from the device.

    Args:
        name: what the tensors are. Other names have other keys.
        parameters: for each tensor, the parameter of which it holds this rank's rows, or the tensor itself if it is not
            sharded. The sum of the fingerprints over the shards is that of the whole tensors. A tensor without rows
            (0-dimensional) is not sharded, and counts on the first shard only.
    """
    totals = _sum_by_device(name, tensors, parameters)
    return int(sum(total.cpu() for total in totals.values()))


@torch.no_grad()
def fingerprint_on_device(
    name: str,
    tensors: Iterable[Tensor],
    device: torch.device,
    parameters: Iterable[Any] | None = None,
) -> Tensor:
    """Return what `fingerprint_tensors` returns, without reading from the device.

    Args:
        device: where most of the tensors are.

    Returns:
        int64, 0-dimensional, on the device.
    """
    fingerprint = torch.zeros((), dtype=torch.int64, device=device)
    for total in _sum_by_device(name, tensors, parameters).values():
        fingerprint += total.to(device, non_blocking=True)
    return fingerprint


def _sum_by_device(
    name: str,
    tensors: Iterable[Tensor],
    parameters: Iterable[Any] | None = None,
) -> dict[torch.device, Tensor]:
    """Return the summand of a fingerprint on each device: int64, 0-dimensional."""
    tensors = list(tensors)
    if parameters is None:
        parameters = tensors
    totals = defaultdict[torch.device, Any](int)
    for _, group in groupby(_split_pieces(tensors, parameters), lambda piece: piece.group):
        pieces = list(group)
        device = pieces[0].device
        block, first = divmod(pieces[0].position, NUM_KEYS)
        products = torch.cat([piece.words for piece in pieces]).long()
        products *= _random_keys(device)[first : first + len(products)]
        block_key = derive_seed(name, block) | 1
        totals[device] += products.sum() * block_key
    return totals


def _split_pieces(tensors: Iterable[Tensor], parameters: Iterable[Any]) -> Iterator[Piece]:
    """Yield the words of the tensors in pieces that end where a chunk ends."""
    end = 0  # the position after the words of all ranks in the tensors so far
    done = 0  # the words yielded so far
    for tensor, parameter in zip(tensors, parameters, strict=True):
        has_rows = tensor.ndim > 0
        words_per_element = max(1, tensor.element_size() // 4)
        word_type = WORD_TYPES.get(tensor.element_size(), torch.int32)
        rows = torch.atleast_1d(tensor.detach())

        position = end
        if is_sharded(parameter):
            first_row = local_row_range(parameter)[0]
            if has_rows:
                elements_per_row = parameter.numel() // parameter.shape[0]
                position += first_row * elements_per_row * words_per_element
            elif first_row > 0:
                rows = rows[:0]
        if has_rows:
            end += parameter.numel() * words_per_element
        else:
            end += words_per_element

        chunk_size = CHUNK_SIZES.get(tensor.device.type, NUM_KEYS)
        rows_at_once = len(rows)
        if not rows.is_contiguous():
            rows_at_once = chunk_size * len(rows) // rows.numel()  # `reshape` copies them
        for row_block in rows.split(max(1, rows_at_once)):
            words = row_block.reshape(-1).view(word_type)
            while len(words):
                chunk, offset = divmod(position, chunk_size)
                count = min(len(words), chunk_size - offset)
                yield Piece(
                    device=words.device,
                    chunk=chunk,
                    skipped=position - done,
                    position=position,
                    words=words[:count],
                )
                position += count
                done += count
                words = words[count:]


@cache
def _random_keys(device: torch.device) -> Tensor:
    """Return odd random numbers.

    The first passes of a run create them, before other streams of the device use them.
    """
    numbers = torch.arange(NUM_KEYS, device=device)
    return hash_bits(numbers, derive_seed("fingerprint")) | 1


def fingerprint_state(state: TrainState) -> Tensor:
    """Return the fingerprint of weights, buffers, optimizer state and position.

    Reads nothing from the device. It is a collective if the model is sharded.

    Returns:
        int64, 0-dimensional, on the device.
    """
    total = fingerprint_weights(state)
    group = find_shard_group(state.parameters_by_tensor.values())
    if group:
        dist.all_reduce(total, group=group)
    return total + fingerprint_buffers(state.model) + fingerprint_position(state.progress)


def format_fingerprint(fingerprint: int) -> str:
    """Return the fingerprint as records and checkpoints have it: 16 hexadecimal digits."""
    return f"{fingerprint % 2**64:016x}"


def fingerprint_weights(state: TrainState) -> Tensor:
    """Return the summand of weights and optimizer state, of which this rank has shards if the model is sharded.

    Returns:
        int64, 0-dimensional, on the device.
    """
    tensors: list[Tensor] = list(state.parameters_by_tensor)
    parameters = list(state.parameters_by_tensor.values())
    param_states = state.optimizer.state
    keys: set[str] = set()  # such as exp_avg
    for tensor in state.parameters_by_tensor:
        keys.update(param_states.get(tensor, {}))
    for key in sorted(keys):
        for tensor, parameter in state.parameters_by_tensor.items():
            value = param_states.get(tensor, {}).get(key)
            if isinstance(value, Tensor):
                tensors.append(value)
                parameters.append(parameter)
    return fingerprint_on_device(
        "weights",
        tensors,
        device=model_device(state.model),
        parameters=parameters,
    )


def fingerprint_parameters(model: nn.Module) -> int:
    """Return the fingerprint of all whole parameters, of frozen ones too.

    Reads from the device. It is a collective if the model is sharded.
    """
    parameters = list(model.parameters())
    shards = [local_shard(parameter) for parameter in parameters]
    total = fingerprint_on_device(
        "parameters",
        shards,
        device=model_device(model),
        parameters=parameters,
    )
    group = find_shard_group(parameters)
    if group:
        dist.all_reduce(total, group=group)
    return int(total)


def fingerprint_position(progress: Progress) -> int:
    """Return the summand of the position in the training."""
    return derive_seed("position", progress.epoch, progress.step, progress.samples_in_epoch, progress.samples_seen)


def fingerprint_buffers(model: nn.Module) -> Tensor:
    """Return the summand of the buffers that checkpoints hold, those of integers too.

    Returns:
        int64, 0-dimensional, on the device.
    """
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = []
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and name not in parameter_names:
            buffers.append(local_shard(value))
    return fingerprint_on_device("buffers", buffers, device=model_device(model))
