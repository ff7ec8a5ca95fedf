# extra: template
"""scripts/lib/move_yours.py: a fork's block "yours" goes to where a newer template has it."""

import re
import shutil
import subprocess
import sys

import pytest

from lib import move_yours
from ranks import ROOT

OLD = '''\
RARE, CONFLICTS = [], []


class TrainingConfig:
    """All."""

    epochs: int = setting("training", 10, "epochs")

    # ---- yours: fields ----
    dataset: str = yours("synthetic", "data set", one_of(
        "synthetic",
        "csv",  # extra: images
    ))
    # ---- extra: images ----
    mixup: float = yours(0.0, "mixup")
    RARE.append("mixup")
    # ---- end of images ----
    size: int = yours(8, "size")
    # ---- end of yours ----

    def method(self):
        pass
'''
NEW = """\
class Yours:
    # ---- yours: fields ----
    dataset: str = yours("synthetic", "data set", one_of("synthetic"))
    size: int = yours(8, "size", rare=True)
    # ---- end of yours ----


class TrainingConfig(Yours):
    epochs: int = setting("training", 20, "epochs")
"""
MIXUP = '    mixup: float = yours(0.0, "mixup")\n'
END = "    # ---- end of yours"
BEGIN = "    # ---- yours: fields ----\n"


def moved(old, new):
    """The block, and what is left out, after the fork has replaced a part of its config.py."""
    assert OLD.count(old) == 1
    text, left_out, _ = move_yours.move_settings(OLD, OLD.replace(old, new), NEW)
    before, block, after = re.fullmatch(
        r"(.*?# ---- yours: fields ----\n)(.*)(    # ---- end of yours.*)", text, re.S
    ).groups()
    assert NEW.startswith(before) and NEW.endswith(after)
    return block, left_out


SIZE = '    size: int = yours(8, "size", rare=True)\n'
DATASET = '    dataset: str = yours("synthetic", "data set", one_of("synthetic"))\n'


@pytest.mark.guarantee("upgrading")
@pytest.mark.parametrize(
    ("old", "new", "block"),
    [
        ('"""All."""', '"""All!"""', DATASET + SIZE),
        (END, f'    width: int = yours(4, "width")\n{END}', '    width: int = yours(4, "width")\n' + DATASET + SIZE),
        (
            BEGIN,
            BEGIN + "    # why\n    x: int = yours(\n        4,\n    )\n",
            "    # why\n    x: int = yours(\n        4,\n    )\n" + DATASET + SIZE,
        ),
        ('    size: int = yours(8, "size")\n', "", DATASET),
        (
            'yours(8, "size")',
            'yours(16, "size", at_least(1))',
            DATASET + '    size: int = yours(16, "size", at_least(1), rare=True)\n',
        ),
        ('yours(0.0, "mixup")', 'yours(0.5, "mixup")', '    mixup: float = yours(0.5, "mixup")\n' + DATASET + SIZE),
        ('    RARE.append("mixup")\n', "", DATASET + SIZE),
        (
            END,
            f'    a: int = yours(\n        4, "a",\n    )  # why\n    b: int = yours(4, "b",)  # b\n'
            f"    RARE.extend(['a', 'b'])\n{END}",
            '    a: int = yours(\n        4, "a",\n        rare=True,\n    )  # why\n'
            '    b: int = yours(4, "b", rare=True)  # b\n' + DATASET + SIZE,
        ),
        (
            END,
            f'    a: int = yours(4, "a")\n    b: int = yours(4, "b")\n    RARE.extend(["a", "c"])\n{END}',
            '    a: int = yours(4, "a", rare=True)\n    b: int = yours(4, "b")\n' + DATASET + SIZE,
        ),
        (
            END,
            f"    def even(value):\n        return ''\n\n    a: int = yours(4, 'a', even)\n{END}",
            "    def even(value):\n        return ''\n    a: int = yours(4, 'a', even)\n" + DATASET + SIZE,
        ),
        ("    dataset: str", "    dataset:  str", DATASET + SIZE),  # layout is no change
    ],
)
def test_the_block_has_what_the_fork_added_changed_and_deleted(old, new, block):
    assert moved(old, new) == (block, [])


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ('"training", 10,', '"training", 5,', "epochs: int = setting('training', 5, 'epochs')"),
        (END, f"    CONFLICTS.append(1)\n{END}", "CONFLICTS.append(1)"),
        (END, f"    # heads: later\n{END}", "# heads: later"),
        ("RARE, CONFLICTS = [], []", "RARE, CONFLICTS = ['epochs'], []", "RARE, CONFLICTS = (['epochs'], [])"),
        ("class TrainingConfig:", "import re\n\n\nclass TrainingConfig:", "import re"),
        ("class TrainingConfig:", "def even(value):\n    return ''\n\n\nclass TrainingConfig:", "even"),
        ("        pass", "        return 1", "method"),
    ],
)
def test_what_cannot_be_moved_is_listed(old, new, note):
    assert moved(old, new) == (DATASET + SIZE, [note])


def git(folder, *words, code=0):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    ended = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr


def test_a_merge_that_stops_at_config_py_is_completed(tmp_path):
    (tmp_path / "scripts/lib").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/lib/move_yours.py", tmp_path / "scripts/lib")
    head = """\
from types import SimpleNamespace


def yours(*words, **more):
    return words[0]


setting = one_of = yours
SETTINGS = [SimpleNamespace(name="mixup")]
"""
    git(tmp_path, "init", "-q", "-b", "fork")

    def commit(text):
        (tmp_path / "config.py").write_text(head + text)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "next")

    def program():
        command = [sys.executable, "scripts/lib/move_yours.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    commit(OLD)
    early = program()
    assert early.returncode == 2 and "No merge is under way. Run this script after `git merge`" in early.stderr
    git(tmp_path, "branch", "template")
    commit(OLD.replace(END, f'    width: int = yours(4, "width")\n{END}').replace("10,", "5,").replace(MIXUP, ""))
    git(tmp_path, "checkout", "-q", "template")
    commit(NEW)
    git(tmp_path, "checkout", "-q", "fork")
    git(tmp_path, "merge", "-q", "template", code=1)
    ended = program()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "This was not moved. Write it again where it is needed: epochs: int = setting('training', 5" in ended.stdout
    assert (
        "You had deleted mixup, which are settings of an extra now. Run scripts/remove_extras.sh images" in ended.stdout
    )
    assert (tmp_path / "config.py").read_text() == head + NEW.replace(
        BEGIN, f'{BEGIN}    width: int = yours(4, "width")\n'
    )
    git(tmp_path, "commit", "-qam", "merged")


def test_a_config_py_without_the_marks_is_named(capsys):
    with pytest.raises(SystemExit):
        move_yours.move_settings(OLD, OLD.replace("    # ---- end of yours ----\n", ""), NEW)
    assert "config.py has no line that begins with '# ---- end of yours'. Put the mark back" in capsys.readouterr().err


def test_a_merge_whose_config_py_cannot_be_used_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(move_yours, "ROOT", tmp_path)
    monkeypatch.setattr(move_yours, "find_merge_base", lambda: "base")
    lost = OLD.replace(END, f"    a: int = yours(4, 'a', even)\n{END}")
    monkeypatch.setattr(move_yours, "read_config", {"base": OLD, "HEAD": lost, "MERGE_HEAD": NEW}.get)
    assert move_yours.main() == 1
    out = capsys.readouterr().out
    assert "cannot be used yet (NameError: name " in out and "). Import or define at its top what is missing." in out
