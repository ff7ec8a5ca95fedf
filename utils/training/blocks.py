"""The blocks of a model, such as its layers: by default, and those of model.py."""

from __future__ import annotations

from torch import nn

from utils.settings.errors import UserError


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules with children in an nn.Sequential or nn.ModuleList: residual blocks, layers.

    A plain Sequential or ModuleList that holds such modules, such as a stage, is not a block, but its modules are.
    """
    blocks = []
    for child in module.children():
        inner = find_blocks(child)
        is_stage = type(child) in (nn.Sequential, nn.ModuleList) and inner
        is_callable = type(child).forward is not nn.Module.forward  # a ModuleList is not
        is_block = (
            isinstance(module, nn.Sequential | nn.ModuleList) and is_callable and any(True for _ in child.children())
        )
        blocks += [child] if is_block and not is_stage else inner
    return blocks


def check_blocks(blocks: list[nn.Module]) -> None:
    """Raises UserError if one of them is not a module that can be called."""
    for block in blocks:
        if not isinstance(block, nn.Module) or type(block).forward is nn.Module.forward:
            raise UserError(
                f"blocks(model) of model.py: returned {type(block).__name__} {str(block)[:40]!r}; return modules with a"
                " forward, e.g. list(model.blocks)"
            )
