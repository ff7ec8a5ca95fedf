"""What has changed in a data set since a checkpoint: files by a listing in the run folder, samples by sketches, if
there are any."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from utils.extras.sketches import compare_samples  # extra: sketches
from utils.files import replace_file

FILES = "training_files.gz"  # in the run folder: their listing when the latest attempt began
MAX_NAMES = 20
MAX_OF_FILES = 0.01  # the fraction that may differ from the checkpoint's; one file always may


def compare_data(
    before: dict[str, Any], here: dict[str, Any], files: dict[str, Any], is_same_code: bool, split: str = "training"
) -> tuple[str, bool]:
    """What has changed in a set, in one line or none, and whether it is another data set."""
    names = {kind: ", ".join(files.get(kind, [])) for kind in ("missing", "new", "resized")}
    if before["identity"] != here["identity"]:
        text = f"the {split} set differs from the checkpoint's (names, number or labels)"
        text += f"; new: {names['new']}" if names["new"] else ""
        remedy = "put them back, or readable copies of other images under these names"
        return text + (f"; missing: {names['missing']}: {remedy}" if names["missing"] else ""), True
    if before["content"] != here["content"]:
        text = f"the {split} set has files of another size than in the checkpoint"
        number, total = files.get("count", (0, 0))
        if not number:
            return f"{text} (the run folder has no list of their names)", False
        return f"{text}: {number:,} of {total:,} ({names['resized']})", number > max(1, MAX_OF_FILES * total)
    found = "", False
    found = compare_samples(before, here, split, is_same_code)  # extra: sketches
    return found


def changed_files(before: bytes, here: bytes) -> dict[str, Any]:
    """How the files in two listings differ, with up to 20 names of each kind."""
    if not before or before == here:
        return {}
    old, new = (dict(row.rpartition(b" ")[::2] for row in each.split(b"\0")[1:-1]) for each in (before, here))
    resized = [name for name, size in old.items() if new.get(name, size) != size]
    kinds = {"missing": old.keys() - new.keys(), "new": new.keys() - old.keys(), "resized": resized}
    some = {kind: [*sorted(names)[:MAX_NAMES], *[b"..."] * (len(names) > MAX_NAMES)] for kind, names in kinds.items()}
    shown = {kind: [name.decode(errors="replace") for name in names] for kind, names in some.items()}
    return shown | {"count": (len(resized), len(old))}


def read_listing(folder: Path) -> bytes:
    try:
        return gzip.decompress((folder / FILES).read_bytes())
    except (OSError, EOFError, zlib.error):  # missing or damaged
        return b""


def keep_listing(listing: bytes, folder: Path) -> None:
    if listing and listing != read_listing(folder):
        replace_file(folder / FILES, lambda file: file.write(gzip.compress(listing, compresslevel=1, mtime=0)))
