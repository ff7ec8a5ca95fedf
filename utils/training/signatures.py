"""What functions of model.py ask for by the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def has_parameter(function: Callable | None, name: str) -> bool:
    """Return whether the function has a parameter of this name."""
    if function is None:
        return False
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable without a signature, such as some built-in ones
        return False
