# extra: template
"""docs/extras.md: what is left of the template without one extra or all of them is tested and trains alike."""

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import config
import forks
import gone_names
from lib import fork_readme, remove_extras
from ranks import ROOT, copy_repository, slow
from utils.settings.deleted_extras import read_deleted_extras

EXTRAS = remove_extras.read_extras(remove_extras.read_files(ROOT))
NEEDED_BY = {"verify": ["judge"]}  # which is deleted with it
# in a fork that is cut already there is nothing to compare with
pytestmark = pytest.mark.skipif(bool(read_deleted_extras()), reason="these are tests of the whole template")
CORE = [ROOT / name for name in ("train.py", "config.py", "ddp_utils.py")]
CORE += [path for path in (ROOT / "utils").rglob("*.py") if "extras" not in path.parts]
WHO = {f"GIT_{role}_{what}": "a@example.com" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | WHO
ENV |= {"GIT_CONFIG_GLOBAL": os.devnull, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
STEPS = "--max_steps 20 --schedule_steps 20 --log_interval 20 --image_size 8 --batch_size 4 --dataset_size 96".split()
STEPS += ["--num_workers", "0"]


def run(folder, *command, code=0, seconds=600):
    ended = subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == code, f"{ended.stdout[-9000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout + ended.stderr


def commit(folder, message):
    run(folder, "git", "add", "--all")
    run(folder, "git", "commit", "-qm", message)


def copy(folder):
    copy_repository(folder)
    run(folder, "git", "init", "-q", "-b", "main")
    commit(folder, "the whole template")
    return folder


def cut(folder, *names):
    output = run(folder, "scripts/remove_extras.sh", *names)
    commit(folder, f"without {' '.join(names)}")
    return output


def fingerprints(folder, runs):
    """After 20 steps on 1 and on 2 ranks."""
    values = []
    for ranks in (1, 2):
        where = f"{folder.name}{ranks}"
        words = [*STEPS, "--backend", "gloo", "--run_dir", runs.folder(where)]
        ended = forks.run(folder, ranks, "train.py", *words)
        assert ended.code == 0, ended.text
        values.append(runs.records(where, "train")[-1]["fingerprint"])
    return values


def continued(first, then, runs, *flags, ranks=0):
    """How a run ends whose first steps one tree makes, with these flags, and the others another one without them."""
    where = runs.folder("-".join(["from", first.name, *map(str, flags)]))
    words = [*STEPS, "--backend", "gloo", "--run_dir", where, "--save_every_steps", 7]
    ended = forks.run(first, ranks, "train.py", *words, "--max_steps", 14, *flags)
    assert ended.code == 0, ended.text
    ended = forks.run(then, ranks, "train.py", *words, "--resume_from", "auto")
    assert flags or "has no such flag" not in ended.text
    return ended


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    from training import Runs

    return fingerprints(ROOT, Runs(tmp_path_factory.mktemp("whole")))


def dead_links(folder):
    for page in folder.rglob("*.md"):
        for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link and not link.startswith("../../") and not (page.parent / link).exists():
                yield f"{page.relative_to(folder)}: {link}"


def change(folder, file, old, new):
    text = (folder / file).read_text()
    assert text.count(old) == 1, (file, old)
    (folder / file).write_text(text.replace(old, new))


EACH = [pytest.param([name, *NEEDED_BY.get(name, [])], id=name, marks=pytest.mark.slow) for name in EXTRAS]


@dataclass
class Cut:
    """A copy of the template without one extra or without all of them."""

    folder: Path
    flags: dict[str, set[str]]  # per extra that is gone
    printed: str


@pytest.fixture(scope="module", params=[pytest.param(["--all-but"], id="all"), *EACH])
def smaller(request, tmp_path_factory):
    names = request.param
    folder = copy(tmp_path_factory.mktemp("smaller") / "fork")
    gone = EXTRAS.keys() if names == ["--all-but"] else names
    flags = remove_extras.read_settings(remove_extras.read_files(folder), set(gone))
    return Cut(folder, flags, cut(folder, *names))


def test_what_is_left_trains_to_the_same_bits(smaller, runs, whole):
    assert fingerprints(smaller.folder, runs) == whole


@pytest.mark.parametrize("smaller", [pytest.param(["--all-but"], id="all")], indirect=True)
def test_what_is_left_continues_runs_of_the_whole_template_and_is_continued_by_it(smaller, runs, whole):
    folder = smaller.folder
    for first, then in ((ROOT, folder), (folder, ROOT)):
        assert continued(first, then, runs).code == 0
        assert runs.records(f"from-{first.name}", "train")[-1]["fingerprint"] == whole[0]
    exact = continued(ROOT, folder, runs, "--reduction", "exact")
    message = "changed: The checkpoint has --reduction exact, but this fork has no such flag (docs/extras.md)."
    assert exact.code == 0 and message in exact.text, exact.text
    sharded = continued(ROOT, folder, runs, "--sharding", "zero3", ranks=2)
    assert sharded.code and "is a folder of shards, and this fork has no extra sharding. Give another" in sharded.text


def test_what_is_left_names_no_page_and_no_flag_that_is_gone(smaller):
    folder = smaller.folder
    assert "Lines before and after" in smaller.printed and "git restore" in smaller.printed
    assert not [*dead_links(folder)]
    shown = run(folder, sys.executable, "train.py", "--help", "all")
    if "images" in smaller.flags:
        assert "{synthetic,cifar10}" in shown and not re.search("torchvision|resized_crop|pretrained|imagef", shown)
    for extra, flags in smaller.flags.items():
        for flag in flags:
            assert not re.search(rf"--(\[no-\])?{flag}\b", shown), flag
            answer = run(folder, sys.executable, "train.py", f"--{flag}", "1", code=2)
            assert f"--{flag} needs the extra {extra}, which this fork has deleted. See docs/extras.md." in answer


def test_what_is_left_passes_its_linters(smaller):
    run(smaller.folder, sys.executable, "-m", "ruff", "check", ".")
    run(smaller.folder, sys.executable, "-m", "ruff", "format", "--check", ".")
    run(smaller.folder, sys.executable, "-m", "mypy")


def test_what_is_left_passes_its_unit_tests(smaller):
    run(smaller.folder, sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", "tests/unit")


def marked_lines(path):
    """The numbers, from 0, of the lines that some extra deletes from a file, and how many have a marker."""
    text = path.read_text()
    every = set(EXTRAS)
    markers = [number for number, line in enumerate(text.splitlines()) if remove_extras.MARKER.search(line)]
    left = remove_extras.delete_from_text(path.name, text, every).splitlines()
    return left, len(markers)


def test_the_kernel_names_an_extra_only_in_marked_lines():
    fields = remove_extras.read_settings(remove_extras.read_files(ROOT), set(EXTRAS))
    names = "|".join(name for field_names in fields.values() for name in field_names)
    named = re.compile(rf"utils\.extras|config\.({names})\b|\b({names})=|[\"' -]({names})[\"' ,]")
    total = 0
    for path in CORE:
        left, number = marked_lines(path)
        total += number
        left = [line for line in left if line != "from utils.extras import settings as extras"]
        if path.name == "other_trainers.py":  # an answer about a flag that is gone is not given
            continue
        assert not [line for line in left if named.search(line) and '"""' not in line], path
    assert total <= 40, total
    for name in ("train.py", "config.py", "ddp_utils.py", "model.py", "dataset.py"):
        lines = (ROOT / name).read_text().splitlines()
        assert not [line for line in lines if remove_extras.MARKER.search(line)], name


def test_the_help_of_the_core_names_no_setting_of_an_extra():
    fields = remove_extras.read_settings(remove_extras.read_files(ROOT), set(EXTRAS))
    of_extras = {name for field_names in fields.values() for name in field_names}
    for setting in config.SETTINGS:
        if setting.name not in of_extras:
            assert not of_extras & {*re.findall(r"\w+", setting.help)}, setting.help


def test_bad_names_and_a_changed_tree_are_refused_and_a_deletion_can_be_undone(tmp_path):
    folder = copy(tmp_path / "fork")
    for script in ("scripts/remove_extras.sh", "scripts/without.sh"):  # the old name calls the new one
        assert "nonsense is not an extra. Give some of" in run(folder, script, "nonsense", code=2)
    for name in sorted(remove_extras.FORMER_EXTRAS):
        assert f"{name} is no longer an extra" in run(folder, "scripts/remove_extras.sh", name, code=2)
    name = next(iter(EXTRAS))
    listed = run(folder, "scripts/remove_extras.sh", "--list")
    assert all(re.search(rf"^{extra_name} +\d+ +\d+ +\d+  \S", listed, re.M) for extra_name in EXTRAS)
    printed = run(folder, "scripts/remove_extras.sh", name)
    assert "Commit or stash them first" in run(folder, "scripts/remove_extras.sh", name, code=2)
    run(folder, "bash", "-c", printed.split("This command undoes it: ")[1])
    assert run(folder, "git", "status", "--porcelain") == ""
    cut(folder, name)
    assert "These extras are already deleted." in run(folder, "scripts/remove_extras.sh", name)
    assert re.search(rf"^{name} +deleted", run(folder, "scripts/remove_extras.sh", "--list"), re.M)


def contents(folder):
    """The hash and the mode of each file, without git's own and bytecode; links as they are."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries[name] = os.readlink(path)
        elif path.is_file() and not name.startswith(".git/") and "__pycache__" not in name:
            entries[name] = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode
    return entries


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return copy(tmp_path_factory.mktemp("template") / "template")


@pytest.fixture
def fork(template, tmp_path):
    folder = tmp_path / "fork"
    run(tmp_path, "git", "clone", "-q", template, folder)
    return folder


SMALL = ".gitignore scripts/remove_extras.sh scripts/lib ddp_utils.py model.py pyproject.toml LICENSE README.md"
SMALL += " docs/extras.md utils/extras/watch tests/extras/watch .github/killed.svg"


@pytest.fixture(scope="module")
def small_template(template, tmp_path_factory):
    """The files of the template that deleting `watch` reads or changes, a few others, and one with a marked line."""
    folder = tmp_path_factory.mktemp("small")
    run(template, "bash", "-c", f"git archive HEAD {SMALL} | tar --extract --directory={folder}")
    with (folder / "ddp_utils.py").open("a") as file:
        file.write("IS_WATCHED = True  # extra: watch\n")
    run(folder, "git", "init", "-q")
    commit(folder, "a small template")
    return folder


@pytest.fixture
def small_fork(small_template, tmp_path):
    folder = tmp_path / "fork"
    run(tmp_path, "git", "clone", "-q", small_template, folder)
    return folder


COMMIT = "git add --all && git commit -qm mine"
SUBMODULE = "git -c protocol.file.allow=always submodule --quiet add file://$(realpath ../other)"
REFUSED = {  # what is done to a fork, and the answer to a deletion of `watch` then
    "no repository": ("rm -rf .git", "not a git repository.*git init, then add and commit all files"),
    "nothing added": ("rm -rf .git && git init -q", "git has no pyproject.toml .* add and commit all files"),
    "no commit": ("rm -rf .git && git init -q && git add --all", "has changes. Commit or stash them first"),
    "unstaged change": ("echo >> model.py", "has changes. Commit or stash them first"),
    "staged change": ("echo >> ddp_utils.py && git add ddp_utils.py", "has changes. Commit or stash them first"),
    "deleted file": ("rm -r utils/extras/watch", "has changes. Commit or stash them first"),
    "deleted other file": ("rm README.md", "has changes. Commit or stash them first"),
    "file announced": ("echo > utils/extras/watch/a.py && git add -N .", "has changes. Commit or stash them first"),
    "assumed unchanged": (
        "git update-index --assume-unchanged ddp_utils.py && echo >> ddp_utils.py",
        "git ignores changes of ddp_utils.py. Run git update-index --no-assume-unchanged --no-skip-worktree ddp_utils",
    ),
    "another file assumed unchanged": (
        "git update-index --assume-unchanged LICENSE && echo >> LICENSE",
        "git ignores changes of LICENSE. Run ",
    ),
    "skipped": (
        "git update-index --skip-worktree ddp_utils.py && echo >> ddp_utils.py",
        "git ignores changes of ddp_utils.py. Run ",
    ),
    "sparse checkout": (
        "git sparse-checkout set --no-cone '/*' '!/utils/extras/watch/'",
        "utils/extras/watch/.* is left out by a sparse checkout. Run git sparse-checkout disable first",
    ),
    "untracked file in a folder": (
        "echo > utils/extras/watch/notes.txt",
        "utils/extras/watch/notes.txt is not committed .* Move .* elsewhere first",
    ),
    "ignored file in a folder": (
        "mkdir utils/extras/watch/data && echo > utils/extras/watch/data/a.pyc",
        "utils/extras/watch/data/a.pyc is not committed",
    ),
    "untracked link in a folder": ("ln -s /tmp utils/extras/watch/tmp", "utils/extras/watch/tmp is not committed"),
    "link in a folder": (
        f"ln -s ../../../model.py utils/extras/watch/m.py && {COMMIT}",
        "utils/extras/watch/m.py is not committed or not a regular file",
    ),
    "repository in a folder": (
        "git init -q tests/extras/watch/other",
        "tests/extras/watch/other/.git/.* is not committed",
    ),
    "submodule in a folder": (
        f"{SUBMODULE} utils/extras/watch/other && {COMMIT}",
        "utils/extras/watch/other/.git is not committed or not a regular file",
    ),
    "link to a file elsewhere": (
        f"mv ddp_utils.py ../mine.py && ln -s ../mine.py ddp_utils.py && {COMMIT}",
        "ddp_utils.py is a symbolic link. Replace it by the file itself",
    ),
    "line ends that git changes": (
        "git config core.autocrlf input && sed -i 's/$/\\r/' ddp_utils.py && git add ddp_utils.py",
        "git would restore ddp_utils.py with other line ends or bytes. Delete it and git restore it",
    ),
    "executable here": (
        "git config core.fileMode false && chmod +x ddp_utils.py",
        r"git does not know that ddp_utils.py is executable. Run git update-index --chmod=\+x ddp_utils.py and commit",
    ),
    "executable in git": (
        "git config core.fileMode false && git update-index --chmod=+x ddp_utils.py && git commit -qm mine",
        "git would make ddp_utils.py executable. Run git update-index --chmod=-x ddp_utils.py and commit that",
    ),
    "line ends of two kinds": (
        f"sed -i '1s/$/\\r/' ddp_utils.py && {COMMIT}",
        "ddp_utils.py has line ends of two kinds",
    ),
    "config not tracked": (
        f"echo pyproject.toml > .gitignore && git rm -q --cached pyproject.toml && {COMMIT}",
        "git has no",
    ),
    "no place to remember": (
        f"sed -i '/^without = /d' pyproject.toml && {COMMIT}",
        "has no line .without = .*. Add it",
    ),
    "import of a deleted module": (
        f"echo import utils.extras.watch.rank_supervisor > mine.py && {COMMIT}",
        "mine.py imports utils/extras/",
    ),
    "import of a deleted name": (
        f"printf 'a = 1\\nb = 2  # extra: watch\\n' > yours.py && echo 'from yours import b' > mine.py && {COMMIT}",
        "mine.py imports b of yours.py, which would be deleted. Keep the extra of the imported",
    ),
    "a block that ends nowhere": (
        f"printf 'x = [\\n  # ---- extra: watch ----\\n]\\n# ---- end of watch ----\\n' > mine.py && {COMMIT}",
        "mine.py is not valid Python, or would not be without its marked lines",
    ),
}


@pytest.mark.parametrize(("change", "pattern"), [pytest.param(*case, id=name) for name, case in REFUSED.items()])
def test_nothing_changes_where_git_could_not_undo_it(small_fork, change, pattern):
    fork = small_fork
    run(fork.parent, "bash", "-c", "git init -q other && cd other && git commit -q --allow-empty -m first")
    run(fork, "bash", "-ec", change)
    before = contents(fork)
    printed = run(fork, "scripts/remove_extras.sh", "watch", code=2)
    assert re.search(pattern, printed) and len(printed.splitlines()) == 1, printed
    assert contents(fork) == before


def test_a_filter_that_fails_is_named_before_anything_is_deleted(small_fork):
    run(small_fork, "git", "config", "filter.mine.clean", "cat")
    (small_fork / ".gitattributes").write_text("ddp_utils.py filter=mine\n")
    commit(small_fork, "attributes")
    run(small_fork, "git", "config", "filter.mine.smudge", "false")
    run(small_fork, "git", "config", "filter.mine.required", "true")
    before = contents(small_fork)
    printed = run(small_fork, "scripts/remove_extras.sh", "watch", code=2)
    assert "ddp_utils.py: smudge filter mine failed). Repair what git names here, so that" in printed
    assert contents(small_fork) == before


MINE = {  # files of a fork that no extra is about
    "notes.ipynb": b'{"cells": [{"source": ["import  os"]}]}',
    "mine.py": b"import sys, os\nx  =1",
    "old.py": b"print 'Python 2'\r\n",
    "latin.py": b"# -*- coding: latin-1 -*-\nimport os\nx = '\xe9'  \n",
    "results.md": b"| `ema_decay` | 1 |\r\n|---|---|\r\n\n\n\n",
    "data.bin": b"\0# extra: watch\n",
    "docs/empty.md": b"",
}
MARKED = {  # files of a fork before and after, in which it marked a line
    "crlf.py": (b"import os\r\nimport sys\r\nx  = sys # extra: watch\r\ny  = 1", b"import os\r\ny  = 1"),
    "bom.py": (b"\xef\xbb\xbfx  = 1\r\ny = 1  # extra: watch\r\n", b"\xef\xbb\xbfx  = 1\r\n"),
    "latin.sh": (b"echo '\xe9'\n\n\n\necho  # extra: watch\n", b"echo '\xe9'\n"),
    "run.sh": (b"#!/bin/sh\n\n\n\n\nls\nls -l  # extra: watch\nls", b"#!/bin/sh\n\n\n\n\nls\nls"),
}


@pytest.mark.parametrize("names", [["watch"], ["--all-but"]], ids=" ".join)
def test_files_of_the_fork_stay_as_they_are_and_the_undo_restores_each_byte(fork, names):
    for prefix in ("tracked", "untracked"):
        for name, data in MINE.items():
            path = fork / prefix / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if prefix == "tracked":
            for name, (data, _) in MARKED.items():
                (fork / name).write_bytes(data)
            (fork / "run.sh").chmod(0o755)
            change(
                fork, "model.py", "from __future__ import annotations\n", "import this  # noqa\nimport math as mine\n"
            )
            (fork / ".git/info/exclude").write_text("utils/extras/watch\n*.sh\n")  # ignored, and tracked
            run(fork, "bash", "-c", f"{COMMIT} && git add -f run.sh latin.sh && {COMMIT}")
    before = contents(fork)
    printed = run(fork / "docs", "../scripts/remove_extras.sh", *names)
    after = contents(fork)
    for name in ("tracked", "untracked"):
        assert [after[path] for path in after if path.startswith(name)] == [
            before[path] for path in before if path.startswith(name)
        ]
    for name, (_, left) in MARKED.items():
        assert (fork / name).read_bytes() == left, name
        assert (fork / name).stat().st_mode == before[name][1], name
    assert "import this  # noqa\nimport math as mine\n" in (fork / "model.py").read_text()
    assert after.keys() < before.keys() and not (fork / "utils/extras/watch").exists()
    run(fork / "docs", "bash", "-c", printed.split("This command undoes it: ")[1])
    assert contents(fork) == before
    assert run(fork, "git", "status", "--porcelain") == "?? untracked/\n"


EVERY_FILE_AGAIN = "git ls-files -z | xargs -0 rm && git restore ."
RESTORED = {  # what is done to a fork with a file of attributes, after which git can undo a deletion of `watch`
    "CRLF": f"printf '* text=auto eol=crlf\\n*.sh eol=lf\\n' > {{}} && {COMMIT} && {EVERY_FILE_AGAIN}",
    "autocrlf": f"echo '*.sh -text' > {{}} && {COMMIT} && git config core.autocrlf true && {EVERY_FILE_AGAIN}",
    "ident": f"echo '*.py ident' > {{}} && echo '# $Id$' >> ddp_utils.py && {COMMIT} && {EVERY_FILE_AGAIN}",
    "encoding": (
        "echo '*.txt working-tree-encoding=latin1' > {} && printf '# \\xe9\\nx  # extra: watch\\n' > mine.txt && "
        + COMMIT
    ),
    "filter": (
        "git config filter.mine.clean 'sed /^#mine$/d' && git config filter.mine.smudge 'sed 1i#mine' && "
        f"echo 'ddp_utils.py filter=mine' > {{}} && {COMMIT} && {EVERY_FILE_AGAIN}"
    ),
    "names": f"mkdir 'é \"' && echo 'x  # extra: watch' > $'é \"/a\\n b' && touch {{}} && {COMMIT}",
    "executable": (
        "git config core.fileMode false && chmod +x ddp_utils.py && git update-index --chmod=+x ddp_utils.py"
        f" && touch {{}} && {COMMIT}"
    ),
}


def undo(fork, printed):
    run(fork, "bash", "-c", printed.split("This command undoes it: ")[1])


@pytest.fixture
def monorepo_fork(small_fork):
    """A fork in a folder of a repository that has other folders."""
    top = small_fork.parent / "monorepo"
    fork = top / "apps" / "my fork"
    fork.parent.mkdir(parents=True)
    small_fork.rename(fork)
    run(fork, "rm", "-rf", ".git")
    (top / "another").mkdir()
    (top / "another/a.txt").write_text("a\n")
    run(top, "git", "init", "-q")
    commit(top, "a fork in a folder")
    return fork


ATTRIBUTES = {
    "repository": ("small_fork", ".gitattributes"),
    "folder": ("monorepo_fork", ".gitattributes"),
    "folder, repository's": ("monorepo_fork", "../../.gitattributes"),
}


@pytest.mark.parametrize(("fork_of", "attributes"), ATTRIBUTES.values(), ids=ATTRIBUTES)
@pytest.mark.parametrize("change", RESTORED.values(), ids=RESTORED)
def test_a_deletion_can_be_undone_whatever_git_does_to_files_of_a_checkout(request, fork_of, attributes, change):
    fork = request.getfixturevalue(fork_of)
    run(fork, "bash", "-ec", change.replace("{}", attributes))
    before = contents(fork)
    printed = run(fork, "scripts/remove_extras.sh", "watch")
    assert contents(fork) != before and not (fork / "utils/extras/watch").exists()
    undo(fork, printed)
    assert contents(fork) == before
    assert run(fork, "git", "status", "--porcelain") == ""


def test_the_readme_of_the_template_has_its_checksum():
    assert not fork_readme.is_edited((ROOT / "README.md").read_text()), "run python scripts/lib/fork_readme.py"


def test_the_template_s_readme_is_replaced_also_by_a_second_deletion(fork):
    whole = (fork / "README.md").read_text()
    assert "stays as it is" not in cut(fork, "watch", "chaos")
    first = (fork / "README.md").read_text()
    assert first.startswith("# fork\n") and "- `launcher`: " in first and "`watch`" not in first
    assert not [path for path in fork_readme.list_pictures({"README.md": whole}) if (fork / path).exists()]
    command = re.search(r"`(git show \w+:\./README\.md)`", first)[1]
    assert run(fork, *command.split()) == whole
    assert "stays as it is" not in cut(fork, "launcher")
    second = (fork / "README.md").read_text()
    assert "`launcher`" not in second and "`slurm`" not in second and command in second
    cut(fork, "--all-but")
    assert "All its [optional parts](docs/extras.md) were deleted." in (fork / "README.md").read_text()


@pytest.mark.parametrize("change", ["sed -i '1s/$/ /' README.md", "echo >> README.md", "echo '# Mine' > README.md"])
def test_a_readme_that_was_edited_stays_as_it_is(small_fork, change):
    run(small_fork, "bash", "-c", f"{change} && {COMMIT}")
    (small_fork / "mine.md").write_text("![](mine.svg)  <!-- extra: watch -->\n")
    (small_fork / "mine.svg").write_text("<svg/>\n")
    commit(small_fork, "a picture")
    before = (small_fork / "README.md").read_bytes()
    assert "README.md stays as it is, since it is not the template's." in cut(small_fork, "watch")
    assert (small_fork / "README.md").read_bytes() == before
    assert (small_fork / ".github/killed.svg").exists() and (small_fork / "mine.svg").exists()


@pytest.mark.parametrize("change", ["true", "echo '# Mine' > README.md", "git rm -q README.md"])
def test_a_merge_leaves_the_readme_of_a_cut_fork_as_it_is(cut_fork, change):
    template = cut_fork.parent / "template"
    (template / "README.md").write_text("# The template\n\nVersion 3\n\n![](.github/killed.svg)\n")
    (template / ".github/killed.svg").write_text("<svg/>\n")
    commit(template, "version 3")
    run(template, "git", "tag", "template-3")
    run(cut_fork, "bash", "-c", f"{change} && git commit -qam mine --allow-empty && git fetch -q --tags template")
    before = contents(cut_fork).get("README.md")
    assert "template-3 was merged." in run(cut_fork, "scripts/remove_extras.sh", "--merge", "template-3")
    assert contents(cut_fork).get("README.md") == before and "Version 2" in (cut_fork / "model.py").read_text()
    assert not (cut_fork / ".github/killed.svg").exists()


def profiles():
    """What the docs delete from a fork: the words of each command in README.md and docs/, and each extra alone."""
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "docs/extras.md"))
    commands = {words.strip() for words in re.findall(r"remove_extras\.sh ((?:--all-but|[a-z])[ a-z]*)", pages)}
    commands |= set(re.findall(r"^\| `(--all-but[^`]*)` \|", pages, re.MULTILINE))
    commands = {words for words in commands if {*words.split()} <= {"--all-but", *EXTRAS}}
    assert len(commands) >= 5 and "--all-but" in commands
    yield from sorted(commands)
    yield from (" ".join([name, *NEEDED_BY.get(name, [])]) for name in EXTRAS)


@pytest.mark.parametrize("words", [*profiles()])
def test_no_text_of_a_cut_fork_names_what_is_gone(words):
    files = remove_extras.read_files(ROOT)
    names = set(words.split())
    deleted = EXTRAS.keys() - names if "--all-but" in names else names
    left, _ = remove_extras.delete_from_files(files, set(deleted))
    kept = remove_extras.list_whole_extras(EXTRAS, deleted)
    left["README.md"] = fork_readme.build_readme("fork", left, kept, files["README.md"], "abc")
    for picture in fork_readme.list_pictures(files) - fork_readme.list_pictures(left):
        left.pop(picture, None)
    assert gone_names.list_mentions(files, left, set(deleted)) == []


def test_numbered_lists_count_from_1_after_a_deletion():
    page = "# A\n\n1. a\n<!-- extra: watch -->\n2. b\n   more\n<!-- end of watch -->\n3. c\n\n```\n7. d\n```\n\n5. e\n"
    files = dict.fromkeys(("AGENTS.md", "docs/a.md", "notes.md"), page) | {"docs/extras.md": ""}
    left, _ = remove_extras.delete_from_files(files, {"watch"})
    assert left["AGENTS.md"] == left["docs/a.md"] == "# A\n\n1. a\n2. c\n\n```\n7. d\n```\n\n1. e\n"
    assert "3. c" in left["notes.md"]


ELSEWHERE = {  # what is changed in a repository, beside the folder of the fork
    "unstaged": "echo b >> another/a.txt",
    "staged": "echo b >> another/a.txt && git add another",
    "deleted": "rm another/a.txt",
    "assumed unchanged": "git update-index --assume-unchanged another/a.txt && echo b >> another/a.txt",
    "submodule": f"{SUBMODULE} sub && git commit -qm sub && touch sub/a && git -C sub add a",
}


@pytest.mark.parametrize("change", ELSEWHERE.values(), ids=ELSEWHERE)
def test_changes_beside_the_folder_of_the_fork_stay_and_only_a_merge_refuses_them(monorepo_fork, change):
    fork, top = monorepo_fork, monorepo_fork.parent.parent
    run(top.parent, "bash", "-c", "git init -q other && cd other && git commit -q --allow-empty -m first")
    run(top, "bash", "-ec", change)
    before = contents(top), run(top, "git", "status", "--porcelain")
    assert re.search(
        "has changes. Commit|git ignores changes of ../../another/a.txt",
        run(fork, "scripts/remove_extras.sh", "--merge", "HEAD", code=2),
    )
    undo(fork, run(fork, "scripts/remove_extras.sh", "watch"))
    assert (contents(top), run(top, "git", "status", "--porcelain")) == before


@pytest.fixture
def cut_fork(small_template, tmp_path):
    """A fork without `watch` of a template that has a newer version. Both versions are tags."""
    template, fork = tmp_path / "template", tmp_path / "fork"
    run(tmp_path, "git", "clone", "-q", small_template, template)
    run(template, "git", "tag", "template-1")
    run(tmp_path, "git", "clone", "-q", "--origin", "template", template, fork)
    cut(fork, "watch")
    change(template, "model.py", '"""The model', '"""Version 2: the model')
    commit(template, "version 2")
    run(template, "git", "tag", "template-2")
    run(fork, "git", "fetch", "-q", "--tags", "template")
    return fork


COPY_AGAIN = "rm -rf .git && git init -q && git remote add template ../template && git fetch -q --tags template"
START = "git merge -q --strategy ours --allow-unrelated-histories -m start template-1"
SHALLOW = "cd .. && mv fork origin && git clone -q --depth 1 file://$PWD/origin fork && cd fork"
SHALLOW += " && git fetch -q --depth 1 file://$(realpath ../template) tag template-2"
SHALLOW_TEMPLATE = "git remote set-url template file://$(realpath ../template) && git fetch -q --depth 1 template"
SHALLOW_ANSWER = "in this shallow clone. Run git fetch --unshallow origin .or template. first"
UNMERGED = {  # what is done to a fork, the answer to a merge, and the commands that it asks for
    "no such version": (
        "git tag -d template-2",
        "--merge must name a tag, .* does not know template-2. Run git fetch --tags template first",
        "git fetch -q --tags template",
    ),
    "a copy": (
        f"{COPY_AGAIN} && {COMMIT}",
        "HEAD and template-2 share no history. Record once .*docs/upgrading.md, one-time setup",
        START,
    ),
    "a shallow clone": (SHALLOW, SHALLOW_ANSWER, "git fetch -q --unshallow origin"),
    "a shallow template": (SHALLOW_TEMPLATE, SHALLOW_ANSWER, "git fetch -q --unshallow template"),
}


def ref_and_worktrees(fork):
    return run(fork, "git", "rev-parse", "HEAD"), run(fork, "git", "worktree", "list"), contents(fork)


@pytest.mark.parametrize(("change", "pattern", "remedy"), UNMERGED.values(), ids=UNMERGED)
def test_a_merge_that_cannot_begin_says_what_to_do(cut_fork, change, pattern, remedy):
    run(cut_fork, "bash", "-ec", change)
    before = ref_and_worktrees(cut_fork)
    printed = run(cut_fork, "scripts/remove_extras.sh", "--merge", "template-2", code=2)
    assert re.search(pattern, printed) and len(printed.splitlines()) == 1, printed
    assert ref_and_worktrees(cut_fork) == before
    run(cut_fork, "bash", "-ec", remedy)
    assert run(cut_fork, "scripts/remove_extras.sh", "--merge", "template-2") == "template-2 was merged.\n"
    assert "Version 2" in (cut_fork / "model.py").read_text() and not (cut_fork / "utils/extras/watch").exists()


def test_a_fork_in_a_folder_takes_a_newer_template_into_that_folder(cut_fork):
    template, top = cut_fork.parent / "template", cut_fork.parent / "monorepo"
    fork = top / "apps/fork"
    run(top.parent, "git", "init", "-q", top)
    run(top, "git", "remote", "add", "template", template)
    run(top, "git", "fetch", "-q", "--tags", "template")
    (top / "a.txt").write_text("mine\n")
    commit(top, "a repository")
    run(top, "bash", "-c", f"{START} && git read-tree -u --prefix=apps/fork/ template-1 && git commit -qm fork")
    cut(fork, "watch")
    (template / "new").mkdir()
    (template / "new/a.py").write_text("a = 1\n")
    commit(template, "version 3")
    run(top, "git", "fetch", "-q", "template")
    files = contents(top).keys()
    branch = run(template, "git", "branch", "--show-current").strip()
    assert f"template/{branch} was merged." in run(fork, "scripts/remove_extras.sh", "--merge", f"template/{branch}")
    assert contents(top).keys() - files == {"apps/fork/new/a.py"} and contents(top).keys() >= files
    assert "Version 2" in (fork / "model.py").read_text()


def add_failing_hook(fork, name, command):
    hook = fork / ".git/hooks" / name
    hook.write_text(f"#!/bin/sh\n{command}\nexit 1\n")
    hook.chmod(0o755)
    return hook


@pytest.mark.parametrize(("command", "reason"), [("", "exit status 1"), ("echo lint failed", "lint failed")])
@pytest.mark.parametrize("name", ["pre-commit", slow("prepare-commit-msg"), slow("commit-msg")])
def test_a_merge_that_a_hook_refuses_can_be_undone_and_ended(cut_fork, name, command, reason):
    before = ref_and_worktrees(cut_fork)
    hook = add_failing_hook(cut_fork, name, command)
    remedy = "The merge is staged. Complete it with git commit, or undo it with git merge --abort."
    assert f"({reason}). {remedy}" in run(cut_fork, "scripts/remove_extras.sh", "--merge", "template-2", code=2)
    run(cut_fork, "git", "merge", "--abort")
    assert ref_and_worktrees(cut_fork) == before
    run(cut_fork, "scripts/remove_extras.sh", "--merge", "template-2", code=2)
    hook.unlink()
    run(cut_fork, "git", "commit", "-q", "--no-edit")
    assert run(cut_fork, "git", "status", "--porcelain") == ""
    assert "Version 2" in (cut_fork / "model.py").read_text()
    assert run(cut_fork, "scripts/remove_extras.sh", "--merge", "template-2") == "template-2 is already merged.\n"


def test_hooks_of_checkouts_are_not_run_in_the_temporary_folders_of_a_merge(cut_fork):
    add_failing_hook(cut_fork, "post-checkout", "")
    assert run(cut_fork, "scripts/remove_extras.sh", "--merge", "template-2") == "template-2 was merged.\n"
    assert len(run(cut_fork, "git", "worktree", "list").splitlines()) == 1


def test_a_merge_that_fails_leaves_no_temporary_folder(cut_fork):
    template = cut_fork.parent / "template"
    (template / "mine.py").write_text("import utils.extras.watch\n")
    commit(template, "version 3")
    run(template, "git", "tag", "template-3")
    run(cut_fork, "git", "fetch", "-q", "--tags", "template")
    before = ref_and_worktrees(cut_fork)
    assert "mine.py imports utils/extras" in run(cut_fork, "scripts/remove_extras.sh", "--merge", "template-3", code=2)
    assert ref_and_worktrees(cut_fork) == before


def take(fork):
    """The newest commit of the template."""
    run(fork, "git", "fetch", "-q", "origin")
    assert "origin/main was merged." in run(fork, "scripts/remove_extras.sh", "--merge", "origin/main")
    assert run(fork, "git", "status", "--porcelain") == ""
    assert "already merged" in run(fork, "scripts/remove_extras.sh", "--merge", "origin/main")


@pytest.mark.guarantee("upgrading")
@pytest.mark.parametrize(
    "names",
    [pytest.param(["--all-but"], id="all"), pytest.param(["watch", "sharding"], id="two", marks=pytest.mark.slow)],
)
def test_a_fork_that_was_cut_and_changed_takes_newer_templates_without_a_conflict(tmp_path, names):
    """The template changes files that are cut and others, also the lines beside deleted ones; an ordinary merge of it
    has conflicts."""
    template, fork, plain = copy(tmp_path / "template"), tmp_path / "fork", tmp_path / "plain"
    run(tmp_path, "git", "clone", "-q", template, fork)
    cut(fork, *names)
    change(fork, "model.py", '"""The model', '"""My model, the model')
    change(fork, "dataset.py", "def create_dataset(", "MINE = 1\n\n\ndef create_dataset(")
    change(fork, "config.py", "    # ---- end of yours", '    width: int = yours(64, "width")\n    # ---- end of yours')
    commit(fork, "my fork")
    run(tmp_path, "git", "clone", "-q", fork, plain)
    change(template, "train.py", "# before the weights change", "# before the weights change here")
    # above the lines of `watch`
    change(
        template,
        "utils/run/exit.py",
        "    exit_reporter = ExitReporter(ctx)\n",
        "    exit_reporter = ExitReporter(ctx)  # new\n",
    )
    change(
        template,
        "utils/extras/watch/rank_supervisor.py",
        "class RankSupervisor(Supervisor):",
        "NEW = 1\n\n\nclass RankSupervisor(Supervisor):",
    )
    change(template, "utils/extras/sharding/sharded_model.py", "def build_sharded_model(", "def build_sharded_model(")
    change(template, "config.py", '"logging", 20, "optimizer', '"logging", 25, "optimizer')
    change(template, "config.py", "sync_bn: bool", "new_flag: int = yours(1, 'new')\n    sync_bn: bool")
    (template / "utils/new.py").write_text('"""New."""\n')
    commit(template, "version 2")
    ordinary = subprocess.run(["git", "pull", "-q", "--no-rebase", template], cwd=plain, env=ENV, capture_output=True)
    assert ordinary.returncode
    take(fork)
    change(template, "train.py", "# before the weights change here", "# before the weights change now")
    commit(template, "version 3")
    take(fork)
    for file, text in (
        ("train.py", "# before the weights change now"),
        ("utils/run/exit.py", "exit_reporter = ExitReporter(ctx)  # new"),
        ("config.py", '"logging", 25,'),
        ("config.py", "new_flag"),
        ("config.py", "width: int"),
        ("utils/new.py", "New."),
        ("model.py", "My model"),
        ("dataset.py", "MINE = 1"),
    ):
        assert text in (fork / file).read_text(), file
    assert not (fork / "utils/extras/watch").exists() and "extra: watch" not in (fork / "train.py").read_text()
    parents = run(fork, "git", "log", "-1", "--format=%P").split()
    assert len(parents) == 2 and parents[1] == run(fork, "git", "rev-parse", "origin/main").strip()


def test_the_pages_have_the_sizes_of_forks():
    files = remove_extras.read_files(ROOT)
    page = files["docs/extras.md"]
    rows = re.findall(r"^\| (nothing|`[^`]*`) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE)
    assert len(rows) == 4
    for words, *shown in rows:
        names = set(words.strip("`").split()) - {"nothing"}
        names = EXTRAS.keys() - names if "--all-but" in names else names
        left = remove_extras.count_lines(remove_extras.delete_from_files(files, set(names))[0]).values()
        rounded = [f"{round(lines, -2):,}" for lines in left]
        assert all(abs(int(a.replace(",", "")) - b) <= 100 for a, b in zip(shown, left, strict=True)), (words, rounded)
    smallest, largest = rows[-1][1], rows[0][1]
    train_lines = round(files["train.py"].count("\n"), -1)
    readme = " ".join(files["README.md"].split())
    assert f"the training loop, {train_lines} lines" in readme
    assert f"`tests/` has {largest} lines." in readme and f"Without any extra, {smallest} lines are left." in readme
