# extra: template
"""Each promise of docs/guarantees.md has a test of the default run, and each marker of a test has a promise."""

from guarantees import BEGIN, END, GUARANTEES, PAGE, collect, marked, written
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


def test_the_table_of_docs_fault_tolerance_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(text), "python tests/guarantees.py renews it"
    assert text.count(BEGIN) == text.count(END) == 1
