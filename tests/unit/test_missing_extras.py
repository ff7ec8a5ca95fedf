"""Optional functions of model.py that a fork without an extra does not call."""

import pytest

from utils.settings.errors import UserError
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


def test_a_loss_that_asks_for_progress_is_refused_without_it():
    class Asks(Fork):
        @staticmethod
        def compute_loss(model, batch, progress=None):
            """Of a fork that has deleted `steps`."""

    if "progress" in seams.Seams.__dataclass_fields__:
        assert seams.Seams.of(Asks).compute_loss is not Asks.compute_loss
    else:
        with pytest.raises(UserError, match="compute_loss asks for progress, but this fork has no extra steps; see"):
            seams.Seams.of(Asks)
