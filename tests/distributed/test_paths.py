# extra: template
"""`~` and $NAME in paths: replaced once, on rank 0, wherever they come from."""

import json
import os

import pytest

from config import PATH_SETTINGS, TrainingConfig
from ranks import run_ranks
from training import train_flags
from utils.settings.paths import expand_path

VALUES = {  # path: what it becomes in a home of /home/me, with NAME=/scratch
    "~/data": "/home/me/data",
    "~": "/home/me",
    "$HOME/data": "/home/me/data",
    "${NAME}/a": "/scratch/a",
    "a/$NAME/b": "a//scratch/b",
    "~root": "/root",
    "a~b": "a~b",
    "a/~": "a/~",
    "$5 and 100%": "$5 and 100%",
    "": "",
    "auto": "auto",
    "torchvision": "torchvision",
    "s3://bucket/$NAME": "s3://bucket/$NAME",
    "./is $THERE": "./is $THERE",  # exists
}
UNKNOWN = {"$SCRATCH_X/a": "$SCRATCH_X", "a/${SCRATCH_X}": "${SCRATCH_X}", "~nobody-here/a": "~nobody-here"}


OF_WINDOWS = ["C:\\out", "d:/data/images", ".\\runs\\a", "..\\data", "~\\data", "\\\\server\\share", "%USERPROFILE%\\a"]


@pytest.fixture
def places(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": "/home/me", "NAME": "/scratch"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SCRATCH_X", raising=False)
    (tmp_path / "is $THERE").mkdir()


@pytest.mark.guarantee("paths")
@pytest.mark.parametrize("path", VALUES)
def test_a_path_is_expanded_unless_it_exists_as_it_is(places, path):
    assert expand_path(path) == VALUES[path]
    assert TrainingConfig(init_from=path).init_from == VALUES[path]


@pytest.mark.guarantee("paths")
@pytest.mark.parametrize("path", OF_WINDOWS)
@pytest.mark.parametrize("name", PATH_SETTINGS)
def test_a_path_of_windows_is_an_error_and_makes_no_folder(places, tmp_path, capsys, name, path):
    before = [*tmp_path.rglob("*")]
    with pytest.raises(SystemExit) as ended:
        train_flags([f"--{name}={path}", "--backend", "gloo"])
    output = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and [*tmp_path.rglob("*")] == before
    assert output == f'--{name} must be a path of Linux, not of Windows, got "{path}". In WSL, C: is /mnt/c.'


@pytest.mark.guarantee("paths")
def test_a_name_of_linux_may_have_a_backslash(places, tmp_path):
    assert TrainingConfig(run_dir="a\\b").run_dir == "a\\b"
    (tmp_path / "c:").mkdir()
    (tmp_path / "c:/a").mkdir()
    assert TrainingConfig(data_dir="c:/a").data_dir == "c:/a"


@pytest.mark.guarantee("paths")
@pytest.mark.parametrize("path", UNKNOWN)
@pytest.mark.parametrize("name", [*PATH_SETTINGS, "config"])
def test_an_unknown_name_is_an_error_and_makes_no_folder(places, tmp_path, capsys, name, path):
    before = [*tmp_path.rglob("*")]
    with pytest.raises(SystemExit) as ended:
        train_flags([f"--{name}={path}", "--backend", "gloo"])
    output = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and [*tmp_path.rglob("*")] == before and len(output.splitlines()) == 1
    if name == "config":
        assert output.startswith(f"--config {path} cannot be read ")
    else:
        expected = f"contains {UNKNOWN[path]}, which has no value here. Write the path in full."
        assert output == f"--{name} {path} {expected}"


def train_in_other_homes(flags, folder):
    """Each rank has its own home and working folder."""
    home = folder / f"home{os.environ['RANK']}"
    home.mkdir()
    os.environ["HOME"] = os.environ["PLACE"] = str(home)
    os.chdir(folder)
    return train_flags(flags)["state"]


@pytest.mark.guarantee("paths")
@pytest.mark.parametrize("way", ["flags", "a file", "$PLACE"])
def test_the_folders_of_a_run_are_those_of_rank_0(runs, way):
    paths = {"run_dir": "~/runs/{seed}", "checkpoint_dir": "~/ckpt", "data_dir": "~/data"}
    if way == "$PLACE":
        paths = {name: path.replace("~", "${PLACE}") for name, path in paths.items()}
    flags = [f"--{name}={path}" for name, path in paths.items()]
    if way == "a file":
        (runs.root / "a.json").write_text(json.dumps(paths))
        flags = ["--config", str(runs.root / "a.json")]
    rest = "--dataset_size 16 --epochs 1 --seed 7 --batch_size 4 --backend gloo".split()
    rest += [word for word in runs.words("") if "image_size" in word or word == "8"]
    assert run_ranks(2, train_in_other_homes, [*rest, *flags], runs.root) == ["completed"] * 2
    home = runs.root / "home0"
    assert (home / "runs/7/summary.json").exists() and (home / "ckpt/best.pt").exists()
    saved = json.loads((home / "runs/7/config.json").read_text())
    assert [saved[name] for name in paths] == [f"{home}/runs/7", f"{home}/ckpt", f"{home}/data"]
    assert not [*runs.root.rglob("~")] and not [*runs.root.rglob("*PLACE*")]
    assert not [*(runs.root / "home1").iterdir()]
