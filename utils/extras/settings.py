"""The settings of the extras. scripts/remove_extras.sh deletes the lines of an extra with its folder."""

from __future__ import annotations

from dataclasses import dataclass

from utils.extras.cache.settings import CacheSettings
from utils.extras.companions.settings import CompanionSettings, run_path_or_mirror, weights_path
from utils.extras.compile.settings import CompileSettings
from utils.extras.exact.settings import ExactSettings
from utils.extras.images.settings import IMAGE_AUGMENTS, IMAGE_DATASETS, IMAGE_HELP, ImageSettings
from utils.extras.lengths.settings import LengthsSettings
from utils.extras.sharding.settings import SHARDED_AMP_DTYPES, SHARDED_HELP, ShardingSettings
from utils.extras.watch.settings import WatchSettings
from utils.settings.checks import Check, local_path, run_path
from utils.settings.fields import Settings

# What config.py uses for settings of its own: first without extras, then as extras change it.
RUN_DIR_CHECK: Check = run_path
INIT_FROM_CHECK: Check = local_path
DATASETS: tuple[str, ...] = ()
AUGMENTS: tuple[str, ...] = ()
AMP_DTYPES: tuple[str, ...] = ()
HELP = {
    "augment": "training augmentation (auto and crop: shift and flip)",
    "model": "model to train: mini_resnet",
    "image_size": "height and width of images in pixels (auto: from the data)",
    "init_from": "initial weights: the path of a file (empty: random)",
    "data_dir": "folder of the data (synthetic reads no files)",
    "amp_dtype": "mixed-precision dtype (auto: bf16, or fp16 on GPUs without it)",
}
RUN_DIR_CHECK = run_path_or_mirror
INIT_FROM_CHECK = weights_path
DATASETS += IMAGE_DATASETS
AUGMENTS += IMAGE_AUGMENTS
AMP_DTYPES += SHARDED_AMP_DTYPES
HELP |= IMAGE_HELP
HELP |= SHARDED_HELP


@dataclass(frozen=True, kw_only=True)
class ExtraSettings(
    CompanionSettings,
    CacheSettings,
    CompileSettings,
    LengthsSettings,
    WatchSettings,
    ExactSettings,
    ShardingSettings,
    ImageSettings,
    Settings,
):
    """The settings of all extras. `--help` lists them in this order, after the others of their group."""
