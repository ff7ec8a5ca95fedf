"""`--batch_tokens N`: micro-batches of samples of similar length, each with at most N tokens (frames, ...), padding
included.

It costs an order in which samples of one micro-batch have similar lengths. Who trains on sequences of unequal length
needs it: with a fixed number of samples most of a micro-batch may be padding, and the longest samples do not fit.

The order of an epoch is drawn as without it, and cut into windows. Within a window it is sorted by length, with the
draw deciding ties, upwards and downwards in turns, so that lengths are similar across the border of two windows too.
It is packed into micro-batches, whose order is drawn again. All this is a function of the seed, the epoch, the lengths
and the settings, so every rank has the same plan, on any number of ranks and after a resume.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from config import TrainingConfig
from utils.data.sampler import Assignment, GlobalBatchSampler, MicroBatch
from utils.data.sets import choose_split_name, dataset_class_name
from utils.data.worker import format_sample_name
from utils.distributed.collectives import read_once_per_file_system
from utils.distributed.context import DistributedContext
from utils.packages import import_optional
from utils.rng import derive_seed
from utils.settings.errors import UserError

numpy = import_optional("--batch_tokens", "numpy")
LENGTHS_DIFFER = (
    "{other} and {first} read different lengths. Copy the data again, or sort what the lengths are made from."
)


class PackedEpoch(NamedTuple):
    """The micro-batches of an epoch, in their order."""

    order: Tensor  # of the samples
    starts: list[int]  # in that order; the last one is the end
    max_lengths: list[int]  # the length of the longest sample
    tokens: list[int]  # without padding

    def find_micro_batch(self, position: int) -> int:
        """The number of the micro-batch that begins at this place of the order."""
        return bisect_left(self.starts, position)

    def count_padded_tokens(self, number: int) -> int:
        return self.max_lengths[number] * (self.starts[number + 1] - self.starts[number])


@dataclass(frozen=True)
class TokenBudget:
    """What a micro-batch may hold: `max_tokens` with padding, and `max_samples`, if that is not 0."""

    max_tokens: int
    max_samples: int
    window: int  # micro-batches that are sorted by length together

    def cut_into_micro_batches(self, lengths: Iterable[int]) -> tuple[list[int], list[int]]:
        """Where micro-batches of consecutive samples begin if each takes as many as it may, with the end of the last
        one, and the longest length in each. A sample that exceeds the budget is alone."""
        begins = [0]
        max_lengths = []
        longest = 0
        count = 0
        position = -1
        max_samples = self.max_samples or self.max_tokens
        for position, length in enumerate(lengths):
            count += 1
            if (length if length > longest else longest) * count > self.max_tokens or count > max_samples:
                if count > 1:
                    begins.append(position)
                    max_lengths.append(longest)
                longest, count = length, 1
            elif length > longest:
                longest = length
        return [*begins, position + 1], [*max_lengths, longest]

    def find_largest(self, lengths: Tensor) -> list[list[int]]:
        """The samples of a micro-batch of the longest, of those with most tokens and with most pairs of tokens in a
        row, padding included, and of one that has the most samples."""
        order = lengths.sort(stable=True, descending=True).indices
        begins, max_lengths = self.cut_into_micro_batches(lengths[order].tolist())
        spans = [*zip(begins, begins[1:], max_lengths, strict=False)]
        chosen = [spans[0], *(max(spans, key=lambda span: (span[1] - span[0]) * span[2] ** power) for power in (1, 2))]
        shortest = order.flip(0)[: self.max_samples or self.max_tokens]
        most_samples = shortest[: self.cut_into_micro_batches(lengths[shortest].tolist())[0][1]]
        return [order[first:end].tolist() for first, end, _ in dict.fromkeys(chosen)] + [most_samples.tolist()]


class BudgetSampler(GlobalBatchSampler):
    """Micro-batches by a budget of tokens.

    Args:
        lengths: int64 [samples], each at least 1, as `read_lengths` returns them.
        options: as for GlobalBatchSampler, without batch_size.
    """

    is_packed = True

    def __init__(self, dataset: Any, lengths: Tensor, budget: TokenBudget, **options: Any) -> None:
        super().__init__(dataset, batch_size=budget.max_samples or len(dataset), **options)
        self.lengths, self.budget, self.largest_micro_batches = lengths, budget, budget.find_largest(lengths)
        self._packed_epochs: dict[int, PackedEpoch] = {}  # of an epoch and the one before
        budget_line = f"{budget.max_tokens:,} tokens, padding included"
        self.provenance = {"budget": budget_line, "lengths": hashlib.sha256(lengths.numpy().tobytes()).hexdigest()[:16]}

    @property
    def global_batch_size(self) -> int:
        """The most that a global batch may have: samples if they are bounded, else tokens with padding."""
        return (self.budget.max_samples or self.budget.max_tokens) * self.micro_batches_per_step

    @property
    def samples_per_epoch(self) -> int:
        """Of the first epoch, if samples are dropped."""
        return len(self.epoch_order(0)) if self.drop_last else len(self.dataset)

    @functools.cached_property
    def micro_batches_per_epoch(self) -> int:  # type: ignore[override]
        return len(self.pack_epoch(0).max_lengths)

    def find_smallest_micro_batch(self, max_steps: int = 0) -> list[list[int]]:
        packed = self.pack_epoch(0)
        sizes = torch.tensor(packed.starts).diff()[: max_steps * self.micro_batches_per_step or None]
        number = int(sizes.argmin())
        return [packed.order[packed.starts[number] : packed.starts[number + 1]].tolist()]

    def count_remaining_steps(self, epoch: int, start: int, epochs: float) -> float:
        if epoch >= epochs:
            return 0
        packed = self.pack_epoch(epoch)
        left = len(packed.max_lengths) - packed.find_micro_batch(start)
        return math.ceil(left / self.micro_batches_per_step) + max(0, epochs - epoch - 1) * self.steps_per_epoch

    def epoch_order(self, epoch: int) -> Tensor:
        return self.pack_epoch(epoch).order

    def pack_epoch(self, epoch: int) -> PackedEpoch:
        """The micro-batches of an epoch. Raises UserError as `GlobalBatchSampler.epoch_order`."""
        if epoch not in self._packed_epochs:
            self._packed_epochs = {
                kept_epoch: packed for kept_epoch, packed in self._packed_epochs.items() if abs(kept_epoch - epoch) == 1
            }
            sampler = GlobalBatchSampler(
                self.dataset,
                batch_size=1,
                micro_batches_per_step=1,
                assignment=self.assignment,
                seed=self.seed,
                shuffle=self.shuffle,
            )
            self._packed_epochs[epoch] = self._pack_order(epoch, sampler.epoch_order(epoch))
        return self._packed_epochs[epoch]

    def _pack_order(self, epoch: int, order: Tensor) -> PackedEpoch:
        lengths, n = self.lengths[order % len(self.lengths)], len(order)
        # in a micro-batch, about
        samples = min(self.budget.max_tokens * n // int(lengths.sum()), self.budget.max_samples or n)
        window = self.budget.window * max(1, samples) if self.shuffle else n
        parts = [
            part.sort(stable=True, descending=number % 2 == 1).indices + number * window
            for number, part in enumerate(lengths.split(window))
        ]
        starts, max_lengths = self.budget.cut_into_micro_batches(
            itertools.chain.from_iterable(lengths[part].tolist() for part in parts)
        )
        positions, begins, longest = torch.cat(parts), torch.tensor(starts), torch.tensor(max_lengths)
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive_seed("micro-batches", self.seed, epoch))
            permutation = torch.randperm(len(max_lengths), generator=generator)
            if self.drop_last:
                permutation = permutation[: len(permutation) - len(permutation) % self.micro_batches_per_step]
            firsts, counts, longest = begins[permutation], begins.diff()[permutation], longest[permutation]
            begins = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
            positions = positions[(firsts - begins[:-1]).repeat_interleave(counts) + torch.arange(int(begins[-1]))]
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[positions].cumsum(0)])[begins].diff()
        return PackedEpoch(order[positions], begins.tolist(), longest.tolist(), tokens.tolist())

    def measure_token_density(self, epoch: int, end: int | None, steps: int) -> tuple[float, float]:
        samples = tokens = padded = 0
        while steps > 0 and epoch >= 0:
            packed, per_step = self.pack_epoch(epoch), self.micro_batches_per_step
            last = len(packed.max_lengths) if end is None else packed.find_micro_batch(end)
            first = max(0, math.ceil(last / per_step) - steps) * per_step
            samples += packed.starts[last] - packed.starts[first]
            tokens = tokens + sum(packed.tokens[first:last])
            padded = padded + sum(map(packed.count_padded_tokens, range(first, last)))
            steps, epoch, end = steps - math.ceil((last - first) / per_step), epoch - 1, None
        return tokens / samples, 1 - tokens / padded

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        packed = self.pack_epoch(epoch)
        end = len(packed.max_lengths)
        for first in range(packed.find_micro_batch(start), end, self.micro_batches_per_step):
            last = min(end, first + self.micro_batches_per_step)
            count = last - first
            sizes = [packed.count_padded_tokens(number) for number in range(first, last)]
            begins = packed.starts[first : last + 1]
            is_free = type(self.assignment) is Assignment  # else consecutive ones, along which exact sums are formed
            if is_free:
                own_numbers: Sequence[int] = assign_micro_batches(self.rank, self.num_replicas, sizes)
            else:
                own_numbers = self.assignment.micro_batch_numbers(self.rank, count)
            passes = max(1, len(own_numbers))  # DDP needs a backward pass of every rank
            if self.assignment.is_padded:
                passes = math.ceil(count / self.num_replicas)
            smallest_number = sizes.index(min(sizes))
            for k in range(passes):
                is_padding = k >= len(own_numbers)
                number = smallest_number if is_padding else own_numbers[k]
                yield MicroBatch(
                    epoch=epoch,
                    number=number,
                    indices=packed.order[begins[number] : begins[number + 1]].tolist(),
                    is_padding=is_padding,
                    is_last=k == passes - 1,
                    micro_batches_in_step=count,
                    samples_in_step=begins[-1] - begins[0],
                )


def assign_micro_batches(rank: int, world_size: int, sizes: Sequence[int]) -> list[int]:
    """The numbers of a rank's micro-batches: from large to small they are dealt to the ranks, forwards and backwards in
    turns, so that all ranks have equally many of about the same total size."""
    by_size = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    own_numbers = []
    for round_number, first in enumerate(range(0, len(by_size), world_size)):
        position = first + rank
        if round_number % 2:
            position = first + world_size - 1 - rank
        if position < len(by_size):
            own_numbers.append(by_size[position])
    return sorted(own_numbers)


def read_lengths(outer_dataset: Any, split: str, folder: Path, ctx: DistributedContext) -> Tensor:
    """The `lengths` of a data set, int64 [samples], which one rank of each file system reads; empty if it has none.
    Collective.

    Raises:
        UserError: if they are no whole numbers from 1 on, one for each sample, or differ between file systems.
    """

    def read() -> bytes:
        dataset, rows = outer_dataset, numpy.arange(len(outer_dataset))
        while isinstance(dataset, Subset) and "lengths" not in {*vars(dataset), *dir(type(dataset))}:
            rows, dataset = numpy.asarray(dataset.indices)[rows], dataset.dataset
        if not hasattr(type(dataset), "lengths") and not hasattr(dataset, "lengths"):
            return b""
        given = dataset.lengths  # which may be a property with an error of its own
        wanted = f"Give one integer per sample, {len(dataset):,} in all, as numpy.asarray(lengths, dtype='int64')."
        try:
            lengths = numpy.asarray(given.cpu() if isinstance(given, Tensor) else given)
        except (TypeError, ValueError) as error:
            text = f"The lengths of {split} are a {type(given).__name__} that is no array ({error})."
            raise UserError(f"{text} {wanted}") from None
        if lengths.shape != (len(dataset),) or lengths.dtype.kind not in "iu":
            text = f"The lengths of {split} have the shape {list(lengths.shape)} and type {lengths.dtype}."
            raise UserError(f"{text} {wanted}")
        lengths = lengths.astype(numpy.int64)[rows]
        if (wrong := numpy.flatnonzero(lengths < 1)).size:
            sample = format_sample_name(outer_dataset, int(wrong[0]))
            raise UserError(f"The lengths of {split} must be at least 1, got {lengths[wrong[0]]} for {sample}.")
        return lengths.tobytes()

    data = read_once_per_file_system(
        next(path for path in (folder, *folder.parents) if path.exists()), read, LENGTHS_DIFFER, ctx
    )
    return torch.frombuffer(bytearray(data), dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)


def create_budget_factory(
    dataset: Any, config: TrainingConfig, ctx: DistributedContext, is_training: bool
) -> Callable[..., GlobalBatchSampler]:
    """What creates the sampler of a set, from the options of GlobalBatchSampler without batch_size. Collective.

    Raises:
        UserError: if the set has no lengths, or a sample that is too long.
    """
    samples = config.batch_size if config.batch_size != type(config).batch_size else 0
    if not is_training:
        samples = config.eval_batch_size or samples
    split = choose_split_name(dataset, "the training set" if is_training else "the held-out set")
    lengths = read_lengths(dataset, split, Path(config.data_dir), ctx)
    if not len(lengths):
        if config.eval_batch_size and not is_training:
            return functools.partial(GlobalBatchSampler, dataset, batch_size=config.eval_batch_size)
        kind = dataset_class_name(dataset)
        text = f"--batch_tokens {config.batch_tokens} needs lengths, but {kind} ({split}) has no lengths. Give the"
        text += " data set an array lengths with one number per sample (docs/reference.md)"
        if not is_training:
            text += ", or give --eval_batch_size"
        raise UserError(f"{text}.")
    longest = int(lengths.max())
    if longest > config.batch_tokens and config.too_long == "error":
        sample, many = format_sample_name(dataset, int(lengths.argmax())), int((lengths > config.batch_tokens).sum())
        text = f"--batch_tokens must be at least {longest}, the length of {sample} of {split},"
        text += f" got {config.batch_tokens}."
        if many > 1:
            text += f" {many:,} samples are too long."
        remedy = "Give a larger --batch_tokens, or --too_long alone for a micro-batch with only that sample."
        raise UserError(f"{text} {remedy}")
    return functools.partial(
        BudgetSampler, dataset, lengths, TokenBudget(config.batch_tokens, samples, config.bucket_window)
    )
