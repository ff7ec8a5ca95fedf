"""Choose the weights of a checkpoint that a script uses. By default they are those that selected the best checkpoint.

With `--ema_decay` these are the averaged weights. A run evaluates the plain ones too, and a checkpoint holds both.
"""

from __future__ import annotations

import argparse
from typing import Any

from utils.settings.errors import UserError

WEIGHT_TITLES = {"ema": "averaged weights", "model": "plain weights"}


def add_ema_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="use the averaged weights, or the plain ones (default: the averaged ones, if the checkpoint has them)",
    )


def choose_weights(payload: dict[str, Any], is_ema: bool | None, source: object) -> str:
    """Return the entry of a checkpoint that holds the weights to use: "ema" for the averaged ones, or "model".

    Args:
        payload: the checkpoint.
        is_ema: the flag `--ema` or `--no-ema` (None: neither was given).
        source: the checkpoint's name for messages.

    Raises:
        UserError: if the averaged weights are asked for, and there are none.
    """
    if is_ema and not payload["ema"]:
        raise UserError(f"{source} has no averaged weights. Leave out --ema, or train with --ema_decay 0.999.")
    if is_ema is None:
        is_ema = bool(payload["ema"])
    return "ema" if is_ema else "model"
