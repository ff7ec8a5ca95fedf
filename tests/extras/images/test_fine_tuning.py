"""--init_from torchvision and --freeze: what is loaded, what is trained, and how images are prepared. No network."""

import hashlib
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
import torch
from torchvision import models

from config import TrainingConfig
from dataset import create_dataset, is_prepared, prepare_data
from images import save_images
from model import create_model, initial_weights
from ranks import ROOT, run_ranks
from training import train_flags
from utils.checkpoint.weights import load_matching_weights
from utils.data.sets import resolve_auto_fields
from utils.extras.images.files import read_image
from utils.extras.images.pretrained import find_default_weights, find_weights_file
from utils.settings.errors import UserError

CPU = torch.device("cpu")
PAGE = (ROOT / "docs/recipes/fine_tuning.md").read_text()
COMMANDS = [
    shlex.split(block.replace("\\\n", " "))[4:]
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
]


@pytest.fixture(autouse=True)
def no_hub(tmp_path, monkeypatch):
    """torch.hub's folder of this machine may hold real weights."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


def forge_weights(data_dir, name="resnet18", rename=lambda name: name):
    """A file under the published name, seeded, with 1000 classes and statistics unlike those of a new BatchNorm."""
    torch.manual_seed(0)
    special = {"aux_logits": True} if name == "inception_v3" else {}
    weights = models.get_model(name, weights=None, **special).state_dict()
    for key, value in weights.items():
        if key.endswith("running_mean"):
            value.uniform_(-0.1, 0.1)
    file = find_weights_file(TrainingConfig(model=name, data_dir=str(data_dir)))
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({rename(key): value for key, value in weights.items()}, file)
    return weights


def folders(root, count=8, size=32):
    for seed, split in enumerate(("train", "val")):
        save_images(root / split, {"red": count, "green": count}, size=size, seed=seed)


def changed(before, after):
    return {name for name in before if before[name].shape != after[name].shape or not before[name].equal(after[name])}


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 2], ids=["imagefolder", "csv"])
def test_the_two_commands_train_the_head_and_then_all_on_two_ranks(runs, monkeypatch, first):
    """Neither the weights of the frozen trunk nor its BatchNorm statistics move."""
    data = runs.root / "data"
    folders(data)
    published_weights = forge_weights(data)
    more = "--image_size 32 --num_workers 1 --batch_size 4 --backend gloo --epochs 2 --save_every_minutes 0".split()
    where = {"FOLDER": data, "runs/all": runs.folder("all")}
    where |= {
        f"runs/head{rest}": f"{runs.folder('head')}{rest}" for rest in ("", "/config.json", "/checkpoints/best.pt")
    }
    for split in ("train", "val"):
        rows = [f"{path.relative_to(data)},{path.parent.name}" for path in sorted(data.glob(f"{split}/*/*"))]
        (data / f"{split}.csv").write_text("\n".join(["path,label", *rows]))
    for words in (COMMANDS[first], COMMANDS[1]):
        run_ranks(2, train_flags, [*(str(where.get(word, word)) for word in words), *more], torch.float32, "")
    head, both = runs.last("head")["model"], runs.last("all")["model"]
    assert changed(published_weights, head) == {"fc.weight", "fc.bias"}
    assert {"conv1.weight", "bn1.running_mean", "layer4.1.bn2.num_batches_tracked"} <= changed(head, both)
    log = runs.log("head")
    assert (
        "120 of 122 tensors were loaded from --init_from torchvision. Kept from create_model: fc.weight, fc.bias. Not"
        in log
    )
    assert "11,177,538 parameters, 1,026 of them trained" in log and "all trained" in runs.log("all")
    assert "Kept from create_model: none." in runs.log("all")
    assert runs.json("all", "config.json")["image_size"] == 32


@pytest.mark.slow
def test_a_frozen_run_that_is_stopped_continues_bit_for_bit_and_without_the_weights(runs):
    data = runs.root / "data"
    folders(data)
    weights = forge_weights(data, "shufflenet_v2_x0_5")
    flags = "--dataset imagefolder --model shufflenet_v2_x0_5 --freeze backbone --image_size 32 --epochs 2"
    flags = [*flags.split(), *"--num_workers 1 --record_samples --no-use_amp".split()]
    for name, stops in (("whole", ()), ("stopped", (2,))):
        runs.train_with_stops(2, name, *flags, "--init_from", "torchvision", stops=stops, task="", goes_on=not stops)
    find_weights_file(TrainingConfig(model="shufflenet_v2_x0_5", data_dir=str(data))).unlink()
    runs.train(2, "stopped", *flags, "--resume_from", "auto", task="")
    runs.assert_same("whole", "stopped")
    assert changed(weights, runs.last("stopped")["model"]) == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("name", ["densenet121", "mnasnet0_5", "squeezenet1_1"])
def test_all_but_the_head_is_loaded(tmp_path, name, caplog):
    """DenseNet's weights were published under older names, MNASNet asks for its version, SqueezeNet ends with a
    convolution."""
    older = lambda key: re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", key)  # noqa: E731
    weights = forge_weights(tmp_path, name, older)
    flags = {"model": name, "data_dir": str(tmp_path), "init_from": "torchvision", "image_size": 64, "num_classes": 7}
    config = TrainingConfig(**flags, freeze="backbone")
    model = create_model(config, CPU)
    load_matching_weights(model, initial_weights(config), "torchvision")
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert changed(weights, model.state_dict()) == trained and len(trained) == 2


@pytest.mark.parametrize("name", ["inception_v3", "googlenet"])
def test_models_that_were_published_with_another_normalization_transform_their_input(name):
    """As torchvision builds them with weights."""
    assert create_model(TrainingConfig(model=name, image_size=96, num_classes=3), CPU).transform_input


@pytest.mark.slow
def test_a_frozen_parameter_that_the_weights_lack_is_rejected(tmp_path):
    forge_weights(tmp_path, "vit_b_32")
    flags = {"model": "vit_b_32", "data_dir": str(tmp_path), "init_from": "torchvision", "image_size": 64}
    config = TrainingConfig(**flags, freeze="backbone")
    with pytest.raises(
        UserError, match="has no encoder.pos_embedding of this model's shape. Give weights of the whole"
    ):
        load_matching_weights(create_model(config, CPU), initial_weights(config), "torchvision")


@pytest.mark.slow
def test_the_last_layer_of_every_torchvision_classifier_is_its_head():
    larger = [name for name in models.list_models(module=models) if "regnet" in name and "400mf" not in name]
    for name in set(models.list_models(module=models)) - set(larger):  # RegNets compute with tensors to be built
        with torch.device("cpu" if "regnet" in name else "meta"):
            special = {"aux_logits": False} if name in ("inception_v3", "googlenet") else {}
            model = models.get_model(name, weights=None, num_classes=7, **special)
        last = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)][-1]
        assert len(last.weight) == 7, name


def test_images_are_prepared_as_the_weights_expect_unless_given(tmp_path):
    folders(tmp_path, count=1, size=(600, 700))
    common = {"dataset": "imagefolder", "data_dir": str(tmp_path), "init_from": "torchvision"}
    for name in ("resnet50", "efficientnet_b0", "vit_h_14"):
        config = TrainingConfig(**common, model=name)
        train, val = (create_dataset(config, split) for split in ("train", "val"))
        expected = find_default_weights(name).transforms()
        auto_config = resolve_auto_fields(config, train)
        assert [auto_config.image_size] == expected.crop_size and [auto_config.resize_size] == expected.resize_size
        assert auto_config.interpolation == expected.interpolation.value
        image, label = val[0]
        ours = val.device_transform((image[None], torch.tensor([label])), 0, 0, torch.tensor([0]))[0][0]
        reference = expected(read_image(val.path(0), 3))
        assert ours.shape == reference.shape and (ours - reference).abs().mean() < 5e-3  # v2 resizes uint8 as such
        # a later command with the resolved values, but other weights: the same images
        again = create_dataset(TrainingConfig(**auto_config.to_dict() | {"init_from": ""}), "val")
        assert torch.equal(again[0][0], image) and torch.equal(again.mean, val.mean)
    given = resolve_auto_fields(
        config, create_dataset(TrainingConfig(**common, model="resnet50", image_size=112), "train")
    )
    assert given.image_size == 112 and given.resize_size == "auto"
    half = create_dataset(TrainingConfig(model="efficientnet_v2_l"), "train")
    assert half.mean.tolist() == half.std.tolist() == [0.5] * 3


def test_the_weights_are_downloaded_whole_or_an_error_names_file_and_url(tmp_path, monkeypatch):
    config = TrainingConfig(model="resnet18", init_from="torchvision", data_dir=str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    file = find_weights_file(config)
    assert file == tmp_path / "data/weights/resnet18-f37072fd.pth" and not is_prepared(config)
    source = tmp_path / "resnet18-f37072fd.pth"
    torch.save({"fc.weight": torch.ones(2)}, source)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
    for name, expected in (("resnet18-00000000.pth", "invalid hash value"), ("missing-00000000.pth", "No such file")):
        if (url := source.with_name(name)).name.startswith("resnet18"):
            source.rename(url)
        with mock.patch(
            "utils.extras.images.pretrained.find_default_weights", return_value=mock.Mock(url=url.as_uri())
        ):
            with pytest.raises(UserError, match=rf"{expected}.*\. Save {url.as_uri()} as .*/weights/{name}"):
                prepare_data(config)
            assert not any((tmp_path / "data/weights").iterdir())
    good = source.with_name(f"resnet18-{digest}.pth")
    source.with_name("resnet18-00000000.pth").rename(good)
    with mock.patch("utils.extras.images.pretrained.find_default_weights", return_value=mock.Mock(url=good.as_uri())):
        prepare_data(config)
        assert is_prepared(config) and initial_weights(config)["fc.weight"].tolist() == [1, 1]
    with pytest.raises(
        UserError, match=r"has no weights for --model mini_resnet\. Give one of .* models, such as --model"
    ):
        is_prepared(TrainingConfig(init_from="torchvision"))


def test_weights_in_torch_hubs_folder_are_used(tmp_path):
    config = TrainingConfig(model="resnet18", init_from="torchvision", data_dir=str(tmp_path / "data"))
    path = Path(torch.hub.get_dir(), "checkpoints", "resnet18-f37072fd.pth")
    path.parent.mkdir(parents=True)
    torch.save({"fc.weight": torch.ones(2)}, path)
    assert is_prepared(config) and initial_weights(config).keys() == {"fc.weight"}
