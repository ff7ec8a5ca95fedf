"""`--help`, bad flags and wrong files are answered at once: before torch is imported."""

import re
import resource
import subprocess
import sys

import pytest

from ranks import ROOT


def cpu_seconds(*words):
    """The CPU time of `python train.py` with these words, the least of three tries."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


@pytest.mark.parametrize(
    "words", [["--help"], ["--help", "all"], ["--lr", "x"], ["--nonsense"], ["--config", "no.toml"]]
)
def test_it_imports_no_torch(words):
    command = [sys.executable, "-X", "importtime", "train.py", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    imported = set(re.findall(r"\| +(\S+)$", ended.stderr, re.MULTILINE))
    assert "utils.settings.fields" in imported and not imported & {"torch", "numpy", "yaml"}
    assert ended.returncode == (0 if "--help" in words else 2)


def test_help_takes_at_most_three_tenths_of_a_second_of_cpu():
    """Measured: 0.08 s. Start-up of Python alone takes 0.02 s; torch would take seconds."""
    assert cpu_seconds("--help") < 0.3
