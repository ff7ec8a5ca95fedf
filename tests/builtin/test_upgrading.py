# extra: template
"""docs/upgrading.md, command by command: a fork with its own model, data and flag takes newer versions."""

import os
import re
import subprocess
import sys

import pytest

from ranks import ROOT, copy_repository

PAGE = (ROOT / "docs" / "upgrading.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ADD_REMOTE, RECORD_START, MERGE, KEEP_OURS, *_, CHANGED, RELEASE = BLOCKS
MARK = "    # ---- yours: "
WHO = {f"GIT_{role}_{what}": "a@example.com" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def run(folder, commands, code=0):
    env = {**os.environ, **WHO, "GIT_CONFIG_GLOBAL": os.devnull}
    ended = subprocess.run(["bash", "-ec", commands], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


def change(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def release(template, number):
    tag = RELEASE.splitlines()[0].replace("template-2", f"template-{number}")
    run(template, f"git add . && git commit -qm 'version {number}' && {tag}")


@pytest.mark.guarantee("upgrading")
@pytest.mark.parametrize("is_cloned", [True, False], ids=["clone", "copy-without-history"])
def test_a_fork_takes_newer_versions_with_the_commands_of_the_page(tmp_path, is_cloned):
    template, fork = tmp_path / "template", tmp_path / "fork"
    copy_repository(template)
    run(template, "git init -q -b main")
    release(template, 1)
    run(tmp_path, "git clone -q template fork" if is_cloned else "cp -r template fork && rm -rf fork/.git")
    run(fork, "git remote remove origin" if is_cloned else "git init -q -b main && git add . && git commit -qm copy")

    own = {"model.py": '"""My model."""\n', "dataset.py": '"""My data."""\n', "README.md": "# My fork\n"}
    for name, text in own.items():
        (fork / name).write_text(text)
    first_line = next(line for line in (fork / "config.py").read_text().splitlines() if line.startswith(MARK))
    change(fork / "config.py", first_line, f'{first_line}\n    width: int = yours(64, "width", at_least(8), "must")')
    run(fork, "git add . && git commit -qm 'my fork'")
    change(template / "train.py", '"""Train a model', '"""Version 2: train a model')
    change(template / "config.py", '"logging", 20,', '"logging", 25,')
    release(template, 2)

    run(fork, ADD_REMOTE.replace("TEMPLATE_URL", str(template)))
    if not is_cloned:
        run(fork, RECORD_START)
    run(fork, MERGE)
    assert (fork / "train.py").read_text() == (template / "train.py").read_text()
    assert {name: (fork / name).read_text() for name in own} == own
    values = run(fork, f"{sys.executable} train.py --print-config").splitlines()
    assert "width = 64" in values and "log_interval = 25" in values
    expected = ["README.md", "config.py", "dataset.py", "model.py"]
    assert re.findall(r"^ (\S+) +\|", run(fork, CHANGED), re.MULTILINE) == expected
    change(fork / "train.py", "Version 2", "My version 2")
    assert re.findall(r"^ (\S+) +\|", run(fork, CHANGED), re.MULTILINE) == [*expected, "train.py"]
    run(fork, "git checkout -q train.py")

    change(template / "train.py", "Version 2", "Version 3")
    change(template / "model.py", '"""The model', '"""Version 3 of the model')
    change(template / "README.md", "# ", "# Version 3 of ")
    release(template, 3)
    run(fork, MERGE.replace("template-2", "template-3"), code=1)
    run(fork, KEEP_OURS)
    assert {name: (fork / name).read_text() for name in own} == own
    assert "Version 3" in (fork / "train.py").read_text()
    assert run(fork, "git status --porcelain") == ""
