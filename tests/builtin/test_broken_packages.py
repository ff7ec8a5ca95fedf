"""Optional packages that are missing or broken: who needs one gets a sentence with the fix, and all others train."""

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch

import utils.report.reporter
from config import TrainingConfig
from images import folder_of_images
from ranks import ROOT, launch, run_ranks, slow
from training import train_flags
from utils.report.tensorboard import TensorBoardWriter
from utils.settings.errors import UserError

SMALL = "--image_size 8 --batch_size 4 --log_interval 2 --backend gloo --dataset_size 16 --epochs 1".split()
OPTIONAL = ("torchvision", "PIL", "tensorboard", "yaml", "safetensors", "onnx", "onnxruntime", "fsspec", "timm")
ERRORS = {
    "missing": "ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)",
    "library": "ImportError('libjpeg.so.62: cannot open shared object file')",
    "other torch": "RuntimeError('operator torchvision::nms does not exist')",
    "other numpy": "AttributeError('module numpy has no attribute bool8')",
    "binary": "ValueError('numpy.dtype size changed, may indicate binary incompatibility')",
    "protobuf": "TypeError('Descriptors cannot be created directly.\\nIf this call came from ...')",
    "disk": "OSError(5, 'Input/output error')",
}


def write_broken(folder, packages, error):
    for name in packages:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise {ERRORS[error]}\n")
    return folder


def break_packages(folder):
    """In this process, the packages in the folder are found first."""
    broken = {path.name for path in Path(folder).iterdir()}
    for name in [*sys.modules]:
        if name.partition(".")[0] in broken or name.startswith("torch.utils.tensorboard"):
            del sys.modules[name]
    sys.path.insert(0, folder)


def train_with_broken(folder, flags):
    break_packages(folder)
    utils.report.reporter.TensorBoardWriter = TensorBoardWriter  # which tests leave out
    return train_flags(flags, task="")["state"]


QUICK = ("missing", "library", "other torch", "protobuf")
KINDS = [error if error in QUICK else slow(error) for error in ERRORS]


@pytest.mark.guarantee("packages")
@pytest.mark.parametrize("error", KINDS)
def test_a_run_that_needs_no_optional_package_completes_and_warns_once(tmp_path, error):
    broken = write_broken(tmp_path / "broken", OPTIONAL, error)
    flags = [*SMALL, "--run_dir", str(tmp_path / "run")]
    assert run_ranks(2, train_with_broken, str(broken), flags) == ["completed"] * 2
    warnings = [line for line in (tmp_path / "run/logs/rank0.log").read_text().splitlines() if "TensorBoard" in line]
    assert len(warnings) == 1 and warnings[0].endswith("Run pip install --force-reinstall tensorboard."), warnings
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"train", "eval"} <= {*kinds}


def refused_with_broken(folder, flags):
    break_packages(folder)
    with pytest.raises(UserError) as refused:
        train_flags(flags, task="")
    return str(refused.value)


NEEDED = {
    "--dataset cifar10": ("torchvision", "--dataset cifar10"),
    "--dataset imagefolder": ("torchvision", "--dataset imagefolder"),  # extra: images
    "--dataset imagefolder ": ("PIL", "--dataset imagefolder"),  # extra: images
    "--dataset imagefolder  ": ("numpy", "--dataset imagefolder"),  # extra: images
    "--dataset imagefolder --image_size auto": ("torchvision", "Reading images"),  # extra: images
    "--dataset imagefolder --image_size  auto": ("PIL", "Reading images"),  # extra: images
    "--model resnet18": ("torchvision", "--model resnet18"),  # extra: images
    "--model resnet18 --init_from torchvision": ("torchvision", "--model resnet18"),  # extra: images
    "--mixup_alpha 0.2": ("torchvision", "--mixup_alpha or --cutmix_alpha"),  # extra: images
}


