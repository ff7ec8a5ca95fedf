# extra: judge
"""Which code of a fork scripts/judge.py asks a person to read."""

import pytest

from scripts.lib.judge.evaluation import notes_on, to_read

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
CHANGES = "changes a module; does it change what is evaluated?"
ACTS = "acts on import; does it change what is evaluated?"
DATA = "leads to data; does it learn from held-out samples?"
ANYTHING = "may do anything; does it change what is evaluated?"
BODY = "\n\ndef after_step(model, progress, taken):\n    "
FOUND = {  # code at the end of model.py: the place and the question
    "MetricTracker.means = None": ("", f"`MetricTracker.means = None` {ACTS}"),
    "torch.manual_seed(0)": ("", f"`torch.manual_seed(0)` {ACTS}"),
    "if True:\n    torch.backends.cudnn.benchmark = False": ("", f"`if True:` {ACTS}"),
    "for name in dir(torch):\n    pass": ("name", None),
    "x = MetricTracker.means = None": ("x", f"`MetricTracker.means` {CHANGES}"),
    f"{BODY}torch.sum = None": ("after_step", f"`torch.sum` {CHANGES}"),
    f"{BODY}del torch.sum": ("after_step", f"`torch.sum` {CHANGES}"),
    f"{BODY}MetricTracker.__dict__['means'] = 1": ("after_step", f"`MetricTracker.__dict__['means']` {CHANGES}"),
    f"{BODY}setattr(MetricTracker, 'means', 1)": ("after_step", f"`setattr(MetricTracker, 'means', 1)` {CHANGES}"),
    f"{BODY}torch.count += 1": ("after_step", f"`torch.count` {CHANGES}"),
    f"{BODY}exec('pass')": ("after_step", f"`exec` {ANYTHING}"),
    f"{BODY}eval('1')": ("after_step", f"`eval` {ANYTHING}"),
    f"{BODY}import inspect\n    inspect.stack()": ("after_step", f"`inspect` {ANYTHING}"),
    f"{BODY}torch.sys._getframe(1)": ("after_step", f"`torch.sys._getframe` {ANYTHING}"),
    f"{BODY}from dataset import create_dataset\n    create_dataset()": ("after_step", f"`create_dataset` {DATA}"),
    f"{BODY}helper.dataset.create_dataset()": ("after_step", f"`helper.dataset.create_dataset` {DATA}"),
    "def param_groups(model, config):\n    open(config.data_dir)": ("param_groups", f"`config.data_dir` {DATA}"),
    "class Other(Net):\n    torch.sum = None": ("Other", f"`torch.sum` {CHANGES}"),
}  # fmt: skip
SOUND = [
    "",
    "if __name__ == '__main__':\n    print(Net())",
    f"{BODY}model.eval()\n    model.count = 1\n    model.table['a'] = 1\n    table = {{}}\n    table[torch] = 1",
    f"{BODY}setattr(model, 'count', 1)",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
    "def create_vocabulary(config):\n    '''Of its data.'''",
    "WIDTH = 3\nWIDTH += 1",
]


def fork_with(folder, end, helper="", **files):
    folder.mkdir()
    texts = {"model.py": f"{MODEL}{end}\n", "helper.py": helper, "dataset.py": "torch = 1\n", "config.py": "x = 1\n"}
    for name, text in (texts | {"train.py": "x = 1\n", "ddp_utils.py": "x = 1\n"} | files).items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("end", FOUND)
def test_code_that_may_change_the_evaluation_or_learn_from_held_out_data_is_named(tmp_path, end):
    place, question = FOUND[end]
    questions = to_read(fork_with(tmp_path / "a", end))
    if question is None:  # it binds a name, and changes nothing
        assert not questions
    else:
        assert questions == [": ".join(filter(None, ("model.py", place, question)))]


@pytest.mark.parametrize("end", SOUND)
def test_sound_code_is_not_named(tmp_path, end):
    assert not to_read(fork_with(tmp_path / "a", end))


def test_files_that_the_model_imports_are_read_and_a_question_of_both_is_one_note(tmp_path):
    a = fork_with(tmp_path / "a", "", "import utils.metrics\nutils.metrics.count = 1\n")
    b = fork_with(tmp_path / "b", "", "import utils.metrics\nutils.metrics.count = 2\n")
    c = fork_with(tmp_path / "c", "")
    assert notes_on(a, a) == [f"A and B, helper.py: `utils.metrics.count = 1` {ACTS}"]
    assert notes_on(c, a) == [f"B, helper.py: `utils.metrics.count = 1` {ACTS}"]
    assert [note[:13] for note in notes_on(a, b)] == ["A, helper.py:", "B, helper.py:"]


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
    noted = [note for note in notes_on(a, b) if note.startswith(f"{file}: is not the same in A and B; do both train")]
    assert len(noted) == is_noted


def test_fields_of_the_config_are_no_note(tmp_path):
    texts = [f"class Config:\n    lr: float = 0.1\n{more}" for more in ("", "    rate: float = 0.2\n")]
    a, b = (fork_with(tmp_path / name, "", **{"config.py": text}) for name, text in zip("ab", texts, strict=True))
    assert not notes_on(a, b)
