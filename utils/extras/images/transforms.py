"""How image files become model input: torchvision's reference transforms, and what its published weights expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from config import TrainingConfig, unless_auto
from utils.example.augment import choose
from utils.extras.images.pretrained import find_default_weights
from utils.packages import import_optional
from utils.settings.checks import parse_range

MEAN_AND_STD = {1: ((0.5,), (0.25,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}  # by channels; 3: ImageNet's


def find_pretrained_transforms(config: TrainingConfig) -> Any | None:
    """The transforms of torchvision's weights of the model; None for other models. Their mean and std follow the model,
    so that a run that starts with another's weights has the same."""
    weights = find_default_weights(config.model) if config.in_channels in ("auto", 3) else None
    return weights and weights.transforms()


def resolve_auto_sizes(config: TrainingConfig) -> dict[str, int | str]:
    """Values for fields at "auto" of image files: what torchvision's weights expect, if the run starts with them."""
    values = {"interpolation": "bilinear"}
    if config.init_from == "torchvision" and (expected := find_pretrained_transforms(config)):
        values["interpolation"] = expected.interpolation.value
        if config.image_size in ("auto", *expected.crop_size):  # another one is resized in proportion
            values |= {"image_size": expected.crop_size[0], "resize_size": expected.resize_size[0]}
    return {name: value for name, value in values.items() if getattr(config, name) == "auto"}


def create_file_transform(config: TrainingConfig, size: int, is_train: bool) -> tuple[Callable[[Tensor], Tensor], bool]:
    """torchvision's reference transforms, in its order: decoded uint8 [C, H, W] -> uint8 [C, size, size], in workers;
    and whether they draw. A worker seeds torch's generator for each sample, so draws depend on (seed, epoch, sample).
    """
    v2 = import_optional(f"--dataset {config.dataset}", "torchvision.transforms.v2")
    mode, transforms = v2.InterpolationMode(config.interpolation), []
    is_cropped = choose(config.augment, size) == "resized_crop"
    if not is_train:
        default_resize = round(size * 256 / 224) if is_cropped else size  # torchvision resizes to 256 for 224
        resize = v2.Resize(unless_auto(config.resize_size, default_resize), mode)
        return v2.Compose([resize, v2.CenterCrop(size)]), False
    size = unless_auto(config.train_size, size)
    if is_cropped:
        crop = parse_range(config.crop_scale), parse_range(config.crop_ratio)
        transforms += [v2.RandomResizedCrop(size, *crop, interpolation=mode), v2.RandomHorizontalFlip()]
    else:
        transforms += [v2.Resize(size, mode), v2.CenterCrop(size)]
    if config.auto_augment != "none":
        policies = {"ra": v2.RandAugment, "ta_wide": v2.TrivialAugmentWide, "augmix": v2.AugMix}
        # the policies have no bicubic interpolation of tensors
        policy_interpolation = v2.InterpolationMode("nearest" if mode.value == "nearest" else "bilinear")
        transforms.append(policies.get(config.auto_augment, v2.AutoAugment)(interpolation=policy_interpolation))
    if config.random_erase:  # a box of the mean, which is 0 after the device has normalized
        mean = (
            expected.mean
            if (expected := find_pretrained_transforms(config))
            else MEAN_AND_STD[unless_auto(config.in_channels, 3)][0]
        )
        transforms.append(v2.RandomErasing(config.random_erase, value=[round(255 * part) for part in mean]))
    return v2.Compose(transforms), is_cropped or config.auto_augment != "none" or config.random_erase > 0
