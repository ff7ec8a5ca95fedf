# extra: benchmark
"""The search of benchmark.py --find-batch and what it prints."""

from dataclasses import dataclass

import pytest

from lib.benchmark.find_batch import FITS, TOO_LARGE, Trial, describe_result, search_largest_size


@dataclass
class Machine:
    """Memory use: a fixed part and one unit per sample. bend: extra memory per sample in large micro-batches."""

    memory: int
    bend: float = 0.0
    tried: int = 0

    def __call__(self, size):
        self.tried += 1
        needs = int(1_000 + size + self.bend * size**1.5)
        return Trial(size, FITS, needs, 0.1) if needs <= self.memory else Trial(size, TOO_LARGE)


@pytest.mark.parametrize(("memory", "bend"), [(1_005, 0.0), (5_000, 0.05), (100_000, 0.05)])
def test_the_search_comes_within_5_percent(memory, bend):
    machine = Machine(memory, bend)
    best = max(
        candidate.size for candidate in search_largest_size(machine, 32, 1_000_000, str) if candidate.outcome == FITS
    )
    right = max(size for size in range(1, memory) if Machine(memory, bend)(size).outcome == FITS)
    assert best <= right <= best * 1.05 + 1
    assert machine.tried <= 20


def test_the_search_ends_if_not_one_sample_fits_and_if_the_whole_set_does():
    trials = search_largest_size(Machine(999), 32, 500, str)
    assert trials[-1].size == 1 and "Not one sample fits. Give" in describe_result("as given", trials, 500, 64, 1)[0]
    trials = search_largest_size(Machine(10**9), 32, 500, str)
    assert (
        trials[-1].size == 500
        and "This is the whole training set." in describe_result("as given", trials, 500, 64, 1)[1]
    )


@pytest.mark.parametrize(
    ("global_batch", "largest", "ranks", "size"),
    [(512, 744, 1, 512), (512, 744, 2, 256), (96, 50, 5, 16), (60, 7, 4, 5), (4, 9, 8, 1)],
)
def test_the_flags_keep_the_global_batch(global_batch, largest, ranks, size):
    lines = describe_result("as given", [Trial(largest, FITS, 2**30, 0.5)], 10_000, global_batch, ranks)
    assert f"  --batch_size {size} --global_batch_size {global_batch}" in lines[-1]


def test_a_budget_of_tokens_is_answered_in_tokens():
    trial = Trial(2000, FITS, 2**30, 0.5, "token")
    assert str(trial) == "2,000 tokens: fits, 1.00 GiB, 0.5 s per micro-batch"
    lines = describe_result("as given", [trial], 10_000, 8_000, 2)
    assert "2,000 tokens" in lines[0] and "4,000.0 tokens/s" in lines[0]
    assert lines[-1] == "  --batch_tokens 2000 --global_batch_size 8000"
    assert describe_result("as given", [trial], 10_000, 8_000, 2, longest_sample=2001)[-1].endswith(" --too_long alone")
    assert describe_result("as given", [trial], 10_000, 0, 2)[-1] == "  --batch_tokens 2000"
