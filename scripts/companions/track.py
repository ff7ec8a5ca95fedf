# extra: companions
"""`--track`: sends the settings, the records and the summary of a run to a tracker (docs/recipes/trackers.md).

track.py RUN              follows the run
track.py RUN [TRACKER]    by hand: sends what the tracker lacks
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import stat
import sys
import time
import uuid
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from scripts.companions.follow import Companion, Lines, follow, read_plan
from scripts.companions.trackers import TRACKERS, Tracker
from utils.files import read_json, replace_json
from utils.redact import redact
from utils.settings.errors import UserError

SECONDS_BETWEEN_LOOKS, SECONDS_AFTER_REJECTION, SECONDS_TO_GET_A_PLAN = 2.0, 60.0, 10.0
ROWS = 200  # sent at once
PROJECT = ROOT.name
REJECTIONS = ("UsageError", "AuthenticationError", "LocalTokenNotFoundError")  # names of errors
NOTE = "track.json"  # the run in the tracker, and the last step sent


def name_of(text: str) -> str:
    """The name with what MLflow rejects replaced."""
    return re.sub(r"[^\w/. -]", "_", text)


def numbers(group: str, values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record as `GROUP/NAME`. The step is the last one: a tracker that has it has all others."""
    scalars: dict[str, float] = {}
    for name, value in sorted(values.items(), key=lambda item: item[0] == "step"):
        key = name_of(f"{group}/{name}")
        if isinstance(value, dict):
            scalars |= numbers(key, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            scalars[key] = value
    return scalars


class Track(Companion):
    """Sends each record once: those of a step that the tracker has are left out, also if a resumed run writes them."""

    name = "track"

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        (self.folder / "logs").mkdir(exist_ok=True)
        self._kind = self.config["track"]
        self._class = TRACKERS[self._kind]
        self._note = read_json(self.folder / NOTE)
        if self._note.get("tracker") != self._kind:
            project = os.environ.get(self._class.variable) or PROJECT
            self._note = {"tracker": self._kind, "project": project, "id": uuid.uuid4().hex, "sent": {}, "end": ""}
        self._tracker: Tracker | None = None
        self._output = (self.folder / "logs/track.log").open("a", buffering=1)
        self._lock = (self.folder / ".track.lock").open("w")
        self._lines, self._next_look, self._is_warned = Lines(self.folder / "metrics.jsonl"), 0.0, False

    def look(self, state: str) -> bool:
        if (time.monotonic() < self._next_look and not state) or not self.has_begun():
            return False
        self._next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
        sys.stdout = sys.stderr = self._output  # what the packages print
        try:
            self.send(state)
            return True
        except UserError as error:
            problem = error
        self._next_look = time.monotonic() + SECONDS_AFTER_REJECTION
        if not self._is_warned:
            self._is_warned = True
            self.log.warning("%s; training continues", problem)
        return bool(state)

    def send(self, state: str) -> None:
        """Send what is new.

        Raises:
            OSError: another try may succeed.
            UserError: the tracker or its package rejects the run.
        """
        try:
            tracker = self._tracker or self._open()
            records = [record for record in self._lines.new() if record["kind"] in ("train", "eval")]
            for at in range(0, len(records), ROWS):
                self._send(tracker, records[at : at + ROWS])
                self.show_life()
            if state:
                self._close(tracker, state)
        except Exception as error:  # whatever a package raises
            self._tracker = None
            status = getattr(error, "get_http_status_code", int)()
            is_final = isinstance(error, ImportError | ValueError) or type(error).__name__ in REJECTIONS
            first = [*str(error).strip().splitlines(), type(error).__name__][0].rstrip(".")
            first = first if len(first) < 300 else f"{first[:140]} ... {first[-140:]}"  # the cause is at the end
            text = redact(f"track={self._kind}: {first}")
            if isinstance(error, UserError):
                raise UserError(f"{text}; wait until it has ended") from None
            if is_final or (400 <= status < 500 and status not in (408, 429)):
                missing = f"pip install {self._kind}" if isinstance(error, ImportError) else self._class.remedy
                raise UserError(f"{text}; {missing}") from error
            raise OSError(text) from error

    def _open(self) -> Tracker:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two would send each record twice
        except BlockingIOError:
            raise UserError(f"another track.py sends {self.folder}") from None
        except OSError:  # storage without locks
            pass
        note, settings = self._note, read_json(self.folder / "config.json")  # without secrets
        replace_json(self.folder / NOTE, note)  # first: a kill may follow, and the next try finds the run
        self._tracker = self._class(note["id"], note["project"], settings, self.folder)
        note["sent"] = self._tracker.open(note["sent"])
        note["id"] = self._tracker.id
        replace_json(self.folder / NOTE, note)
        self._lines = Lines(self.folder / "metrics.jsonl")
        return self._tracker

    def _send(self, tracker: Tracker, records: list[dict[str, Any]]) -> None:
        rows, sent = [], dict(self._note["sent"])
        for record in records:
            group = name_of(record.get("split", "train") + ("_ema" if record.get("weights") == "ema" else ""))
            if record["step"] > sent.get(group, -1):
                sent[group] = record["step"]
                rows.append((record["step"], numbers(group, record)))
        if rows:
            tracker.send(rows)
            self._note["sent"] = sent
            replace_json(self.folder / NOTE, self._note, is_flushed=False)

    def _close(self, tracker: Tracker, state: str) -> None:
        """A run that has failed has no summary, and one is sent once."""
        summary = read_json(self.folder / "summary.json") if state in ("completed", "preempted") else {}
        end = f"{state} {summary.get('steps')}"
        is_new = self._note["end"] != end
        tracker.close(state, summary.get("steps", 0), numbers("summary", summary) if is_new else {})
        self._tracker, self._note["end"] = None, end
        replace_json(self.folder / NOTE, self._note)

    def leave(self) -> None:
        self._next_look, tracker = float("inf"), self._tracker
        with suppress(Exception):
            if tracker:
                tracker.close(self.state() or "failed", 0, {})


def is_by_hand() -> bool:
    """Whether no rank has started this program: a rank sends the plan through a pipe at once."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return True
    return not (select.select([0], [], [], SECONDS_TO_GET_A_PLAN)[0] and cast(BufferedReader, sys.stdin.buffer).peek(1))


def catch_up(folder: Path, *words: str) -> int:
    """By hand: send what the tracker lacks of a run that has ended. Returns the exit code."""
    files = (read_json(folder / name) for name in ("config.json", "status.json", NOTE))
    config, status, note = files
    name = [*words, note.get("tracker") or config.get("track", "")][0]
    if name not in TRACKERS or not config:
        missing = f"run_dir={folder}: holds no run; give" if not config else f"track={name}: is not a tracker; choose"
        print(f"{missing} track.py RUN {'|'.join(TRACKERS)}", file=sys.stderr)
        return 2
    plan = {"config": config | {"track": name}, "folder": folder.absolute(), "checkpoints": folder / "checkpoints"}
    track = Track(plan)
    try:
        track.send(status.get("state", "failed"))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    print(f"track={name}: has all records of {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(catch_up(Path(sys.argv[1]), *sys.argv[2:]) if is_by_hand() else follow(Track(read_plan())))
