# extra: verify and template
"""scripts/verify.py finds what a float64 run on sound samples cannot show: a precision too coarse for the targets, and
validation samples that are trained on."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import dataset
import forks
from config import TrainingConfig, list_fork_settings
from ddp_utils import DistributedContext
from lib.verify import data_checks
from lib.verify.fork import default_dtype
from lib.verify.hidden_state import SHIPPED_FIELDS
from lib.verify.new_process import summarize_dataset
from ranks import copy_repository, slow
from test_verify import outcomes
from utils.data.sets import load_data

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


@pytest.mark.guarantee("verify")
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
    text = "The output is bfloat16, which is too coarse for its targets (near"
    assert (text in ended.out) == is_found and "Use --no-use_amp or a float32" not in ended.out


@pytest.mark.slow
def test_an_output_far_from_zero_that_is_no_prediction_is_a_note(tmp_path):
    fork = copy_repository(tmp_path)
    (fork / "dataset.py").write_text(REGRESSION.replace("20000 + 20 *", "0.0 +"))
    model = LINEAR.replace("OUTPUT", "self.net(x) + 20000").replace("PREDICTED", "model(x) - 20000")
    (fork / "model.py").write_text(model)
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS)
    assert ended.code == 0 and re.search(r"Please check: bfloat16 rounds the \w+ by \d+\.\d% of its spread", ended.out)


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


@pytest.mark.guarantee("verify")
@pytest.mark.parametrize(
    ("splitting", "outcome", "text"),
    [
        (UNSEEDED, "BROKEN", "of 100 compared) are trained on. create_dataset draws another split at each call"),
        slow(SEEDED, "ok", " None of 100 held-out rows is trained on."),
        slow(OWN, "BROKEN", "of 100 compared) are trained on. create_dataset draws another split at each call"),
        slow(UNSEEDED.replace("Rows(500, 1)", "SHARED"), "BROKEN", "are trained on"),
        slow("return Rows(500, 1)", "BROKEN", "Held-out rows 0, 1, 2 and 497 more (500 of 500 compared)"),
        slow(FEW, "ok", " Please check: 2 of 100 held-out samples equal one of 500 training samples (rows 5, 6)."),
        slow(DISCRETE, "ok", " Please check: 100 of 100 held-out samples equal"),
        slow("return Rows(500, len(split))", "ok", " 0 of 500 held-out samples equal one of 500 training samples."),
    ],
)
def test_validation_rows_that_are_trained_on_are_found(tmp_path, splitting, outcome, text):
    """As a LightningDataModule splits, but once per split; the other cases are sound, or a few equal rows."""
    fork = copy_repository(tmp_path)
    (fork / "dataset.py").write_text(SPLIT.replace("SPLITTING", splitting))
    (fork / "model.py").write_text(LINEAR.replace("OUTPUT", "self.net(x)").replace("PREDICTED", "model(x)"))
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS)
    results = outcomes(ended.out)
    assert results.pop("content") == outcome and set(results.values()) == {"ok"}, ended.text
    assert text in re.search("^.* +content .*", ended.out, re.MULTILINE)[0], ended.text


# ---- what only another order of files, a batch of another kind or another sample shows ----

FILES = (
    REGRESSION.replace("import torch\n", "import torch\nfrom pathlib import Path\n", 1).partition("class Rows")[0]
    + """
class Rows(Dataset):
    def __init__(self, folder):
        self.paths = LISTED

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return torch.load(self.paths[index])

def is_prepared(config):
    return True

def create_dataset(config, split):
    return Rows(Path(config.data_dir) / split) if split != "test" else None
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listed", "is_found"),
    [
        ("list(folder.glob('*.pt'))", True),
        ("[folder / name for name in __import__('os').listdir(folder)]", True),
        ("[entry.path for entry in __import__('os').scandir(folder)]", True),
        ("sorted(folder.glob('*.pt'))", False),
    ],
)
def test_samples_in_the_order_of_the_file_system_are_found(tmp_path, listed, is_found):
    fork = copy_repository(tmp_path / "fork")
    torch.manual_seed(0)
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in range(40):
            torch.save((torch.randn(8), torch.randn(1)), tmp_path / split / f"{number}.pt")
    (fork / "dataset.py").write_text(FILES.replace("LISTED", listed))
    (fork / "model.py").write_text(LINEAR.replace("OUTPUT", "self.net(x)").replace("PREDICTED", "model(x)"))
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS, "--data_dir", tmp_path)
    broken = [name for name, outcome in outcomes(ended.out).items() if outcome == "BROKEN"]
    text = "Training and held-out samples differ in a new process with another hash seed"
    assert broken == ["content"] * is_found and (text in ended.out) == is_found, ended.text


