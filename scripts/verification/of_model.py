"""Invariants of the model and its loss: sums, parameters, evaluation, and the gradient of the plain loop."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import model as fork_model
import plain_loop
import train
from utils.data.transfer import to_device
from utils.distributed.collectives import all_gather_json
from verification.fork import ACCUMULATION, Broken, Few, Fork, digest, leaves, named, scramble
from verification.of_runs import Update, as_one_process, run, updates_into

ROUNDING = 1e-5  # of float32 sums in another order, from common weights: relative to the gradient's norm
ADDING = 1e-4  # of float32 losses of one batch and of its halves, where layers choose other kernels: relative


def loss(fork: Fork) -> str:
    """compute_loss gives sums: of a batch as much as of its two halves."""

    def look() -> float:
        few = fork.few()
        size, loader = min(fork.small.batch_size, len(few) // 2), fork.loader(few)
        if not size:
            return 0.0  # one sample has no halves
        batches = [loader.fetch(list(part))[2] for part in (range(size), range(size, 2 * size), range(2 * size))]
        is_joined = all(
            isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size for leaf in leaves(batches[:2]).values()
        )
        if is_joined:  # a transform may mix the samples of a batch
            with suppress(RuntimeError):  # of unequal shapes
                batches[2] = joined(batches[0], batches[1])
        net, worst = fork.new_model(), 0.0
        for is_training in (False, True):
            for module in net.modules():
                module.training = False
            net.training = is_training  # compute_loss as in training, while no layer draws or takes batch statistics
            with torch.set_grad_enabled(is_training):
                first, second, whole, again = (
                    sums(*fork_model.compute_loss(net, batch)) for batch in (*batches, batches[2])
                )
            for name in whole:
                parts = first.get(name, 0.0) + second.get(name, 0.0)
                error = abs(parts - whole[name]) / max(abs(whole[name]), 1e-12)
                is_mean = whole[name] and abs(parts - 2 * whole[name]) <= 0.05 * abs(parts)
                # else the model draws, or the transform may mix samples
                is_comparable = is_joined and whole[name] == again[name]
                if is_mean or (error > ADDING and is_comparable):
                    kind = "a mean where a sum is wanted" if is_mean else "it does not add up over samples"
                    wanted = (
                        'the loss with reduction="sum"' if name == "loss" else "(sum over the samples, their count)"
                    )
                    raise Broken(
                        f"{name} of {2 * size} samples is {whole[name]:.6g}, of their halves {parts:.6g} together (in"
                        f" {'training' if is_training else 'evaluation'}): {kind}; let compute_loss return {wanted}, no"
                        " average over the batch"
                    )
                worst = max(worst, error if is_comparable else 0.0)
        return worst

    return f"compute_loss adds up over samples, in training and in evaluation (off by {fork.on_all(look):.0e})"


def parameters(fork: Fork) -> str:
    """Every parameter that asks for a gradient gets one from each micro-batch, and is in a group; all ranks start
    alike."""

    def look() -> tuple[str, int]:
        scramble(fork.ctx.rank + 1)
        few, net = fork.few(), fork.new_model()
        start, asked = digest(net.state_dict()), {name: p for name, p in net.named_parameters() if p.requires_grad}
        held = {id(p) for group in fork_model.param_groups(net, fork.config) for p in group["params"]}
        if left_out := [name for name, p in asked.items() if id(p) not in held]:
            raise Broken(
                f"{named(left_out)}: in no group, so never trained; add to param_groups, or freeze with"
                " requires_grad_(False)"
            )
        net.train()
        share, _ = train.create_distributed_dataloader(few, fork.small, fork.ctx)
        for micro_batch in (m for global_batch in share.global_batches(0) for m in global_batch):
            net.zero_grad()
            fork_model.compute_loss(net, micro_batch.batch)[0].backward()
            if unused := [name for name, p in asked.items() if p.grad is None]:
                raise Broken(
                    f"{named(unused)}: unused, the loss of a micro-batch does not depend on it, and DDP would wait for"
                    " its gradient for ever; use it in every forward pass, or freeze it in create_model with"
                    " requires_grad_(False)"
                )
        return start, len(asked)

    start, count = fork.on_all(look)
    starts = all_gather_json(start, fork.ctx)
    if other := next((rank for rank, each in enumerate(starts) if each != starts[0]), 0):
        raise Broken(
            f"rank {other} makes other first weights than rank 0: create_model draws from numpy or random, or looks at"
            " the rank; draw from torch's generator, which is seeded alike on all ranks"
        )
    return f"{count} tensors are trained, each by every micro-batch; all ranks start alike"


def evaluation(fork: Fork) -> str:
    """Each sample counts once, whatever the number of ranks: compared with a plain loop over the set, one micro-batch
    after another."""
    ctx, small, counts = fork.ctx, fork.small, []
    if fork.held_out is None:
        return "nothing is held out, nothing to check"
    size = small.batch_size
    for count in (ctx.world_size * size + size // 2 + 1, max(1, ctx.world_size - 1)):
        few = Few(fork.held_out, list(range(min(count, len(fork.held_out)))))
        net = fork.on_all(fork.new_model).eval()
        expected, again = (fork.on_all(lambda few=few, net=net: plain_evaluation(fork, few, net)) for _ in range(2))
        if expected != again:
            raise Broken(
                "two evaluations of the same weights differ: the model or its loss draws at random in evaluation too; "
                "let F.dropout and the like take training=self.training"
            )
        loader = fork.on_all(lambda few=few: train.create_evaluation_dataloader(few, small, ctx))
        try:
            found = train.evaluate(net, loader, train.Precision(ctx.device.type, None), ctx, None)
        except RuntimeError as error:
            if "evaluation counted" not in str(error):
                raise
            raise Broken(
                f"{error}: a padded or sharded set of its own; deal it by create_evaluation_dataloader alone"
            ) from None
        for name, value in ({"count": len(few)} | expected).items():
            # rounding of float32 sums
            if found[name] != value and not abs(found[name] - value) <= 1e-5 * max(1e-3, abs(value)):
                raise Broken(
                    f"{name} of {len(few)} held-out samples is {found[name]:.6g}, counted one by one {value:.6g}: a"
                    " padded evaluation, samples left out or weighed otherwise; deal them by"
                    " create_evaluation_dataloader, and let train.evaluate add up sums and counts"
                )
        counts.append(str(len(few)))
    return f"sets of {' and '.join(counts)} samples: each counted once, loss and metrics as in a plain loop"


def plain_evaluation(fork: Fork, few: Few, net: nn.Module) -> dict[str, float]:
    """The mean loss and metrics of a set in one process."""
    loader, totals, finish = fork.loader(few), {}, {}
    scramble(fork.ctx.rank + len(few))
    weights = getattr(few, "weights", [1.0] * len(few))
    for indices in torch.arange(len(few)).split(fork.small.batch_size):
        *_, batch = loader.fetch(indices.tolist())
        with torch.no_grad():
            loss_sum, metrics = fork_model.compute_loss(net, batch)
        metrics = {"loss": (loss_sum, float(sum(weights[k] for k in indices.tolist())))} | metrics
        finish |= {name: rest[0] for name, (_, _, *rest) in metrics.items() if rest}
        for name, value in sums(loss_sum, metrics).items():
            totals[name] = totals.get(name, 0.0) + value
    means = {name: totals[name] / totals[f"{name}'s count"] for name in totals if totals.get(f"{name}'s count")}
    for name in finish:
        try:
            means[name] = finish[name](means[name])
        except OverflowError:
            means[name] = math.inf
    return means


def gradient(fork: Fork) -> str:
    """The gradient of each of three global batches, the last one short, is that of the plain loop on the same
    weights."""
    plain_settings = {"epochs": 1, "use_amp": False, "amp_dtype": "auto", "ema_decay": 0.0, "comm_hook": "none"}
    ours = run(fork, "gradient", eval_every=0, is_standing=True, **plain_settings)
    theirs: list[Update] = []  # of the oracle

    def look() -> str:
        few, device = fork.few(), fork.ctx.device
        plain = Few(few, list(range(len(few))))
        transform = getattr(few, "device_transform", lambda batch, *_: batch)
        plain.device_transform = lambda batch, seed, epoch, indices: transform(
            to_device(batch, device), seed, epoch, indices.to(device)
        )
        config = replace(fork.small, **plain_settings)
        with (
            mock.patch.object(plain_loop, "create_dataset", lambda *_: plain),
            mock.patch.object(plain_loop, "create_model", lambda config, _: fork_model.create_model(config, device)),
            updates_into(theirs),
            as_one_process(),
        ):
            scramble(99)
            *_, (net, *_) = plain_loop.plain_loop(config, ACCUMULATION * fork.ctx.world_size)
        return compare(ours, fork.states["gradient"].model, theirs, net) + compare_statistics(
            fork.states["gradient"].model, net
        )

    return fork.on_rank_0(look)


def compare(ours: list[Update], our_model: nn.Module, theirs: list[Update], their_model: nn.Module) -> str:
    """Raises Broken where an optimizer step was given something else than the plain loop's."""
    if len(ours) != len(theirs):
        raise Broken(
            f"an epoch took {len(ours)} optimizer steps, the plain loop {len(theirs)}: a loop that drops or repeats"
            " global batches"
        )
    worst = 0.0
    for step, (mine, plain) in enumerate(zip(ours, theirs, strict=True)):
        if mine.settings != plain.settings:
            raise Broken(
                f"step {step}: learning rate and decay of the groups are {mine.settings}, the plain loop's"
                f" {plain.settings}: param_groups or the schedule look at the ranks; make them functions of the config"
                " and the step"
            )
        pairs = [
            (mine.gradients[p], plain.gradients[q])
            for p, q in zip(our_model.parameters(), their_model.parameters(), strict=True)
            if p in mine.gradients
        ]
        a, b = (torch.cat([g.flatten().double().cpu() for g in each]) for each in zip(*pairs, strict=True))
        error = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
        if not error <= ROUNDING:
            share = (a @ b / (b @ b).clamp(min=1e-30)).item()
            which = "the short last one" if step == len(ours) - 1 else "a full one"
            raise Broken(
                f"global batch {step} ({which}): off by {error:.1e} relative, {share:.3g} times the plain loop's:"
                " another divisor than the window's weight, a loss that depends on the rank or on earlier calls, or"
                " randomness outside the streams; see train_one_epoch"
            )
        worst = max(worst, error)
    return f"{len(ours)} global batches, the last one short: within {worst:.0e} of the plain loop"


