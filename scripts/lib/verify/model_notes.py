# extra: verify
"""What is seldom meant in a model: weights of a fixed seed, broken ties, and statistics of frozen layers that move."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lib.values import first_three
from lib.verify.draws import other_seeds
from lib.verify.fork import Fork, perturbed


def look_at_weights(fork: Fork) -> str:
    """Notes on trainable parameters of a new model: those that a seed in the code draws, and copies of another one."""
    net = new_model(fork, fork.config.seed)
    parameters = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    note = ""
    if fixed := drawn_from_a_fixed_seed(fork, parameters):
        note += (
            f"; please check: {first_three(fixed)}: drawn from a seed in the code, so that runs with another --seed"
            " start from the same weights; draw from torch's global generator, which is seeded by --seed"
        )
    if pair := broken_tie(net, parameters):
        note += (
            f"; please check: {' and '.join(pair)} have the same random values, but are two parameters, so that"
            " training makes them differ; if they should be tied, let head.weight be tokens.weight itself"
        )
    return note


def new_model(fork: Fork, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fork.seams.create_model(replace(fork.config, seed=seed), fork.ctx.device)


def drawn_from_a_fixed_seed(fork: Fork, parameters: dict[str, Tensor]) -> list[str]:
    """The names of parameters that are the same with another --seed, but not with other seeds in the code."""

    def equal(names: list[str], seed: int) -> list[str]:
        others = dict(new_model(fork, seed).named_parameters())
        return [name for name in names if name in others and torch.equal(parameters[name], others[name])]

    varied = [name for name, p in parameters.items() if p.numel() and p.min() < p.max()]
    same = equal(varied, fork.config.seed + 1)
    if not same:
        return []
    with other_seeds():
        kept = equal(same, fork.config.seed)
    return [name for name in same if name not in kept]


def broken_tie(net: nn.Module, parameters: dict[str, Tensor]) -> list[str]:
    """The names of two equal parameters of modules that are no copies of each other; none if there are no such ones."""
    groups = defaultdict(list)
    for name, p in parameters.items():
        groups[p.shape, p.sum().item()].append(name)
    for pair in (pair for names in groups.values() for pair in combinations(names, 2)):
        a, b = (parameters[name] for name in pair)
        if torch.equal(a, b) and len(a.unique()) > 2 and not are_copies(*(net.get_submodule(owner(n)) for n in pair)):
            return [*pair]
    return []


def owner(name: str) -> str:
    """The name of the module that has this parameter."""
    return name.rpartition(".")[0]


def are_copies(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules are of one kind and all their parameters are equal, as in towers that start as copies."""
    pairs = zip(a.parameters(), b.parameters(), strict=False)
    return type(a) is type(b) and all(p.shape == q.shape and torch.equal(p, q) for p, q in pairs)


def look_at_statistics(fork: Fork) -> str:
    """Notes on running statistics of normalization layers after the run "whole": those that move although the layer is
    frozen, and those that evaluations use although nothing updates them."""
    net, start = fork.trainings["whole"].state.model, perturbed(fork.new_model(), 1)
    moving: list[str] = []
    initial: list[str] = []
    for name, norm in start.named_modules():
        if not isinstance(norm, _NormBase) or norm.running_mean is None:
            continue
        parameters = [*norm.parameters()] or [*start.get_submodule(owner(name)).parameters()]
        is_frozen = parameters and not any(p.requires_grad for p in parameters)
        mean, variance = (net.get_buffer(f"{name}.running_{part}") for part in ("mean", "var"))
        if not torch.equal(mean, norm.running_mean):
            moving += [name] * bool(is_frozen)
        elif not mean.any() and (variance == 1).all():
            initial.append(name)
    note = ""
    if moving:
        note = (
            f"; please check: {first_three(moving)}: frozen, but the running statistics move in training; keep the"
            " layer in evaluation mode (override train), or train its parameters"
        )
    if initial and not fork.given.init_from and matter(fork, start, initial):
        note += (
            f"; please check: {first_three(initial)}: an evaluation normalizes by running statistics that are still"
            " 0 and 1 after training; let training update them, or load pretrained ones"
        )
    return note


def matter(fork: Fork, net: nn.Module, norms: list[str]) -> bool:
    """Whether the loss of an evaluation changes with the running means of these layers."""
    before = fork.sample_loss(net, fork.ctx.device)
    for name in norms:
        torch.nn.init.normal_(net.get_buffer(f"{name}.running_mean"))
    return fork.sample_loss(net, fork.ctx.device) != before
