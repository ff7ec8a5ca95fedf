"""The settings of the extras that scripts/remove_extras.sh has deleted from this fork."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT_FILE = Path(__file__).resolve().parents[2] / "pyproject.toml"


@functools.cache
def read_deleted_extras() -> dict[str, dict[str, Any]]:
    """The default of each setting by its name, by extra."""
    if not PYPROJECT_FILE.exists():
        return {}
    project = tomllib.loads(PYPROJECT_FILE.read_text(encoding="utf-8"))
    return project.get("tool", {}).get("extras", {}).get("without", {})