def compare_statistics(ours: nn.Module, theirs: nn.Module) -> str:
    """Raises Broken where a buffer of floats (running statistics) is not the plain loop's after the epoch. "" where
    there is none."""
    pairs = [
        (name, ours.get_buffer(name), buffer) for name, buffer in theirs.named_buffers() if buffer.is_floating_point()
    ]
    for name, mine, plain in pairs:
        error = ((mine - plain).norm() / plain.norm().clamp(min=1e-30)).item()
        if digest(mine) != digest(plain) and not error <= ROUNDING:
            raise Broken(
                f"{name}: off by {error:.1e} relative after an epoch: a buffer that moves with each micro-batch of its"
                " own rank, or counts a micro-batch of weight 0; move it once a step over the whole window, as"
                " utils/training/batchnorm.py does for BatchNorm"
            )
    return f", {len(pairs)} running statistics too" if pairs else ""


def sums(loss_sum: Tensor, metrics: dict[str, tuple]) -> dict[str, float]:
    """The loss and all sums and counts of a micro-batch, as numbers."""
    named_values = {"loss": loss_sum}
    for name, (total, count, *_) in metrics.items():
        named_values |= {name: total, f"{name}'s count": count}
    return {name: torch.as_tensor(value).detach().item() for name, value in named_values.items()}


def joined(a: Any, b: Any) -> Any:
    """Two batches, nests of tensors, as one. Raises RuntimeError where their shapes do not fit."""
    if isinstance(a, Tensor):
        return torch.cat([a, b])
    if isinstance(a, dict):
        return {key: joined(a[key], b[key]) for key in a}
    parts = [joined(x, y) for x, y in zip(a, b, strict=True)]
    return type(a)(*parts) if hasattr(a, "_fields") else type(a)(parts)
