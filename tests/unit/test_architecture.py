"""What holds the house together: floors, sizes, one reader of the environment, no collective on one rank alone."""

import ast
import re
import subprocess

import pytest

from ranks import ROOT
from utils.provenance import MANIFEST, changed_files, template_digests

CORE = sorted([*ROOT.glob("*.py"), *ROOT.glob("utils/*.py")])
OURS = [path for path in CORE if path.name not in ("model.py", "dataset.py")]  # what a fork leaves as it is
FLOORS = {"config": 0, "utils": 1, "ddp_utils": 2, "model": 3, "dataset": 3, "train": 4}
COLLECTIVES = set("all_reduce all_gather broadcast barrier exchange together by_rank_0 save_checkpoint load_checkpoint".split())
SEAMS = {
    "model": {"create_model", "param_groups", "compute_loss"},
    "dataset": {"create_dataset", "is_prepared", "prepare_data", "create_distributed_dataloader"},
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
    for path in OURS:
        text = path.read_text()
        assert "os.environ" not in text or path.name == "ddp_utils.py", path
        assert not re.search(r"def \w+\([^)]*\bargs\b(?!:)", text.replace("*args", "")), path


def test_no_collective_stands_where_only_rank_0_goes():
    for path in CORE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.If) and "is_main" in ast.unparse(node.test):
                calls = [call for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call)]
                called = {ast.unparse(call.func).split(".")[-1] for call in calls}
                assert not called & COLLECTIVES, f"{path}:{node.lineno}"


def test_no_file_is_over_400_lines():
    for path in [*CORE, *(ROOT / "scripts").rglob("*.*"), *(ROOT / "tests").rglob("*.py")]:
        if path.suffix in (".py", ".sh") and path.name != "guarantees.py":  # a table
            assert len(path.read_text().splitlines()) <= 400, path
    assert len((ROOT / "tests/plain_loop.py").read_text().splitlines()) < 80


def test_the_oracle_shares_nothing_but_model_data_and_config():
    found = {node.module for node in ast.walk(tree(ROOT / "tests/plain_loop.py")) if isinstance(node, ast.ImportFrom)}
    assert found == {"dataset", "model", "torch.optim.swa_utils", "torch.utils.data"}


def names_used(text):
    """(module, name) of what a file takes from model.py and dataset.py, also in programs within its strings."""
    for module in SEAMS:
        for names in re.findall(rf"^\s*from {module} import (\([^)]*\)|[^\n;\\\"']*)", text, re.M):
            yield from ((module, name.split()[0]) for name in names.strip("()").split("#")[0].split(",") if name.strip())
        if re.search(rf"^\s*import (\w+, )*{module}\b", text, re.M):
            yield from ((module, name) for name in re.findall(rf"(?<![\w.]){module}\.(?!py\b)(\w+)", text))
            yield from ((module, name) for name in re.findall(rf"(?:setattr|object)\({module}, [\"'](\w+)", text))


def test_what_is_shipped_is_used_in_tests_of_the_built_in_model_and_data_alone():
    """A fork replaces model.py and dataset.py: all other tests go through the functions that train.py calls."""
    assert set(names_used("import model\nx = model.Net(); from_ = 1\n  from dataset import (\n    A,\n    B as C,\n)")) == {
        *(("model", "Net"), ("dataset", "A"), ("dataset", "B"))
    }
    files = [path for path in (ROOT / "tests").rglob("*.py") if "builtin" not in path.parts and path.name != "test_architecture.py"]
    found = {(str(path.relative_to(ROOT)), *use) for path in files for use in names_used(path.read_text())}
    assert not [use for use in sorted(found) if use[2] not in SEAMS[use[1]]]


def test_the_list_of_the_templates_files_is_up_to_date():
    """In a fork that changed files of ours on purpose: the same command accepts them."""
    listed = dict(reversed(line.split("  ")) for line in MANIFEST.read_text().splitlines())
    assert listed == template_digests(), f"{changed_files()} changed: run python -m utils.provenance"


def test_nothing_that_a_run_or_an_environment_makes_is_tracked():
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False).stdout.split()
    assert not [path for path in tracked if path.startswith(("runs/", "data/", ".venv/")) or path.endswith((".pt", ".pyc"))]
