"""What --dataset, --model and --init_from offer besides what dataset.py and model.py define themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from config import TrainingConfig, UserError
from utils.example.images import ImageDataset
from utils.extras.images import models, pretrained, sets  # extra: images


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that a library publishes for its models. The functions raise UserError if there are none for the model.

    file: where they are, or will be.
    download: downloads them, completely or not at all.
    load: reads them, by name.
    """

    file: Callable[[TrainingConfig], Path]
    download: Callable[[TrainingConfig], None]
    load: Callable[[TrainingConfig], dict[str, Tensor]]


# further data sets by the name that --dataset has: each creates the set of a split, or None if there is no such split
DATASETS: dict[str, Callable[[TrainingConfig, str], ImageDataset | None]] = {}
# called with each new data set and its split, to change it as settings say
DATASET_CHANGES: list[Callable[[ImageDataset, TrainingConfig, str], None]] = []
# each creates the model of a name, from in_channels, num_classes and image_size; None if it has none of that name
MODEL_LIBRARIES: list[Callable[[str, int, int, int], nn.Module | None]] = []
# by the name that --init_from has
PUBLISHED_WEIGHTS: dict[str, PublishedWeights] = {}

DATASETS |= {"imagefolder": sets.image_files, "csv": sets.image_files}  # extra: images
DATASET_CHANGES.append(sets.apply_image_settings)  # extra: images
MODEL_LIBRARIES.append(models.torchvision_model)  # extra: images
PUBLISHED_WEIGHTS["torchvision"] = PublishedWeights(  # extra: images
    file=pretrained.weights_file, download=pretrained.download_weights, load=pretrained.published_weights
)


def library_model(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """The model of this name from the first library that has one.

    Raises:
        UserError: if no library has one, or it does not take such images.
    """
    for create in MODEL_LIBRARIES:
        model = create(name, in_channels, num_classes, image_size)
        if model is not None:
            return model
    raise UserError(f"model={name}: is not known; use mini_resnet")
