"""torchvision's models by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from utils.memory import is_out_of_memory
from utils.packages import import_optional
from utils.settings.errors import UserError


def list_classifiers(requested_name: str) -> list[str]:
    """The names of torchvision's classifiers. Its import takes seconds.

    Args:
        requested_name: the name that is looked for, for the message.

    Raises:
        UserError: if torchvision cannot be used.
    """
    models = import_optional(f"--model {requested_name}", "torchvision.models")
    return models.list_models(module=models)


def torchvision_model(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module | None:
    """A classifier of torchvision with new weights. None if it has none of this name.

    Raises:
        UserError: if torchvision cannot be used, or the model does not take such images.
    """
    if name not in list_classifiers(name):
        return None
    models = import_optional(f"--model {name}", "torchvision.models")
    if in_channels != 3:
        raise UserError(
            f"--in_channels must be 3 for torchvision's models, got {in_channels}. Use --model mini_resnet, or images"
            " with 3 channels."
        )
    special: dict[str, Any] = {"image_size": image_size} if name.startswith("vit_") else {}
    if name in ("inception_v3", "googlenet"):
        special = {"aux_logits": False, "transform_input": True}
    try:
        model = models.get_model(name, weights=None, num_classes=num_classes, **special).eval()
        shapes = {key: value.to("meta") for key, value in [*model.named_parameters(), *model.named_buffers()]}
        torch.func.functional_call(model, shapes, torch.empty(2, 3, image_size, image_size, device="meta"))
    except (ValueError, AssertionError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        text = f"--model {name} does not accept {image_size}x{image_size} images ({error})."
        raise UserError(f"{text} Give another --image_size or --model.") from None
    return model.train()