CONTRASTIVE = """
    x, y = batch
    print("a line of the model")
    a, b = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1 * y), dim=1)
    logits = a @ b.T * 5
    return {"loss": (F.cross_entropy(logits, torch.arange(len(x)), reduction="sum"), len(x))}
"""
DECLARED = "\n\ndepends_on_batch = True\n"
DICE = """
    x, y = batch
    shares, wanted = model(x).sigmoid(), (y > 0).double().expand(-1, 4)
    dice = 1 - (2 * (shares * wanted).sum() + 1) / (shares.sum() + wanted.sum() + 1)
    return {"loss": (dice * len(x), len(x))}
"""


def fork_with(folder, compute_loss):
    fork = copy_repository(folder)
    (fork / "dataset.py").write_text(REGRESSION.replace("20000 + 20 *", "0.0 +"))
    model = LINEAR.replace("OUTPUT", "self.net(x)").replace("32, 1", "32, 4").partition("    x, y = batch\n")[0]
    (fork / "model.py").write_text(model + compute_loss)
    return fork


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute_loss", "outcome", "text"),
    [
        (CONTRASTIVE + DECLARED, "ok", "Please check: depends_on_batch is declared, so the loss of a sample may"),
        (CONTRASTIVE, "BROKEN", "as a contrastive loss does, declare depends_on_batch = True in model.py"),
        (CONTRASTIVE.replace('"sum"), len', '"mean"), len') + DECLARED, "BROKEN", "a mean instead of a sum"),
        (CONTRASTIVE.replace('"sum"), len', '"mean"), len'), "BROKEN", "Let compute_loss return sums"),
        (DICE + DECLARED, "ok", "Please check: depends_on_batch is declared"),
        (DICE.replace("dice * len(x)", "dice") + DECLARED, "BROKEN", "a mean instead of a sum"),
        (  # a mean over what a batch counts, times its size: sizes differ
            "    x, y = batch\n    w = (x[:, 0] > 0).double() + 0.1\n"
            "    loss = (w * model(x).square().sum(1)).sum() / w.sum() * len(x)\n"
            "    return {'loss': (loss, len(x))}\n",
            "BROKEN",
            "Let compute_loss return sums",
        ),
    ],
)
def test_a_loss_that_depends_on_the_batch_is_declared_and_a_mean_or_a_penalty_is_a_fault(
    tmp_path, compute_loss, outcome, text
):
    ended = forks.run(fork_with(tmp_path, compute_loss), 0, "scripts/verify.py", *FLAGS)
    results = outcomes(ended.out)
    assert results["loss"] == outcome and text in re.search("^.* +loss .*", ended.out, re.MULTILINE)[0], ended.text
    if outcome == "ok":
        assert ended.code == 0 and set(results.values()) == {"ok"}, ended.text
        assert ended.out.count("a line of the model") <= 1  # printed in each of dozens of passes


@pytest.mark.slow
@pytest.mark.parametrize(("condition", "is_noted"), [("y > 99", True), ("torch.arange(len(y)) >= 0", False)])
def test_a_metric_that_counts_nothing_is_named(tmp_path, condition, is_noted):
    compute_loss = f"""    x, y = batch
    rare = {condition}
    predicted = model(x)
    return {{"loss": (predicted.square().sum(), len(y)), "rare": ((predicted[:, :1].T * rare).sum(), rare.sum())}}
"""
    ended = forks.run(fork_with(tmp_path, compute_loss), 0, "scripts/verify.py", *FLAGS)
    (line,) = re.findall("^ok +evaluation.*", ended.out, re.MULTILINE)
    assert ("Not checked: rare, for which nothing counted." in line) == is_noted, ended.text


