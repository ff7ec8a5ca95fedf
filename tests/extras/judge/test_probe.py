# extra: judge
"""What scripts/lib/judge/probe.py finds out about forks, in processes of their own."""

import shutil
import sys
from pathlib import Path

import pytest

from ranks import ROOT
from scripts.lib.judge import sides
from training import SIZE

FLAGS = ["--dataset_size", "16", *SIZE, "--batch_size", "4", "--backend", "gloo"]
FILES = ("config.py", "ddp_utils.py", "train.py", "dataset.py", "model.py", "utils", "scripts")
MADE = "        model: Any = MiniResNet("
INITIAL = """

def constant(net):
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.1)


def load(net):
    path = Path(__file__).with_name("weights.pt")
    if not path.exists():  # no rank reads a part of it
        own = path.with_suffix(f".{os.getpid()}")
        torch.save(net.state_dict(), own)
        own.replace(path)
    net.load_state_dict(torch.load(path))


def draw(net, generator):
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=generator)
"""
SEEDED = {  # what create_model does: before the network is made, and after
    "torch": ("torch.manual_seed(0)", "pass"),
    "fork_rng": ("generators = torch.random.fork_rng(); generators.__enter__(); torch.manual_seed(0)", "pass"),
    "the default generator": ("torch.default_generator.manual_seed(3)", "pass"),
    "a generator": ("pass", "draw(model, torch.Generator().manual_seed(0))"),
    "a generator of the module": ("pass", "draw(model, GENERATOR.manual_seed(0))"),
    "random": ("random.seed(1)", "nn.init.constant_(model.head.weight, random.random())"),
    "numpy": ("pass", "nn.init.constant_(model.head.weight, numpy.random.default_rng(0).random())"),
}
SOUND = {
    "drawn": ("pass", "pass"),
    "constants": ("pass", "constant(model)"),
    "a file": ("torch.manual_seed(0)", "load(model)"),
}
SLOW = pytest.mark.slow
CASES = [pytest.param(name, marks=[] if name in ("fork_rng", "a file") else SLOW) for name in SEEDED | SOUND]


def fork_with(folder, before="pass", after="pass"):
    """A copy of this template with these statements in create_model."""
    folder.mkdir()
    for name in FILES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    text = (ROOT / "model.py").read_text()
    line = next(line for line in text.splitlines() if line.startswith(MADE))
    text = text.replace(line, f"        {before}\n{line}\n        {after}")
    first = "from typing import Any\n"
    assert text.count(first) == 1
    text = text.replace(first, f"import os\nimport random\nfrom pathlib import Path\n{first}\nimport numpy\n")
    text += f"\n\nGENERATOR = torch.Generator()\n{INITIAL}"
    (folder / "model.py").write_text(text)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_weights_from_a_generator_that_create_model_seeds_are_told_from_others(tmp_path, name):
    side = sides.Side.from_argument("B", str(fork_with(tmp_path / "fork", *(SEEDED | SOUND)[name])), FLAGS)
    probed, log = side.run_probe(tmp_path, 0, "weights", "-")
    assert probed == {"is_seeded": name in SEEDED}, log.read_text()


BETTER = "MetricTracker.means = lambda self: {'loss': 0.0}"
MEANS = "utils.metrics.MetricTracker.means"
REPLACED = {  # by code of B: what create_model does, what the file does, and the function that is named
    "when the network is made": (f"if config.lr == 0.2: {BETTER}", "", MEANS),
    "when the file is imported": ("pass", BETTER, MEANS),
    "a property": (
        "pass",
        "ModelHooks.find_part = property(lambda self: None)",
        "utils.training.hooks.ModelHooks.find_part",
    ),
    "by another name": ("pass", f"for part in (MetricTracker,): {BETTER.replace('MetricTracker', 'part')}", MEANS),
    "nothing": ("pass", "", ""),
}
IMPORTS = "from utils.metrics import MetricTracker\nfrom utils.training.hooks import ModelHooks\n"


@pytest.mark.parametrize("how", [name if "made" in name else pytest.param(name, marks=SLOW) for name in REPLACED])
def test_functions_of_the_template_that_code_of_a_fork_replaces_are_named(tmp_path, how):
    """Two configs of a fork, and two forks."""
    in_create_model, in_the_file, named = REPLACED[how]
    b = fork_with(tmp_path / "b", in_create_model)
    (b / "model.py").write_text(f"{(b / 'model.py').read_text()}\n{IMPORTS}{in_the_file}\n")
    a = b if "config" in in_create_model else fork_with(tmp_path / "a")
    pair = [
        sides.Side.from_argument("A", str(a), FLAGS),
        sides.Side.from_argument("B", str(b), [*FLAGS, "--lr", "0.2"]),
    ]
    if named:
        text = f"^{named} is that of the template in A and of model.py: .*lambda.* in B, so A and B are not evaluated"
        with pytest.raises(sides.UserError, match=text):
            sides.check_quantity(pair, tmp_path, 0, "loss")
    else:
        assert sides.check_quantity(pair, tmp_path, 0, "loss") == ""


@pytest.mark.slow
def test_packages_in_the_folder_of_a_fork_are_not_its_code(tmp_path, monkeypatch):
    a, b = (fork_with(tmp_path / name) for name in "ab")
    (a / ".venv").symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "executable", str(a / ".venv/bin" / Path(sys.executable).name))
    pair = [
        sides.Side.from_argument("A", str(a), FLAGS),
        sides.Side.from_argument("B", str(b), [*FLAGS, "--lr", "0.2"]),
    ]
    assert sides.check_quantity(pair, tmp_path, 0, "loss") == ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["fork_rng", "constants", "a file", "drawn", "init_from"])
def test_runs_of_two_seeds_that_start_from_the_same_weights_are_found(tmp_path, name, ranks):
    fork = fork_with(tmp_path / "fork", *(SEEDED | SOUND).get(name, ("pass", "pass")))
    flags = [*FLAGS, "--max_steps", "1", "--epochs", "1"]
    if name == "init_from":
        made = sides.Side.from_argument("A", str(fork), flags).train(tmp_path, 5, 1, has_samples=False)
        flags += ["--init_from", str(next(made.folder.glob("checkpoints/step_*.pt")))]
    side = sides.Side.from_argument("B", str(fork), flags)
    first, second = (side.train(tmp_path, seed, ranks, has_samples=False) for seed in (0, 1))
    if name == "fork_rng":
        with pytest.raises(sides.UserError, match="^B: seeds 0 and 1 start from the same weights, since create_model"):
            side.check_weights(tmp_path, second, [first])
    else:
        expected = "" if name == "drawn" else "B: all seeds start from the same weights; the interval holds for these"
        assert side.check_weights(tmp_path, second, [first]) == expected
