# extra: verify or replay
"""What verify compares of a batch that is an object: its tensors, wherever they are stored."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch

from scripts.lib.values import can_join, digest, joined, leaves


@dataclass(slots=True)
class Rows:
    x: torch.Tensor
    y: dict


class Graph:
    def __init__(self, x, y):
        self.x, self.y, self.parent = x, y, self

    def to(self, device):
        raise AssertionError("is not moved")


KINDS = {"dataclass with slots": Rows, "object": Graph, "UserDict": lambda x, y: UserDict(x=x, y=y)}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_tensors_in_other_memory_have_one_digest_and_others_another(kind):
    whole = torch.arange(6.0)
    one, same = KINDS[kind](whole[2:4], {"z": whole[:2]}), KINDS[kind](torch.tensor([2.0, 3]), {"z": whole[:2].clone()})
    assert digest(one) == digest(same) != digest(KINDS[kind](torch.tensor([2.0, 3]), {"z": whole[2:4]}))
    assert [leaf.tolist() for leaf in leaves([one]).values()] == [[2, 3], [0, 1]]


@pytest.mark.parametrize("kind", ["dataclass with slots", "UserDict"])
def test_batches_of_rows_are_joined(kind):
    halves = [KINDS[kind](torch.full((2, 3), float(number)), {"z": torch.full((2,), number)}) for number in range(2)]
    assert can_join(halves, 2) and not can_join(halves, 3)
    whole = joined(halves)
    assert type(whole) is type(halves[0])
    assert [leaf.shape for leaf in leaves(whole).values()] == [(4, 3), (4,)]
    with pytest.raises(ValueError):
        joined([halves[0], {"x": torch.ones(2, 3)}])


def test_an_object_that_holds_more_than_rows_is_not_joined():
    graph = Graph(torch.ones(2), torch.ones(2))
    graph.parent = "a name"
    assert not can_join([graph], 2)
