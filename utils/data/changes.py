"""What has changed in a data set since a checkpoint: files by a listing in the run folder, samples by their
fingerprints, if there are any."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from utils.files import replace_file

LISTING_FILE = "training_files.gz"  # in the run folder: their listing when the latest attempt began
MAX_FILE_NAMES = 20
MAX_FRACTION_OF_FILES = 0.01  # the fraction that may differ from the checkpoint's; one file always may
# of sums over floats and pixels, relative to their norm: libraries round differently on other CPUs
FINGERPRINT_TOLERANCE = 1e-3
MAX_FRACTION_OF_SAMPLES = 0.5  # the fraction that may differ from the checkpoint's
SampleFingerprint = list[int | float]  # of one sample: a digest, then a norm and a projection of each of its arrays


def compare_data(
    saved: dict[str, Any],
    current: dict[str, Any],
    file_changes: dict[str, Any],
    is_same_code: bool,
    split: str = "training",
) -> tuple[str, bool]:
    """What has changed in a set, in one line or none, and whether it is another data set."""
    names = {kind: ", ".join(file_changes.get(kind, [])) for kind in ("missing", "new", "resized")}
    if saved["identity"] != current["identity"]:
        text = f"the {split} set differs from the checkpoint's (names, number or labels)"
        text += f"; new: {names['new']}" if names["new"] else ""
        remedy = "put them back, or readable copies of other images under these names"
        return text + (f"; missing: {names['missing']}: {remedy}" if names["missing"] else ""), True
    if saved["content"] != current["content"]:
        text = f"the {split} set has files of another size than in the checkpoint"
        number, total = file_changes.get("count", (0, 0))
        if not number:
            return f"{text} (the run folder has no list of their names)", False
        return f"{text}: {number:,} of {total:,} ({names['resized']})", number > max(1, MAX_FRACTION_OF_FILES * total)
    return compare_samples(saved, current, split, is_same_code)


def compare_samples(saved: dict[str, Any], current: dict[str, Any], split: str, is_same_code: bool) -> tuple[str, bool]:
    """What has changed in the samples of a set since a checkpoint, in one line or none, and whether it is another.

    Only samples of which both have a fingerprint are compared: there are none if one of them was made by a fork without
    the extra `sketches`.
    """
    number, differing = 0, 0
    for old_fingerprint, new_fingerprint in zip(saved["sketches"], current["sketches"], strict=False):
        if old_fingerprint is None or new_fingerprint is None:
            continue
        number += 1
        if not _is_close_fingerprint(old_fingerprint, new_fingerprint):
            differing += 1
    if not differing:
        return "", False
    text = f"the {split} set has samples that differ from the checkpoint's: {differing} of {number} compared ones"
    return text, is_same_code and differing > MAX_FRACTION_OF_SAMPLES * number


def are_fingerprints_alike(
    fingerprints_a: list[SampleFingerprint | None], fingerprints_b: list[SampleFingerprint | None]
) -> bool:
    """Whether the samples of which both lists have a fingerprint, in the same places, are equal up to rounding."""
    return all(
        a is None or b is None or _is_close_fingerprint(a, b)
        for a, b in zip(fingerprints_a, fingerprints_b, strict=False)
    )


def _is_close_fingerprint(fingerprint_a: SampleFingerprint, fingerprint_b: SampleFingerprint) -> bool:
    if (fingerprint_a[0], len(fingerprint_a)) != (fingerprint_b[0], len(fingerprint_b)):
        return False
    pairs = list(zip(fingerprint_a[1:], fingerprint_b[1:], strict=True))
    norms = [max(pair) for pair in pairs[::2] for _ in range(2)]
    return all(abs(a - b) <= FINGERPRINT_TOLERANCE * norm for (a, b), norm in zip(pairs, norms, strict=True))


def compare_listings(saved: bytes, current: bytes) -> dict[str, Any]:
    """How the files in two listings differ, with up to 20 names of each kind."""
    if not saved or saved == current:
        return {}
    old, new = (dict(row.rpartition(b" ")[::2] for row in listing.split(b"\0")[1:-1]) for listing in (saved, current))
    resized = [name for name, size in old.items() if new.get(name, size) != size]
    kinds = {"missing": old.keys() - new.keys(), "new": new.keys() - old.keys(), "resized": resized}
    capped = {
        kind: [*sorted(names)[:MAX_FILE_NAMES], *[b"..."] * (len(names) > MAX_FILE_NAMES)]
        for kind, names in kinds.items()
    }
    shown = {kind: [name.decode(errors="replace") for name in names] for kind, names in capped.items()}
    return shown | {"count": (len(resized), len(old))}


def read_file_listing(folder: Path) -> bytes:
    try:
        return gzip.decompress((folder / LISTING_FILE).read_bytes())
    except (OSError, EOFError, zlib.error):  # missing or damaged
        return b""


def save_file_listing(listing: bytes, folder: Path) -> None:
    if listing and listing != read_file_listing(folder):
        replace_file(folder / LISTING_FILE, lambda file: file.write(gzip.compress(listing, compresslevel=1, mtime=0)))
