"""torchvision's published weights of its classifiers: where their file is, and what images they expect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import TrainingConfig
from utils.checkpoint.format import load_weights
from utils.packages import import_optional
from utils.settings.errors import UserError


def find_default_weights(model: str) -> Any:
    """torchvision's default weights of a model: `url` and `transforms()`. None if it is not one of torchvision's."""
    if model == "mini_resnet":
        return None
    try:
        from torchvision import models
    except Exception:  # it is missing or broken, and the model may be one of the fork
        return None
    return models.get_model_weights(model).DEFAULT if model in models.list_models(module=models) else None


def find_weights_file(config: TrainingConfig) -> Path:
    """Where the weights are: torch.hub's folder if they are there, else <data_dir>/weights. Raises UserError."""
    import_optional("--init_from torchvision", "torchvision.models")
    weights = find_default_weights(config.model)
    if weights is None:
        raise UserError(
            f"--init_from torchvision has no weights for --model {config.model}. Give one of torchvision's models, such"
            " as --model resnet50."
        )
    name = weights.url.rpartition("/")[2]
    in_hub = Path(torch.hub.get_dir(), "checkpoints", name)
    return in_hub if in_hub.exists() else Path(config.data_dir) / "weights" / name


def load_published_weights(config: TrainingConfig) -> dict[str, Tensor]:
    """The weights by name. DenseNet's were published under the names of an older torchvision."""
    older = re.compile(r"(denselayer\d+\.(?:norm|conv))\.")
    return {older.sub(r"\1", name): value for name, value in load_weights(find_weights_file(config)).items()}


def download_weights(config: TrainingConfig) -> None:
    """Download the weights, completely or not at all. Raises UserError."""
    file, weights = find_weights_file(config), find_default_weights(config.model)
    digest = file.stem.rpartition("-")[2]  # the name ends with the beginning of the file's SHA-256
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(weights.url, str(file), digest, progress=False)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"The weights of --init_from torchvision cannot be downloaded ({error}). Save {weights.url} as {file}, or"
            f" in {torch.hub.get_dir()}/checkpoints (of TORCH_HOME), or give another --data_dir."
        ) from None
