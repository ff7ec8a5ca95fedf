# extra: template
"""scripts/test.sh --fork: the tests that must pass in any fork, run in forks of this repository."""

import re
import subprocess
import sys

import pytest

import forks
from ranks import ROOT, copy_repository, launch
from recipe_forks import Fork

# the normalisation differs; the network keeps its name, so that the rest of the file need not change
NO_BATCH_NORM = ("nn.BatchNorm2d(", "nn.GroupNorm(1, ")


def text_fork(folder):
    return Fork(folder, "text").folder


def fork_without_batch_norm(folder):
    fork = Fork(folder, "vision_transformer").folder
    model = fork / "model.py"
    text = model.read_text()
    assert NO_BATCH_NORM[0] in text
    model.write_text(text.replace(*NO_BATCH_NORM))
    return fork


MODEL = """
from layers import Scaled
from torch import nn
from torch.nn import functional as F

def create_model(config, device):
    return nn.Sequential(nn.Linear(4, config.width), nn.Tanh(), Scaled(config.width)).to(device)

def param_groups(model, config):
    return [{"params": list(model.parameters())}]

def compute_loss(model, batch):
    return {"loss": (F.mse_loss(model(batch[0])[:, 0], batch[1], reduction="sum"), len(batch[1]))}
"""
LAYERS = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.scale
"""
DATA = """
import torch
from torch.utils.data import TensorDataset

from utils.data.loader import create_distributed_dataloader

def is_prepared(config):
    return True

def prepare_data(config):
    pass

def create_dataset(config, split):
    numbers = torch.randn(40, 4)
    return TensorDataset(numbers, numbers.sum(1)) if split in ("train", "val") else None
"""


def fork_with_other_fields(folder):
    """Its own marked block, and a file of its own in the root."""
    copy_repository(folder)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    before, _, rest = (folder / "config.py").read_text().partition("    # ---- yours")
    mark, _, rest = rest.partition("\n")
    field = '    width: int = yours(8, "width", at_least(1))\n'
    text = f"{before}    # ---- yours{mark}\n{field}    # ---- end of yours{rest.partition('# ---- end of yours')[2]}"
    (folder / "config.py").write_text(text)
    for name, content in {"model": MODEL, "layers": LAYERS, "dataset": DATA}.items():
        (folder / f"{name}.py").write_text(content.lstrip())
    return folder


@pytest.mark.guarantee("fork-tests")
def test_the_fork_suite_is_collected_in_a_fork(tmp_path):
    """Nothing outside tests/builtin imports names that only the shipped model.py and dataset.py have."""
    fork = text_fork(tmp_path)
    words = "-q --assert=plain -p no:cacheprovider -p no:xdist --collect-only tests/faults tests/distributed tests/unit"
    (fork / "collect.py").write_text(f"import pytest\nraise SystemExit(pytest.main({words.split()}))\n")
    ended = forks.run(fork, 0, "collect.py")
    assert ended.code == 0, ended.text
    assert int(re.search(r"(\d+)(?:/\d+)? tests collected", ended.out)[1]) > 500


@pytest.mark.slow
def test_rules_and_settings_hold_in_a_fork_with_fields_and_files_of_its_own(tmp_path):
    fork = fork_with_other_fields(tmp_path)
    words = "-m pytest -q -p no:cacheprovider -p no:xdist tests/unit/test_architecture.py tests/unit/test_config.py"
    words += " tests/unit/test_first_line.py tests/unit/test_provenance.py"
    ended = launch([sys.executable, *words.split()], cwd=fork, deadline=200)
    assert ended.code == 0, ended.text
    ended = forks.run(
        fork, 2, "train.py", *"--batch_size 4 --epochs 2 --width 16 --backend gloo --num_workers 1".split()
    )
    assert ended.code == 0, ended.text


@pytest.mark.guarantee("fork-tests")
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("make", [text_fork, fork_without_batch_norm, fork_with_other_fields])
def test_the_fork_suite_passes_in_a_fork(tmp_path, make):
    fork = make(tmp_path)
    subprocess.run(["git", "add", "-A"], cwd=fork, check=True)  # as in a clone
    # without the slow ones, and those of the built-in data
    rest = "tests/faults tests/extras --ignore=tests/extras/images tests/distributed tests/unit -n 4 --dist loadfile"
    for words in ([], rest.split()):
        ended = launch(["scripts/test.sh", "--fork", *words], cwd=fork, deadline=900)
        assert ended.code == 0, ended.text


# tells what it is asked to run, and has the packages that the test names
STUB = """#!/bin/sh
case "$*" in
*find_spec*) shift 2; for pair in "$@"; do case " $LACKS " in *" ${pair%:*} "*) printf '%s ' "${pair#*:}";; esac; done;;
"-m pip"*) echo "pip: $*";;
"-m pytest"*) echo "pytest: $*";;
esac
"""


def test_every_file_that_the_fork_suite_names_exists():
    text = (ROOT / "scripts/test.sh").read_text()
    fork_part = text[text.index("        fork)") : text.index("        *) for")]
    patterns = [pattern for line in re.findall(r"\badd (.*)", fork_part) for pattern in line.split()]
    for name in re.search("for name in (.*); do", fork_part)[1].split():
        patterns.append(f"tests/unit/test_{name}.py")
    assert len(patterns) > 8
    # bash leaves a pattern as it is if no file matches
    paths = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {' '.join(patterns)}"], cwd=ROOT, text=True)
    assert [path for path in paths.split() if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("words", "lacks", "installed", "folders"),
    [
        (["--fork"], "", "", ["unit"]),
        (["--fork"], "xdist mypy ruff transformers", "pytest-xdist", ["unit"]),
        (["--fork", "--all"], "", "", ["faults", "extras", "distributed", "unit"]),
        (["--fork", "tests/unit/test_logger.py"], "", "", []),
        (["--quick"], "ruff", "ruff", ["unit"]),
        (
            ["--all", "-k", "x"],
            "moto peft",
            "moto[server] peft",
            "faults builtin extras distributed comparison unit".split(),
        ),
    ],
)
def test_what_is_installed_is_said_before_and_which_folders_run(tmp_path, words, lacks, installed, folders):
    for name in ("python", "shellcheck"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    existing = [folder for folder in folders if (ROOT / "tests" / folder).is_dir()]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LACKS": lacks, "CI": ""}
    ended = launch(["bash", "scripts/test.sh", *words], cwd=ROOT, env=env, deadline=60)
    assert ended.code == 0, ended.text
    announced, requested = (
        re.findall(pattern, ended.out) for pattern in (r"Installing .*: (.*)\. Ctrl-C", r"pip: .*txt (.*)")
    )
    assert [text.strip() for text in announced] == [text.strip() for text in requested] == [installed] * bool(installed)
    assert not announced or ended.out.index("Installing") < ended.out.index("pip:")
    files = re.findall(r"(?: |=)(tests/\w+/\w+\.py)", ended.out)
    assert all((ROOT / file).is_file() for file in files)
    assert ("tests/distributed/test_kernel.py" in files) == (words == ["--fork"])
    assert re.findall(r" tests/(\w+)(?= |$)", ended.out.split("pytest: ")[1].splitlines()[0]) == existing
