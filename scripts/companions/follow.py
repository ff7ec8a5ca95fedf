# extra: companions
"""What the programs beside training have in common (docs/companions.md).

They read a plan from the rank that starts them, look at the run again and again, and end with it.
"""

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
SECONDS_UNTIL_WARNING = 60.0  # a warning follows if tries have failed for this time
MAX_SECONDS_BETWEEN_RETRIES = 60.0
SECONDS_TO_STOP = 8.0
SECONDS_AFTER_END = 3600.0  # the mirror and the tracker have this time after a run whose hang_timeout is 0


class OtherOwnerError(Exception):
    """Another job owns the run now."""


class Companion:
    """The run as a program beside it sees it. Each program defines `look`, and may define `leave`.

    Attributes:
        name: the name of the program in messages and temporary files.
        has_time_limit: whether the program has a limited time after the end of the run, whatever it does.
        ended_at: when this program saw the end of the run.
        folder: the run folder.
        checkpoints: the folder of the run's checkpoints.
        config: the settings of the run.
        plan: what the rank that starts this program tells it. The keys rank, host, token, launch_id and parent (its
            process) describe that rank. Under resume_from is the checkpoint from which this attempt continues. Under
            decision is what the mirror decided at the start. Under apart are the ranks of each node that has a run
            folder of its own. Under beats is a pipe to the rank (see `show_life`).
    """

    name, seconds_per_poll = "", 0.5
    has_time_limit = True

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.config = plan, plan["config"]
        self.ended_at = math.inf
        self.folder, self.checkpoints = Path(plan["folder"]), Path(plan["checkpoints"])
        self.log = logging.getLogger(LOGGER_NAME)

    def look(self, final_state: str) -> bool:
        """Handle what is new in the run. It is called again and again, and once more after an error.

        Args:
            final_state: how the run has ended (empty while it lives).

        Returns:
            Whether the run has ended and nothing is left to do.

        Raises:
            OtherOwnerError: if another job owns the run, so that this one must end.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Clean up when the rank is gone or has failed.

        It is called in a thread of its own. The process ends within eight seconds.
        """

    def show_life(self) -> None:
        """Tell the rank that this program makes progress.

        After the end of the run, the rank waits for as long as the program does so. A program whose time is limited is
        silent after the end, so that the time limit for hangs applies to it. If there is no such limit, it is silent
        after an hour.
        """
        heartbeat_pipe = self.plan.get("beats")
        if heartbeat_pipe is None:  # this program was started by hand
            return
        with suppress(OSError):
            if self.has_time_limit and self.read_final_state():
                self.ended_at = min(self.ended_at, time.monotonic())
            seconds = 0.0 if self.config.get("hang_timeout") else SECONDS_AFTER_END
            if time.monotonic() < self.ended_at + seconds:
                # the rank does not read before the end of the run, so that the pipe gets full
                os.set_blocking(heartbeat_pipe, False)
                os.write(heartbeat_pipe, b".")

    def delete_copies(self) -> None:
        """Delete the copies that `temporary_copy` has left because its process was killed or has ended."""
        for copy_folder in self.checkpoints.glob(f"*.{self.name}{TEMPORARY_SUFFIX}"):
            shutil.rmtree(copy_folder, ignore_errors=True)

    def has_training_begun(self) -> bool:
        """Return whether the run folder is at the step from which this attempt trains."""
        lock = read_json(self.folder / "lock.json")
        if lock.get("token", self.plan["token"]) != self.plan["token"]:
            raise OtherOwnerError
        return bool(lock.get("has_trained"))

    def read_final_state(self) -> str:
        """Return the state in which this attempt has ended in order.

        It is empty while the attempt lives, and if the lock is that of another attempt.
        """
        lock = read_json(self.folder / "lock.json")
        return lock.get("ended", "") if lock.get("token") == self.plan["token"] else ""

    def find_latest_checkpoint(self) -> Path | None:
        """Return the latest checkpoint, or None if there is none yet."""
        return next(reversed(checkpoint.list_step_checkpoints(self.checkpoints)), None)

    @contextmanager
    def temporary_copy(self, path: Path) -> Iterator[Path]:
        """Copy a checkpoint for a while, so that training cannot delete it.

        The copy consists of hard links. On storage without links it is a real copy.

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
    except OSError:  # this storage has no links
        if shutil.disk_usage(target.parent).free < 2 * file.stat().st_size:
            raise
        shutil.copyfile(file, target)


class RecordReader:
    """Reads the records of a growing file of JSON lines. A file that a resume has cut is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._last_line = path, 0, b""

    def read_new(self) -> list[dict[str, Any]]:
        """Return the records since the last call, without a line that is still being written."""
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
    """Start a thread that ends this process when its rank is gone, or asks for it after a failure.

    Args:
        plan: the plan of the program (see `Companion`).
        stop: called before the process ends, for a limited time.
    """
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
    """Act before the run starts, and print the result. A problem with which the run is rejected gives exit code 2."""
    out = os.dup(1)
    os.dup2(2, 1)  # standard output is for the answer only, so that log lines go to standard error
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
    """Return the plan that the rank gives to this program, and ignore stop signals from now on.

    Those signals are for training, after whose end this program ends.
    """
    repair_standard_streams()
    if sys.stdin.isatty():
        print("Do not start this program by hand: train.py starts it (docs/companions.md).", file=sys.stderr)
        sys.exit(2)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # commands would inherit SIG_IGN
    with suppress(OSError):
        os.nice(NICENESS)
    return json.load(sys.stdin)


def follow_run(companion: Companion) -> int:
    """Call `look` until the run has ended and nothing is left to do. Return the exit code of the program."""
    setup_logger(companion.plan["rank"], companion.folder / "logs" / f"rank{companion.plan['rank']}.log")
    companion.delete_copies()

    def stop() -> None:
        companion.delete_copies()
        companion.leave()

    stop_with_rank(companion.plan, stop)
    failing_since, pause, is_warned = 0.0, companion.seconds_per_poll, False
    while True:
        state = companion.read_final_state()  # read first, so that the look sees all that was written until the end
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
