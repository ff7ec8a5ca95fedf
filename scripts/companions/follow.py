# extra: companions
"""What programs beside training share (docs/companions.md): their plan, what they see of the run, their end."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from utils.checkpoint import format as checkpoint
from utils.extras.companions.programs import EXIT_OTHER_OWNER
from utils.files import TEMPORARY_SUFFIX, read_json
from utils.logger import LOGGER_NAME, setup_logger
from utils.run.command_line import repair_standard_streams
from utils.settings.errors import StartError, UserError
from utils.signals import STOP_SIGNALS

NICENESS = 10
SECONDS_UNTIL_WARNING = 60.0  # of failing tries
MAX_SECONDS_BETWEEN_RETRIES = 60.0  # seconds between two tries
SECONDS_TO_STOP = 8.0
SECONDS_AFTER_END = 3600.0  # of a run, for the mirror and the tracker if hang_timeout is 0


class OtherOwnerError(Exception):
    """Another job owns the run."""


class Companion:
    """The run, as a program beside it sees it. A program defines `look`, and may define `leave`.

    Attributes:
        name: of the program, in messages and temporary files.
        has_time_limit: whether its time after the end of the run is limited, whatever it does.
        ended_at: when this program saw the end of the run.
        folder: of the run.
        checkpoints: the folder of its checkpoints.
        config: the settings of the run.
        plan: rank, host, token, launch_id and process (parent) of the rank that has started this program;
            resume_from: the checkpoint from which this attempt goes on; decision: of the mirror, at the start;
            apart: the ranks of each node that has a run folder of its own; beats: a pipe to the rank (`show_life`).
    """

    name, seconds_per_poll = "", 0.5
    has_time_limit = True

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.config = plan, plan["config"]
        self.ended_at = math.inf
        self.folder, self.checkpoints = Path(plan["folder"]), Path(plan["checkpoints"])
        self.log = logging.getLogger(LOGGER_NAME)

    def look(self, final_state: str) -> bool:
        """Handle what is new. Called again and again; an error is tried again.

        final_state: how the run has ended; empty while it lives.

        Returns:
            Whether nothing is left to do after an end.

        Raises:
            OtherOwnerError: the run must end.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Called in a thread of its own when the rank is gone or has failed; the process ends within eight seconds."""

    def show_life(self) -> None:
        """Tell the rank that this program makes progress. After the end of the run it waits as long as that is so.

        A program whose time is limited is silent after the end, so that it has the time limit for hangs. If there
        is none, it is silent after an hour.
        """
        heartbeat_pipe = self.plan.get("beats")
        if heartbeat_pipe is None:  # started by hand
            return
        with suppress(OSError):
            if self.has_time_limit and self.read_final_state():
                self.ended_at = min(self.ended_at, time.monotonic())
            seconds = 0.0 if self.config.get("hang_timeout") else SECONDS_AFTER_END
            if time.monotonic() < self.ended_at + seconds:
                # before the end of the run the rank does not read: the pipe gets full
                os.set_blocking(heartbeat_pipe, False)
                os.write(heartbeat_pipe, b".")

    def delete_copies(self) -> None:
        """Delete what a kill or an end has left of `temporary_copy`."""
        for copy_folder in self.checkpoints.glob(f"*.{self.name}{TEMPORARY_SUFFIX}"):
            shutil.rmtree(copy_folder, ignore_errors=True)

    def has_training_begun(self) -> bool:
        """Whether the run folder is at the step from which this attempt trains."""
        lock = read_json(self.folder / "lock.json")
        if lock.get("token", self.plan["token"]) != self.plan["token"]:
            raise OtherOwnerError
        return bool(lock.get("has_trained"))

    def read_final_state(self) -> str:
        """How this attempt has ended in order; empty while it lives, and in the lock of another attempt."""
        lock = read_json(self.folder / "lock.json")
        return lock.get("ended", "") if lock.get("token") == self.plan["token"] else ""

    def find_latest_checkpoint(self) -> Path | None:
        """The latest checkpoint."""
        return next(reversed(checkpoint.list_step_checkpoints(self.checkpoints)), None)

    @contextmanager
    def temporary_copy(self, path: Path) -> Iterator[Path]:
        """A copy of a checkpoint by hard links, which training does not delete; a real copy on storage without links.

        Raises:
            OSError: if the checkpoint is gone, or there is no room for a copy.
        """
        self.delete_copies()
        copy_folder = self.checkpoints / f"{path.name}.{self.name}{TEMPORARY_SUFFIX}"
        copy_folder.mkdir()
        try:
            for file in [*path.iterdir()] if path.is_dir() else [path]:
                link_or_copy(file, copy_folder / file.name)
            yield copy_folder if path.is_dir() else copy_folder / path.name
        finally:
            self.delete_copies()


def link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # storage without links
        if shutil.disk_usage(target.parent).free < 2 * file.stat().st_size:
            raise
        shutil.copyfile(file, target)


class RecordReader:
    """The records of a growing file of JSON lines. A file that a resume has cut is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._last_line = path, 0, b""

    def read_new(self) -> list[dict[str, Any]]:
        """The records since the last call, without a line that is being written."""
        records: list[dict[str, Any]] = []
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                file.seek(0)
                self._offset, self._last_line = 0, b""
            for line in file:
                if line.endswith(b"\n"):
                    self._offset, self._last_line = self._offset + len(line), line
                    with suppress(ValueError):
                        records.append(json.loads(line))
        return records


