"""`--batch_tokens`: micro-batches of samples of similar length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from utils.settings.checks import at_least, one_of
from utils.settings.conflicts import Conflict
from utils.settings.fields import Settings, setting


def has_no_budget(config: Any) -> bool:
    return not config.batch_tokens


def has_cuda_graphs(config: Any) -> bool:  # extra: compile
    return config.compile == "reduce-overhead"


NEEDS_BUDGET = Conflict(has_no_budget, "needs --batch_tokens. Add that flag, or leave this one out.")


@dataclass(frozen=True, kw_only=True)
class LengthsSettings(Settings):
    batch_tokens: int = setting(
        "training",
        0,
        "micro-batch size per rank in tokens or frames, padding included (0: use batch_size)",
        at_least(0),
        "must",
        rare=True,
        conflicts=[
            Conflict(
                has_cuda_graphs,
                "makes batches of many shapes. Use --compile default, since CUDA graphs need a single shape.",
            )
        ],  # extra: compile
    )
    too_long: str = setting(
        "training",
        "error",
        "handling of samples longer than batch_tokens (alone: each in its own micro-batch)",
        one_of("error", "alone"),
        rare=True,
        conflicts=[NEEDS_BUDGET],
    )
    bucket_window: int = setting(
        "training",
        100,
        "micro-batches per window in which samples are sorted by length, with batch_tokens",
        at_least(1),
        "must",
        rare=True,
        conflicts=[NEEDS_BUDGET],
    )

    def micro_batch_setting(self) -> str:
        config: Any = self
        if config.batch_tokens and config.batch_size == type(config).batch_size:
            return "batch_tokens"
        return super().micro_batch_setting()
