"""Export a checkpoint for inference: python scripts/export.py CKPT OUT [--no-ema] [--format FORMAT]

The averaged weights of --ema_decay are exported if the checkpoint has them, since they selected the best checkpoint.
--no-ema exports the plain weights. OUT is a single file with the weights and the config, plus mean, std and class names
for image data. It is written by torch.save, or with --format safetensors as safetensors. With --format torch.export or
onnx, OUT is the traced model, which has a dynamic batch size and needs no code from this repository. Its metadata has
mean, std, class names and the size of images. The script prints code that loads and runs OUT. OUT is written
atomically, so that a failed export leaves an existing file unchanged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public equivalent

import dataset
import model as fork
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from scripts.lib.arguments import check_arguments
from scripts.lib.weights import WEIGHT_TITLES, add_ema_flag, choose_weights
from utils.checkpoint import format as checkpoint
from utils.checkpoint.remote import local_checkpoint
from utils.data.loader import create_evaluation_dataloader
from utils.data.sets import load_data
from utils.files import replace_file
from utils.packages import import_optional
from utils.run.command_line import repair_standard_streams
from utils.run.resume import compare_evaluation_data
from utils.settings.errors import UserError
from utils.training.hooks import ModelHooks
from utils.training.parts.unsaved_parameters import PROVENANCE_KEY, fill_in_unsaved

LOAD_WEIGHTS = """\
import torch; from config import TrainingConfig; from model import create_model
saved = torch.load({file!r}, weights_only=True)
model = create_model(TrainingConfig(**saved["config"]), torch.device("cpu")).eval()
model.load_state_dict(saved["model"])
"""
LOAD_SAFETENSORS = """\
import json, torch; from safetensors import safe_open; from config import TrainingConfig; from model import create_model
with safe_open({file!r}, "pt") as file:
    saved = {{name: json.loads(text) for name, text in file.metadata().items()}}
    weights = {{name: file.get_tensor(name) for name in file.keys()}}
model = create_model(TrainingConfig(**saved["config"]), torch.device("cpu")).eval()
model.load_state_dict(weights)
"""
IMAGE_STATISTICS = """\
mean, std = (torch.tensor(saved[name]).view(-1, 1, 1) for name in ("mean", "std"))  # images: [B, C, H, W], {units}
"""
IMAGE_OUTPUTS = "outputs = model(({scaled} - mean) / std)\n"
IMAGE_CLASSES = """\
predict = lambda images: [saved["classes"][k] for k in model(({scaled} - mean) / std).argmax(1)]
"""
RUN_MODEL = "outputs = model(*inputs)  # {shapes}\n"
LOAD_IMAGE_PROGRAM = """\
import json, torch; files = {{"metadata.json": ""}}
model = torch.export.load({file!r}, extra_files=files).module(); saved = json.loads(files["metadata.json"])
"""
RUN_PROGRAM = "import torch; model = torch.export.load({file!r}).module()\noutputs = model(*inputs)  # {shapes}\n"
RUN_ONNX = """\
import onnxruntime; session = onnxruntime.InferenceSession({file!r})
outputs = session.run(None, {{node.name: x for node, x in zip(session.get_inputs(), arrays)}})  # NumPy: {shapes}
"""
RUN_IMAGE_ONNX = """\
import json, numpy, onnxruntime; session = onnxruntime.InferenceSession({file!r})
metadata, name = session.get_modelmeta().custom_metadata_map, session.get_inputs()[0].name
mean, std = (numpy.float32(json.loads(metadata[key])).reshape(-1, 1, 1) for key in ("mean", "std"))
run = lambda images: session.run(None, {{name: ({scaled} - mean) / std}})  # NumPy: [B, C, H, W], {units}
"""
IMAGE_ONNX_OUTPUTS = "outputs = run(images)\n"
IMAGE_ONNX_CLASSES = 'predict = lambda images: [json.loads(metadata["classes"])[k] for k in run(images)[0].argmax(1)]\n'
METADATA_KEYS = ("mean", "std", "classes", "size")  # keys in the metadata of a program
# This part of the printed code gives images as floats in the units of mean and std. Bytes and other data need different
# code, and ONNX needs it in NumPy.
SCALED = {"onnx": "images / numpy.float32(255)"}
UNSCALED = {"onnx": "images.astype(numpy.float32)"}

FORMATS = ("weights", "safetensors", "torch.export", "onnx")
# An export does not have these settings, which are commands and paths of one machine.
MACHINE_FIELDS = ["run_dir", "resume_from", "init_from", "data_dir", "init_method", "checkpoint_dir"]
MACHINE_FIELDS += ["mirror", "on_checkpoint"]  # extra: companions


def read_export(source: Path, use_ema: bool | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of an export, and the values of the config that it does not have.

    Args:
        source: the path of the checkpoint.
        use_ema: as for `choose_weights`, which may raise UserError.
    """
    payload, _ = checkpoint.read_checkpoint(source)
    kind = choose_weights(payload, use_ema, source)
    saved: dict[str, Any] = {"model": payload[kind], "weights": kind}
    config = TrainingConfig.select_known_values(payload["config"])
    saved["config"] = {name: value for name, value in config.items() if name not in MACHINE_FIELDS}
    saved |= {name: payload["provenance"][name] for name in ("classes", "mean", "std")}
    saved[PROVENANCE_KEY] = payload["provenance"].get(PROVENANCE_KEY, {})
    local_fields = {name: value for name, value in config.items() if name in MACHINE_FIELDS}
    return saved, local_fields | {"init_from": "", "resume_from": ""}


