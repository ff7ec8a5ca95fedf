"""`--compile` and `--activation_checkpointing`: torch.compile, and blocks that recompute their activations.

The first costs minutes before the first step and a compiler on each machine, the second a second forward pass. Who has
a large model and a GPU that is not busy, or too little memory, needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.settings.checks import one_of
from utils.settings.conflicts import Conflict
from utils.settings.fields import Settings, setting


def has_missing_gradients(config: Any) -> bool:
    return config.compile == "reduce-overhead" and config.find_unused_parameters


@dataclass(frozen=True, kw_only=True)
class CompileSettings(Settings):
    compile: str = setting(
        "performance",
        "off",
        "torch.compile mode",
        one_of("off", "default", "reduce-overhead"),
        rare=True,
        conflicts=[
            Conflict(
                has_missing_gradients,
                "needs all gradients, and --find_unused_parameters leaves some out. Use --compile default.",
            )
        ],
    )
    activation_checkpointing: bool = setting(
        "performance", False, "recompute activations in the backward pass to save memory (slower)", rare=True
    )
