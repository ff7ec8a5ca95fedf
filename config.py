"""All settings in one frozen dataclass, from which flags, `--help` and docs/configuration.md are generated.

Standard library only, so that `--help` and flag errors appear at once, before torch is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import shlex
import string
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from utils.extras.images.checks import AUTO_AUGMENTS, probability, range_up_to  # extra: images
from utils.settings.unknown import answer_unknown

DEFAULT_RUN_DIR = "runs/default"
REDACTED = "[redacted]"  # in a stored command
YOURS = "model and data"  # the group of fields that a fork changes
SCHEDULES = ("cosine", "linear", "constant", "wsd", "step")
DEFAULTS = {"sgd": {"lr": 0.1, "weight_decay": 5e-4}, "adamw": {"lr": 1e-3, "weight_decay": 0.01}}
AMP_DTYPES = [
    *("auto", "bf16", "fp16"),
    *("bf16_params", "fp16_params"),  # extra: sharding
]
RARE = [  # flags that only `--help all` shows; the blocks of extras add some
    *"dataset_size drop_last record_samples beta2 nesterov schedule_steps min_lr warmup_steps".split(),
    *"max_skipped_steps patience amp_dtype init_method timeout bucket_cap_mb comm_hook find_unused_parameters".split(),
    *"save_every_steps save_every_minutes keep_last keep_every eval_every_steps eval_batch_size".split(),
    *"freeze num_classes in_channels channels_last label_smoothing norm_weight_decay sync_bn".split(),
]


class RemovedSetting(NamedTuple):
    """A setting of the version before.

    A flag is refused. A value in a file or a checkpoint is ignored with a note; if `needs` is not given, it is refused.
    """

    default: float
    instead: str  # what to use
    needs: str = ""  # the setting that has to be given in its place

    def note(self, name: str, value: Any) -> str:
        """What the user is told about a value that is ignored."""
        answer = f"{self.needs} is used." if self.needs else self.instead
        return f"{name}={value} is ignored, since {name} was removed. {answer}"


REMOVED = {
    "check_every": RemovedSetting(
        default=0,
        instead=(
            "Ranks that differ are found at each save. Nothing finds a device that computes wrong, finite gradients:"
            " leave it out."
        ),
    ),
    "minutes": RemovedSetting(
        default=0.0,
        instead=(
            "Train 50 steps, and take step_s of the last train record in metrics.jsonl. Then give --max_steps ="
            " minutes x 60 / step_s. To stop a run early, use --max_time."
        ),
        needs="max_steps",
    ),
}
NOT_TAKEN = ["resume_from", "overwrite", "eval_only"]  # from the config.json of another run
PATHS = ("run_dir", "data_dir", "checkpoint_dir", "resume_from", "init_from")
USAGE = """usage: torchrun --standalone --nproc-per-node=N train.py [flags]   (or: python train.py [flags])

Flags may be written with _ or -. They override the --config file, which overrides the defaults; launch.sh takes more.

general:
  --help [all]                    show the flags that most runs use, or all flags, and exit
  --config FILE                   read values from a TOML or YAML file or a run's config.json
  --print_config                  print the resolved config as TOML and exit"""
EXAMPLES = """
examples:
  torchrun --standalone --nproc-per-node=2 train.py --epochs 5
  torchrun --standalone --nproc-per-node=8 train.py --run_dir runs/first --resume_from auto
  python train.py --config runs/default/config.json --eval_only"""
NULLS = ("", "~", "null", "Null", "NULL")  # of YAML
GENERAL = ("help", "config", "print_config")  # flags that are no settings
FLAG = re.compile(r"--?[^\W\d][\w.-]*(=|$)")  # a negative number is a value
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {  # of fields: how their text or value is read, and their name
    "int": (lambda value: int(str(value)), "a whole number"),
    "float": (lambda value: float(str(value)), "a number"),
    "bool": (lambda value: BOOLEANS[str(value).lower()], "true or false"),
    "str": (lambda value: "".join([value]), "text"),  # nothing else becomes text
}


class UserError(ValueError):
    """A problem that the user can fix, such as a bad setting. The message ends with the fix; the exit code is 2.

    If all ranks raise it, `rank` and `host` name the rank that has the problem. is_final: a restart will not help.
    """

    exit_code = 2

    def __init__(self, sentence: str, rank: int | None = None, host: str | None = None, is_final: bool = False) -> None:
        super().__init__(sentence)
        self.rank, self.host, self.is_final = rank, host, is_final


class StartError(UserError):
    """Another attempt may succeed: ranks came late, a connection or the storage failed. The exit code is 1."""

    exit_code = 1


class TrainingError(RuntimeError):
    """Training cannot continue. The message ends with the fix; the exit code is 1."""

    def __init__(self, sentence: str, rank: int | None = None, host: str | None = None) -> None:
        super().__init__(sentence)
        self.rank, self.host = rank, host


Check = Callable[[Any], str]  # value -> "what is wrong; what to do", or "" if it is valid


def at_least(low: float) -> Check:
    return lambda value: "" if value >= low else f"is below {low}; give {low} or more"


def above(low: float) -> Check:
    return lambda value: "" if value > low else f"is not above {low}; give a number above {low}"


def between(low: float, high: float) -> Check:
    """low <= value < high."""
    wrong = f"is outside [{low}, {high}); give a number from {low} to below {high}"
    return lambda value: "" if low <= value < high else wrong


class one_of:  # used like the functions around it
    """A check whose choices are shown in --help."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, value: Any) -> str:
        return "" if value in self.choices else f"is not known; choose {nearest(value, self.choices)}"


