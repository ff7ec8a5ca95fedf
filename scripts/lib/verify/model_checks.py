"""Checks of the model and its loss: sums, parameters, evaluation, and gradients equal to those of the plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import plain_loop
from lib.row_order import check_row_order
from lib.verify.draws import draws_in_evaluation
from lib.verify.fork import (
    ACCUMULATION,
    Broken,
    Fork,
    PlainProgress,
    Subset,
    Update,
    as_single_process,
    perturbed,
    record_updates,
)
from lib.verify.precision_checks import rounding
from lib.verify.values import can_join, digest, first_three, joined, scramble_global_rngs, shared_memory, shown, spread
from train import Training
from utils.data.transfer import to_device
from utils.distributed.collectives import all_gather_json
from utils.metrics import check_metrics
from utils.training.optimizer import checked_groups

# relative: sums in another order; losses of a batch and its halves, for which layers may choose other kernels
ROUNDING = {torch.bfloat16: 1e-1, torch.float16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-11}
ADDING = {torch.bfloat16: 1e-1, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-11}


CONTRASTIVE = (
    "please check: the loss of a sample depends on the other samples of its micro-batch, as a contrastive loss does by"
    " intent; it is the same on any number of ranks and after a resume, since micro-batches are, but not with another"
    " --batch_size; "
)


def loss(fork: Fork) -> str:
    """compute_loss returns sums and counts: those of a batch equal the totals over its parts, for several weights."""

    def check() -> str:
        subset = fork.small_train_set()
        size, loader = min(fork.small_config.batch_size, len(subset) // 2), fork.loader(subset)
        if not size:
            return "one sample cannot be split"
        worst = 0.0
        for number in range(3):  # other weights, and another pair of batches if there are enough samples
            begin = min(number * size, len(subset) - 2 * size)
            net, middle, end = perturbed(fork.new_model(), number), begin + size, begin + 2 * size
            batches = [
                loader.fetch([*part])[2] for part in (range(begin, middle), range(middle, end), range(begin, end))
            ]
            is_comparable = not hasattr(fork.train_set, "device_transform")  # which may mix the samples of a batch
            if can_join(batches[:2], size):
                with suppress(RuntimeError):  # shapes differ
                    batches[2], is_comparable = joined(*batches[:2]), True
            for is_training in (False, True):
                net.eval()
                net.training = is_training  # compute_loss as in training, but no dropout and no batch statistics
                with torch.set_grad_enabled(is_training):
                    first, second, whole, again = (sums(fork, net, each) for each in (*batches, batches[2]))
                for name, value in whole.items():
                    # a fork may compute in float32 on purpose
                    tolerance = max(ADDING[fork.loss_dtype], ADDING.get(value.dtype, 0.0))
                    value, parts = value.double(), first[name].double() + second[name].double()
                    error = relative_error(parts, value) if parts.any() or value.any() else 0.0
                    is_mean = name.endswith("sum") and value.any() and relative_error(parts, 2 * value) <= 0.05
                    is_repeated = torch.equal(value, again[name].double())  # else it is random, which is another fault
                    if is_repeated and (is_mean or (error > tolerance and is_comparable)):
                        if not is_mean and depends_on_others(fork, net, size):
                            return CONTRASTIVE
                        kind = "a mean instead of a sum" if is_mean else "it does not add up over samples"
                        raise Broken(
                            f"{name} is {shown(value)} for {2 * size} samples, {shown(parts)} for their halves"
                            f" together: {kind}; let compute_loss return sums over the micro-batch, and their counts"
                        )
                    worst = max(worst, error if is_comparable else 0.0)
        dtype = str(fork.loss_dtype).removeprefix("torch.")
        summed = "" if fork.loss_dtype is fork.dtype else f"; {dtype} occurs in the loss, which is allowed for"
        return f"sums and counts add up over samples, in training and evaluation (within {worst:.0e}{summed}); "

    return fork.on_all(check) + fork.on_all(lambda: for_a_look(fork)) + fork.on_rank_0(lambda: rounding(fork))


def depends_on_others(fork: Fork, net: nn.Module, size: int) -> bool:
    """Whether the loss of a sample depends on the others in its micro-batch. That of a mean, or with a penalty for each
    micro-batch, does not: either the effect of other samples adds up, or a batch counts twice that is repeated."""
    subset = fork.small_train_set()
    loader = fork.loader(subset)
    if len(subset) < 4 * size:
        return False

    def loss_of(*groups: int) -> float:
        rows = [[*range(group * size, (group + 1) * size)] for group in groups]
        batches = [loader.fetch(each)[2] for each in rows]
        is_joined = len(batches) > 1 and can_join(batches, size)
        batch = joined(*batches) if is_joined else loader.fetch([*chain(*rows)])[2]
        return sums(fork, net, batch)["loss's sum"].double().sum().item()

    with suppress(RuntimeError):  # shapes differ
        repeated, once, usual = loss_of(0, 0), loss_of(0), loss_of(0, 1)
        mixed = usual - loss_of(0, 2) - loss_of(3, 1) + loss_of(3, 2)
        least = 10 * ADDING[fork.loss_dtype] * abs(usual)
        is_mean = abs(usual) < 1.75 * abs(once)
        return not is_mean and abs(mixed) > least and abs(repeated - 2 * once) > least
    return False


def for_a_look(fork: Fork) -> str:
    """Values that are consistent, but that only a person can judge."""
    subset = fork.small_train_set()
    count = min(fork.small_config.batch_size, len(subset))
    batch, net, parts = fork.loader(subset).fetch([*range(count)])[2], fork.new_model(), []
    for kind, is_training in (("training", True), ("evaluation", False)):
        net.train(is_training)
        with torch.set_grad_enabled(is_training):
            metrics = fork.seams.compute_loss(net, batch)
        counts = [f"{name} {shown(torch.as_tensor(entry[1]) / count)}" for name, entry in metrics.items()]
        total, counted = map(torch.as_tensor, metrics["loss"][:2])
        mean = torch.where(counted == 0, 0.0, total / counted).sum().item()
        parts.append(f"{kind} loss {mean:.6g}, counts per sample: {', '.join(counts)}")
    return "please check: with the same weights and batch, " + "; ".join(parts)


def parameters(fork: Fork) -> str:
    """Every trainable parameter gets a gradient from each micro-batch and is in a group; all ranks start equal.

    With find_unused_parameters, one that no micro-batch uses is a note.
    """

    def check() -> tuple[str, int, list[str]]:
        scramble_global_rngs(fork.ctx.rank + 1)
        net = fork.new_model()
        start, trainable = digest(net.state_dict()), {name: p for name, p in net.named_parameters() if p.requires_grad}
        names = {p: name for name, p in net.named_parameters()}
        if shared := shared_memory(net):
            raise Broken(
                f"{shared}: share memory, but are two parameters, so that an update of one changes the other; make them"
                " one parameter (head.weight = tokens.weight), or give each its own memory"
            )
        groups = checked_groups(fork.seams.param_groups(net, fork.config), names)
        in_groups = {id(p) for group in groups for p in group["params"]}
        if left_out := [name for name, p in trainable.items() if id(p) not in in_groups]:
            raise Broken(f"{first_three(left_out)}: in no parameter group, never trained; add them to param_groups")
        net.train()
        loader, never = fork.loader(fork.small_train_set(), ctx=fork.ctx), list(trainable)
        for micro_batch in (m for global_batch in loader.global_batches(0) for m in global_batch):
            net.zero_grad()
            fork.seams.compute_loss(net, micro_batch.batch)["loss"][0].sum().backward()
            unused = [name for name, p in trainable.items() if p.grad is None]
            if unused and not fork.config.find_unused_parameters:
                raise Broken(
                    f"{first_three(unused)}: unused by a micro-batch, and DDP would wait for its gradient forever; use"
                    " it in every forward pass, add --find_unused_parameters, or freeze it in create_model with"
                    " requires_grad_(False)"
                )
            never = [name for name in never if name in unused]
        return start, len(trainable), never

    start, count, never = fork.on_all(check)
    starts, nevers = all_gather_json(start, fork.ctx), all_gather_json(never, fork.ctx)
    if other := next((rank for rank, each in enumerate(starts) if each != starts[0]), 0):
        raise Broken(
            f"rank {other} has other initial weights than rank 0: create_model depends on the rank, or draws from numpy"
            " or random; draw from torch's generator, which is seeded equally on all ranks"
        )
    if fork.config.find_unused_parameters:
        never = [name for name in never if all(name in each for each in nevers)]
        note = f"; please check: {first_three(never)}: used by no micro-batch, never trained" if never else ""
        return f"{count} tensors are trained, each by some micro-batch; all ranks start equal{note}"
    return f"{count} tensors are trained, each by every micro-batch; all ranks start equal"


def evaluation(fork: Fork) -> str:
    """Each held-out sample counts once on any number of ranks, as in one process."""
    fork.on_all(lambda: check_outputs(fork))
    if fork.held_out is None:
        return "no held-out set, nothing to check"
    size, ranks, counts = fork.small_config.batch_size, fork.ctx.world_size, []
    never: list[str] = []
    for count in (ranks * size + size // 2 + 1, max(1, ranks - 1)):
        subset, net = fork.held_out_subset(count), fork.new_model().eval()
        found = fork.evaluate(net, subset)
        # on_all: what summarize returns may be wrong on one rank only
        fork.on_all(lambda subset=subset, net=net, found=found: compare_evaluation(fork, subset, net, found))
        counts.append(str(len(subset)))
        never = never if len(counts) > 1 else [name for name, value in found.items() if math.isnan(value)]
    notes = f"; please check: nothing counted for {', '.join(never)}, so not compared" if never else ""
    notes += fork.on_all(lambda: draws_in_evaluation(fork, subset, net))
    return f"sets of {' and '.join(counts)} samples: each counted once, loss and metrics as in one process{notes}"


def check_outputs(fork: Fork) -> None:
    """Raises UserError if `predict` gives the outputs of a batch in another order than its samples."""
    net = fork.new_model().eval()
    for dataset in (fork.train_set, fork.held_out):
        if dataset is not None:
            subset = Subset(dataset, spread(64, len(dataset)), fork.dtype)
            fetch = fork.loader(subset).fetch
            check_row_order(partial(fork.seams.predict, net), lambda rows, fetch=fetch: fetch(rows)[2], len(subset))


def compare_evaluation(fork: Fork, subset: Subset, net: nn.Module, found: dict[str, float]) -> None:
    """Raises Broken if an evaluation on all ranks differs from that of one process."""
    for name, value in fork.plain_evaluation(subset, net).items():
        rounding = ROUNDING[fork.loss_dtype]  # sums in another order
        is_close = math.isclose(found[name], value, rel_tol=rounding, abs_tol=1e-8)
        if is_close or (math.isnan(value) and math.isnan(found[name])):  # nan: counted nothing
            continue
        seen = f"{name} of {len(subset)} held-out samples is {found[name]:.6g}, in one process {value:.6g}"
        cause = (
            "samples repeated or left out, or a summarize that depends on the rank; use"
            " create_evaluation_dataloader and Evaluation, and only what summarize is given"
        )
        if fork.plain_evaluation(subset, net, noise=1)[name] != value:
            cause = (
                "a second evaluation differs too: random numbers of Python or numpy, or data that is changed in place;"
                " draw from torch's generators, which are seeded for each micro-batch"
            )
        raise Broken(f"{seen}: {cause}")


def gradient(fork: Fork) -> str:
    """The gradients of three global batches, the last one short, equal those of the plain loop on the same weights."""
    plain_settings = {"epochs": 1, "use_amp": False, "amp_dtype": "auto", "ema_decay": 0.0, "comm_hook": "none"}

    def gather(training: Training) -> None:
        for update in ours:
            update.gather(training.state)

    ours: list[Update] = []
    with record_updates(ours):
        fork.short_run("gradient", at_end=gather, eval_every=0, eval_every_steps=0, **plain_settings)
    our_model = fork.trainings["gradient"].state.model

    def plain_loop_of(noise: int) -> tuple[list[Update], nn.Module]:
        subset, device = fork.small_train_set(), fork.ctx.device
        plain, transform = fork.small_train_set(), subset.device_transform
        plain.device_transform = lambda batch, seed, epoch, indices: transform(
            to_device(batch, device), seed, epoch, indices.to(device)
        )
        config = replace(fork.small_config, **plain_settings)
        one_dataset = mock.patch.object(plain_loop, "create_dataset", lambda *_: plain)
        same_progress = mock.patch.object(plain_loop, "Progress", PlainProgress)
        theirs: list[Update] = []
        with one_dataset, same_progress, record_updates(theirs), as_single_process():
            scramble_global_rngs(noise)
            *_, (net, *_) = plain_loop.plain_loop(config, ACCUMULATION * fork.ctx.world_size, device)
        return theirs, net

    def check() -> str:
        theirs, net = plain_loop_of(99)

        def repeats() -> bool:
            again, other = plain_loop_of(100)
            pairs = zip(theirs, again, strict=True)
            return all(torch.equal(flat_gradient(a, net), flat_gradient(b, other)) for a, b in pairs)

        rounding = ROUNDING[fork.loss_dtype]
        found = compare_updates(ours, our_model, theirs, net, rounding, repeats)
        return found + compare_buffers(our_model, net, rounding)

    return fork.on_rank_0(check)


def compare_updates(
    ours: list[Update],
    our_model: nn.Module,
    theirs: list[Update],
    their_model: nn.Module,
    rounding: float,
    repeats: Callable[[], bool],
) -> str:
    """Raises Broken if an optimizer step received something else than in the plain loop.

    repeats: whether a second plain loop gets the same gradients.
    """
    if len(ours) != len(theirs):
        raise Broken(
            f"the epoch had {len(ours)} optimizer steps instead of {len(theirs)}: the training loop drops or repeats"
            " global batches; see train_one_epoch"
        )
    worst = 0.0
    for step, (mine, plain) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(chain(*mine.settings), chain(*plain.settings), strict=False)
        if len(mine.settings) != len(plain.settings) or not all(math.isclose(*pair, rel_tol=1e-9) for pair in pairs):
            raise Broken(
                f"step {step}: learning rate and weight decay are {mine.settings}, in the plain loop {plain.settings}:"
                " param_groups or the schedule depends on the ranks; make them functions of config and step"
            )
        used = [
            {name for name, p in model.named_parameters() if p in update.gradients}
            for update, model in ((mine, our_model), (plain, their_model))
        ]
        if odd := sorted(used[0] ^ used[1]):
            raise Broken(
                f"global batch {step}: {first_three(odd)}: used by the run or by the plain loop, but not by both: what"
                " a batch uses depends on the rank, or on unkeyed random numbers; draw from torch's generator"
            )
        a, b = flat_gradient(mine, our_model), flat_gradient(plain, their_model)
        error = relative_error(a, b)
        if not error <= rounding:
            ratio = (a @ b / (b @ b).clamp(min=1e-30)).item()
            if relative_error(a, ratio * b) <= 1e3 * rounding:
                cause = f"it is {ratio:.3g} times the plain loop's: a wrong divisor or factor; see train_one_epoch"
            elif not repeats():
                cause = (
                    "a second plain loop differs too: unkeyed random numbers, or state kept between calls; draw with"
                    " utils.rng, and keep state in a buffer of the model"
                )
            else:
                cause = (
                    "it depends on the rank, on the number of ranks, or on earlier computations of this process; let"
                    " compute_loss depend only on the weights and its batch, and check train_one_epoch"
                )
            raise Broken(f"the gradient of global batch {step} has a relative error of {error:.1e}: {cause}")
        worst = max(worst, error)
    return f"{len(ours)} global batches, the last one short: within {worst:.0e} of the plain loop"


def compare_buffers(ours: nn.Module, theirs: nn.Module, rounding: float) -> str:
    """Raises Broken if a float buffer (running statistics) differs from the plain loop's after the epoch."""
    buffers = {name: buffer for name, buffer in theirs.named_buffers() if buffer.is_floating_point()}
    for name, plain in buffers.items():
        mine = ours.get_buffer(name)
        error = relative_error(mine, plain)
        if not torch.equal(mine, plain) and not error <= rounding:
            raise Broken(
                f"{name}: relative error {error:.1e} after an epoch: it follows the micro-batches of its own rank, or"
                " counts padding; update it once per step over the global batch, as utils/training/batchnorm.py does"
            )
    return f", {len(buffers)} running statistics too" if buffers else ""


def flat_gradient(update: Update, model: nn.Module) -> Tensor:
    """float64 on the CPU, in the model's order."""
    return torch.cat(
        [update.gradients[p].double().flatten().cpu() for p in model.parameters() if p in update.gradients]
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def sums(fork: Fork, net: nn.Module, batch: Any) -> dict[str, Tensor]:
    """All sums and counts of a micro-batch: in their dtypes, flat, on the CPU. Raises UserError if loss_counts lies."""
    metrics, terms = check_metrics(fork.seams.compute_loss(net, batch)), {}
    if fork.seams.terms:
        total, count, means = metrics["loss"]
        terms = {f"loss/{name}": (total[k], count[k]) for k, name in enumerate(means.names)}
        if torch.is_grad_enabled():  # an evaluation may count otherwise
            fork.seams.terms.check(fork.seams.terms.counts(batch), count)
    named = (terms | metrics).items()  # a term first, which may be a mean while the others are sums
    parts = {f"{name}'s {part}": entry[k] for name, entry in named for k, part in enumerate(("sum", "count"))}
    return {name: torch.as_tensor(value).detach().cpu().flatten() for name, value in parts.items()}
