"""A wrong name of a model is refused before the data are loaded, which may download them."""

import sys

import pytest
from torchvision import models

import train
from config import TrainingConfig
from model import check_config
from ranks import ROOT, launch, run_ranks, torchrun
from training import TINY
from utils.example import choices
from utils.settings.errors import UserError

NAMES = {  # and what the message ends with
    "resnet81": " Did you mean resnet18?",
    "ResNet50": " Did you mean resnet50?",
    "mini_resnt": " Did you mean mini_resnet?",
    "deeplabv3_resnet50": " Did you mean wide_resnet50_2?",  # segmentation
    "": "",
    "qqq": "",
}


def refusal(name):
    with pytest.raises(UserError) as refused:
        check_config(TrainingConfig(model=name))
    return str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_is_answered_with_the_nearest_one(name):
    expected = f"--model must be mini_resnet or a torchvision classifier, got {name}.{NAMES[name]}"
    assert refusal(name) == expected


@pytest.mark.parametrize("name", [*NAMES, "resnet50"])
def test_without_the_extra_only_mini_resnet_is_known(monkeypatch, name):
    monkeypatch.setattr(choices, "MODEL_LIBRARIES", [])
    assert refusal(name) == f"--model must be mini_resnet, got {name}."
    check_config(TrainingConfig())


def test_each_classifier_of_torchvision_is_known():
    for name in models.list_models(module=models):
        check_config(TrainingConfig(model=name))


def test_torchvision_is_imported_for_another_name_only(tmp_path):
    """Where it cannot be imported, mini_resnet still trains, and another name is refused with the reason."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    code = "from config import TrainingConfig; from model import check_config; check_config(TrainingConfig{})"
    env = {"PYTHONPATH": str(tmp_path)}
    ended = launch([sys.executable, "-c", code.format("()")], env=env)
    assert ended.code == 0, ended.text
    ended = launch([sys.executable, "-c", code.format("(model='resnet50')")], env=env)
    assert "UserError: --model resnet50 needs torchvision, which cannot be used (RuntimeError: operator" in ended.text


class NoData:
    """A dataset.py that must not be asked for anything."""

    def __getattr__(self, name):
        raise AssertionError(f"dataset.{name} was asked for")


def refusals(starts):
    errors = []
    for flags in starts:
        with pytest.raises(UserError) as error:
            train.train(TrainingConfig.from_args(flags), data=NoData())
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_function_of_dataset_py_is_called_for_a_wrong_name(tmp_path, ranks):
    start = [*TINY, "--run_dir", str(tmp_path / "run"), "--model", "resnet81"]
    starts = [start, [*start, "--eval_only", "--init_from", "weights.pt"]]
    for errors in run_ranks(ranks, refusals, starts):
        assert all(error.endswith("got resnet81. Did you mean resnet18?") for error in errors), errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_downloaded_for_a_wrong_name(tmp_path, ranks):
    """On two ranks under torchrun, which repeats the sentence in its summary."""
    flags = ["--dataset", "cifar10", "--data_dir", tmp_path / "data", "--run_dir", tmp_path / "run"]
    flags += ["--model", "resnet81"]
    if ranks == 1:
        ended = launch([sys.executable, ROOT / "train.py", *flags])
        assert ended.code == 2, ended.text
    else:
        ended = torchrun(ranks, *flags, "--backend", "gloo")
        assert ended.code == 1, ended.text
    lines = [line for line in ended.text.splitlines() if line.startswith("--model must be ")]
    assert len(lines) == 1 and lines[0].endswith(" Did you mean resnet18?"), ended.text
    assert not (tmp_path / "data").exists()