def refuse(*rows: tuple[str, str]) -> Check:
    """A check by patterns: the first that is found in the value says what is wrong."""
    return lambda value: next((wrong for pattern, wrong in rows if re.search(pattern, value)), "")


local_path = refuse(("://", "is not a path; mount the storage and give its path"))
EMPTY = r"^\s*$", "is empty; give a folder, e.g. runs/NAME"
run_path = refuse(("://", "is not a path; give a local folder"), EMPTY)
metric_name = refuse((r"^(?!(min:|max:)?[^:]*$)", "has an unknown prefix; write min:NAME or max:NAME"))
rendezvous_url = refuse(
    (r"^(?!(env|tcp|file)://|$)", "is not a rendezvous address; give env://, tcp://HOST:PORT or file:///SHARED/PATH")
)


path_or_url: Check = local_path
# ---- extra: companions ----
mirror_url = refuse(
    (r"^(?!\w+://[^/]|file:///[^/]|$)", "is not a URL; give e.g. s3://BUCKET/NAME, or the path with --run_dir"),
    (r"\?|://[^/]*:[^/]*@", "has a key in it; give that in the environment or the provider's files"),
)
run_path = refuse(("://", "is not a path; give a local folder, and this URL with --mirror"), EMPTY)


def path_or_mirror(value: str) -> str:
    return mirror_url(value) if "://" in value else ""


path_or_url = path_or_mirror


def command_line(value: str) -> str:
    try:
        shlex.split(value)
    except ValueError as error:
        return f"is not a valid command ({error}); fix its quotes"
    return ""


# ---- end of companions ----


def expand(path: str) -> str:
    """The path with `~` and $NAME replaced, unless it exists as it is or is a URL."""
    if "://" in path or (os.path.lexists(path) and not path.startswith("~")):
        return path
    return os.path.expanduser(os.path.expandvars(path))


def known_path(value: str) -> str:
    is_exact = "://" in value or os.path.lexists(value)
    if not is_exact and re.match(r"[A-Za-z]:[\\/]|(\\|\.\.?|~|%\w+%)\\", value):
        return "is a path of Windows; write it as Linux has it (in WSL C: is /mnt/c)"
    unknown = None if is_exact else re.search(r"\$(\{\w+\}|[A-Za-z_]\w*)|^~[^/]*", value)
    return f"{unknown[0]} is not known here; write the path in full" if unknown else ""


def nearest(value: str, choices: Sequence[str]) -> str:
    """The choices as text, with "(did you mean x?)" if one of them is similar to the value."""
    close = difflib.get_close_matches(str(value), choices, n=1)
    return f"{', '.join(choices)}" + (f" (did you mean {close[0]}?)" if close else "")


def setting(group: str, default: Any, text: str, check: Check | None = None, resume: str = "free") -> Any:
    """One field of the config. A field of type `int | str`, or one whose default is "auto", may also be "auto".

    resume: when a run is resumed the value "must" be the same, "may" change (which is logged), or is "free".
    """
    meta = {"group": group, "help": text, "check": check, "resume": resume}
    return dataclasses.field(default=default, metadata=meta)


def yours(default: Any, text: str, check: Check | None = None, resume: str = "must") -> Any:
    """A field that only model.py and dataset.py read. "auto" takes the training set's attribute of the same name."""
    return setting(YOURS, default, text, check, resume)


def help_of(field: dataclasses.Field) -> str:
    """The help of a field, with its choices."""
    check = field.metadata["check"]
    return field.metadata["help"] + (f": {{{','.join(check.choices)}}}" if isinstance(check, one_of) else "")


