"""A file that a stranger may have made: opened without waiting, looked over before torch sees it, loaded without
running code."""

from __future__ import annotations

import os
import pickletools
import re
import stat
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MEMBER = re.compile(
    r"[^/]+/(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+)"
)
# by an archive's pickle
NAMED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v[23]|parameter)|torch"
    r" (\w+Storage|Size|\w+\d+\w*|bool)|torch.storage UntypedStorage"
)
# beside tensors, lists, tuples and dicts of them: what weights_only=True loads anywhere
PLAIN = (
    type(None),
    bool,
    int,
    float,
    str,
)


class NotOurs(ValueError):
    """What `torch.save` of a checkpoint does not write."""


def open_file(path: Path) -> BinaryIO:
    """An ordinary file, or what a link leads to. Raises OSError for anything else, and never waits."""
    # wait for no pipe
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is no file")
    return os.fdopen(descriptor, "rb")


def load_archive(path: Path) -> Any:
    """Whatever is in the file, of plain values and tensors. Raises what it will; never runs code."""
    check_archive(path)
    payload = torch.load(path, map_location="cpu", weights_only=True)
    _check_plain(payload)
    return payload


def check_archive(path: Path) -> None:
    """Raises NotOurs for an archive that torch.save did not write: torch would inflate it, or call what allocates, in
    memory."""
    with open_file(path) as file:
        if file.read(4) != b"PK\3\4":
            return  # torch's former format
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            is_stored = all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
            if not is_stored or len(set(names)) < len(names) or not all(map(MEMBER.fullmatch, names)):
                raise NotOurs("an archive that torch.save did not write")
            for pickled in (archive.read(name) for name in names if name.endswith("/data.pkl")):
                named = {
                    argument for opcode, argument, _ in pickletools.genops(pickled) if opcode.name in ("GLOBAL", "INST")
                }
                if strange := [each for each in sorted(named) if not NAMED.fullmatch(each)]:
                    raise NotOurs(f"it names {strange[0]}")


def _check_plain(payload: Any, deepest: int = 30, most: int = 1_000_000) -> None:
    """Raises NotOurs for other things than dicts, lists and tuples of plain values and tensors, or without an end.

    A loop that ends: a file may nest 100,000 lists, hold a list that holds itself, or ten times ten times ... the same
    one.
    """
    left: list[tuple[Any, int]] = [(payload, 0)]
    seen = 0
    while left:
        value, depth = left.pop()
        seen += 1
        if depth > deepest or seen > most:
            raise NotOurs("it is nested too deeply")
        if type(value) in (dict, OrderedDict):
            attributes = getattr(value, "__dict__", {})
            if attributes.keys() - {"_metadata"}:  # a pickle can put values in the place of an OrderedDict's methods
                raise NotOurs("a dict with attributes")
            parts = (*dict.keys(value), *dict.values(value), *attributes.values())
        elif type(value) in (list, tuple, torch.Size):
            parts = value
        elif isinstance(value, Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                raise NotOurs("a tensor without values")
            if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise NotOurs("a tensor larger than its bytes")
            continue
        elif type(value) in (*PLAIN, bytes, torch.dtype):
            continue
        else:
            raise NotOurs(f"a value of {type_name(value)}")
        if len(parts) > most:
            raise NotOurs("it holds too much")
        left += [(part, depth + 1) for part in parts]


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
