# extra: template
"""docs/reference.md names what a fork may define: all of it, and nothing else, with the arguments that the code has."""

import ast
import dataclasses
import inspect
import re
import textwrap
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import config
import dataset
import model
from ranks import ROOT
from utils.example.images import ImageDataset
from utils.training.hooks import REQUIRED_HOOKS, ModelHooks
from utils.training.parts.after_step import StepView
from utils.training.schedule import Progress

PAGE = (ROOT / "docs/reference.md").read_text()
CALLERS = [ROOT / "train.py", ROOT / "ddp_utils.py", *ROOT.glob("utils/**/*.py"), *ROOT.glob("scripts/*.py")]
CALLERS = [path for path in CALLERS if not {"example", "images"} & {*path.parts}]  # these know their own sets only
VERIFY = [*ROOT.glob("scripts/lib/verify/*.py")]
ONLY_VERIFY = {"depends_on_batch", "segments"}  # read by verify.py, which checks what a run cannot see
OF_SETS = {"dataset", "_dataset", "source", "_source", "train_set", "inner"}  # how the code calls a data set
# of the template's own data sets: a cache, a listing of files, torch's Subset
INTERNAL = {"is_cached", "has_sizes", "source", "dataset", "indices", "device", "use_listing", "listing", "folder"}
DATA_FUNCTIONS = {"create_dataset", "is_prepared", "prepare_data"}
# what each entry says, in this order
PARTS = ["Gets", "Returns", "Called", "Default", "Errors"]


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def entries(title):
    """{name: (arguments of each form, text)} of the functions in a section."""
    by_name = {}
    for block in section(title).split("\n### ")[1:]:
        heading, _, text = block.partition("\n")
        if heading.startswith("`"):
            forms = re.findall(r"`(\w+)(?:\(([^)]*)\)| = True)`", heading)
            by_name[forms[0][0]] = ([arguments.split(", ") if arguments else [] for _, arguments in forms], text)
    return by_name


def rows(text):
    """The names in the first column of the tables of a text."""
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in first for name in re.findall(r"`(\w+)`", cell)}


def names_read(paths):
    """The attributes of data sets that code asks for: getattr, hasattr, and those used directly."""
    attribute_names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            loops = {
                loop.target.id: {constant.value for constant in loop.iter.elts if isinstance(constant, ast.Constant)}
                for loop in getattr(node, "generators", [])
                if isinstance(loop.target, ast.Name) and isinstance(loop.iter, ast.Tuple)
            }
            for call in ast.walk(node) if loops else [node]:
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("getattr", "hasattr"):
                    target, name = call.args[0], call.args[1]
                    if ast.unparse(target).split(".")[-1] in OF_SETS:
                        attribute_names |= {name.value} if isinstance(name, ast.Constant) else loops.get(name.id, set())
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("dataset"):
                attribute_names.add(node.attr)
    return {name for name in attribute_names if not name.startswith("_") or name.startswith("__getitem")} - INTERNAL


def test_the_page_has_every_function_of_model_py_and_no_other():
    hooks = {field.name for field in dataclasses.fields(ModelHooks)} - {"parts"}
    assert entries("Functions of model.py").keys() - ONLY_VERIFY == hooks - ONLY_VERIFY
    assert entries("Functions of dataset.py").keys() == DATA_FUNCTIONS


def test_the_page_has_every_method_and_attribute_of_a_data_set_and_no_other():
    documented = {*entries("Methods of a data set"), *rows(section("Attributes of a data set"))}
    assert documented == names_read(CALLERS) | {"__getitem__"}
    assert names_read(VERIFY) <= documented | {"name"}


@pytest.mark.parametrize("title", ["Functions of model.py", "Functions of dataset.py", "Methods of a data set"])
def test_an_entry_says_what_it_gets_and_returns_when_it_is_called_its_default_and_its_errors(title):
    for name, (_, text) in entries(title).items():
        present = [part for part in PARTS if re.search(rf"^- {part}: \S", text, re.MULTILINE)]
        assert present == re.findall(rf"^- ({'|'.join(PARTS)}): ", text, re.MULTILINE), name
        missing = {*PARTS} - {*present}
        allowed = {"Errors"} | ({"Default"} if name in (*REQUIRED_HOOKS, *DATA_FUNCTIONS, "__getitem__") else set())
        assert missing <= allowed | ({"Gets"} if name == "depends_on_batch" else set()), name