def may_be_auto(field: dataclasses.Field) -> bool:
    """Whether the field may be "auto" and that stands for another value."""
    is_choice = field.type == "str" and "auto" in getattr(field.metadata["check"], "choices", ["auto"])
    return field.type.endswith("| str") or (field.default == "auto" and not is_choice)


def unfilled(config: TrainingConfig) -> str:
    """What is wrong with the names of fields in run_dir."""
    try:
        used = [name for _, name, _, _ in string.Formatter().parse(config.run_dir) if name is not None]
        wrong = [f"{{{name}}} is not a field" for name in used if name not in vars(config)]
        _ = wrong or config.run_folder  # raises if a field does not take its format, as {lr:d}
    except Exception as error:  # of any kind: fields and formats call methods of the values
        wrong = [f"cannot be filled in ({error})"]
    return "".join(wrong[:1])


def multiples(config: TrainingConfig, of: str = "batch_size") -> str:
    """Those of the micro-batch around global_batch_size; empty if that is one, or the micro-batch has another field."""
    total, (name, size) = config.global_batch_size, config.micro_batch
    low = total - total % size
    return " or ".join(str(fit) for fit in (low, low + size) if fit) if name == of and total % size else ""


# What does not go together: a field, the field or condition that excludes it, what is wrong and what to do. A row
# counts if the field and the other one differ from their defaults. {found} is what the condition returned. The blocks
# of extras add rows.
# fmt: off
EITHER = "give only one of the two"
CONFLICTS: list[tuple[str, str | Callable[[TrainingConfig], Any], str]] = [
    ("global_batch_size", multiples, "is not a multiple of batch_size={batch_size}; give {found}"),
    ("grad_accum_steps", "global_batch_size", f"is derived from global_batch_size; {EITHER}"),
    ("overwrite", "resume_from", f"would move aside the run that resume_from continues; {EITHER}"),
    ("init_from", lambda config: config.resume_from not in ("", "auto"),
     f"a resumed run takes its weights from resume_from; {EITHER}"),
    ("amp_dtype", "use_amp", "needs mixed precision; leave out amp_dtype or no_use_amp"),
    ("min_lr", lambda config: config.min_lr >= config.lr, "is not below lr={lr}; give a smaller one"),
    ("warmup_steps", "warmup_epochs", f"there is warmup_epochs={{warmup_epochs}}; {EITHER}"),
    ("run_dir", unfilled, "{found}; use e.g. {{model}} or {{lr}}"),
]
# fmt: on


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The configuration of one run. Raises UserError that lists all invalid values."""

    # fmt: off
    run_dir: str = setting("run", DEFAULT_RUN_DIR, "run folder; may contain fields: runs/{model}-s{seed}", run_path)
    resume_from: str = setting("run", "", "auto: latest valid checkpoint; a path; empty: fresh start", local_path)
    overwrite: bool = setting("run", False, "move an existing run in run_dir aside, to NAME.1")
    # ---- extra: companions ----
    mirror: str = setting("run", "", "URL of a copy of the run in object storage, for resume_from too", mirror_url)
    track: str = setting(
        "run", "none", "send settings and records to a tracker", one_of("none", "wandb", "mlflow", "trackio")
    )
    # ---- end of companions ----
    init_from: str = setting("run", "", "weights to start with: a checkpoint, a state dict, torchvision", path_or_url)
    eval_only: bool = setting("run", False, "only evaluate resume_from (empty: the best of run_dir) or init_from")
    seed: int = setting("run", 42, "seed for weights, data order, augmentation and dropout", between(0, 2**63), "must")
    deterministic: bool = setting("run", False, "bit-exact on one CUDA topology too (slower)", resume="may")

    data_dir: str = setting("data", "data", "imagefolder reads <data_dir>/{train,val,test}/<class>/**", local_path)
    dataset_size: int = setting("data", 0, "train on a seeded subset of this size (0 = all)", at_least(0), "must")
    # ---- extra: cache ----
    cache: str = setting("data", "none", "keep decoded images in RAM or on the device", one_of("none", "ram", "device"))
    RARE.append("cache")
    # ---- end of cache ----
    num_workers: int | str = setting("data", "auto", "loader workers per rank (0 for in-memory data)", at_least(0))
    drop_last: bool = setting("data", False, "drop the last, incomplete global batch of each epoch", resume="must")
    record_samples: bool = setting("data", False, "write the sample indices of each optimizer step to run_dir/samples")

    # ---- extra: compile ----
    compile: str = setting("model", "off", "torch.compile mode", one_of("off", "default", "reduce-overhead"))
    activation_checkpointing: bool = setting("model", False, "recompute activations to save memory (slower)")
    RARE.extend(["compile", "activation_checkpointing"])
    CONFLICTS.extend([
        ("compile", lambda config: config.compile == "reduce-overhead" and config.find_unused_parameters,
         "keeps all gradients in place, and find_unused_parameters leaves some out; use --compile default"),
    ])
    # ---- end of compile ----

    epochs: int | str = setting("training", "auto", "passes over the data (auto: 10, or max_steps)", at_least(1), "may")
    max_steps: int = setting("training", 0, "total optimizer steps (0 = set by epochs)", at_least(0), "may")
    batch_size: int = setting("training", 64, "samples per micro-batch on each rank", at_least(1), "must")
    grad_accum_steps: int = setting(
        "training",
        1,
        "micro-batches K per rank and optimizer step. BatchNorm moves once per step: its momentum 1 - 0.9^K has the"
        " memory of K updates with 0.1",
        at_least(1),
    )
    global_batch_size: int = setting("training", 0, "samples or tokens per step (0: by grad_accum_steps)", at_least(0))
    # ---- extra: lengths ----
    batch_tokens: int = setting(
        "training",
        0,
        "tokens, frames, ... of a micro-batch, padding included; needs lengths (0 = off)",
        at_least(0),
        "must",
    )
    too_long: str = setting("training", "error", "samples longer than batch_tokens", one_of("error", "alone"))
    bucket_window: int = setting("training", 100, "micro-batches sorted by length together", at_least(1), "must")
    RARE.extend(["too_long", "bucket_window"])
    CONFLICTS.extend([
        *((name, lambda config: not config.batch_tokens, "needs batch_tokens; add it, or leave this out")
          for name in ("too_long", "bucket_window")),
        ("global_batch_size", lambda config: multiples(config, "batch_tokens"),
         "is in tokens, and not a multiple of batch_tokens={batch_tokens}; give {found}"),
        ("batch_tokens", lambda config: vars(config).get("compile") == "reduce-overhead",
         "has batches of many shapes, and CUDA graphs need one; use --compile default"),
    ])
    # ---- end of lengths ----
    optimizer: str = setting("training", "sgd", "optimizer", one_of("sgd", "adamw"), "must")
    lr: float = setting("training", "auto", "peak, not scaled by ranks (auto: 0.1, adamw 0.001)", above(0), "may")
    momentum: float = setting("training", 0.9, "SGD momentum, AdamW beta1", between(0, 1), "may")
    beta2: float = setting("training", 0.999, "AdamW beta2", between(0, 1), "may")
    nesterov: bool = setting("training", True, "Nesterov momentum for SGD", resume="may")
    weight_decay: float = setting(
        "training", "auto", "not applied to biases and normalization (auto: 0.0005, adamw 0.01)", at_least(0), "may"
    )
    schedule: str = setting("training", "cosine", "learning rate after warm-up", one_of(*SCHEDULES), "may")
    schedule_steps: int = setting("training", 0, "length of the schedule (0 = that of the run)", at_least(0), "may")
    min_lr: float = setting("training", 0.0, "learning rate at the end of the schedule", at_least(0), "may")
    warmup_epochs: float = setting("training", 0.5, "epochs of linear warm-up", at_least(0), "may")
    warmup_steps: int | str = setting("training", "auto", "steps of it (auto: by warmup_epochs)", at_least(0), "may")
    clip_grad_norm: float = setting("training", 0.0, "max gradient norm (0 = off)", at_least(0), "may")
    # ---- extra: average ----
    ema_decay: float = setting(
        "training",
        0.0,
        "decay of the weight EMA (0 = off); after n updates at most n / (9 + n)",
        between(0, 1),
        "may",
    )
    RARE.append("ema_decay")
    # ---- end of average ----
    max_skipped_steps: int = setting("training", 50, "non-finite steps in a row before abort (0 = off)", at_least(0))
    patience: int = setting("training", 0, "evaluations without improvement before the end (0 = off)", at_least(0))
    max_time: float = setting("training", 0.0, "save and stop after this many minutes (0 = off)", at_least(0))

    use_amp: bool = setting("precision", True, "mixed precision (on CPUs only with amp_dtype)", resume="may")
    amp_dtype: str = setting("precision", "auto", "_params: of gathered shards too", one_of(*AMP_DTYPES), "may")

    backend: str = setting("distributed", "auto", "nccl on CUDA, else gloo", one_of("auto", "nccl", "gloo", "mpi"))
    init_method: str = setting("distributed", "", "env:// (default), tcp://HOST:PORT or file:///PATH", rendezvous_url)
    timeout: float = setting("distributed", 600.0, "seconds a collective may take", above(0))
    # ---- extra: watch ----
    hang_timeout: float = setting("distributed", 300.0, "seconds without progress before abort (0 = off)", at_least(0))
    # ---- end of watch ----
    bucket_cap_mb: float = setting("distributed", 0.0, "DDP bucket size in MB (0: by model size)", at_least(0), "may")
    comm_hook: str = setting("distributed", "none", "gradient compression", one_of("none", "fp16", "bf16"), "may")
    find_unused_parameters: bool = setting(
        "distributed", False, "allow parameters that a batch does not use (slower)", resume="may"
    )
    # ---- extra: exact ----
    reduction: str = setting("distributed", "fast", "exact: same bits on any ranks", one_of("fast", "exact"), "may")
    CONFLICTS.append(("comm_hook", "reduction", f"rounds gradients before they are summed; {EITHER}"))
    # ---- end of exact ----
    # ---- extra: sharding ----
    sharding: str = setting(
        "distributed", "none", "FSDP: shard the model over the ranks", one_of("none", "zero2", "zero3", "hybrid"), "may"
    )
    cpu_offload: bool = setting("distributed", False, "keep shards and optimizer in host memory (slower)", resume="may")
    RARE.append("cpu_offload")
    CONFLICTS.extend([
        *((name, "sharding", f"does not work with sharding={{sharding}}; {EITHER}")
          for name in ("reduction", "comm_hook", "compile", "find_unused_parameters")),
        ("cpu_offload", lambda config: config.sharding == "none",
         "needs sharding; add --sharding zero3, or leave it out"),
        ("amp_dtype", lambda config: config.amp_dtype.endswith("_params") and config.sharding == "none",
         "needs sharding; add --sharding zero3, or leave it out"),
    ])
    # ---- end of sharding ----

    checkpoint_dir: str = setting("checkpoints", "", "checkpoint folder (empty: run_dir/checkpoints)", local_path)
    save_every: int = setting("checkpoints", 1, "epochs between checkpoints (0 = off)", at_least(0))
    save_every_steps: int = setting("checkpoints", 0, "optimizer steps between checkpoints (0 = off)", at_least(0))
    save_every_minutes: float = setting("checkpoints", 10.0, "minutes between checkpoints (0 = off)", at_least(0))
    keep_last: int = setting("checkpoints", 3, "latest checkpoints to keep, besides the best", at_least(2))
    keep_every: int = setting("checkpoints", 0, "also keep one checkpoint of so many steps (0 = off)", at_least(0))
    # ---- extra: companions ----
    on_checkpoint: str = setting(
        "checkpoints", "", "command after each checkpoint; {} is its path; put secrets into a script", command_line
    )
    RARE.append("on_checkpoint")
    NOT_TAKEN.append("on_checkpoint")
    # ---- end of companions ----
    eval_every: int = setting("checkpoints", 1, "epochs between evaluations (0: only at the end)", at_least(0))
    eval_every_steps: int = setting(
        "checkpoints",
        0,
        "steps between evaluations (0 = off); patience counts each, a new best is saved",
        at_least(0),
    )
    eval_batch_size: int = setting(
        "checkpoints", 0, "samples per evaluation batch on each rank (0 = batch_size)", at_least(0), "may"
    )
    best_metric: str = setting("checkpoints", "auto", "for best.pt: auto, NAME, min:NAME, max:NAME", metric_name, "may")

    log_interval: int = setting("logging", 20, "optimizer steps between log lines", at_least(1))
    # ---- extra: profiler ----
    enable_profiling: bool = setting("logging", False, "profile a few steps of rank 0 into run_dir/traces")
    # ---- end of profiler ----

    # ---- yours: fields for your own model and data; a fork edits only these lines of this file ----
    dataset: str = yours("synthetic", "data set", one_of(
        "synthetic", "cifar10",
        "imagefolder", "csv",  # extra: images
    ), "must")
    augment: str = yours("auto", "crops and flips", one_of(
        "auto", "none", "crop",
        "resized_crop",  # extra: images
    ), "may")
    # ---- extra: images ----
    crop_scale: str = yours("0.08,1", "area of a resized_crop, as a part of the image's", range_up_to(1), "may")
    crop_ratio: str = yours("3/4,4/3", "width / height of a resized_crop", range_up_to(100), "may")
    auto_augment: str = yours("none", "torchvision's policy for image files", one_of(*AUTO_AUGMENTS), "may")
    random_erase: float = yours(0.0, "probability of erasing a box of an image file", probability, "may")
    augment_repeats: int = yours(1, "copies of an image in so many epochs, each with other random draws", at_least(1))
    mixup_alpha: float = yours(0.0, "mixup of training batches: alpha (0 = off)", at_least(0), "may")
    cutmix_alpha: float = yours(0.0, "CutMix of training batches: alpha (0 = off)", at_least(0), "may")
    RARE.extend("crop_scale crop_ratio auto_augment random_erase augment_repeats mixup_alpha cutmix_alpha".split())
    # ---- end of images ----
    model: str = yours("mini_resnet", "mini_resnet or a torchvision classifier", resume="must")
    freeze: str = yours("none", "backbone: train only the last layer", one_of("none", "backbone"), "must")
    num_classes: int | str = yours("auto", "classes (auto: from the data)", at_least(2), "must")
    in_channels: int | str = yours("auto", "image channels (auto: from the data)", at_least(1), "must")
    image_size: int | str = yours("auto", "resize to it (auto: from weights or data)", at_least(4), "must")
    # ---- extra: images ----
    train_size: int | str = yours("auto", "size of training images in files (auto: image_size)", at_least(4), "may")
    resize_size: int | str = yours("auto", "shorter side before evaluation's center crop", at_least(4), "may")
    interpolation: str = yours("auto", "resizing", one_of("bilinear", "bicubic", "nearest"), "may")
    RARE.extend(["train_size", "resize_size", "interpolation"])
    # ---- end of images ----
    channels_last: bool = yours(True, "memory format of convolutions (faster on CPU and CUDA)", resume="may")
    label_smoothing: float = yours(0.0, "label smoothing of the training loss", between(0, 1), "may")
    norm_weight_decay: float = yours("auto", "weight decay of normalization (auto: 0)", at_least(0), "may")
    sync_bn: bool = yours(False, "BatchNorm statistics across all ranks (CUDA only)", resume="may")
    # ---- end of yours ----
    # fmt: on

    def __post_init__(self) -> None:
        problems = []
        for field in dataclasses.fields(self):
            value, problem = _convert(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if problem:
                shown = re.sub(r"(?<=://)[^/@]*:[^/@]*(?=@)|(?<=\?).*", REDACTED, str(getattr(self, field.name)))
                problems.append(f"{field.name}={shown}: {problem}")
        by_default = DEFAULTS.get(self.optimizer, {}) | ({} if self.max_steps else {"epochs": 10})
        for name, value in by_default.items():
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, value)
        problems = problems or self._conflicts()
        if problems:
            raise UserError("\n".join(problems))

    def _conflicts(self) -> list[str]:
        """Problems with combinations of values."""
        given = {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}
        problems = []
        for name, other, wrong in CONFLICTS:
            found = name in given and (other(self) if callable(other) else other in given)
            if found:
                problems.append(f"{name}={given[name]}: " + wrong.format_map(vars(self) | {"found": found}))
        return problems

    @property
    def run_folder(self) -> Path:
        """run_dir with its field names filled in."""
        return Path(self.run_dir.format_map(vars(self)))

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.checkpoint_dir) if self.checkpoint_dir else self.run_folder / "checkpoints"

    @property
    def micro_batch(self) -> tuple[str, int]:
        """The field that global_batch_size counts in, and its value."""
        if self.batch_tokens and self.batch_size == type(self).batch_size:  # extra: lengths
            return "batch_tokens", self.batch_tokens
        return "batch_size", self.batch_size

    def micro_batches_per_step(self, world_size: int) -> int:
        """Micro-batches of all ranks in one optimizer step."""
        if self.global_batch_size:
            return self.global_batch_size // self.micro_batch[1]
        return world_size * self.grad_accum_steps

    @property
    def limits(self) -> tuple[float, float]:
        """The epochs and optimizer steps after which the run ends; infinite if that limit is not set."""
        return limits_of(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """All fields, with run_dir and checkpoint_dir as paths; `from_args(["--config", ...])` reads it back."""
        paths = {"run_dir": str(self.run_folder), "checkpoint_dir": str(self.checkpoint_folder)}
        return vars(self) | paths

    def to_toml(self) -> str:
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in self.to_dict().items()]
        return "\n".join(lines) + "\n"

    @classmethod
    def known(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """The values of a saved config for which there are fields: a fork may have deleted some since."""
        return {field.name: saved[field.name] for field in dataclasses.fields(cls) if field.name in saved}

    @classmethod
    def from_args(
        cls, argv: Sequence[str] | None = None, saved: dict[str, Any] | None = None, notes: list[str] | None = None
    ) -> TrainingConfig:
        """Defaults, then the file of --config, then flags. Exits 0 after --help or --print-config, 2 after an error.

        Args:
            saved: values that replace the defaults.
            notes: gets a line for each setting of the file that was removed from this version and is ignored.
        """
        given, problems = _read_flags(sys.argv[1:] if argv is None else argv, cls)
        shown, file, print_config = (given.pop(name, "") for name in GENERAL)
        if shown in ("true", "all"):
            print(_help(cls, shown == "all"))
            raise SystemExit(0)
        problems += [f"help={shown}: is not known; give --help, or --help all"] * bool(shown)
        try:
            values = _read_file(file, cls) if file else {}
        except UserError as error:
            problems, values = [*problems, str(error)], {}
        ignored, refused = _take_removed(values, given, file)
        problems += refused
        if notes is not None:
            notes += ignored
        if BOOLEANS.get(given.get("eval_only", "").lower()):
            values.pop("init_from", None)  # the weights that the run of a config.json started from
        if REDACTED in str((values | given).get("on_checkpoint")):  # extra: companions
            remedy = "give the command again, or better a script that holds the secret"
            problems.append(f"on_checkpoint: {REDACTED} stands for a secret that a run did not store; {remedy}")
        try:
            config = cls(**(cls.known(saved or {}) | values | given))
        except UserError as error:
            problems.append(str(error))
        if problems:
            print("\n".join(problems), file=sys.stderr, flush=True)
            raise SystemExit(2)
        if print_config:
            print(config.to_toml(), end="")
            raise SystemExit(0)
        return config


def unless_auto(value: int | str, automatic: int) -> int:
    """The value of a field that may be "auto", or else what it is then."""
    return value if isinstance(value, int) else automatic


def limits_of(saved: dict[str, Any]) -> tuple[float, float]:
    """`TrainingConfig.limits` of the values in a config.json."""
    epochs, steps = saved["epochs"], saved["max_steps"]
    return math.inf if epochs == "auto" else epochs, steps or math.inf


def asks_for_more(values: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Whether a run with these values may go on where one with the saved values, if there are any, was completed.

    Its epochs, its steps or its patience may have ended it. Patience starts again with another metric.
    """
    if not saved:
        return False
    old_patience = saved.get("patience", 0)
    if old_patience and saved["best_metric"] != values["best_metric"]:
        return True
    new_limits = *limits_of(values), values["patience"] or math.inf
    old_limits = *limits_of(saved), old_patience or math.inf
    return any(new > old for new, old in zip(new_limits, old_limits, strict=True))


