"""Checks of the model and its loss: sums, parameters, evaluation, and gradients equal to those of the plain loop."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import plain_loop
from lib.verify.fork import ACCUMULATION, Broken, Fork, Subset, Update, as_single_process, record_updates
from lib.verify.values import digest, first_three, leaves, scramble_global_rngs
from model import compute_loss, param_groups
from utils.data.transfer import to_device
from utils.distributed.collectives import all_gather_json
from utils.metrics import MetricTracker

ROUNDING = 1e-5  # relative to the norm: float32 sums in another order
ADDING = 1e-4  # relative: float32 losses of a batch and of its halves, for which layers choose other kernels


def loss(fork: Fork) -> str:
    """compute_loss returns sums: that of a batch equals those of its two halves together."""

    def check() -> float:
        subset = fork.small_train_set()
        size, loader = min(fork.small_config.batch_size, len(subset) // 2), fork.loader(subset)
        if not size:
            return 0.0  # one sample has no halves
        batches = [loader.fetch([*part])[2] for part in (range(size), range(size, 2 * size), range(2 * size))]
        halves = leaves(batches[:2]).values()
        is_joined = all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size for leaf in halves)
        if is_joined:  # device_transform may mix the samples of a batch
            with suppress(RuntimeError):  # shapes differ
                batches[2] = joined(batches[0], batches[1])
        net, worst = fork.new_model(), 0.0
        for is_training in (False, True):
            net.eval()
            net.training = is_training  # compute_loss as in training, but no dropout and no batch statistics
            with torch.set_grad_enabled(is_training):
                first, second, whole, again = (sums(*compute_loss(net, each)) for each in (*batches, batches[2]))
            for name in whole:
                parts = first.get(name, 0.0) + second.get(name, 0.0)
                error = abs(parts - whole[name]) / max(abs(whole[name]), 1e-12)
                is_mean = whole[name] and abs(parts - 2 * whole[name]) <= 0.05 * abs(parts)
                is_comparable = is_joined and whole[name] == again[name]  # the model draws no random numbers
                if is_mean or (error > ADDING and is_comparable):
                    kind = "a mean instead of a sum" if is_mean else "it does not add up over samples"
                    raise Broken(
                        f"{name} is {whole[name]:.6g} for {2 * size} samples, {parts:.6g} for their halves together:"
                        f" {kind}; let compute_loss return sums over samples, and their counts"
                    )
                worst = max(worst, error if is_comparable else 0.0)
        return worst

    return f"compute_loss adds up over samples, in training and evaluation (within {fork.on_all(check):.0e})"


def parameters(fork: Fork) -> str:
    """Every trainable parameter gets a gradient from each micro-batch and is in a group; all ranks start equal."""

    def check() -> tuple[str, int]:
        scramble_global_rngs(fork.ctx.rank + 1)
        net = fork.new_model()
        start, trainable = digest(net.state_dict()), {name: p for name, p in net.named_parameters() if p.requires_grad}
        in_groups = {id(p) for group in param_groups(net, fork.config) for p in group["params"]}
        if left_out := [name for name, p in trainable.items() if id(p) not in in_groups]:
            raise Broken(f"{first_three(left_out)}: in no parameter group, never trained; add to param_groups")
        net.train()
        loader = fork.loader(fork.small_train_set(), ctx=fork.ctx)
        for micro_batch in (m for global_batch in loader.global_batches(0) for m in global_batch):
            net.zero_grad()
            compute_loss(net, micro_batch.batch)[0].backward()
            if unused := [name for name, p in trainable.items() if p.grad is None]:
                raise Broken(
                    f"{first_three(unused)}: unused by a micro-batch, and DDP would wait for its gradient forever; use"
                    " it in every forward pass, or freeze it in create_model with requires_grad_(False)"
                )
        return start, len(trainable)

    start, count = fork.on_all(check)
    starts = all_gather_json(start, fork.ctx)
    if other := next((rank for rank, each in enumerate(starts) if each != starts[0]), 0):
        raise Broken(
            f"rank {other} has other initial weights than rank 0: create_model depends on the rank, or draws from numpy"
            " or random; draw from torch's generator, which is seeded equally on all ranks"
        )
    return f"{count} tensors are trained, each by every micro-batch; all ranks start equal"


def evaluation(fork: Fork) -> str:
    """Each held-out sample counts once on any number of ranks: compared with one process."""
    if fork.held_out is None:
        return "no held-out set, nothing to check"
    size, ranks, counts = fork.small_config.batch_size, fork.ctx.world_size, []
    for count in (ranks * size + size // 2 + 1, max(1, ranks - 1)):
        subset, net = fork.held_out_subset(count), fork.new_model().eval()
        expected, found = plain_evaluation(fork, subset, net), fork.evaluate(net, subset)
        for name, value in ({"count": len(subset)} | expected).items():
            is_close = math.isclose(found[name], value, rel_tol=1e-5, abs_tol=1e-8)  # rounding of float32 sums
            if not is_close and not math.isnan(value):  # nan: a metric that counted nothing
                raise Broken(
                    f"{name} of {len(subset)} held-out samples is {found[name]:.6g}, in one process {value:.6g}:"
                    " samples repeated or left out, or random numbers; give F.dropout and the like"
                    " training=self.training"
                )
        counts.append(str(len(subset)))
    return f"sets of {' and '.join(counts)} samples: each counted once, loss and metrics as in one process"


def plain_evaluation(fork: Fork, subset: Subset, net: nn.Module) -> dict[str, float]:
    """The mean loss and metrics of a set in one process."""
    loader, tracker = fork.loader(subset), MetricTracker(fork.ctx.device)
    weights = getattr(subset, "weights", [1.0] * len(subset))
    scramble_global_rngs(fork.ctx.rank + len(subset))
    for indices in torch.arange(len(subset)).split(fork.small_config.batch_size):
        *_, batch = loader.fetch(indices.tolist())
        with torch.no_grad():
            loss_sum, metrics = compute_loss(net, batch)
        tracker.update({"loss": (loss_sum, float(sum(weights[k] for k in indices.tolist())))} | metrics)
    return tracker.means([tracker.totals()])


def gradient(fork: Fork) -> str:
    """The gradients of three global batches, the last one short, equal those of the plain loop on the same weights."""
    plain_settings = {"epochs": 1, "use_amp": False, "amp_dtype": "auto", "ema_decay": 0.0, "comm_hook": "none"}
    with record_updates(ours := []):
        fork.short_run("gradient", eval_every=0, **plain_settings)
    our_model = fork.trainings["gradient"].state.model

    def check() -> str:
        subset, device = fork.small_train_set(), fork.ctx.device
        plain = Subset(subset, [*range(len(subset))])
        transform = getattr(subset, "device_transform", lambda batch, *_: batch)
        plain.device_transform = lambda batch, seed, epoch, indices: transform(
            to_device(batch, device), seed, epoch, indices.to(device)
        )
        config = replace(fork.small_config, **plain_settings)
        one_dataset = mock.patch.object(plain_loop, "create_dataset", lambda *_: plain)
        with one_dataset, record_updates(theirs := []), as_single_process():
            scramble_global_rngs(99)
            *_, (net, *_) = plain_loop.plain_loop(config, ACCUMULATION * fork.ctx.world_size, device)
        return compare_updates(ours, our_model, theirs, net) + compare_buffers(our_model, net)

    return fork.on_rank_0(check)


def compare_updates(ours: list[Update], our_model: nn.Module, theirs: list[Update], their_model: nn.Module) -> str:
    """Raises Broken if an optimizer step got something else than in the plain loop."""
    if len(ours) != len(theirs):
        raise Broken(
            f"the epoch had {len(ours)} optimizer steps instead of {len(theirs)}: the training loop drops or repeats"
            " global batches; see train_one_epoch"
        )
    worst = 0.0
    for step, (mine, plain) in enumerate(zip(ours, theirs, strict=True)):
        if mine.settings != plain.settings:
            raise Broken(
                f"step {step}: learning rate and weight decay are {mine.settings}, in the plain loop {plain.settings}:"
                " param_groups or the schedule depends on the ranks; make them functions of config and step"
            )
        a, b = flat_gradient(mine, our_model), flat_gradient(plain, their_model)
        error = relative_error(a, b)
        if not error <= ROUNDING:
            ratio = (a @ b / (b @ b).clamp(min=1e-30)).item()
            raise Broken(
                f"global batch {step}: relative error {error:.1e}, {ratio:.3g} times the plain loop's: a wrong divisor,"
                " unkeyed random numbers, or a loss that depends on rank or earlier calls; see train_one_epoch"
            )
        worst = max(worst, error)
    return f"{len(ours)} global batches, the last one short: within {worst:.0e} of the plain loop"


def compare_buffers(ours: nn.Module, theirs: nn.Module) -> str:
    """Raises Broken if a float buffer (running statistics) differs from the plain loop's after the epoch."""
    buffers = {name: buffer for name, buffer in theirs.named_buffers() if buffer.is_floating_point()}
    for name, plain in buffers.items():
        mine = ours.get_buffer(name)
        error = relative_error(mine, plain)
        if not torch.equal(mine, plain) and not error <= ROUNDING:
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


def sums(loss_sum: Tensor, metrics: dict[str, tuple]) -> dict[str, float]:
    """The loss and all sums and counts of a micro-batch, as numbers."""
    values = {"loss": loss_sum}
    for name, (total, count, *_) in metrics.items():
        values |= {name: total, f"{name}'s count": count}
    return {name: torch.as_tensor(value).detach().item() for name, value in values.items()}


def joined(a: Any, b: Any) -> Any:
    """Two nested batches as one. Raises RuntimeError if their shapes do not fit."""
    if isinstance(a, Tensor):
        return torch.cat([a, b])
    if isinstance(a, dict):
        return {key: joined(a[key], b[key]) for key in a}
    parts = [joined(x, y) for x, y in zip(a, b, strict=True)]
    return type(a)(*parts) if hasattr(a, "_fields") else type(a)(parts)
