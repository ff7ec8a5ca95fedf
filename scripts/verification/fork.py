"""What is verified, and how ranks come to one finding."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import train
from config import TrainingConfig, UserError
from ddp_utils import DistributedContext
from utils.data.loader import GlobalBatchLoader, fetches_batches
from utils.distributed.collectives import all_gather_json
from utils.run.folder import Run

ACCUMULATION = 2  # micro-batches of a rank in an optimizer step


class Broken(Exception):
    """An invariant does not hold. The message names what was seen, the likely cause and the remedy."""


@dataclass
class Fork:
    """The config, data and ranks that are verified, and the short runs made on the way, as one rank sees them."""

    config: TrainingConfig  # `auto` fields taken from the data
    train_set: Dataset
    held_out: Dataset | None
    ctx: DistributedContext
    folder: Path  # of the short runs; deleted at the end
    runs: dict[str, Run] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)  # the TrainState at the end of each run

    def clean_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def title(self) -> str:
        return f"{self.config.task} ({type(self.train_set).__name__}, {len(self.train_set):,} samples)"

    @property
    def alone(self) -> DistributedContext:
        """This process as if it were the only one."""
        return replace(self.ctx, rank=0, world_size=1, local_world_size=1)

    @property
    def small(self) -> TrainingConfig:
        """The config with few samples a step, and two steps an epoch even of a small set."""
        room = len(self.train_set) // (ACCUMULATION * self.ctx.world_size + 2)
        return replace(
            self.config,
            batch_size=max(1, min(4, self.config.batch_size, room)),
            grad_accum_steps=ACCUMULATION,
            global_batch_size=0,
            drop_last=False,
            dataset_size=0,
            epochs=2,
            max_steps=0,
            max_time=0.0,
            patience=0,
            save_every=0,
            save_every_minutes=0.0,
            eval_every=1,
            log_interval=2,
            keep_last=99,
            record_samples=True,
            enable_profiling=False,
            deterministic=self.config.deterministic or self.ctx.device.type == "cuda",
            checkpoint_dir="",
        )

    def few(self) -> Few:
        """Samples of two global batches and a short one, whose last micro-batch has two samples and which leaves some
        rank idle."""
        size, ranks = self.small.batch_size, self.ctx.world_size
        short = (size if ranks > 2 else 0) + min(2, size)
        count = min(2 * size * ACCUMULATION * ranks + short, len(self.train_set))
        count -= count > 1 == count % size  # BatchNorm cannot train on one sample of one pixel
        _, sampler = train.create_distributed_dataloader(
            self.train_set, replace(self.config, drop_last=False), self.ctx
        )
        return Few(self.train_set, sampler.order(0)[:count].tolist())

    def loader(self, dataset: Dataset, **changes: Any) -> GlobalBatchLoader:
        """The training loader of a process alone."""
        return train.create_distributed_dataloader(dataset, replace(self.small, **changes), self.alone)[0]

    def new_model(self) -> nn.Module:
        """The model at step 0, as train.create_state makes it."""
        torch.manual_seed(self.config.seed)
        return train.create_model(self.config, self.ctx.device)

    def on_all(self, action: Callable[[], Any]) -> Any:
        """Run `action` on every rank; where it fails on one, all raise Broken."""
        problem, result = self._attempt(action)
        problems = all_gather_json(problem, self.ctx)
        for rank, text in enumerate(problems):
            if text:
                raise Broken(text if len(set(problems)) == 1 else f"{text} (rank {rank})")
        return result

    @staticmethod
    def _attempt(action: Callable[[], Any]) -> tuple[str, Any]:
        try:
            return "", action()
        except (Broken, UserError) as error:
            return str(error), None
        except Exception as error:
            return f"{in_one_line(error)}; mend that first", None

    def on_rank_0(self, action: Callable[[], str]) -> str:
        """What `action` gives on rank 0, on all ranks; where it fails there, all raise Broken."""
        problem, result = all_gather_json(self._attempt(action) if self.ctx.is_main else ("", ""), self.ctx)[0]
        if problem:
            raise Broken(problem)
        return result


class Few(Dataset):
    """Some samples of a data set, which in all else is that data set."""

    def __init__(self, whole: Dataset, chosen: list[int]) -> None:
        self._whole, self.chosen = whole, chosen
        for name in ("weights", "targets"):
            if getattr(whole, name, None) is not None:
                setattr(self, name, [getattr(whole, name)[k] for k in chosen])
        if fetches_batches(whole):
            self.__getitems__ = self._fetch
        if hasattr(whole, "device_transform"):
            self.device_transform = self._transform

    def __getattr__(self, name: str) -> Any:
        # the order of all samples is a check of its own
        if name.startswith("_") or name in (
            "weights",
            "targets",
            "epoch_order",
        ):
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Any:
        return self._whole[self.chosen[index]]

    def _fetch(self, indices: list[int]) -> Any:
        return self._whole.__getitems__([self.chosen[k] for k in indices])

    def _transform(self, batch: Any, seed: int, epoch: int, indices: Tensor) -> Any:
        return self._whole.device_transform(
            batch, seed, epoch, torch.tensor(self.chosen, device=indices.device)[indices]
        )


def scramble(number: int) -> None:
    """Leave the generators that nobody seeds in another state each time: what depends on them is seen."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def leaves(nest: Any, path: str = "") -> dict[str, Any]:
    """Everything in a nest of dicts, lists and tuples, by its path."""
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        nest = vars(nest)
    if isinstance(nest, set | frozenset):
        nest = sorted(map(repr, nest))
    if isinstance(nest, dict | list | tuple):
        parts = nest.items() if isinstance(nest, dict) else enumerate(nest)
        return {name: leaf for key, value in parts for name, leaf in leaves(value, f"{path}/{key}").items()}
    return {path.lstrip("/"): nest}


def digest(nest: Any) -> str:
    """Of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name, leaf in leaves(nest).items():
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().contiguous()
            found.update(
                f"{name} {data.dtype} {tuple(data.shape)}".encode() + data.flatten().view(torch.uint8).numpy().tobytes()
            )
        else:
            found.update(name.encode() + pickle.dumps(leaf))
    return found.hexdigest()[:16]


def in_one_line(error: BaseException) -> str:
    """Its kind and text; of an error in a worker, which comes with its traceback, the last line."""
    lines = (str(error).strip() or "no text").splitlines()
    return lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"


def named(names: list[str]) -> str:
    """The first three of them."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
