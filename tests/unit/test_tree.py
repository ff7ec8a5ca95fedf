"""The tree along which exact sums are formed: the same for any division among ranks, and few partial sums at a time."""

import math

import pytest
import torch

from utils.distributed.tree import TreeSum, in_tree_order, place

LEAVES = [torch.randn(5, generator=torch.Generator().manual_seed(k)) * 10.0 ** (k % 7) for k in range(40)]


def defined(numbers, leaves):
    """The sum of these leaves of a tree over `leaves`, a power of two: m and m + leaves / 2 are added first."""
    sums = {number: LEAVES[number].clone() for number in numbers}
    while leaves > 1:
        leaves //= 2
        for right in [number for number in sums if number >= leaves]:
            left = sums.get(right - leaves)
            sums[right - leaves] = sums.pop(right) if left is None else left + sums.pop(right)
    return sums[0]


def added(numbers):
    tree = TreeSum()
    for number in in_tree_order(numbers):
        tree.add(number, [LEAVES[number].clone()])
        assert len(tree._held) <= math.log2(len(numbers)) + 1
    return tree.total()[0]


@pytest.mark.parametrize("count", [*range(1, 18), 31, 32, 33, 40])
def test_the_sum_is_that_of_the_definition_on_any_number_of_ranks(count):
    expected = defined(range(count), 64)
    assert torch.equal(expected, defined(range(count), 2 ** math.ceil(math.log2(count))))  # a larger tree: the same
    for ranks in (1, 2, 4, 8):
        tree = TreeSum()
        for rank in in_tree_order(range(min(ranks, count))):
            tree.add(rank, [added(range(rank, count, ranks))])
        assert torch.equal(tree.total()[0], expected), ranks


def test_the_last_leaf_can_be_added_piece_by_piece():
    for count in (1, 2, 5, 8, 13):
        *others, last = in_tree_order(range(count))
        tree, total = TreeSum(), LEAVES[last].clone()
        for number in others:
            tree.add(number, [LEAVES[number].clone()])
        for [partial] in tree.take(last):
            total += partial
        assert torch.equal(total, defined(range(count), 16)) and tree.take(last) == []


def test_another_order_gives_other_bits():
    """The leaves are such that the other tests can fail."""
    assert not torch.equal(sum(LEAVES), defined(range(40), 64))
    assert [place(number) >> 37 for number in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]
