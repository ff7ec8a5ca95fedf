"""`--help`, bad flags and wrong files are answered at once: before torch is imported."""

import os
import re
import resource
import shutil
import subprocess
import sys

import pytest

from ranks import ROOT


def cpu_seconds(*words):
    """The CPU time of `python train.py` with these words, the least of three tries."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


@pytest.mark.parametrize(
    "words", [["--help"], ["--help", "all"], ["--lr", "x"], ["--nonsense"], ["--config", "no.toml"]]
)
def test_it_imports_no_torch(words):
    command = [sys.executable, "-X", "importtime", "train.py", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    imported = set(re.findall(r"\| +(\S+)$", ended.stderr, re.MULTILINE))
    assert "utils.settings.fields" in imported and not imported & {"torch", "numpy", "yaml"}
    assert ended.returncode == (0 if "--help" in words else 2)


def test_help_takes_at_most_six_tenths_of_a_second_of_cpu():
    """Measured: 0.08 s, and 0.32 s on a slow machine with four busy workers. torch would take seconds."""
    assert cpu_seconds("--help") < 0.6


@pytest.mark.parametrize(
    "program",
    [
        "train.py",
        "scripts/lib/launching",  # extra: launcher
    ],
)
def test_a_setting_that_cannot_be_declared_ends_the_program_with_one_sentence(tmp_path, program):
    for name in ("utils/settings", "utils/extras", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("train.py", "config.py", "pyproject.toml", "utils/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    config = (tmp_path / "config.py").read_text()
    end = "    # ---- end of yours"
    (tmp_path / "config.py").write_text(config.replace(end, f'    x: int | None = yours(1, "mine")\n{end}'))
    ended = subprocess.run(
        [sys.executable, program, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2 and ended.stderr.startswith("config.py: x must not be None. Leave None out"), ended
    assert len(ended.stderr.splitlines()) == 1
