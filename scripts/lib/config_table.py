"""Write the table of all config fields into README.md: python scripts/lib/config_table.py"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config import TrainingConfig, help_of

BEGIN, END = "<!-- config table: made by scripts/lib/config_table.py -->", "<!-- end of config table -->"


def table() -> str:
    """One row per field of TrainingConfig: flag, default, meaning, and whether a resumed run may change it."""
    rows = ["| flag | default | meaning | on resume |", "|---|---|---|---|"]
    for field in dataclasses.fields(TrainingConfig):
        default = "" if field.default == "" else f"`{field.default}`"
        rows.append(f"| `--{field.name}` | {default} | {help_of(field)} | {field.metadata['resume']} |")
    return "\n".join(rows)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
