"""Errors that a user sees as one sentence, without a traceback, and the exit code of a run that was stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_PREEMPTED = 75  # exit code of a run that was stopped and has saved: the same command continues it


class UserError(ValueError):
    """A problem that the user can fix, such as a bad setting. The message ends with the fix; the exit code is 2.

    If all ranks raise it, `rank` and `host` name the rank that has the problem. is_final: a restart will not help.
    """

    exit_code = 2

    def __init__(self, sentence: str, rank: int | None = None, host: str | None = None, is_final: bool = False) -> None:
        super().__init__(sentence)
        self.rank = rank
        self.host = host
        self.is_final = is_final


class InvalidSettings(UserError):
    """Settings that cannot be used. problems: the name of a setting and what is wrong with it, one line each."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("\n".join(text for _, text in problems))
        self.problems = problems


class StartError(UserError):
    """Another attempt may succeed: ranks came late, a connection or the storage failed. The exit code is 1."""

    exit_code = 1


class TrainingError(RuntimeError):
    """Training cannot continue. The message ends with the fix; the exit code is 1."""

    def __init__(self, sentence: str, rank: int | None = None, host: str | None = None) -> None:
        super().__init__(sentence)
        self.rank = rank
        self.host = host


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """A UserError of the block ends the program: its sentence is printed, and the exit code is that of the error."""
    try:
        yield
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
