# extra: verify or replay
"""A sample may be any object with tensors: equal content has one digest in each process, and other content another."""

import functools
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from scripts.lib.values import hash_nested

Pair = namedtuple("Pair", "x names")


class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)


class Slots:
    __slots__ = ("rest", "t")

    def __init__(self, t, rest):
        self.t, self.rest = t, rest


@dataclass
class Row:
    t: torch.Tensor
    names: set = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Frozen:
    t: torch.Tensor
    parts: tuple


class Attrs:  # as attrs generates it
    __attrs_attrs__ = ()

    def __init__(self, t):
        self.t = t


class Moved:
    """As many objects of a batch, it has a method `to`."""

    def __init__(self, name):
        self.t, self.name = torch.ones(2), name

    def to(self, device):
        return self


class Reduced:
    def __init__(self, t):
        self.t = t

    def __reduce__(self):
        return Reduced, (self.t,)


class Stated:
    def __init__(self, t):
        self.t, self.lock = t, threading.Lock()

    def __getstate__(self):
        return {"t": self.t}


class Cached:
    def __init__(self, t):
        self.t = t

    @functools.cached_property
    def total(self):
        return self.t.sum()


class Data:
    """As in PyG: tensors in a mapping of an object that refers back."""

    class Store(dict):
        pass

    def __init__(self, **values):
        self.__dict__["_store"] = Data.Store(values)
        self._store.parent = self

    def __getattr__(self, name):
        if name == "_store":
            raise AttributeError(name)
        return self._store[name]


class Node:
    def __init__(self, t):
        self.t, self.near = t, set()


class Sub(torch.Tensor):
    pass


class Boxed(torch.Tensor):
    pass


def circle(t):
    nodes = [Node(t + number) for number in range(9)]
    for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        one.near.add(other)
        other.near.add(one)
    return nodes[0]


def touched(value, name="total"):
    getattr(value, name)
    return value


def generator(t):
    result = torch.Generator().manual_seed(int(t.sum()))
    torch.rand(3, generator=result)
    return result


def boxed(t):
    result = t.as_subclass(Boxed)
    result.format = f"of {int(t.sum())}"
    return result


def names(t):
    return {f"{number} {t.sum()}" for number in range(99)}


def objects(*values):
    result = numpy.empty(len(values), dtype=object)
    result[:] = values
    return result


