"""scripts/verify.py finds what a float64 run on sound samples cannot show: a precision too coarse for the targets, and
validation samples that are trained on."""

import re

import pytest

import forks
from ranks import copy_repository, slow
from test_verify import outcomes

FLAGS = "--backend gloo --num_workers 0 --amp_dtype bf16".split()

REGRESSION = """
import torch
from torch.utils.data import Dataset
from utils.data.loader import create_distributed_dataloader

class Rows(Dataset):
    num_classes, in_channels, image_size = 2, 3, 8

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = 20000 + 20 * (self.x[:, :1] + 0.3 * torch.randn(count, 1, generator=generator))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

def is_prepared(config):
    return True

def create_dataset(config, split):
    return Rows(500 if split == "train" else 100, len(split)) if split != "test" else None
"""
LINEAR = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return OUTPUT

def create_model(config, device):
    return Net().to(device)

def param_groups(model, config):
    return [{"params": list(model.parameters())}]

def compute_loss(model, batch):
    x, y = batch
    predicted = PREDICTED
    return {"loss": (F.mse_loss(predicted, y, reduction="sum"), len(y))}
"""


@pytest.mark.parametrize(
    ("output", "predicted", "flags", "is_found"),
    [
        ("self.net(x)", "model(x)", "", True),
        slow("self.net(x).float()", "model(x)", "", True),  # rounded before
        slow("self.net(x) * 20 + 20000", "model(x)", "", True),
        slow("self.net(x).float() * 20 + 20000", "model(x)", "", False),
        slow("self.net(x)", "model(x).float() * 20 + 20000", "", False),  # outputs are not in the units of the targets
        slow("self.net(x)", "model(x)", "--amp_dtype auto --no-use_amp", False),
    ],
)
def test_a_precision_too_coarse_for_the_targets_is_found(tmp_path, output, predicted, flags, is_found):
    """Targets near 20,000 with a spread of 20: bfloat16 has steps of 64 to 128 there."""
    fork = copy_repository(tmp_path)
    (fork / "dataset.py").write_text(REGRESSION)
    (fork / "model.py").write_text(LINEAR.replace("OUTPUT", output).replace("PREDICTED", predicted))
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS, *flags.split())
    broken = [name for name, outcome in outcomes(ended.out).items() if outcome == "BROKEN"]
    assert broken == ["loss"] * is_found, ended.text
    text = "output is bfloat16, too coarse for its targets (near"
    assert (text in ended.out) == is_found and "please check, or use" not in ended.out


@pytest.mark.slow
def test_an_output_far_from_zero_that_is_no_prediction_is_a_note(tmp_path):
    fork = copy_repository(tmp_path)
    (fork / "dataset.py").write_text(REGRESSION.replace("20000 + 20 *", "0.0 +"))
    model = LINEAR.replace("OUTPUT", "self.net(x) + 20000").replace("PREDICTED", "model(x) - 20000")
    (fork / "model.py").write_text(model)
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS)
    assert ended.code == 0 and re.search(r"bfloat16 rounds \w+ by \d+\.\d% of its spread: please check", ended.out)


DATA = "GENERATOR, SHARED = torch.Generator(), Rows(500, 1)\n\ndef create_dataset"  # one generator for all calls
SPLIT = (
    REGRESSION.replace("20000 + 20 *", "0.0 +").replace("def create_dataset", DATA).rpartition("    return Rows(")[0]
)
SPLIT += """
    if split == "test":
        return None
    SPLITTING
"""
UNSEEDED = """full = Rows(500, 1)
    train, val = torch.utils.data.random_split(full, [400, 100], GENERATOR)
    return train if split == "train" else val"""
SEEDED = UNSEEDED.replace("GENERATOR", "torch.Generator().manual_seed(1)")
OWN = """order = torch.randperm(500, generator=GENERATOR).tolist()
    full = Rows(500, 1)
    kept = Rows(400 if split == "train" else 100, 2)
    chosen = order[:400] if split == "train" else order[400:]
    kept.x, kept.y = full.x[chosen], full.y[chosen]
    return kept"""
FEW = """rows = Rows(500 if split == "train" else 100, len(split))
    first = Rows(2, 1)
    rows.x[5:7], rows.y[5:7] = first.x, first.y
    return rows"""
DISCRETE = """rows = Rows(500 if split == "train" else 100, len(split))
    rows.x = (rows.x[:, :1] > 0).float().expand(-1, 8).clone()
    rows.y = rows.x[:, :1] * 2
    return rows"""


@pytest.mark.parametrize(
    ("splitting", "outcome", "text"),
    [
        (UNSEEDED, "BROKEN", "of 100 compared) are trained on: create_dataset draws another split at each call"),
        (SEEDED, "ok", "; none of 100 held-out rows is trained on"),
        slow(OWN, "BROKEN", "of 100 compared) are trained on: create_dataset draws another split at each call"),
        slow(UNSEEDED.replace("Rows(500, 1)", "SHARED"), "BROKEN", "are trained on"),
        slow("return Rows(500, 1)", "BROKEN", "held-out rows 0, 1, 2 and 497 more (500 of 500 compared)"),
        slow(FEW, "ok", "; please check: 2 of 100 held-out samples equal one of 500 training samples: 5, 6"),
        slow(DISCRETE, "ok", "; please check: 100 of 100 held-out samples equal"),
        slow("return Rows(500, len(split))", "ok", "; 0 of 500 held-out samples equal one of 500 training samples"),
    ],
)
def test_validation_rows_that_are_trained_on_are_found(tmp_path, splitting, outcome, text):
    """As a LightningDataModule splits, but once per split; the other cases are sound, or a few equal rows."""
    fork = copy_repository(tmp_path)
    (fork / "dataset.py").write_text(SPLIT.replace("SPLITTING", splitting))
    (fork / "model.py").write_text(LINEAR.replace("OUTPUT", "self.net(x)").replace("PREDICTED", "model(x)"))
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS)
    found = outcomes(ended.out)
    assert found.pop("content") == outcome and set(found.values()) == {"ok"}, ended.text
    assert text in re.search("^.* +content .*", ended.out, re.MULTILINE)[0], ended.text
