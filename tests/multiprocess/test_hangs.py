"""Each of 4 ranks is stopped in each phase of training: the right one is named, once and in time, and the run goes on to the same bits."""

import pytest

from drill import Drill
from standstills import PHASES, stop_and_see, undisturbed

RANKS = range(4)


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("unstopped") / "run", len(RANKS))


@pytest.mark.fault
@pytest.mark.parametrize("phase", PHASES)
def test_a_stopped_rank_is_named(phase, tmp_path, unstopped):
    drill = Drill(tmp_path, seed=phase)
    try:
        stop_and_see(drill, [(phase, rank) for rank in RANKS])
    finally:
        drill.close()
    drill.is_like(unstopped)
