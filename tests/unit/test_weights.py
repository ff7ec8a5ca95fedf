"""`--init_from`: which weights a file holds, under which names, and what is refused."""

import argparse
import copy
import logging
import pathlib
import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from utils.checkpoint import archive
from utils.checkpoint.format import load_weights
from utils.checkpoint.weights import load_matching_weights, warn_of_changed_classes
from utils.settings.errors import UserError

ALL = "15 of 15 tensors were loaded from --init_from"


class Net(nn.Module):
    """15 tensors."""

    def __init__(self, classes=3, width=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width))
        self.stages = nn.Sequential(nn.Linear(width, width), nn.Sequential(nn.Linear(width, width, bias=False)))
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.head = nn.Linear(width, classes)
        for value in self.buffers():
            value.copy_(torch.rand_like(value.double()) + 1)


class Wrapping(nn.Module):
    """A model whose own names have a component `module`, once beside the same name without it."""

    def __init__(self):
        super().__init__()
        self.module, self.inner = nn.Linear(2, 2), nn.Sequential()
        self.inner.module, self.inner.weight = nn.Linear(2, 3), nn.Parameter(torch.ones(5))


def compiled_stages(net):
    net.stages = torch.compile(net.stages)
    return net


def wrapped_within(net):
    net.stages[1] = checkpoint_wrapper(torch.compile(nn.DataParallel(net.stages[1])))
    net.head = nn.DataParallel(net.head)
    return net


def renamed(pattern, replacement):
    return lambda net: {re.sub(pattern, replacement, name): value for name, value in net.state_dict().items()}


def lightning(net):
    return {f"model.{name}": value for name, value in net.state_dict().items()} | {"loss.weight": torch.ones(3)}


NAMES = {
    "as they are": lambda net: net,
    "DDP": nn.DataParallel,
    "DDP twice": lambda net: nn.DataParallel(nn.DataParallel(net)),
    "compile": torch.compile,
    "compile within": compiled_stages,
    "checkpointing": checkpoint_wrapper,
    "DDP, compile, checkpointing": lambda net: nn.DataParallel(torch.compile(checkpoint_wrapper(net))),
    "some names only, nested": wrapped_within,
    "averaged": AveragedModel,
    "averaged DDP of compile": lambda net: AveragedModel(nn.DataParallel(compiled_stages(net))),
    "FSDP": renamed(r"(stages\.\d|head)\.", r"\1._fsdp_wrapped_module."),
    "module at every name": renamed(r"\.", ".module."),
    "Fabric": renamed("^", "_forward_module."),
    "Lightning": lightning,
    "Lightning, compile within": lambda net: lightning(compiled_stages(net)),
    "Lightning, module within": lambda net: lightning(wrapped_within(net)),
    "prefix of two": renamed("^", "encoder.trunk."),
    "any prefix and wrapper": renamed("^", "module.my_net._orig_mod."),
    "part of a larger model": lambda net: (
        renamed("^", "backbone.")(net) | {f"decoder.{k}.weight": torch.ones(9) for k in range(99)}
    ),
}


def tensors(content):
    return content.state_dict() if isinstance(content, nn.Module) else content


@pytest.fixture(autouse=True)
def all_lines(caplog):
    caplog.set_level(logging.INFO, "ddp")


def start_from(model, content, tmp_path, **options):
    torch.save(content, tmp_path / "w.pt")
    load_matching_weights(model, load_weights(tmp_path / "w.pt"), "w.pt", **options)


def assert_equal(model, source):
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.guarantee("plain-load")
@pytest.mark.parametrize("kind", NAMES)
def test_names_with_wrappers_or_a_prefix_are_those_of_the_model(kind, tmp_path, caplog):
    source, model = Net(), Net()
    expected = copy.deepcopy(source)
    start_from(model, tensors(NAMES[kind](source)), tmp_path, requires_all=True)
    assert_equal(model, expected)
    assert ALL in caplog.text


@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel, torch.compile, AveragedModel])
def test_a_model_may_have_a_component_named_module(wrap, tmp_path, caplog):
    source, model = Wrapping(), Wrapping()
    nn.init.normal_(source.inner.weight)
    start_from(model, wrap(source).state_dict(), tmp_path, requires_all=True)
    assert_equal(model, source)


