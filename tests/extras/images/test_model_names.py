"""A wrong name of a model is refused with the config, before torch is imported and before data are downloaded."""

import sys

import pytest
from torchvision import models

from config import TrainingConfig
from ranks import ROOT, launch, torchrun
from utils.extras.images.settings import torchvision_classifiers
from utils.settings.errors import UserError

NAMES = {  # and what the message ends with
    "resnet81": " (did you mean resnet18?)",
    "ResNet50": " (did you mean resnet50?)",
    "mini_resnt": " (did you mean mini_resnet?)",
    "deeplabv3_resnet50": " (did you mean wide_resnet50_2?)",  # segmentation
    "": ", such as resnet50",
    "qqq": ", such as resnet50",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_is_answered_with_the_nearest_one(name):
    with pytest.raises(UserError) as refused:
        TrainingConfig(model=name)
    text = f"model={name}: is not known; use mini_resnet or a torchvision classifier{NAMES[name]}"
    assert str(refused.value) == text


def test_the_names_read_from_the_source_are_those_that_torchvision_lists():
    assert torchvision_classifiers() == models.list_models(module=models)


def test_a_name_that_cannot_be_looked_up_is_left_to_create_model(monkeypatch):
    monkeypatch.setattr("utils.extras.images.settings.find_spec", lambda name: None)
    assert TrainingConfig(model="resnet81").model == "resnet81"


def test_a_valid_name_imports_neither_torch_nor_torchvision():
    code = "import sys; from config import TrainingConfig; TrainingConfig(model='resnet50'); print(*sys.modules)"
    ended = launch([sys.executable, "-c", code])
    assert ended.code == 0 and not {"torch", "torchvision"} & {*ended.out.split()}, ended.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_downloaded_for_a_wrong_name(tmp_path, ranks):
    """On two ranks under torchrun, which repeats the sentence in its summary."""
    flags = ["--dataset", "cifar10", "--data_dir", tmp_path / "data", "--run_dir", tmp_path / "run"]
    flags += ["--model", "resnet81"]
    if ranks == 1:
        ended = launch([sys.executable, ROOT / "train.py", *flags])
        assert ended.code == 2, ended.text
    else:
        ended = torchrun(ranks, *flags)
        assert ended.code == 1, ended.text
    lines = [line for line in ended.text.splitlines() if line.startswith("model=resnet81: ")]
    assert len(lines) == 1 and lines[0].endswith("(did you mean resnet18?)"), ended.text
    assert not list(tmp_path.iterdir())
