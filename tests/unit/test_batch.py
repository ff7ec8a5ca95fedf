"""Maps over nested batches keep the classes of their containers and objects, and what else these hold."""

import copy
import gc
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torchvision import tv_tensors
from torchvision.models.detection.image_list import ImageList

from utils.batch import list_tensors, map_leaves, map_tensors
from utils.data.transfer import pin_batch, to_device
from utils.data.worker import CollatedMicroBatch, Fetcher

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Item:
    x: torch.Tensor
    y: list
    size: int = field(init=False, default=2)


@dataclass(frozen=True, slots=True)
class SlotItem:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Counted:
    """Its constructor takes other arguments than its fields, and must not run again."""

    x: torch.Tensor
    scale: InitVar[int]
    y: torch.Tensor = field(init=False)

    def __post_init__(self, scale):
        self.y = torch.full((1,), float(scale))
        self.x = self.x + 0 if scale == 1 else None


class Attrs:
    """As attrs makes a frozen class with slots."""

    __slots__ = ("__weakref__", "x", "y")
    __attrs_attrs__ = ()

    def __init__(self, x, y):
        self.__setstate__((x, y))

    def __getstate__(self):
        return self.x, self.y

    def __setstate__(self, state):
        for name, value in zip("xy", state, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class Changed:
    """As torch_geometric's Data: `to` changes the object in place, and what only the host reads stays there."""

    def __init__(self, x, y, on_host):
        self.x, self.y, self.on_host = x, y, on_host

    def to(self, device, non_blocking=False):
        self.x, self.y = self.x.to(device, non_blocking=non_blocking), [y.to(device) for y in self.y]
        return self


class Silent(Changed):
    def to(self, device):
        super().to(device)


class Custom:
    """The class of torch's documentation of pinned memory."""

    def __init__(self, rows):
        self.x, self.y = zip(*rows, strict=True)

    def pin_memory(self):
        self.x = tuple(x.pin_memory() for x in self.x)
        return self


class Store(MutableMapping):
    """As torch_geometric's storage: it refers to its owner, and has a property with the name of a value."""

    def __init__(self, owner, **values):
        self.__dict__.update(_mapping=values, _owner=weakref.ref(owner), _key="key")

    _key = property(lambda self: self.__dict__["_key"])

    def __copy__(self):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _mapping=dict(self._mapping))
        return other

    def __getitem__(self, key):
        return self._mapping[key]

    def __setitem__(self, key, value):
        self._mapping[key] = value

    def __delitem__(self, key):
        del self._mapping[key]

    def __iter__(self):
        return iter(self._mapping)

    def __len__(self):
        return len(self._mapping)


class Graph:
    """As torch_geometric's Data: the values are in a store, which __copy__ copies."""

    def __init__(self, **values):
        self.__dict__["store"] = Store(self, **values)

    def __getattr__(self, name):
        return self.__dict__["store"][name]

    def __setattr__(self, name, value):
        self.__dict__["store"][name] = value

    def __copy__(self):
        other = object.__new__(type(self))
        other.__dict__["store"] = copy.copy(self.store)
        other.store.__dict__["_owner"] = weakref.ref(other)
        return other

    def to(self, device, non_blocking=False):
        for name, value in self.store.items():
            self.store[name] = value.to(device, non_blocking=non_blocking)
        return self


class Node:
    """Each refers to the other."""

    __attrs_attrs__ = ()

    def __init__(self, x, y):
        self.x, self.other = x, self if y is None else Node(y, None)
        self.other.other = self


class Rows(list):
    def __init__(self, x, y):
        super().__init__([x, y])
        self.name = "rows"


class FixedRows(tuple):
    def __new__(cls, x, y):
        return super().__new__(cls, [x, y])


class View(Mapping):
    __slots__ = ("_values",)

    def __init__(self, *pairs):
        self._values = dict(pairs)

    def __getitem__(self, key):
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)


class Lines(Sequence):
    def __init__(self, first, second):
        self.lines = [first, second]

    def __getitem__(self, index):
        return self.lines[index]

    def __len__(self):
        return 2


def zero():
    return torch.zeros(2)


def one():
    return torch.ones(1)