def create_example(config: TrainingConfig, payload: dict[str, Any]) -> tuple[nn.Module, tuple, TrainingConfig]:
    """Create the model without its weights, and inputs for a batch of two training samples.

    It prints how these samples differ from those of the checkpoint.

    Returns:
        The model, its inputs, and the config with what the data has resolved.

    Raises:
        UserError: if the data is not available, or if the inputs are not the model's arguments.
    """
    ctx = setup_distributed(config)
    data = load_data(dataset, config, ctx)
    hooks = ModelHooks.from_module(fork, data.config)
    for line in compare_evaluation_data(payload, data.config, "train", data):
        print(f"changed: {line}", file=sys.stderr)
    loader = create_evaluation_dataloader(data.train, config, ctx)
    inputs = hooks.example_inputs(loader.fetch_samples([0, len(data.train) - 1])[2])
    cleanup_distributed()
    net = hooks.create_model(data.config, torch.device("cpu")).eval()
    check_arguments(net, inputs, "example_inputs(batch) that returns a tuple of this model's arguments")
    return net, tuple(inputs), data.config


def export_program(saved: dict[str, Any], net: nn.Module, inputs: tuple, target: Path, kind: str) -> None:
    """Trace the model with a dynamic batch size, and write it and its metadata as torch.export or ONNX.

    Raises:
        UserError: if a package is missing, or onnxruntime cannot run the program.
    """
    net.load_state_dict(saved["model"])
    batch = torch.export.Dim("batch")
    shapes = tree_map(lambda leaf: {0: batch} if isinstance(leaf, Tensor) and leaf.ndim else None, inputs)
    program = torch.export.export(net, inputs, dynamic_shapes=shapes)
    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            node.meta.pop("stack_trace", None)  # the trace has paths of this machine
    metadata = {name: saved[name] for name in METADATA_KEYS if name in saved}
    if kind == "torch.export":
        files = {"metadata.json": json.dumps(metadata)}
        replace_file(target, lambda file: torch.export.save(program, file, extra_files=files))
        return
    check_dtypes(program)
    try:
        for name in ("onnx", "onnxscript"):
            import_module(name)
    except Exception as error:
        remedy = "pip install --force-reinstall onnx onnxscript"
        raise UserError(
            f"--format onnx needs onnx and onnxscript, which cannot be used ({error}). Run {remedy}."
        ) from None
    onnx: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    onnx.model.metadata_props.update({name: json.dumps(value) for name, value in metadata.items()})
    data = onnx.model_proto.SerializeToString()
    check_onnx_loads(data)
    replace_file(target, lambda file: file.write(data))


def check_dtypes(program: torch.export.ExportedProgram) -> None:
    """Raise UserError if a tensor of the program is bfloat16, for which onnxruntime lacks most operators."""
    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            values = tree_leaves(node.meta.get("val"))
            if any(isinstance(value, Tensor) and value.dtype is torch.bfloat16 for value in values):
                raise UserError(
                    "--format onnx does not fit the model, which computes in bfloat16, since onnxruntime cannot run"
                    " that. Let create_model and forward use float32 or float16, or use --format torch.export."
                )


def check_onnx_loads(data: bytes) -> None:
    """Raise UserError if onnxruntime is installed and cannot load the program. It has no float64 convolution."""
    try:
        import onnxruntime
    except Exception:  # onnxruntime is missing or broken, and would only check what was written
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the message below says what is wrong
    try:
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # errors of onnxruntime have no common class
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--format onnx does not fit the model, since onnxruntime cannot load the program ({reason}). Let"
            " create_model and forward use float32, or use --format torch.export."
        ) from None


