"""All settings in one frozen dataclass, from which flags, `--help` and docs/configuration.md are generated.

utils/settings has how a setting is declared, checked and read. The settings of an extra are in its folder in
utils/extras. Standard library only, so that `--help` and flag errors appear at once, before torch is imported.
"""

from __future__ import annotations

import json
import math
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.extras import settings as extras
from utils.settings.checks import (
    above,
    at_least,
    between,
    local_path,
    metric_name,
    one_of,
    path_or_url,
    probability,
    range_up_to,
    refuse,
    rendezvous_url,
)
from utils.settings.conflicts import GIVE_ONLY_ONE, Conflict, find_conflicts
from utils.settings.declarations import list_settings
from utils.settings.errors import InvalidSettings, StartError, TrainingError, UserError
from utils.settings.fields import FORK_GROUP, Setting, Settings, convert_values, setting, yours
from utils.settings.reading import read_config
from utils.settings.value_types import to_json_value, to_text

__all__ = [  # what forks import from here; the checks and errors are defined in utils/settings
    "Conflict",
    "StartError",
    "TrainingConfig",
    "TrainingError",
    "UnreadableSample",
    "UserError",
    "above",
    "at_least",
    "between",
    "local_path",
    "one_of",
    "path_or_url",
    "probability",
    "range_up_to",
    "refuse",
    "setting",
    "unless_auto",
    "yours",
]

UnreadableSample = UserError  # its earlier name
DEFAULT_RUN_DIR = "runs/default"
SCHEDULES = ("cosine", "linear", "constant", "wsd", "step")
OPTIMIZER_DEFAULTS = {
    "sgd": {"lr": 0.1, "weight_decay": 5e-4},
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
}


@dataclass(frozen=True, kw_only=True)
class Yours(Settings):
    """What your model.py and dataset.py read."""

    # ---- yours: fields for your own model and data; a fork edits only these lines of this file ----
    dataset: str = yours("synthetic", "data set", one_of("synthetic", "cifar10", *extras.DATASETS))
    augment: str = yours(
        "auto",
        extras.HELP["augment"],
        one_of("auto", "none", "crop", *extras.AUGMENTS),
        "may",
    )
    model: str = yours("mini_resnet", extras.HELP["model"])
    freeze: str = yours(
        "none",
        "frozen part of the model (backbone: all but the last layer, with its BatchNorm statistics)",
        one_of("none", "backbone"),
        rare=True,
    )
    num_classes: int | str = yours("auto", "number of classes (auto: from the data)", at_least(2), rare=True)
    in_channels: int | str = yours("auto", "number of image channels (auto: from the data)", at_least(1), rare=True)
    image_size: int | str = yours("auto", extras.HELP["image_size"], at_least(4))
    channels_last: bool = yours(
        True, "use the channels-last memory format for convolutions (faster)", resume="may", rare=True
    )
    label_smoothing: float = yours(
        0.0, "label smoothing of the training loss (0: off)", between(0, 1), "may", rare=True
    )
    norm_weight_decay: float = yours(
        "auto", "weight decay of normalization layers (auto: 0)", at_least(0), "may", rare=True
    )
    sync_bn: bool = yours(False, "compute BatchNorm statistics over all ranks (CUDA only)", resume="may", rare=True)
    # ---- end of yours ----


def suggest_global_batch_sizes(config: TrainingConfig) -> str:
    """Return that global_batch_size must be a multiple of the micro-batch, and the next ones, or "" if it is one."""
    name, size = config.micro_batch
    remainder = config.global_batch_size % size
    if not remainder:
        return ""
    low = config.global_batch_size - remainder
    multiples = [str(multiple) for multiple in (low, low + size) if multiple]
    return f"must be a multiple of --{name} {size}. Give {' or '.join(multiples)}."


def is_resumed_from_path(config: TrainingConfig) -> bool:
    return config.resume_from not in ("", "auto")


def has_min_lr_above_lr(config: TrainingConfig) -> bool:
    return config.min_lr >= config.lr