@pytest.mark.slow
def test_evaluation_samples_are_spread_over_a_set_that_is_sorted(tmp_path):
    """The last samples of the validation set give another result in each pass."""
    compute_loss = """    import random
    x, y = batch
    noise = random.random() if not torch.is_grad_enabled() and (y > 50).any() else 0
    return {"loss": (model(x).square().sum() + noise, len(y))}
"""
    fork = fork_with(tmp_path, compute_loss)
    data = (fork / "dataset.py").read_text().replace("    def __len__", "        self.y[-20:] = 99\n\n    def __len__")
    (fork / "dataset.py").write_text(data)
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS)
    assert outcomes(ended.out)["evaluation"] == "BROKEN", ended.text


@pytest.mark.slow
def test_a_cache_and_a_value_without_memory_are_no_findings(tmp_path):
    """A cache of samples, the latest output, a generator that is seeded before each use, and functools.cache."""
    compute_loss = """    x, y = batch
    model = getattr(model, "module", model)
    model.latest, model.count = model(x), len(x)
    GENERATOR.manual_seed(int(x.abs().sum() * 100))
    scale = scaled(len(x)) + 0 * torch.rand((), generator=GENERATOR)
    return {"loss": ((model.latest * scale).square().sum(), len(y))}

import functools
GENERATOR = torch.Generator()

@functools.cache
def scaled(count):
    return 0.5
"""
    fork = fork_with(tmp_path, compute_loss)
    data = (
        (fork / "dataset.py")
        .read_text()
        .replace(
            "        return self.x[index], self.y[index]",
            """
        if not hasattr(self, "cache"):
            self.cache, self.file = {}, None
        self.cache.setdefault(index, (self.x[index], self.y[index]))
        return self.cache[index]""",
        )
    )
    (fork / "dataset.py").write_text(data)
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS)
    assert ended.code == 0, ended.text
    (line,) = re.findall("^ok +resume.*", ended.out, re.MULTILINE)
    assert " Please check: " in line and "training set.cache" in line and "latest" not in line, line


def test_the_fields_of_the_shipped_model_and_data_are_known_to_verify():
    assert sorted(field.name for field in list_fork_settings()) == sorted(SHIPPED_FIELDS)


def test_data_created_in_float32_are_compared_in_float32():
    """verify computes in float64."""
    config = TrainingConfig(image_size=8, dataset_size=16)
    ctx = DistributedContext(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    sets = load_data(dataset, config, ctx)
    (held_out,) = sets.held_out.values()
    observed = [summarize_dataset(data, config.seed) for data in (sets.train, held_out)]
    fork = mock.Mock(config=config, train_set=sets.train, held_out=held_out)
    fork.new_process.answer.return_value = observed, ""
    with default_dtype(torch.float64):
        with default_dtype():
            assert data_checks.check_new_process_samples(fork) == ""
        assert torch.get_default_dtype() == torch.float64


@pytest.mark.parametrize(
    ("rows", "alone", "is_found"),
    [
        ([0, 3, 4, 9], 0, False),  # where the bag of each sample begins, for an EmbeddingBag
        ([0, 1, 2, 3], 0, False),
        ([0, 2, 1, 3], 0, False),  # an order, as of lengths
        ([0, 2, 2, 1], 0, True),
        ([0, 1, 2, 3], 1, True),
        ([0.0, 1.0, 2.0, 3.0], 0.0, True),
        ([[0], [1], [2], [3]], [0], True),
    ],
)
def test_positions_in_a_batch_are_no_values_of_a_sample(rows, alone, is_found):
    subset, plan = SimpleNamespace(indices=[*range(4)]), [[0, 1, 2, 3]]
    labels = torch.tensor([7, 5, 6, 4])
    collated = {0: [labels, torch.tensor(rows)]}
    by_index = {index: [labels[index : index + 1], torch.tensor([alone])] for index in range(4)}
    with (
        pytest.raises(data_checks.BrokenInvariant, match="differs between a batch and alone")
        if is_found
        else nullcontext()
    ):
        data_checks.check_rows(subset, plan, collated, by_index)
