"""For the tests of the run folder."""

import pytest

from config import TrainingConfig


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Of a run below the current folder, which is the test's own."""
    monkeypatch.chdir(tmp_path)
    return TrainingConfig(run_dir="runs/mine")
