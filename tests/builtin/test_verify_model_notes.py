# extra: verify and template
"""scripts/verify.py notes what is seldom meant in a model and its loss. tests/unit/test_verify_notes.py has tables of
the single looks."""

import re

import pytest

import forks
from ranks import copy_repository, slow

FLAGS = "--backend gloo --num_workers 0 --batch_size 300".split()
DATA = """
import torch
from torch.utils.data import Dataset
from utils.data.loader import create_distributed_dataloader

class Texts(Dataset):
    num_classes, in_channels, image_size = 2, 3, 8

    def __init__(self, count, seed):
        self.tokens = torch.randint(20, (count, 13), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]

def is_prepared(config):
    return True

def create_dataset(config, split):
    return Texts(400 if split == "train" else 100, len(split)) if split != "test" else None
"""
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.features = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).requires_grad_(False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.positions = nn.Parameter(torch.randn(12, 16), requires_grad=False)

    def train(self, mode=True):
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, ids):
        x = self.tokens(ids) + self.positions
        x = x + self.features(x.flatten(0, 1)).view_as(x)
        mask = torch.ones(12, 12, dtype=torch.bool).triu(1)
        return self.head(self.layer(x, mask))

def create_model(config, device):
    net = Net()
    net.features[1].running_mean += 0.5
    return net.to(device)

def param_groups(model, config):
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]

def compute_loss(model, batch):
    targets = batch[:, 1:]
    logits = model(batch[:, :-1])
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    right = logits.argmax(-1) == targets
    first = right[:, 0].sum()
    metrics = {"last": (right[:, -1].sum(), len(right)), "first": (first, len(right))}
    return metrics | {"loss": (nll, targets.numel()), "right": (right.sum(), targets.numel())}

def predict(model, batch):
    return {"logits": model(batch[:, :-1])}
"""
COUNT = "first = right[:, 0].sum()"
NOTES = {  # a line of the sound fork: what replaces it, the check, and its note
    "self.head.weight = self.tokens.weight": (
        "self.head.weight = nn.Parameter(self.tokens.weight.clone())",
        "parameters",
        "tokens.weight and head.weight have the same random values",
    ),
    "randn(12, 16), requires_grad=False)": (
        "randn(12, 16))",
        "parameters",
        "A seed in the code determines the initial values of positions",
    ),
    "self.features.eval()": (
        "pass",
        "training",
        "The running statistics of frozen layers move in training (features.1)",
    ),
    ".triu(1)": (".triu(2)", "loss", "predictions depend on these inputs. Use a causal mask"),
    COUNT: ("first = right[:, -1].sum()", "loss", "last and first have equal sums and counts"),
}


def verified(folder, ranks, model):
    fork = copy_repository(folder)
    (fork / "dataset.py").write_text(DATA)
    (fork / "model.py").write_text(model)
    return forks.run(fork, ranks, "scripts/verify.py", *FLAGS)


@pytest.mark.parametrize("ranks", [0, slow(2)])
def test_what_is_seldom_meant_is_noted(tmp_path, ranks):
    model = MODEL
    for line, (other, *_) in NOTES.items():
        assert line in model
        model = model.replace(line, other)
    ended = verified(tmp_path, ranks, model)
    assert ended.code == 0, ended.text
    for _, name, note in NOTES.values():
        (line,) = re.findall(f"^ok      {name} .*", ended.out, re.MULTILINE)
        assert "Please check: " in line and note in line, line


@pytest.mark.parametrize("ranks", [0, slow(2)])
def test_sound_counterparts_are_no_notes(tmp_path, ranks):
    ended = verified(tmp_path, ranks, MODEL)
    notes = [note for line in ended.out.splitlines() for note in line.split("Please check: ")[1:]]
    assert ended.code == 0 and all("other counts than the loss" in note for note in notes), ended.text
    assert "Not checked: whether the model" not in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_count_of_eight_bits_is_found(tmp_path, ranks):
    model = MODEL.replace(COUNT, "first = right[:, 0].to(torch.uint8).sum(dtype=torch.uint8)")
    ended = verified(tmp_path, ranks, model)
    assert ended.code == 1 and re.search("^BROKEN  loss .*A sum in torch.uint8 may reach 300", ended.out, re.MULTILINE)
