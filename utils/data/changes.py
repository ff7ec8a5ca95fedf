"""Find what has changed in a data set since a checkpoint.

Files are compared by a listing in the run folder, and samples by their fingerprints, if there are any.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from utils.files import replace_file

LISTING_FILE = "training_files.gz"  # in the run folder: the listing of the training files when the latest attempt began
MAX_FILE_NAMES = 20  # in a message, of each kind of change
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
    """Compare a data set with that of a checkpoint.

    Args:
        saved: the provenance of the set in the checkpoint: "identity", "content" and "sketches".
        current: the same of the set now.
        file_changes: as `compare_listings` returns it; empty if that is not known.
        is_same_code: whether the code of the run is that of the checkpoint. Other code may decode other samples.

    Returns:
        What has changed, in one line that is empty if nothing has; and whether it is another data set.
    """
    if saved["identity"] != current["identity"]:
        return _describe_other_names(file_changes, split), True
    if saved["content"] != current["content"]:
        return _compare_sizes(file_changes, split)
    return compare_samples(saved, current, split=split, is_same_code=is_same_code)


def _describe_other_names(file_changes: dict[str, Any], split: str) -> str:
    text = f"The {split} set differs from the checkpoint's in names, number or labels."
    new = ", ".join(file_changes.get("new", []))
    if new:
        text += f" These files are new: {new}."
    missing = ", ".join(file_changes.get("missing", []))
    if missing:
        text += f" These files are missing: {missing}. Put them back, or give copies of other images these names."
    return text


def _compare_sizes(file_changes: dict[str, Any], split: str) -> tuple[str, bool]:
    """Return how many files have another size, in one line, and whether these are too many for the same data set."""
    text = f"The {split} set has files of another size than in the checkpoint"
    number, total = file_changes.get("count", (0, 0))
    if not number:
        return f"{text}. The run folder has no list of their names.", False
    names = ", ".join(file_changes.get("resized", []))
    max_number = max(1, MAX_FRACTION_OF_FILES * total)
    return f"{text}: {number:,} of {total:,} ({names}).", number > max_number


def compare_samples(saved: dict[str, Any], current: dict[str, Any], split: str, is_same_code: bool) -> tuple[str, bool]:
    """Compare the fingerprints of samples with those of a checkpoint.

    Only samples of which both have a fingerprint are compared: there are none if one of them was made by a fork without
    the extra `sketches`.

    Returns:
        As `compare_data`.
    """
    compared = 0
    differing = 0
    for old_fingerprint, new_fingerprint in zip(saved["sketches"], current["sketches"], strict=False):
        if old_fingerprint is None or new_fingerprint is None:
            continue
        compared += 1
        if not _is_close_fingerprint(old_fingerprint, new_fingerprint):
            differing += 1
    if not differing:
        return "", False
    text = f"The {split} set has samples that differ from the checkpoint's: {differing} of {compared} compared ones."
    return text, is_same_code and differing > MAX_FRACTION_OF_SAMPLES * compared


def are_fingerprints_alike(
    fingerprints_a: list[SampleFingerprint | None], fingerprints_b: list[SampleFingerprint | None]
) -> bool:
    """Return whether the samples with a fingerprint in both lists, in the same place, are equal up to rounding."""
    for fingerprint_a, fingerprint_b in zip(fingerprints_a, fingerprints_b, strict=False):
        if fingerprint_a is None or fingerprint_b is None:
            continue
        if not _is_close_fingerprint(fingerprint_a, fingerprint_b):
            return False
    return True


def _is_close_fingerprint(fingerprint_a: SampleFingerprint, fingerprint_b: SampleFingerprint) -> bool:
    digest_a, *sums_a = fingerprint_a
    digest_b, *sums_b = fingerprint_b
    if digest_a != digest_b or len(sums_a) != len(sums_b):
        return False
    for k, (sum_a, sum_b) in enumerate(zip(sums_a, sums_b, strict=True)):
        norm_position = k - k % 2  # the norm of an array is followed by its projection
        norm = max(sums_a[norm_position], sums_b[norm_position])
        is_close = abs(sum_a - sum_b) <= FINGERPRINT_TOLERANCE * norm
        if not is_close:
            return False
    return True


def compare_listings(saved: bytes, current: bytes) -> dict[str, Any]:
    """Compare two file listings of a data set.

    Returns:
        The names of "missing", "new" and "resized" files, up to 20 of each kind, and the "count" of resized files and
        of all files in the saved listing. It is empty if nothing was saved or nothing has changed.
    """
    if not saved or saved == current:
        return {}
    old_sizes = _parse_listing(saved)
    new_sizes = _parse_listing(current)
    resized = [name for name, size in old_sizes.items() if new_sizes.get(name, size) != size]
    return {
        "missing": _list_names(old_sizes.keys() - new_sizes.keys()),
        "new": _list_names(new_sizes.keys() - old_sizes.keys()),
        "resized": _list_names(resized),
        "count": (len(resized), len(old_sizes)),
    }


def _parse_listing(listing: bytes) -> dict[bytes, bytes]:
    """Return the size of each file by name. Each row is a name, a space and a size, and stands between zeros."""
    sizes = {}
    for row in listing.split(b"\0")[1:-1]:
        name, _, size = row.rpartition(b" ")
        sizes[name] = size
    return sizes


def _list_names(names: Collection[bytes]) -> list[str]:
    """Return up to 20 of the names, in order, and "..." if there are more."""
    shown = [name.decode(errors="replace") for name in sorted(names)[:MAX_FILE_NAMES]]
    if len(names) > MAX_FILE_NAMES:
        shown.append("...")
    return shown


def read_file_listing(folder: Path) -> bytes:
    """Read the listing of the training files from the run folder. It is empty if there is none."""
    try:
        return gzip.decompress((folder / LISTING_FILE).read_bytes())
    except (OSError, EOFError, zlib.error):  # missing or damaged
        return b""


def save_file_listing(listing: bytes, folder: Path) -> None:
    """Save the listing of the training files in the run folder, unless it is empty or already there."""
    if listing and listing != read_file_listing(folder):
        compressed = gzip.compress(listing, compresslevel=1, mtime=0)
        replace_file(folder / LISTING_FILE, lambda file: file.write(compressed))