def test_two_models_in_one_dict_are_not_guessed_from(tmp_path):
    twice = {f"{part}.{name}": value for part in ("student", "teacher") for name, value in Net().state_dict().items()}
    with pytest.raises(UserError, match="0 of the 30 tensors .* fit.*student.stem.0.weight.*the model has: stem.0.w"):
        start_from(Net(), twice, tmp_path)
    source, model = Net(), Net()  # that its names are in the file decides
    start_from(
        model, {f"ema.{name}": value for name, value in Net().state_dict().items()} | source.state_dict(), tmp_path
    )
    assert_equal(model, source)


def optimizer_state(net):
    optimizer = torch.optim.AdamW(net.parameters())
    sum(value.sum() for value in net.parameters()).backward()
    optimizer.step()
    return optimizer.state_dict()


def files(net, other):
    """A file of each kind that holds the weights of net, and not only these."""
    weights, decoy = net.state_dict(), other.state_dict()
    optimizer = optimizer_state(Net())
    beside = {
        "epoch": 3,
        "optimizer": optimizer,
        "args": argparse.Namespace(lr=0.1, model="net"),
        "best": torch.ones(1),
    }
    return {
        "state_dict": beside | {"state_dict": weights},
        "model_state_dict": beside | {"model_state_dict": weights},
        "net": {"net": weights, "acc": 0.9, "epoch": 1},
        "model": {"optimizer": optimizer, "model": weights},
        "timm": {"arch": "net", **beside, "state_dict_ema": decoy, "state_dict": weights, "amp_scaler": {"scale": 2.0}},
        "ema": beside | {"state_dict_ema": weights},
        "ema beside": {"ema": decoy, "model": weights, "rng": torch.get_rng_state()},
        "Lightning": {"state_dict": lightning(net), "hyper_parameters": {"lr": 1.0}, "callbacks": {"ema": decoy}},
        "DeepSpeed": {
            "module": weights,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": None,
            "lr_scheduler": {},
        },
        "nested": {"model": {"state_dict": weights, "name": "net"}, "epoch": 3},
        "nested, unknown": {"checkpoint": {"my_net": weights, "step": 1}},
        "averaged": {"swa": AveragedModel(net).state_dict()},
        "unknown name": {"my_net": weights, "optimizer": optimizer},
        "flat, with numbers": {**weights, "epoch": 3, "note": "text"},
    }


@pytest.mark.guarantee("plain-load")
@pytest.mark.parametrize("kind", files(Net(), Net()))
def test_the_state_dict_in_a_file_is_loaded(kind, tmp_path, caplog):
    source, model = Net(), Net()
    start_from(model, files(source, Net())[kind], tmp_path, requires_all=True)
    assert_equal(model, source)
    assert ALL in caplog.text
    if kind in ("timm", "ema beside"):
        assert re.search(
            r"w.pt holds the state dicts \[.*'(state_dict_)?ema'.* from '(state_dict|model)'\.", caplog.text
        )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"generator": Net().state_dict(), "discriminator": Net().state_dict()}, "'generator', 'discriminator'"),
        ({"optimizer": optimizer_state(Net()), "epoch": 3}, "'optimizer', 'epoch'"),
        (optimizer_state(Net()), "'state', 'param_groups'"),
        ({"epoch": 3, "lr": 0.1}, "'epoch', 'lr'"),
        ({}, r"\[\]"),
        ([Net().state_dict()], "list"),
        (torch.ones(3), "Tensor"),
        (None, "NoneType"),
    ],
)
def test_a_file_without_one_state_dict_is_refused_with_its_keys(content, expected, tmp_path):
    with pytest.raises(UserError, match=f"w.pt holds no weights of one model but .*{expected}.*. Give"):
        start_from(Net(), content, tmp_path)


