"""Paths as users write them: with `~`, with names of the environment, or as Windows has them."""

from __future__ import annotations

import os
import re


def expand_path(path: str) -> str:
    """The path with `~` and $NAME replaced, unless it exists as it is or is a URL."""
    if "://" in path or (os.path.lexists(path) and not path.startswith("~")):
        return path
    return os.path.expanduser(os.path.expandvars(path))


def explain_path_problem(path: str) -> str:
    """A check of an expanded path."""
    if "://" in path or os.path.lexists(path):
        return ""
    if re.match(r"[A-Za-z]:[\\/]|(\\|\.\.?|~|%\w+%)\\", path):
        return "must be a path of Linux, not of Windows. In WSL, C: is /mnt/c."
    unknown = re.search(r"\$(\{\w+\}|[A-Za-z_]\w*)|^~[^/]*", path)
    if unknown:
        return f"contains {unknown[0]}, which has no value here. Write the path in full."
    return ""
