# extra: verify
"""Notes on data: sets that are scaled by themselves, and samplers that nothing reads."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lib.verify import data_notes
from lib.verify.data_notes import find_scales, find_unread_samplers

# ---- scales ----


@pytest.fixture(autouse=True)
def _no_time_limit(monkeypatch):
    """On a busy machine reading a set may take longer than the limit, and the answer is then None."""
    monkeypatch.setattr(data_notes, "MAX_READ_SECONDS", 600.0)


ROWS = torch.randn(800, 4, generator=torch.Generator().manual_seed(0)).exp() + torch.arange(4)


def by_limits(x):
    return (x - x.min(0).values) / (x.max(0).values - x.min(0).values)


def with_flags(x):
    flags = (ROWS[: len(x), :2] > 1.5).float()
    return torch.cat([by_limits(x), flags, torch.ones(len(x), 1)], 1)


SCALINGS = {  # from values to scaled ones, and the note
    "standard": (lambda x: (x - x.mean(0)) / x.std(0), "mean 0 and deviation 1"),
    "standard over all": (lambda x: (x - x.mean()) / x.std(), "mean 0 and deviation 1"),
    "limits": (by_limits, "a maximum of exactly 1"),
    "limits -1 and 1": (lambda x: 2 * by_limits(x) - 1, "a maximum of exactly 1"),
    "limits over all": (lambda x: (x - x.min()) / (x.max() - x.min()), "a maximum of exactly 1"),
    "limits of one column": (lambda x: by_limits(x[:, :1]), "a maximum of exactly 1"),
    "limits and flags": (with_flags, "a maximum of exactly 1"),
    "maximum": (lambda x: x / x.max(0).values, "a maximum of exactly 1"),
    "largest": (lambda x: (x - 2) / (x - 2).abs().max(0).values, "a maximum of exactly 1"),
    "plain": (lambda x: x, ""),
    "limits of training": (lambda x: (x - ROWS.min(0).values) / (ROWS.max(0).values - ROWS.min(0).values), ""),
    "flags": (lambda x: (x > 1.5).float(), ""),
    "one-hot": (lambda x: torch.eye(12)[x.sum(1).long() % 12], ""),
    "counts": (lambda x: x.floor() - x.floor().median(), ""),
    "ratings": (lambda x: (2 * x).floor().clamp(0, 20) / 20, ""),
    "bytes": (lambda x: (60 * x).floor().clamp(0, 255) / 255, ""),
    "shares": (lambda x: x / x.sum(1, keepdim=True), ""),
    "standard of each row": (lambda x: (x - x.mean(1, True)) / x.std(1, correction=0, keepdim=True), ""),
    "of each row": (lambda x: by_limits(x.T).T, ""),
    "ranks": (lambda x: torch.linspace(0, 1, len(x))[:, None], ""),
    "hours": (lambda x: torch.stack([(x[:, 0] * 24).floor().sin(), (x[:, 0] * 24).floor().cos()], 1), ""),
    "clamped": (lambda x: (x / 4).clamp(0, 1), ""),
    "images": (lambda x: by_limits(x)[:, None, None], ""),
    "text": (lambda x: [str(row) for row in x], ""),
    "a few rows": (lambda x: by_limits(x)[:5], ""),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_set_that_is_scaled_by_itself_is_recognized(kind):
    scale, expected = SCALINGS[kind]
    first, second = (find_scales([(row, 1) for row in scale(rows)]) for rows in (ROWS[:500], ROWS[500:]))
    assert {text for _, text in first & second} == ({expected} if expected else set())


class Windows(torch.utils.data.Dataset):
    """Samples are windows of a table, whose columns are not scaled any more."""

    def __init__(self, table):
        self.table, self.names = table, ["a"]

    def __len__(self):
        return len(self.table) - 200

    def __getitem__(self, index):
        return self.table[index : index + 200]


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy()])
@pytest.mark.parametrize("kind", ["standard", "limits", "plain", "limits of training"])
def test_a_table_of_which_samples_are_windows_is_looked_at(kind, convert):
    scale, expected = SCALINGS[kind]
    first, second = (find_scales(Windows(convert(scale(rows)))) for rows in (ROWS[:500], ROWS[500:]))
    assert {text for _, text in first & second} == ({expected} if expected else set())


def test_a_table_that_takes_long_to_read_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(data_notes, "MAX_READ_SECONDS", -1.0)
    assert (
        find_scales([ROWS[0]]) is None
        and find_scales([ROWS[0][:, None, None]]) == set()
        and find_scales(["text"]) == set()
    )


# ---- samplers ----

DATA = """
import torch
from library import Base
from torch.utils.data import Dataset, Sampler, Subset, WeightedRandomSampler