class Larger(nn.Module):
    """A small encoder under a large decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Net(), nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])


def part(names):
    return {name: value for name, value in Net().state_dict().items() if re.search(names, name)}


@pytest.mark.guarantee("plain-load")
@pytest.mark.parametrize(
    ("model", "content", "expected"),
    [
        (Net(), Net(width=5).state_dict(), r"3 of the 15 tensors of --init_from w.pt fit the model, which has 15"),
        (Net(), {f"{name}_": value for name, value in Net().state_dict().items()} | part("norm"), "3 of the 18"),
        (Net(), {"a.weight": torch.ones(2), "head.bias": torch.ones(3)}, "1 of the 2 .*the file has: a.weight"),
        (Net(), {"layer": torch.ones(3)}, "0 of the 1 tensors of --init_from w.pt fit"),
        (Net(), {}, "0 of the 0 tensors of --init_from w.pt fit"),
        (
            Larger(),
            renamed("^", "encoder.")(Net(width=3)),
            "3 of the 15 tensors of --init_from w.pt fit the model, which has 55",
        ),
        # the first of several files of a model, and a file that was not written to its end
        (
            Larger(),
            {k: v for k, v in Larger().state_dict().items() if re.match(r"enc|decoder\.[0-3]\.", k)},
            "23 of",
        ),
        (
            Net(),
            {k: v for k, v in Net().state_dict().items() if re.match(r"stages\.0\.weight", k)},
            "1 of the 1 ten",
        ),
        (Net(classes=7), Net().state_dict(), ""),  # a new head
        (Net(), part("^(?!head|stages)"), ""),  # a part
        (Net(), part("^head"), ""),
        (Net(), Larger().encoder.state_dict() | {f"x.{k}": torch.ones(1) for k in range(99)}, ""),
        (Larger(), {f"encoder.{name}": value for name, value in Net().state_dict().items()}, ""),
        (Larger(), {f"encoder.{name}": value for name, value in Net(classes=9).state_dict().items()}, ""),
        (
            nn.ModuleDict({"net": Larger()}),
            {f"net.encoder.{name}": value for name, value in Net().state_dict().items()},
            "",
        ),
        (nn.Linear(2, 2), nn.Linear(2, 2).state_dict(), ""),
        (nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).state_dict(), ""),
    ],
)
def test_weights_of_another_model_are_refused(model, content, expected, tmp_path):
    if not expected:
        load_matching_weights(model, content, "w.pt")
        return
    with pytest.raises(UserError, match=f"{expected}.*nly the model has: .* Give weights of this model"):
        load_matching_weights(model, content, "w.pt")


@pytest.mark.guarantee("plain-load")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["stages.1.0.weight", "stem.1.running_var"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(value, name, dtype, tmp_path):
    content = {key: tensor.to(dtype) for key, tensor in Net().state_dict().items()}
    content[name].view(-1)[2] = value
    with pytest.raises(UserError, match=f"{name} of --init_from w.pt has values that are not finite. Give"):
        start_from(Net(), content, tmp_path)


def test_what_is_not_loaded_or_infinite_by_design_may_be_infinite(tmp_path):
    model, source = Net(), Net()
    for net in (model, source):
        net.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    start_from(model, source.state_dict() | {"unused": torch.tensor([float("nan")])}, tmp_path)
    assert_equal(model, source)


def save_script(path):
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), str(path))


def safetensors(path):
    header = b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     '
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def cut(path):
    torch.save(Net().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-100])


OTHERS = {
    "empty": (lambda path: path.touch(), "is empty. Give another"),
    "text": (lambda path: path.write_text("hello"), "is a text file.*\. Give"),
    "page": (lambda path: path.write_text("<!DOCTYPE html>\n<title>404 ä</title>" * 99), "is a text file.*\. Give"),
    "pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a pointer of Git LFS. Get",
    ),
    "safetensors": (safetensors, "is a safetensors file. Give .*: python -c .*load_file.*w.pt-weights.pt'"),
    "TorchScript": (save_script, "is a TorchScript archive. Give .*: python -c .*jit.load.*w.pt-weights.pt'"),
    "cut": (cut, "is truncated, damaged or not .*. Give another"),
    "bytes": (lambda path: path.write_bytes(bytes(range(256)) * 9), "is truncated, damaged or not .*. Give another"),
    "gzip": (lambda path: path.write_bytes(b"\x1f\x8b\x08" + bytes(99)), "is truncated, damaged or not .*. Give"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_torch_save_did_not_write_is_named(kind, tmp_path):
    path = tmp_path / "w.pt"
    write, expected = OTHERS[kind]
    write(path)
    with pytest.raises(UserError, match=f"--init_from {path} {expected}") as error:
        load_weights(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        Net(),
        {"model": Net(), "epoch": 3},
        {"epoch": 3, "state_dict": Net().state_dict(), "hyper_parameters": {"path": Net()}},
        {"args": argparse.Namespace(head=nn.ReLU()), "state_dict": Net().state_dict()},
        {"model": None, "ema": Net(), "optimizer": None},
        {name: value.numpy() for name, value in Net().state_dict().items()},
    ],
)
@pytest.mark.parametrize("is_zip", [True, False])
def test_the_command_for_a_pickled_model_saves_its_weights(content, is_zip, tmp_path):
    path = tmp_path / "w.pt"
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        UserError, match=r"holds the Python object [\w.]+. Give .*only if you trust the file: py"
    ) as error:
        load_weights(path)
    (program,) = re.findall(r'python -c "(.*)"$', str(error.value))
    exec(program)
    load_matching_weights(Net(), load_weights(tmp_path / "w.pt-weights.pt"), "w.pt", requires_all=True)


class Scaled(nn.Module):
    """Keeps tensors in the extra state of a module, and a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("graph", torch.eye(2).to_sparse())

    def get_extra_state(self):
        return {"amax": torch.ones(1)}

    def set_extra_state(self, state):
        self.amax = state["amax"]


