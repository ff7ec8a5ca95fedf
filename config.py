"""All settings in one frozen dataclass, from which flags, `--help` and docs/configuration.md are generated.

Standard library only, so that `--help` and flag errors appear at once, before torch is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
import shlex
import string
import sys
import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

DEFAULT_RUN_DIR = "runs/default"
REDACTED = "[redacted]"  # in a stored command
YOURS = "model and data"  # the group of fields that a fork changes
SCHEDULES = ("cosine", "linear", "constant", "wsd", "step")
TRACKERS = ("none", "wandb", "mlflow", "trackio")
DEFAULTS = {"sgd": {"lr": 0.1, "weight_decay": 5e-4}, "adamw": {"lr": 1e-3, "weight_decay": 0.01}}
AUTO_AUGMENTS = ("none", "ra", "ta_wide", "augmix", "autoaugment")
AMP_DTYPES = ("auto", "bf16", "fp16", "bf16_params", "fp16_params")
SHARDINGS = ("none", "zero2", "zero3", "hybrid")
PATHS = ("run_dir", "data_dir", "checkpoint_dir", "resume_from", "init_from")
VARIABLE = re.compile(r"\$(\{\w+\}|[A-Za-z_]\w*)|^~[^/]*")  # in a path
ELSEWHERE = Path(__file__).parent / "docs" / "coming-from.md"  # names of flags in other trainers
OF_TORCHRUN = """nproc_per_node nnodes node_rank master_addr master_port max_restarts local_rank world_size gpus devices
num_nodes dist_url"""
EXAMPLES = """examples:
  torchrun --standalone --nproc-per-node=2 train.py --epochs 5
  torchrun --standalone --nproc-per-node=8 train.py --run_dir runs/first --resume_from auto
  python train.py --config runs/default/config.json --eval_only"""
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


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


def probability(value: float) -> str:
    return "" if 0 <= value <= 1 else "is not a probability; give a number from 0 to 1"


class one_of:  # used like the functions around it
    """A check whose choices are shown in --help."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, value: Any) -> str:
        return "" if value in self.choices else f"is not known; choose {nearest(value, self.choices)}"


def expand(path: str) -> str:
    """The path with `~` and $NAME replaced, unless it exists as it is or is a URL."""
    if "://" in path or (os.path.lexists(path) and not path.startswith("~")):
        return path
    return os.path.expanduser(VARIABLE.sub(lambda found: os.path.expandvars(found[0]), path))


def known_path(value: str) -> str:
    unknown = None if os.path.lexists(value) else VARIABLE.search(value)
    return f"{unknown[0]} is not known here; write the path in full" if unknown else ""


def local_path(value: str) -> str:
    return "is not a path; mount the storage and give its path" if "://" in value else known_path(value)


def path_or_url(value: str) -> str:
    return mirror_url(value) if "://" in value else known_path(value)


def run_path(value: str) -> str:
    if "://" in value:
        return "is not a path; give a local folder, and this URL with --mirror"
    return known_path(value) if value.strip() else "is empty; give a folder, e.g. runs/NAME"


def mirror_url(value: str) -> str:
    if value and not re.match(r"\w+://[^/]", value.replace("file:///", "file://")):
        return "is not a URL; give e.g. s3://BUCKET/NAME, or the path with --run_dir"
    has_key = "?" in value or re.search(r"://[^/]*:[^/]*@", value)
    return "has a key in it; give that in the environment or the provider's files" if has_key else ""


def command_line(value: str) -> str:
    try:
        shlex.split(value)
    except ValueError as error:
        return f"is not a valid command ({error}); fix its quotes"
    return ""


def metric_name(value: str) -> str:
    prefix, colon, _ = value.rpartition(":")
    return "" if not colon or prefix in ("min", "max") else "has an unknown prefix; write min:NAME or max:NAME"


def rendezvous_url(value: str) -> str:
    known = not value or value.startswith(("env://", "tcp://", "file://"))
    return "" if known else "is not a rendezvous address; give env://, tcp://HOST:PORT or file:///SHARED/PATH"


def range_of(value: str) -> tuple[float, float]:
    """The two numbers of "0.08,1" or "3/4,4/3"."""
    low, high = (float(Fraction(number)) for number in value.split(","))
    return low, high


