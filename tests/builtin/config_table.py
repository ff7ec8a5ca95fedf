# extra: template
"""Write the table of all config fields into docs/configuration.md: python tests/builtin/config_table.py"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config import SETTINGS
from utils.settings.value_types import to_text

PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- config table: made from config.py -->", "<!-- end of config table -->"


def table() -> str:
    """A table per group, one row per field of TrainingConfig: flag, default, meaning, and whether a resume may change
    it."""
    lines, group = [], ""
    for setting in SETTINGS:
        if setting.group != group:
            group = setting.group
            lines += ["", f"### {group}", "", "| flag | default | meaning | on resume |", "|---|---|---|---|"]
        default = to_text(setting.default)
        default = f"`{default}`" if default else ""
        lines.append(f"| `--{setting.name}` | {default} | {setting.help_with_choices} | {setting.resume} |")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
