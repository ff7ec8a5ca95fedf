"""Whether scripts/verify.py passed with the code, task and flags of a run: for its banner and provenance.json.

It buys checks of your own model and data, and runs that say whether their code passed them. It costs a minute for each
check, and most of the lines in scripts/. Who writes a model or data set that must not break the guarantees needs it.
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from config import TrainingConfig
from utils.data.sets import dataset_class_name
from utils.logger import format_count
from utils.run import provenance

VERIFICATION_FILE = provenance.PROJECT_ROOT / "verified.json"  # the result of scripts/verify.py


def find_verification(model: nn.Module, dataset: Any, config: TrainingConfig) -> dict[str, Any]:
    """The entries of provenance.json."""
    is_verified, text = read_verification(describe_task(model, dataset_class_name(dataset)), config)
    return {"verified": is_verified, "verification": text}


def describe_task(model: nn.Module, dataset: str) -> str:
    """What scripts/verify.py verifies, besides its flags. dataset: its class name."""
    return f"{type(model).__name__} on {dataset}"


def read_verification(task: str, config: TrainingConfig) -> tuple[bool, str]:
    """Whether scripts/verify.py passed with this code, task (`describe_task`) and flags, and a line for the
    banner."""
    try:
        record = json.loads(VERIFICATION_FILE.read_text(encoding="utf-8"))
        changed = [
            name
            for name, digest in record["code"].items()
            if provenance.compute_file_checksum(provenance.PROJECT_ROOT / name) != digest
        ]
        changed += [name for name in provenance.compute_code_checksums() if name not in record["code"]]
        before, current = record["versions"], provenance.collect_package_versions()
        changed += [
            f"{name} {before[name]} -> {current.get(name)}" for name in before if before[name] != current.get(name)
        ]
        broken = [name for name, outcome in record["invariants"].items() if not outcome["passed"]]
        verified, is_passed = record["task"], record["passed"]
        pairs = [(name, value, getattr(config, name, "unset")) for name, value in record["settings"].items()]
        flags = [f"{name} {before} -> {now}" for name, before, now in pairs if before != now]
        summary = f"{verified}, {format_count(record['ranks'], 'rank')}, {record['time'][:10]}"
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False, "This code is not verified. scripts/verify.py checks your model and data in a minute."
    if changed:
        return False, f"This code has changed since scripts/verify.py was run: {', '.join(changed)}."
    if flags:
        outcome = "passed" if is_passed else "failed"
        return False, f"scripts/verify.py {outcome} with other flags: {', '.join(flags)}."
    if not is_passed and not broken:
        return False, "scripts/verify.py did not finish."
    if not is_passed:
        return False, f"scripts/verify.py failed: {', '.join(broken)}."
    if verified != task:
        return False, f"This code is not verified for {task}. scripts/verify.py passed for {summary}."
    return True, f"The model and data are verified with this code: {summary}."
