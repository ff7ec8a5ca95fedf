"""Each misconfiguration of the table is caught by what the table says, in time, with the node named and what to do."""

import os
import re
import time

import pytest

from misconfigurations import BEGIN, END, TABLE, Setup
from nodes import Nodes
from ranks import ROOT, finish

SECONDS = 120.0  # it takes less than 30 on a quiet machine; another program may keep the cores busy
ROWS = {row.name: row for row in TABLE}
DEFAULT = [  # two of each that catches them; those of one cell are set up together
    ("own name on loopback",),
    ("other number of nodes",),
    ("other code", "other settings"),
    ("clock off", "small shared memory"),
]
CASES = [*DEFAULT, *((name,) for name in ROWS if not any(name in names for names in DEFAULT))]


def text(program):
    """What it has printed so far, without the host and rank that begin each line."""
    printed = "".join(os.pread(file.fileno(), 2**22, 0).decode(errors="replace") for file in program.files)
    return re.sub(r"^\[node\d \d\] ?", "", printed, flags=re.MULTILINE)


def sayers(programs, row):
    """The programs that have printed the row's words, each with that line and a table that may follow."""
    matches = [
        (re.search(f"^.*{row.pattern.pattern}.*\\n(.*\\n){{0,3}}", text(program), re.MULTILINE), program)
        for program in programs
    ]
    return [(match[0], program) for match, program in matches if match]


def is_named(found, row):
    return any(all(word in said for word in row.of.split()) for said, _ in found)


def marks(names):
    if names in DEFAULT:
        return []
    return [pytest.mark.slow, *([pytest.mark.alone] if ROWS[names[0]].code == 0 else [])]  # 0: a warning about speed


@pytest.mark.parametrize("names", [pytest.param(names, id="+".join(names), marks=marks(names)) for names in CASES])
def test_it_is_caught_in_time_with_the_node_and_what_to_do(names, tmp_path):
    rows = [ROWS[name] for name in names]
    with Nodes(rows[0].nodes) as nodes:
        setup = Setup(nodes, tmp_path)
        for row in rows:
            row.condition(setup)
        programs, ends = (
            setup.start(*(["--preflight"] if rows[0].by == "preflight" else [])),
            time.monotonic() + SECONDS,
        )
        is_going, found = True, {}
        while is_going and time.monotonic() < ends:
            time.sleep(0.05)
            found = {row: sayers(programs, row) for row in rows}
            is_going = any(program.poll() is None for program in programs) and not all(
                is_named(found[row], row) for row in rows
            )
        for row in rows:
            assert is_named(found[row], row), f"not said: {row.pattern.pattern}, {row.of}\n" + "\n--------\n".join(
                map(text, programs)
            )
            assert all("; " in said for said, _ in found[row]), found
        ends, speakers = time.monotonic() + SECONDS, [program for row in rows for _, program in found[row]]
        while (
            rows[0].code is not None and all(program.poll() is None for program in speakers) and time.monotonic() < ends
        ):
            time.sleep(0.05)
        assert rows[0].code in [program.poll() for program in speakers], found


@pytest.mark.slow
def test_preflight_finds_nothing_where_nothing_is_wrong(tmp_path):
    """None of the table's sentences; test_two_nodes.py has the same for training."""
    with Nodes(2) as nodes:
        for ended in [finish(program) for program in Setup(nodes, tmp_path).start("--preflight")]:
            assert ended.code == 0, ended.text
            # 0: of speed
            assert not [row.name for row in TABLE if row.code != 0 and row.pattern.search(ended.text)], ended.text


def test_the_readmes_troubleshooting_has_these_rows():
    rows = re.findall(
        r"^\| `(.+?)` \| .+ \|$", (ROOT / "README.md").read_text().partition(BEGIN)[2].partition(END)[0], re.MULTILINE
    )
    assert rows == list(dict.fromkeys(row.sees for row in TABLE))
