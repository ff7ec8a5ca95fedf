# extra: template
"""A checkout made by git for Windows, which turns line ends into CRLF, starts its scripts in WSL and in containers."""

import os
import shutil
import subprocess

import pytest

from ranks import ROOT

WINDOWS = ["-c", "core.autocrlf=true", "-c", "core.eol=crlf"]
AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
ENV = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder, *words):
    ended = subprocess.run(["git", *WINDOWS, *AUTHOR, *words], cwd=folder, env=ENV, capture_output=True, timeout=100)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The files of this checkout, and some of a fork, committed by git for Windows."""
    folder = tmp_path_factory.mktemp("repository")
    for name in [".gitattributes", "train.py", "requirements.txt", ".ci", "scripts", "tests/faults", "tests/builtin"]:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    (folder / "labels.csv").write_bytes(b"a.png,1\r\nb.png,2\r\n")
    (folder / "mine.sh").write_bytes(b"#!/usr/bin/env bash\r\ntrue\r\n")
    (folder / "mine.sh").chmod(0o755)
    git(folder, "init", "-q")
    git(folder, "add", "--all")
    git(folder, "commit", "-qm", "files")
    return folder


@pytest.fixture(scope="module")
def checkout(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows") / "checkout"
    git(repository.parent, "clone", "-q", "--no-hardlinks", str(repository), str(folder))
    return folder


def test_no_line_end_of_the_template_becomes_crlf(repository, checkout):
    names = git(repository, "ls-files", "-z").strip("\0").split("\0")
    changed = [name for name in names if b"\r\n" in (checkout / name).read_bytes()]
    assert changed == ["labels.csv"]  # a fork's data has the bytes that were committed


def test_a_script_that_was_saved_with_crlf_is_committed_with_lf(checkout):
    assert subprocess.run([checkout / "mine.sh"], timeout=100, check=False).returncode == 0


@pytest.mark.parametrize("name", ["launch.sh", "test.sh", "remove_extras.sh"])
def test_a_shell_script_starts(checkout, name):
    ended = subprocess.run([checkout / "scripts" / name, "--help"], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "\r" not in ended.stdout + ended.stderr
