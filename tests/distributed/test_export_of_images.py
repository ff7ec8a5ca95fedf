"""scripts/export.py of models that take images: what its code prints and runs for their outputs, units and types."""

import contextlib
import io
import sys
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from ranks import run_ranks, slow
from scripts import export
from tasks import TASKS, Images, SmallNet, using
from training import train_flags

FLAGS = "--dataset_size 8 --epochs 1 --no-use_amp".split()
PACKAGES = {"onnx": ("onnxscript", "onnxruntime"), "safetensors": ("safetensors",)}
RANGES = {  # of an image's numbers: mean, std, the largest number
    "bytes": (0.5, 0.2, 256),
    "counts": (4000.0, 700.0, 9000),
    "Hounsfield units": (-600.0, 300.0, 2000),
    "wide counts": (0.5, 20.0, 100),
}


def mean_and_std(numbers):
    return {name: torch.full((3,), value) for name, value in zip(("mean", "std"), RANGES[numbers], strict=False)}


def scores_of_pixels(scores):
    return scores[:, :, None, None].expand(-1, -1, 8, 8)


OUTPUTS = {  # what the model makes of its scores of ten classes, and whether they can name classes
    "scores": (lambda scores: scores, True),
    "pixels": (scores_of_pixels, False),
    "dict": (lambda scores: {"out": scores}, False),
    "tuple": (lambda scores: (scores, scores), False),
    "embedding": (lambda scores: scores[:, :3], False),
}


class Returning(SmallNet):
    """Has the weights of a SmallNet with ten classes."""

    def __init__(self, output):
        super().__init__(False, 10)
        self.output = output

    def forward(self, images):
        return OUTPUTS[self.output][0](super().forward(images))


def some_images(numbers):
    """Two of them."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(RANGES[numbers][2], (2, 3, 8, 8), generator=generator)
    return images.to(torch.uint8 if numbers == "bytes" else torch.int32)


@contextlib.contextmanager
def image_task(model, numbers, dtype):
    """The task "plain" with this model, and data of these numbers."""

    def compute_loss(net, batch):
        scores = net(batch[0].to(dtype)).float()
        return {"loss": (cross_entropy(scores, batch[1], reduction="sum"), len(batch[1]))}

    changes = {"create_model": lambda config, device: model.to(device, dtype), "compute_loss": compute_loss}
    with (
        mock.patch.dict(TASKS["plain"], changes),
        mock.patch.multiple(Images, **mean_and_std(numbers)),
        mock.patch("model.example_inputs", lambda batch: (batch[0].to(dtype),), create=True),
    ):
        yield


def export_and_run(flags, run, kind, model, numbers, dtype, is_run):
    """Train a SmallNet, export its weights as those of the model, and run the printed code on two images.

    Returns the exit code, what was printed, and the outputs or class names.
    """
    with image_task(SmallNet(False, 10), numbers, dtype):
        train_flags(flags, task="plain")
    printed = io.StringIO()
    images = some_images(numbers)
    names = {"images": images.numpy() if kind == "onnx" else images}
    checkpoint = max((run / "checkpoints").glob("step_*"))
    words = ["export.py", str(checkpoint), str(run / "model.out"), "--format", kind]
    with image_task(model, numbers, dtype), using("plain"), mock.patch.object(sys, "argv", words):
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = export.main()
        text = printed.getvalue()
        if code == 0 and is_run:
            exec(text.partition("This code uses it:\n\n")[2], names)
    result = names["predict"](names["images"]) if "predict" in names else names.get("outputs")
    return code, text, result


def export_in_a_rank(runs, kind, model, numbers="bytes", dtype=torch.float32, is_run=True):
    for package in PACKAGES.get(kind, ()):
        pytest.importorskip(package)
    words = runs.words("run", *FLAGS)
    return run_ranks(1, export_and_run, words, runs.folder("run"), kind, model, numbers, dtype, is_run)[0]


def expected_outputs(runs, model, numbers="bytes"):
    """The model's outputs for `some_images`."""
    images = some_images(numbers).float()
    if numbers == "bytes":
        images = images / 255
    mean, std = (value.view(-1, 1, 1) for value in mean_and_std(numbers).values())
    model.eval().load_state_dict(runs.last("run")["model"])
    with torch.no_grad():
        return model((images - mean) / std)


