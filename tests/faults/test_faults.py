"""Faults that are injected into real runs: each must end as its row says (drill.fault). With --all every row, and a
scoreboard."""

import pytest

import checkpoints  # noqa: F401 - these modules add their rows to FAULTS
import data  # noqa: F401
import hangs  # noqa: F401
import numerics  # noqa: F401
import owners  # noqa: F401
import processes  # noqa: F401
import start_up  # noqa: F401
import stopping  # noqa: F401
import storage  # noqa: F401
import timing  # noqa: F401
from drill import FAULTS, Drill


def parameter(fault):
    return pytest.param(fault, id=fault.kind.replace(" ", "-"), marks=() if fault.is_default else pytest.mark.slow)


@pytest.mark.parametrize("fault", [parameter(fault) for fault in FAULTS])
def test_fault(fault, tmp_path, record_property):
    drill = Drill(tmp_path, seed=fault.kind)
    try:
        figure = fault.drill(drill)
    finally:
        drill.ends.close()
    record_property("fault", (fault.group, fault.kind, fault.end, f"{figure:g} {fault.figure}"))


def test_each_kind_is_one_row_and_each_group_has_a_default_row():
    assert len({fault.kind for fault in FAULTS}) == len(FAULTS) >= 40
    assert {fault.group for fault in FAULTS if fault.is_default} == {fault.group for fault in FAULTS}
