"""Each promise of docs/guarantees.md has a test of the default run."""

import re
import subprocess
import sys

from guarantees import BEGIN, END, GUARANTEES, PAGE, written
from ranks import ROOT

LISTING = """
import pytest

class Listing:
    def pytest_collection_finish(self, session):
        for kind, name in session.config.collected:
            print(kind, name)

words = "--all --collect-only -qq -p no:cacheprovider -p no:xdist".split()
raise SystemExit(pytest.main(words, plugins=[Listing()]))
"""


def names_of(collected):
    """Their names by kind: a row may name a function for all its parameters."""
    found = {"default": set(), "slow": set()}
    for kind, name in collected:
        found[kind] |= {name, name.partition("[")[0]}
    return found


def test_each_guarantee_has_a_default_test_and_every_named_test_exists(request):
    found = names_of(request.config.collected)
    if not all(found["default"].issuperset(row.tests) and found["slow"].issuperset(row.slow) for row in GUARANTEES):
        # pytest was started on some tests only
        ended = subprocess.run([sys.executable, "-c", LISTING], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = names_of(re.findall(r"^(default|slow) (\S+)", ended.stdout, re.M))
    for row in GUARANTEES:
        assert row.tests, f"{row.key}: has no default test"
        assert [test for test in row.tests if test not in found["default"]] == [], f"{row.key}: not in the default run"
        assert [test for test in row.slow if test not in found["slow"]] == [], f"{row.key}: not among the slow tests"
    keys = [row.key for row in GUARANTEES]
    assert len(set(keys)) == len(keys) > 70


def test_the_table_of_docs_fault_tolerance_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(text), "python tests/guarantees.py renews it"
    assert text.count(BEGIN) == text.count(END) == 1