def as_list(outputs):
    """Tensors, as onnxruntime gives them in arrays."""
    return [torch.as_tensor(leaf) for leaf in tree_leaves(outputs)]


DEFAULT = [("scores", "weights"), ("pixels", "weights"), ("pixels", "torch.export"), ("dict", "weights")]
DEFAULT += [("tuple", "weights"), ("embedding", "weights"), ("pixels", "onnx")]
ROWS = [(output, kind) for output in OUTPUTS for kind in export.FORMATS]


@pytest.mark.guarantee("export")
@pytest.mark.parametrize(("output", "kind"), [row if row in DEFAULT else slow(*row) for row in ROWS])
def test_only_the_code_for_a_classifier_names_classes(runs, output, kind):
    model = Returning(output)
    code, text, result = export_in_a_rank(runs, kind, model)
    names_classes = OUTPUTS[output][1]
    assert code == 0 and ("predict = " in text) is names_classes, text
    expected = expected_outputs(runs, model)
    if names_classes:
        assert result == [f"class_{k}" for k in expected.argmax(1)]
    else:
        torch.testing.assert_close(as_list(result), as_list(expected), rtol=1e-4, atol=1e-5)


class TwoInputs(SmallNet):
    """Fails for images alone."""

    def forward(self, images, scale):
        return super().forward(images) * scale


def test_the_code_for_a_model_that_needs_more_than_images_names_no_classes(runs):
    code, text, _ = export_in_a_rank(runs, "weights", TwoInputs(False, 10), is_run=False)
    assert code == 0 and "predict = " not in text and "\noutputs = model(" in text, text


@pytest.mark.parametrize("kind", ["weights", "torch.export", slow("onnx")])
@pytest.mark.parametrize("numbers", [name for name in RANGES if name != "bytes"])
def test_images_of_other_numbers_than_bytes_are_not_divided_by_255(runs, numbers, kind):
    model = Returning("scores")
    code, text, result = export_in_a_rank(runs, kind, model, numbers)
    assert code == 0 and "255" not in text and "in the units of the data set" in text, text
    assert result == [f"class_{k}" for k in expected_outputs(runs, model, numbers).argmax(1)]


class InAutocast(SmallNet):
    """Has float32 weights, and computes in bfloat16."""

    def forward(self, images):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(images).float()


BFLOAT16 = "--format onnx does not fit the model, which computes in bfloat16, since onnxruntime cannot run that. Let"
LOADING = "--format onnx does not fit the model, since onnxruntime cannot load the program ("
TYPES = {  # model, dtype, the error
    "bfloat16": (SmallNet(False, 10), torch.bfloat16, BFLOAT16),
    "autocast": (InAutocast(False, 10), torch.float32, BFLOAT16),
    "float64": (
        SmallNet(False, 10),
        torch.float64,
        LOADING,
    ),
    "float16": (SmallNet(False, 10), torch.float16, ""),
}


@pytest.mark.guarantee("export")
@pytest.mark.parametrize("name", TYPES)
def test_an_onnx_file_is_written_only_if_onnxruntime_can_load_it(runs, name):
    model, dtype, sentence = TYPES[name]
    code, text, _ = export_in_a_rank(runs, "onnx", model, dtype=dtype, is_run=False)
    out = runs.folder("run") / "model.out"
    if sentence:
        (line,) = [line for line in text.splitlines() if line.startswith("--format onnx ")]
        assert code == 2 and line.startswith(sentence) and line.endswith(", or use --format torch.export."), text
        assert not out.exists()
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(out)
    images = some_images("bytes").numpy().astype(session.get_inputs()[0].type[7:-1])
    assert code == 0 and session.run(None, {session.get_inputs()[0].name: images})[0].shape == (2, 10), text
