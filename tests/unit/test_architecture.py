# extra: template
"""Rules of the architecture: layers, one reader of the environment, no collective on rank 0 alone."""

import ast
import re
import subprocess

import pytest

from ranks import ROOT

SETTINGS_OF_EXTRAS = "settings of extras"  # utils/extras/settings.py and utils/extras/NAME/settings.py
LAYERS = {
    "utils.settings": 0,
    SETTINGS_OF_EXTRAS: 1,
    "config": 2,
    "utils": 3,  # small tools that know neither ranks nor runs
    "utils.distributed": 4,
    "utils.data": 5,
    "utils.training": 6,
    "utils.checkpoint": 6,
    "utils.run": 7,
    "utils.report": 8,
    "utils.example": 8,  # of model.py, dataset.py and the extra `images` alone
    "ddp_utils": 9,
    "utils.assembly": 9,  # puts a run together
    "utils.extras": 9,  # by others than these only in marked lines in functions: tests/builtin/test_extras.py
    "model": 10,
    "dataset": 10,
    "train": 11,
}
# without a fork's own files
CORE = sorted([*(path for path in ROOT.glob("*.py") if path.stem in LAYERS), *ROOT.glob("utils/**/*.py")])
EXTRAS = [path for path in CORE if "extras" in path.parts and path.parent.name != "extras"]
OURS = [path for path in CORE if path.name not in ("model.py", "dataset.py")]  # a fork does not edit these
COLLECTIVES = set(
    "all_reduce all_gather broadcast gather barrier all_gather_json broadcast_json first_rank_where all_reduce_scalar"
    " on_all_ranks on_rank_0 require_equal run_once_per_file_system save_checkpoint load_checkpoint".split()
)
FORK_FUNCTIONS = {
    "model": {"create_model", "param_groups", "compute_loss"},
    "dataset": {"create_dataset", "is_prepared", "prepare_data", "create_distributed_dataloader"},
}


def tree(path):
    return ast.parse(path.read_text())


def package(module):
    """The package that a module is in: utils.run for utils.run.folder, utils for utils.files."""
    parts = module.split(".")
    if re.fullmatch(r"utils\.extras\.(\w+\.)?settings", module):
        return SETTINGS_OF_EXTRAS
    return next(name for name in (".".join(parts[:2]), parts[0]) if name in LAYERS)


