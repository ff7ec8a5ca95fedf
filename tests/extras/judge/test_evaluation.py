# extra: judge
"""Which code of a fork scripts/judge.py asks a person to read."""

import pytest

from scripts.lib.judge.evaluation_code import explain_difference, list_notes, list_questions

MODEL = '''"""A model."""
import torch
import helper
from torch import nn
from utils.metrics import MetricTracker


class Net(nn.Module):
    """A network."""

    def forward(self, x):
        return x


def create_model(config, device):
    return Net()
'''
CHANGES = "changes a module. Does it change what is evaluated?"
ACTS = "runs on import. Does it change what is evaluated?"
DATA = "leads to data. Does it learn from held-out samples?"
ANYTHING = "may do anything. Does it change what is evaluated?"
BODY = "\n\ndef after_step(model, progress, taken):\n    "
FOUND = {  # code at the end of model.py: the place, the code that is shown, and the question
    "MetricTracker.means = None": ("", "MetricTracker.means", CHANGES),
    "torch.manual_seed(0)": ("", "torch.manual_seed(0)", ACTS),
    "if True:\n    torch.use(1)": ("", "if True:", ACTS),
    "for each in (MetricTracker,):\n    each.means = None": ("", "for each in (MetricTracker,):", ACTS),
    "with torch.no_grad():\n    x = 1": ("", "with torch.no_grad():", ACTS),
    "x = MetricTracker.means = None": ("x", "MetricTracker.means", CHANGES),
    f"{BODY}torch.sum = None": ("after_step", "torch.sum", CHANGES),
    f"{BODY}del torch.sum": ("after_step", "torch.sum", CHANGES),
    f"{BODY}MetricTracker.__dict__['means'] = 1": ("after_step", "MetricTracker.__dict__['means']", CHANGES),
    f"{BODY}setattr(MetricTracker, 'means', 1)": ("after_step", "setattr(MetricTracker, 'means', 1)", CHANGES),
    f"{BODY}torch.count += 1": ("after_step", "torch.count", CHANGES),
    "class Other(Net):\n    torch.sum = None": ("Other", "torch.sum", CHANGES),
    f"{BODY}exec('pass')": ("after_step", "exec", ANYTHING),
    f"{BODY}eval('1')": ("after_step", "eval", ANYTHING),
    f"{BODY}torch.sys._getframe(1)": ("after_step", "torch.sys._getframe", ANYTHING),
    f"{BODY}error.tb_frame": ("after_step", "error.tb_frame", ANYTHING),
    "from unittest.mock import patch": ("patch", "from unittest.mock import patch", ANYTHING),
    "from importlib import import_module as load": ("load", "from importlib import import_module as load", ANYTHING),
    "from builtins import exec as run": ("run", "from builtins import exec as run", ANYTHING),
    "class Logits(torch.Tensor):\n    @classmethod\n    def __torch_function__(self):\n        pass": (
        "Logits",
        "def __torch_function__(self):",
        ANYTHING,
    ),
    "def param_groups(model, config):\n    global torch\n    torch = None": ("param_groups", "global torch", CHANGES),
    f"{BODY}from dataset import create_dataset": ("after_step", "from dataset import create_dataset", DATA),
    "import dataset as data": ("data", "import dataset as data", DATA),
    "from dataset import Rows": ("Rows", "from dataset import Rows", DATA),
    f"{BODY}helper.dataset.create_dataset()": ("after_step", "helper.dataset.create_dataset", DATA),
    "def param_groups(model, config):\n    open(config.data_dir)": ("param_groups", "config.data_dir", DATA),
}
SOUND = [
    "",
    "if __name__ == '__main__':\n    print(Net())",
    f"{BODY}model.eval()\n    model.count = 1\n    model.table['a'] = 1\n    table = {{}}\n    table[torch] = 1",
    f"{BODY}setattr(model, 'count', 1)",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
    "try:\n    import timm\nexcept ImportError:\n    timm = None",
    "def create_vocabulary(config):\n    return 1",
    "WIDTH = 3\nWIDTH += 1\nassert WIDTH\nTABLE = {}\nTABLE['a'] = 1",
    "from dataset import LONGEST, WORDS",
    "COUNT = 0\n\ndef count():\n    global COUNT\n    COUNT += 1",
    "class Config:\n    data_dir: str = ''",
    "def create_model(config, device):\n    return Net(config.data_dir)",
]


