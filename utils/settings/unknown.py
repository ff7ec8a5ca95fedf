"""What is answered to the name of a setting that there is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from pathlib import Path

from utils.settings.deleted_extras import deleted_extras
from utils.settings.removed import REMOVED

ELSEWHERE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"  # names of flags in other trainers
OF_TORCHRUN = """nproc_per_node nnodes node_rank master_addr master_port max_restarts local_rank world_size gpus devices
num_nodes"""


def answer_unknown(word: str, known: Collection[str]) -> str:
    """The error message for an unknown flag or config file key."""
    dashes, name = "--" * word.startswith("-"), word.split("=")[0].lstrip("-").replace("-", "_")
    if name in OF_TORCHRUN.split():
        return f"{word}: is not known; start the ranks with torchrun: torchrun --standalone --nproc-per-node=N train.py"
    if name in REMOVED:
        return f"{word} was removed. {REMOVED[name].instead}"
    names = [*known]
    if extra := next((extra for extra, fields in deleted_extras().items() if name.removeprefix("no_") in fields), ""):
        return f"{word}: this fork has no extra {extra}; see docs/extras.md"
    here = of_another_trainer(name, names)
    if here == "":
        return f'{word}: is not a flag of this fork; add a field to the block "yours" of config.py, or leave it out'
    close = re.findall(r"^`--(\w+)", here or "") or difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if here and not here.startswith("`--"):
        advice = re.sub(r"\[(.*?)\]\((.*?)\)", r"\1 (docs/\2)", here.replace("`", ""))
        return f"{word}: is not a flag here; {advice}"
    return f"{word}: is not known; " + (f"did you mean {dashes}{close[0]}?" if close else "see --help for all flags")


def of_another_trainer(name: str, names: Collection[str]) -> str | None:
    """What docs/coming-from.md says about a flag of another trainer: the flag here, or what to do; None if nothing.

    names: of the flags here. What the page says about others is left out: a fork may have deleted its fields.
    """
    page = ELSEWHERE.read_text(encoding="utf-8") if ELSEWHERE.exists() else ""
    for there, here in re.findall(r"^\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE):
        if name in re.findall(r"`_+(\w+)`", there.replace("-", "_")):
            parts = here.strip().split("; ")
            return "; ".join(part for part in parts if {*re.findall(r"`--(?:no-)?(\w+)", part)} <= {*names})
    return None
