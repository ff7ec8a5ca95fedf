"""Each misconfiguration of the table is caught by what the table says, within 30 s, with the node named and what to do."""

import os
import re
import time

import pytest

from misconfigurations import BEGIN, END, TABLE, Setup, markdown
from nodes import Nodes
from ranks import ROOT, finish

SECONDS = 30.0


def text(program):
    """What it has printed so far, without the host and rank that begin each line."""
    printed = "".join(os.pread(file.fileno(), 2**22, 0).decode(errors="replace") for file in program.files)
    return re.sub(r"^\[node\d \d\] ?", "", printed, flags=re.MULTILINE)


def sayers(programs, row):
    """The programs that have printed the row's words, each with that line and a table that may follow."""
    matches = [(re.search(f"^.*{row.pattern.pattern}.*\\n(.*\\n){{0,2}}", text(program), re.MULTILINE), program) for program in programs]
    return [(match[0], program) for match, program in matches if match]


@pytest.mark.misconfiguration
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name.replace(" ", "-"))
def test_it_is_caught_in_time_with_the_node_and_what_to_do(row, tmp_path, request):
    if row.code == 0 and not request.config.getoption("drills"):
        pytest.skip("it measures speed, which other programs of this machine disturb: by itself, with --drills")
    with Nodes(row.nodes) as nodes:
        setup = Setup(nodes, tmp_path)
        row.condition(setup)
        programs, ends = setup.start(*(["--preflight"] if row.by == "preflight" else [])), time.monotonic() + SECONDS
        is_going, is_named, found = True, False, []
        while not is_named and is_going and time.monotonic() < ends:
            is_going = any(program.poll() is None for program in programs)
            found = sayers(programs, row)
            is_named = any(all(word in said for word in row.of.split()) for said, _ in found)
            time.sleep(0.05)
        assert is_named, f"not said: {row.pattern.pattern}, {row.of}\n" + "\n--------\n".join(map(text, programs))
        assert all("; " in said for said, _ in found), found
        ends = time.monotonic() + SECONDS
        while row.code is not None and all(program.poll() is None for _, program in found) and time.monotonic() < ends:
            time.sleep(0.05)
        assert row.code in [program.poll() for _, program in found], found


@pytest.mark.parametrize("command", [[], ["--preflight"]], ids=["train", "preflight"])
def test_nothing_is_found_where_nothing_is_wrong(command, tmp_path):
    """None of the words of the table is said where its condition does not hold."""
    with Nodes(2) as nodes:
        for ended in [finish(program) for program in Setup(nodes, tmp_path).start(*command)]:
            assert ended.code == 0, ended.text
            said = [
                row.name for row in TABLE if row.code != 0 and row.pattern.search(ended.text)
            ]  # 0: of speed, and this machine may be busy
            assert not said, ended.text


def test_the_readmes_troubleshooting_is_this_table():
    readme = (ROOT / "README.md").read_text()
    assert readme.partition(BEGIN)[2].partition(END)[0].strip() == markdown(TABLE), "put in what python tests/misconfigurations.py prints"
