# extra: template
"""Model: shapes, sizes, parameter groups, the summed loss, weights from elsewhere."""

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import model
from config import TrainingConfig
from ddp_utils import DistributedContext, unwrap
from model import MiniResNet, check_config, compute_loss, create_model, param_groups, wrap_ddp
from utils.checkpoint.format import load_weights
from utils.checkpoint.weights import load_matching_weights
from utils.settings.errors import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("channels", "classes", "size", "batch"), [(1, 5, 28, 3), (4, 2, 4, 1)])
def test_mini_resnet_shapes(channels, classes, size, batch):
    assert MiniResNet(channels, classes).eval()(torch.randn(batch, channels, size, size)).shape == (batch, classes)


def test_create_model_is_channels_last_unless_asked_otherwise():
    for channels_last in (True, False):
        weight = create_model(TrainingConfig(channels_last=channels_last), CPU).stages[0].conv1.weight
        assert weight.is_contiguous(memory_format=torch.channels_last) is channels_last


def test_no_weight_decay_on_biases_and_norms():
    model = create_model(TrainingConfig(), CPU)
    decayed, bare = param_groups(model, TrainingConfig(weight_decay=0.1))
    assert (decayed["weight_decay"], bare["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim > 1 for p in decayed["params"]) and all(p.ndim <= 1 for p in bare["params"])
    assert len(decayed["params"]) + len(bare["params"]) == len(list(model.parameters()))


@pytest.mark.guarantee("shipped-loss")
def test_the_loss_is_a_sum_and_metrics_are_sums_and_counts():
    config = TrainingConfig(label_smoothing=0.1)
    model = create_model(config, CPU)
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6)
    model.eval()
    with torch.no_grad():
        metrics = compute_loss(model, (images, labels), config)
        losses = [compute_loss(model, (images[k : k + 1], labels[k : k + 1]), config)["loss"][0] for k in range(6)]
    loss, count = metrics.pop("loss")
    torch.testing.assert_close(loss, torch.stack(losses).sum())
    assert set(metrics) == {"top1", "top5"} and metrics["top1"][1] == 6
    torch.testing.assert_close(loss, F.cross_entropy(model(images), labels, reduction="sum"))  # not smoothed
    model.train()
    metrics = compute_loss(model, (images, labels), config)
    smoothed, count_in_training = metrics.pop("loss")
    assert count == count_in_training == 6
    torch.testing.assert_close(smoothed, F.cross_entropy(model(images), labels, reduction="sum", label_smoothing=0.1))
    assert set(metrics) == {"top1"}


def test_a_frozen_backbone_trains_the_last_layer_alone_and_keeps_its_statistics():
    model = create_model(TrainingConfig(freeze="backbone"), CPU).train()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(before) == list(create_model(TrainingConfig(), CPU).state_dict())  # a checkpoint fits both
    model(torch.randn(4, 3, 8, 8))
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_torchvision_classifiers_by_name():  # extra: images
    model = create_model(TrainingConfig(model="resnet18", num_classes=7), CPU).eval()
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)
    vit = create_model(TrainingConfig(model="vit_b_32", num_classes=3, image_size=64), CPU).eval()
    assert vit(torch.randn(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize(  # extra: images
    ("changes", "expected"),
    [
        ({"model": "resnet18", "in_channels": 1}, r"--in_channels must be 3 for torchvision's models, got 1\. Use"),
        ({"model": "vit_b_16", "image_size": 30}, r"--model vit_b_16 does not accept 30x30 images .*\. Give another"),
        ({"model": "alexnet", "image_size": 8}, r"--model alexnet does not accept 8x8 images .*\. Give another"),
    ],
)
def test_a_model_that_cannot_be_created_is_rejected(changes, expected):
    with pytest.raises(UserError, match=expected):
        create_model(TrainingConfig(**changes), CPU)


@pytest.mark.parametrize("name", ["resnet81", "deeplabv3_resnet50", "", "mini_resnet "])
def test_a_wrong_name_of_a_model_is_refused_before_data_are_loaded(name):
    """Also in a fork without torchvision's models."""
    expected = rf"^--model must be mini_resnet.*, got {name}\."
    for create in (check_config, lambda config: create_model(config, CPU)):
        with pytest.raises(UserError, match=expected):
            create(TrainingConfig(model=name))


@pytest.mark.guarantee("plain-load")
def test_init_from_loads_weights_that_fit_and_logs_the_others(tmp_path, caplog):
    source = MiniResNet(3, 10)
    file = tmp_path / "weights.pt"
    for payload in (source.state_dict(), {"model": source.state_dict(), "progress": {}}):
        torch.save(payload, file)
        caplog.clear()
        with caplog.at_level("INFO", logger="ddp"):
            torch.manual_seed(1)
            model = create_model(TrainingConfig(num_classes=4, channels_last=False), CPU)
            load_matching_weights(model, load_weights(file), str(file))
        assert torch.equal(model.stages[2].conv1.weight, source.stages[2].conv1.weight)
        assert model.head.weight.shape == (4, 256)
        assert "Kept from create_model: head.weight, head.bias" in caplog.text


@pytest.mark.parametrize(
    ("loads_trunk", "in_file", "kept"),
    [
        (True, "head", "trunk.weight, trunk.bias"),  # create_model has read the trunk from a file of its own
        (False, "head", "trunk.weight, trunk.bias"),
        (True, "trunk", "head.weight, head.bias"),
        (True, "", "none"),
    ],
)
def test_what_init_from_lacks_is_called_kept_and_not_new(tmp_path, caplog, loads_trunk, in_file, kept):
    def create():
        return nn.ModuleDict({"trunk": nn.Linear(3, 3), "head": nn.Linear(3, 2)})

    model, file = create(), tmp_path / "weights.pt"
    if loads_trunk:
        model["trunk"].load_state_dict(nn.Linear(3, 3).state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {name: value for name, value in create().state_dict().items() if name.startswith(in_file)}
    torch.save(weights, file)
    with caplog.at_level("INFO", logger="ddp"):
        load_matching_weights(model, load_weights(file), str(file))
    assert (
        f"Kept from create_model: {kept}. Not used from the file: none" in caplog.text
        and "initialised" not in caplog.text
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights.get(name, before[name]))


def test_published_weights_are_stripped_of_prefixes_and_must_be_whole_to_be_evaluated(tmp_path, caplog):
    source, file = MiniResNet(3, 10).state_dict(), tmp_path / "weights.pt"
    model = create_model(TrainingConfig(channels_last=False), CPU)
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        torch.save({prefix + name: value for name, value in source.items() if "num_batches" not in name}, file)
        with caplog.at_level("INFO", logger="ddp"):
            load_matching_weights(model, load_weights(file), str(file), requires_all=True)
        assert torch.equal(model.head.weight, source["head.weight"])
        assert f"Wrappers and prefixes were removed from the names of the tensors in --init_from {file}." in caplog.text
    torch.save({name: value for name, value in source.items() if "head" not in name}, file)
    with pytest.raises(UserError, match="has no head.weight, head.bias of this model's shape. Give weights of"):
        load_matching_weights(model, load_weights(file), str(file), requires_all=True)


def test_init_from_another_model_is_rejected(tmp_path):
    torch.save({"layer": torch.ones(3)}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="0 of the 1 tensors of --init_from other.pt fit the model, which has 92"):
        load_matching_weights(create_model(TrainingConfig(), CPU), load_weights(tmp_path / "other.pt"), "other.pt")


def test_one_rank_has_no_buckets_which_would_be_a_second_copy_of_the_gradients():
    model = nn.Linear(3, 2)
    wrapped = wrap_ddp(model, TrainingConfig(), DistributedContext(0, 0, 1, CPU))  # without a process group
    assert not isinstance(wrapped, DistributedDataParallel) and unwrap(wrapped) is model
    with wrapped.no_sync():
        wrapped(torch.ones(1, 3)).sum().backward()
    wrapped.eval()
    assert model.weight.grad is not None and not model.training


def test_wrap_ddp_rejects_a_model_without_trainable_parameters():

    model = MiniResNet().requires_grad_(False)
    with pytest.raises(UserError, match=r"no trainable parameter\. Leave some"):
        wrap_ddp(model, TrainingConfig(), DistributedContext(0, 0, 1, CPU))


def test_the_loss_asks_whether_gradients_are_computed_and_not_for_the_mode_of_the_model():
    """A model whose `train` keeps its BatchNorm in evaluation mode has another `training` under DDP."""
    model, batch = MiniResNet(), (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    config = TrainingConfig(label_smoothing=0.5)
    smoothed = compute_loss(model.eval(), batch, config)
    with torch.no_grad():
        plain = compute_loss(model, batch, config)
    assert smoothed.keys() == {"loss", "top1"} and plain.keys() == {"loss", "top1", "top5"}
    assert smoothed["loss"][0].item() != plain["loss"][0].item()


def test_the_loss_without_a_config_does_not_smooth_labels():
    """So that a notebook or a test of a fork may call it with two arguments."""
    model, batch = MiniResNet(), (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    plain = compute_loss(model, batch)
    unsmoothed = compute_loss(model, batch, TrainingConfig(label_smoothing=0.0))
    smoothed = compute_loss(model, batch, TrainingConfig(label_smoothing=0.5))
    assert torch.equal(plain["loss"][0], unsmoothed["loss"][0])
    assert not torch.equal(plain["loss"][0], smoothed["loss"][0])


def test_shown_images_hold_the_pixels_of_each_picture(monkeypatch):
    """As PIL gives them one by one. 18 images, of which 16 are shown, in gray."""
    drawn, new = [], Image.new
    monkeypatch.setattr(Image, "new", lambda *words: drawn.append(new(*words)) or drawn[-1])
    shown = model.log_images(nn.Flatten(), (torch.rand(18, 1, 4, 4), torch.arange(18)))["predictions"]
    assert shown.shape == (16, 3, 144, 128) and shown.dtype == torch.uint8 and shown.float().std() > 20
    pictures = [image for image in drawn if image.size == (128, 144)]  # PIL itself makes others
    for picture, pixels in zip(pictures, shown, strict=True):
        places = [(x, y) for x in range(0, 128, 3) for y in range(144)]
        assert all(picture.getpixel((x, y)) == tuple(pixels[:, y, x].tolist()) for x, y in places)


def test_images_of_mixed_batches_show_the_class_with_the_largest_share():
    images, labels = torch.rand(4, 1, 4, 4), torch.tensor([3, 0, 9, 5])
    shares = 0.7 * nn.functional.one_hot(labels, 10) + 0.3 * nn.functional.one_hot(labels.flip(0), 10)
    mixed, plain = (model.log_images(nn.Flatten(), (images, targets))["predictions"] for targets in (shares, labels))
    assert torch.equal(mixed, plain)
