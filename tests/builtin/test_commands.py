# extra: template
"""docs/commands.md: each row is run as it stands, with flags that make it small and the runs that it reads."""

import json
import re
import shutil

import pytest

import forks
from lib import remove_extras
from ranks import PATH, ROOT, copy_repository, launch

PAGE = "docs/commands.md"
ROW = re.compile(r"^\| [a-z ]+ \| `([^`]+)` \| [^|]+ \|(?:<!-- extra: [\w ]+ -->)?$", re.MULTILINE)
COMMANDS = ROW.findall((ROOT / PAGE).read_text())
TINY = "--dataset_size 32 --image_size 8 --batch_size 8 --epochs 2 --num_workers 0 --backend gloo"
SMALL = {  # what is added after each of these parts of a command
    "train.py": TINY,
    "scripts/verify.py": TINY,
    "--find-batch": f"{TINY} --memory 1",
    '"--num_workers 2"': f"{TINY} --rounds 1 --steps 2",
    "chaos.py": "--every-steps 5",
    "--run_dir runs/chaos": TINY,
}
SLOW = ("torchrun", "for lr", "--seed 1", "--epochs 20", "--init_from", "benchmark.py", "chaos.py")
RUN = re.compile(r"(?<![\w/])runs/([\w.-]+)(?!.*\$)")
FILES = re.compile(r" (\w+\.(?:pt|html))\b")
REPOSITORY = remove_extras.read_files(ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the repository, and a finished run."""
    folder = copy_repository(tmp_path_factory.mktemp("commands"))
    ended = forks.run(folder, 0, "train.py", *TINY.split(), "--run_dir", "finished")
    assert ended.code == 0, ended.text
    return folder


def run(folder, command):
    for name in RUN.findall(command):
        run = folder / "runs" / name
        if f"--run_dir runs/{name}" in command:
            shutil.rmtree(run, ignore_errors=True)
        elif not run.exists():
            shutil.copytree(folder / "finished", run)
    small = command
    for part, flags in SMALL.items():
        small = small.replace(part, f"{part} {flags}")
    ended = launch(["bash", "-ec", small], cwd=folder, env={"PATH": PATH}, deadline=200)
    assert (ended.code, ended.left) == (0, 0), ended.text
    return ended.out


@pytest.mark.parametrize(
    "command",
    [pytest.param(line, marks=pytest.mark.slow if any(part in line for part in SLOW) else ()) for line in COMMANDS],
)
def test_each_command_works_as_it_stands(folder, command):
    """The files that it names are written, and its runs are completed."""
    written = [folder / name for name in FILES.findall(command)]
    for file in written:
        file.unlink(missing_ok=True)
    out = run(folder, command)
    assert all(file.stat().st_size for file in written)
    made = RUN.findall(command) if "--run_dir runs/" in command else []
    assert out or made
    for name in made:
        assert json.loads((folder / "runs" / name / "summary.json").read_text())["state"] == "completed"


def test_the_page_has_twenty_commands_and_at_least_half_run_by_default():
    text = (ROOT / PAGE).read_text()
    assert text.count("\n| ") == len(COMMANDS) + 1  # each row is parsed
    by_default = [command for command in COMMANDS if not any(part in command for part in SLOW)]
    is_cut = remove_extras.read_deleted((ROOT / "pyproject.toml").read_text())
    assert is_cut or (len(set(COMMANDS)) == 20 and len(by_default) >= 10)


@pytest.mark.parametrize("name", remove_extras.read_extras(REPOSITORY))
def test_without_an_extra_no_row_needs_it(name):
    files = {path: text for path, text in REPOSITORY.items() if path.startswith(("scripts/", "config.py", PAGE))}
    left, fields = remove_extras.delete_from_files(files, {name})
    for command in ROW.findall(left.get(PAGE, "")):
        scripts = re.findall(r"scripts/\S+", command)
        assert left.keys() >= {*scripts}, command
        assert not {f"--{field}" for field in fields[name]} & {*command.split()}, command