KINDS = {  # from a float32 tensor of 4
    "plain": lambda t: Plain(t=t, name="t"),
    "slots": lambda t: Slots(t, ["text", t]),
    "dataclass": lambda t: Row(t, names(t)),
    "frozen dataclass with slots": lambda t: Frozen(t, (t, {"t": t})),
    "attrs": Attrs,
    "namedtuple": lambda t: Pair(t, names(t)),
    "namedtuple in an object": lambda t: Plain(pair=Pair(t, names(t))),
    "SimpleNamespace": lambda t: SimpleNamespace(t=t, names=names(t)),
    "objects in objects": lambda t: Plain(inner=Slots(Row(t), SimpleNamespace(rows=[Frozen(t, ())]))),
    "list of objects": lambda t: [Plain(t=t), Slots(t, None)],
    "dict of objects": lambda t: {"one": Plain(t=t), 2: Slots(t, None)},
    "dict with objects as keys": lambda t: {Frozen: {Plain: t}, (1, "two"): Plain(t=t)},
    "set of objects": lambda t: {Plain(t=t + number) for number in range(9)},
    "set of tensors": lambda t: {t + number for number in range(9)},
    "set of sets": lambda t: SimpleNamespace(s={frozenset({f"{int(t[0])} {a}", f"{b}"}) for a in "abc" for b in "de"}),
    "set of tuples of sets": lambda t: {(number, frozenset(names(t + number))) for number in range(9)},
    "set in a dict in an object": lambda t: Plain(index={"of": {1: names(t)}}),
    "nodes that are neighbours in sets": circle,
    "reduce": Reduced,
    "getstate": Stated,
    "generator": generator,
    "generator in an object": lambda t: Plain(generator=generator(t)),
    "random.Random": lambda t: Plain(random=random.Random(int(t.sum()))),
    "numpy's generator": lambda t: Plain(random=numpy.random.default_rng(int(t.sum()))),
    "PackedSequence": lambda t: pack_padded_sequence(t.view(2, 2, 1), torch.tensor([2, 1]), batch_first=True),
    "PackedSequence in an object": lambda t: Plain(p=pack_padded_sequence(t.view(2, 2, 1), torch.tensor([2, 1]))),
    "array": lambda t: t.numpy(),
    "array in Fortran's order": lambda t: Plain(a=numpy.asfortranarray(t.numpy().reshape(2, 2))),
    "array with fields": lambda t: Plain(a=numpy.array([(t[0], "a")], dtype=[("x", "f4"), ("name", "U3")])),
    "array of objects": lambda t: Plain(a=objects(Plain(t=t), t, "text")),
    "array of objects alone": lambda t: objects(Plain(t=t), t, "text"),
    "number of numpy": lambda t: Plain(n=numpy.float32(t.sum()), m=numpy.int64(t.sum())),
    "Data of PyG": lambda t: Data(x=t, edge_index=torch.zeros(2, 0)),
    "tensor subclass": lambda t: t.as_subclass(Sub),
    "tensor subclass in an object": lambda t: Plain(t=t.as_subclass(Sub)),
    "tensor subclass with an attribute": boxed,
    "parameter": lambda t: Plain(p=torch.nn.Parameter(t)),
    "module": lambda t: Plain(net=torch.nn.ParameterList([t])),
    "with a gradient": lambda t: Plain(t=2 * t.clone().requires_grad_()),
    "cached and not cached": lambda t: Cached(t) if LATER else touched(Cached(t)),
    "OrderedDict, defaultdict, Counter, deque": lambda t: Plain(
        all=[OrderedDict(t=t), defaultdict(list, t=[t]), Counter(str(t.sum())), deque([t])]
    ),
    "MappingProxyType": lambda t: MappingProxyType({"t": t}),
    "function and class": lambda t: Plain(t=t, function=names, kind=Plain, of=functools.partial(touched, t)),
    "lambda and local class": lambda t: Plain(t=t, key=lambda: t, kind=type("Local", (), {})),
    "lock": lambda t: Plain(t=t, lock=threading.Lock()),
    "iterator and module": lambda t: Plain(t=t, rest=(number for number in "ab"), torch=torch),
    "bytearray": lambda t: Plain(t=t, bytes=bytearray(t.numpy().tobytes())),
    "dtype, device and size": lambda t: Plain(t=t, of=[t.dtype, t.device, t.shape, slice(1, 2), ..., range(3)]),
    "complex numbers": lambda t: Plain(t=torch.complex(t, t), z=complex(t[0])),
    "bfloat16 and nothing": lambda t: Plain(t=t.bfloat16(), empty=torch.zeros(0, 3)),
    "one number of a column": lambda t: Plain(t=t.view(2, 2)[:1, 1], n=t[:1].expand(3)),
    "conjugate": lambda t: Plain(t=torch.complex(t, t).conj(), n=torch.complex(t, t).conj().imag),
}
LATER = "later" in sys.argv


def digests():
    """By kind, of two tensors. The other process has other memory."""
    wasted = [torch.zeros(99 + number) for number in range(999 * LATER)]
    whole = torch.arange(8.0)
    by_kind = {kind: [hash_nested(make(whole[2:6] + number)) for number in (0, 1)] for kind, make in KINDS.items()}
    return by_kind if wasted or not LATER else None


@pytest.fixture(scope="module")
def pairs():
    environment = os.environ | {"PYTHONHASHSEED": "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"}
    program = f"import json, {__name__} as kinds; print(json.dumps(kinds.digests()))"
    command = [sys.executable, "-c", program, "later"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not ended.returncode, ended.stderr
    return digests(), json.loads(ended.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_objects_of_two_processes_have_one_digest_and_others_another(pairs, kind):
    first, second = pairs[0][kind], pairs[1][kind]
    assert first == second and first[0] != first[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_pickled_is_named(kind):
    unseen = set()
    hash_nested(KINDS[kind](torch.arange(4.0)), unseen)
    expected = {"lock": {"lock"}, "iterator and module": {"generator", "module"}}
    assert unseen == expected.get(kind, set()) | ({"<lambda>.<locals>.<lambda>"} if "lambda" in kind else set())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Row(torch.ones(2), {"a"}), Row(torch.ones(2), {"b"})),
        (Moved("a"), Moved("b")),
        ({frozenset("ab"), frozenset("cd")}, {frozenset("ac"), frozenset("bd")}),
        (Plain(lock=threading.Lock(), name="a"), Plain(lock=threading.Lock(), name="b")),
        (Plain(kind=Plain), Plain(kind=Row)),
    ],
)
def test_objects_that_differ_in_other_things_than_tensors_have_two_digests(one, other):
    assert hash_nested(one) != hash_nested(other)


def test_a_list_that_is_nested_too_deeply_is_named_and_not_compared():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    unseen = set()
    assert hash_nested(Plain(deep=deep), unseen) and unseen == {"Plain"}
