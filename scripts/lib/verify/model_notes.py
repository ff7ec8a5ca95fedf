# extra: verify
"""Notes on what is seldom meant in a model.

They are about weights of a fixed seed, broken ties, and statistics of frozen layers that move.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lib.values import join_first_three, scramble_global_rngs
from lib.verify.fork import Fork, allow_failure, perturb_parameters, pretend_rank
from lib.verify.randomness import replace_seeds
from lib.verify.result import PLEASE_CHECK, join_parts
from utils.distributed.dtensor import local_shard


@allow_failure("whether the initial weights follow --seed, and whether a tie is broken")
def inspect_weights(fork: Fork) -> str:
    """Return notes on trainable parameters of a new model that a seed in the code draws, or that are copies."""
    net = create_seeded_model(fork, fork.config.seed)
    parameters = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    same = find_equal_parameters(fork, parameters, fork.config.seed + 1)
    with replace_seeds():
        same_without_seeds = find_equal_parameters(fork, parameters, fork.config.seed)
    notes = []
    if fixed := [name for name in same if name not in same_without_seeds]:
        notes.append(
            f"{PLEASE_CHECK}A seed in the code determines the initial values of {join_first_three(fixed)}, so runs with"
            " another --seed start from the same weights. Draw from torch's global generator, which is seeded by"
            " --seed."
        )
    for (name_a, p), (name_b, q) in combinations(parameters.items(), 2):
        is_copy = torch.equal(p, q) and are_single_copies(net, name_a, name_b)
        is_transposed = p.ndim == q.ndim == 2 and torch.equal(p, q.T)
        if (is_copy or is_transposed) and len(p.unique()) > 2:  # an identity has only two values
            notes.append(
                f"{PLEASE_CHECK}{name_a} and {name_b} have the same random values, but are two parameters, so training"
                " makes them differ. If they should be tied, assign the parameter itself."
            )
    return join_parts(*notes)


def create_seeded_model(fork: Fork, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fork.hooks.create_model(replace(fork.config, seed=seed), fork.ctx.device)


def find_equal_parameters(fork: Fork, parameters: dict[str, Tensor], seed: int) -> list[str]:
    new_parameters = dict(create_seeded_model(fork, seed).named_parameters())
    return [name for name, p in parameters.items() if name in new_parameters and torch.equal(p, new_parameters[name])]


def are_single_copies(net: nn.Module, *names: str) -> bool:
    """Return whether two equal parameters are copies by themselves, and not within copies of whole modules.

    They are in modules of different classes, or in two embeddings whose modules are no copies of each other. Towers,
    layers and critics are copied as a whole.
    """
    paths = [name.split(".") for name in names]
    owner, other_owner = (net.get_submodule(".".join(path[:-1])) for path in paths)
    above, beside = (list(net.get_submodule(".".join(path[:-2])).parameters()) for path in paths)
    if type(owner) is not type(other_owner):
        return True
    are_copied = len(above) == len(beside) and all(map(torch.equal, above, beside))
    return isinstance(owner, nn.Embedding) and not are_copied


@allow_failure("the running statistics of normalization layers")
def inspect_statistics(fork: Fork) -> str:
    """Return notes on running statistics of normalization layers after the run "whole".

    Some statistics move although the layer is frozen. Others are used in evaluations although nothing updates them.
    """
    net, start = fork.trainings["whole"].state.model, fork.create_model()
    moving: list[str] = []
    for name, norm in start.named_modules():
        if isinstance(norm, _NormBase) and norm.running_mean is not None:
            path = name if norm.affine else name.rpartition(".")[0]
            is_same = torch.equal(net.get_buffer(f"{name}.running_mean"), norm.running_mean)
            if not is_same and is_frozen(start.get_submodule(path), net.get_submodule(path)):
                moving.append(name)
    note = ""
    if moving:
        note = (
            f"{PLEASE_CHECK}The running statistics of frozen layers move in training ({join_first_three(moving)}). Keep"
            " such a layer in evaluation mode (override train), or train its parameters."
        )
    idle_note = ""
    if idle := find_idle_statistics(fork, perturb_parameters(start, 1), net):
        idle_note = (
            f"{PLEASE_CHECK}An evaluation normalizes by running statistics that are still 0 or 1 after training"
            f" ({join_first_three(idle)}). Let training update them, or load pretrained ones."
        )
    return join_parts(note, idle_note)


def find_idle_statistics(fork: Fork, start: nn.Module, net: nn.Module) -> list[str]:
    """Return the buffers that are still 0 or 1 after the run, and on which evaluations depend.

    Training may only depend on those of a norm of torch, which is kept in evaluation mode then.
    """
    if fork.held_out is None or fork.given_config.init_from:
        return []
    idle_names = []
    subset = fork.held_out_subset(fork.small_config.batch_size)
    for name, buffer in start.named_buffers():
        is_constant = buffer.is_floating_point() and ((buffer == 0).all() or (buffer == 1).all())
        if not is_constant or not torch.equal(buffer, net.get_buffer(name)):
            continue
        owner = start.get_submodule(name.rpartition(".")[0])
        is_norm = isinstance(owner, _NormBase)
        if is_norm and (owner.get_buffer("running_mean").any() or (owner.get_buffer("running_var") - 1).any()):
            continue  # the statistics of this layer come from a file
        changed_model = copy.deepcopy(start)
        changed_model.get_buffer(name).add_(torch.rand_like(buffer))
        trained = [0.0, 0.0] if is_norm else [compute_training_loss(fork, model) for model in (start, changed_model)]
        evaluated = [fork.evaluate_in_one_process(subset, model.eval())["loss"] for model in (start, changed_model)]
        if evaluated[0] != evaluated[1] and trained[0] == trained[1]:
            idle_names.append(name)
    return idle_names


def compute_training_loss(fork: Fork, net: nn.Module) -> float:
    """Return the loss of a copy in training mode, with dropout and batch statistics.

    It is a copy because its statistics move.
    """
    batch = fork.create_loader(fork.small_train_set()).fetch_samples([*range(fork.small_config.batch_size)])[2]
    with pretend_rank():
        scramble_global_rngs(0)
        return fork.hooks.compute_loss(copy.deepcopy(net).train(), batch)["loss"][0].sum().item()


def is_frozen(before: nn.Module, after: nn.Module) -> bool:
    """Return whether a module has parameters, of which none is trained or an average of trained ones."""
    pairs = [*zip(before.parameters(), after.parameters(), strict=True)]
    return bool(pairs) and all(not p.requires_grad and torch.equal(p, local_shard(q)) for p, q in pairs)
