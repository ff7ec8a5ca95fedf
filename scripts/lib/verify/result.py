# extra: verify
"""The result of verify.py, which --json FILE writes also if nothing could be checked (keys: docs/verify.md).

This module needs only the standard library and is imported first, because a config.py or model.py that cannot be
imported is a result too.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from utils.files import replace_json, temporary_path

EXIT_CODES = {"ok": 0, "broken": 1, "could not run": 2}
PLEASE_CHECK = "Please check: "  # begins a note, which only a person can judge
NOT_CHECKED = "Not checked: "  # begins the name of a part of a check that was not made, and the reason
GIVE_JSON_FILE = "Give the name of a .json file in an existing folder, other than verified.json."


class Result:
    """The result of this process. It is "could not run" until `finish` is called, also if the process ends before."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._pid, self._started_at, self._is_decided = os.getpid(), time.monotonic(), False
        empty = ("task", "samples", "ranks", "precision", "git_commit", "git_dirty")
        self.values: dict[str, Any] = {"version": 1, "result": "could not run", "exit_code": 2, "text": ""}
        self.values |= (
            {"checks": [], "notes": [], "not_checked": 0} | dict.fromkeys(empty) | {"versions": {}, "flags": []}
        )
        self.values["started"] = datetime.now(UTC).isoformat(timespec="milliseconds")

    @property
    def exit_code(self) -> int:
        return self.values["exit_code"]

    def take_json_flag(self) -> str:
        """Take --json FILE out of the flags, and delete FILE, which may be of an earlier run.

        SIGTERM is caught, and from now on the process exits with 2 if there is no result.

        Returns:
            The problem if FILE could not be written later (empty: there is none).
        """
        words, flags, given = iter(sys.argv[1:]), [], None
        for word in words:
            name, has_value, value = word.partition("=")
            if name == "--json":
                given = value if has_value else next(words, "")
            else:
                flags.append(word)
        sys.argv[1:] = self.values["flags"] = flags
        if {"-h", "--help"} & {*flags}:
            return ""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        atexit.register(self._on_exit)
        if given is None:
            return ""
        self._file = Path(given).absolute()
        if problem := explain_unwritable(self._file):
            self._file = None
            return f"--json {given} cannot be written ({problem}). {GIVE_JSON_FILE}"
        if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")) == "0":
            self._file.unlink(missing_ok=True)
        return ""

    def add_check(self, name: str, result: str, text: str, seconds: float) -> None:
        """Add the outcome of a check.

        Args:
            name: the name of the check.
            result: "ok", "BROKEN" or "skipped".
            text: whole sentences. If the check passed, the last ones are notes and parts that were not checked.
                Otherwise the last one is the fix.
            seconds: the time that the check has taken.
        """
        parts, fix = [], None
        if result == "ok":
            parts = split_parts(text)
        else:
            fix = find_fix(text)
        not_checked = [part.removeprefix(NOT_CHECKED) for part in parts if part.startswith(NOT_CHECKED)]
        notes = [part.removeprefix(PLEASE_CHECK) for part in parts if part.startswith(PLEASE_CHECK)]
        outcome = {
            "name": name,
            "result": result,
            "text": text,
            "fix": fix,
            "notes": notes,
            "not_checked": not_checked,
            "seconds": round(seconds, 1),
        }
        self.values["checks"].append(outcome)
        self.values["not_checked"] += len(not_checked)

    def finish(self, result: str, text: str, is_written: bool = True) -> None:
        """Decide the result, unless that was done, and write FILE, unless another rank did.

        Args:
            result: a key of `EXIT_CODES`.
            text: what was found, or why there is no result.
            is_written: whether this process writes FILE (False: another rank does).
        """
        if self._is_decided or os.getpid() != self._pid:
            return
        self._is_decided = True
        seconds = round(time.monotonic() - self._started_at, 1)
        self.values |= {"result": result, "exit_code": EXIT_CODES[result], "text": text, "seconds": seconds}
        if self._file and is_written and not self._file.exists():
            try:
                replace_json(self._file, self.values)
            except OSError as error:
                text = f"--json {self._file} cannot be written ({error.strerror}). {GIVE_JSON_FILE}"
                print(text, file=sys.stderr, flush=True)

    def withdraw(self) -> None:
        """Give up the result, for a command line that checks nothing."""
        self._is_decided = True

    def _on_sigterm(self, *_: Any) -> NoReturn:
        self.finish("could not run", "The checks were interrupted by SIGTERM.")
        if self.values["ranks"] is None:  # an import of the fork's code may catch SystemExit
            os._exit(self.exit_code)
        sys.exit(self.exit_code)  # this deletes the folder of the short runs

    def _on_exit(self) -> None:
        """Finish the result at exit.

        An exception or sys.exit has ended this process, perhaps while the fork's code was imported.
        """
        if self._is_decided or os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        text = "The program ended before the first check."
        if error:
            text = f"{type(error).__name__}: {error}"
        self.finish("could not run", text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)


def split_parts(text: str) -> list[str]:
    """Return a check's text without notes, and after it each note and each part that was not checked."""
    return re.split(f" (?={PLEASE_CHECK}|{NOT_CHECKED})", text)


def join_parts(*texts: str) -> str:
    """Join texts of a check, some of which may be empty. Notes and parts that were not checked are put at the end."""
    parts = [part for text in texts if text for part in split_parts(text)]
    return " ".join(sorted(parts, key=lambda part: part.startswith((PLEASE_CHECK, NOT_CHECKED))))


def find_fix(text: str) -> str | None:
    """Return the last sentence of a finding, which is the fix. None if there is only one sentence."""
    sentences = re.split(r"(?<=\.) (?=[A-Z])", text)
    return sentences[-1] if len(sentences) > 1 else None


def explain_unwritable(path: Path) -> str:
    """Return why FILE could not be written, or an empty text if it can be."""
    if path.suffix != ".json" or path.name == "verified.json":
        return "it is another kind of file"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "it is no regular file"
    try:
        temporary = temporary_path(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


RESULT = Result()