def fork_with(folder, end, **files):
    (folder / "own").mkdir(parents=True)
    texts = {"model.py": f"{MODEL}{end}\n", "helper.py": "", "dataset.py": "torch = 1\n", "config.py": "x = 1\n"}
    for name, text in (texts | {"train.py": "x = 1\n", "ddp_utils.py": "x = 1\n"} | files).items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("end", FOUND)
def test_code_that_may_change_the_evaluation_or_learn_from_held_out_data_is_named(tmp_path, end):
    questions = list_questions(fork_with(tmp_path / "a", end))
    place, code, question = FOUND[end]
    where = f"model.py: {place}" if place else "model.py"
    assert questions == [f"`{code}` ({where}) {question}"]


@pytest.mark.parametrize("end", SOUND)
def test_sound_code_is_not_named(tmp_path, end):
    assert not list_questions(fork_with(tmp_path / "a", end))


def test_a_file_that_hides_a_module_of_python_is_named(tmp_path):
    fork = fork_with(tmp_path / "a", "", **{"statistics.py": "x = 1\n"})
    assert list_questions(fork) == [
        "statistics.py has the name of a module of Python. Is it meant to replace that module?"
    ]


@pytest.mark.parametrize("name", ["helper.py", "other.py", "own/__init__.py", "own/parts.py", "own/rest.py"])
def test_the_files_that_model_and_config_import_are_read(tmp_path, name):
    """Also those that they import, the packages around them, and relative imports."""
    texts = {"helper.py": "import other\n", "other.py": "", "own/__init__.py": ""}
    texts |= {"own/parts.py": "from . import rest\n", "own/rest.py": "", "config.py": "from own.parts import SIZE\n"}
    texts[name] += "torch.manual_seed(0)\n"
    assert list_questions(fork_with(tmp_path / "a", "", **texts)) == [f"`torch.manual_seed(0)` ({name}) {ACTS}"]


def test_other_code_behind_a_relative_import_of_the_evaluation_is_another_evaluation(tmp_path):
    files = {
        "dataset.py": "from own.parts import SIZE\n",
        "own/__init__.py": "",
        "own/parts.py": "from .rest import SIZE\n",
    }
    a, b = (fork_with(tmp_path / name, "", **files, **{"own/rest.py": f"SIZE = {name!r}\n"}) for name in "ab")
    assert explain_difference(a, b).startswith("own/rest.py computes the metric, but is not the same in A and B.")


def test_a_question_about_both_sides_is_one_note(tmp_path):
    a = fork_with(tmp_path / "a", "", **{"helper.py": "print(1)\n"})
    b = fork_with(tmp_path / "b", "", **{"helper.py": "print(2)\n"})
    c = fork_with(tmp_path / "c", "")
    assert list_notes(a, a) == [f"In A and B, `print(1)` (helper.py) {ACTS}"]
    assert list_notes(c, a) == [f"In B, `print(1)` (helper.py) {ACTS}"]
    assert [note[:16] for note in list_notes(a, b)] == ["In A, `print(1)`", "In B, `print(2)`"]


@pytest.mark.parametrize(
    ("file", "text", "is_noted"),
    [
        ("train.py", "x = 2\n", True),
        ("train.py", "x = 1  # a comment\n", False),
        ("config.py", "x = 1\n\nclass Config:\n    rate: float = 0.1\n", True),
        ("ddp_utils.py", "y = 1\n", True),
    ],
)
def test_another_training_loop_is_a_note(tmp_path, file, text, is_noted):
    a, b = fork_with(tmp_path / "a", ""), fork_with(tmp_path / "b", "", **{file: text})
    noted = [note for note in list_notes(a, b) if note.startswith(f"{file} is not the same in A and B. Do both train")]
    assert len(noted) == is_noted


def test_fields_of_the_config_are_no_note(tmp_path):
    texts = [f"class Config:\n    lr: float = 0.1\n{more}" for more in ("", "    rate: float = 0.2\n")]
    a, b = (fork_with(tmp_path / name, "", **{"config.py": text}) for name, text in zip("ab", texts, strict=True))
    assert not list_notes(a, b)
