"""Each misconfiguration of the table is caught by what the table says, within 30 s, with the node named and what to do."""

import os
import time

import pytest

from misconfigurations import BEGIN, END, TABLE, Setup, markdown
from nodes import Nodes
from ranks import ROOT, finish

SECONDS = 30.0


def text(program):
    return "".join(os.pread(file.fileno(), 2**22, 0).decode(errors="replace") for file in program.files)


def listen(programs, row, seconds):
    """The first line that has the row's words, and the program that printed it; in so many seconds, or until all have ended."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        have_ended = all(program.poll() is not None for program in programs)
        for program in programs:
            for line in text(program).splitlines():
                if row.pattern.search(line):
                    return line, program
        if have_ended:
            break
        time.sleep(0.05)
    pytest.fail(f"{row.pattern.pattern!r} is not said\n" + "\n--------\n".join(map(text, programs)))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name.replace(" ", "-"))
def test_it_is_caught_in_time_with_the_node_and_what_to_do(row, tmp_path):
    with Nodes(row.nodes) as nodes:
        setup = Setup(nodes, tmp_path)
        row.condition(setup)
        programs = setup.start(*(["--preflight"] if row.by == "preflight" else []))
        line, program = listen(programs, row, SECONDS)
        said, _, remedy = line.partition("; ")
        assert row.of in said and remedy, line
        if row.code is None:
            assert program.poll() is None
        else:
            assert finish(program, SECONDS).code == row.code


@pytest.mark.parametrize("command", [[], ["--preflight"]], ids=["train", "preflight"])
def test_nothing_is_found_where_nothing_is_wrong(command, tmp_path):
    """None of the words of the table is said where its condition does not hold."""
    with Nodes(2) as nodes:
        for ended in [finish(program) for program in Setup(nodes, tmp_path).start(*command)]:
            assert ended.code == 0, ended.text
            assert not [row.name for row in TABLE if row.pattern.search(ended.text)], ended.text


def test_the_readmes_troubleshooting_is_this_table():
    readme = (ROOT / "README.md").read_text()
    assert readme.partition(BEGIN)[2].partition(END)[0].strip() == markdown(TABLE), "put in what python tests/misconfigurations.py prints"