def explain_invalid_run_dir(config: TrainingConfig) -> str:
    """Return what is wrong with the names of settings in run_dir, or ""."""
    try:
        parts = list(string.Formatter().parse(config.run_dir))  # raises if a brace is missing
        for _, name, _, _ in parts:
            if name is not None and name not in vars(config):
                if any(setting.name == name for setting in SETTINGS):
                    return ""  # the value of that setting is invalid, which has a message of its own
                return f"contains {{{name}}}, which is not a setting"
        _ = config.run_folder  # raises if a field does not take its format, as {lr:d}
    except Exception as error:  # of any kind: fields and formats call methods of the values
        return f"cannot be filled in ({error})"
    return ""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Yours, extras.ExtraSettings):
    """The configuration of one run. Raises UserError that lists all invalid values."""

    run_dir: str = setting(
        "run",
        DEFAULT_RUN_DIR,
        "folder of the run. {setting} is filled in, as in runs/{model}-s{seed}",
        extras.RUN_DIR_CHECK,
        is_path=True,
        conflicts=[Conflict(explain_invalid_run_dir, "{found}. Use names of settings, such as {{model}} or {{lr}}.")],
    )
    resume_from: str = setting(
        "run",
        "",
        "checkpoint to resume from: a path, or auto for the latest valid one (empty: none)",
        local_path,
        is_path=True,
        is_copied=False,
    )
    overwrite: bool = setting(
        "run",
        False,
        "rename the run in run_dir to RUN_DIR.1 (.2, ...) and begin a new one",
        is_copied=False,
        conflicts=[Conflict("resume_from", f"would move the run that --resume_from continues. {GIVE_ONLY_ONE}")],
    )
    init_from: str = setting(
        "run",
        "",
        extras.HELP["init_from"],
        extras.INIT_FROM_CHECK,
        is_path=True,
        conflicts=[
            Conflict(
                is_resumed_from_path,
                f"has no effect, since a resumed run takes its weights from --resume_from. {GIVE_ONLY_ONE}",
            )
        ],
    )
    eval_only: bool = setting(
        "run",
        False,
        "evaluate and exit, with the weights of resume_from, else init_from, else best.pt",
        is_copied=False,
    )
    seed: int = setting(
        "run", 42, "random seed of weights, data order, augmentation and dropout", between(0, 2**63), resume="must"
    )
    deterministic: bool = setting(
        "run",
        False,
        "use deterministic CUDA kernels, bitwise reproducible on the same GPUs (slower)",
        resume="may",
    )

    data_dir: str = setting(
        "data",
        "data",
        extras.HELP["data_dir"],
        local_path,
        is_path=True,
    )
    dataset_size: int = setting(
        "data",
        0,
        "training samples to use, a subset drawn by the seed (0: all)",
        at_least(0),
        resume="must",
        rare=True,
    )
    num_workers: int | str = setting(
        "data",
        "auto",
        "DataLoader workers per rank (auto: from the CPUs, 0 for data in memory)",
        at_least(0),
    )
    drop_last: bool = setting(
        "data",
        False,
        "drop the last global batch of an epoch if it is incomplete (off: train on it)",
        resume="must",
        rare=True,
    )
    record_samples: bool = setting(
        "data", False, "write the sample indices of each optimizer step to RUN_DIR/samples", rare=True
    )

    epochs: int | str = setting(
        "training", "auto", "epochs to train (auto: 10, or as many as max_steps needs)", at_least(1), resume="may"
    )
    max_steps: int = setting(
        "training",
        0,
        "optimizer steps of the whole run, over all resumes (0: set by epochs)",
        at_least(0),
        resume="may",
    )
    batch_size: int = setting("training", 64, "micro-batch size per rank, in samples", at_least(1), resume="must")
    grad_accum_steps: int = setting(
        "training",
        1,
        "gradient accumulation: micro-batches per rank and optimizer step",
        at_least(1),
        conflicts=[
            Conflict("global_batch_size", f"cannot be set, since it follows from --global_batch_size. {GIVE_ONLY_ONE}")
        ],
    )
    global_batch_size: int = setting(
        "training",
        0,
        "samples (or tokens) per optimizer step over all ranks (0: set by grad_accum_steps)",
        at_least(0),
        conflicts=[Conflict(suggest_global_batch_sizes, "{found}")],
    )
    optimizer: str = setting("training", "sgd", "optimizer", one_of("sgd", "adamw"), resume="must")
    lr: float = setting(
        "training",
        "auto",
        "peak learning rate, not scaled by the number of ranks (auto: sgd 0.1, adamw 0.001)",
        above(0),
        resume="may",
    )
    momentum: float = setting("training", 0.9, "momentum of SGD, beta1 of AdamW", between(0, 1), resume="may")
    beta2: float = setting("training", 0.999, "beta2 of AdamW", between(0, 1), resume="may", rare=True)
    nesterov: bool = setting("training", True, "use Nesterov momentum in SGD", resume="may", rare=True)
    weight_decay: float = setting(
        "training",
        "auto",
        "weight decay, except on biases and normalization (auto: sgd 5e-4, adamw 1e-2)",
        at_least(0),
        resume="may",
    )
    schedule: str = setting(
        "training",
        "cosine",
        "learning rate schedule after warm-up (wsd: decay over the last 20 %, step: x 0.1 at 50 and 75 %)",
        one_of(*SCHEDULES),
        resume="may",
    )
    schedule_steps: int = setting(
        "training",
        0,
        "optimizer steps of the schedule, warm-up included (0: those of the run)",
        at_least(0),
        resume="may",
        rare=True,
    )
    min_lr: float = setting(
        "training",
        0.0,
        "learning rate at the end of the schedule",
        at_least(0),
        resume="may",
        conflicts=[Conflict(has_min_lr_above_lr, "must be below --lr {lr}")],
    )
    warmup_epochs: float = setting("training", 0.5, "epochs of linear warm-up (0: off)", at_least(0), resume="may")
    warmup_steps: int | str = setting(
        "training",
        "auto",
        "optimizer steps of linear warm-up (auto: from warmup_epochs)",
        at_least(0),
        resume="may",
        rare=True,
        conflicts=[Conflict("warmup_epochs", f"contradicts --warmup_epochs {{warmup_epochs}}. {GIVE_ONLY_ONE}")],
    )
    clip_grad_norm: float = setting(
        "training",
        0.0,
        "maximum gradient norm, to which larger gradients are scaled down (0: off)",
        at_least(0),
        resume="may",
    )
    ema_decay: float = setting(
        "training",
        0.0,
        "decay of the weight EMA, which is evaluated too, at most n / (9 + n) after n updates (0: off)",
        between(0, 1),
        resume="may",
    )
    max_skipped_steps: int = setting(
        "training",
        50,
        "consecutive steps skipped for NaN or infinite gradients before the run ends (0: no limit)",
        at_least(0),
        rare=True,
    )
    patience: int = setting(
        "training",
        0,
        "early stopping: evaluations without a better best_metric before the run ends (0: off)",
        at_least(0),
        rare=True,
    )
    max_time: float = setting(
        "training", 0.0, "minutes of this launch before the run saves and stops (0: no limit)", at_least(0)
    )

    use_amp: bool = setting(
        "performance", True, "train in mixed precision (on CPUs only if amp_dtype is given)", resume="may"
    )
    amp_dtype: str = setting(
        "performance",
        "auto",
        extras.HELP["amp_dtype"],
        one_of("auto", "bf16", "fp16", *extras.AMP_DTYPES),
        resume="may",
        conflicts=[
            Conflict("use_amp", "needs mixed precision, which --no-use_amp turns off. Leave out one of the two.")
        ],
    )

    backend: str = setting(
        "distributed",
        "auto",
        "communication backend (auto: nccl on GPUs, gloo on CPUs)",
        one_of("auto", "nccl", "gloo", "mpi"),
    )
    init_method: str = setting(
        "distributed",
        "",
        "rendezvous URL: env://, tcp://HOST:PORT or file:///PATH (empty: env://)",
        rendezvous_url,
        rare=True,
    )
    timeout: float = setting("distributed", 600.0, "seconds before a collective operation fails", above(0), rare=True)
    bucket_cap_mb: float = setting(
        "distributed",
        0.0,
        "size of DDP's gradient buckets in MB (0: from the model size)",
        at_least(0),
        resume="may",
        rare=True,
    )
    comm_hook: str = setting(
        "distributed",
        "none",
        "16-bit type to which DDP compresses gradients for the all-reduce",
        one_of("none", "fp16", "bf16"),
        resume="may",
        rare=True,
    )
    find_unused_parameters: bool = setting(
        "distributed", False, "let DDP accept parameters that a batch does not use (slower)", resume="may", rare=True
    )

    checkpoint_dir: str = setting(
        "checkpoints and evaluation",
        "",
        "folder of the checkpoints (empty: RUN_DIR/checkpoints)",
        local_path,
        is_path=True,
    )
    save_every: int = setting("checkpoints and evaluation", 1, "epochs between checkpoints (0: off)", at_least(0))
    save_every_steps: int = setting(
        "checkpoints and evaluation", 0, "optimizer steps between further checkpoints (0: off)", at_least(0), rare=True
    )
    save_every_minutes: float = setting(
        "checkpoints and evaluation", 10.0, "minutes between further checkpoints (0: off)", at_least(0), rare=True
    )
    keep_last: int = setting(
        "checkpoints and evaluation",
        3,
        "latest checkpoints to keep, at least 2, besides the best one",
        at_least(2),
        rare=True,
    )
    keep_every: int = setting(
        "checkpoints and evaluation",
        0,
        "optimizer steps between checkpoints that are never deleted (0: none)",
        at_least(0),
        rare=True,
    )
    eval_every: int = setting(
        "checkpoints and evaluation", 1, "epochs between evaluations (0: only at the end)", at_least(0)
    )
    eval_every_steps: int = setting(
        "checkpoints and evaluation",
        0,
        "optimizer steps between further evaluations (0: off)",
        at_least(0),
        rare=True,
    )
    eval_batch_size: int = setting(
        "checkpoints and evaluation",
        0,
        "samples per evaluation batch and rank (0: batch_size)",
        at_least(0),
        resume="may",
        rare=True,
    )
    best_metric: str = setting(
        "checkpoints and evaluation",
        "auto",
        "metric of best.pt: NAME, min:NAME or max:NAME (auto: top1 if reported, else loss)",
        metric_name,
        resume="may",
    )

    log_interval: int = setting("logging", 20, "optimizer steps between log lines", at_least(1))
    enable_profiling: bool = setting(
        "logging", False, "profile a few early steps of rank 0, with traces in RUN_DIR/traces"
    )

    def __post_init__(self) -> None:
        settings = list_settings(type(self))
        values, problems = convert_values(settings, vars(self))
        for name, value in resolve_auto(values).items():
            if values.get(name) == "auto":
                values[name] = value
        for name, value in values.items():
            object.__setattr__(self, name, value)
        invalid = {name for name, _ in problems}
        if "optimizer" in invalid:
            invalid |= {name for name in OPTIMIZER_DEFAULTS["sgd"] if values.get(name) == "auto"}
        problems += find_conflicts(settings, self, invalid)
        if problems:
            raise InvalidSettings(problems)

    @property
    def run_folder(self) -> Path:
        """Return run_dir with its field names filled in."""
        values = dict(vars(self))
        for name, value in values.items():
            if isinstance(value, (list, tuple)):
                values[name] = to_text(value)
        return Path(self.run_dir.format_map(values))

    @property
    def checkpoint_folder(self) -> Path:
        if self.checkpoint_dir:
            return Path(self.checkpoint_dir)
        return self.run_folder / "checkpoints"

    @property
    def micro_batch(self) -> tuple[str, int]:
        """Return the field that global_batch_size counts in, and its value."""
        name = self.micro_batch_setting()
        return name, getattr(self, name)

    def micro_batches_per_step(self, world_size: int) -> int:
        """Return the number of micro-batches in one optimizer step, over all ranks."""
        if self.global_batch_size:
            return self.global_batch_size // self.micro_batch[1]
        return world_size * self.grad_accum_steps

    @property
    def limits(self) -> tuple[float, float]:
        """Return the epochs and the optimizer steps after which the run ends. A limit that is not set is infinite."""
        return read_training_limits(vars(self))

    def to_json(self) -> dict[str, Any]:
        """Return all settings by name, with lists for tuples and text for paths, as files and checkpoints have them."""
        names = [setting.name for setting in list_settings(type(self))]
        return {name: to_json_value(getattr(self, name)) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return `to_json` with run_dir and checkpoint_dir as paths. `from_args(["--config", ...])` reads it back."""
        paths = {"run_dir": str(self.run_folder), "checkpoint_dir": str(self.checkpoint_folder)}
        return self.to_json() | paths

    def to_toml(self) -> str:
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in self.to_dict().items()]
        return "\n".join(lines) + "\n"

    @classmethod
    def select_known_values(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a saved config for which there are fields: a fork may have deleted some since."""
        names = [setting.name for setting in list_settings(cls)]
        return {name: saved[name] for name in names if name in saved}

    @classmethod
    def from_args(
        cls, argv: Sequence[str] | None = None, saved: dict[str, Any] | None = None, notes: list[str] | None = None
    ) -> TrainingConfig:
        """Defaults, then the file of --config, then flags. Exits 0 after --help or --print-config, 2 after an error.

        Args:
            argv: the words of the command line, by default those of this process.
            saved: values that replace the defaults.
            notes: gets a line for each setting of the file that was removed from this version and is ignored.
        """
        if argv is None:
            argv = sys.argv[1:]
        if notes is None:
            notes = []
        defaults = cls.select_known_values(saved or {})
        config, is_printed = read_config(cls, argv, defaults, notes)
        if is_printed:
            print(config.to_toml(), end="")
            raise SystemExit(0)
        return config


SETTINGS = list_settings(TrainingConfig)  # an import finds a setting that cannot work
PATH_SETTINGS = [setting.name for setting in SETTINGS if setting.is_path and setting.group != FORK_GROUP]


def resolve_auto(values: dict[str, Any]) -> dict[str, Any]:
    """Return what "auto" stands for in these settings, as far as it does not depend on the data."""
    optimizer = values.get("optimizer", "")
    automatic: dict[str, Any] = dict(OPTIMIZER_DEFAULTS.get(optimizer, {}))
    if not values.get("max_steps"):
        automatic["epochs"] = 10
    return automatic


def unless_auto(value: int | str, automatic: int) -> int:
    """Return the value of a field, or the automatic one if the field is "auto"."""
    return value if isinstance(value, int) else automatic


def read_training_limits(saved: dict[str, Any]) -> tuple[float, float]:
    """Return `TrainingConfig.limits` of the values in a config.json."""
    max_epochs = saved["epochs"]
    if max_epochs == "auto":
        max_epochs = math.inf
    max_steps = saved["max_steps"] or math.inf
    return max_epochs, max_steps


def can_train_longer(values: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Return whether a run with these values may go on where a run with the saved values was completed.

    Its epochs, its steps or its patience may have ended it. Patience starts again with another metric.
    """
    if not saved:
        return False
    old_patience = saved.get("patience", 0)
    if old_patience and saved["best_metric"] != values["best_metric"]:
        return True
    new_epochs, new_steps = read_training_limits(values)
    old_epochs, old_steps = read_training_limits(saved)
    if new_epochs > old_epochs or new_steps > old_steps:
        return True
    new_patience = values["patience"] or math.inf
    return new_patience > (old_patience or math.inf)


def list_fork_settings() -> list[Setting]:
    """Return the settings of the model and data: the block "yours", and those of an extra that adds to the example."""
    return [setting for setting in SETTINGS if setting.group == FORK_GROUP]
