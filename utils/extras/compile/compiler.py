"""What torch.compile needs of a machine."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import torch

from config import UserError


def check_compiler(mode: str, device: torch.device, compilers: dict[str, str]) -> None:
    """Raises UserError if torch.compile could not build its kernels.

    compilers: those set in the environment as CC and CXX.
    """
    if mode == "off":
        return
    named = compilers["CXX" if device.type == "cpu" else "CC"]
    kind, known = ("C++", ["g++"]) if device.type == "cpu" else ("C", ["gcc", "clang"])
    missing = ""
    if not any(map(shutil.which, [named] if named else known)):
        missing = f"a {kind} compiler ({named or ' or '.join(known)})"
    elif not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing = "the headers of this Python (python3-dev)"
    elif device.type != "cpu" and importlib.util.find_spec("triton") is None:
        missing = "triton"
    if missing:
        raise UserError(f"compile={mode}: needs {missing}, which is missing; install it, or use --compile off")
