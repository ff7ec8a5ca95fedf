"""The tree along which exact sums are formed: the same for any division among ranks, and few partial sums at a time."""

import math

import pytest
import torch

from utils.extras.exact.tree import AFTER_LAST_LEAF, TreeSum, list_subtree_starts, rank_leaves

LEAVES = [torch.randn(5, generator=torch.Generator().manual_seed(k)) * 10.0 ** (k % 7) for k in range(40)]


def defined(count):
    """The sum of the first leaves: neighbours are added, then neighbouring pairs; what has no neighbour stays."""
    sums = LEAVES[:count]
    while len(sums) > 1:
        pairs = [sums[k : k + 2] for k in range(0, len(sums), 2)]
        sums = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return sums[0]


def parts_by_rank(ranks, count):
    """For each rank, its parts by their first leaf. One piece at a time for the last leaf, as in a backward pass."""
    by_rank = []
    for rank, begins in enumerate(list_subtree_starts(ranks, count)):
        run, tree = rank_leaves(rank, ranks, count), TreeSum()
        if not run:
            assert not begins
            continue
        for number in run[:-1]:
            tree.add(number, [LEAVES[number].clone()])
            assert len(tree._subtrees) <= 2 * math.log2(len(run)) + 1
        own = LEAVES[run[-1]].clone()
        before, inner = tree.pop_for_last_leaf(run[-1], count)
        assert tree._subtrees == []
        for [partial] in inner:
            own += partial
        by_rank.append(list(zip(begins, [*(part for [part] in before), own], strict=True)))
    return by_rank


@pytest.mark.guarantee("exact-ranks")
@pytest.mark.parametrize("count", [*range(1, 18), 31, 32, 33, 40])
def test_the_sum_is_that_of_the_definition_on_any_number_of_ranks(count):
    for ranks in range(1, 42):
        tree = TreeSum()
        for begin, part in (pair for parts in parts_by_rank(ranks, count) for pair in parts):
            tree.add(begin, [part])
        [[total]] = tree.pop_subtrees(AFTER_LAST_LEAF, AFTER_LAST_LEAF)
        assert torch.equal(total, defined(count)), ranks


@pytest.mark.guarantee("exact-ranks")
def test_an_evaluation_has_the_same_parts():
    """There, the parts are taken after the last leaf."""
    for ranks, count in ((1, 13), (3, 32), (5, 33), (6, 7)):
        for rank, parts in enumerate(parts_by_rank(ranks, count)):
            run, tree = rank_leaves(rank, ranks, count), TreeSum()
            for number in run:
                tree.add(number, [LEAVES[number].clone()])
            pairs = zip(parts, tree.pop_subtrees(run.stop, count), strict=True)
            assert all(torch.equal(part, other) for (_, part), [other] in pairs)


@pytest.mark.guarantee("exact-ranks")
def test_a_rank_has_one_part_where_its_micro_batches_are_a_power_of_two():
    """So that it sends the bytes of a ring all-reduce; also in a short last global batch."""
    for ranks in (1, 2, 3, 5, 6, 7, 8, 12, 24):
        for size in (1, 2, 4, 8):
            for missing in range(ranks):
                parts = list_subtree_starts(ranks, ranks * size - missing)
                assert max(map(len, parts)) == 1, (ranks, size, missing)
    mean = {ranks: sum(map(len, list_subtree_starts(ranks, 32))) / ranks for ranks in (3, 5, 6, 7, 12)}
    assert mean == pytest.approx({3: 9 / 3, 5: 13 / 5, 6: 11 / 6, 7: 16 / 7, 12: 21 / 12})


@pytest.mark.guarantee("exact-ranks")
def test_another_order_gives_other_bits():
    """The leaves are such that the other tests can fail."""
    assert not torch.equal(sum(LEAVES), defined(40))
    assert not torch.equal(defined(20), LEAVES[19] + defined(19))
