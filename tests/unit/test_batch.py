"""Maps over nested batches keep the classes of their containers."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from utils.batch import map_tensors, tensors_in
from utils.data.transfer import to_device

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Item:
    x: torch.Tensor
    rest: list
    size: int = field(init=False, default=2)


@pytest.mark.parametrize(
    "batch",
    [
        UserDict(x=torch.zeros(2), y=["text", torch.ones(1)]),  # transformers' BatchEncoding is one
        OrderedDict(x=torch.zeros(2), y=(torch.ones(1),)),
        defaultdict(list, x=torch.zeros(2), y=torch.ones(1)),
        Item(torch.zeros(2), [torch.ones(1), None]),
        Pair(torch.zeros(2), {"a": torch.ones(1)}),
        MappingProxyType({"x": torch.zeros(2), "y": torch.ones(1)}),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_tensor_of_a_nested_batch_goes_to_the_device(batch):
    assert [tensor.sum().item() for tensor in tensors_in(batch)] == [0, 1]
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved, dict if isinstance(batch, MappingProxyType) else type(batch))
    assert [tensor.device.type for tensor in tensors_in(moved)] == ["meta", "meta"]
    assert [tensor.device.type for tensor in tensors_in(batch)] == ["cpu", "cpu"]  # is unchanged


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_packed_sequence_keeps_its_sizes_on_the_cpu(is_sorted):
    rows = [torch.full((length,), float(length)) for length in ((3, 2, 1) if is_sorted else (1, 3, 2))]
    packed = pack_sequence(rows, enforce_sorted=is_sorted)
    moved = to_device({"x": packed}, torch.device("meta"))["x"]
    assert type(moved) is PackedSequence and moved.data.device.type == "meta"
    assert moved.batch_sizes.tolist() == [3, 2, 1] and (moved.unsorted_indices is None) == is_sorted
    assert torch.equal(map_tensors(torch.clone, packed).data, packed.data) and tensors_in(packed)[0] is packed.data


def test_other_values_are_kept():
    assert map_tensors(torch.neg, {"name": "a", "size": 3}) == {"name": "a", "size": 3}
