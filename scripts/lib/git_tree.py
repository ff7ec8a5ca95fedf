"""Ask git about a checkout, and whether git can undo a change of some of its files.

This module needs only the standard library.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

SO_THAT = "so that this can be undone"
UNHIDE_COMMAND = "git update-index --no-assume-unchanged --no-skip-worktree"
CHMOD_COMMAND = "git update-index --chmod"


def fail(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def try_git(*words: str, root: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a git command in a folder. Paths may have any bytes, and keep them."""
    return subprocess.run(
        ["git", *words],
        cwd=root,
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
    )


def git(*words: str, root: Path, stdin: str | None = None, remedy: str = "") -> str:
    """Return what a git command prints.

    If the command fails, the process ends with git's reason and `remedy`, which is a sentence.
    """
    ended = try_git(*words, root=root, stdin=stdin)
    if ended.returncode:
        reason = ended.stderr.strip() or f"exit status {ended.returncode}"
        if "not a git" in reason:
            remedy = "Run git init, then add and commit all files."
        fail(f"git {' '.join(words)} failed ({reason}). {remedy}".strip())
    return ended.stdout.strip()


def git_list(*words: str, root: Path) -> list[str]:
    """Return the entries that a git command lists. The command needs its -z, which ends each entry with a NUL."""
    return [entry for entry in git(*words, root=root).split("\0") if entry]


def require_clean(root: Path, pathspec: str) -> None:
    """Refuse changes that a deletion or a merge would mix with its own, including those that git does not show.

    Args:
        root: the folder of the fork, which may be a part of its repository.
        pathspec: the paths that may have no changes, "." for the fork or ":/" for its whole repository.
    """
    if git("status", "--porcelain", "--untracked-files=no", "--", pathspec, root=root):
        fail(f"The working tree has changes. Commit or stash them first, {SO_THAT}.")
    for entry in git_list("ls-files", "-v", "-z", "--", pathspec, root=root):
        state, name = entry.split(" ", 1)
        if state == "S" and not (root / name).exists():
            fail(f"{name} is left out by a sparse checkout. Run git sparse-checkout disable first, {SO_THAT}.")
        if state == "S" or state.islower():
            fail(f"git ignores changes of {name}. Run {UNHIDE_COMMAND} {name} first, {SO_THAT}.")


def require_undoable(root: Path, names: Iterable[str], folders: Iterable[str]) -> None:
    """Refuse unless git would restore these files, and all files in these folders, byte for byte.

    Args:
        root: the folder that the paths begin at.
        names: the files that are to be changed or deleted.
        folders: the folders that are to be deleted as a whole.
    """
    names = sorted(names)
    tracked = set()
    for entry in git_list("ls-tree", "-r", "-z", "HEAD", root=root):
        details, name = entry.split("\t", 1)
        if details.startswith(("100644", "100755")):
            tracked.add(name)
    for name in names:
        if (root / name).is_symlink():
            fail(f"{name} is a symbolic link. Replace it by the file itself and commit that, {SO_THAT}.")
        if name not in tracked:
            fail(f"{name} is not committed. Commit it first, {SO_THAT}.")
    require_same_after_checkout(root, names)
    for folder in folders:
        for path in untracked_content(root, folder, tracked):
            fail(
                f"{path} is not committed or not a regular file, and its folder will be deleted. Move {path} elsewhere"
                f" first, {SO_THAT}."
            )


def require_same_after_checkout(root: Path, names: list[str]) -> None:
    """Refuse files that git would write with other bytes than they have, or with another executable bit.

    Git itself writes each file a second time, so that all attributes, filters and settings count. The copies are in
    its own folder, since other file systems may know other permissions. The index is HEAD here.
    """
    git_folder = git("rev-parse", "--absolute-git-dir", root=root)
    with tempfile.TemporaryDirectory(dir=git_folder) as temporary:
        command = ["checkout-index", "-z", "--stdin", f"--prefix={temporary}/"]
        remedy = f"Repair what git names here, {SO_THAT}."
        git(*command, root=root, stdin="".join(f"{name}\0" for name in names), remedy=remedy)
        copies = Path(temporary, git("rev-parse", "--show-prefix", root=root))
        for name in names:
            copy = copies / name
            if (root / name).read_bytes() != copy.read_bytes():
                fail(
                    f"git would restore {name} with other line ends or bytes. Delete it and git restore it, {SO_THAT}."
                )
            is_executable = bool((root / name).stat().st_mode & stat.S_IXUSR)
            if is_executable and not copy.stat().st_mode & stat.S_IXUSR:
                fail(
                    f"git does not know that {name} is executable. Run {CHMOD_COMMAND}=+x {name} and commit that,"
                    f" {SO_THAT}."
                )
            if copy.stat().st_mode & stat.S_IXUSR and not is_executable:
                fail(f"git would make {name} executable. Run {CHMOD_COMMAND}=-x {name} and commit that, {SO_THAT}.")


def untracked_content(root: Path, folder: str, tracked: Iterable[str]) -> list[str]:
    """Return the files and links in a folder that git does not restore, without Python's bytecode."""
    tracked_paths = set(tracked)
    paths = []
    for parent, folders, files in os.walk(root / folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        folders[:] = [name for name in folders if name != "__pycache__" and name not in links]
        for name in (*files, *links):
            path = f"{(Path(parent) / name).relative_to(root)}"
            if path not in tracked_paths:
                paths.append(path)
    return sorted(paths)
