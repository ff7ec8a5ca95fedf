# extra: launcher and template
"""Each misconfiguration of the table is reported in time, with the node and a fix."""

import os
import re

import pytest

from misconfigurations import BEGIN, END, TABLE, Setup
from nodes import Nodes
from ranks import ROOT, finish
from training import wait_until

SECONDS = 120.0  # less than 30 on a quiet machine
ROWS = {row.name: row for row in TABLE}
DEFAULT = ("own name on loopback",)
TOGETHER = ("other code", "other settings")  # set up together
CASES = [DEFAULT, TOGETHER, *((name,) for name in ROWS if name not in (*DEFAULT, *TOGETHER))]


def text(program):
    """The output so far, without the host and rank that begin each line."""
    printed = "".join(os.pread(file.fileno(), 2**22, 0).decode(errors="replace") for file in program.files)
    return re.sub(r"^\[node\d \d\] ?", "", printed, flags=re.MULTILINE)


def marks(names):
    if names == DEFAULT:
        return []
    return [pytest.mark.slow, *([pytest.mark.alone] if ROWS[names[0]].code == 0 else [])]  # 0: a warning about speed


@pytest.mark.guarantee("misconfigured")
@pytest.mark.parametrize("names", [pytest.param(names, id="+".join(names), marks=marks(names)) for names in CASES])
def test_a_misconfiguration_is_reported_in_time_with_the_node_and_a_fix(names, tmp_path):
    rows = [ROWS[name] for name in names]
    code = rows[0].code
    with Nodes(rows[0].nodes) as nodes:
        setup = Setup(nodes, tmp_path)
        for row in rows:
            row.condition(setup)
        programs = setup.start(*(["--preflight"] if rows[0].by == "preflight" else []))

        def speakers():
            return [[program for program in programs if row.is_in(text(program))] for row in rows]

        def is_over():
            has_ended = all(program.poll() is not None for program in programs)
            return all(speakers()) or has_ended

        wait_until(is_over, SECONDS)
        assert all(speakers()), f"{names}:\n" + "\n--------\n".join(map(text, programs))
        if code is not None:
            wait_until(lambda: code in [program.poll() for group in speakers() for program in group], SECONDS)


@pytest.mark.guarantee("misconfigured")  # extra: preflight
@pytest.mark.slow
def test_preflight_finds_nothing_on_correct_nodes(tmp_path):
    """test_two_nodes.py checks the same for training."""
    with Nodes(2) as nodes:
        for ended in [finish(program) for program in Setup(nodes, tmp_path).start("--preflight")]:
            assert ended.code == 0, ended.text
            names = [row.name for row in TABLE if row.code != 0 and row.is_in(ended.text, is_named=False)]  # 0: speed
            assert not names, ended.text


def test_docs_troubleshooting_has_these_messages():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.partition(BEGIN)[2].partition(END)[0]
    assert re.findall(r"^### `(.+)`$", section, re.MULTILINE) == list(dict.fromkeys(row.sees for row in TABLE))
