"""Ranks check each other's gradients before the update (`--check_every`): a device that computes wrong values is named.

It costs one more micro-batch and a read from the device in a check step. Who trains on many devices for long needs it.

In a check step each rank first fetches and computes the first micro-batch of another rank, then its own. The gradient
of a micro-batch has the same bits on every rank. If two ranks disagree, the step is repeated with other pairs of ranks,
and with samples that are fetched again. If all agree then, training goes on; else the run ends, and saves the state
before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainingConfig, TrainingError, UserError
from utils.data.loader import GlobalBatchLoader
from utils.data.sampler import GlobalBatchSampler, MicroBatch
from utils.distributed.collectives import on_all_ranks
from utils.distributed.consensus import is_every
from utils.distributed.context import DistributedContext
from utils.rng import seed_host
from utils.training.fingerprint import digest_of
from utils.training.state import TrainState

T = TypeVar("T")
OWN, CHECKED = 0, 1  # rows of fingerprints


class Round(NamedTuple):
    """What the ranks have found in one attempt at a step. Rank r has checked rank (r + shift) % ranks."""

    shift: int
    own: Tensor  # int64 [ranks, parameters], on the CPU: fingerprints of the gradient of each rank's first micro-batch
    checked: Tensor  # the same, of the first micro-batch of the rank that it has checked

    @property
    def differs(self) -> bool:
        return bool((self.own != self.checked.roll(self.shift, 0)).any())


class Finding(NamedTuple):
    """What two rounds have shown."""

    wrong: list[int]  # the ranks that disagree with most; without a majority, all that disagree
    owner: int  # the first rank on whose micro-batch they disagree
    parameter: int  # the first one whose gradients differ there
    is_steady: bool  # most ranks are right, and repeat their gradients


def compare(rounds: list[Round]) -> Finding:
    """Find who is wrong: for each rank's micro-batch, who disagrees with most of the ranks that have computed it."""
    ranks, wrong, first = len(rounds[0].own), set[int](), (-1, -1)
    for owner in range(ranks):
        found = [(tuple(each.own[owner].tolist()), owner) for each in rounds]
        checkers = [(owner - each.shift) % ranks for each in rounds]
        found += [(tuple(each.checked[k].tolist()), k) for each, k in zip(rounds, checkers, strict=True)]
        if len(values := {value for value, _ in found}) > 1:
            by_value = {value: [rank for v, rank in found if v == value] for value in values}
            votes = {value: (len(set(each)), len(each)) for value, each in by_value.items()}  # ranks, computations
            right = [value for value in values if votes[value] == max(votes.values())]
            wrong |= {rank for value, rank in found if len(right) > 1 or value != right[0]}
            differs = [len(set(column)) > 1 for column in zip(*values, strict=True)]
            first = first if first[0] >= 0 else (owner, differs.index(True))
    unsteady = int((rounds[0].own != rounds[1].own).any(1).sum())
    return Finding(sorted(wrong), *first, is_steady=unsteady < 2 and len(wrong) <= max(2, ranks // 2))


def shifts_of(hosts: Sequence[str]) -> list[int]:
    """The distances at which ranks check each other, in turn: those at which most have a rank on another host."""
    ranks = len(hosts)
    abroad = [sum(hosts[k] != hosts[(k + shift) % ranks] for k in range(ranks)) for shift in range(ranks)]
    return [shift for shift in range(1, ranks) if abroad[shift] == max(abroad[1:])]


def first_of(sampler: GlobalBatchSampler, rank: int, epoch: int, start: int) -> MicroBatch:
    """The first micro-batch of a rank in the step that begins there, with which another one checks it."""
    first = next(sampler.micro_batches(epoch, start, rank))
    return dataclasses.replace(first, is_last=False, is_check=True)


class CrossCheck:
    """Checks the gradients of the first step of an attempt, and of every `check_every`-th step.

    Args:
        event, warn: of the run.
        save: saves the state, and returns when it is on the disk.

    Raises:
        UserError: if the gradient of a micro-batch depends on the rank that computes it.
    """

    def __init__(
        self,
        state: TrainState,
        loader: GlobalBatchLoader,
        config: TrainingConfig,
        ctx: DistributedContext,
        event: Callable[..., None],
        warn: Callable[[str], None],
        save: Callable[[], None],
    ) -> None:
        self._state, self._loader, self._ctx = state, loader, ctx
        self._event, self._warn, self._save = event, warn, save
        self._trained = [(name, p) for name, p in state.model.named_parameters() if p.requires_grad]
        self._prints = torch.zeros(2, len(self._trained), dtype=torch.int64, device=ctx.device)
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # of the model, and their values before a step
        self._agreed = 0  # the latest step in which the ranks agreed, from 1
        self._every, self._first_step = config.check_every, state.progress.step
        self._shifts = shifts_of(ctx.hosts) if config.check_every else []
        if config.check_every:
            on_all_ranks(lambda: check_possible(state.model, config, ctx), ctx)
            if ctx.world_size == 1:
                warn("check_every: one rank has no other one that could check it, so nothing is checked")

    def shift_at(self, step: int) -> int:
        """In the step after so many, rank r checks rank (r + shift) % ranks; 0 if that is no check step."""
        if not self._shifts or not (step == self._first_step or is_every(self._every, step + 1)):
            return 0
        return self._shifts[(step + 1) // self._every % len(self._shifts)]

    def run(self, micro_batches: Iterator[MicroBatch], compute: Callable[[Iterable[MicroBatch]], T]) -> T:
        """compute(micro-batches), which leaves the gradient of the step; in a check step until the ranks agree on it.

        Args:
            micro_batches: the stream; `compute` takes those of one step.

        Raises:
            TrainingError: if a rank has another gradient again; the state before the step is saved.
            UserError: if the ranks do not repeat their own gradients.
        """
        at = self._state.progress
        shift = self.shift_at(at.step)
        if not shift:
            return compute(micro_batches)
        modules = self._state.model.modules()
        self._buffers = [(m, name, x, x.clone()) for m in modules for name, x in m.named_buffers(recurse=False)]
        own = [next(micro_batches)]  # from here on the divisors of terms are known
        result, first = self._round(shift, compute, itertools.chain(own, micro_batches))
        if first.differs:
            self._undo()
            shift = shift % (self._ctx.world_size - 1) + 1
            mine = self._loader.sampler.micro_batches(at.epoch, at.samples_in_epoch)  # of this step and later ones
            result, second = self._round(shift, compute, self._fetched(mine))
            self._report(compare([first, second]), second.differs)
        self._buffers, self._agreed = [], at.step + 1
        return result

    def _round(
        self, shift: int, compute: Callable[[Iterable[MicroBatch]], T], mine: Iterator[MicroBatch]
    ) -> tuple[T, Round]:
        """compute(another rank's micro-batch, then those of this rank), and what all found. Reads from the device."""
        at, ctx = self._state.progress, self._ctx
        other = first_of(self._loader.sampler, (ctx.rank + shift) % ctx.world_size, at.epoch, at.samples_in_epoch)
        with closing(self._watched(itertools.chain(self._fetched([other]), mine))) as watched:
            result = compute(watched)
        rows = [torch.empty_like(self._prints) for _ in range(ctx.world_size)]
        dist.all_gather(rows, self._prints)
        found = torch.stack(rows).cpu()
        return result, Round(shift, found[:, OWN], found[:, CHECKED])

    def _watched(self, rest: Iterator[MicroBatch]) -> Generator[MicroBatch]:
        """The micro-batches, the first of which leaves nothing but the fingerprint of its gradient.

        Hooks get the whole gradient of a backward pass, before it is added to others and averaged.
        """
        for row in (CHECKED, OWN):
            self._prints[row].zero_()
            hooks = [p.register_hook(partial(self._note, row, number)) for number, (_, p) in enumerate(self._trained)]
            try:
                yield next(rest)
            finally:  # also after a rank's only micro-batch, which ends the step
                for hook in hooks:
                    hook.remove()
            if row == CHECKED:
                self._undo()
        yield from rest

    def _note(self, row: int, number: int, gradient: Tensor) -> None:
        self._prints[row, number] = digest_of("gradient", [gradient], gradient.device)

    def _undo(self) -> None:
        """Drop what the passes since the beginning of the step have left."""
        self._state.sums.discard()
        self._state.updater.drop_gradients()
        for module, name, buffer, value in self._buffers:
            setattr(module, name, buffer.copy_(value))  # the model may have put another tensor in its place

    def _fetched(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Each one with its samples, fetched in this process when it is needed."""
        for each in micro_batches:
            batch = self._loader.fetch(each.indices, each.epoch)[2]
            if self._loader.num_workers:  # else a model that draws from the global generators would seem deterministic
                seed_host("repeat", self._ctx.rank, each.number)
            yield dataclasses.replace(each, batch=batch)

    def _report(self, found: Finding, differs: bool) -> None:
        """Record the ranks that are wrong, and end the run if they still are."""
        at, ctx, wrong = self._state.progress, self._ctx, found.wrong
        micro_batch = first_of(self._loader.sampler, found.owner, at.epoch, at.samples_in_epoch)
        name, last, host = self._trained[found.parameter][0], wrong[-1], ctx.hosts[wrong[-1]]
        what = f"gradient of {name} for micro-batch {micro_batch.number} of step {at.step + 1}"
        if differs and not found.is_steady:
            ranks = ", ".join(map(str, wrong))
            raise UserError(
                f"check_every: ranks {ranks} disagree on the {what}, also when they repeat it, so training is not"
                " deterministic; draw from torch's generators, which each micro-batch seeds, not from random or numpy,"
                " look for code that treats ranks differently, or leave out --check_every",
                last,
                host,
            )
        where = {"micro_batch": micro_batch.number, "samples": micro_batch.indices, "parameter": name}
        for rank in wrong:
            of_rank = {"rank": rank, "host": ctx.hosts[rank], "device": ctx.device_names[rank]}
            self._event("gradient_differs", at.step, **of_rank, **where)
        text = " or ".join(f"rank {rank} on {ctx.hosts[rank]} ({ctx.device_names[rank]})" for rank in wrong)
        text += f" computed a wrong {what}"
        if not differs:
            self._warn(f"{text}; the step was repeated, and the ranks agree; if it happens again, replace the device")
            return
        self._undo()
        self._save()
        since = f"after step {self._agreed}, the last one checked" if self._agreed else "of this attempt"
        raise TrainingError(
            f"{text}, also when it was repeated; the state before it is saved, but steps {since}, may hold such"
            " gradients; replace the device, or look for code that treats ranks differently, then --resume_from auto",
            last,
            host,
        )


def check_possible(model: nn.Module, config: TrainingConfig, ctx: DistributedContext) -> None:
    """Raises UserError if the gradient of a micro-batch depends on the rank that computes it."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise UserError("check_every: SyncBatchNorm mixes the micro-batches of the ranks; leave out one of the two")
    if ctx.device.type != "cpu" and not config.deterministic:
        raise UserError("check_every: on a GPU needs kernels that are the same on all ranks; add --deterministic")
    if len(names := sorted(set(ctx.device_names))) > 1:
        text = f"check_every: {' and '.join(names)} round differently, so gradients cannot be compared; use equal"
        raise UserError(f"{text} devices, or leave out --check_every")
