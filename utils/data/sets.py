"""The data sets of a run, as dataset.py creates them: checked, cut to `--dataset_size`, and the same on all ranks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from config import TrainingConfig, list_fork_settings
from utils.data.sampler import MapDataset
from utils.distributed.collectives import (
    on_all_ranks,
    read_once_per_file_system,
    require_equal,
    run_once_per_file_system,
)
from utils.distributed.context import DistributedContext
from utils.rng import derive_seed, seed_host
from utils.settings.errors import UserError


@dataclass(frozen=True)
class DataSets:
    """The training set, the held-out sets by split, and the config with its `auto` fields taken from the data."""

    train: MapDataset
    held_out: dict[str, MapDataset]
    config: TrainingConfig
    # of the training set, and of the held-out sets by split: what a checkpoint is compared by
    provenance: dict[str, Any]
    file_listing: bytes  # of the training set's files, if it has one


def load_data(data_module: ModuleType, config: TrainingConfig, ctx: DistributedContext) -> DataSets:
    """The data sets that dataset.py (`data_module`) creates, which must be the same on all ranks. Raises UserError."""
    run_once_per_file_system(
        Path(config.data_dir), lambda: data_module.is_prepared(config), lambda: data_module.prepare_data(config), ctx
    )

    def create_split(split: str) -> MapDataset | None:
        seed_host("create_dataset", config.seed)  # a random split is the same in each call on each rank
        return data_module.create_dataset(config, split)

    def create_splits() -> dict[str, Any]:
        sets = {split: create_split(split) for split in ("train", "val", "test")}
        if sets["train"] is None:
            raise UserError(f"data_dir={config.data_dir}: create_dataset found no training set there; give its folder")
        return {split: dataset for split, dataset in sets.items() if dataset is not None}

    sets = on_all_ranks(create_splits, ctx)
    difference_message = f"data_dir={config.data_dir}: {{other}} and {{first}} "
    if len({*ctx.hosts}) > 1:
        difference_message += "hold different data; copy it again, or sort what"
    else:
        difference_message += "hold different data; sort what"
    difference_message += " create_dataset makes from a set, the environment or the clock"
    listed = [split for split, dataset in sets.items() if hasattr(dataset, "use_listing")]
    require_equal(listed, difference_message, ctx)
    for listed_set in (sets[split] for split in listed):
        listed_set.use_listing(
            read_once_per_file_system(
                listed_set.folder, functools.partial(getattr, listed_set, "listing"), difference_message, ctx
            )
        )
    if listed and ctx.is_main:
        sets[listed[0]].log_file_listing([sets[split] for split in listed])

    def check_and_cut() -> dict[str, MapDataset]:
        for split, dataset in sets.items():
            check_dataset(dataset, split)
        return sets | {"train": take_subset(sets["train"], config.dataset_size, config.seed)}

    sets = on_all_ranks(check_and_cut, ctx)
    config = on_all_ranks(lambda: resolve_auto_fields(config, sets["train"]), ctx)
    identities = [[split, identify_dataset(dataset)] for split, dataset in sets.items()]
    require_equal(identities, difference_message, ctx)
    from utils.extras.sketches import compare_sample_fingerprints  # extra: sketches

    fingerprints_by_set: list[list] = [[] for _ in sets]
    fingerprints_by_set = compare_sample_fingerprints(sets, config.seed, difference_message, ctx)  # extra: sketches
    files = [dataset.listing if split in listed else b"" for split, dataset in sets.items()]
    content = {
        split: {
            "identity": set_identity,
            "content": hashlib.sha256(listing).hexdigest()[:16],
            "sketches": set_fingerprints,
        }
        for (split, set_identity), listing, set_fingerprints in zip(identities, files, fingerprints_by_set, strict=True)
    }
    train = content.pop("train")
    return DataSets(sets.pop("train"), sets, config, train | {"held_out": content}, files[0])


def resolve_auto_fields(config: TrainingConfig, dataset: MapDataset) -> TrainingConfig:
    """Replace "auto" in fields of the model and data by the training set's attributes of the same names."""
    from_data = {}
    for setting in list_fork_settings():
        name = setting.name
        is_auto = setting.may_be_auto and getattr(config, name) == "auto"
        if is_auto and hasattr(dataset, name):
            from_data[name] = getattr(dataset, name)
    return dataclasses.replace(config, **from_data)


