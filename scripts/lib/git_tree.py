"""What git knows of a checkout, and whether it can undo a change of some of its files. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

SO_THAT = "so that this can be undone"
HIDDEN = "git update-index --no-assume-unchanged --no-skip-worktree"


def fail(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def git(*words: str, root: Path) -> str:
    ended = subprocess.run(
        ["git", *words], cwd=root, capture_output=True, encoding="utf-8", errors="surrogateescape", check=False
    )
    if ended.returncode:
        remedy = "; git init, then add and commit all files" if "not a git" in ended.stderr else ""
        fail(f"git {' '.join(words)}: {ended.stderr.strip()}{remedy}")
    return ended.stdout.strip()


def git_list(*words: str, root: Path) -> list[str]:
    """What a git command lists; give it the -z with which it ends each entry with a NUL."""
    return [entry for entry in git(*words, root=root).split("\0") if entry]


def require_clean(root: Path) -> None:
    """Refuse changes that a deletion or a merge would mix with its own, also those that git does not show."""
    if git("status", "--porcelain", "--untracked-files=no", root=root):
        fail(f"the working tree has changes; commit or stash them first, {SO_THAT}")
    for entry in git_list("ls-files", "-v", "-z", root=root):
        state, name = entry.split(" ", 1)
        if state == "S" and not (root / name).exists():
            fail(f"{name} is left out by a sparse checkout; git sparse-checkout disable first, {SO_THAT}")
        if state == "S" or state.islower():
            fail(f"git ignores changes of {name}; {HIDDEN} {name} first, {SO_THAT}")


def require_undoable(root: Path, names: Iterable[str], folders: Iterable[str]) -> None:
    """Refuse unless git would restore these files byte for byte, and all that is in these folders.

    Args:
        root: the folder that the paths begin at.
        names: files that are to be changed or deleted.
        folders: folders that are to be deleted as a whole.
    """
    names = sorted(names)
    blobs = {}
    for entry in git_list("ls-tree", "-r", "-z", "HEAD", root=root):
        details, name = entry.split("\t", 1)
        mode, _, blob = details.split(" ")
        if mode in ("100644", "100755"):
            blobs[name] = blob
    for name in names:
        if (root / name).is_symlink():
            fail(f"{name} is a symbolic link; replace it by the file itself and commit that, {SO_THAT}")
        if name not in blobs:
            fail(f"{name} is not committed; commit it first, {SO_THAT}")
    contents = contents_after_checkout(root, [(blobs[name], name) for name in names])
    for name, content in zip(names, contents, strict=True):
        if (root / name).read_bytes() != content:
            fail(f"git would restore {name} with other line ends or bytes; delete it and git restore it, {SO_THAT}")
    for folder in folders:
        for path in untracked_content(root, folder, blobs.keys()):
            fail(f"{path} is not committed or no regular file, and its folder goes; move it elsewhere first, {SO_THAT}")


def contents_after_checkout(root: Path, files: list[tuple[str, str]]) -> list[bytes]:
    """What git would write for each blob and path: with the line ends and filters of .gitattributes and the config."""
    asked = "".join(f"{blob} {name}\n" for blob, name in files)
    command = ["git", "cat-file", "--batch", "--filters"]
    answer = subprocess.run(command, cwd=root, input=os.fsencode(asked), stdout=subprocess.PIPE, check=True).stdout
    contents = []
    begin = 0
    for _ in files:
        header_end = answer.index(b"\n", begin)
        size = int(answer[begin:header_end].split()[-1])
        contents.append(answer[header_end + 1 : header_end + 1 + size])
        begin = header_end + size + 2  # a line end follows the content
    return contents


def untracked_content(root: Path, folder: str, tracked: Iterable[str]) -> list[str]:
    """Files and links in a folder that git does not restore, without Python's bytecode."""
    known = set(tracked)
    paths = []
    for parent, folders, files in os.walk(root / folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        folders[:] = [name for name in folders if name != "__pycache__" and name not in links]
        for name in (*files, *links):
            path = f"{(Path(parent) / name).relative_to(root)}"
            if path not in known:
                paths.append(path)
    return sorted(paths)