def range_up_to(most: float) -> Check:
    def check(value: str) -> str:
        try:
            low, high = range_of(value)
        except (ValueError, ArithmeticError):
            low = high = 0.0
        return "" if 0 < low <= high <= most else f"is not a range above 0 and up to {most}; give e.g. 1/2,1"

    return check


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


def type_of(field: dataclasses.Field) -> tuple[type, bool]:
    """The type of a field, and whether it may be "auto", which is not one of its values."""
    name, _, rest = field.type.partition(" | ")
    kind = {"int": int, "float": float, "bool": bool, "str": str}[name]
    is_choice = kind is str and "auto" in getattr(field.metadata["check"], "choices", ["auto"])
    return kind, rest == "str" or (field.default == "auto" and not is_choice)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The configuration of one run. Raises UserError that lists all invalid values."""

    # fmt: off
    run_dir: str = setting("run", DEFAULT_RUN_DIR, "run folder; may contain fields: runs/{model}-s{seed}", run_path)
    resume_from: str = setting("run", "", "auto: latest valid checkpoint; a path; empty: fresh start", local_path)
    overwrite: bool = setting("run", False, "move an existing run in run_dir aside, to NAME.1")
    mirror: str = setting("run", "", "URL of a copy of the run in object storage, for resume_from too", mirror_url)
    track: str = setting("run", "none", "send settings and records to a tracker", one_of(*TRACKERS))
    init_from: str = setting("run", "", "weights to start with: a checkpoint, a state dict, torchvision", path_or_url)
    eval_only: bool = setting("run", False, "only evaluate resume_from (empty: the best of run_dir) or init_from")
    seed: int = setting("run", 42, "seed for weights, data order, augmentation and dropout", between(0, 2**63), "must")
    deterministic: bool = setting("run", False, "bit-exact on one CUDA topology too (slower)", resume="may")

    data_dir: str = setting("data", "data", "imagefolder reads <data_dir>/{train,val,test}/<class>/**", local_path)
    dataset_size: int = setting("data", 0, "train on a seeded subset of this size (0 = all)", at_least(0), "must")
    cache: str = setting("data", "none", "keep decoded images in RAM or on the device", one_of("none", "ram", "device"))
    num_workers: int | str = setting("data", "auto", "loader workers per rank (0 for in-memory data)", at_least(0))
    drop_last: bool = setting("data", False, "drop the last, incomplete global batch of each epoch", resume="must")
    record_samples: bool = setting("data", False, "write the sample indices of each optimizer step to run_dir/samples")

    compile: str = setting("model", "off", "torch.compile mode", one_of("off", "default", "reduce-overhead"))
    activation_checkpointing: bool = setting("model", False, "recompute activations to save memory (slower)")

    epochs: int | str = setting("training", "auto", "passes over the data (auto: 10, or max_steps)", at_least(1), "may")
    max_steps: int = setting("training", 0, "total optimizer steps (0 = set by epochs)", at_least(0), "may")
    batch_size: int = setting("training", 64, "samples per micro-batch on each rank", at_least(1), "must")
    grad_accum_steps: int = setting("training", 1, "micro-batches per rank and optimizer step", at_least(1))
    global_batch_size: int = setting("training", 0, "samples per step; sets grad_accum_steps (0 = off)", at_least(0))
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
    ema_decay: float = setting(
        "training",
        0.0,
        "decay of the weight EMA (0 = off); after n updates at most n / (9 + n)",
        between(0, 1),
        "may",
    )
    max_skipped_steps: int = setting("training", 50, "non-finite steps in a row before abort (0 = off)", at_least(0))
    patience: int = setting("training", 0, "evaluations without improvement before the end (0 = off)", at_least(0))
    max_time: float = setting("training", 0.0, "save and stop after this many minutes (0 = off)", at_least(0))

    use_amp: bool = setting("precision", True, "mixed precision (on CPUs only with amp_dtype)", resume="may")
    amp_dtype: str = setting("precision", "auto", "dtype (_params: of gathered shards too)", one_of(*AMP_DTYPES), "may")

    backend: str = setting("distributed", "auto", "nccl on CUDA, else gloo", one_of("auto", "nccl", "gloo", "mpi"))
    init_method: str = setting("distributed", "", "env:// (default), tcp://HOST:PORT or file:///PATH", rendezvous_url)
    timeout: float = setting("distributed", 600.0, "seconds a collective may take", above(0))
    hang_timeout: float = setting("distributed", 300.0, "seconds without progress before abort (0 = off)", at_least(0))
    bucket_cap_mb: float = setting("distributed", 0.0, "DDP bucket size in MB (0: by model size)", at_least(0), "may")
    comm_hook: str = setting("distributed", "none", "gradient compression", one_of("none", "fp16", "bf16"), "may")
    find_unused_parameters: bool = setting(
        "distributed", False, "allow parameters that a batch does not use (slower)", resume="may"
    )
    reduction: str = setting("distributed", "fast", "exact: same bits on any ranks", one_of("fast", "exact"), "may")
    check_every: int = setting(
        "distributed", 0, "steps between checks of the ranks' gradients by other ranks (0 = off)", at_least(0)
    )
    sharding: str = setting("distributed", "none", "FSDP: shard the model over the ranks", one_of(*SHARDINGS), "may")
    cpu_offload: bool = setting("distributed", False, "keep shards and optimizer in host memory (slower)", resume="may")

    checkpoint_dir: str = setting("checkpoints", "", "checkpoint folder (empty: run_dir/checkpoints)", local_path)
    save_every: int = setting("checkpoints", 1, "epochs between checkpoints (0 = off)", at_least(0))
    save_every_steps: int = setting("checkpoints", 0, "optimizer steps between checkpoints (0 = off)", at_least(0))
    save_every_minutes: float = setting("checkpoints", 10.0, "minutes between checkpoints (0 = off)", at_least(0))
    keep_last: int = setting("checkpoints", 3, "latest checkpoints to keep, besides the best", at_least(2))
    keep_every: int = setting("checkpoints", 0, "also keep one checkpoint of so many steps (0 = off)", at_least(0))
    on_checkpoint: str = setting(
        "checkpoints", "", "command after each checkpoint; {} is its path; put secrets into a script", command_line
    )
    eval_every: int = setting("checkpoints", 1, "epochs between evaluations (0: only at the end)", at_least(0))
    eval_every_steps: int = setting(
        "checkpoints",
        0,
        "steps between evaluations within an epoch (0 = off); patience counts each, and a new best saves a checkpoint",
        at_least(0),
    )
    eval_batch_size: int = setting(
        "checkpoints", 0, "samples per evaluation batch on each rank (0 = batch_size)", at_least(0), "may"
    )
    best_metric: str = setting("checkpoints", "auto", "for best.pt: auto, NAME, min:NAME, max:NAME", metric_name, "may")

    log_interval: int = setting("logging", 20, "optimizer steps between log lines", at_least(1))
    enable_profiling: bool = setting("logging", False, "profile a few steps of rank 0 into run_dir/traces")

    # ---- yours: fields for your own model and data; a fork edits only these lines of this file ----
    dataset: str = yours("synthetic", "data set", one_of("synthetic", "cifar10", "imagefolder", "csv"), "must")
    augment: str = yours("auto", "crops and flips", one_of("auto", "none", "crop", "resized_crop"), "may")
    crop_scale: str = yours("0.08,1", "area of a resized_crop, as a part of the image's", range_up_to(1), "may")
    crop_ratio: str = yours("3/4,4/3", "width / height of a resized_crop", range_up_to(100), "may")
    auto_augment: str = yours("none", "torchvision's policy for image files", one_of(*AUTO_AUGMENTS), "may")
    random_erase: float = yours(0.0, "probability of erasing a box of an image file", probability, "may")
    augment_repeats: int = yours(1, "copies of an image in so many epochs, each with other random draws", at_least(1))
    mixup_alpha: float = yours(0.0, "mixup of training batches: alpha (0 = off)", at_least(0), "may")
    cutmix_alpha: float = yours(0.0, "CutMix of training batches: alpha (0 = off)", at_least(0), "may")
    model: str = yours("mini_resnet", "mini_resnet or a torchvision classifier", resume="must")
    freeze: str = yours("none", "backbone: train only the last layer", one_of("none", "backbone"), "must")
    num_classes: int | str = yours("auto", "classes (auto: from the data)", at_least(2), "must")
    in_channels: int | str = yours("auto", "image channels (auto: from the data)", at_least(1), "must")
    image_size: int | str = yours("auto", "resize to it (auto: from weights or data)", at_least(4), "must")
    train_size: int | str = yours("auto", "size of training images in files (auto: image_size)", at_least(4), "may")
    resize_size: int | str = yours("auto", "shorter side before evaluation's center crop", at_least(4), "may")
    interpolation: str = yours("auto", "resizing", one_of("bilinear", "bicubic", "nearest"), "may")
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
        problems = []
        total, size = self.global_batch_size, self.batch_size
        if total % size:
            fits = " or ".join(str(fit) for fit in (total - total % size, total - total % size + size) if fit)
            problems.append(f"global_batch_size={total}: is not a multiple of batch_size={size}; give {fits}")
        either = "give only one of the two"
        if total and self.grad_accum_steps != 1:
            problems.append(f"grad_accum_steps={self.grad_accum_steps}: is derived from global_batch_size; {either}")
        if self.overwrite and self.resume_from:
            problems.append(f"overwrite=True: would move aside the run that resume_from continues; {either}")
        if self.init_from and self.resume_from and self.resume_from != "auto":
            problems.append(f"init_from={self.init_from}: a resumed run takes its weights from resume_from; {either}")
        if self.amp_dtype != "auto" and not self.use_amp:
            problems.append(f"amp_dtype={self.amp_dtype}: needs mixed precision; leave out amp_dtype or no_use_amp")
        if self.reduction == "exact" and self.comm_hook != "none":
            problems.append(f"comm_hook={self.comm_hook}: rounds gradients before they are summed; {either}")
        if self.find_unused_parameters and self.compile == "reduce-overhead":
            why = "keeps all gradients in place, and find_unused_parameters leaves some out; use --compile default"
            problems.append(f"compile=reduce-overhead: {why}")
        if self.check_every:
            unlike = {"sharding": "none", "find_unused_parameters": False}  # as far as the config shows
            wrong = [name for name, value in unlike.items() if getattr(self, name) != value]
            wrong += ["compile"] if self.compile == "reduce-overhead" else []
            problems += [f"{name}={getattr(self, name)}: does not work with check_every; {either}" for name in wrong]
        if self.sharding != "none":
            other = {"reduction": "fast", "comm_hook": "none", "compile": "off", "find_unused_parameters": False}
            problems += [
                f"{name}={getattr(self, name)}: does not work with sharding={self.sharding}; {either}"
                for name, value in other.items()
                if getattr(self, name) != value
            ]
        elif self.cpu_offload or self.amp_dtype.endswith("_params"):
            name = "cpu_offload" if self.cpu_offload else "amp_dtype"
            problems.append(f"{name}={getattr(self, name)}: needs sharding; add --sharding zero3, or leave it out")
        if self.min_lr >= self.lr:
            problems.append(f"min_lr={self.min_lr}: is not below lr={self.lr}; give a smaller one")
        if self.warmup_steps != "auto" and self.warmup_epochs != type(self).warmup_epochs:
            problems.append(f"warmup_steps={self.warmup_steps}: there is warmup_epochs={self.warmup_epochs}; {either}")
        names = [field.name for field in dataclasses.fields(self)]
        try:
            used = [name for _, name, _, _ in string.Formatter().parse(self.run_dir) if name is not None]
            wrong = [f"{{{name}}} is not a field" for name in used if name not in names]
            _ = wrong or self.run_folder  # raises if a field does not take its format, as {lr:d}
        except Exception as error:  # of any kind: fields and formats call methods of the values
            wrong = [f"cannot be filled in ({error})"]
        if wrong:
            problems.append(f"run_dir={self.run_dir}: {wrong[0]}; use e.g. {{model}} or {{lr}}")
        return problems

    @property
    def run_folder(self) -> Path:
        """run_dir with its field names filled in."""
        return Path(self.run_dir.format_map(dataclasses.asdict(self)))

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.checkpoint_dir) if self.checkpoint_dir else self.run_folder / "checkpoints"

    def micro_batches_per_step(self, world_size: int) -> int:
        """Micro-batches of all ranks in one optimizer step."""
        if self.global_batch_size:
            return self.global_batch_size // self.batch_size
        return world_size * self.grad_accum_steps

    def asks_for_more_than(self, saved: dict[str, Any]) -> bool:
        """Whether this config extends a run that was completed with the saved values."""
        limits = zip(self.limits, limits_of(saved), strict=True) if saved else ()
        return any(here > before for here, before in limits)

    @property
    def limits(self) -> tuple[float, float]:
        """The epochs and optimizer steps after which the run ends; infinite if that limit is not set."""
        return limits_of(dataclasses.asdict(self))

    def to_dict(self) -> dict[str, Any]:
        """All fields, with run_dir and checkpoint_dir as paths; `from_args(["--config", ...])` reads it back."""
        paths = {"run_dir": str(self.run_folder), "checkpoint_dir": str(self.checkpoint_folder)}
        return dataclasses.asdict(self) | paths

    def to_toml(self) -> str:
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in self.to_dict().items()]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_args(cls, argv: Sequence[str] | None = None, saved: dict[str, Any] | None = None) -> TrainingConfig:
        """Defaults, then the file of --config, then flags. Exits 0 after --help or --print-config, 2 after an error.

        saved: values that replace the defaults.
        """
        flags, unknown = _parser(cls).parse_known_args(argv)
        given = vars(flags)
        file, print_config = given.pop("config", ""), given.pop("print_config", False)
        problems = [_unknown(word, cls) for word in unknown if word.startswith("-")]
        stray = [word for word in unknown[:1] if not word.startswith("-")]
        problems += [f"{word}: is not a flag; write --flag value" for word in stray]
        try:
            values = _read_file(file, cls) if file else {}
        except UserError as error:
            problems, values = [*problems, str(error)], {}
        if given.get("eval_only"):
            values.pop("init_from", None)  # the weights that the run of a config.json started from
        if REDACTED in str((values | given).get("on_checkpoint")):
            remedy = "give the command again, or better a script that holds the secret"
            problems.append(f"on_checkpoint: {REDACTED} stands for a secret that a run did not store; {remedy}")
        try:
            config = cls(**((saved or {}) | values | given))
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


def fields_of_yours() -> list[dataclasses.Field]:
    """The fields in the block "yours"."""
    return [field for field in dataclasses.fields(TrainingConfig) if field.metadata["group"] == YOURS]


def _convert(field: dataclasses.Field, value: Any) -> tuple[Any, str]:
    """The value converted to the field's type, and the problem with it ("" if none). Flags give text."""
    (kind, may_be_auto), check = type_of(field), field.metadata["check"]
    if may_be_auto and value == "auto":
        return value, ""
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    wanted += " or auto" if may_be_auto else ""
    wrong = f"is not {wanted}; give {wanted}"
    try:
        if kind is bool and isinstance(value, str):
            value = BOOLEANS[value.lower()]
        elif field.name in PATHS and isinstance(value, str):
            value = expand(value)
        elif isinstance(value, bool) and kind is not bool:
            return value, wrong
        elif kind in (int, float) and isinstance(value, str | int):
            value = kind(value)
        if not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
            return value, wrong
    except (ValueError, KeyError):
        return value, wrong
    return value, check(value) if check else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{message}; see --help" if ";" not in message else message, file=sys.stderr, flush=True)
        raise SystemExit(2)


