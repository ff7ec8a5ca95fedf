# extra: verify or replay
"""What verify compares of a batch that is an object: its tensors, wherever they are stored."""

import threading
from collections import UserDict, deque
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from scripts.lib.values import flatten_nested, hash_nested, join_batches, pad_rows


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
    assert hash_nested(one) == hash_nested(same) != hash_nested(KINDS[kind](torch.tensor([2.0, 3]), {"z": whole[2:4]}))
    assert [leaf.tolist() for leaf in flatten_nested([one]).values()] == [[2, 3], [0, 1]]


@pytest.mark.parametrize("kind", ["dataclass with slots", "UserDict"])
def test_batches_of_rows_are_joined(kind):
    halves = [KINDS[kind](torch.full((2, 3), float(number)), {"z": torch.full((2,), number)}) for number in range(2)]
    whole = join_batches(halves, 2)
    assert type(whole) is type(halves[0])
    assert [leaf.shape for leaf in flatten_nested(whole).values()] == [(4, 3), (4,)]
    with pytest.raises(ValueError):
        join_batches([halves[0], {"x": torch.ones(2, 3)}], 2)
    with pytest.raises(ValueError):
        join_batches(halves, 3)


def test_an_object_that_holds_more_than_rows_is_not_joined():
    graph = Graph(torch.ones(2), torch.ones(2))
    graph.parent = "a name"
    with pytest.raises(ValueError):
        join_batches([graph], 2)


class Slots:
    __slots__ = ("name", "t")

    def __init__(self, t, name):
        self.t, self.name = t, name


class Color(Enum):
    RED = 1


class Node:
    """Refers to itself and to others that refer to it."""

    def __init__(self, t):
        self.t, self.me = t, self
        self.others = [SimpleNamespace(back=self, t=t)]


def circle_of_objects(t):
    objects = [SimpleNamespace(number=number, t=t) for number in range(30)]
    for member in objects:
        member.all = objects
    return objects[0]


UNKNOWN = {  # objects in which train.py looks for no tensors, from a tensor
    "SimpleNamespace": lambda t: SimpleNamespace(t=t),
    "an attribute's name as a value": lambda t: SimpleNamespace(t=t, name="t", names=["t", "name"]),
    "nested": lambda t: SimpleNamespace(inner=SimpleNamespace(rows=[{"t": t}])),
    "slots": lambda t: Slots(t, "".join(["a", "b"])),
    "cycle": Node,
    "30 objects that refer to each other": circle_of_objects,
    "set": lambda t: SimpleNamespace(names={f"name {number}" for number in range(99)}, t=t),
    "Enum": lambda t: SimpleNamespace(color=Color.RED, t=t),
    "distribution": lambda t: torch.distributions.Normal(t, 1.0),
    "array": lambda t: SimpleNamespace(a=t.numpy()[::2]),
    "read-only array": lambda t: SimpleNamespace(a=numpy.broadcast_to(t.numpy(), (3, 4))),
    "array of objects": lambda t: SimpleNamespace(a=numpy.array([t, "text"], dtype=object)),
    "deque": lambda t: SimpleNamespace(rows=deque([t])),
    "Fraction": lambda t: SimpleNamespace(half=Fraction(int(t[2]), 2)),
}


def first(samples):
    return samples[0]


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_object_from_a_worker_has_the_digest_of_the_same_object_here(kind):
    make, t = UNKNOWN[kind], torch.arange(8.0)[2:6]  # a view: the pickle of its storage is larger
    sample = {"x": torch.ones(2), "meta": make(t)}
    (moved,) = DataLoader([sample], num_workers=1, collate_fn=first)
    assert hash_nested(sample) == hash_nested(moved) == hash_nested({"x": torch.ones(2), "meta": make(t.clone())})
    assert hash_nested(sample) != hash_nested({"x": torch.ones(2), "meta": make(t + 1)}) or kind == "Enum"


@pytest.mark.parametrize("content", [["a", "b"], ["b", "a"]])
def test_a_set_has_one_digest_in_any_order_of_insertion(content):
    colliding = [number * 2**61 - number for number in (0, 8, 16)]  # hash values that collide in a set of 8 places
    assert hash_nested(SimpleNamespace(s={*colliding})) == hash_nested(SimpleNamespace(s={*reversed(colliding)}))
    assert hash_nested({*content}) == hash_nested({"a", "b"}) != hash_nested({"a", "c"})


def test_a_sample_that_cannot_be_pickled_is_not_compared():
    lock = SimpleNamespace(lock=threading.Lock())
    assert hash_nested([lock]) == hash_nested([SimpleNamespace(lock=threading.Lock())]) != hash_nested([1])


EYE = torch.eye(4)


def rows(*lengths):
    return [torch.arange(3.0 * length).view(length, 3) for length in lengths]


def narrowed(lengths):
    values = torch.arange(30.0).view(2, 5, 3)
    values[1] = values[0]
    return torch.nested.narrow(values, 1, torch.tensor([0, 0]), torch.tensor(lengths), layout=torch.jagged)


IRREGULAR = {  # a tensor, an equal one in other memory, and another
    "jagged": [torch.nested.nested_tensor(rows(*sizes), layout=torch.jagged) for sizes in ((2, 4), (2, 4), (4, 2))],
    "jagged with holes": [narrowed(lengths) for lengths in ([2, 3], [2, 3], [3, 2])],
    "nested": [torch.nested.nested_tensor(rows(*sizes)) for sizes in ((2, 4), (2, 4), (4, 2))],
    "coo": [EYE.to_sparse(), EYE.clone().to_sparse(), EYE.flip(0).to_sparse()],
    "coo that is not coalesced": [
        torch.sparse_coo_tensor([[1, 0]], [1.0, 2.0], (2,)),
        torch.sparse_coo_tensor([[0, 1, 1]], [2.0, 0.5, 0.5], (2,)),
        torch.sparse_coo_tensor([[0, 1]], [2.0, 1.0], (3,)),
    ],
    "csr": [EYE.to_sparse_csr(), EYE.clone().to_sparse_csr(), (2 * EYE).to_sparse_csr()],
    "csc": [EYE.to_sparse_csc(), EYE.clone().to_sparse_csc(), EYE.flip(0).to_sparse_csc()],
    "bsr": [EYE.to_sparse_bsr((2, 2)), EYE.clone().to_sparse_bsr((2, 2)), EYE.flip(0).to_sparse_bsr((2, 2))],
}


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("place", [lambda t: t, lambda t: {"x": [t]}, lambda t: SimpleNamespace(t=t)])
def test_nested_and_sparse_tensors_are_compared_by_their_content(kind, place):
    one, same, other = map(place, IRREGULAR[kind])
    assert hash_nested(one) == hash_nested(same) != hash_nested(other)
    with pytest.raises(ValueError):
        join_batches([IRREGULAR[kind][0]], 2)


@pytest.mark.parametrize("kind", ["jagged", "jagged with holes", "nested"])
def test_the_rows_of_a_nested_tensor_are_padded_with_zeros(kind):
    nested = IRREGULAR[kind][0]
    padded, lengths = pad_rows(nested), [len(row) for row in nested.unbind()]
    assert padded.shape == (2, max(lengths), 3)
    for row, expected, length in zip(padded, nested.unbind(), lengths, strict=True):
        assert torch.equal(row[:length], expected) and not row[length:].any()
