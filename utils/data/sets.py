"""The data sets of a run, as dataset.py creates them: checked, cut to `--dataset_size`, and the same on all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
    """The data sets of a run, and the config in which the data have resolved the `auto` fields."""

    train: MapDataset
    held_out: dict[str, MapDataset]  # by split
    config: TrainingConfig
    # what a checkpoint is compared by: of the training set, and in "held_out" of the other sets by split
    provenance: dict[str, Any]
    file_listing: bytes  # of the training set's files; empty if it has no listing


def load_data(data_module: ModuleType, config: TrainingConfig, ctx: DistributedContext) -> DataSets:
    """Create the data sets of all splits, and check that all ranks have the same ones. Collective.

    Args:
        data_module: has the functions of dataset.py.

    Raises:
        UserError: if there is no training set, a set cannot be used, or the ranks have different data.
    """
    run_once_per_file_system(
        folder=Path(config.data_dir),
        is_done=lambda: data_module.is_prepared(config),
        action=lambda: data_module.prepare_data(config),
        ctx=ctx,
    )
    sets = on_all_ranks(partial(_create_splits, data_module, config), ctx)
    difference_message = _explain_difference(config, ctx)
    _share_file_listings(sets, difference_message, ctx)
    sets = on_all_ranks(partial(_check_and_cut, sets, config), ctx)
    config = on_all_ranks(partial(resolve_auto_fields, config, sets["train"]), ctx)

    identities = {split: identify_dataset(dataset) for split, dataset in sets.items()}
    require_equal(list(identities.items()), difference_message, ctx)
    from utils.extras.sketches import compare_sample_fingerprints  # extra: sketches

    fingerprints_by_set: list[list] = [[] for _ in sets]
    fingerprints_by_set = compare_sample_fingerprints(
        sets, config.seed, sentence=difference_message, ctx=ctx
    )  # extra: sketches

    listings = {split: _read_file_listing(dataset) for split, dataset in sets.items()}
    provenance: dict[str, dict[str, Any]] = {}
    for split, fingerprints in zip(sets, fingerprints_by_set, strict=True):
        provenance[split] = {
            "identity": identities[split],
            "content": hashlib.sha256(listings[split]).hexdigest()[:16],
            "sketches": fingerprints,
        }
    train_set = sets.pop("train")
    train_provenance = provenance.pop("train")
    train_provenance["held_out"] = provenance
    return DataSets(
        train=train_set,
        held_out=sets,
        config=config,
        provenance=train_provenance,
        file_listing=listings["train"],
    )


def _create_splits(data_module: ModuleType, config: TrainingConfig) -> dict[str, Any]:
    """Create the data sets by split, without those that do not exist. Raises UserError if there is no training set."""
    sets = {}
    for split in ("train", "val", "test"):
        seed_host("create_dataset", config.seed)  # a random split is the same in each call on each rank
        dataset = data_module.create_dataset(config, split)
        if dataset is not None:
            sets[split] = dataset
    if "train" not in sets:
        text = f"create_dataset found no training set in --data_dir {config.data_dir}."
        raise UserError(f"{text} Give the folder that holds it.")
    return sets


def _explain_difference(config: TrainingConfig, ctx: DistributedContext) -> str:
    """Return the message for ranks with different data, in which {other} and {first} stand for two ranks."""
    message = f"{{other}} and {{first}} have different data in --data_dir {config.data_dir}. "
    if len(set(ctx.hosts)) > 1:
        message += "Copy the data again, or make"
    else:
        message += "Make"
    return message + " create_dataset independent of the order of a set, the environment and the clock."


def _share_file_listings(sets: dict[str, Any], difference_message: str, ctx: DistributedContext) -> None:
    """Let one rank of each file system list the files of the sets that need a listing, and give it to all. Collective.

    Raises:
        UserError: with the difference message, if the files are not the same on all file systems.
    """
    listed_splits = [split for split, dataset in sets.items() if hasattr(dataset, "use_listing")]
    require_equal(listed_splits, difference_message, ctx)
    listed_sets = [sets[split] for split in listed_splits]
    for dataset in listed_sets:
        listing = read_once_per_file_system(
            folder=dataset.folder,
            read=partial(getattr, dataset, "listing"),  # a property that lists the files
            sentence=difference_message,
            ctx=ctx,
        )
        dataset.use_listing(listing)
    if listed_sets and ctx.is_main:
        listed_sets[0].log_file_listing(listed_sets)


def _read_file_listing(dataset: Any) -> bytes:
    """Return the listing of a data set's files, which is empty if the set has none."""
    if hasattr(dataset, "use_listing"):
        return dataset.listing
    return b""


def _check_and_cut(sets: dict[str, Any], config: TrainingConfig) -> dict[str, MapDataset]:
    """Check the sets, and cut the training set to `--dataset_size`. Raises UserError if a set cannot be used."""
    for split, dataset in sets.items():
        check_dataset(dataset, split)
    train_set = take_subset(sets["train"], config.dataset_size, config.seed)
    return sets | {"train": train_set}


def resolve_auto_fields(config: TrainingConfig, dataset: MapDataset) -> TrainingConfig:
    """Replace "auto" in fields of the model and data by the training set's attributes of the same names.

    Returns:
        The config. A field stays "auto" if the training set has no such attribute.
    """
    from_data = {}
    for setting in list_fork_settings():
        name = setting.name
        is_auto = setting.may_be_auto and getattr(config, name) == "auto"
        if is_auto and hasattr(dataset, name):
            from_data[name] = getattr(dataset, name)
    return dataclasses.replace(config, **from_data)


