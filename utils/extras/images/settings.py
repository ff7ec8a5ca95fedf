"""Image files for the example: folders and CSV lists, their augmentation, torchvision's models and published weights.

It costs no time in other runs. Who trains a classifier of images needs it; without it the example is MiniResNet on
synthetic images or CIFAR-10, with crops and flips.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.settings.checks import at_least, one_of, probability, range_up_to
from utils.settings.fields import Settings, yours

IMAGE_DATASETS = ("imagefolder", "csv")
IMAGE_AUGMENTS = ("resized_crop",)
AUTO_AUGMENTS = ("none", "ra", "ta_wide", "augmix", "autoaugment")


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Settings):
    crop_scale: str = yours(
        "0.08,1",
        "smallest and largest area of a resized_crop, as parts of the image",
        range_up_to(1),
        "may",
        rare=True,
    )
    crop_ratio: str = yours(
        "3/4,4/3",
        "smallest and largest width / height of a resized_crop",
        range_up_to(100),
        "may",
        rare=True,
    )
    auto_augment: str = yours(
        "none", "augmentation policy of torchvision for image files", one_of(*AUTO_AUGMENTS), "may", rare=True
    )
    random_erase: float = yours(0.0, "probability that a box of an image file is erased", probability, "may", rare=True)
    augment_repeats: int = yours(
        1,
        "number of copies of an image in an epoch, which then has fewer images",
        at_least(1),
        rare=True,
    )
    mixup_alpha: float = yours(0.0, "alpha of mixup in training batches (0: no mixup)", at_least(0), "may", rare=True)
    cutmix_alpha: float = yours(
        0.0, "alpha of CutMix in training batches (0: no CutMix)", at_least(0), "may", rare=True
    )
    train_size: int | str = yours(
        "auto",
        "height and width of training images, in pixels (auto: image_size)",
        at_least(4),
        "may",
        rare=True,
    )
    resize_size: int | str = yours(
        "auto",
        "pixels of the shorter side before the center crop (auto: by the weights or image_size)",
        at_least(4),
        "may",
        rare=True,
    )
    interpolation: str = yours(
        "auto",
        "interpolation of resized images (auto: that of the pretrained weights, else bilinear)",
        one_of("bilinear", "bicubic", "nearest"),
        "may",
        rare=True,
    )
