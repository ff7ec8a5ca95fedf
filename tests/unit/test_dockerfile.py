# extra: kubernetes
"""scripts/Dockerfile without docker: its instructions, and what they copy and install."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dockerfile import copies, instructions
from ranks import PATH, ROOT, launch, need

IMAGE = instructions()
STEPS = [name for name, _ in IMAGE]
ARGUMENTS = dict(rest.split("=", 1) for name, rest in IMAGE if name == "ARG")  # with their defaults


def test_base_image_and_commit_are_arguments_and_a_new_commit_reuses_the_package_layer():
    assert IMAGE[0] == ("ARG", "BASE_IMAGE=python:3.12-slim") and IMAGE[1] == ("FROM", "${BASE_IMAGE}")
    commit = IMAGE.index(("ARG", "GIT_COMMIT="))
    # a changed ARG rebuilds the steps after it
    assert commit > max(i for i, name in enumerate(STEPS) if name in ("RUN", "COPY"))
    assert any(name == "ENV" and "GIT_COMMIT=${GIT_COMMIT}" in rest for name, rest in IMAGE[commit:])
    for i, (_, rest) in enumerate(IMAGE):
        for used in re.findall(r"\$\{?([A-Z_]+)", rest):
            assert any(name == "ARG" and words.startswith(f"{used}=") for name, words in IMAGE[:i]), used
    packages = next(i for i, (name, rest) in enumerate(IMAGE) if name == "RUN" and "pip install" in rest)
    assert packages < next(i for i, (name, rest) in enumerate(IMAGE) if name == "COPY" and "utils" in rest)


@pytest.mark.guarantee("image")
def test_the_image_is_small_and_does_not_run_as_root():
    assert STEPS.count("FROM") == 1
    assert all("--no-cache-dir" in rest for name, rest in IMAGE if "pip install" in rest)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", dict(IMAGE)["USER"])  # a number: runAsNonRoot cannot check a name
    assert STEPS.index("USER") > max(i for i, name in enumerate(STEPS) if name in ("RUN", "COPY"))


@pytest.mark.guarantee("image")
def test_copied_files_exist_are_tracked_and_are_sent_to_the_builder():
    need("git")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    listed = [name for name in listed if (ROOT / name).exists()]  # not deleted and not yet committed
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert not {name.split("/")[0] for name in listed} & set(ignored) - {"**/__pycache__"}
    copied = {path.relative_to(ROOT) for paths, _ in copies() for path in paths}
    assert all(str(path) in listed or any(name.startswith(f"{path}/") for name in listed) for path in copied)
    sizes = [(ROOT / name).stat().st_size for name in listed if any(Path(name).is_relative_to(path) for path in copied)]
    assert sum(sizes) < 2e6
    assert not copied & {Path("tests"), Path(".git"), Path("README.md")}


@pytest.mark.slow
def test_all_packages_that_a_run_needs_are_installed(tmp_path):
    """Runs the RUN line with pip in dry-run mode and without an index: everything it requires is installed."""
    if launch([sys.executable, "-m", "pip", "--version"]).code:
        pytest.skip("this environment has no pip")
    (run,) = (rest for name, rest in IMAGE if "pip install" in rest)
    for path in next(paths for paths, target in copies() if target == "./" and ROOT / "requirements.txt" in paths):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    env = {"PATH": PATH, "PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", **ARGUMENTS, "CONSTRAINTS": ""}
    ended = launch(["sh", "-c", run], cwd=tmp_path, env=env)
    assert ended.code == 0, ended.text
    required = set(re.findall(r"already satisfied: (\w+)[>=<][^ ]* in .*\(from -r", ended.out))
    assert required == {"torch", "torchvision", "tensorboard"}, ended.text
    assert (tmp_path / ARGUMENTS["CONSTRAINTS"]).exists()
    env |= {"TORCH_INDEX": "https://a.b/c", "CONSTRAINTS": "constraints.txt"}
    ended = launch(["sh", "-c", "set -x; " + run], cwd=tmp_path, env=env)
    install = r"\+ pip install --no-cache-dir --extra-index-url https://a.b/c -c constraints.txt -r \S+\n"
    assert re.search(install, ended.err), ended.text
