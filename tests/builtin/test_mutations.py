# extra: template
"""The one-line faults of tests/mutations.py still match the code. `scripts/test.sh --mutations` runs the tests."""

import ast

import pytest

from guarantees import GUARANTEES
from mutations import MUTATIONS, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.breaks}-{mutation.where}")
def test_each_mutation_changes_one_line_and_is_valid_python(mutation):
    path, text = mutated(mutation)
    ast.parse(text)
    assert text != path.read_text(encoding="utf-8")


def test_there_are_forty_mutations_of_known_guarantees():
    assert len(set(MUTATIONS)) == len(MUTATIONS) >= 40
    assert {mutation.breaks for mutation in MUTATIONS} <= {row.key for row in GUARANTEES}
