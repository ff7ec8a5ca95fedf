# extra: template
"""Faults injected into real runs: each must end as tests/faults/README.md describes. --all injects all of them."""

import importlib
import re
from pathlib import Path

import pytest

from drill import FAULTS, Drill
from ranks import ROOT
from utils.settings.deleted_extras import read_deleted_extras

for path in sorted(Path(__file__).parent.glob("*.py")):
    if path.stem not in ("drill", "test_faults"):
        importlib.import_module(path.stem)  # adds its faults to FAULTS


def parameter(fault):
    marks = [] if fault.is_default else [pytest.mark.slow]
    if fault.guarantees:
        marks.append(pytest.mark.guarantee(*fault.guarantees.split()))
    return pytest.param(fault, id=fault.kind.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("fault", [parameter(fault) for fault in FAULTS])
def test_fault(fault, tmp_path):
    drill = Drill(tmp_path, seed=fault.kind)
    try:
        fault.drill(drill)
    finally:
        drill.ends.close()


def test_the_page_describes_each_fault_in_its_group_and_each_group_has_a_default_fault():
    page = (ROOT / "tests/faults/README.md").read_text(encoding="utf-8")
    _, *groups = re.split(r"^## `(\w+)\.py`$", page, flags=re.MULTILINE)
    described = []
    for file, text in zip(groups[::2], groups[1::2], strict=True):
        for name, default in re.findall(r"\*\*(.+?)\*\*( \(default\))?", " ".join(text.split())):
            described.append((file.replace("_", "-"), name, bool(default)))
    assert sorted(described) == sorted((fault.group, fault.kind, fault.is_default) for fault in FAULTS)
    defaults = {fault.group for fault in FAULTS if fault.is_default}
    assert read_deleted_extras() or defaults == {fault.group for fault in FAULTS}