class Rows(BASE):
    def __init__(self):
        super().__init__()
        self.x = torch.ones(6)
        KEPT

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return GET

    MORE

OWN
"""
LIBRARY = """
from torch.utils.data import Dataset

class Base(Dataset):
    def __init__(self):
        self.sampling_weights = [1.0] * 6

    def first(self):
        return self.sampling_weights[0] * self.weights[0]
"""
SAMPLER = "self.sampler = WeightedRandomSampler(torch.ones(6), 6)"
ORDER = "def epoch_order(self, seed, epoch, n):\n        return torch.multinomial(self.weights, n)"
KEPT = {  # parts of DATA, and what is named
    "sampler": ({"KEPT": SAMPLER}, ["sampler"]),
    "any name": ({"KEPT": SAMPLER.replace("self.sampler", "self.balanced")}, ["balanced"]),
    "of weights": (
        {"KEPT": f"self.weights = torch.ones(6); {SAMPLER.replace('torch.ones(6)', 'self.weights')}"},
        ["sampler"],
    ),
    "weights": ({"KEPT": "self.sample_weights = [1.0] * 6"}, ["sample_weights"]),
    "probabilities": ({"KEPT": "self.sampling_p = torch.ones(6)"}, ["sampling_p"]),
    "shuffle": ({"KEPT": "self.shuffle = True"}, ["shuffle"]),
    "method": ({"MORE": "def sampler(self):\n        return None"}, ["sampler"]),
    "property": ({"MORE": "@property\n    def weights(self):\n        return self.x"}, ["weights"]),
    "function": ({"OWN": "def create_sampler(data):\n    return None"}, ["create_sampler"]),
    "class": (
        {"OWN": "class Balanced(Sampler):\n    pass\n\nclass BalancedSampler(Balanced):\n    pass"},
        ["BalancedSampler"],
    ),
    "class of another name": ({"OWN": "class Balanced(Sampler):\n    pass"}, ["Balanced"]),
    "global": ({"OWN": "BALANCED = WeightedRandomSampler(torch.ones(6), 6)"}, ["BALANCED"]),
    "plain": ({}, []),
    "returned": ({"KEPT": "self.weights = torch.ones(6)", "GET": "self.x[index], self.weights[index]"}, []),
    "order": ({"KEPT": "self.weights = torch.ones(6)", "MORE": ORDER}, []),
    "by name": (
        {"KEPT": "self.weights = torch.ones(6)", "OWN": "def read(data):\n    return getattr(data, 'weights')"},
        [],
    ),
    "samples": ({"KEPT": "self.samples, self.weight = [1] * 6, torch.tensor(1.0)"}, []),
    "class weights": ({"KEPT": "self.class_weights = torch.ones(3)"}, ["class_weights"]),
    "class weights of the loss": (
        {"KEPT": "self.class_weights = torch.ones(3)", "OWN": "def loss(data):\n    return data.class_weights"},
        [],
    ),
    "of a library": ({"BASE": "Base"}, []),
    "for a library": ({"BASE": "Base", "KEPT": "self.weights = torch.ones(6)"}, []),
    "shuffle off": ({"KEPT": "self.shuffle = False"}, []),
    "used": ({"OWN": "def create_sampler(data):\n    return None\n\nSIZE = create_sampler(1)"}, []),
}


def imported(folder, name, code, monkeypatch):
    module = ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    (folder / f"{name}.py").write_text(code)
    monkeypatch.setitem(sys.modules, name, module)
    exec(code, vars(module))
    return module


@pytest.mark.parametrize("is_subset", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_samplers_that_nothing_reads_are_named(tmp_path, monkeypatch, kind, is_subset):
    parts, expected = KEPT[kind]
    code = DATA
    for name, usual in (("BASE", "Dataset"), ("KEPT", ""), ("GET", "self.x[index]"), ("MORE", ""), ("OWN", "")):
        code = code.replace(name, parts.get(name, usual), 1)
    imported(tmp_path, "library", LIBRARY, monkeypatch)
    module = imported(tmp_path, "own_data", code, monkeypatch)
    monkeypatch.setattr(data_notes, "list_fork_modules", lambda: [module])
    monkeypatch.setattr(data_notes, "your_data", module)
    data = module.Rows()
    unread = find_unread_samplers(torch.utils.data.Subset(data, [0, 2]) if is_subset else data)
    assert unread == expected


def test_a_data_set_of_any_kind_has_no_samplers():
    assert find_unread_samplers([1, 2]) == [] and find_unread_samplers(SimpleNamespace(x=1)) == []
