"""The search of scripts/benchmark.py --find-batch, on a machine that is a formula."""

from dataclasses import dataclass

import pytest

from benching import find_batch


@dataclass
class Machine:
    """Needs 1,000 and 1 per sample. bend: what a sample needs beside that in large micro-batches."""

    memory: int
    bend: float = 0.0
    tried: int = 0

    def __call__(self, size):
        self.tried += 1
        needs = int(1_000 + size + self.bend * size**1.5)
        if needs > self.memory:
            return find_batch.Trial(size, find_batch.UNFIT)
        return find_batch.Trial(size, find_batch.FIT, needs, 0.1)


@pytest.mark.parametrize("is_costly", [False, True])
@pytest.mark.parametrize(("memory", "bend"), [(1_005, 0.0), (5_000, 0.05), (100_000, 0.05)])
def test_the_search_comes_within_5_percent(memory, bend, is_costly):
    machine = Machine(memory, bend)
    trials = find_batch.search(machine, 32, 1_000_000, memory, is_costly, lambda text: None)
    best = max(each.size for each in trials if each.end == find_batch.FIT)
    right = max(size for size in range(1, memory) if Machine(memory, bend)(size).end == find_batch.FIT)
    assert best <= right <= best * 1.05 + 1
    assert machine.tried <= (10 if is_costly else 20)


def test_the_search_ends_where_not_one_sample_fits_and_where_the_whole_set_does():
    trials = find_batch.search(Machine(999), 32, 500, 999, True, lambda text: None)
    assert trials[-1].size == 1 and "not one sample fits; give" in find_batch.answer("as given", trials, 500, 64, 1)[0]
    trials = find_batch.search(Machine(10**9), 32, 500, 10**9, False, lambda text: None)
    assert trials[-1].size == 500 and "no micro-batch is larger" in "".join(
        find_batch.answer("as given", trials, 500, 64, 1)
    )


@pytest.mark.parametrize(
    ("whole", "largest", "ranks", "size"),
    [(512, 744, 1, 512), (512, 744, 2, 256), (96, 50, 5, 16), (60, 7, 4, 5), (4, 9, 8, 1)],
)
def test_the_flags_keep_the_global_batch(whole, largest, ranks, size):
    lines = find_batch.answer("as given", [find_batch.Trial(largest, find_batch.FIT, 2**30, 0.5)], 10_000, whole, ranks)
    assert f"  --batch_size {size} --global_batch_size {whole}" in lines[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks"], "--ranks: needs a number of"),
        (["--memory", "x"], "--memory: needs"),
        (["--memory", "0"], "of at least 0.1"),
    ],
)
def test_flags_of_its_own_are_checked(words, said, capsys):
    assert find_batch.main(words) == 2 and said in capsys.readouterr().err
