"""Read the text files of a fork, and write those that changed.

A file keeps its encoding, its line ends, its byte order mark and its mode. Files that did not change are not touched.
This module needs only the standard library.
"""

from __future__ import annotations

import codecs
import shutil
from io import StringIO
from pathlib import Path

from lib.git_tree import git_list

Files = dict[str, str]  # the text of each file by its path


def read_files(root: Path) -> Files:
    """Read the files that git tracks. The text of a file that is no text is "".

    A symbolic link to another of these files is left out. A link to anything else is read as its target.
    """
    names = git_list("ls-files", "-z", root=root)
    paths = {str(root.resolve() / name) for name in names}
    files = {}
    for name in names:
        path = root / name
        is_alias = path.is_symlink() and str(path.resolve()) in paths
        if path.is_file() and not is_alias:
            files[name] = decode(path.read_bytes())[0]
    return files


def decode(data: bytes) -> tuple[str, str, str]:
    """Return the text of a file, its encoding and its line end. With them `encode` gives the same bytes again."""
    if b"\0" in data:  # this is no text, or UTF-16
        return "", "utf-8", "\n"
    encoding = "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        encoding = "latin-1"  # all bytes are characters in it, and markers are ASCII
        text = data.decode(encoding)
    if "\r" in text and text.count("\r\n") == text.count("\n") == text.count("\r"):
        return text.replace("\r\n", "\n"), encoding, "\r\n"
    return text, encoding, "\n"


def encode(text: str, encoding: str, line_end: str) -> bytes:
    return text.replace("\n", line_end).encode(encoding)


def split_lines(text: str) -> list[str]:
    """Split a text into lines with their ends, as Python numbers them.

    `str.splitlines` would also end lines at form feeds and other characters.
    """
    return StringIO(text).readlines()


def changed_files(before: Files, after: Files) -> list[str]:
    return [name for name, text in after.items() if text != before[name]]


def emptied_folders(before: Files, after: Files) -> list[str]:
    """Return the folders all of whose files are deleted. Folders within such a folder are left out."""
    emptied = folders_with_files(before) - folders_with_files(after)
    return sorted(folder for folder in emptied if str(Path(folder).parent) not in emptied)


def folders_with_files(files: Files) -> set[str]:
    folders = {str(parent) for name in files for parent in Path(name).parents}
    return folders - {"."}


def write_files(root: Path, before: Files, after: Files) -> None:
    """Write the files that changed, and delete those that are gone, with the folders that have only bytecode left."""
    for name in changed_files(before, after):
        path = root / name
        _, encoding, line_end = decode(path.read_bytes())
        path.write_bytes(encode(after[name], encoding, line_end))
    for name in before.keys() - after.keys():
        (root / name).unlink()
    for folder in emptied_folders(before, after):
        shutil.rmtree(root / folder)
