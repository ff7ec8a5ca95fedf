"""Settings of a fork: their types, how they are read from flags and files and stored, and what an import refuses."""

from __future__ import annotations

import json
import sys
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from config import TrainingConfig
from ranks import ROOT
from utils.run.resume import list_compared_settings
from utils.settings.checks import above, at_least, between, local_path, one_of
from utils.settings.conflicts import Conflict
from utils.settings.declarations import list_settings
from utils.settings.errors import UserError
from utils.settings.fields import GROUPS, yours


@dataclass(frozen=True, kw_only=True)
class Fork(TrainingConfig):
    widths: list[int] = yours([64, 128], "widths of the layers", at_least(8), "may")
    betas: tuple[float, ...] = yours((0.9, 0.99), "betas", between(0, 1))
    names: list[str] = yours([], "names of columns")
    flags: tuple[bool, ...] = yours((True,), "flags")
    vocabulary: Path = yours("words.txt", "file of words")
    files: list[Path] = yours([], "more files")
    kinds: list[str] = yours(["a"], "kinds", one_of("a", "b"))
    sizes: tuple[int, ...] | str = yours("auto", "sizes (auto: from the data)", above(0))
    rate: str | float = yours("auto", "a rate")
    ratio: float = yours(0, "a part", between(0, 1, inclusive=True))
    home: Path = yours("~/words.txt", "a file", local_path, conflicts=Conflict("seed", "is at home. Leave it out."))
    patch: int = yours(16, "size of a patch", one_of(8, 16))
    margin: float = yours(0.0, "a margin", conflicts=Conflict("home", "has {rate} and {home}. Leave it out."))
    raises: int = yours(1, "fails for 3", lambda value: str(1 // (3 - value))[:0])


def of(*words):
    return Fork.from_args(words)


def rejection(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        Fork.from_args(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


VALUES = [  # flag: its text, the value, and the value as JSON has it
    ("widths", "8,16,32", [8, 16, 32], [8, 16, 32]),
    ("widths", " 8, 16 ", [8, 16], [8, 16]),
    ("widths", "8", [8], [8]),
    ("widths", "", [], []),
    ("betas", "0.5,0", (0.5, 0.0), [0.5, 0.0]),
    ("names", "a, b c,d", ["a", "b c", "d"], ["a", "b c", "d"]),
    ("flags", "yes,no", (True, False), [True, False]),
    ("vocabulary", "a/b.txt", Path("a/b.txt"), "a/b.txt"),
    ("files", "a,b/c", [Path("a"), Path("b/c")], ["a", "b/c"]),
    ("kinds", "a,b", ["a", "b"], ["a", "b"]),
    ("sizes", "1,2", (1, 2), [1, 2]),
    ("sizes", "auto", "auto", "auto"),
    ("rate", "0.5", 0.5, 0.5),
    ("ratio", "1", 1.0, 1.0),
]


@pytest.mark.guarantee("config")
@pytest.mark.parametrize(("name", "text", "value", "stored"), VALUES)
def test_a_value_is_read_from_a_flag_and_files_and_stored_as_json(tmp_path, name, text, value, stored):
    config = of(f"--{name}={text}")
    actual = getattr(config, name)
    assert actual == value and type(actual) is type(value)
    assert config.to_json()[name] == stored == json.loads(json.dumps(config.to_dict()))[name]
    assert tomllib.loads(config.to_toml())[name] == stored
    for file, content in {
        "a.toml": f"{name} = {json.dumps(stored)}",
        "b.json": json.dumps(config.to_dict()),
        "c.yaml": f"{name}: {json.dumps(stored)}",
        "d.yml": f"{name}: {json.dumps(text)}",
    }.items():
        if file[2] == "y":
            pytest.importorskip("yaml")
        (tmp_path / file).write_text(content)
        assert getattr(of("--config", str(tmp_path / file)), name) == value, file
    assert Fork(**json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("widths", "8,x", '--widths must be integers with commas between them, got "8,x".'),
        ("widths", "8,,16", '--widths must be integers with commas between them, got "8,,16".'),
        ("widths", "8,1.5", '--widths must be integers with commas between them, got "8,1.5".'),
        ("widths", "[8]", '--widths must be integers with commas between them, got "[8]".'),
        ("widths", "16,4", "Each element of --widths must be at least 8, got 4."),
        ("betas", "0.9,1", "Each element of --betas must be at least 0 and below 1, got 1.0."),
        ("betas", "nan", '--betas must be numbers with commas between them, got "nan".'),
        ("flags", "maybe", '--flags must be true or false values with commas between them, got "maybe".'),
        ("vocabulary", "", '--vocabulary must be a path, got "".'),
        (
            "vocabulary",
            "$NOWHERE_X/a",
            "--vocabulary $NOWHERE_X/a contains $NOWHERE_X, which has no value here. Write the path in full.",
        ),
        (
            "vocabulary",
            "C:\\a",
            '--vocabulary must be a path of Linux, not of Windows, got "C:\\a". In WSL, C: is /mnt/c.',
        ),
        ("files", "a,~nobody-here/b", "--files ~nobody-here/b contains ~nobody-here, which has no value here."),
        ("kinds", "a,c", 'Each element of --kinds must be a or b, got "c".'),
        ("sizes", "1,0", "Each element of --sizes must be above 0, got 0."),
        ("sizes", "x", '--sizes must be integers with commas between them or "auto", got "x".'),
        ("rate", "fast", '--rate must be a number or "auto", got "fast".'),
        ("ratio", "1.01", "--ratio must be from 0 to 1, got 1.01."),
        ("ratio", "-0.1", "--ratio must be from 0 to 1, got -0.1."),
        ("names", "a,b,", '--names must be texts with commas between them, got "a,b,".'),
        ("home", "s3://user:secret@bucket/x", '--home must be a path, got "s3://[redacted]@bucket/x".'),
        ("files", "a,s3://bucket/x", '--files must be paths with commas between them, got "a,s3://bucket/x".'),
        ("patch", "3", "--patch must be 8 or 16, got 3."),
        ("raises", "3", "--raises 3 cannot be checked ("),
    ],
)
def test_a_wrong_value_is_one_line_of_whole_sentences(capsys, name, text, expected):
    text = rejection(capsys, f"--{name}={text}")
    assert text.startswith(expected) and len(text.splitlines()) == 1
    assert text.endswith((".", "?")) and "; " not in text


@pytest.mark.parametrize("value", [3, "ab", {"a": 1}, [[8]], [None], [True], None, 8.0])
def test_the_constructor_refuses_what_is_no_list_of_its_type(value):
    with pytest.raises(UserError, match="^--widths must be integers with commas between them, got"):
        Fork(widths=value)


def test_a_list_is_that_of_its_config_alone_and_keeps_its_default():
    first = Fork()
    first.widths.append(1)
    assert Fork().widths == [64, 128]


def test_a_path_is_expanded_in_a_value_and_not_in_a_default(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert of("--vocabulary", "~/words").vocabulary == Path("/home/me/words")
    assert of("--files", "~/a,b").files == [Path("/home/me/a"), Path("b")]


@pytest.mark.guarantee("config")
def test_a_path_at_its_default_is_at_its_default_after_it_was_expanded(monkeypatch):
    """So it is no conflict, and no difference from a checkpoint."""
    monkeypatch.setenv("HOME", "/home/me")
    config = Fork(seed=3)
    assert config.home == Path("/home/me/words.txt")
    rows = {row.name: row for row in list_compared_settings({"config": {}, "provenance": {}}, config)}
    assert rows["home"].saved == rows["home"].current == "/home/me/words.txt"
    with pytest.raises(UserError, match=r"^--home /a is at home\. Leave it out\.$"):
        Fork(seed=3, home="/a")


def test_a_conflict_whose_text_has_a_wrong_value_is_left_for_later(capsys):
    assert rejection(capsys, "--margin", "1", "--home", "a", "--rate", "x").splitlines() == [
        '--rate must be a number or "auto", got "x".'
    ]
    assert rejection(capsys, "--margin", "1", "--home", "a") == "--margin 1.0 has auto and a. Leave it out."


def test_values_after_a_list_are_answered_with_commas(capsys):
    assert rejection(capsys, "--widths", "8", "16", "32") == '"16" is not a flag. Write --widths 1,2,3.'


@pytest.mark.parametrize("value", [np.array([8, 9]), torch.tensor([8, 9]), range(8, 10), (8, 9)])
def test_arrays_tensors_and_ranges_of_the_training_set_become_lists(value):
    assert Fork(widths=value).widths == [8, 9] and Fork(sizes=value).sizes == (8, 9)


def test_a_list_in_run_dir_has_commas():
    assert of("--run_dir", "runs/{widths}-{lr:.0e}").run_folder.name == "64,128-1e-01"


def test_help_shows_the_type_the_choices_and_the_default_of_a_list(capsys):
    with pytest.raises(SystemExit):
        of("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--widths INT,... widths of the layers [64,128]" in shown
    assert "--vocabulary PATH file of words [words.txt]" in shown
    assert "--kinds STR,... kinds: {a,b} [a]" in shown and "--names STR,... names of columns --" in shown


END_OF_BLOCK = "    # ---- end of yours"


def import_fork(monkeypatch, line):
    """The module of a config.py with one more line in the block "yours"."""
    text = (ROOT / "config.py").read_text()
    assert text.count(END_OF_BLOCK) == 1
    text = text.replace(END_OF_BLOCK, f"    {line}\n{END_OF_BLOCK}")
    text = text.replace("import json\n", "import json\nimport typing\nfrom dataclasses import field\n", 1)
    module = types.ModuleType("config_of_a_fork")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, "config.py", "exec"), vars(module))
    return module


PLAIN = "A setting may have the types int, float, bool, str, pathlib.Path, and list[...] or tuple[..., ...] of one"
NO_NONE = 'x must not be None. Leave None out, and write "off" as 0, "" or "auto".'


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("int | None", NO_NONE),
        ("None | str", NO_NONE),
        ("typing.Optional[Path]", NO_NONE),
        ("list[int] | None", NO_NONE),
        ("int | str | None", NO_NONE),
        ("dict[str, int]", f"x has the type dict[str, int]. {PLAIN}"),
        ("dict", f"x has the type dict. {PLAIN}"),
        ("list", f"x has the type list. {PLAIN}"),
        ("tuple", f"x has the type tuple. {PLAIN}"),
        ("tuple[int, int]", f"x has the type tuple[int, int]. {PLAIN}"),
        ("tuple[()]", f"x has the type tuple[()]. {PLAIN}"),
        ("list[list[int]]", f"x has the type list[list[int]]. {PLAIN}"),
        ("list[int | str]", f"x has the type list[int | str]. {PLAIN}"),
        ("list[typing.Any]", f"x has the type list[typing.Any]. {PLAIN}"),
        ("set[int]", f"x has the type set[int]. {PLAIN}"),
        ("Sequence[int]", f"x has the type collections.abc.Sequence[int]. {PLAIN}"),
        ("int | float", f"x has the type int | float. {PLAIN}"),
        ("typing.Union[int, float, str]", f"x has the type typing.Union[int, float, str]. {PLAIN}"),
        ("typing.Literal['a']", f"x has the type typing.Literal['a']. {PLAIN}"),
        ("Any", f"x has the type Any. {PLAIN}"),
        ("object", f"x has the type object. {PLAIN}"),
        ("complex", f"x has the type complex. {PLAIN}"),
        ("bytes", f"x has the type bytes. {PLAIN}"),
        ("None", f"x has the type NoneType. {PLAIN}"),
        ("Pth", "the type of a setting cannot be read (name 'Pth' is not defined). Import or correct it."),
        (
            "typing.Lst[int]",
            "the type of a setting cannot be read (module 'typing' has no attribute 'Lst'). Import or correct it.",
        ),
        (
            "5 + 'a'",
            "the type of a setting cannot be read (unsupported operand type(s) for +: 'int' and 'str'). Import",
        ),
    ],
)
def test_another_type_is_refused_at_import_in_one_sentence(monkeypatch, annotation, expected):
    with pytest.raises(UserError) as error:
        import_fork(monkeypatch, f'x: {annotation} = yours(1, "mine")')
    assert str(error.value).startswith(f"config.py: {expected}") and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('x: int = yours("many", "mine")', "the default of x must be an integer, got 'many'."),
        ('x: int = yours(None, "mine")', "the default of x must be an integer, got None."),
        ('x: Path = yours("", "mine")', "the default of x must be a path, got ''."),
        ('x: list[int] = yours(3, "mine")', "the default of x must be integers with commas between them, got 3."),
        ("x: int = yours({}, 'mine')", "the default of x must be an integer, got {}."),
        ("x: int = yours(3, 'mine', at_least)", "the check of x returns <function at_least"),
        ("x: int = yours(3, 'mine', lambda value: value > 2)", "the check of x returns True for 3. Let it"),
        (
            "x: list[int] = yours([3], 'mine', lambda value: None)",
            "the check of x returns None for 3. Let it return",
        ),
        (
            "x: int = yours(3, 'mine', conflicts=[Conflict('epohcs', 'a. B.')])",
            "a conflict of x names epohcs. Name a setting that exists.",
        ),
        (
            "x: int = yours(3, 'mine', conflicts=[Conflict('epochs', 'a. B.', subject='y')])",
            "a conflict of x names y. Name a setting that exists.",
        ),
        ("x: int = 3", 'x has no help text. Write x: int = yours(DEFAULT, "what it is").'),
        ("x: int = field(default=3)", 'x has no help text. Write x: int = yours(DEFAULT, "what it is").'),
        (
            'x: int = yours(3, "mine", None, "perhaps")',
            'the resume rule of the setting "mine" must be must, may or free, got',
        ),
        ('epochs: int = yours(3, "mine")', "epochs is a setting of the template. Choose another name."),
        (
            'sharding: str = yours("a", "mine")',
            "sharding is a setting of the template. Choose another name.",
        ),  # extra: sharding
        ('limits: int = yours(3, "mine")', "limits is a name that the template uses. Choose another name."),
        ('to_dict: int = yours(3, "mine")', "to_dict is a name that the template uses. Choose another name."),
        (
            'micro_batch_setting: int = yours(3, "mine")',
            "micro_batch_setting is a name that the template uses. Choose another name.",
        ),
        ('minutes: int = yours(3, "mine")', "minutes is the name of a setting that was removed. Choose another name."),
        (
            "x: int = yours(3, 'mine', conflicts=Conflict('epochs', 'a {epohcs}. B.'))",
            "a conflict of x names epohcs. Name a setting that exists.",
        ),
        ('config: str = yours("", "mine")', "--config is a flag of train.py itself. Choose another name."),
        ('help: str = yours("", "mine")', "--help is a flag of train.py itself. Choose another name."),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_at_import(monkeypatch, line, expected):
    with pytest.raises(UserError) as error:
        import_fork(monkeypatch, line)
    assert str(error.value).startswith(f"config.py: {expected}"), error.value


def test_all_declarations_that_cannot_work_are_named(monkeypatch):
    with pytest.raises(UserError) as error:
        import_fork(monkeypatch, 'x: dict = yours(3, "x")\n    y: int = yours(3, "y")\n    z: int = 3')
    assert [line.split()[1] for line in str(error.value).splitlines()] == ["x", "z"]


def test_a_fork_may_declare_a_setting_of_the_example_again(monkeypatch):
    """Such as those of the extra `images`, which its own data need in another form."""
    fork = import_fork(monkeypatch, 'mixup_alpha: str = yours("none", "mine")')
    assert fork.TrainingConfig.from_args(["--mixup_alpha", "some"]).mixup_alpha == "some"
    assert [setting.name for setting in fork.SETTINGS].count("mixup_alpha") == 1


def test_choices_of_extras_are_not_added_to_those_of_a_fork(monkeypatch):
    line = 'dataset: str = yours("coco", "data set", one_of("coco", "voc"))'
    fork = import_fork(monkeypatch, line)
    (dataset,) = (setting for setting in fork.SETTINGS if setting.name == "dataset")
    assert dataset.choices == ["coco", "voc"]


def test_settings_stand_by_group_and_those_of_extras_follow():
    groups = [setting.group for setting in list_settings(Fork)]
    assert groups == sorted(groups, key=GROUPS.index)
    names = [setting.name for setting in list_settings(Fork) if setting.group == "distributed"]
    assert names[:4] == ["backend", "init_method", "timeout", "bucket_cap_mb"]


def test_a_condition_of_a_conflict_that_reads_another_name_is_an_error(monkeypatch):
    """A typing error would switch the conflict off."""
    line = 'x: int = yours(3, "mine", conflicts=[Conflict(lambda config: config.epohcs, "a. B.")])'
    fork = import_fork(monkeypatch, line)
    with pytest.raises(AttributeError, match="epohcs"):
        fork.TrainingConfig(x=4)
