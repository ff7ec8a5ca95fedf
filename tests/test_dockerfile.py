"""scripts/Dockerfile without docker: its instructions, the effect of each, and runs from what it copies, as a pod would be run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dockerfile import POD, copies, instructions, make_image, make_removable, process_1
from ranks import ROOT, finish, launch, need, start, stop

TINY = ["--image_size", "8", "--batch_size", "4", "--dataset_size", "320", "--backend", "gloo", "--log_interval", "1"]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def names():
    return [name for name, _ in instructions()]


def arguments():
    """The ARGs with their defaults."""
    return dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG")


def test_base_image_and_commit_are_arguments_and_a_commit_leaves_the_packages_as_they_are():
    image, steps = instructions(), names()
    assert image[0] == ("ARG", "BASE_IMAGE=python:3.12-slim") and image[1] == ("FROM", "${BASE_IMAGE}")
    commit = image.index(("ARG", "GIT_COMMIT="))
    assert commit > max(i for i, name in enumerate(steps) if name in ("RUN", "COPY"))  # what follows an ARG is made anew with it
    assert any(name == "ENV" and "GIT_COMMIT=${GIT_COMMIT}" in rest for name, rest in image[commit:])
    for i, (_, rest) in enumerate(image):
        for used in re.findall(r"\$\{?([A-Z_]+)", rest):
            assert any(name == "ARG" and words.startswith(f"{used}=") for name, words in image[:i]), used
    packages = next(i for i, (name, rest) in enumerate(image) if name == "RUN" and "pip install" in rest)
    code = next(i for i, (name, rest) in enumerate(image) if name == "COPY" and "utils" in rest)
    assert packages < code


def test_the_image_is_small_and_not_roots():
    image, steps = instructions(), names()
    assert set(steps) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT"} and steps.count("FROM") == 1
    assert all("--no-cache-dir" in rest for name, rest in image if "pip install" in rest)
    user = dict(image)["USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # a number: runAsNonRoot cannot see through a name
    assert steps.index("USER") > max(i for i, name in enumerate(steps) if name in ("RUN", "COPY"))


def test_what_is_copied_exists_is_tracked_and_is_sent_to_the_builder():
    need("git")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    top = {name.split("/")[0] for name in listed}
    assert not top & set(ignored) - {"**/__pycache__"}
    copied = {path.relative_to(ROOT) for paths, _ in copies() for path in paths}
    assert all(str(path) in listed or any(name.startswith(f"{path}/") for name in listed) for path in copied)
    sizes = [(ROOT / name).stat().st_size for name in listed if any(Path(name).is_relative_to(path) for path in copied)]
    assert sum(sizes) < 2e6
    assert not copied & {Path("tests"), Path(".git"), Path("README.md")}


def test_the_packages_are_those_of_a_run(tmp_path):
    """The RUN line itself, with pip told to install nothing and to look nowhere: what it is asked for is here already."""
    if launch([sys.executable, "-m", "pip", "--version"]).code:
        pytest.skip("this environment has no pip")
    (run,) = (rest for name, rest in instructions() if "pip install" in rest)
    for paths, target in copies():
        if target == "./" and ROOT / "requirements.txt" in paths:
            copy_into_this = [(tmp_path / path.name).write_bytes(path.read_bytes()) for path in paths]
    assert copy_into_this
    env = {"PATH": PATH, "PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", **arguments(), "CONSTRAINTS": ""}
    ended = launch(["sh", "-c", run], cwd=tmp_path, env=env)
    assert ended.code == 0, ended.text
    asked = set(re.findall(r"already satisfied: (\w+)[>=<][^ ]* in .*\(from -r", ended.out))
    assert asked == {"torch", "torchvision", "tensorboard"}, ended.text
    assert (tmp_path / arguments()["CONSTRAINTS"]).exists()
    ended = launch(
        ["sh", "-c", "set -x; " + run], cwd=tmp_path, env=env | {"TORCH_INDEX": "https://a.b/c", "CONSTRAINTS": "constraints.txt"}
    )
    assert re.search(r"\+ pip install --no-cache-dir --extra-index-url https://a.b/c -c constraints.txt -r \S+\n", ended.err), ended.text


@pytest.fixture
def pod(tmp_path):
    """The image's folder, a shared one, and the variables."""
    app, shared = tmp_path / "app", tmp_path / "shared"
    shared.mkdir()
    yield app, shared, make_image(app)
    make_removable(app)


def test_the_copied_files_are_enough(pod):
    app, _, env = pod
    assert all(path.stat().st_mode & 0o004 for path in app.rglob("*")) and (app / "scripts" / "launch.sh").stat().st_mode & 0o001
    ended = launch([*POD, sys.executable, "train.py", "--print-config"], cwd=app, env=env)
    assert ended.code == 0 and "epochs = 10" in ended.out, ended.text
    assert launch([*POD, "touch", "train.py", "new"], cwd=app, env=env).code != 0  # not this user's


def test_a_pod_that_is_drained_saves_and_the_next_one_completes_the_run(pod):
    """The entrypoint as process 1: SIGTERM, exit 75, and the same command again, as the Job would start it."""
    app, shared, env = pod
    entry = app / Path(json.loads(dict(instructions())["ENTRYPOINT"])[0]).relative_to("/app")
    flags = [*TINY, "--run_dir", shared / "run", "--data_dir", shared / "data", "--resume_from", "auto"]
    command, env = [*POD, entry, *flags], env | {"NPROC_PER_NODE": "2", "LAUNCH_ID": "5fcf6d81"}
    program = start([*command, "--epochs", "50"], cwd=app, env=env)
    try:
        ends = time.monotonic() + 60
        while not (shared / "run" / "metrics.jsonl").exists() and program.poll() is None and time.monotonic() < ends:
            time.sleep(0.1)
        os.kill(process_1(program), signal.SIGTERM)
        ended = finish(program, 60)
    finally:
        stop(program)
    assert ended.code == 75 and list((shared / "run" / "checkpoints").glob("step_*.pt")), ended.text
    ended = launch([*command, "--epochs", "1"], cwd=app, env=env)
    assert ended.code == 0 and "completed" in ended.out, ended.text
    origin = json.loads((shared / "run" / "provenance.json").read_text())
    assert origin["git_commit"] == "c0ffee" and origin["changed_template_files"] == []
    assert json.loads((shared / "run" / "summary.json").read_text())["restarts"] == 1
