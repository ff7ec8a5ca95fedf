"""Secrets in commands: what a run stores of them."""

from __future__ import annotations

import re
from typing import Any

from config import TrainingConfig
from utils.settings.problems import REDACTED

SECRET_NAMES = r"token\b|secret\b|password\b|passwd\b|pwd\b|(?:api|access|account|secret|private)[-_]?key\b|cookie\b"
SECRET_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s"'&;|]+)"""
SECRET_PATTERNS = (  # what stays, then what is replaced
    r"""(?i)(authorization\s*[:=]\s*)(?:\\.|[^"'\n\\])+""",
    rf"""(?i)((?:{SECRET_NAMES})["']?\s*[\s:=]\s*){SECRET_VALUE}""",
    r"""(?i)((?:^|\s)(?:-u|--user)[\s=]*["']?)[^\s"':]+:[^\s"']+""",
    r"""(\w://)[^\s"'/@]+(?=@)""",  # the user of a URL, and its query
    r"""(\w://[^\s"'?]*\?)[^\s"']+""",
    r"""(://hooks\.[^\s"'/]+/)[^\s"']+""",
    r"""()\b(?:gh[a-z]_|github_pat_|glpat-|sk-|hf_|xox[a-z]-|AKIA|eyJ)[\w.-]{12,}""",
    r"""()\b(?=[A-Za-z+]*\d)(?=\d*[A-Za-z])[A-Za-z0-9+]{20,}={0,2}""",  # a long word of letters and digits
)


def redact_secrets(text: str) -> str:
    """Return the text without what looks like a key, a token, a password, or a URL with credentials or a signature."""
    for pattern in SECRET_PATTERNS:
        text = re.sub(pattern, rf"\1{REDACTED}", text)
    return text


def redact_config(config: TrainingConfig) -> dict[str, Any]:
    """The config as it is written to files."""
    settings = config.to_dict()
    settings["on_checkpoint"] = redact_secrets(config.on_checkpoint)  # extra: companions
    return settings