def as_safetensors(saved: dict[str, Any]) -> bytes:
    """Return the weights as safetensors, with the rest as JSON in the metadata. Raises UserError."""
    save = import_optional("--format safetensors", "safetensors.torch").save
    if non_tensors := [name for name, value in saved["model"].items() if not isinstance(value, Tensor)]:
        raise UserError(
            f"--format safetensors holds tensors only, but {non_tensors[0]} is not a tensor. Use --format weights."
        )
    # a tied weight is written once for each of its names, since the format has no shared memory
    weights = {name: value.clone(memory_format=torch.contiguous_format) for name, value in saved["model"].items()}
    data: bytes = save(weights, {name: json.dumps(value) for name, value in saved.items() if name != "model"})
    return data


def describe_tensors(value: Any) -> str:
    """Return the dtype and shape of a tensor, or of each tensor in a dict or list."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {['batch', *value.shape[1:]]}".replace("'", "")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {describe_tensors(item)}" for name, item in value.items()) + "}"
    return f"[{', '.join(map(describe_tensors, value))}]" if isinstance(value, list | tuple) else repr(value)


def has_class_scores(net: nn.Module, inputs: tuple, classes: list[str]) -> bool:
    """Return whether the model's output for inputs of two samples is a tensor [2, classes], as a classifier's is."""
    with torch.no_grad():
        output = net(*inputs)
    return isinstance(output, Tensor) and output.shape == (2, len(classes)) and bool(classes)


def can_classify_zeros(config: TrainingConfig, saved: dict[str, Any]) -> bool:
    """Return `has_class_scores` of a new model, without data.

    The inputs are two images of zeros of the config's image_size.
    """
    size: Any = getattr(config, "image_size", None)
    shape = (2, count_channels(saved), size, size)
    with suppress(Exception):  # a model that needs other inputs may fail in any way, and its output is unknown then
        net = ModelHooks.from_module(fork).create_model(config, torch.device("cpu")).eval()
        return has_class_scores(net, (torch.zeros(shape),), saved["classes"])
    return False


def count_channels(saved: dict[str, Any]) -> int:
    """Return the number of channels that mean and std normalize (0: the data lacks one of the two)."""
    if not (saved["mean"] and saved["std"]):
        return 0
    return torch.tensor(saved["mean"]).numel()


def has_image_filters(saved: dict[str, Any]) -> bool:
    """Return whether mean and std have a value for each channel, and a weight is a convolution of so many channels."""
    channels = count_channels(saved)
    return channels > 0 and any(weight.ndim == 4 and weight.shape[1] == channels for weight in saved["model"].values())


def has_image_input(inputs: tuple, channels: int) -> bool:
    """Return whether the model's only argument is a float32 tensor [B, channels, H, W], as normalized images are."""
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].ndim != 4:
        return False
    return inputs[0].dtype is torch.float32 and inputs[0].shape[1] == channels


def has_byte_range(saved: dict[str, Any]) -> bool:
    """Return whether mean and std can be those of images from 0 to 255 that are divided by 255."""
    mean, std = torch.tensor(saved["mean"]), torch.tensor(saved["std"])
    return bool(((mean >= 0) & (mean <= 1)).all() and (std <= 1).all())


def choose_snippet(kind: str, is_image_model: bool, is_classifier: bool) -> str:
    """Return the code that loads and runs an export of this format, for str.format.

    Args:
        kind: the format.
        is_image_model: whether the model's input is images.
        is_classifier: whether the outputs of an image model are scores of the classes, which have names.
    """
    if not is_image_model:
        load = {
            "onnx": RUN_ONNX,
            "torch.export": RUN_PROGRAM,
            "safetensors": LOAD_SAFETENSORS + RUN_MODEL,
            "weights": LOAD_WEIGHTS + RUN_MODEL,
        }
        return load[kind]
    if kind == "onnx":
        return RUN_IMAGE_ONNX + (IMAGE_ONNX_CLASSES if is_classifier else IMAGE_ONNX_OUTPUTS)
    load = {"torch.export": LOAD_IMAGE_PROGRAM, "safetensors": LOAD_SAFETENSORS, "weights": LOAD_WEIGHTS}
    return load[kind] + IMAGE_STATISTICS + (IMAGE_CLASSES if is_classifier else IMAGE_OUTPUTS)


