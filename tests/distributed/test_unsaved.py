"""`is_saved`: frozen parameters that checkpoints leave out. create_model gives them, and a digest checks them."""

import contextlib
import io
import sys
from unittest import mock

import pytest
import torch

import model
import replay  # extra: replay
from ranks import run_ranks, slow
from scripts import export, predict
from tasks import TASKS, SmallNet, using
from tasks import train_task as train_with_signals
from training import STATE, assert_same_state, difference, train_flags
from utils.settings.errors import UserError
from utils.training.parts.unsaved_parameters import fill_in_unsaved, fingerprint_values

FLAGS = "--dataset_size 46 --epochs 2 --num_workers 1 --no-use_amp --lr 0.02 --log_interval 2".split()
EXPORTED = "model"  # the weights that selected the best checkpoint
FLAGS += ["--ema_decay", "0.9"]
EXPORTED = "ema"
FLAGS += "--save_every 0 --record_samples --eval_every_steps 2 --keep_last 99".split()
BASE = {f"features.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")}
BASE |= {"features.4.weight", "features.4.bias"}
OTHER = "was trained with other values of features.0.bias and 7 more than create_model gives, and is_saved"


def is_of_the_head(name):
    return not name.startswith("features")


def defined(name, function):
    """A function that the shipped file need not have."""
    return mock.patch.object(model, name, function, create=True)


@contextlib.contextmanager
def frozen(is_saved=is_of_the_head, shift=0.0, is_frozen=True):
    """The task images, whose trunk is frozen and comes from create_model, its weights moved by `shift`."""

    def create_model(config, device):
        net = SmallNet(True, 10)
        net.features.requires_grad_(not is_frozen)
        with torch.no_grad():
            [parameter.add_(shift) for parameter in net.features.parameters()]
        return net.to(device)

    changed = defined("is_saved", is_saved) if is_saved else contextlib.nullcontext()
    with mock.patch.dict(TASKS["images"], create_model=create_model), changed:
        yield


def train_frozen(flags, **options):
    """Train in a rank; returns the state, or the error."""
    with frozen(**options):
        try:
            outcome = train_flags([*map(str, flags)])
            return outcome.get("state", "")
        except UserError as error:
            return str(error)


def train_with_stops(flags, stops):
    with frozen():
        return train_with_signals("images", flags, stops=stops)[0]


CASES = [
    (2, ""),
    slow(2, "--sharding zero3 --optimizer adamw --lr 0.002 --grad_accum_steps 2"),
    slow(4, "--reduction exact"),
    slow(1, "--grad_accum_steps 2"),
]


@pytest.mark.guarantee("unsaved")
@pytest.mark.parametrize(("ranks", "more"), CASES)
def test_a_run_without_its_frozen_trunk_in_checkpoints_equals_one_with_it_and_resumes_exactly(runs, ranks, more):
    """The uninterrupted run, the same one with everything saved, and the one that stops three times."""
    flags = [*FLAGS, *more.split()]
    (state, *_) = run_ranks(ranks, train_all, runs.words("all", *flags))
    assert state == "completed"
    for name, stops in (("whole", ()), ("parts", (1, 2))):
        run_ranks(ranks, train_with_stops, runs.words(name, *flags), stops)
    runs.assert_same("whole", "parts")
    everything, small = runs.last("all"), runs.last("whole")
    for kind in ("model", "ema"):
        assert everything[kind].keys() - small[kind].keys() == BASE
        everything[kind] = {name: value for name, value in everything[kind].items() if name not in BASE}
    assert {key: difference(everything[key], small[key]) for key in STATE} == {key: [] for key in STATE}
    assert small["provenance"]["unsaved"].keys() == BASE and "unsaved" not in everything["provenance"]
    assert runs.records("all", "eval") == runs.records("whole", "eval")


def train_all(flags):
    return train_frozen(flags, is_saved=None)


