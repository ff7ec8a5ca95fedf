# extra: template
"""scripts/lib/remove_extras.py deletes an import if only deleted lines used it, and changes nothing else in a file."""

import ast

import pytest

from lib import fork_files, remove_extras

NAME = "shiny"  # the extra that is deleted
USE = "print({})  # extra: shiny\n"

# id, the lines before those that are deleted, what the deleted line uses, what is left of the lines before (...: all)
CASES = [
    ("only the deleted line used it", "import a\n", "a.b", ""),
    ("another line uses it", "import a\n\na.c()\n", "a.b", "import a\n\na.c()\n"),
    ("for its side effects", "import a\nimport b\n", "b", "import a\n"),
    ("for its side effects, from", "from a import c\nimport b\n", "b", "from a import c\n"),
    ("a module of a package", "import a.b.c\n", "a.b.c.d", ""),
    ("another use of the package", "import a.b.c\n\na.d()\n", "a.b.c", "import a.b.c\n\na.d()\n"),
    ("renamed", "import a.b as c\n", "c", ""),
    ("one name of two", "from a import b, c\n\nc()\n", "b", "from a import c\n\nc()\n"),
    ("the last name of two", "from a import b, c  # why\n\nb()\n", "c", "from a import b  # why\n\nb()\n"),
    ("the middle name", "from a import b, c as d, e\n\nb(e)\n", "d", "from a import b, e\n\nb(e)\n"),
    ("one module of two", "import a, b\n\na()\n", "b", "import a\n\na()\n"),
    ("in brackets", "from a import (\n    b,\n    c,\n)\n\nc()\n", "b", "from a import (\n    c,\n)\n\nc()\n"),
    ("brackets, own style", "from a import (b,\n  c)\n\nb()\n", "c", "from a import (b,\n  )\n\nb()\n"),
    ("brackets, first line", "from a import (b,\n  c)\n\nc()\n", "b", "from a import (\n  c)\n\nc()\n"),
    ("brackets, all names", "from a import (\n    b,  # why\n    c,\n)\n", "b, c", ""),
    ("letters beyond ASCII", "from é import ö, b\n\nb('ü')\n", "ö", "from é import b\n\nb('ü')\n"),
    ("re-export in __all__", 'import a\n\n__all__ = ["a"]\n', "a", 'import a\n\n__all__ = ["a"]\n'),
    ("added to __all__", 'import a\n\n__all__ += ["a"]\n', "a", 'import a\n\n__all__ += ["a"]\n'),
    ("appended to __all__", 'import a\n\n__all__.append("a")\n', "a", 'import a\n\n__all__.append("a")\n'),
    ("re-export as itself", "from a import b as b\n", "b", "from a import b as b\n"),
    ("noqa: F401", "import a  # noqa: F401\n", "a", "import a  # noqa: F401\n"),
    ("noqa of two", "import a  # noqa: E402, F401\n", "a", "import a  # noqa: E402, F401\n"),
    ("noqa of everything", "import a  # noqa\n", "a", "import a  # noqa\n"),
    ("noqa of something else", "import a  # noqa: E402\n", "a", ""),
    ("all names", "from a import *\nimport b\n", "b", "from a import *\n"),
    ("__future__", "from __future__ import annotations\n", "annotations", "from __future__ import annotations\n"),
    ("quoted annotation", "import a\n\nx: 'a.B' = 1\n", "a", "import a\n\nx: 'a.B' = 1\n"),
    ("quoted argument", "import a\n\ndef f(x: 'a.B'): ...\n", "a", "import a\n\ndef f(x: 'a.B'): ...\n"),
    ("quoted result", "import a\n\ndef f() -> 'list[a.B]': ...\n", "a", "import a\n\ndef f() -> 'list[a.B]': ...\n"),
    ("quoted in a type", "from a import B\n\nC = list['B']\n", "B", "from a import B\n\nC = list['B']\n"),
    ("quoted in cast", "from a import B\n\nC = cast('B', 1)\n", "B", "from a import B\n\nC = cast('B', 1)\n"),
    ("in an f-string", "import a\n\nx = f'{a.b}'\n", "a", "import a\n\nx = f'{a.b}'\n"),
    ("as a decorator", "import a\n\n@a\ndef f(): ...\n", "a", "import a\n\n@a\ndef f(): ...\n"),
    ("eval of a text", "import a\n\nx = eval('a.b')\n", "a", "import a\n\nx = eval('a.b')\n"),
    ("type comment", "from a import B\n\nx = []  # type: C[B]\n", "B", "from a import B\n\nx = []  # type: C[B]\n"),
    ("comment of a result", "import a\n\ndef f():  # type: () -> a.B\n    ...\n", "a", ...),
    ("comment of an argument", "import a\n\ndef f(\n    x,  # type: a.B\n): ...\n", "a", ...),
    ("ignored type", "import a\n\nx = 1  # type: ignore[a]\n", "a", "x = 1  # type: ignore[a]\n"),
    ("comment after a type", "import a\n\nx = 1  # type: int  # a\n", "a", "x = 1  # type: int  # a\n"),
    ("fixture", "from a import b\n\ndef test_b(b): ...\n", "b", ...),
    ("fixture by keyword", "from a import b\n\ndef test_b(*, b): ...\n", "b", ...),
    ("fixture of a method", "from a import b\n\nclass T:\n    async def test_b(self, b): ...\n", "b", ...),
    ("fixture of a fixture", "from a import b\n\n@pytest.fixture\ndef c(b): ...\n", "b", ...),
    ("usefixtures", "from a import b, c\n\n@pytest.mark.usefixtures('c', 'b')\ndef test_b(): ...\n\nc\n", "b", ...),
    ("usefixtures of a module", "from a import b\n\npytestmark = [pytest.mark.usefixtures('b')]\n", "b", ...),
    ("getfixturevalue", "from a import b\n\ndef f(request):\n    request.getfixturevalue('b')\n", "b", ...),
    ("word of a text", "import a\n\nx = 'a'\n", "a", "x = 'a'\n"),
    ("global", "import a\n\ndef f():\n    global a\n", "a", "import a\n\ndef f():\n    global a\n"),
    (
        "only for types",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import a\n    import b\n\nx: 'b.C' = 1\n",
        "a",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import b\n\nx: 'b.C' = 1\n",
    ),
    ("nothing left for types", "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import a\n", "a", ""),
    (
        "types or else",
        "import typing\n\nif typing.TYPE_CHECKING:\n    import a\nelse:\n    b = 1\n",
        "a",
        "import typing\n\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    b = 1\n",
    ),
    (
        "whether it is there",
        "try:\n    import a\nexcept ImportError:\n    a = None\n",
        "a",
        "try:\n    import a\nexcept ImportError:\n    a = None\n",
    ),
    (
        "whether it is there, no name",
        "try:\n    import a\nexcept ImportError as error:\n    raise SystemExit('pip install a') from error\n",
        "a",
        "try:\n    import a\nexcept ImportError as error:\n    raise SystemExit('pip install a') from error\n",
    ),
    ("either of two", "if x:\n    import a\nelse:\n    import b as a\n", "a", "if x:\n    pass\nelse:\n    pass\n"),
    ("one elif", "if x:\n    y()\nelif z:\n    import a\n", "a", "if x:\n    y()\nelif z:\n    pass\n"),
    ("in a with", "with x:\n    import a\n", "a", "with x:\n    pass\n"),
    ("attribute of a class", "class A:\n    import a\n\n\nA.a()\n", "a", "class A:\n    import a\n\n\nA.a()\n"),
    ("two on a line", "import a; import b\n", "b", "import a; import b\n"),
    ("after a condition", "if x: import a\n", "a", "if x: import a\n"),
    ("broken line", "from a import b, \\\n    c\n\nb()\n", "c", "from a import b, \\\n    c\n\nb()\n"),
]


