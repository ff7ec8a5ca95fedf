"""Starts the programs beside training (docs/companions.md), again if they die, and waits for them at the end."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from config import TrainingConfig
from utils.distributed.context import DistributedContext
from utils.extras.companions.programs import EXIT_OTHER_OWNER, kill_session, start_program
from utils.logger import LOGGER_NAME
from utils.redact import redact_secrets
from utils.settings.errors import TrainingError

SECONDS_PER_POLL = 0.1
MAX_SECONDS_BEFORE_RESTART = 60.0  # before a program that dies again and again is restarted
SECONDS_TO_STOP = 10.0
SECONDS_AFTER_RANK_0 = 5.0  # for programs beside other ranks to end
SECONDS_WITHOUT_HEARTBEAT = 60.0  # at the end of a run, if hang_timeout is 0
SECONDS_BEFORE_NOTICE = 3.0  # of waiting there, before a line about it


class Companions:
    """The companions of a process, each kept alive by a thread.

    plan: what all of them know (`create_companion_plan`).
    """

    def __init__(self, config: TrainingConfig, plan: dict[str, Any], ctx: DistributedContext) -> None:
        settings = {"mirror": config.mirror}
        if ctx.is_main:
            settings |= {"track": config.track.replace("none", ""), "on_checkpoint": config.on_checkpoint}
        self._titles = {name: redact_secrets(f"--{name} {value}") for name, value in settings.items() if value}
        self._plan, self._logger = plan, logging.getLogger(LOGGER_NAME)
        self._max_silence_s = SECONDS_AFTER_RANK_0  # without a sign of life, after which a program is ended
        if ctx.is_main:
            self._max_silence_s = SECONDS_WITHOUT_HEARTBEAT
            self._max_silence_s = config.hang_timeout or SECONDS_WITHOUT_HEARTBEAT  # extra: watch
        self._takeover_error, self._is_closed = "", threading.Event()
        self._processes: dict[str, subprocess.Popen] = {}
        self._heartbeat_pipes = {name: Pipe(duplex=False) for name in self._titles}  # a program's signs of life
        self._threads = {
            name: threading.Thread(target=self._keep_running, args=(name,), daemon=True) for name in self._titles
        }
        for thread in self._threads.values():
            thread.start()

    def _keep_running(self, name: str) -> None:
        title, pause = self._titles[name], 1.0
        file = Path(self._plan["folder"], f".{name}-{self._plan['rank']}.pid")
        with suppress(OSError, ValueError):  # that of the attempt before
            pid = int(file.read_text())
            if f"{name}.py\0{self._plan['folder']}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                kill_session(pid)
        while not self._is_closed.is_set():
            code = -1
            with suppress(OSError):  # no memory, or no process more
                write_end = self._heartbeat_pipes[name][1].fileno()
                process = start_program(name, self._plan | {"beats": write_end}, pass_fds=[write_end])
                self._processes[name] = process
                with suppress(OSError):  # a full disk
                    file.write_text(str(process.pid))
                code = process.wait()
                kill_session(process.pid)  # what it had started
            if code == EXIT_OTHER_OWNER:
                self._takeover_error = f"Another job has taken over this run, as {title} shows. End this job."
            if code in (0, EXIT_OTHER_OWNER):
                return
            if not self._is_closed.is_set():
                text = "The program of %s ended with exit code %d. It is started again in %.0f s."
                self._logger.warning(text, title, code, pause)
            self._is_closed.wait(pause)
            pause = min(2 * pause, MAX_SECONDS_BEFORE_RESTART)

    def _list_alive(self) -> list[str]:
        return [name for name, thread in self._threads.items() if thread.is_alive()]

    def poll(self) -> None:
        """Raises TrainingError if another job owns the run."""
        if self._takeover_error:
            raise TrainingError(self._takeover_error)

    def finish(self, on_progress: Callable[[], object]) -> None:
        """Wait until they have done what is left after the end that lock.json holds, then end them.

        on_progress: called meanwhile.
        """
        seconds = self._max_silence_s
        began = time.monotonic()
        deadlines = dict.fromkeys(self._titles, began + seconds)
        notice_at = began + SECONDS_BEFORE_NOTICE
        first_processes = dict(self._processes)  # one that dies and is started again gets no more time
        while waiting := [name for name in self._list_alive() if time.monotonic() < deadlines[name]]:
            on_progress()
            self.poll()
            time.sleep(SECONDS_PER_POLL)
            if time.monotonic() > notice_at:
                notice_at = math.inf
                text = (
                    "The run waits for %s. A program that gives no sign of life for %.0f s is ended. A command that"
                    " runs is ended an hour after its start, or ten minutes after its start if the run was stopped."
                )
                self._logger.info(text, " and ".join(f"--{name}" for name in waiting), seconds)
            for name in waiting:
                heartbeat_pipe = self._heartbeat_pipes[name][0]
                if heartbeat_pipe.poll():
                    os.read(heartbeat_pipe.fileno(), 65536)
                    if self._processes.get(name) is first_processes.get(name):
                        deadlines[name] = time.monotonic() + seconds
        for name in self._list_alive():
            text = "The program of %s lacks the latest checkpoint or records after %.0f s and is ended."
            text += " The run folder %s has them."
            self._logger.warning(text, self._titles[name], time.monotonic() - began, self._plan["folder"])
        self.poll()
        self.stop(on_progress)

    def stop(self, on_progress: Callable[[], object] = lambda: None) -> None:
        """End them within ten seconds. The mirror may still write that the run has failed."""
        self._is_closed.set()
        ends = time.monotonic() + SECONDS_TO_STOP
        while self._list_alive() and (left := ends - time.monotonic()) > -1:
            for process in list(self._processes.values()):
                process.send_signal(signal.SIGUSR2 if left > 0 else signal.SIGKILL)
            on_progress()
            time.sleep(SECONDS_PER_POLL)
