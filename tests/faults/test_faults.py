# extra: template
"""Faults injected into real runs: each must end as docs/fault-tolerance.md describes. --all runs every row."""

import importlib
from pathlib import Path

import pytest

from drill import FAULTS, Drill
from ranks import ROOT
from utils.settings.deleted_extras import read_deleted_extras

for path in sorted(Path(__file__).parent.glob("*.py")):
    if path.stem not in ("drill", "test_faults"):
        importlib.import_module(path.stem)  # adds its rows to FAULTS


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


def test_the_table_of_the_docs_has_a_row_for_each_fault_and_each_group_a_default_fault():
    lines = (ROOT / "docs/fault-tolerance.md").read_text().splitlines()
    lines = lines[lines.index("## Injected faults") :]
    rows = [
        [cell.strip() for cell in line.partition("<!--")[0].strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ][2:]
    assert sorted((group, kind, default) for group, kind, _, _, default in rows) == sorted(
        (fault.group, fault.kind, "yes" if fault.is_default else "") for fault in FAULTS
    )
    defaults = {fault.group for fault in FAULTS if fault.is_default}
    assert read_deleted_extras() or defaults == {fault.group for fault in FAULTS}
