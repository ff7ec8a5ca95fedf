"""The blocks of a model, such as its layers: by default, and those of model.py."""

from __future__ import annotations

from torch import nn

from utils.settings.errors import UserError


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with children in an nn.Sequential or nn.ModuleList: residual blocks, layers.

    A plain Sequential or ModuleList that holds such modules, such as a stage, is not a block, but its modules are.
    """
    is_list = isinstance(module, nn.Sequential | nn.ModuleList)
    blocks = []
    for child in module.children():
        inner_blocks = find_blocks(child)
        is_stage = type(child) in (nn.Sequential, nn.ModuleList) and len(inner_blocks) > 0
        has_children = len(list(child.children())) > 0
        if is_list and has_children and is_callable(child) and not is_stage:
            blocks.append(child)
        else:
            blocks += inner_blocks
    return blocks


def is_callable(module: nn.Module) -> bool:
    """Return whether the module has a forward, which a ModuleList has not."""
    return type(module).forward is not nn.Module.forward


def check_blocks(blocks: list[nn.Module]) -> None:
    """Raise UserError if one of the blocks is not a module that can be called."""
    for block in blocks:
        if not isinstance(block, nn.Module) or not is_callable(block):
            raise UserError(
                f"blocks(model) of model.py returned {type(block).__name__} {str(block)[:40]!r}. Return modules with a"
                " forward, e.g. list(model.blocks)."
            )
