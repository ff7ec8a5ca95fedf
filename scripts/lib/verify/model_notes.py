# extra: verify
"""What is seldom meant in a model: weights of a fixed seed, broken ties, and statistics of frozen layers that move."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lib.values import first_three
from lib.verify.draws import other_seeds
from lib.verify.fork import Fork, perturbed
from utils.distributed.dtensor import local


def look_at_weights(fork: Fork) -> str:
    """Notes on trainable parameters of a new model: those that a seed in the code draws, and those that are copies."""
    net = new_model(fork, fork.config.seed)
    parameters = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    same = equal_in_new_model(fork, parameters, fork.config.seed + 1)
    with other_seeds():
        kept = equal_in_new_model(fork, parameters, fork.config.seed)
    note = ""
    if fixed := [name for name in same if name not in kept]:
        note = (
            f"; please check: {first_three(fixed)}: drawn from a seed in the code, so that runs with another --seed"
            " start from the same weights; draw from torch's global generator, which is seeded by --seed"
        )
    for (one, p), (another, q) in combinations(parameters.items(), 2):
        are_alike = p.shape == q.shape and kind_of_owner(net, one) is not kind_of_owner(net, another)
        if are_alike and torch.equal(p, q) and len(p.unique()) > 2:  # an identity has two values
            note += (
                f"; please check: {one} and {another} have the same random values, but are two parameters, so that"
                " training makes them differ; if they should be tied, assign the parameter itself"
            )
    return note


def new_model(fork: Fork, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fork.seams.create_model(replace(fork.config, seed=seed), fork.ctx.device)


def equal_in_new_model(fork: Fork, parameters: dict[str, Tensor], seed: int) -> list[str]:
    others = dict(new_model(fork, seed).named_parameters())
    return [name for name, p in parameters.items() if name in others and torch.equal(p, others[name])]


def kind_of_owner(net: nn.Module, name: str) -> type:
    """The class of the module that has this parameter. Copies of a module, as towers are, have one class."""
    return type(net.get_submodule(name.rpartition(".")[0]))


def look_at_statistics(fork: Fork) -> str:
    """Notes on running statistics of normalization layers after the run "whole": those that move although the layer is
    frozen, and those that evaluations use although nothing updates them."""
    net, start = fork.trainings["whole"].state.model, fork.new_model()
    moving: list[str] = []
    initial: list[str] = []
    for name, norm in start.named_modules():
        if not isinstance(norm, _NormBase) or norm.running_mean is None:
            continue
        path = name if norm.affine else name.rpartition(".")[0]
        mean, variance = (net.get_buffer(f"{name}.running_{part}") for part in ("mean", "var"))
        if not torch.equal(mean, norm.running_mean):
            if is_frozen(start.get_submodule(path), net.get_submodule(path)):
                moving.append(name)
        elif not mean.any() and (variance == 1).all():
            initial.append(name)
    note = ""
    if moving:
        note = (
            f"; please check: {first_three(moving)}: frozen, but the running statistics move in training; keep the"
            " layer in evaluation mode (override train), or train its parameters"
        )
    if initial and not fork.given.init_from and are_used(fork, perturbed(start, 1), initial):
        note += (
            f"; please check: {first_three(initial)}: an evaluation normalizes by running statistics that are still"
            " 0 and 1 after training; let training update them, or load pretrained ones"
        )
    return note


def is_frozen(before: nn.Module, after: nn.Module) -> bool:
    """Whether a module has parameters, and none is trained or an average of trained ones."""
    pairs = [*zip(before.parameters(), after.parameters(), strict=True)]
    return bool(pairs) and all(not p.requires_grad and torch.equal(p, local(q)) for p, q in pairs)


def are_used(fork: Fork, net: nn.Module, norms: list[str]) -> bool:
    """Whether the loss of an evaluation changes with the running means of these layers."""
    before = fork.sample_loss(net, fork.ctx.device)
    for name in norms:
        nn.init.normal_(net.get_buffer(f"{name}.running_mean"))
    return fork.sample_loss(net, fork.ctx.device) != before
