"""What holds the house together: floors, sizes, one reader of the environment, no collective on one rank alone."""

import ast
import re
import subprocess

import pytest

from ranks import ROOT
from utils.provenance import MANIFEST, changed_files, template_digests

CORE = sorted([*ROOT.glob("*.py"), *ROOT.glob("utils/*.py")])
FLOORS = {"config": 0, "utils": 1, "ddp_utils": 2, "model": 3, "dataset": 3, "train": 4}
COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "broadcast",
    "barrier",
    "exchange",
    "together",
    "by_rank_0",
    "save_checkpoint",
    "load_checkpoint",
}


def tree(path):
    return ast.parse(path.read_text())


def imports(path):
    """The modules of ours that a file imports, but for those that only type checkers see."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for inner in ast.walk(node):
                inner.module, inner.names = None, []
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found & FLOORS.keys()


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_floors_below_its_own(path):
    floor = 1 if path.parent.name == "utils" else FLOORS[path.stem]
    allowed = {name for name, other in FLOORS.items() if other < floor} | ({"utils"} if floor == 1 else set())
    if path.stem in ("model", "dataset"):
        allowed -= {"model", "dataset"}
    assert imports(path) <= allowed


def test_the_environment_is_read_in_one_file_and_arguments_are_never_a_bag():
    for path in CORE:
        text = path.read_text()
        assert "os.environ" not in text or path.name == "ddp_utils.py", path
        assert not re.search(r"def \w+\([^)]*\bargs\b(?!:)", text.replace("*args", "")), path


def test_no_collective_stands_where_only_rank_0_goes():
    for path in CORE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.If) and "is_main" in ast.unparse(node.test):
                called = {
                    ast.unparse(call.func).split(".")[-1] for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call)
                }
                assert not called & COLLECTIVES, f"{path}:{node.lineno}"


def test_no_file_is_over_400_lines():
    for path in [*CORE, *(ROOT / "scripts").rglob("*.*"), *(ROOT / "tests").rglob("*.py")]:
        if path.suffix in (".py", ".sh"):
            assert len(path.read_text().splitlines()) <= 400, path
    assert len((ROOT / "tests/plain_loop.py").read_text().splitlines()) < 80


def test_the_oracle_shares_nothing_but_model_data_and_config():
    found = {node.module for node in ast.walk(tree(ROOT / "tests/plain_loop.py")) if isinstance(node, ast.ImportFrom)}
    assert found == {"dataset", "model", "torch.optim.swa_utils", "torch.utils.data"}


def test_public_functions_have_docstrings():
    for path in CORE:
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                is_short = isinstance(node, ast.FunctionDef) and len(node.body) <= 2  # what its name and types say already
                assert ast.get_docstring(node) or is_short, f"{path}:{node.lineno} {node.name}"


def test_the_list_of_the_templates_files_is_up_to_date():
    """In a fork that changed files of ours on purpose: the same command accepts them."""
    listed = dict(reversed(line.split("  ")) for line in MANIFEST.read_text().splitlines())
    assert listed == template_digests(), f"{changed_files()} changed: run python -m utils.provenance"


def test_a_change_of_ours_is_named_and_a_change_of_yours_is_not(tmp_path, monkeypatch):
    import shutil

    from utils import provenance

    for name in ("train.py", "config.py", "ddp_utils.py", "model.py", "utils", "scripts"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "MANIFEST", tmp_path / "scripts" / "template.sha256")
    (tmp_path / "model.py").write_text("# a model of my own")
    config = (tmp_path / "config.py").read_text()
    mine = '    vocabulary: int = setting("model", 256, "bytes", at_least(1), "must")\n    # ---- end of yours'
    (tmp_path / "config.py").write_text(config.replace("    # ---- end of yours", mine))
    assert provenance.changed_files() == []
    (tmp_path / "config.py").write_text(config.replace("0.1, ", "0.2, ", 1))
    with (tmp_path / "train.py").open("a") as file:
        file.write("# mine\n")
    assert provenance.changed_files() == ["config.py", "train.py"]


def test_nothing_that_a_run_or_an_environment_makes_is_tracked():
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False).stdout.split()
    assert not [path for path in tracked if path.startswith(("runs/", "data/", ".venv/")) or path.endswith((".pt", ".pyc"))]


def test_the_readmes_config_table_is_that_of_the_dataclass():
    import sys

    sys.path.insert(0, str(ROOT / "scripts"))
    from config_table import BEGIN, END, table

    text = (ROOT / "README.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(), "run python scripts/config_table.py"


def test_the_readme_is_short_and_names_files_and_functions_that_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 570
    for path in re.findall(r"`((?:scripts|utils|tests)/[\w./]+\.(?:py|sh))`", text):
        assert (ROOT / path).exists(), path
    for file, function in re.findall(r"`(\w+\.py)`: `(\w+)", text):
        assert re.search(rf"(def|class) {function}\b", (ROOT / file).read_text()), (file, function)
