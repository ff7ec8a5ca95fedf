# extra: reports and template
"""A secret in the command of --on_checkpoint is in no file of the run."""

import sys
import zipfile

import pytest
import torch

from ranks import ROOT, WarmLaunch, finish, launch
from training import Runs

SECRET = "quagga"


def contents(file):
    """The bytes of a file, and of the files in it."""
    yield file.name, file.read_bytes()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                yield f"{file.name}/{name}", archive.read(name)


@pytest.mark.slow
def test_no_file_of_a_run_has_the_secret_of_its_command_and_exports_have_no_paths(tmp_path):
    """The command itself gets it; it fails, which is a warning in the log."""
    runs, got = Runs(tmp_path / "runs"), tmp_path / "got"
    command = f"""sh -c 'echo "$@" >> {got}; exit 3' sh -H "Authorization: Bearer {SECRET}" {{}}"""
    flags = "--dataset_size 32 --max_steps 4 --save_every_steps 2 --num_workers 1".split()
    words = runs.words("run", *flags, "--on_checkpoint", command)
    ended = launch([sys.executable, ROOT / "train.py", *words])
    assert ended.code == 0, ended.text
    assert f"Authorization: Bearer {SECRET} {runs.folder('run')}/checkpoints/step_00000004.pt" in got.read_text()
    again = runs.words("run", *flags, "--max_steps", 8, "--resume_from", "auto", "--on_checkpoint", command)
    ended = finish(WarmLaunch(0, ROOT / "train.py", again))  # the stored command differs, and the flag's is used
    assert ended.code == 0 and "step_00000008.pt" in got.read_text() and "changed: on_checkpoint" not in ended.text

    run = runs.folder("run")
    assert "Authorization: [redacted]" in runs.json("run", "config.json")["on_checkpoint"]
    assert "The command of --on_checkpoint (sh -c" in runs.log("run") and runs.events("run", "resumed")
    scripts = [
        ["runs.py", run, "--html", run / "report.html"],
        ["export.py", run / "checkpoints/best.pt", run / "a.pt"],
    ]
    scripts += [["export.py", run / "checkpoints/best.pt", run / "a.pt2", "--format", "torch.export"]]
    for name, *rest in scripts:
        ended = finish(WarmLaunch(0, ROOT / "scripts" / name, rest))
        assert ended.code == 0, ended.text
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file != got]
    leaks = [name for file in files for name, data in contents(file) if SECRET.encode() in data]
    names = {file.name for file in files}
    assert {"config.json", "provenance.json", "code.zip", "report.html", "step_00000008.pt", "rank0.log"} <= names
    assert any(name.startswith("events.out") for name in names) and leaks == []

    for name in ("a.pt", "a.pt2"):
        for place in (str(tmp_path), str(ROOT)):
            assert [part for part, data in contents(run / name) if place.encode() in data] == [], place
    config = torch.load(run / "a.pt", weights_only=True)["config"]
    assert config["dataset_size"] == 32 and not {"on_checkpoint", "run_dir", "data_dir"} & {*config}
