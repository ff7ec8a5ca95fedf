"""`--sharding`: FSDP, in which a rank keeps a part of each parameter, of its gradient and of its optimizer state.

It costs communication in each pass, and a checkpoint is a folder with a file per rank. Who trains a model that does not
fit into the memory of one device needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.settings.checks import one_of
from utils.settings.conflicts import GIVE_ONLY_ONE, Conflict
from utils.settings.fields import Settings, setting

SHARDED_AMP_DTYPES = ("bf16_params", "fp16_params")
SHARDED_HELP = {
    "amp_dtype": "mixed-precision dtype (auto: bf16, or fp16 on GPUs without it, _params: FSDP gathers in it too)"
}
INCOMPATIBLE_SETTINGS = ("reduction", "comm_hook", "compile", "find_unused_parameters")
NEEDS_SHARDING = "needs sharding. Add --sharding zero3, or leave this flag out."


def is_not_sharded(config: Any) -> bool:
    return config.sharding == "none"


def has_params_dtype_without_sharding(config: Any) -> bool:
    return config.amp_dtype.endswith("_params") and is_not_sharded(config)


@dataclass(frozen=True, kw_only=True)
class ShardingSettings(Settings):
    sharding: str = setting(
        "distributed",
        "none",
        "FSDP (none: DDP, zero2: gradients and optimizer state, zero3: parameters too, hybrid: zero3 per node)",
        one_of("none", "zero2", "zero3", "hybrid"),
        "may",
        conflicts=[
            Conflict("sharding", f"does not work with --sharding {{sharding}}. {GIVE_ONLY_ONE}", subject=name)
            for name in INCOMPATIBLE_SETTINGS
        ]
        + [Conflict(has_params_dtype_without_sharding, NEEDS_SHARDING, subject="amp_dtype")],
    )
    cpu_offload: bool = setting(
        "distributed",
        False,
        "keep FSDP's shards and optimizer state in host memory (slower)",
        resume="may",
        rare=True,
        conflicts=[Conflict(is_not_sharded, NEEDS_SHARDING)],
    )