def check_dataset(dataset: MapDataset, split: str) -> None:
    """Raises UserError if this is not a map-style data set with samples."""
    kind = f"create_dataset: {type(dataset).__name__} ({split})"
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"{kind} has no __len__ and __getitem__, which are needed to assign samples to ranks; define them"
            " (docs/recipes shows indexed tar files)"
        )
    if not len(dataset):
        raise UserError(f"{kind} has no samples; return None if there is no such split")


class SampleSubset(Subset):
    """A subset that keeps the attributes of its data set. device_transform gets indices into the whole set."""

    dataset: Any

    def __init__(self, dataset: Any, indices: Tensor) -> None:
        self._subset_indices, copies = indices.long(), getattr(dataset, "copies", 1)
        self._indices_with_copies = torch.cat([self._subset_indices + k * len(dataset) for k in range(copies)])
        # 8 bytes each, read as Python's integers
        super().__init__(dataset, array("q", self._subset_indices.numpy().tobytes()))
        if hasattr(dataset, "device_transform"):
            self.device_transform = self._transform
        if hasattr(dataset, "epoch_order"):  # knows its samples by their indices in the whole set, too
            self.epoch_order = self._subset_order

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def __getitems__(self) -> Any:
        """Exists only if the data set has it; torch's Subset always does."""
        if not hasattr(self.dataset, "__getitems__"):
            raise AttributeError("__getitems__")
        return super().__getitems__

    def _subset_order(self, seed: int, epoch: int, n: int) -> Tensor:
        whole = len(self.dataset)
        order = torch.as_tensor(self.dataset.epoch_order(seed, epoch, whole), dtype=torch.int64)
        positions = torch.full((whole,), -1).index_copy_(0, self._subset_indices, torch.arange(n))
        new_order = positions[order % whole] + order // whole * n
        return new_order[positions[order % whole] >= 0]

    def _transform(self, batch: Any, seed: int, epoch: int, indices: Tensor) -> Any:
        self._indices_with_copies = self._indices_with_copies.to(indices.device)  # once
        return self.dataset.device_transform(batch, seed, epoch, self._indices_with_copies[indices])

    @property
    def targets(self) -> Tensor:
        return torch.as_tensor(self.dataset.targets)[self._subset_indices]


def take_subset(dataset: Any, size: int, seed: int) -> MapDataset:
    """The data set, or `size` of its samples, chosen by the seed (0: all). Raises UserError if it cannot be cut."""
    if size in (0, len(dataset)):
        return dataset
    if size > len(dataset):
        raise UserError(f"dataset_size={size}: the set has {len(dataset)} samples; give fewer, or 0 for all")
    if getattr(dataset, "with_replacement", False):  # the chosen samples may come more or less than `size` times
        raise UserError(
            f"dataset_size={size}: epoch_order repeats and omits samples (with_replacement), so it cannot be cut to a"
            " subset; give --dataset_size 0, and choose the samples in create_dataset"
        )
    generator = torch.Generator().manual_seed(derive_seed("subset", seed))
    return SampleSubset(dataset, torch.randperm(len(dataset), generator=generator)[:size].sort().values)


def identify_dataset(dataset: MapDataset) -> str:
    """The data set identity: the number of samples and a hash of its own fingerprint, or else of its `targets`."""
    hash_input = getattr(dataset, "fingerprint", None)
    with suppress(TypeError, ValueError, RuntimeError):  # `targets` of other kinds than numbers
        hash_input = torch.as_tensor(getattr(dataset, "targets", [])).tolist() if hash_input is None else hash_input
    return f"{len(dataset):,} samples, {derive_seed(hash_input):016x}"


def choose_split_name(dataset: MapDataset, split: str) -> str:
    """The name of its split for records. It is the data set's own attribute if that is text: a single held-out folder
    "test" has "test". Other libraries use the attribute for objects of their own (datasets.NamedSplit)."""
    own_split = getattr(dataset, "split", split)
    return own_split if type(own_split) is str else split


def dataset_class_name(dataset: MapDataset) -> str:
    """The class name of the data set, without a cache or a subset around it."""
    inner = getattr(dataset, "source", dataset)
    return type(inner.dataset if isinstance(inner, Subset) else inner).__name__


def collect_dataset_properties(dataset: MapDataset) -> dict[str, Any]:
    """The properties of a training set that an export or a resume needs."""
    mean_and_std = {name: torch.as_tensor(getattr(dataset, name, [])).tolist() for name in ("mean", "std")}
    return {"identity": identify_dataset(dataset), "classes": list(getattr(dataset, "classes", []))} | mean_and_std