def code_of(name):
    """The code that a heading must fit: the default, the shipped function, or a method of the shipped data set."""
    own = [vars(model).get(name), vars(dataset).get(name), vars(ImageDataset).get(name)]
    return [candidate for candidate in (getattr(ModelHooks, name, None), *own) if inspect.isfunction(candidate)]


def test_the_arguments_are_those_of_the_code():
    compared = 0
    for title in ("Functions of model.py", "Functions of dataset.py", "Methods of a data set"):
        for name, (forms, _) in entries(title).items():
            for function in code_of(name):
                arguments = [argument for argument in inspect.signature(function).parameters if argument != "self"]
                # find_blocks calls itself, and calls what it gets a module
                assert arguments in forms or (name == "blocks" and len(arguments) == 1), (name, arguments)
                compared += 1
    assert compared >= 14


CHECKS = {  # as the page writes it: a valid value and a wrong one
    "at_least(1)": (1, 0),
    "above(0)": (0.1, 0),
    "between(0, 1)": (0, 1),
    "between(0, 1, inclusive=True)": (1, 1.1),
    'one_of("relu", "gelu")': ("gelu", "swish"),
    r'refuse((r"\s", "has a space. Write it without."))': ("two", "t wo"),
    "local_path": ("data", "s3://bucket/data"),
    "path_or_url": ("s3://bucket/data", "s3:///data"),
    "probability": (1, 1.1),
    "range_up_to(1)": ("1/2,1", "1/2,3/2"),
}


@pytest.mark.parametrize(("expression", "valid", "wrong"), [(name, *values) for name, values in CHECKS.items()])
def test_a_check_of_the_page_exists_and_says_what_the_value_must_be(expression, valid, wrong):
    check = eval(expression, vars(config))
    assert check(valid) == ""
    problem = check(wrong)
    assert problem.startswith("must ") or problem.partition(". ")[2].endswith(".")


def test_the_page_has_all_checks_that_take_arguments():
    table = section("Settings of your own").split("| check |")[1]
    documented = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert documented == [*CHECKS]
    names = {expression.partition("(")[0] for expression in documented}
    for name, function in inspect.getmembers(config, inspect.isfunction):
        assert name in names or function.__annotations__.get("return") != "Check"


def test_a_loss_reads_a_setting_as_the_page_shows():
    names = {"F": torch.nn.functional}
    exec(re.search(r"```python\n(.*?)^```", section("Settings of your own"), re.DOTALL | re.MULTILINE)[1], names)
    batch = {"better": torch.ones(2, 1), "worse": torch.ones(2, 1)}
    for margin in (0.2, 0.7):
        hooks = ModelHooks.from_module(
            SimpleNamespace(**names, create_model=None, param_groups=None), mock.Mock(margin=margin)
        )
        loss, count = hooks.compute_loss(torch.nn.Linear(1, 1), batch)["loss"]
        assert loss.item() / count == pytest.approx(margin)


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("The progress of a step", {field.name for field in dataclasses.fields(StepView)}),
        (
            "The progress of the run",
            {field.name for field in dataclasses.fields(Progress)} - {"loss_shift"} | {"epoch_number"},
        ),
    ],
)
def test_the_tables_of_progress_have_its_attributes(title, names):
    assert rows(PAGE.split(f"\n### {title}\n")[1].split("\n##")[0]) == names


def test_every_python_block_of_the_page_is_valid():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    examples = {getattr(node, "name", "") for block in blocks for node in ast.parse(block).body}
    assert examples >= {"initial_weights", "predict", "example_inputs", "collate", "epoch_order"}


def test_the_settings_of_the_page_can_be_declared_as_it_shows():
    examples = re.findall(r"```python\n((?:margin:|def multiple_of_eight).*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    block = "\n".join(examples) + "\nwidth: int = yours(64, 'width', multiple_of_eight)\n"
    names = {"dataclass": dataclasses.dataclass} | vars(config)
    exec(f"@dataclass(frozen=True, kw_only=True)\nclass Mine(TrainingConfig):\n{textwrap.indent(block, '    ')}", names)
    config_class = names["Mine"]
    assert config_class(hardest=1, margin=0.2).hardest == 1
    for values, expected in (({"hardest": 1}, "--hardest 1 needs a margin."), ({"width": 7}, "--width must be a mul")):
        with pytest.raises(config.UserError, match=expected):
            config_class(**values)
