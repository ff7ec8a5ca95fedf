"""scripts/test.sh --fork: the tests that must pass in any fork, run in forks of this repository."""

import re
import subprocess
import sys

import pytest

from ranks import launch
from test_recipes import Fork

# the normalisation differs; the network keeps its name, so that the rest of the file need not change
NO_BATCH_NORM = ("nn.BatchNorm2d(", "nn.GroupNorm(1, ")


def text_fork(folder):
    return Fork(folder, "text").folder


def fork_without_batch_norm(folder):
    fork = Fork(folder, "vision_transformer").folder
    model = fork / "model.py"
    text = model.read_text()
    assert NO_BATCH_NORM[0] in text
    model.write_text(text.replace(*NO_BATCH_NORM))
    return fork


def test_the_fork_suite_is_collected_in_a_fork(tmp_path):
    """Nothing outside tests/builtin imports names that only the shipped model.py and dataset.py have."""
    fork = text_fork(tmp_path)
    words = (
        "-m pytest -q -p no:cacheprovider -p no:xdist --collect-only tests/faults tests/distributed tests/unit".split()
    )
    ended = subprocess.run([sys.executable, *words], cwd=fork, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout
    assert int(re.search(r"(\d+)(?:/\d+)? tests collected", ended.stdout)[1]) > 500


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("make", [text_fork, fork_without_batch_norm])
def test_the_fork_suite_passes_in_a_fork(tmp_path, make):
    fork = make(tmp_path)
    subprocess.run(["git", "add", "-A"], cwd=fork, check=True)  # as in a clone
    ended = launch(["scripts/test.sh", "--fork"], cwd=fork, deadline=1800)
    assert ended.code == 0, ended.text
