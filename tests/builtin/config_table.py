# extra: template
"""Write the table of all config fields into docs/configuration.md: python tests/builtin/config_table.py"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from config import SETTINGS
from lib.remove_extras import EXTRAS_PAGE, PROJECT_FILE, delete_from_files, read_files, replace_record
from utils.settings.fields import Setting
from utils.settings.value_types import to_text

PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- config table: made from config.py -->", "<!-- end of config table -->"
PRINT_HELP = "import config, json; print(json.dumps({s.name: s.help_with_choices for s in config.SETTINGS}))"


def table() -> str:
    """A table per group, one row per field of TrainingConfig: flag, default, meaning, and whether a resume may change
    it. A field whose meaning depends on an extra has a second row, which goes with the extra."""
    lines, group = [], ""
    extras = sorted(path.parent.name for path in ROOT.glob("utils/extras/*/settings.py"))
    helps = {extra: read_help_without(extra) for extra in extras}
    for setting in SETTINGS:
        if setting.group != group:
            group = setting.group
            lines += ["", f"### {group}", "", "| flag | default | meaning | on resume |", "|---|---|---|---|"]
        whole_meaning = meaning = setting.help_with_choices
        rows_with_extra = []
        for extra in extras:
            if helps[extra].get(setting.name, whole_meaning) != whole_meaning:
                meaning = helps[extra][setting.name]
                with_extra = row(setting, f" with `{extra}`", whole_meaning)
                rows_with_extra.append(f"{with_extra}<!-- extra: {extra} -->")
        lines += [row(setting, "", meaning), *rows_with_extra]
    return "\n".join(lines).strip()


def row(setting: Setting, condition: str, meaning: str) -> str:
    default = to_text(setting.default)
    default = f"`{default}`" if default else ""
    return f"| `--{setting.name}`{condition} | {default} | {meaning} | {setting.resume} |"


def read_help_without(extra: str) -> dict[str, str]:
    """What `--help` says about each setting in a fork that has deleted this extra."""
    files = {
        name: text
        for name, text in read_files(ROOT).items()
        if name in ("config.py", PROJECT_FILE) or name.startswith(("utils/settings/", "utils/extras/"))
    }
    left, fields = delete_from_files(files | {EXTRAS_PAGE: ""}, {extra})
    left[PROJECT_FILE] = replace_record(left[PROJECT_FILE], fields)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in left.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return json.loads(subprocess.check_output([sys.executable, "-P", "-c", PRINT_HELP], env={"PYTHONPATH": folder}))


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