def test_extra_state_and_sparse_buffers_are_no_obstacle(tmp_path):
    source, model = Scaled(), Scaled()
    start_from(model, source.state_dict(), tmp_path)
    assert torch.equal(model.linear.weight, source.linear.weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        lambda value: value.to("meta"),
        lambda value: value.to_sparse(),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_whole_and_dense_values_are_refused_in_one_sentence(change):
    weights = nn.Linear(2, 2).state_dict()
    weights["weight"] = change(weights["weight"])
    with pytest.raises(UserError, match=r"^--init_from w.pt cannot be loaded .*\. Save whole, dense tensors\.$"):
        load_matching_weights(nn.Linear(2, 2), weights, "w.pt")


def test_only_a_namespace_is_allowed_and_only_here(tmp_path):
    torch.save(
        {"args": argparse.Namespace(path=pathlib.Path("/")), "state_dict": Net().state_dict()}, tmp_path / "w.pt"
    )
    with pytest.raises(UserError, match=r"holds the Python object pathlib\.(_local\.)?PosixPath\. Give"):
        load_weights(tmp_path / "w.pt")
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def payload(classes=("cat", "dog", "eel")):
    empty = {key: {} for key in archive.PAYLOAD_KEYS}
    provenance = {"classes": list(classes)}
    return empty | {"model": Net().state_dict(), "progress": {"step": 10}, "provenance": provenance}


def test_a_checkpoint_that_was_saved_again_is_taken_with_a_warning(tmp_path, caplog):
    path, edited, model = tmp_path / "c.pt", tmp_path / "edited.pt", Net()
    archive.write_archive(path, payload())
    content = torch.load(path, weights_only=True)
    content["model"]["head.bias"].fill_(7)
    torch.save(content, edited)
    load_matching_weights(model, load_weights(edited), "edited.pt")
    assert model.head.bias.tolist() == [7, 7, 7]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"--init_from {edited} has no checksum")
    with pytest.raises(UserError, match="has no checksum at its end"):
        archive.verify_archive(edited)
    data = path.read_bytes()
    for cut in (1, 40, archive.TRAILER_BYTES - 1, archive.TRAILER_BYTES + 1, 5000):
        edited.write_bytes(data[:-cut])
        with pytest.raises(UserError, match="is truncated|is a truncated checkpoint"):
            load_weights(edited)
    position = data.index(torch.ones(1).numpy().tobytes())
    path.write_bytes(data[:position] + b"\1" + data[position + 1 :])
    with pytest.raises(UserError, match="is damaged"):
        load_weights(path)


@pytest.mark.parametrize(
    ("class_names", "expected"),
    [
        (
            ["cat", "dog", "fox"],
            "1 class names of --init_from c.pt differ from those of the data. The first is 'eel' there and 'fox' here.",
        ),
        (
            ["cat", "eel", "dog"],
            "2 class names of --init_from c.pt differ from those of the data. The first is 'dog' there and 'eel' here.",
        ),
        (["cat", "dog", "eel"], ""),
        (
            ["cat", "dog", "eel", "fox"],
            "1 class names of --init_from c.pt differ from those of the data. The first is '' there and 'fox' here.",
        ),
        (
            ["ant", "bee"],
            "3 class names of --init_from c.pt differ from those of the data. The first is 'cat' there and 'ant' here.",
        ),
        ([], ""),
    ],
)
@pytest.mark.parametrize("is_edited", [False, True])
def test_other_class_names_are_a_warning(class_names, expected, is_edited, tmp_path, caplog):
    path = tmp_path / "c.pt"
    archive.write_archive(path, payload())
    if is_edited:
        torch.save(torch.load(path, weights_only=True), path)
    weights = load_weights(path)
    caplog.clear()
    warn_of_changed_classes(weights, argparse.Namespace(classes=class_names), "c.pt")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ([expected] if expected else [])
