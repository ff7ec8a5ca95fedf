# extra: verify
"""Held-out samples that equal training samples in all values but one, such as an id or a path."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from lib.verify.data_checks import BrokenInvariant, check_overlap


@dataclass
class Row:
    x: torch.Tensor
    y: torch.Tensor
    id: int


KINDS = {
    "tuple": lambda x, y, k: (x, y, k),
    "dict": lambda x, y, k: {"x": x, "y": y, "path": f"rows/{k}.png"},
    "nested": lambda x, y, k: {"input": [x, {"id": torch.tensor(k)}], "y": y},
    "dataclass": Row,
    "object": lambda x, y, k: SimpleNamespace(x=x, y=y, time=k),
}


def rows(count, seed, first=0, kind="tuple", classes=10):
    """Samples with a number of their own, which begins at `first`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, 8, generator=generator)
    y = torch.randint(classes, (400,), generator=generator)
    return [KINDS[kind](x[k], y[k], first + k) for k in range(count)]


def pairs(count, seed):
    """Two sets of 30 sentences: pairs repeat them by nature."""
    drawn = torch.randint(30, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    return [(f"sentence {a}", f"sentence {b}", (7 * a + b + 3 * seed * k) % 50) for k, (a, b) in enumerate(drawn)]


def texts(count, seed, length=8):
    tokens = torch.randint(1000, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "attention_mask": torch.ones(length), "labels": row.clone()} for row in tokens]


SETS = {  # training and held-out samples, and how many of these are noted
    **{kind: (rows(200, 1, kind=kind), rows(50, 1, 1000, kind=kind), 50) for kind in KINDS},
    "a part": (rows(200, 1), rows(10, 1, 1000) + rows(40, 2, 2000), 10),
    "a label": ([row[:2] for row in rows(200, 1)], [(row[0], row[1] + 1) for row in rows(50, 1)], 50),
    "other rows": (rows(200, 1), rows(50, 2, 1000), 0),
    "labels only are left": ([row[:2] for row in rows(200, 1)], [row[:2] for row in rows(50, 2)], 0),
    "a few labels": (rows(200, 1, classes=1000), rows(50, 2, classes=1000), 0),
    "one value": ([row[0] for row in rows(200, 1)], [row[0] for row in rows(50, 2)], 0),
    "pairs": (pairs(500, 1), pairs(100, 2), 0),
    "tokens": (texts(200, 1), texts(50, 2), 0),
    "short texts": (texts(500, 1, 1), texts(100, 2, 1), 0),
    "a constant": ([(*row[:2], 1) for row in rows(200, 1)], [(*row[:2], 1) for row in rows(50, 2)], 0),
    "no labels in common": (
        [(row[0], k) for k, row in enumerate(rows(200, 1))],
        [(row[0], -k) for k, row in enumerate(rows(50, 2))],
        0,
    ),
}


@pytest.mark.parametrize("kind", SETS)
def test_samples_that_differ_by_one_value_are_noted(kind):
    train, held_out, count = SETS[kind]
    note = check_overlap(SimpleNamespace(train_set=train, held_out=held_out))
    assert ("in all values but" in note) == (count > 0) and "are trained on" not in note, note
    assert not count or re.search(rf"Please check: {count} held-out samples \(rows .*\) equal training samples", note)


class Augmented(list):
    """Each sample is flipped at random, or gets noise."""

    noise = 0.0

    def __getitem__(self, index):
        x, *rest = super().__getitem__(index)
        if self.noise:
            return x + self.noise * torch.randn(x.shape), *rest
        return x.flip(0) if torch.rand(()) < 0.5 else x, *rest


class Noisy(Augmented):
    noise = 0.1


def test_an_augmentation_that_leaves_some_samples_as_they_are_hides_no_copies():
    same, others = rows(50, 1), rows(50, 2, 1000)
    with pytest.raises(BrokenInvariant, match="are trained on"):
        check_overlap(SimpleNamespace(train_set=Augmented(rows(200, 1)), held_out=same))
    note = check_overlap(SimpleNamespace(train_set=Augmented(rows(200, 1)), held_out=rows(50, 1, 1000)))
    assert "50 held-out samples (rows " in note and "in all values but '2'" in note
    for train, held_out in ((Augmented(rows(200, 1)), others), (Noisy(rows(200, 1)), rows(50, 1, 1000))):
        note = check_overlap(SimpleNamespace(train_set=train, held_out=held_out))
        assert note == "Not checked: whether held-out samples are training samples, which are augmented."
