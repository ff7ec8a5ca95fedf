"""Optional packages: those that not every run needs, and what to do about one that is missing or broken."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from utils.settings.errors import UserError

# imported first, so that a message names the one that is broken
REQUIRED_MODULES = {"torchvision": ("numpy", "PIL.Image")}


def import_optional(setting: str, module: str) -> Any:
    """Import a module of an optional package, for a setting that needs it.

    Raises:
        UserError: whatever the import raises. It is RuntimeError if torchvision was built for another torch.
    """
    package = module.partition(".")[0]
    first = REQUIRED_MODULES.get(package, ()) if find_spec(package) else ()
    for name in (*first, module):
        try:
            imported = importlib.import_module(name)
        except Exception as error:
            raise UserError(f"{setting} needs {explain_import_error(name, error)}") from None
    return imported


def explain_import_error(module: str, error: Exception) -> str:
    """The package of a module, the error of its import or of its use in short, and the fix."""
    package = module.partition(".")[0].replace("PIL", "pillow")
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    text = f"{package}, which cannot be used ({reason}). Run pip install --force-reinstall {package}"
    if package == "torchvision":
        text += f", in the version for torch {version('torch')}"
    return f"{text}."
