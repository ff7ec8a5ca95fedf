# extra: companions
"""Run the user's command after each checkpoint (`--on_checkpoint`).

One command runs at a time. If several checkpoints wait, the command runs for the latest one only.
"""

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

from scripts.companions.follow import Companion, follow_run, read_plan
from utils.checkpoint import format as checkpoint
from utils.files import read_json, replace_json
from utils.redact import redact_secrets

SECONDS_UNTIL_WARNING = 300.0  # a warning follows if a command takes longer
SECONDS_TO_FINISH, SECONDS_TO_FINISH_AFTER_STOP = 3600.0, 600.0  # a command has this time after the end of the run
SECONDS_TO_TERMINATE = 5.0  # between SIGTERM and SIGKILL


class CheckpointCommand(Companion):
    """Runs the command. A file in the run folder holds the step of the latest checkpoint whose command has ended."""

    name, seconds_per_poll = "on_checkpoint", 0.1  # so often that no checkpoint of a short run is missed
    has_time_limit = False  # the command has one (`_enforce_time_limit`)

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        command = self.config["on_checkpoint"]
        self._argv, self._redacted_command = shlex.split(command), redact_secrets(command)
        self._process: subprocess.Popen | None = None
        self._started_at, self._is_warned, self._checkpoint_path = 0.0, False, Path()
        self._progress_file = self.folder / ".on_checkpoint.json"
        resumed = Path(plan["resume_from"])
        self._done_step = checkpoint.parse_step(resumed) if resumed.parent == self.checkpoints else -1
        if (note := read_json(self._progress_file)) and "step" in note:  # this attempt or an earlier one has written it
            self._done_step = note["step"] if note["token"] == plan["token"] else min(note["step"], self._done_step)

    def look(self, final_state: str) -> bool:
        if self._process and (code := self._process.poll()) is not None:
            self._finish_command(f"ended with exit code {code}" if code else "")
        if self._process:
            self._enforce_time_limit(final_state)
        path = self.find_latest_checkpoint() if self.has_training_begun() and not self._process else None
        if path and checkpoint.parse_step(path) > self._done_step:
            self._run_command(path)
        return self._process is None

    def _run_command(self, path: Path) -> None:
        self._checkpoint_path, self._started_at, self._is_warned = path, time.monotonic(), False
        words = [word.replace("{}", str(path)) for word in self._argv]
        words += [] if "{}" in " ".join(self._argv) else [str(path)]
        try:
            self._process = subprocess.Popen(words, process_group=0)  # a group of its own, in this program's session
        except OSError as error:
            self._finish_command(f"cannot be run ({error.strerror})")

    def _finish_command(self, problem: str) -> None:
        self._process, self._done_step = None, checkpoint.parse_step(self._checkpoint_path)
        if problem:
            text = "The command of --on_checkpoint (%s) %s. The checkpoint is valid."
            self.log.warning(text, self._redacted_command, problem)
        with suppress(OSError):
            replace_json(self._progress_file, {"step": self._done_step, "token": self.plan["token"]}, fsync=False)

    def _enforce_time_limit(self, final_state: str) -> None:
        """Warn of a command that takes long. After the end of the run, end its process group when its time is up."""
        age = time.monotonic() - self._started_at
        if age > SECONDS_UNTIL_WARNING and not self._is_warned:
            self._is_warned = True
            text = "The command of --on_checkpoint has been running for %.0f min. Later checkpoints wait until it ends."
            self.log.warning(text, age / 60)
        if final_state and age > (SECONDS_TO_FINISH_AFTER_STOP if final_state == "preempted" else SECONDS_TO_FINISH):
            text = "The command of --on_checkpoint was ended after %.0f min, since the run is over."
            text += " Run the command again for %s."
            self.log.warning(text, age / 60, self._checkpoint_path)
            self.leave()
            self._finish_command("")

    def leave(self) -> None:
        """End the command and the processes that it has started."""
        if command := self._process:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(command.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    command.wait(SECONDS_TO_TERMINATE)


if __name__ == "__main__":
    sys.exit(follow_run(CheckpointCommand(read_plan())))
