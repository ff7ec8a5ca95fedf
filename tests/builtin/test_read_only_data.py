"""A data_dir that cannot be written: what is missing there ends the run with the place and the fix, and a complete data
set trains."""

import contextlib
import errno
import os
import sys
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch

import dataset
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from nodes import Place  # extra: template or launcher or kubernetes or companions
from ranks import ROOT, run_ranks
from training import says
from utils.data.sets import load_data
from utils.settings.errors import UserError

CODES = [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT]


class Cifar10:
    """In place of torchvision's, whose files have checksums."""

    classes = ["a", "b"]

    def __init__(self, root, train=True, download=False):
        assert not download and Path(root, "cifar-10-batches-py").is_dir()
        self.data = numpy.zeros((6, 32, 32, 3), numpy.uint8)
        self.targets = [0, 1, 0, 1, 0, 1]


def refuse_writes(folder, code):
    """Patches that make all changes below a folder fail, as a read-only mount, a foreign owner or a full disk do."""

    def patch(module, name):
        plain = getattr(module, name)

        def call(path, *rest, **options):
            is_reading = name == "open" and not rest[0] & (os.O_CREAT | os.O_WRONLY)
            if is_reading or not Path(os.fsdecode(path)).is_relative_to(folder):
                return plain(path, *rest, **options)
            if name == "mkdir" and Path(path).exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            raise OSError(code, os.strerror(code), str(path))

        return mock.patch.object(module, name, call)

    return [patch(os, name) for name in ("mkdir", "open", "unlink", "rename")]


def load(cases):
    """For each case, what it says, or the number of samples."""
    results = []
    ctx = setup_distributed(TrainingConfig(backend="gloo"))
    for code, data_dir, flags in cases:
        config = TrainingConfig.from_args([*flags, "--data_dir", data_dir])
        patches = refuse_writes(data_dir, code)
        patches.append(mock.patch("torchvision.datasets.CIFAR10", Cifar10))
        failing = OSError(code, os.strerror(code), f"{data_dir}/weights/x")
        patches.append(mock.patch.object(torch.hub, "download_url_to_file", side_effect=failing))
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            try:
                results.append(len(load_data(dataset, config, ctx).train))
            except UserError as error:
                results.append(str(error))
    cleanup_distributed()
    return results


CIFAR10 = ["--dataset", "cifar10"]
WEIGHTS = "--dataset synthetic --model resnet18 --init_from torchvision".split()  # extra: images


@pytest.mark.guarantee("one-sentence")
@pytest.mark.parametrize(
    ("flags", "content", "parts"),
    [
        (CIFAR10, [], ["The data of --dataset cifar10 cannot be downloaded", "Put cifar-10-python.tar.gz into"]),
        (CIFAR10, ["cifar-10-batches-py"], []),
        (CIFAR10, ["cifar10/cifar-10-batches-py"], []),
        (WEIGHTS, [], ["--init_from torchvision cannot be downloaded", "Save https"]),  # extra: images
        (WEIGHTS, ["weights"], ["--init_from torchvision cannot be downloaded", "TORCH_HOME"]),  # extra: images
        (WEIGHTS, ["weights/resnet18-f37072fd.pth"], []),  # extra: images
    ],
)
def test_a_folder_that_cannot_be_written_needs_what_is_missing_by_hand(tmp_path, monkeypatch, flags, content, parts):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    cases = []
    for code in CODES:
        for exists in (True, False) if not content else (True,):
            data = tmp_path / f"{code}-{exists}"
            cases.append((code, str(data), flags))
            if exists:
                data.mkdir()
            for name in content:
                (data / name).mkdir(parents=True)
    for texts in run_ranks(2, load, cases):
        for (code, data, _), text in zip(cases, texts, strict=True):
            if not parts:
                assert isinstance(text, int)
                continue
            for part in [*parts, os.strerror(code), data, "give another --data_dir"]:
                assert part in text
            assert sorted(path.name for path in Path(data).rglob("*")) == sorted(content)


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (
            CIFAR10,
            r"--dataset cifar10 .*Read-only file system: '{data}/cifar10.*Put .* into {data} \(unpacked, .* --data_dir",
        ),
        (WEIGHTS, "--init_from torchvision .*Read-only file system: '{data}/weights'.* --data_dir"),  # extra: images
    ],
)
def test_a_read_only_mount_is_named(runs, flags, fix):  # extra: template or launcher or kubernetes or companions
    data = runs.root / "data"
    data.mkdir()
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    place = Place(["-m", "-n", "-u", *as_root])
    try:
        place.do("ip", "link", "set", "lo", "up")
        place.bind(data, data, is_read_only=True)
        ended = place.run(
            *(sys.executable, "train.py", "--run_dir", runs.folder("run"), *flags, "--data_dir", data),
            env={"TORCH_HOME": str(runs.root / "torch")},
            cwd=ROOT,
        )
    finally:
        place.close()
    assert ended.code == 2
    says(ended.text, fix.format(data=data))
