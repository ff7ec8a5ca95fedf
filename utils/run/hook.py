"""`on_checkpoint`: the user's command after each checkpoint."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from utils.redact import redacted

SECONDS_OF_A_LOOK = 0.5
SECONDS_OF_A_COMMAND = 300.0  # before a warning
SECONDS_TO_FINISH, SECONDS_TO_FINISH_AFTER_STOP = 3600.0, 600.0  # at the end of a run
SECONDS_TO_TERMINATE = 5.0  # before SIGKILL


class Hook:
    """`on_checkpoint`: the user's command after a commit; one at a time; of those waiting, only the latest."""

    def __init__(self, command: str, warn: Callable[[str], None]) -> None:
        self._words, self._shown, self._warn = shlex.split(command), redacted(command), warn
        self._running: subprocess.Popen | None = None
        self._began_at, self._is_late, self._path = 0.0, False, Path()
        self._waiting: Path | None = None

    def run(self, path: Path) -> None:
        """Start it for this checkpoint, now or as soon as the previous one has ended."""
        if self._words:
            self._waiting = path
            self.look()

    def look(self) -> None:
        """Check whether it has ended, and start the one that waits. A failure or a long duration is a warning."""
        if self._running and (code := self._running.poll()) is not None:
            self._running = None
            if code:
                self._warn(f"on_checkpoint: {self._shown} ended with exit code {code}; the checkpoint is valid")
        if self._running and not self._is_late and self._age() > SECONDS_OF_A_COMMAND:
            self._is_late = True
            minutes = f"{self._age() / 60:.0f} min"
            self._warn(f"on_checkpoint: the command has been running for {minutes}; later checkpoints wait for it")
        if self._waiting and not self._running:
            self._began_at, self._is_late = time.monotonic(), False
            path = self._path = self._waiting
            self._waiting = None
            words = [word.replace("{}", str(path)) for word in self._words]
            words += [] if "{}" in " ".join(self._words) else [str(path)]
            try:
                self._running = subprocess.Popen(words, start_new_session=True)
            except OSError as error:
                self._warn(f"on_checkpoint: {self._shown} cannot be run ({error.strerror}); the checkpoint is valid")

    def _age(self) -> float:
        return time.monotonic() - self._began_at

    def end_if_late(self, has_stopped: bool) -> None:
        """At the end of a run: end the command's process group if it has been running for too long."""
        most = SECONDS_TO_FINISH_AFTER_STOP if has_stopped else SECONDS_TO_FINISH
        if self._running and self._age() > most:
            what = f"was ended after {self._age() / 60:.0f} min, since the run is over; run it again for {self._path}"
            self._warn(f"on_checkpoint: the command {what}")
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(self._running.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._running.wait(SECONDS_TO_TERMINATE)
            self._running = None

    def is_running(self) -> bool:
        """Whether one is running or waiting."""
        self.look()
        return self._running is not None
