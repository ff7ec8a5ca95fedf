"""What --dataset, --model and --init_from offer besides what dataset.py and model.py define themselves."""

from __future__ import annotations

import difflib
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


@dataclass(frozen=True)
class ModelLibrary:
    """Models that a library has. The functions raise UserError if the library cannot be used.

    title: what one of its models is called in messages.
    names: the names of its models. The argument is the name that the user gave, for messages.
    create: the model of a name, from in_channels, num_classes and image_size; None if it has none of that name.
    """

    title: str
    names: Callable[[str], list[str]]
    create: Callable[[str, int, int, int], nn.Module | None]


# further data sets by the name that --dataset has: each creates the set of a split, or None if there is no such split
DATASETS: dict[str, Callable[[TrainingConfig, str], ImageDataset | None]] = {}
# called with each new data set and its split, to change it as settings say
DATASET_CHANGES: list[Callable[[ImageDataset, TrainingConfig, str], None]] = []
# for --model, in the order in which they are asked
MODEL_LIBRARIES: list[ModelLibrary] = []
# by the name that --init_from has
PUBLISHED_WEIGHTS: dict[str, PublishedWeights] = {}

DATASETS |= {"imagefolder": sets.image_files, "csv": sets.image_files}  # extra: images
DATASET_CHANGES.append(sets.apply_image_settings)  # extra: images
MODEL_LIBRARIES.append(  # extra: images
    ModelLibrary("a torchvision classifier", models.list_classifiers, models.torchvision_model)
)
PUBLISHED_WEIGHTS["torchvision"] = PublishedWeights(  # extra: images
    file=pretrained.find_weights_file, download=pretrained.download_weights, load=pretrained.load_published_weights
)


def check_model(name: str) -> None:
    """Accept mini_resnet and the models of the libraries. A library is imported only for another name.

    Raises:
        UserError: for any other name, with the nearest one; or if a library cannot be used.
    """
    if name == "mini_resnet":
        return
    for library in MODEL_LIBRARIES:
        if name in library.names(name):
            return
    raise unknown_model(name)


def library_model(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """The model of this name from the first library that has one.

    Raises:
        UserError: if no library has one, or it does not take such images.
    """
    for library in MODEL_LIBRARIES:
        model = library.create(name, in_channels, num_classes, image_size)
        if model is not None:
            return model
    raise unknown_model(name)


def unknown_model(name: str) -> UserError:
    """The error for a name that neither MiniResNet nor a library has."""
    choices = "mini_resnet"
    names = ["mini_resnet"]
    for library in MODEL_LIBRARIES:
        choices += f" or {library.title}"
        names += library.names(name)
    hint = ""
    close = difflib.get_close_matches(name, names, n=1)
    if close and MODEL_LIBRARIES:  # else the message names mini_resnet anyway
        hint = f" Did you mean {close[0]}?"
    return UserError(f"--model must be {choices}, got {name}.{hint}")
