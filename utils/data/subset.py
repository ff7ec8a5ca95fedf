"""`--dataset_size`: a seeded subset of any training set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from config import TrainingConfig, UserError
from utils.rng import derive_seed


class ChosenSamples(Subset):
    """Some samples of a data set, which keeps its attributes. device_transform gets the indices of the whole set."""

    def __init__(self, dataset: Dataset, indices: list[int]) -> None:
        super().__init__(dataset, indices)
        if hasattr(dataset, "device_transform"):
            self.device_transform = self._transform

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def __getitems__(self) -> Any:
        """Only where the data set has it: torch's Subset always does."""
        if not hasattr(self.dataset, "__getitems__"):
            raise AttributeError("__getitems__")
        return super().__getitems__

    def _transform(self, batch: Any, seed: int, epoch: int, indices: Tensor) -> Any:
        chosen = torch.tensor(self.indices, device=indices.device)
        return self.dataset.device_transform(batch, seed, epoch, chosen[indices])

    @property
    def targets(self) -> list[int]:
        return [self.dataset.targets[index] for index in self.indices]


def choose_samples(dataset: Dataset, config: TrainingConfig) -> Dataset:
    """The data set, or `dataset_size` of its samples, chosen by the seed. Raises UserError where it has fewer."""
    size = config.dataset_size
    if size in (0, len(dataset)):
        return dataset
    if size > len(dataset):
        raise UserError(f"dataset_size={size}: the set has {len(dataset)} samples; give fewer, or 0 for all")
    generator = torch.Generator().manual_seed(derive_seed("subset", config.seed))
    return ChosenSamples(dataset, torch.randperm(len(dataset), generator=generator)[:size].sort().values.tolist())
