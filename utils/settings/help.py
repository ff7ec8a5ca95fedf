"""The text of `--help`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from utils.settings.fields import Setting
from utils.settings.value_types import to_text

USAGE = """usage: torchrun --standalone --nproc-per-node=N train.py [flags]   (or: python train.py [flags])

Flags may be written with _ or -. They override the --config file, which overrides the defaults in [brackets].

general:
  --help [all]                show the flags that most runs use, or all flags, and exit
  --config FILE               read settings from a TOML or YAML file, or from a run's config.json
  --print_config              print all settings as TOML, and exit"""
EXAMPLES = """
examples:
  torchrun --standalone --nproc-per-node=2 train.py --epochs 5
  torchrun --standalone --nproc-per-node=8 train.py --run_dir runs/first --resume_from auto
  python train.py --config runs/default/config.json --eval_only"""


def format_help(settings: Iterable[Setting], shows_rare: bool) -> str:
    """The flags by group, with help and default; without the rare ones if not `shows_rare`."""
    lines = [USAGE]
    group = ""
    left_out = 0
    for setting in settings:
        if setting.is_rare and not shows_rare:
            left_out += 1
            continue
        if setting.group != group:
            group = setting.group
            lines += ["", f"{group}:"]
        lines += _format_setting(setting)
    lines.append(EXAMPLES)
    if left_out:
        lines.append(f"\n--help all shows the other {left_out} flags.")
    return "\n".join(lines)


def _format_setting(setting: Setting) -> list[str]:
    flag = f"--{setting.name} {setting.placeholder}"
    default = to_text(setting.default)
    if setting.value_type.is_bool:
        flag = f"--[no-]{setting.name}"
        default = "on" if setting.default else "off"
    text = f"  {flag:27} {setting.help_with_choices}"
    if default:
        text += f" [{default}]"
    return textwrap.wrap(text, 120, subsequent_indent=" " * 30)
