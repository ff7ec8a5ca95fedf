"""Tells whether a thread of this process is paused in a debugger for Python.

The methods in which debuggers wait for commands are wrapped, and the wrapper counts the threads inside. Walking the
stacks of the threads would need no wrapper, but it can end the process with a segmentation fault while torch.compile
works in another thread (measured with Python 3.11.7 and torch 2.15).
"""

from __future__ import annotations

import bdb
import functools
import pdb
import sys
from typing import Any

# pdb, ipdb and pudb wait inside Bdb.trace_dispatch. After a failure pdb and ipdb wait in Pdb.interaction.
_DEBUGGER_METHODS = [(bdb.Bdb, "trace_dispatch"), (pdb.Pdb, "interaction")]
_waiting_threads: list[str] = []  # an entry for each. Only their number counts: append and pop are atomic, += is not


def is_in_debugger() -> bool:
    """Whether a thread of this process waits in a debugger. Tracing alone, as for coverage, is not a pause.

    The first call wraps the debuggers, so a pause that began before it is not seen.
    """
    _wrap_debuggers()
    return bool(_waiting_threads)


def _wrap_debuggers() -> None:
    """Wrap those that have been imported. pydevd, of VS Code and PyCharm, may be attached at any time."""
    for debugger, name in _DEBUGGER_METHODS:
        _wrap_method(debugger, name)
    debugger_class = getattr(sys.modules.get("pydevd"), "PyDB", None)
    if debugger_class:
        _wrap_method(debugger_class, "do_wait_suspend")


def _wrap_method(debugger: Any, name: str) -> None:
    method = getattr(debugger, name)
    if hasattr(method, "counts_threads"):
        return

    @functools.wraps(method)
    def wait_for_commands(*args: Any, **kwargs: Any) -> Any:
        _waiting_threads.append(name)
        try:
            return method(*args, **kwargs)
        finally:
            _waiting_threads.pop()

    wait_for_commands.counts_threads = True  # type: ignore[attr-defined]
    setattr(debugger, name, wait_for_commands)
