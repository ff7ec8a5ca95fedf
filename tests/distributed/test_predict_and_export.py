"""scripts/predict.py and scripts/export.py on tasks other than image classification; violations of the contract."""

import contextlib
import io
import os
import re
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.functional import pad

from config import SETTINGS, TrainingConfig, list_fork_settings
from ranks import launch, run_ranks
from scripts import export, predict
from scripts.lib.arguments import check_arguments
from tasks import TASKS, SmallNet, TokenModel, create_lines, token_loss, using
from training import train_flags
from utils.extras.companions.settings import mirror_url, shell_command  # extra: companions
from utils.settings.checks import rendezvous_url
from utils.settings.errors import UserError
from utils.training import hooks

LINES = "--dataset_size 9 --batch_size 2 --epochs 1 --no-use_amp".split()  # the last micro-batch has one line


def tokens(net, ids):
    ids = ids.clamp(min=0)
    return {"ids": ids, "logits": net(ids), "first": net(ids)[:, 0]}


def run_main(script, task, function, words):
    """Run the script's main with this `predict` instead of that of model.py."""
    with (
        using(task),
        mock.patch("model.predict", function, create=True),
        mock.patch.object(sys, "argv", [script.__name__, *map(str, words)]),
    ):
        script.main()


def predict_lines(words):
    run_main(predict, "lines", tokens, words)