def stop_with_rank(plan: dict[str, Any], stop: Callable[[], object]) -> None:
    """In a thread: end this process when its rank is gone, or asks for it after a failure. stop: called before that,
    for a limited time."""
    is_asked = threading.Event()
    signal.signal(signal.SIGUSR2, lambda *_: is_asked.set())

    def wait_for_rank() -> None:
        while os.getppid() == plan["parent"] and not is_asked.wait(0.5):
            pass
        stop_thread = threading.Thread(target=stop, daemon=True)
        stop_thread.start()
        stop_thread.join(SECONDS_TO_STOP)
        os._exit(0)

    threading.Thread(target=wait_for_rank, daemon=True).start()


def answer_rank(action: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Act before the run starts, and print the result, or the problem with which the run is rejected (exit code 2)."""
    out = os.dup(1)
    os.dup2(2, 1)  # log lines must not get into the answer
    plan = read_plan()
    setup_logger(0)
    stop_with_rank(plan, lambda: None)
    try:
        result = action(plan)
    except UserError as error:
        result = {"problem": str(error), "is_transient": isinstance(error, StartError)}
    os.write(out, json.dumps(result).encode())
    sys.exit(2 if "problem" in result else 0)


def read_plan() -> dict[str, Any]:
    """The plan that the rank gives to this program. From now on stop signals are ignored: they are for training."""
    repair_standard_streams()
    if sys.stdin.isatty():
        print("Do not start this program by hand: train.py starts it (docs/companions.md).", file=sys.stderr)
        sys.exit(2)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which commands would inherit
    with suppress(OSError):
        os.nice(NICENESS)
    return json.load(sys.stdin)


def follow_run(companion: Companion) -> int:
    """Look again and again until the run has ended and nothing is left to do. Returns the exit code."""
    setup_logger(companion.plan["rank"], companion.folder / "logs" / f"rank{companion.plan['rank']}.log")
    companion.delete_copies()

    def stop() -> None:
        companion.delete_copies()
        companion.leave()

    stop_with_rank(companion.plan, stop)
    failing_since, pause, is_warned = 0.0, companion.seconds_per_poll, False
    while True:
        state = companion.read_final_state()  # before the look, which then sees all that was written until the end
        try:
            if companion.look(state) and state:
                return 0
            failing_since, pause, is_warned = 0.0, companion.seconds_per_poll, False
        except OtherOwnerError:
            return EXIT_OTHER_OWNER
        except (UserError, OSError) as error:
            failing_since = failing_since or time.monotonic()
            failing, pause = time.monotonic() - failing_since, min(2 * pause, MAX_SECONDS_BETWEEN_RETRIES)
            if failing > SECONDS_UNTIL_WARNING and not is_warned:
                is_warned, text = True, "The tries of --%s have failed for %.0f s, and training continues: %s"
                companion.log.warning(text, companion.name, failing, error)
        ends = time.monotonic() + pause
        while time.monotonic() < ends and companion.read_final_state() == state:  # at the end of the run the rank waits
            if not failing_since:
                companion.show_life()
            time.sleep(min(pause, 0.5))
