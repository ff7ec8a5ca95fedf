"""Where a result comes from: command, code, versions, machines."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from config import TrainingConfig
from utils.data.sampler import GlobalBatchSampler
from utils.data.sets import collect_dataset_properties
from utils.distributed.context import DistributedContext
from utils.redact import redact_secrets
from utils.rng import derive_seed
from utils.settings.declarations import list_settings
from utils.settings.value_types import to_json_value
from utils.training.state import TrainState

PROJECT_ROOT = Path(__file__).resolve().parents[2]


def format_utc_time(seconds: float | None = None) -> str:
    """Return the time in UTC, in ISO 8601.

    Args:
        seconds: since 1970; None for now.
    """
    if seconds is None:
        seconds = time.time()
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def collect_provenance(hosts: tuple[str, ...], device_names: tuple[str, ...], git_commit: str) -> dict[str, Any]:
    """Collect what every checkpoint says about its origin, as plain values.

    Args:
        hosts: an entry per rank.
        device_names: an entry per rank.
        git_commit: the commit that is recorded if git does not know it.
    """
    commit, is_dirty = _read_git_commit()
    return {
        "command": redact_secrets("\n".join([sys.executable, *sys.argv])).split("\n"),
        "git_commit": commit or git_commit,
        "git_dirty": is_dirty,
        "versions": collect_package_versions(),
        "code": derive_seed(*compute_code_checksums().items()),  # used as a hash of all files
        "hosts": sorted(set(hosts)),
        "ranks": [{"rank": rank, "host": host, "device": device_names[rank]} for rank, host in enumerate(hosts)],
        "world_size": len(hosts),
        "start_time": format_utc_time(),
    }


def create_provenance(
    config: TrainingConfig, ctx: DistributedContext, state: TrainState, sampler: GlobalBatchSampler
) -> dict[str, Any]:
    """Return the content of provenance.json, as far as it is known before the data sets are compared."""
    from utils.extras.verify import find_verification  # extra: verify

    provenance = collect_provenance(ctx.hosts, ctx.device_names, ctx.launch.git_commit)
    provenance |= collect_dataset_properties(sampler.dataset)
    provenance |= find_verification(state.model, sampler.dataset, config)  # extra: verify
    for part in state.parts:
        provenance |= part.provenance
    provenance |= state.strategy.provenance
    provenance["cpu_threads"] = torch.get_num_threads()
    provenance["precision"] = state.precision.name
    # for a fork that has deleted some settings: the default, and the rule for a resume
    fields = {}
    for setting in list_settings(type(config)):
        fields[setting.name] = [to_json_value(setting.resolved_default), setting.resume]
    provenance["fields"] = fields
    provenance |= sampler.provenance
    provenance["global_batch_size"] = sampler.global_batch_size
    return provenance


def collect_package_versions() -> dict[str, str]:
    """Return the versions of Python, the packages, and the CUDA and NCCL that torch was built with.

    The version of a missing package is empty. The function does not ask for a device: that initializes the driver,
    which a process forked afterwards cannot use.
    """
    by_name = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("torchvision", "tensorboard", "numpy"):
        try:
            by_name[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_name[package] = ""
    if torch.version.cuda and dist.is_nccl_available():
        by_name["cuda"] = torch.version.cuda
        by_name["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return by_name


def write_code_zip(path: Path) -> None:
    """Archive the *.py files of the run, without a secrets.py. ZIP has no dates before 1980, which become 1980."""
    left_out = PROJECT_ROOT / "secrets.py"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for pattern in ("*.py", "utils/**/*.py", "scripts/**/*.py"):
            for file in sorted(PROJECT_ROOT.glob(pattern)):
                if file != left_out:
                    archive.write(file, file.relative_to(PROJECT_ROOT))


def compute_code_checksums() -> dict[str, str]:
    """Return the SHA-256 of each file of utils, and of each other imported file of the repository, by path.

    Files of scripts and tests do not count. A module of utils counts even if this rank has not imported it: some are
    imported with some flags, on some ranks.
    """
    real_folder = functools.cache(os.path.realpath)  # hundreds of modules lie in a few folders
    imported_files = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and "site-packages" not in file:
            folder, name = os.path.split(file)
            imported_files.add(os.path.join(real_folder(folder), name))

    paths = [path.relative_to(PROJECT_ROOT) for path in PROJECT_ROOT.glob("utils/**/*.py")]
    for file in imported_files:
        if file.startswith(f"{PROJECT_ROOT}{os.sep}") and os.path.isfile(file):
            path = Path(file).relative_to(PROJECT_ROOT)
            if path.parts[0] not in ("scripts", "tests", "utils"):
                paths.append(path)
    return {str(path): compute_file_checksum(PROJECT_ROOT / path) for path in sorted(paths)}


def compute_file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file. It is empty if there is no such file."""
    if not path.exists():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run_git(*arguments: str) -> str:
    """Return the output of git. Raise OSError or SubprocessError if there is no git, no repository or no answer."""
    command = ["git", "-C", str(PROJECT_ROOT), *arguments]
    completed = subprocess.run(command, capture_output=True, timeout=10, check=True)
    return completed.stdout.decode(errors="replace").strip()  # in any locale


def _read_git_commit() -> tuple[str, bool]:
    """Return the commit of the tree ("" if unknown) and whether the tree differs from it."""
    try:
        commit = _run_git("rev-parse", "HEAD")
        changes = _run_git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return "", False
    return commit, bool(changes)
