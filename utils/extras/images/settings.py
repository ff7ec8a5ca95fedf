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
IMAGE_HELP = {
    "augment": "training augmentation (crop: shift and flip, auto: resized_crop over 64 pixels, else crop)",
    "model": "mini_resnet, or a classification model of torchvision such as resnet50",
    "image_size": "height and width of images in pixels (auto: from pretrained weights or data)",
    "init_from": "initial weights: the path of a file, or the word torchvision (empty: random)",
    "data_dir": "folder of the data, with train/CLASS/*.jpg or train.csv (synthetic reads no files)",
}
AUTO_AUGMENTS = ("none", "ra", "ta_wide", "augmix", "autoaugment")


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Settings):
    crop_scale: str = yours(
        "0.08,1",
        "range of the area of resized_crop, as fractions of the image area",
        range_up_to(1),
        "may",
        rare=True,
    )
    crop_ratio: str = yours(
        "3/4,4/3",
        "range of the aspect ratio (width / height) of resized_crop",
        range_up_to(100),
        "may",
        rare=True,
    )
    auto_augment: str = yours(
        "none",
        "torchvision policy after augment's crop (ra: RandAugment, ta_wide: TrivialAugmentWide)",
        one_of(*AUTO_AUGMENTS),
        "may",
        rare=True,
    )
    random_erase: float = yours(
        0.0, "probability of random erasing, for image files only (0: off)", probability, "may", rare=True
    )
    augment_repeats: int = yours(
        1,
        "repeated augmentation: copies of each image, in an epoch of unchanged length (1: off)",
        at_least(1),
        rare=True,
    )
    mixup_alpha: float = yours(
        0.0,
        "alpha of mixup (0: off). With cutmix_alpha too, each batch draws one of them",
        at_least(0),
        "may",
        rare=True,
    )
    cutmix_alpha: float = yours(0.0, "alpha of CutMix (0: off)", at_least(0), "may", rare=True)
    train_size: int | str = yours(
        "auto",
        "height and width of training images in pixels (auto: image_size)",
        at_least(4),
        "may",
        rare=True,
    )
    resize_size: int | str = yours(
        "auto",
        "shorter side in pixels before evaluation's center crop (auto: from weights or image_size)",
        at_least(4),
        "may",
        rare=True,
    )
    interpolation: str = yours(
        "auto",
        "interpolation of resized images (auto: from pretrained weights, else bilinear)",
        one_of("bilinear", "bicubic", "nearest"),
        "may",
        rare=True,
    )