def fields_of_yours() -> list[dataclasses.Field]:
    """The fields in the block "yours"."""
    return [field for field in dataclasses.fields(TrainingConfig) if field.metadata["group"] == YOURS]


def _convert(field: dataclasses.Field, value: Any) -> tuple[Any, str]:
    """The value converted to the field's type, and the problem with it ("" if none). Flags give text."""
    kind, check = field.type.split()[0], field.metadata["check"]
    if value == "auto" and may_be_auto(field):
        return value, ""
    read, name = KINDS[kind]
    wanted = name + " or auto" * may_be_auto(field)
    try:
        found = read(value)
        is_valid = kind != "float" or math.isfinite(found)
    except (ValueError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        return value, f"is not {wanted}; give {wanted}"
    if field.name in PATHS:
        return expand(found), check(expand(found)) or known_path(expand(found))
    return found, check(found) if check else ""


def _read_flags(words: Sequence[str], cls: type) -> tuple[dict[str, str], list[str]]:
    """The text given with each flag, and the problems with the flags."""
    kinds = {field.name: field.type for field in dataclasses.fields(cls)} | dict.fromkeys(GENERAL)
    flags, given, problems = [[""]], dict[str, str](), list[str]()
    for word in words:
        if FLAG.match(word):
            flags.append(word.split("=", 1))
        else:
            flags[-1].append(word)
    for flag, *values in flags:
        name = "help" if flag == "-h" else flag.removeprefix("--").replace("-", "_")
        if name not in kinds and kinds.get(name.removeprefix("no_")) == "bool":
            name, values = name.removeprefix("no_"), ["false", *values]
        elif name == "print_config":
            values = ["true", *values]
        elif name == "help" or kinds.get(name) == "bool":
            values = values or ["true"]
        if name in kinds and values:
            given[name], *values = values
        elif flag:
            missing = f"{flag}: expected one argument; see --help"
            problems, values = [*problems, missing if name in kinds else _unknown(flag, cls)], []
        problems += [f"{word}: is not a flag; write --flag value" for word in values[:1]]
    return given, problems


def _unknown(word: str, cls: type) -> str:
    """The error message for an unknown flag or config file key."""
    names = [field.name for field in dataclasses.fields(cls)]
    if word.startswith("-"):
        names += ["config", "print_config"]
    removed = {name: setting.instead for name, setting in REMOVED.items()}
    return answer_unknown(word, names, removed, deleted_extras())


def deleted_extras() -> dict[str, dict[str, Any]]:
    """The fields of the extras that scripts/without.sh has deleted from this fork, with their defaults, by extra."""
    file = Path(__file__).parent / "pyproject.toml"
    found = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found.get("tool", {}).get("extras", {}).get("without", {})


def _help(cls: type, is_all: bool) -> str:
    """Flags by group, with help and default; if not is_all, those that are common."""
    lines, group, fields = [USAGE], "", dataclasses.fields(cls)
    rare = [] if is_all else [field for field in fields if field.name in RARE]
    for field in (field for field in fields if field not in rare):
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            lines += ["", f"{group}:"]
        kind, default = field.type.split()[0], "" if field.default == "" else f" [{field.default}]"
        flag = f"--[no-]{field.name}" if kind == "bool" else f"--{field.name} {kind.upper()}"
        lines += textwrap.wrap(f"  {flag:31} {help_of(field)}{default}", 120, subsequent_indent=" " * 34)
    return "\n".join([*lines, EXAMPLES, *([f"\n--help all shows the other {len(rare)} flags."] if rare else [])])


def _read_yaml(text: str) -> dict[str, str | None]:
    """The values of a YAML file as text, as flags have them; None for no value or several. Raises ValueError."""
    try:
        import yaml
    except Exception as error:
        raise ValueError(f"PyYAML cannot be imported ({error}): pip install pyyaml, or give a TOML file") from None
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if node and not isinstance(node, yaml.MappingNode):
        raise ValueError("it is not a table of names and values")
    values: dict[str, str | None] = {}
    for key, value in node.value if node else []:
        name = str(key.value)
        is_one = isinstance(value, yaml.ScalarNode) and name not in values
        is_null = is_one and value.style is None and value.value in NULLS
        values[name] = value.value if is_one and not is_null else None
    return values


def _read_file(file: str, cls: type) -> dict[str, Any]:
    """The values of a TOML or YAML file, or a config.json. A checkpoint_dir inside run_dir is left to follow it."""
    path, remedy = Path(expand(file)), "give a TOML or YAML file, or the config.json of a run"
    kind = path.suffix.lower()
    try:
        text = path.read_text(encoding="utf-8-sig")
        if kind != ".json":  # \udcXX, a byte of a name that is not UTF-8, is in JSON but not in TOML
            text = re.sub(r"(?<!\\)\\u(dc[89a-f][0-9a-f])", lambda code: chr(int(code[1], 16)), text)
        if kind == ".json":
            values = json.loads(text)
        else:
            values = _read_yaml(text) if kind in (".yaml", ".yml") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"config={file}: cannot be read ({error}); {remedy}") from None
    if not isinstance(values, dict):
        raise UserError(f"config={file}: is not a table of names and values; {remedy}")
    names = [field.name for field in dataclasses.fields(cls)]
    values = {key.replace("-", "_"): value for key, value in values.items()}
    for name, default in (pair for fields in deleted_extras().values() for pair in fields.items()):
        if values.get(name) == default:  # what this fork does without it
            del values[name]
    problems = [f"{file}: {_unknown(key, cls)}" for key in values if key not in names and key not in REMOVED]
    for key, value in values.items():
        if value is None and key in names:
            problems.append(f"{file}: {key} has no value, or more than one; leave it out, or give one")
    if problems:
        raise UserError("\n".join(problems))
    if kind == ".json":  # how that run was started does not apply to a new one, and its command may not be yours
        values = {key: value for key, value in values.items() if key not in NOT_TAKEN}
    if values.get("checkpoint_dir") == f"{values.get('run_dir')}/checkpoints":
        del values["checkpoint_dir"]
    return values


def _take_removed(values: dict[str, Any], given: dict[str, str], file: str) -> tuple[list[str], list[str]]:
    """Take the removed settings out of the values of a file.

    Args:
        given: the flags.

    Returns:
        A note for each one that is ignored although it is not at its default, and the problems with the others.
    """
    notes: list[str] = []
    problems: list[str] = []
    for name, removed in REMOVED.items():
        value = values.pop(name, removed.default)
        if _is_number(value, removed.default):
            continue
        if removed.needs and _is_number((values | given).get(removed.needs, 0), 0):
            problems.append(f"{file}: {name} was removed. {removed.instead}")
        else:
            notes.append(f"{file}: {removed.note(name, value)}")
    return notes, problems


def _is_number(value: Any, number: float) -> bool:
    """Whether a value of a file, which is text in YAML, is this number."""
    try:
        return float(value) == number
    except (TypeError, ValueError):
        return False
