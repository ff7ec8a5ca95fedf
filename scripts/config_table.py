"""Write the table of all config fields into README.md, between its two marks: python scripts/config_table.py"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import TrainingConfig, help_of

BEGIN, END = "<!-- config table: made by scripts/config_table.py -->", "<!-- end of config table -->"


def table() -> str:
    """A row for each field of TrainingConfig: flag, default, what it means, whether a resumed run may change it."""
    rows = ["| flag | default | meaning | on resume |", "|---|---|---|---|"]
    for field in dataclasses.fields(TrainingConfig):
        default = "" if field.default == "" else f"`{field.default}`"
        rows.append(f"| `--{field.name}` | {default} | {help_of(field)} | {field.metadata['resume']} |")
    return "\n".join(rows)


def main() -> None:
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
