# extra: companions
"""`--on_checkpoint`: the user's command after each checkpoint; one at a time; of those waiting, only the latest."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.companions.follow import Companion, follow, read_plan
from utils.checkpoint import format as checkpoint
from utils.files import read_json, replace_json
from utils.redact import redact

SECONDS_OF_A_COMMAND = 300.0  # before a warning
SECONDS_TO_FINISH, SECONDS_TO_FINISH_AFTER_STOP = 3600.0, 600.0  # at the end of a run
SECONDS_TO_TERMINATE = 5.0  # before SIGKILL


class OnCheckpoint(Companion):
    """Runs the command. A file in the run folder has the step of the latest checkpoint whose command has ended."""

    name, seconds_of_a_look = "on_checkpoint", 0.1  # of a short run no checkpoint is passed over
    is_limited = False  # the command is (`_check_time`)

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        command = self.config["on_checkpoint"]
        self._words, self._shown = shlex.split(command), redact(command)
        self._running: subprocess.Popen | None = None
        self._began_at, self._is_late, self._path = 0.0, False, Path()
        self._file = self.folder / ".on_checkpoint.json"
        resumed = Path(plan["resume_from"])
        self._done = checkpoint.parse_step(resumed) if resumed.parent == self.checkpoints else -1
        if (note := read_json(self._file)) and "step" in note:  # by this attempt, or what an earlier one has left to do
            self._done = note["step"] if note["token"] == plan["token"] else min(note["step"], self._done)

    def look(self, state: str) -> bool:
        if self._running and (code := self._running.poll()) is not None:
            self._has_ended(f"ended with exit code {code}" if code else "")
        if self._running:
            self._check_time(state)
        path = self.latest() if self.has_begun() and not self._running else None
        if path and checkpoint.parse_step(path) > self._done:
            self._run(path)
        return self._running is None

    def _run(self, path: Path) -> None:
        self._path, self._began_at, self._is_late = path, time.monotonic(), False
        words = [word.replace("{}", str(path)) for word in self._words]
        words += [] if "{}" in " ".join(self._words) else [str(path)]
        try:
            self._running = subprocess.Popen(words, process_group=0)  # the session stays this program's
        except OSError as error:
            self._has_ended(f"cannot be run ({error.strerror})")

    def _has_ended(self, problem: str) -> None:
        self._running, self._done = None, checkpoint.parse_step(self._path)
        if problem:
            self.log.warning("on_checkpoint: %s %s; the checkpoint is valid", self._shown, problem)
        with suppress(OSError):
            replace_json(self._file, {"step": self._done, "token": self.plan["token"]}, is_flushed=False)

    def _check_time(self, state: str) -> None:
        """A long duration is a warning. At the end of a run the command's process group is ended."""
        age = time.monotonic() - self._began_at
        if age > SECONDS_OF_A_COMMAND and not self._is_late:
            self._is_late = True
            text = "on_checkpoint: the command has been running for %.0f min; later checkpoints wait for it"
            self.log.warning(text, age / 60)
        if state and age > (SECONDS_TO_FINISH_AFTER_STOP if state == "preempted" else SECONDS_TO_FINISH):
            text = "on_checkpoint: the command was ended after %.0f min, since the run is over; run it again for %s"
            self.log.warning(text, age / 60, self._path)
            self.leave()
            self._has_ended("")

    def leave(self) -> None:
        """End the command."""
        if command := self._running:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(command.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    command.wait(SECONDS_TO_TERMINATE)


if __name__ == "__main__":
    sys.exit(follow(OnCheckpoint(read_plan())))