def imports(path):
    """The modules of this repository that a file imports, including those for type checkers."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module in ("utils", *(name for name in LAYERS if name.startswith("utils.")))
            names = [f"{node.module}.{alias.name}" for alias in node.names] if whole else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in LAYERS)


def module_level_imports(path):
    """The modules of the core that are imported when this one is."""
    names = set()
    inside = [*tree(path).body]
    while inside:
        node = inside.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= members & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With) and "TYPE_CHECKING" not in ast.unparse(node).split("\n")[0]:
            inside += [*node.body, *getattr(node, "orelse", [])]
    return names & MODULES.keys() - {name_of(path)}


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in CORE}


def test_no_modules_import_each_other_in_a_circle():
    left = {name: module_level_imports(path) for name, path in MODULES.items()}
    while ends := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in ends:
            del left[name]
    assert not left  # modules of a circle, and those that import them


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_at_module_level_point_down(path):
    """Only what puts a run or the example together imports extras."""
    source = package(name_of(path))
    others = {name for name in module_level_imports(path) if package(name) != source}
    if source in ("utils.assembly", "utils.example"):
        others = {name for name in others if package(name) != "utils.extras"}
    assert not [name for name in others if LAYERS[package(name)] >= LAYERS[source]]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_or_stay_in_their_package(path):
    source = package(".".join(path.relative_to(ROOT).with_suffix("").parts))
    upward = {name for name in imports(path) if package(name) != source and LAYERS[package(name)] >= LAYERS[source]}
    assert not {name for name in upward if package(name) != "utils.extras"}


@pytest.mark.parametrize("path", EXTRAS, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_extra_imports_no_other_one_unless_its_docstring_names_it(path):
    own = path.relative_to(ROOT).parts[2]
    others = {name.split(".")[2] for name in imports(path) if name.startswith("utils.extras.")} - {own}
    assert not [name for name in others if f"`{name}`" not in ast.get_docstring(tree(path))]


def test_only_model_py_and_dataset_py_import_the_example():
    """The template needs none of it."""
    outside = [path for path in OURS if not {"example", "images"} & {*path.parts}]
    assert not [path for path in outside for name in imports(path) if package(name) == "utils.example"]


def test_the_environment_is_read_in_one_file_and_no_function_takes_an_args_object():
    for path in OURS:
        text = path.read_text()
        assert "os.environ" not in text or path.name == "context.py", path
        assert not re.search(r"def \w+\([^)]*\bargs\b(?!:)", text.replace("*args", "")), path


def test_no_collective_is_called_on_rank_0_alone():
    for path in CORE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.If) and "is_main" in ast.unparse(node.test):
                calls = [call for part in node.body for call in ast.walk(part) if isinstance(call, ast.Call)]
                called = {ast.unparse(call.func).split(".")[-1] for call in calls}
                assert not called & COLLECTIVES, f"{path}:{node.lineno}"


def test_train_py_assigns_no_attribute():
    """An object is complete when its constructor returns."""
    targets = [
        target for node in ast.walk(tree(ROOT / "train.py")) if isinstance(node, ast.Assign) for target in node.targets
    ]
    assert not [ast.unparse(target) for target in targets if isinstance(target, ast.Attribute)]


def test_no_object_has_more_than_fifteen_attributes():
    """A dataclass lists its fields; the one that has more is to be cut."""
    more = {"Watchdog": 26}
    for path in CORE:
        for node in (node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)):
            if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                attributes = {
                    child.attr
                    for child in ast.walk(node)
                    if isinstance(child, ast.Attribute)
                    and isinstance(child.ctx, ast.Store)
                    and ast.unparse(child.value) == "self"
                }
                assert len(attributes) <= more.get(node.name, 15), (path, node.name)


def test_no_function_is_over_80_lines_and_no_constructor_has_more_than_seven_parameters():
    for path in CORE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, (path, node.name)
                assert node.name != "__init__" or len(node.args.args + node.args.kwonlyargs) <= 8, path  # with self


def test_the_oracles_share_only_model_data_and_random_keys():
    for oracle, shared in (("plain_loop.py", {"model", "dataset"}), ("kernel/*.py", {"model", "dataset", "utils.rng"})):
        files = [*(ROOT / "tests").glob(oracle)]
        assert {name for path in files for name in imports(path)} == shared, oracle


def names_used(text):
    """(module, name) of what a file imports from model.py and dataset.py, also in programs within its strings."""
    for module in FORK_FUNCTIONS:
        for names in re.findall(rf"^\s*from {module} import (\([^)]*\)|[^\n;\\\"']*)", text, re.M):
            yield from (
                (module, name.split()[0]) for name in names.strip("()").split("#")[0].split(",") if name.strip()
            )
        if imported := re.search(rf"^\s*import (?:\w+, )*{module}\b(?: as (\w+))?", text, re.M):
            name = imported[1] or module
            is_optional = set(re.findall(rf"hasattr\({name}, \"(\w+)\"\)", text))
            attributes = set(re.findall(rf"(?<![\w.]){name}\.(?!py\b)(\w+)", text))
            yield from ((module, attribute) for attribute in attributes - is_optional)
            yield from ((module, name) for name in re.findall(rf"(?:setattr|object)\({name}, [\"'](\w+)", text))


def test_only_tests_that_a_fork_leaves_out_use_the_built_in_model_and_data():
    """A fork replaces model.py and dataset.py: all other tests use only the functions that train.py calls."""
    example = "import model\nx = model.Net(); from_ = 1\n  from dataset import (\n    A,\n    B as C,\n)"
    assert set(names_used(example)) == {("model", "Net"), ("dataset", "A"), ("dataset", "B")}
    example = 'import model as fork\nx = fork.Net()\nif hasattr(fork, "after_step"):\n    fork.after_step()\n'
    assert set(names_used(example)) == {("model", "Net")}
    for path in (ROOT / "tests").rglob("*.py"):
        if not {"builtin", "comparison", "images"} & {*path.parts} and path.name != "test_architecture.py":
            used = names_used(path.read_text())
            assert not [name for module, name in used if name not in FORK_FUNCTIONS[module]], path


def test_no_output_of_a_run_or_an_environment_is_tracked():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False)
    is_made = [path.startswith(("runs/", "data/", ".venv/")) for path in listed.stdout.split()]
    assert not any(is_made) and ".pt\n" not in listed.stdout and ".pyc\n" not in listed.stdout
