"""The table of faults (tests/faults): each row's fault is injected into a real run, whose end is the one that the row promises."""

import pytest

from drill import GROUPS, Drill
from table import FAULTS

LEAST = {"processes": 8, "start-up": 5, "storage": 9, "data": 6, "numbers": 5, "time": 4, "strangers": 3}


@pytest.mark.fault
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind.replace(" ", "-"))
def test_fault(fault, tmp_path, record_property):
    drill = Drill(tmp_path, seed=fault.kind)
    try:
        figure = fault.drill(drill)
    finally:
        drill.close()
    record_property("fault", (fault.group, fault.kind, fault.end, f"{figure:g} {fault.figure}"))


def test_the_table_has_forty_kinds_in_its_groups():
    kinds = [fault.kind for fault in FAULTS]
    assert len(set(kinds)) == len(kinds) >= 40
    assert {group: sum(fault.group == group for fault in FAULTS) >= least for group, least in LEAST.items()} == dict.fromkeys(GROUPS, True)
    for fault in FAULTS:
        assert fault.injection and fault.end and fault.figure
