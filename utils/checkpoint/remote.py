"""A checkpoint or weights at a URL: a program makes a local copy."""

from __future__ import annotations

from pathlib import Path

from utils.checkpoint.format import find_best_or_latest


def local_checkpoint(source: str) -> Path:
    """Return the path of a checkpoint or another file; of one at a URL a local copy.

    source: a path (of a folder too: the best checkpoint in it, or else the latest) or a URL.

    Raises:
        UserError: if it is not there or damaged.
    """
    if "://" in source:  # extra: companions
        from utils.extras.companions.programs import call_program

        return Path(call_program("fetch", {"source": source}, source)["path"])
    return find_best_or_latest(Path(source), prefer_best=True)[0]