@pytest.mark.guarantee("packages")
@pytest.mark.parametrize("error", KINDS)
@pytest.mark.parametrize("needs", NEEDED)
def test_a_run_that_needs_a_broken_package_is_refused_with_the_fix(tmp_path, needs, error):
    module, setting = NEEDED[needs]
    package = module.replace("PIL", "pillow")
    images = folder_of_images(tmp_path / "data")[2:4]
    broken = write_broken(tmp_path / "broken", [module], error)
    flags = [*SMALL, *images, "--run_dir", str(tmp_path / "run"), *needs.split()]
    [text] = run_ranks(1, refused_with_broken, str(broken), flags)
    assert text.startswith(f"{setting} needs {package}, which cannot be used ("), text
    version = f", in the version for torch {metadata.version('torch')}" if module == "torchvision" else ""
    assert text.endswith(f"). Run pip install --force-reinstall {package}{version}."), text
    assert "\n" not in text


@pytest.mark.parametrize("method", ["add_text", "file_writer.add_summary", "close", "add_images"])
def test_a_viewer_that_fails_later_ends_nothing(tmp_path, caplog, method):
    from torch.utils.tensorboard import SummaryWriter

    board = TensorBoardWriter(tmp_path, 0)
    owner, name = SummaryWriter, method
    if "." in method:
        from torch.utils.tensorboard.writer import FileWriter

        owner, name = FileWriter, "add_summary"
    with mock.patch.object(owner, name, side_effect=TypeError("bad protobuf")), caplog.at_level("WARNING", "ddp"):
        board.write_texts(config={}, environment={})
        board.write_scalars({"kind": "train", "step": 1, "loss": 1.0})
        if method == "add_images":  # of which `Reporter` tells
            with pytest.raises(TypeError, match="bad protobuf"):
                board.write_images("val", {"few": torch.zeros(1, 3, 2, 2, dtype=torch.uint8)}, 1)
        board.close()
    assert [("cannot be used (TypeError: bad protobuf)" in text) for text in caplog.messages] == [True] * (
        method != "add_images"
    )


@pytest.mark.slow
@pytest.mark.parametrize("error", ["missing", "other torch"])
def test_the_scripts_need_no_optional_package_for_the_synthetic_run(tmp_path, error):
    broken = write_broken(tmp_path / "broken", OPTIONAL, error)
    env = {"PYTHONPATH": os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")])}
    flags = [*SMALL, "--run_dir", tmp_path / "run"]
    python, best = sys.executable, tmp_path / "run/checkpoints/best.pt"
    for command in (
        [python, "train.py", *flags],
        [python, "scripts/export.py", best, tmp_path / "model.pt"],
        [python, "scripts/predict.py", best, "--split", "val", "--out", tmp_path / "out.pt"],
        [python, "scripts/verify.py", *flags],  # extra: verify
        [python, "scripts/preflight.py", *flags],  # extra: preflight
    ):
        ended = launch(command, env=env, cwd=ROOT)
        assert ended.code == 0 and "Traceback" not in ended.text, ended.text
    for kind in ("safetensors", "onnx"):
        ended = launch([python, "scripts/export.py", best, tmp_path / f"model.{kind}", "--format", kind], env=env)
        assert ended.code == 2 and f"format={kind} needs {kind}" in ended.err and "Traceback" not in ended.text
        assert "pip install --force-reinstall" in ended.err


@pytest.mark.parametrize("error", ERRORS)
def test_a_broken_yaml_package_is_named(tmp_path, error, capsys, monkeypatch):
    monkeypatch.syspath_prepend(write_broken(tmp_path / "broken", ["yaml"], error))
    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    (tmp_path / "run.yml").write_text("epochs: 1\n")
    with pytest.raises(SystemExit):
        TrainingConfig.from_args(["--config", str(tmp_path / "run.yml")])
    assert (
        "needs PyYAML, which cannot be imported" in (text := capsys.readouterr().err) and "or give a TOML file" in text
    )