@pytest.mark.parametrize(("before", "used", "left"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_an_import_goes_if_only_deleted_lines_used_its_name(before, used, left):
    left = before if left is ... else left
    text = f"x = 0\n\n{before}{USE.format(used)}"
    cut = remove_extras.delete_from_text("mine.py", text, {NAME})
    assert cut.strip() == f"x = 0\n\n{left}".strip()
    ast.parse(cut)
    assert remove_extras.delete_from_text("mine.py", text, {"another"}) == text


OTHER = "\n\ndef g():\n    import a\n    a()\n"
TEST = "from a import b\n\n\ndef test_c({}): ...  # extra: shiny\n\n\ndef test_d(): ...\n"


@pytest.mark.parametrize("arguments", ["b", "c, *, b", "*b", "request, b=1"])
def test_an_import_goes_if_it_was_the_fixture_of_deleted_tests_only(arguments):
    left = "def test_d(): ...\n"
    assert remove_extras.delete_from_text("test_mine.py", TEST.format(arguments), {NAME}) == left


INSIDE = [
    ("all of it", "import a\n    {}\n    return 1\n", "return 1\n"),
    ("nothing else", "import a\n    {}\n", "pass\n"),
    ("used outside", "import a\n    {}\n    return 1\n\n\na = 1\nprint(a)\n", "return 1\n\n\na = 1\nprint(a)\n"),
    ("used in an inner function", "import a\n    {}\n    return lambda: a\n", "import a\n    return lambda: a\n"),
    ("for its side effects", "import b\n    {}\n", "import b\n"),
    ("another function's", f"import a\n    {{}}\n{OTHER}", f"pass\n{OTHER}"),
]


@pytest.mark.parametrize(("body", "left"), [pytest.param(*case[1:], id=case[0]) for case in INSIDE])
def test_an_import_in_a_function_goes_if_the_function_used_it(body, left):
    text = f"def f():\n    {body}".format(USE.format("a").strip())
    assert remove_extras.delete_from_text("mine.py", text, {NAME}) == f"def f():\n    {left}"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("from a import (\n    b,  # extra: shiny\n)\nc = 1\n", "c = 1\n"),
        ("if x:\n    y()  # extra: shiny\n", "if x:\n    pass\n"),
        ("try:\n    y()\nfinally:\n    z()  # extra: shiny\n", "try:\n    y()\nfinally:\n    pass\n"),
        ("def f():\n    y()  # extra: shiny\n", "def f():\n    pass\n"),
        ("a = 1\n\n\nb = 2  # extra: shiny\n\n\nc = 3\n", "a = 1\n\n\nc = 3\n"),
        ("a = 1\n\n\n\n\nb = 2\nc = 3  # extra: shiny\n", "a = 1\n\n\n\n\nb = 2\n"),
        ("a=1;   b  =2\nc = 3  # extra: shiny\n", "a=1;   b  =2\n"),
        ("a = 1\n\x0c\nb = 2  # extra: shiny\nc = 3\n", "a = 1\n\x0c\nc = 3\n"),
        ("a = '\u2028'\nb = 2  # extra: shiny\nc = 3", "a = '\u2028'\nc = 3"),
        ("c = 3\nb = 2  # extra: shiny", "c = 3\n"),
    ],
)
def test_what_is_left_of_a_file_is_as_it_was(text, left):
    assert remove_extras.delete_from_text("mine.py", text, {NAME}) == left


