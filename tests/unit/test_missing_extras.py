"""Optional functions of model.py that a fork without an extra does not call."""

import pytest

from config import UserError
from utils.training import seams


class Fork:
    @staticmethod
    def later(batch):
        """Of an extra that this code does not have."""

    create_model = param_groups = compute_loss = later


def test_a_function_of_an_extra_that_was_deleted_is_refused(monkeypatch):
    assert seams.Seams.of(Fork)
    monkeypatch.setitem(seams.OF_EXTRAS, "later", "tomorrow")
    with pytest.raises(UserError, match="model.py: has later, but this fork has no extra tomorrow; see docs/extras.md"):
        seams.Seams.of(Fork)
