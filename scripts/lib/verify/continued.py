# extra: verify
"""Whether a run that is continued after a crash sees the data of the first attempt."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import dataset as your_data
from config import TrainingConfig
from ddp_utils import DistributedContext
from lib.values import one_line, spread
from lib.verify.fork import Broken, Fork, Subset, as_rank
from lib.verify.new_process import RESTARTS, order_of
from lib.verify.notes import by_epoch
from utils.data.sets import load_data

COUNT = 4  # samples of each set
Seen = dict[str, list[Any]]


def compare_continued(fork: Fork) -> str:
    """Raises Broken if data that are created beside the run "whole", as by its second attempt, are others."""
    later = replace(fork.given, run_dir=str(fork.folder / "whole"), resume_from="auto")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # as the data sets were created
    try:
        before = look(fork, [fork.train_set, fork.held_out])
        if (after := look_again(fork, later, "1")) == before:
            return ""
        first = replace(fork.given, run_dir=str(fork.folder / "other"))
        is_same_at_first = look_again(fork, first, "0") == before
    except Exception as error:
        return f"; not checked: the data of a run that is continued, which cannot be created ({one_line(error)})"
    finally:
        fork.start.put_back()
        torch.set_default_dtype(dtype)
    if not is_same_at_first:
        return (
            "; not checked: the data of a run that is continued, since create_dataset also returns others at its start"
        )
    other = [name for name in before if before[name] != after[name]]
    raise Broken(
        f"{' and '.join(other)} samples or their order are others in a run that is continued, with its checkpoints in"
        f" run_dir, resume_from=auto and {'=1, '.join(RESTARTS)}=1: dataset.py reads one of these; a run that is"
        " continued must see the same samples; let them depend on the data, config.seed, the epoch and the index only"
    )


def look_again(fork: Fork, config: TrainingConfig, attempt: str) -> Seen:
    fork.start.put_back()
    with as_rank(), mock.patch.dict(os.environ, dict.fromkeys(RESTARTS, attempt)):
        sets = load_data(your_data, config, DistributedContext(0, 0, 1, fork.ctx.device))
        return look(fork, [sets.train, next(iter(sets.held_out.values()), None)])


def look(fork: Fork, sets: list[Any]) -> Seen:
    """The size of each set, its order, and some samples on the device in three epochs."""
    found: Seen = {}
    for name, dataset in zip(("training", "held-out"), sets, strict=True):
        found[name] = []
        if dataset is not None:
            subset = Subset(dataset, spread(COUNT, len(dataset)), fork.dtype)
            found[name] = [len(dataset), order_of(dataset, fork.config.seed), *by_epoch(fork, subset)]
    return found