def check_dataset(dataset: MapDataset, split: str) -> None:
    """Raise UserError if this is not a map-style data set with samples."""
    kind = type(dataset).__name__
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise UserError(
            f"The {kind} of create_dataset ({split}) has no __len__ and __getitem__, which are needed to assign samples"
            " to ranks. Define them (docs/recipes shows indexed tar files)."
        )
    if not len(dataset):
        text = f"The {kind} of create_dataset ({split}) has no samples."
        raise UserError(f"{text} Return None if there is no such split.")


class SampleSubset(Subset):
    """A subset of a data set that has all other attributes of that data set.

    `device_transform` and `epoch_order` of the data set know its samples by their indices in the whole set, so this
    class translates the indices.

    Args:
        indices: the samples in the subset, as indices into the whole set.
    """

    dataset: Any

    def __init__(self, dataset: Any, indices: Tensor) -> None:
        self._subset_indices = indices.long()
        copies = getattr(dataset, "copies", 1)
        indices_of_copies = [self._subset_indices + k * len(dataset) for k in range(copies)]
        self._indices_with_copies = torch.cat(indices_of_copies)
        # an array takes 8 bytes per index, and its elements are read as Python's integers
        super().__init__(dataset, array("q", self._subset_indices.numpy().tobytes()))
        if hasattr(dataset, "device_transform"):
            self.device_transform = self._transform
        if hasattr(dataset, "epoch_order"):
            self.epoch_order = self._subset_order

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _subset_order(self, seed: int, epoch: int, n: int) -> Tensor:
        whole = len(self.dataset)
        order = torch.as_tensor(self.dataset.epoch_order(seed, epoch, whole), dtype=torch.int64)
        # the position in the subset of each sample of the whole set; -1 for a sample that is not in the subset
        positions = torch.full((whole,), -1).index_copy_(0, self._subset_indices, torch.arange(n))
        ordered_positions = positions[order % whole]
        copy_numbers = order // whole
        is_in_subset = ordered_positions >= 0
        return (ordered_positions + copy_numbers * n)[is_in_subset]

    def _transform(self, batch: Any, seed: int, epoch: int, indices: Tensor) -> Any:
        self._indices_with_copies = self._indices_with_copies.to(indices.device)  # copies only the first time
        whole_indices = self._indices_with_copies[indices]
        return self.dataset.device_transform(batch, seed, epoch, whole_indices)

    @property
    def targets(self) -> Tensor:
        return torch.as_tensor(self.dataset.targets)[self._subset_indices]


def take_subset(dataset: Any, size: int, seed: int) -> MapDataset:
    """Return the data set, or a subset of `size` samples that the seed chooses.

    Args:
        size: samples in the subset; 0 means all.

    Raises:
        UserError: if the data set has fewer samples, or its order repeats samples.
    """
    if size in (0, len(dataset)):
        return dataset
    if size > len(dataset):
        raise UserError(f"--dataset_size must be at most {len(dataset)}, the size of the training set, got {size}.")
    if getattr(dataset, "with_replacement", False):  # the chosen samples may come more or less than `size` times
        raise UserError(
            f"--dataset_size {size} does not work with an epoch_order that repeats and omits samples"
            " (with_replacement). Give --dataset_size 0, and choose the samples in create_dataset."
        )
    generator = torch.Generator().manual_seed(derive_seed("subset", seed))
    chosen = torch.randperm(len(dataset), generator=generator)[:size]
    return SampleSubset(dataset, chosen.sort().values)


def identify_dataset(dataset: MapDataset) -> str:
    """Return the data set identity: the number of samples, and a hash of its own `fingerprint` or else its `targets`.

    A set whose `targets` are not numbers, and that has no fingerprint, is identified by the number of samples only.
    """
    hash_input = getattr(dataset, "fingerprint", None)
    if hash_input is None:
        with suppress(TypeError, ValueError, RuntimeError):  # `targets` of other kinds than numbers
            hash_input = torch.as_tensor(getattr(dataset, "targets", [])).tolist()
    return f"{len(dataset):,} samples, {derive_seed(hash_input):016x}"


def choose_split_name(dataset: MapDataset, split: str) -> str:
    """Return the name of the data set's split for records.

    It is the data set's own attribute `split` if that is text: a single held-out folder "test" has "test". Other
    libraries use the attribute for objects of their own (datasets.NamedSplit), so other values are ignored.
    """
    own_split = getattr(dataset, "split", split)
    return own_split if type(own_split) is str else split


def dataset_class_name(dataset: MapDataset) -> str:
    """Return the class name of the data set, without a cache or a subset around it."""
    inner = getattr(dataset, "source", dataset)
    if isinstance(inner, Subset):
        inner = inner.dataset
    return type(inner).__name__


def collect_dataset_properties(dataset: MapDataset) -> dict[str, Any]:
    """Return the properties of a training set that an export or a resume needs."""
    return {
        "identity": identify_dataset(dataset),
        "classes": list(getattr(dataset, "classes", [])),
        "mean": torch.as_tensor(getattr(dataset, "mean", [])).tolist(),
        "std": torch.as_tensor(getattr(dataset, "std", [])).tolist(),
    }