def use_scripts(folder, path, shift):
    """What predict.py and export.py write, what a replay prints, and the errors."""
    outputs = {}
    words = {
        "predict": [predict, path, "--out", folder / f"p{shift}.pt"],
        "export": [export, path, folder / f"e{shift}.pt"],
        "replay": [replay, folder / "run", "--step", 5],  # extra: replay
    }
    for name, (script, *rest) in words.items():
        printed = io.StringIO()
        with (
            frozen(shift=shift),
            using("images"),
            defined("predict", lambda net, batch: {"logits": net(batch[0])}),
            mock.patch.object(sys, "argv", [name, *map(str, rest)]),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            try:
                script.main()
                outputs[name] = printed.getvalue()
            except UserError as error:
                outputs[name] = str(error)
    return outputs


@pytest.mark.guarantee("unsaved")
def test_scripts_complete_a_checkpoint_and_reject_another_trunk(runs):
    flags = [*FLAGS, "--save_every_steps", 1, "--reduction", "exact"]
    for name, train in (("run", train_frozen), ("all", train_all)):
        assert run_ranks(2, train, runs.words(name, *flags, "--global_batch_size", 16)) == ["completed"] * 2
    path, everything = runs.checkpoints("run")[-1], runs.last("all")[EXPORTED]
    (outputs,) = run_ranks(1, use_scripts, runs.root, path, 0.0)
    assert "bitwise equal" in outputs["replay"] and "differ" not in outputs["replay"]  # extra: replay
    exported = torch.load(runs.root / "e0.0.pt", weights_only=True)
    assert difference(exported["model"], everything) == [] and "unsaved" not in exported, outputs["export"]
    predicted = torch.load(runs.root / "p0.0.pt", weights_only=True)["logits"]
    net = SmallNet(True, 10).eval()
    net.load_state_dict(everything)
    with torch.no_grad():
        data = TASKS["images"]["create_dataset"](mock.Mock(dataset_size=46), "val")
        expected = net(data.device_transform(data.__getitems__([*range(10)]), 42, 0, None)[0])
    torch.testing.assert_close(predicted, expected)
    (outputs,) = run_ranks(1, use_scripts, runs.root, path, 0.5)
    assert all(OTHER in text for text in outputs.values()), outputs
    assert not [*runs.root.glob("?0.5.pt*")]


def export_saved(path, out, kind):
    """The exit code of an export of only what is saved, what it prints, and what its code makes of the file."""
    printed, words, names = io.StringIO(), ["export.py", path, out, "--only_saved", "--format", kind], {}
    with frozen(), using("images"), mock.patch.object(sys, "argv", [*map(str, words)]):
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = export.main()
        text = printed.getvalue()
        if not code:
            exec(text.partition("This code uses it:\n\n")[2], names)
    return code, text, names["model"].state_dict() if names else {}


@pytest.mark.guarantee("unsaved")
def test_an_export_of_what_is_saved_names_the_rest_and_its_code_takes_that_from_create_model(runs):
    pytest.importorskip("safetensors")
    for name, train in (("run", train_frozen), ("all", train_all)):
        assert run_ranks(1, train, runs.words(name, *FLAGS, "--max_steps", 3)) == ["completed"]
    path, everything = runs.checkpoints("run")[-1], runs.last("all")[EXPORTED]
    for kind in ("weights", "safetensors"):
        ((code, text, loaded),) = run_ranks(1, export_saved, path, runs.root / kind, kind)
        assert code == 0 and f"create_model must give: {', '.join(sorted(BASE))}.\n" in text, text
        assert difference({name: value.detach() for name, value in loaded.items()}, everything) == []
    saved = torch.load(runs.root / "weights", weights_only=True)
    assert saved["model"].keys() == everything.keys() - BASE and saved["unsaved"].keys() == BASE
    refused = {
        (
            path,
            "onnx",
        ): "--only_saved does not go with --format onnx, which needs all weights. Use --format weights or safetensors.",
        (
            runs.checkpoints("all")[-1],
            "weights",
        ): "The checkpoint has all weights, so --only_saved has no effect. Leave out --only_saved.",
    }
    for (source, kind), sentence in refused.items():
        ((code, text, _),) = run_ranks(1, export_saved, source, runs.root / "refused", kind)
        assert code == 2 and text.startswith(sentence) and not (runs.root / "refused").exists()


def train_in_turns(folder, flags):
    """What happens to runs that start from the same checkpoint."""
    path = max(folder.glob("run/checkpoints/step_*.pt"))
    everything = max(folder.glob("all/checkpoints/step_*.pt"))
    turns = {
        "other trunk": (["--resume_from", path], {"shift": 0.5}),
        "other trunk, evaluated": (["--eval_only", "--resume_from", path], {"shift": 0.5}),
        "is_saved is gone": (["--resume_from", path], {"is_saved": None}),
        "is_saved is new": (["--resume_from", everything], {}),
        "is_saved is new, other trunk": (["--resume_from", everything], {"shift": 0.5}),
        "init_from": (["--init_from", path], {}),
        "init_from everything": (["--init_from", everything], {}),
        "init_from another trunk": (["--init_from", everything], {"shift": 0.5}),
        "trained": ([], {"is_frozen": False}),
    }
    more = {name: ["--run_dir", folder / name.replace(" ", "_"), *words] for name, (words, _) in turns.items()}
    return {name: train_frozen([*flags, *more[name]], **options) for name, (_, options) in turns.items()}


@pytest.mark.guarantee("unsaved")
def test_another_trunk_is_rejected_and_the_same_one_needs_no_copy(runs):
    words = runs.words("run", *FLAGS, "--max_steps", 3)
    assert run_ranks(2, train_frozen, words) == ["completed"] * 2
    assert run_ranks(2, train_all, runs.words("all", *FLAGS, "--max_steps", 3)) == ["completed"] * 2
    first, second = run_ranks(2, train_in_turns, runs.root, [*words, "--max_steps", 5])
    assert first == second
    for name in ("is_saved is gone", "is_saved is new", "init_from", "init_from everything"):
        assert first.pop(name) == "completed"
    assert (
        first.pop("trained")
        .removeprefix("model.")
        .startswith("is_saved leaves out features.0.weight, which is trained.")
    )
    assert all(OTHER in text for text in first.values()) and len(first) == 4, first
    gone, new = (runs.last(name) | {"model": {}, "ema": {}} for name in ("is_saved_is_gone", "is_saved_is_new"))
    assert_same_state(gone, new)


def test_frozen_weights_in_an_average_of_more_bits_are_compared_in_the_dtype_of_the_model():
    """A checkpoint of a 16-bit model from before is_saved was defined has them in its average, too."""
    net = torch.nn.Linear(2, 2).bfloat16()
    model_digests = fingerprint_values({"weight": net.weight})
    average = {name: value.float() for name, value in net.state_dict().items()}
    assert fill_in_unsaved(average, {}, net, model_digests, "the checkpoint").keys() == average.keys()
    average["weight"] = average["weight"] + 1
    with pytest.raises(UserError, match="was trained with other values of weight than create_model gives"):
        fill_in_unsaved(average, {}, net, model_digests, "the checkpoint")
