"""Ranks check each other's gradients before the update (`--check_every`): a device that computes wrong values is named.

In a check step each rank first computes the first micro-batch of another rank, then its own ones. The gradient of a
micro-batch has the same bits on every rank, so the fingerprints of both must be equal. If they are not, the step is
repeated, with another pairing of the ranks and with samples that are fetched again. If the ranks agree then, training
goes on; else the run ends, with the state before the step saved.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainingConfig, TrainingError, UserError
from utils.data.loader import GlobalBatchLoader
from utils.data.sampler import GlobalBatch, MicroBatch
from utils.distributed.context import DistributedContext
from utils.rng import seed_host
from utils.training.fingerprint import digest_of
from utils.training.state import TrainState

T = TypeVar("T")


class Round(NamedTuple):
    """The fingerprints of one attempt at a step. Rank r has checked rank (r + shift) % ranks."""

    shift: int
    own: Tensor  # int64 [ranks, parameters], on the CPU: of the gradient of each rank's own first micro-batch
    checked: Tensor  # the same, of the first micro-batch of the rank that it has checked

    def of(self, rank: int) -> list[tuple[int, Tensor]]:
        """Who has computed the first micro-batch of this rank, and the fingerprints."""
        other = (rank - self.shift) % len(self.own)
        return [(rank, self.own[rank]), (other, self.checked[other])]


class Finding(NamedTuple):
    """What two rounds have shown."""

    wrong: list[int]  # ranks with another gradient than most ranks; if there is no majority, all that differ
    owner: int  # of the first micro-batch on which ranks differ
    parameter: int  # the first one whose gradients differ there
    is_steady: bool  # ranks repeat their own gradients, and most ranks are right


def compare(rounds: list[Round]) -> Finding:
    """Compare who computed what in two rounds, of which the first one differed."""
    ranks, wrong, first = len(rounds[0].own), set[int](), (-1, -1)
    for owner in range(ranks):
        found = [pair for each in rounds for pair in each.of(owner)]
        by_value = defaultdict[tuple, list[int]](list)
        for rank, value in found:
            by_value[tuple(value.tolist())].append(rank)
        if len(by_value) == 1:
            continue
        differs = (torch.stack([value for _, value in found]) != found[0][1]).any(0)
        first = first if first[0] >= 0 else (owner, int(differs.int().argmax()))
        weights = {value: (len(set(each)), len(each)) for value, each in by_value.items()}  # ranks, then computations
        right = [value for value, weight in weights.items() if weight == max(weights.values())]
        wrong |= {rank for value, each in by_value.items() if len(right) > 1 or value != right[0] for rank in each}
    unsteady = int((rounds[0].own != rounds[1].own).any(1).sum())
    return Finding(sorted(wrong), *first, is_steady=unsteady < 2 and len(wrong) <= max(2, ranks // 2))


class CrossCheck:
    """Checks the gradients of the steps in which the loader hands out another rank's micro-batch.

    Args:
        event, warn: of the run.
        save: saves the state, and returns when it is on the disk.

    Raises:
        UserError: if ranks with equal micro-batches would have different gradients.
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
        self._prints = torch.zeros(2, len(self._trained), dtype=torch.int64, device=ctx.device)  # own, checked
        self._agreed = -1  # the latest step in which the ranks agreed, from 1
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # of the model, and their values before a step
        if config.check_every:
            check_possible(state.model, config, ctx)
            if ctx.world_size == 1:
                warn("check_every: one rank has no other one that could check it, so nothing is checked")

    def run(self, global_batch: GlobalBatch, compute: Callable[[Iterable[MicroBatch]], T]) -> T:
        """compute(micro-batches), which leaves the gradient of the step; in a check step until the ranks agree on it.

        Raises:
            TrainingError: if a rank has another gradient again; the state before the step is saved.
            UserError: if no rank repeats its own gradient.
        """
        if not global_batch.is_check:
            return compute(global_batch)
        at, ranks = self._state.progress, self._ctx.world_size
        shift = self._loader.sampler.shift_at(at.epoch, at.samples_in_epoch)
        self._buffers = [(m, *pair, pair[1].clone()) for m in self._state.model.modules() for pair in _buffers_of(m)]
        rounds: list[Round] = []
        result = compute(self._watched(global_batch))
        differs = self._differs(shift, rounds)
        if differs:
            self._undo()
            result = compute(self._watched(self._again(global_batch, shift % (ranks - 1) + 1)))
            differs = self._differs(shift % (ranks - 1) + 1, rounds)
            self._report(compare(rounds), differs)
        self._buffers, self._agreed = [], at.step + 1
        return result

    def _watched(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches; takes fingerprints of the gradients of the first two, and drops what the first one did."""
        rest = iter(micro_batches)
        with self._fingerprinting(self._prints[1]):
            yield next(rest)
        self._undo()
        with self._fingerprinting(self._prints[0]):
            yield next(rest)
        yield from rest

    @contextmanager
    def _fingerprinting(self, prints: Tensor) -> Iterator[None]:
        """Hooks get the whole gradient of a backward pass, before it is added to others and averaged."""

        def hook_of(number: int) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                prints[number] = digest_of("gradient", gradient)

            return hook

        prints.zero_()
        hooks = [p.register_hook(hook_of(number)) for number, (_, p) in enumerate(self._trained)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _undo(self) -> None:
        """Drop what the passes since the beginning of the step have left."""
        self._state.sums.discard()
        self._state.drop_gradients()
        for module, name, buffer, value in self._buffers:
            setattr(module, name, buffer.copy_(value))  # the model may have put another tensor in its place

    def _differs(self, shift: int, rounds: list[Round]) -> bool:
        """Exchange the fingerprints. If they differ, or did before, adds them to the rounds. Reads from the device."""
        rows = [torch.empty_like(self._prints) for _ in range(self._ctx.world_size)]
        dist.all_gather(rows, self._prints)
        own, checked = torch.stack(rows).unbind(1)
        differs = bool((own != checked.roll(shift, 0)).any())
        if differs or rounds:
            rounds.append(Round(shift, own.cpu(), checked.cpu()))
        return differs

    def _again(self, global_batch: GlobalBatch, shift: int) -> Iterator[MicroBatch]:
        """The same step with another pairing; each micro-batch is fetched when it is needed."""
        at, loader = self._state.progress, self._loader
        check = loader.sampler.checked(at.epoch, at.samples_in_epoch, shift)
        for each in [check, *global_batch.micro_batches[1:]]:
            batch = loader.fetch(each.indices, each.epoch)[2]
            if loader.num_workers:  # else a model that draws from the global generators would seem deterministic
                seed_host("repeat", self._ctx.rank, each.number)
            yield dataclasses.replace(each, batch=batch)

    def _report(self, found: Finding, differs: bool) -> None:
        """Record the ranks that are wrong, and end the run if they still are."""
        at, ctx, wrong = self._state.progress, self._ctx, found.wrong
        micro_batch = self._loader.sampler.first_of(found.owner, at.epoch, at.samples_in_epoch)
        name = self._trained[found.parameter][0]
        of_what = f"gradient of {name} for micro-batch {micro_batch.number} of step {at.step + 1}"
        if differs and not found.is_steady:
            self._undo()
            raise UserError(
                f"check_every: ranks {', '.join(map(str, wrong))} disagree on the {of_what}, also when they repeat it,"
                " so training is not deterministic; draw from torch's generators, which each micro-batch seeds, not"
                " from random or numpy, look for code that treats ranks differently, or leave out --check_every",
                wrong[-1],
                ctx.hosts[wrong[-1]],
            )
        where = {"micro_batch": micro_batch.number, "samples": micro_batch.indices, "parameter": name}
        for rank in wrong:
            self._event(
                "gradient_differs", at.step, rank=rank, host=ctx.hosts[rank], device=ctx.device_names[rank], **where
            )
        whose = " or ".join(f"rank {rank} on {ctx.hosts[rank]} ({ctx.device_names[rank]})" for rank in wrong)
        text = f"{whose} computed a wrong {of_what}"
        if not differs:
            self._warn(f"{text}; the step was repeated, and the ranks agree; if it happens again, replace the device")
            return
        self._undo()
        self._save()
        since = f"after step {self._agreed}, the last one checked" if self._agreed > 0 else "of this attempt"
        raise TrainingError(
            f"{text}, also when it was repeated; the state before the step is saved, but steps {since}, may hold such"
            " gradients; replace the device, or look for code that treats ranks differently, then --resume_from auto,"
            " or an earlier checkpoint",
            wrong[-1],
            ctx.hosts[wrong[-1]],
        )


def check_possible(model: nn.Module, config: TrainingConfig, ctx: DistributedContext) -> None:
    """Raises UserError if the gradient of a micro-batch depends on the rank that computes it."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise UserError("check_every: SyncBatchNorm mixes the micro-batches of the ranks; leave out one of the two")
    if ctx.device.type == "cuda" and not config.deterministic:
        raise UserError("check_every: on CUDA needs kernels that are the same on all ranks; add --deterministic")
    if len(names := sorted(set(ctx.device_names))) > 1:
        raise UserError(
            f"check_every: {' and '.join(names)} round differently, so their gradients cannot be compared; use equal"
            " devices, or leave out --check_every"
        )


def _buffers_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(recurse=False))
