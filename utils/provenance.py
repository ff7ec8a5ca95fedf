"""Where a result comes from: command, code, versions, machines. `python -m utils.provenance` renews the list of the template's files."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "scripts" / "template.sha256"
VERIFIED = ROOT / "verified.json"  # what scripts/verify.py found
BLOCK = ("# ---- yours:", "# ---- end of yours")  # the lines of config.py between these are the forker's


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def collect(hosts: tuple[str, ...], device_names: tuple[str, ...], git_commit: str, task: str) -> dict[str, Any]:
    """Plain values only: it goes into every checkpoint. `hosts` and `device_names` have an entry for each rank; task: as `verification`."""
    commit, is_dirty = _git()
    is_verified, said = verification(task)
    return {
        "command": [sys.executable, *sys.argv],
        "git_commit": commit or git_commit,
        "git_dirty": is_dirty,
        "changed_template_files": changed_files(),
        "verified": is_verified,
        "verification": said,
        "versions": versions(),
        "hosts": sorted(set(hosts)),
        "ranks": [{"rank": rank, "host": host, "device": device_names[rank]} for rank, host in enumerate(hosts)],
        "world_size": len(hosts),
        "start_time": now(),
    }


def fingerprint(dataset: Dataset) -> str:
    """What tells this set from another; its type and size where it brings no fingerprint of its own."""
    return getattr(dataset, "fingerprint", f"{type(dataset).__name__} of {len(dataset)}")


def describe(dataset: Dataset) -> dict[str, Any]:
    """What an export or a resume has to know of a training set."""
    as_list = {name: torch.as_tensor(getattr(dataset, name)).tolist() for name in ("mean", "std") if hasattr(dataset, name)}
    return {
        "fingerprint": fingerprint(dataset),
        "classes": list(getattr(dataset, "classes", [])),
        "mean": as_list.get("mean", []),
        "std": as_list.get("std", []),
    }


def versions() -> dict[str, str]:
    """Of Python and the packages; an empty text where one is missing."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("torchvision", "tensorboard", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def zip_code(path: Path) -> None:
    """The *.py that ran, so that a result can be looked into after the tree has changed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("utils/**/*.py")), *sorted(ROOT.glob("scripts/**/*.py"))]:
            archive.write(file, file.relative_to(ROOT))


def template_digests() -> dict[str, str]:
    """SHA-256 of each file of ours as it is now, by its path from the root; of config.py without the forker's block."""
    files = [ROOT / name for name in ("train.py", "config.py", "ddp_utils.py")]
    files += [
        path for folder in ("utils", "scripts") for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".sh", ".sbatch")
    ]
    return {str(path.relative_to(ROOT)): _digest(path) for path in files if path.exists()}


def changed_files() -> list[str]:
    """Files of ours that are not as the template has them."""
    if not MANIFEST.exists():
        return []
    known = dict(reversed(line.split("  ", 1)) for line in MANIFEST.read_text().splitlines())
    here = template_digests()
    return sorted(name for name in known.keys() | here.keys() if known.get(name) != here.get(name))


def code_digests() -> dict[str, str]:
    """SHA-256 of each file of the repository that is imported here, by its path from the root; scripts and tests left out."""
    real_folder = functools.cache(os.path.realpath)  # thousands of modules lie in a few hundred folders
    imported = [os.path.split(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    files = {os.path.join(real_folder(folder), name) for folder, name in imported}
    names = [Path(file).relative_to(ROOT) for file in files if file.startswith(f"{ROOT}{os.sep}") and os.path.isfile(file)]
    names = [name for name in names if name.parts[0] not in ("scripts", "tests") and "site-packages" not in name.parts]
    return {str(name): _sha256(ROOT / name) for name in sorted(names)}


def verification(task: str) -> tuple[bool, str]:
    """Whether scripts/verify.py passed with this code and task ("MODEL on DATASET"), and what is to be said of it."""
    try:
        found = json.loads(VERIFIED.read_text(encoding="utf-8"))
        changed = [name for name, digest in found["code"].items() if not (ROOT / name).exists() or _sha256(ROOT / name) != digest]
        changed += [name for name in code_digests() if name not in found["code"]]
        before, here = found["versions"], versions()
        changed += [f"{name} {before[name]} -> {here.get(name)}" for name in before if before[name] != here.get(name)]
        broken = [name for name, outcome in found["invariants"].items() if not outcome["passed"]]
        verified, is_passed = found["task"], found["passed"]
        what = f"{verified}, {found['ranks']} rank(s), {found['time'][:10]}"
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False, "not verified; scripts/verify.py checks your model and data in a minute"
    if changed:
        return False, f"changed since scripts/verify.py was run: {', '.join(changed)}"
    if not is_passed:
        return False, f"scripts/verify.py found broken: {', '.join(broken) or 'it did not come to its end'}"
    if verified != task:
        return False, f"not verified for {task}; scripts/verify.py passed for {what}"
    return True, f"verified with this code: {what}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.name == "config.py":
        before, _, rest = text.partition(BLOCK[0])
        text = before + rest.partition(BLOCK[1])[2]
    return hashlib.sha256(text.encode()).hexdigest()


def _git() -> tuple[str, bool]:
    """The commit of the tree ("" where git does not know) and whether the tree differs from it."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return ask("rev-parse", "HEAD"), bool(ask("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return "", False


if __name__ == "__main__":
    MANIFEST.write_text("".join(f"{digest}  {name}\n" for name, digest in template_digests().items()))
    print(f"wrote {MANIFEST.relative_to(ROOT)}")