def test_outputs_of_different_shapes_are_a_list_in_sample_order(runs):
    runs.train(1, "run", *LINES, task="lines")
    checkpoint, outputs = runs.checkpoints("run")[-1], []
    for ranks in (1, 2, 4):  # in the last step only one rank has a sample
        out = runs.root / f"{ranks}.pt"
        run_ranks(ranks, predict_lines, [checkpoint, "--split", "train", "--out", out])
        outputs.append(torch.load(out, weights_only=True))
    described = {"checkpoint": str(checkpoint), "weights": "model", "split": "train", "samples": 9}
    assert runs.json("", "4.pt.json") == described | {"precision": "float32"} and len([*runs.root.glob("*.pt*")]) == 6
    net = TokenModel().eval()
    net.load_state_dict(runs.last("run")["model"])
    rows = [[*output.values()] for output in outputs]
    for one, *others in zip(*(zip(*row, strict=True) for row in rows), strict=True):
        assert all(torch.equal(*pair) for other in others for pair in zip(one, other, strict=True))
        ids, logits, first = one
        torch.testing.assert_close(net(ids[None])[0], logits)
        assert torch.equal(logits[0], first)
    assert [type(column) for column in outputs[0].values()] == [list, list, torch.Tensor] and len(rows[0][0]) == 9
    lengths = [len(line) for line in create_lines(mock.Mock(image_size=8, dataset_size=9), "train").lines]
    assert [len(ids) for ids in rows[0][0]] == [max(lengths[k // 2 * 2 :][:2]) for k in range(9)]


def predict_and_die(words):
    """Predict, and kill this process while it writes the last file."""
    plain = torch.save

    def save(value, file):
        if "indices" in value:
            return plain(value, file)
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(torch, "save", save):
        run_main(predict, "lines", tokens, words)


@pytest.mark.guarantee("predict")
def test_a_kill_leaves_no_partial_output_and_the_next_prediction_cleans_up(runs):
    runs.train(1, "run", *LINES, task="lines")
    words, out = [runs.checkpoints("run")[-1], "--split", "train"], runs.folder("run") / "predictions.pt"
    out.write_text("earlier")
    with pytest.raises(AssertionError, match="exit codes"):
        run_ranks(3, predict_and_die, words)
    assert out.read_text() == "earlier" and out.with_name("predictions.pt.rank0").exists()
    # as a launch of more ranks would leave, and files of the user
    for suffix in ("rank3", "rank3.node-1-0a.tmp", "ranking.csv", "rank0.txt"):
        out.with_name(f"predictions.pt.{suffix}").touch()
    run_ranks(1, predict_lines, words)
    assert len(torch.load(out, weights_only=True)["first"]) == 9
    left = {path.name for path in out.parent.glob("predictions.pt.rank*")}
    assert left == {"predictions.pt.ranking.csv", "predictions.pt.rank0.txt"}


WRONG = {  # case: (predict, start of the error message)
    "rows": (
        lambda net, batch: {"x": net(batch[0])[-3:]},
        "model.predict returned x with the shape [3, 10] for 4 samples. ",
    ),
    "rank 1": (
        lambda net, batch: {"x": batch[0][len(batch[0]) == 1 :]},
        "model.predict returned x with the shape [0, 3, 8, 8]",
    ),
    "scalar": (
        lambda net, batch: {"x": net(batch[0]).sum()},
        "model.predict returned x with the shape [] for 4 samples. ",
    ),
    "tensor": (lambda net, batch: net(batch[0]), "model.predict returned a Tensor. Return {name: tensor"),
    "list": (lambda net, batch: {"x": [1] * len(batch[0])}, "model.predict returned x as a list. Return {name: tensor"),
    "names": (lambda net, batch: {f"x{len(batch[0])}": batch[0]}, predict.NAMES_DIFFER),
    "order": (lambda net, batch: {"x": net(batch[0]).flip(0)}, "The outputs of a batch are in another order"),
    "dict": (
        lambda net, batch: hooks.predict(net, {"x": batch[0]}),
        "model.py has no predict(model, batch). Add this function",
    ),
}


def predict_wrongly(words):
    texts = []
    for function, _ in WRONG.values():
        with pytest.raises(UserError) as caught:
            run_main(predict, "images", function, words)
        texts.append(str(caught.value))
    return texts


def test_a_predict_that_violates_its_contract_is_rejected_by_all_ranks(runs):
    """The last of 5 samples is a separate micro-batch, on the second rank."""
    runs.train(1, "run", *"--dataset_size 5 --epochs 1 --no-use_amp".split())
    words = [runs.checkpoints("run")[-1], "--split", "train", "--out", runs.root / "out.pt"]
    (alone,), (first, second) = (run_ranks(ranks, predict_wrongly, words) for ranks in (1, 2))
    assert first == second and not [*runs.root.glob("out.pt*")]
    for *texts, (_, expected) in zip(alone, first, WRONG.values(), strict=True):
        sentences = [re.sub(r"^Rank \d on \S+ failed: ", "", text) for text in texts]
        assert all(sentence.startswith(expected) for sentence in sentences), texts


BATCHES = {
    "dict": lambda images: {"x": images},
    "list of dicts": lambda images: [{"x": image} for image in images],
    "nested": lambda images: ((images, images), images),
    "empty": lambda images: [],
}


@pytest.mark.parametrize("batch", BATCHES)
def test_without_predict_the_message_names_predict_and_not_example_inputs(batch):
    loader = mock.Mock()
    loader.micro_batches.return_value = [mock.Mock(batch=BATCHES[batch](torch.ones(2, 3, 8, 8)))]
    state = mock.MagicMock(model=SmallNet(False, 10))
    functions = mock.Mock(predict=hooks.predict)
    expected = r"model.py has no predict\(model, batch\)\. Add this function, which returns"
    with (
        mock.patch.object(predict, "ModelHooks", mock.Mock(predict=hooks.predict)),
        pytest.raises(UserError, match=expected),
    ):
        predict.predict(functions, state, loader, mock.Mock(), mock.Mock())


class Pairs(SmallNet):
    """Takes two arguments, and is trained with both."""

    def __init__(self):
        super().__init__(False, 10)

    def forward(self, images, scale):
        return super().forward(images) * scale


class Named(Pairs):
    def forward(self, images, *, scale):
        return super().forward(images, scale)


class Nothing(Pairs):
    def forward(self):
        raise AssertionError("is not called")


class Faulty(Pairs):
    def forward(self, images):
        return super().forward(images)  # a TypeError within forward is the author's own


@pytest.mark.parametrize("model", [Pairs(), Named(), Nothing(), torch.nn.Bilinear(2, 2, 2)])
def test_a_model_of_other_arguments_is_rejected_with_an_example_of_both_functions(model):
    for inputs in [(1,), torch.ones(2)]:
        with pytest.raises(UserError) as error:
            check_arguments(model, inputs, "predict(model, batch)")
        first, *example = str(error.value).splitlines()
        assert first.startswith("model.py has no predict(model, batch). Add it, for example") and len(example) == 2
        names = {}
        exec("\n".join(line.strip() for line in example), names)  # it is valid Python
        assert names["example_inputs"]([1, 2, 3]) == (1, 2)
        assert names["predict"](lambda a, b: a - b, [5, 2]) == {"output": 3}


@pytest.mark.parametrize("model", [SmallNet(True, 10), torch.nn.Sequential(), Faulty()])
def test_a_model_that_takes_the_first_tensor_alone_is_called_with_it(model):
    check_arguments(model, (1,), "predict(model, batch)")
    check_arguments(Pairs(), (1, 2), "predict(model, batch)")


def pair_loss(net, batch):
    return {"loss": (net(batch[0], 2.0).square().sum(), len(batch[0]))}


PAIRS = {"create_model": lambda config, device: Pairs().to(device), "compute_loss": pair_loss}


def scripts_of_pairs(words, checkpoint):
    """Train the model of two arguments; what predict.py and export.py then say."""
    printed = io.StringIO()
    with mock.patch.dict(TASKS["plain"], PAIRS):
        train_flags(words, task="plain")
        with pytest.raises(UserError) as error:
            run_main(predict, "plain", hooks.ModelHooks.predict, [checkpoint])
        words = ["export.py", str(checkpoint), str(checkpoint.with_name("out.pt2")), "--format", "torch.export"]
        with (
            using("plain"),
            mock.patch("model.example_inputs", hooks.ModelHooks.example_inputs, create=True),  # a fork may have its own
            mock.patch.object(sys, "argv", words),
            contextlib.redirect_stderr(printed),
        ):
            code = export.main()
    return str(error.value), code, printed.getvalue()


def test_predict_and_export_of_a_model_of_two_arguments_name_both_functions(runs):
    words = runs.words("run", *"--dataset_size 8 --epochs 1 --no-use_amp".split())
    checkpoint = runs.folder("run") / "checkpoints/step_00000002.pt"
    ((predicted, code, exported),) = run_ranks(1, scripts_of_pairs, words, checkpoint)
    for text, name in ((predicted, "predict(model, batch)"), (exported, "example_inputs(batch)")):
        assert text.startswith(f"model.py has no {name}") and code == 2
        assert "\n    def predict(model, batch): return " in text and "\n    def example_inputs(batch): " in text


# ---- export ----


class Words(TokenModel):
    """Takes {"ids": int64 [B, L]}."""

    def forward(self, batch):
        return super().forward(batch["ids"])


WORDS = {
    "create_model": lambda config, device: Words().to(device),
    "compute_loss": lambda net, lines: token_loss(lambda ids: net({"ids": ids}), lines),
}


def words_of(lines):
    return ({"ids": pad(lines, (0, 7))[:, :7].clamp(min=0)},)


@contextlib.contextmanager
def dict_task():
    changes = mock.patch.dict(TASKS["lines"], WORDS)
    with changes, mock.patch("model.example_inputs", words_of, create=True):
        yield


def train_words(flags):
    with dict_task():
        train_flags(flags, task="lines")


def export_words(words):
    """The exit code, the output, and for weights the snippet's result for two lines."""
    printed = io.StringIO()
    inputs = ({"ids": torch.arange(14).view(2, 7)},)
    with dict_task(), using("lines"), mock.patch.object(sys, "argv", ["export.py", *map(str, words)]):
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = export.main()
        snippet = printed.getvalue().partition("This code uses it:\n\n")[2]
        names = {"inputs": inputs}
        if snippet.startswith("import torch; from config"):
            exec(snippet, names)
    return code, printed.getvalue(), names.get("outputs")


def test_an_export_leaves_out_the_places_of_ours_and_keeps_every_field_of_yours(monkeypatch):
    """A fork's model may be built from a path: with its default instead, weights of the same shapes would load."""
    yours = {"model_config": "/models/a.json", "vocabulary": "~/words.txt", "root": "/", "stem": "plain"}
    ours = TrainingConfig(
        run_dir="/runs/a",
        on_checkpoint="sh /a",  # extra: companions
    ).to_dict()
    payload = {"config": ours | yours, "model": {}, "ema": {}}
    payload["provenance"] = dict.fromkeys(("classes", "mean", "std"))
    monkeypatch.setattr(export.checkpoint, "read_checkpoint", lambda source: (payload, ""))
    monkeypatch.setattr(TrainingConfig, "select_known_values", dict)  # yours are fields of the fork
    saved, places = export.read_export(Path("a.pt"), use_ema=False)
    assert saved["config"].items() >= yours.items() and saved["config"]["lr"] == ours["lr"]
    assert saved["config"].keys() | places.keys() == payload["config"].keys() and not saved["config"].keys() & places
    checks = [rendezvous_url]
    checks += [mirror_url, shell_command]  # extra: companions
    of_paths = {setting.name for setting in SETTINGS if setting.is_path or setting.check in checks}
    assert places.keys() == of_paths - {setting.name for setting in list_fork_settings()}


@pytest.fixture
def words_run(runs):
    run_ranks(1, train_words, runs.words("run", *LINES))
    net = Words().eval()
    net.load_state_dict(runs.last("run")["model"])
    return runs, net({"ids": torch.arange(14).view(2, 7)})


USE = """
inputs = ({"ids": torch.arange(14).view(2, 7)},)
exec(open(sys.argv[2]).read())
torch.save(outputs, sys.argv[3])
"""


@pytest.mark.slow
def test_the_snippets_of_a_model_with_dict_inputs_give_its_outputs(words_run, tmp_path):
    """For weights in the repository; for torch.export in an empty folder, without the repository on the path."""
    runs, expected = words_run
    for kind in ("weights", "torch.export"):
        out = tmp_path / f"{kind} 'model'.pt"
        ((code, text, outputs),) = run_ranks(1, export_words, [runs.checkpoints("run")[-1], out, "--format", kind])
        assert code == 0 and "{'ids': torch.int64 [batch, 7]}" in text, text
        if kind == "torch.export":
            (tmp_path / "empty").mkdir()
            (tmp_path / "snippet").write_text(text.partition("This code uses it:\n\n")[2])
            use = f"import sys, torch{USE}"
            command = [sys.executable, "-I", "-c", use, "-", tmp_path / "snippet", tmp_path / "outputs.pt"]
            ended = launch(command, cwd=tmp_path / "empty")
            assert ended.code == 0, ended.text
            outputs = torch.load(tmp_path / "outputs.pt")
        torch.testing.assert_close(outputs, expected)


def failing_export(words):
    def save(program, file, extra_files):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with mock.patch.object(torch.export, "save", save), mock.patch.dict(sys.modules, {"onnxscript": None}):
        return export_words(words)


@pytest.mark.slow
def test_a_failed_export_leaves_the_existing_file(words_run, tmp_path):
    runs, _ = words_run
    out = tmp_path / "model.pt"
    out.write_text("earlier")
    expected = {
        "torch.export": "No space left on device",
        "onnx": "--format onnx needs onnx and onnxscript, which cannot be used (",
    }
    for kind, sentence in expected.items():
        words = [runs.checkpoints("run")[-1], out, "--format", kind]
        ((code, text, _),) = run_ranks(1, failing_export, words)
        assert code == 2 and sentence in text and "Traceback" not in text, text
        assert out.read_text() == "earlier" and [*tmp_path.glob("model*")] == [out]


def export_without_data(words):
    with mock.patch.dict(TASKS["lines"], {"create_dataset": lambda config, split: None}):
        return export_words(words)


def test_weights_need_no_data_and_a_traced_model_does(words_run, tmp_path):
    runs, expected = words_run
    words = [runs.checkpoints("run")[-1], tmp_path / "model.pt", "--format"]
    ((code, text, outputs),) = run_ranks(1, export_without_data, [*words, "weights"])
    assert code == 0 and torch.equal(outputs, expected), text
    assert (
        "\nThe config in the export leaves out paths and commands of this machine: " in f"\n{text}"
        and "data_dir" in text
    )
    ((code, text, _),) = run_ranks(1, export_without_data, [*words, "torch.export"])
    assert code == 2 and re.search(r"create_dataset found no training set in --data_dir .*\. Give the folder", text)


def test_onnx_gives_the_outputs_of_the_model(words_run, tmp_path):
    """One file, without external data beside it."""
    for name in ("onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    runs, expected = words_run
    out = tmp_path / "model.onnx"
    ((code, text, _),) = run_ranks(1, export_words, [runs.checkpoints("run")[-1], out, "--format", "onnx"])
    assert code == 0 and [*tmp_path.glob("*.onnx*")] == [out], text
    names = {"arrays": [torch.arange(14).view(2, 7).numpy()]}
    exec(text.partition("This code uses it:\n\n")[2], names)
    torch.testing.assert_close(torch.from_numpy(names["outputs"][0]), expected, rtol=1e-4, atol=1e-5)
    assert "size" not in names["session"].get_modelmeta().custom_metadata_map  # it is of images
