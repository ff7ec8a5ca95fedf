"""Messages about the value of a setting."""

from __future__ import annotations

import re
from typing import Any

from utils.settings.value_types import to_text

REDACTED = "[redacted]"  # in place of a secret
CREDENTIALS_PATTERN = re.compile(r"(?<=://)[^/@]*:[^/@]*(?=@)|(?<=\?).*")  # in a URL


def describe_problem(name: str, value: Any, problem: str, owner: str = "") -> str:
    """Return the message about a value: `--lr must be above 0, got -1.` or `--lr 0.1 differs from ...`.

    Args:
        name: of the setting.
        value: of the setting. A secret in a URL is left out of the message.
        problem: "must be X", after which the value is named, or what follows the flag with its value. Sentences about
            what to do may follow, or "" for no problem.
        owner: words before the flag, if the value is a part of the setting's: "each element of ".
    """
    if not problem:
        return ""
    if not problem.startswith("must "):
        return end_sentence(f"{to_flag(name, value)} {problem}")
    requirement, _, advice = problem.partition(". ")
    message = f"{owner}--{name} {requirement.removesuffix('.')}, got {quote(value)}."
    if advice:
        message = f"{message} {end_sentence(advice)}"
    return message[0].upper() + message[1:]


def to_flag(name: str, value: Any) -> str:
    """Return a setting as a command line has it: `--lr 0.1`, `--overwrite` or `--no-overwrite`."""
    if value is True:
        return f"--{name}"
    if value is False:
        return f"--no-{name}"
    return f"--{name} {redact_credentials(to_text(value))}"


def quote(value: Any) -> str:
    """Return a value as a message shows it: numbers as they are, and everything else in quotes."""
    text = redact_credentials(to_text(value))
    if isinstance(value, (int, float)):
        return text
    return f'"{text}"'


def redact_credentials(text: str) -> str:
    return CREDENTIALS_PATTERN.sub(REDACTED, text)


def end_sentence(text: str) -> str:
    """Return the text with a full stop, if it has no mark at its end."""
    return text if text.endswith((".", "?", "!")) else f"{text}."
