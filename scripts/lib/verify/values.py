"""Helpers of the checks: compare nested values, and format them for messages."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import random
import sys
from typing import Any

import torch
from torch import Tensor


def scramble_global_rngs(number: int) -> None:
    """Seed the global generators differently each time, to expose results that depend on them."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def leaves(nest: Any, path: str = "") -> dict[str, Any]:
    """The values in nested dicts, lists, tuples and dataclasses, by path."""
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        nest = vars(nest)
    if isinstance(nest, dict | list | tuple):
        parts = nest.items() if isinstance(nest, dict) else enumerate(nest)
        return {name: leaf for key, value in parts for name, leaf in leaves(value, f"{path}/{key}").items()}
    return {path.lstrip("/"): nest}


def digest(nest: Any) -> str:
    """A hash of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, leaf in leaves(nest).items():
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().contiguous()
            found.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
            found.update(data.flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(name.encode() + pickle.dumps(leaf))
    return found.hexdigest()[:16]


def one_line(error: BaseException) -> str:
    """An error's type and text; for an error from a worker, whose text is a traceback, the last line."""
    lines = (str(error).strip() or "no text").splitlines()
    return lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"


def first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