def format_usage(
    options: argparse.Namespace, saved: dict[str, Any], shapes: str, is_image: bool, is_classifier: bool
) -> str:
    """Return the code that is printed."""
    code = choose_snippet(options.format, is_image, is_classifier)
    scaled, units = SCALED.get(options.format, "images / 255"), "from 0 to 255"
    if is_image and not has_byte_range(saved):
        scaled, units = UNSCALED.get(options.format, "images.float()"), "in the units of the data set"
    return code.format(file=str(options.out), shapes=shapes, scaled=scaled, units=units)


def check_only_saved(options: argparse.Namespace, unsaved: dict[str, str], has_code: bool) -> None:
    """Raise UserError if nothing can be left out."""
    if options.only_saved and has_code:
        raise UserError(
            f"--only_saved does not go with --format {options.format}, which needs all weights. Use --format weights or"
            " safetensors."
        )
    if options.only_saved and not unsaved:
        raise UserError("The checkpoint has all weights, so --only_saved has no effect. Leave out --only_saved.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "checkpoint", help="path or URL of a checkpoint, or of a run, of which the best checkpoint is taken"
    )
    parser.add_argument("out", type=Path, help="the file to write")
    add_ema_flag(parser)
    parser.add_argument(
        "--only_saved", action="store_true", help="leave out the weights for which is_saved of model.py is False"
    )
    parser.add_argument("--format", choices=FORMATS, default="weights", help="format of OUT (default: weights)")
    options = parser.parse_args()
    out, has_code = options.out, options.format in ("torch.export", "onnx")
    try:
        source = local_checkpoint(options.checkpoint)
        saved, local_fields = read_export(source, options.ema)
        if out.exists() and out.samefile(source):
            raise UserError(f"{out} is the checkpoint itself. Give another name for the export.")
        out.parent.mkdir(parents=True, exist_ok=True)
        local_fields["compile"] = "off"  # extra: compile
        config = TrainingConfig(**saved["config"] | local_fields | {"backend": "gloo"})  # the export runs on the CPU
        check_only_saved(options, saved[PROVENANCE_KEY], has_code)
        if unsaved := saved.pop(PROVENANCE_KEY):
            torch.manual_seed(config.seed)
            net = ModelHooks.from_module(fork).create_model(config, torch.device("cpu"))
            saved["model"] = fill_in_unsaved(saved["model"], unsaved, net, {}, str(source))
        shapes, is_classifier = "", False
        is_image_model = has_image_filters(saved)
        if has_code or not is_image_model:
            try:
                net, inputs, config = create_example(config, checkpoint.read_checkpoint(source)[0])
                shapes = ", ".join(map(describe_tensors, tree_leaves(inputs) if options.format == "onnx" else inputs))
            except UserError as error:
                if has_code:
                    raise
                print(error, file=sys.stderr)
                shapes = "as in compute_loss, with shapes that are unknown without the data"
        else:
            is_classifier = can_classify_zeros(config, saved)
        if options.only_saved:
            saved["model"] = {name: value for name, value in saved["model"].items() if name not in unsaved}
            saved[PROVENANCE_KEY] = unsaved
        if has_code:
            is_image_model = is_image_model and has_image_input(inputs, count_channels(saved))
            is_classifier = is_image_model and has_class_scores(net, inputs, saved["classes"])
            size: Any = getattr(config, "image_size", "auto")
            if is_image_model and size != "auto":
                saved["size"] = size
        if options.format == "weights":
            replace_file(out, lambda file: torch.save(saved, file))
        elif options.format == "safetensors":
            data = as_safetensors(saved)
            replace_file(out, lambda file: file.write(data))
        else:
            export_program(saved, net, inputs, out, options.format)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if not has_code:
        print(f"The config in the export leaves out paths and commands of this machine: {', '.join(local_fields)}.")
    code = format_usage(options, saved, shapes, is_image_model, is_classifier)
    if options.only_saved:
        print(f"The export leaves out these weights, which create_model must give: {', '.join(unsaved)}.")
        # training seeds the generator, from which create_model may draw the frozen weights
        code = code.replace("model = create", 'torch.manual_seed(saved["config"]["seed"])\nmodel = create')
        code = re.sub(r"(load_state_dict\(.*)\)", r"\1, strict=False)", code)
    weights, size = WEIGHT_TITLES[saved["weights"]], out.stat().st_size / 1e6
    print(f"{out} was written from the {weights} of {source} ({size:.1f} MB). This code uses it:\n")
    print(code)
    return 0


if __name__ == "__main__":
    repair_standard_streams()
    sys.exit(main())