@pytest.mark.parametrize(
    "text",
    ["print 'Python 2'\nx = 1  # extra: shiny\n", "x = (\n    1,\n", "def f(x):\n    # extra: shiny\n    return = x\n"],
)
def test_a_file_that_is_no_python_is_refused_only_where_it_has_marked_lines(text, capsys):
    if "extra: " in text:
        with pytest.raises(SystemExit):
            remove_extras.delete_from_text("mine.py", text, {NAME})
        assert "mine.py is not valid Python" in capsys.readouterr().err
    assert remove_extras.delete_from_text("mine.py", text.replace("# extra: shiny", "# shiny"), {NAME})


TEXTS = [
    pytest.param(b"a\nb\n", id="plain"),
    pytest.param(b"a\r\nb\r\n", id="CRLF"),
    pytest.param(b"\xef\xbb\xbfa\r\nb", id="byte order mark"),
    pytest.param(b"a\xe9\nb\n", id="latin-1"),
    pytest.param(b"a\r\nb\nc\r", id="mixed line ends"),
    pytest.param("é\u2028\x0c\x85".encode(), id="line ends that are none"),
    pytest.param(b"", id="empty"),
]


@pytest.mark.parametrize("data", TEXTS)
def test_a_text_is_written_with_the_bytes_that_were_read(data):
    assert fork_files.encode(*fork_files.decode(data)) == data


QUOTED = [
    ("mine.py", 'text = """\n# ---- extra: shiny ----\na = 1\n# ---- end of shiny ----\nb = 2  # extra: shiny\n"""\n'),
    ("mine.py", '"""Of mine.\n\n# extra: shiny\n"""\n'),
    ("mine.md", "# extra: shiny\n\nAbout it.\n"),
    ("mine.md", "```python\nb = 2  # extra: shiny\n```\n"),
    ("mine.sh", "echo '<!-- extra: shiny -->'\n"),
]


@pytest.mark.parametrize(("name", "text"), QUOTED)
def test_a_marker_that_is_no_comment_of_the_file_deletes_nothing(name, text):
    config = {"config.py": "", remove_extras.EXTRAS_PAGE: ""}
    assert remove_extras.delete_from_files({name: text, **config}, {NAME})[0][name] == text


def test_pages_of_a_fork_are_its_own():
    """A table or a command in a page of the fork stays, also if it names what is deleted."""
    page = "# Results\n\n| `sharding` | 1 |\n|---|---|\n| `verbose` | 2 |\n\n\n\n```bash\n"
    page += "python scripts/chaos.py\n```\n"
    files = remove_extras.read_files(remove_extras.ROOT) | {
        "results/README.md": page,
        "mine/extras/chaos/a.py": "a = 1\n",
    }
    left, _ = remove_extras.delete_from_files(files, {"sharding", "chaos"})
    assert left["results/README.md"] == page and "mine/extras/chaos/a.py" in left
    assert "scripts/chaos.py" not in left