BATCHES = {
    "UserDict": lambda: UserDict(x=zero(), y=["text", one()]),  # transformers' BatchEncoding is one
    "OrderedDict": lambda: OrderedDict(x=zero(), y=(one(),)),
    "defaultdict": lambda: defaultdict(list, x=zero(), y=one()),
    "frozen dataclass": lambda: Item(zero(), [one(), None]),
    "dataclass with slots": lambda: SlotItem(zero(), one()),
    "dataclass with InitVar": lambda: Counted(zero(), 1),
    "namedtuple": lambda: Pair(zero(), {"a": one()}),
    "MappingProxyType": lambda: MappingProxyType({"x": zero(), "y": one()}),
    "attrs": lambda: Attrs(zero(), one()),
    "to in place": lambda: Changed(zero(), [one()], "text"),
    "to without non_blocking or result": lambda: Silent(zero(), [one()], "text"),
    "pin_memory only": lambda: Custom([(zero(), one())]),
    "store with a link to its owner": lambda: Graph(x=zero(), y=one()),
    "stores": lambda: [Graph(x=zero()), Graph(x=one())],
    "cycle": lambda: Node(zero(), one()),
    "list subclass": lambda: Rows(zero(), one()),
    "tuple subclass": lambda: FixedRows(zero(), one()),
    "mapping with slots": lambda: View(("x", zero()), ("y", one())),
    "sequence": lambda: Lines(zero(), one()),
    "UserList": lambda: UserList([zero(), one()]),
    "deque": lambda: deque([zero(), one()], maxlen=2),
    "max": lambda: [zero(), torch.return_types.max((one(), "place"))],
    "size": lambda: [zero(), one(), torch.Size([2])],
    "ImageList": lambda: [zero(), ImageList(one(), [(1, 1)])],
    "tv_tensor": lambda: [zero(), tv_tensors.Mask(one())],
    "in a dict": lambda: {"graph": Graph(x=zero()), "list": [Attrs(one(), 1)]},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_every_tensor_of_a_nested_batch_goes_to_the_device(kind):
    batch = BATCHES[kind]()
    assert [tensor.sum().item() for tensor in list_tensors(batch)] == [0, 1]
    moved = to_device(batch, META)
    assert isinstance(moved, dict if isinstance(batch, MappingProxyType) else type(batch))
    assert [tensor.device.type for tensor in list_tensors(moved)] == ["meta", "meta"]
    assert [tensor.device.type for tensor in list_tensors(batch)] == ["cpu", "cpu"]  # is unchanged
    changed = map_tensors(torch.neg, batch)
    assert type(changed) is type(moved) and [tensor.sum().item() for tensor in list_tensors(changed)] == [0, -1]
    assert [tensor.sum().item() for tensor in list_tensors(batch)] == [0, 1]


def test_the_other_attributes_of_an_object_are_kept():
    assert to_device(Item(zero(), []), META).size == 2
    assert to_device(Rows(zero(), one()), META).name == "rows"
    assert to_device(deque([zero()], maxlen=7), META).maxlen == 7
    assert to_device(Changed(zero(), [], "text"), META).on_host == "text"
    assert to_device(ImageList(zero(), [(3, 4)]), META).image_sizes == [(3, 4)]
    changed = Item(zero(), [])
    object.__setattr__(changed, "size", 5)  # a field that the constructor does not take
    assert to_device(changed, META).size == 5
    packed = {"x": torch.Size([2, 3]), "y": torch.max(torch.eye(2), 0)}
    moved = to_device(packed, META)
    assert type(moved["x"]) is torch.Size and moved["y"].indices.device.type == "meta"


def test_a_store_refers_to_its_own_copy():
    graphs = map_tensors(torch.neg, [Graph(x=torch.full((1,), float(number))) for number in range(8)])
    assert [graph.x.item() for graph in graphs] == [-float(number) for number in range(8)]
    assert all(graph.store._owner() is graph for graph in graphs)


def test_objects_that_refer_to_each_other_still_do():
    node = Node(zero(), one())
    moved = to_device(node, META)
    assert moved is not node and moved.other.other is moved and node.other.other is node


def test_the_method_of_an_object_says_what_moves():
    lengths = torch.tensor([2])
    assert to_device(Changed(zero(), [one()], lengths), META).on_host is lengths


@pytest.mark.parametrize("layout", ["jagged", "coo", "csr"])
def test_nested_and_sparse_tensors_move_whole(layout):
    make = {
        "jagged": lambda: torch.nested.nested_tensor([one(), zero()], layout=torch.jagged),
        "coo": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
    }
    tensor = make[layout]()
    moved = to_device({"x": tensor}, META)["x"]
    assert (type(moved), moved.layout, moved.device.type) == (type(tensor), tensor.layout, "meta")


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_packed_sequence_keeps_its_sizes_on_the_cpu(is_sorted):
    rows = [torch.full((length,), float(length)) for length in ((3, 2, 1) if is_sorted else (1, 3, 2))]
    packed = pack_sequence(rows, enforce_sorted=is_sorted)
    moved = to_device({"x": packed}, META)["x"]
    assert type(moved) is PackedSequence and moved.data.device.type == "meta"
    assert moved.batch_sizes.tolist() == [3, 2, 1] and (moved.unsorted_indices is None) == is_sorted
    copied = map_tensors(torch.clone, packed)
    assert type(copied) is PackedSequence and torch.equal(copied.data, packed.data)
    assert list_tensors(packed)[0] is packed.data


@pytest.mark.parametrize("kind", BATCHES)
def test_every_tensor_is_pinned_once_also_by_the_loader(kind, monkeypatch):
    """`pin_memory` of tensors needs a GPU: a number stands for it here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 10)
    batch = BATCHES[kind]()
    item = Fetcher(SimpleNamespace(collate=lambda samples: batch), False, 0).collate((None, []))
    assert isinstance(item, CollatedMicroBatch)
    loaded = torch.utils.data._utils.pin_memory.pin_memory(item)
    for result in (pin_batch(batch), loaded[1]):
        expected = [20, 1] if isinstance(batch, Custom) else [20, 11]  # whose own method pins one of them
        assert [tensor.sum().item() for tensor in list_tensors(result)] == expected
    assert [tensor.sum().item() for tensor in list_tensors(batch)] == [0, 1]


def test_an_object_on_the_device_is_not_pinned():
    on_device = Custom([(zero().to("meta"), one().to("meta"))])
    assert pin_batch([on_device])[0] is on_device


@pytest.mark.parametrize("leaf", ["text", b"bytes", 3, None, range(3), {1, 2}, object(), SimpleNamespace(x=1), Item])
def test_other_values_are_kept(leaf):
    seen = []
    map_leaves(seen.append, {"leaf": leaf})
    assert seen == [leaf] and map_tensors(torch.neg, [leaf])[0] is leaf and to_device((leaf,), META)[0] is leaf


@pytest.mark.parametrize("function", [lambda batch: to_device(batch, META), pin_batch, list_tensors])
def test_a_batch_is_freed_without_waiting_for_a_collection(function):
    """On a GPU it would hold the memory of many batches."""
    tensor = torch.ones(3)
    batch = {"x": [tensor], "y": Graph(edges=torch.ones(2))}
    alive = weakref.ref(tensor)
    gc.disable()
    try:
        with mock.patch.object(torch.Tensor, "pin_memory", lambda self: self):
            function(batch)
        del batch, tensor
        assert alive() is None
    finally:
        gc.enable()


class FillsInPlace:
    """Its method changes a dict that it holds."""

    def __init__(self, **values):
        self.values = values

    def to(self, device, non_blocking=False):
        for name, value in self.values.items():
            self.values[name] = value.to(device)
        return self


def test_an_object_that_a_data_set_keeps_stays_as_it_is():
    kept = FillsInPlace(x=torch.ones(2))
    moved = to_device(kept, META)
    assert moved.values["x"].device == META and kept.values["x"].device.type == "cpu"


class AttributeDict(dict):
    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__ = self


class ListWithMask(list):
    mask = None


def test_the_attributes_of_a_subclass_of_a_container_move_too():
    moved = to_device(AttributeDict(x=torch.ones(2)), META)
    assert moved["x"].device == moved.x.device == META and type(moved) is AttributeDict
    listed = ListWithMask([torch.ones(2)])
    listed.mask = torch.ones(3)
    moved = to_device(listed, META)
    assert moved[0].device == moved.mask.device == META and type(moved) is ListWithMask