def _unknown(word: str, cls: type) -> str:
    """The error message for an unknown flag or config file key."""
    dashes, name = "--" * word.startswith("-"), word.split("=")[0].lstrip("-").replace("-", "_")
    if name in OF_TORCHRUN.split():
        return f"{word}: is not known; start the ranks with torchrun: torchrun --standalone --nproc-per-node=N train.py"
    names = [field.name for field in dataclasses.fields(cls)] + ["config", "print_config"] * bool(dashes)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if (here := _of_another_trainer(name, names)) is not None:
        if not here:
            return f'{word}: is not a flag of this fork; add a field to the block "yours" of config.py, or leave it out'
        meant = re.match(r"`--(\w+)", here)
        if not meant:
            advice = re.sub(r"\[(.*?)\]\((.*?)\)", r"\1 (docs/\2)", here.replace("`", ""))
            return f"{word}: is not a flag here; {advice}"
        close = [meant[1]]
    return f"{word}: is not known; " + (f"did you mean {dashes}{close[0]}?" if close else "see --help for all flags")


def _of_another_trainer(name: str, names: Collection[str]) -> str | None:
    """What docs/coming-from.md says about a flag of another trainer: the flag here, or what to do; None if nothing.

    names: of the flags here. What the page says about others is left out: a fork may have deleted its fields.
    """
    try:
        rows = [line.strip("|").split("|") for line in ELSEWHERE.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    for there, here in (row for row in rows if len(row) == 2):
        if name in re.findall(r"`_+(\w+)`", there.replace("-", "_")):
            parts = here.strip().split("; ")
            return "; ".join(part for part in parts if {*re.findall(r"`--(?:no-)?(\w+)", part)} <= {*names})
    return None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One line per flag, in one spelling."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0]
        if action.const is True and action.nargs:
            return f"--[no-]{name[2:]}"
        return f"{name} {action.metavar}" if action.metavar else name


def _parser(cls: type) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        usage="torchrun --standalone --nproc-per-node=N train.py [flags]   (or: python train.py [flags])",
        description="Flags may be written with _ or -. Flags override the --config file, which overrides the "
        "defaults.\nFor several nodes, scripts/launch.sh takes these flags and more.",
        epilog=EXAMPLES,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    general = parser.add_argument_group("general")
    general.add_argument("--help", "-h", action="help", help="show this text and exit")
    general.add_argument("--config", metavar="FILE", help="read values from a TOML file or a run's config.json")
    text = "print the resolved config as TOML and exit"
    general.add_argument("--print_config", "--print-config", action="store_true", help=text)
    names = dict.fromkeys(field.metadata["group"] for field in dataclasses.fields(cls))
    groups = {name: parser.add_argument_group(name) for name in names}
    for field in dataclasses.fields(cls):
        name, group = field.name, groups[field.metadata["group"]]
        text = help_of(field) + ("" if field.default == "" else f" [{field.default}]")
        text, spellings = text.replace("%", "%%"), [f"--{name}", f"--{name.replace('_', '-')}"]
        if type_of(field)[0] is bool:
            group.add_argument(*spellings, dest=name, nargs="?", const=True, metavar="BOOL", help=text)
            negations = [f"--{no}{spelled[2:]}" for no in ("no-", "no_") for spelled in spellings]
            group.add_argument(*negations, dest=name, action="store_false", help=argparse.SUPPRESS)
        else:
            group.add_argument(*spellings, dest=name, metavar=type_of(field)[0].__name__.upper(), help=text)
    return parser


def _read_file(file: str, cls: type) -> dict[str, Any]:
    """The values of a TOML file or a run's config.json. A checkpoint_dir inside run_dir is left to follow it."""
    path, remedy = Path(expand(file)), "give a TOML file or the config.json of a run"
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix != ".json":  # \udcXX, a byte of a name that is not UTF-8, is in JSON but not in TOML
            text = re.sub(r"(?<!\\)\\u(dc[89a-f][0-9a-f])", lambda code: chr(int(code[1], 16)), text)
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"config={file}: cannot be read ({error}); {remedy}") from None
    if not isinstance(values, dict):
        raise UserError(f"config={file}: is not a table of names and values; {remedy}")
    names = [field.name for field in dataclasses.fields(cls)]
    values = {key.replace("-", "_"): value for key, value in values.items()}
    unknown = [f"{file}: {_unknown(key, cls)}" for key in values if key not in names]
    if unknown:
        raise UserError("\n".join(unknown))
    if path.suffix == ".json":  # how that run was started does not apply to a new one, and its command may not be yours
        left_out = ("resume_from", "overwrite", "eval_only", "on_checkpoint")
        values = {key: value for key, value in values.items() if key not in left_out}
    if values.get("checkpoint_dir") == f"{values.get('run_dir')}/checkpoints":
        del values["checkpoint_dir"]
    return values
