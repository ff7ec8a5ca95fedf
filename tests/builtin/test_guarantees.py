# extra: template
"""Each promise of docs/guarantees.md has a test of the default run, and each marker of a test has a promise."""

import re

from guarantees import GUARANTEES, PAGE, collect, marked, read_failures
from utils.settings.deleted_extras import read_deleted_extras


def test_each_key_of_the_page_has_a_default_test_and_each_marker_a_key_of_the_page(request):
    keys = [row.key for row in GUARANTEES]
    marks = marked(request.config.collected)
    if not {key for key, kind, _ in marks if kind == "default"}.issuperset(keys):
        marks = collect()  # pytest was started on some tests only
    checked = {key for key, kind, _ in marks if kind == "default"}
    assert [key for key in keys if key not in checked] == [], "no default test carries these keys in a marker"
    assert len(set(keys)) == len(keys)
    if not read_deleted_extras():  # with which rows of the page go
        assert [words for words in marks if words[0] not in keys] == [], "a marker's key is not on docs/guarantees.md"
        assert len(keys) > 70


# the figures of a promise: names in code, digits, and numbers in words
FIGURES = re.compile(r"`[^`]+`|\b\d+(?:\.\d+)?\b|\b(?:half|five|ten|an hour|a minute)\b")


def test_docs_fault_tolerance_has_a_section_for_each_failure_with_the_figures_of_its_promise():
    failures = read_failures(PAGE.read_text(encoding="utf-8"))
    promised = {row.key: row for row in GUARANTEES if row.section == "What a run survives"}
    assert promised.keys() - failures.keys() == set(), "a row of the table in docs/fault-tolerance.md is missing"
    assert failures.keys() - {row.key for row in GUARANTEES} == set()
    assert len(promised) > 20 or read_deleted_extras()
    for key, row in promised.items():
        section, marker = failures[key]
        assert marker == row.marker, key
        words = " ".join(section.split())
        figures = FIGURES.findall(row.promise)
        missing = [figure for figure in figures if not re.search(rf"(?i)(?<!\w){re.escape(figure)}(?!\w)", words)]
        assert missing == [] or read_deleted_extras(), f"{key}: {missing}"
