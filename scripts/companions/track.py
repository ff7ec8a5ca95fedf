# extra: companions
"""Send the settings, the records and the summary of a run to a tracker (`--track`, docs/recipes/trackers.md).

track.py RUN              follows the run
track.py RUN [TRACKER]    sends what the tracker lacks, if it is started by hand
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

from scripts.companions.follow import Companion, RecordReader, follow_run, read_plan
from scripts.companions.trackers import TRACKERS, Tracker
from utils.files import read_json, replace_json
from utils.redact import redact_secrets
from utils.settings.errors import UserError

SECONDS_BETWEEN_POLLS, SECONDS_AFTER_REJECTION, SECONDS_TO_GET_PLAN = 2.0, 60.0, 10.0
ROWS_PER_REQUEST = 200
DEFAULT_PROJECT = ROOT.name
REJECTION_ERRORS = ("UsageError", "AuthenticationError", "LocalTokenNotFoundError")  # names of exceptions
STATE_FILE = "track.json"  # this file holds the run in the tracker, and the last step that was sent


def sanitize_name(text: str) -> str:
    """Return the name without the characters that MLflow rejects."""
    return re.sub(r"[^\w/. -]", "_", text)


def flatten_numbers(group: str, values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by `GROUP/NAME`.

    The step is the last one, so that a tracker that has the step has all other numbers too.
    """
    scalars: dict[str, float] = {}
    for name, value in sorted(values.items(), key=lambda item: item[0] == "step"):
        key = sanitize_name(f"{group}/{name}")
        if isinstance(value, dict):
            scalars |= flatten_numbers(key, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            scalars[key] = value
    return scalars


class TrackCompanion(Companion):
    """Sends each record once. Those of a step that the tracker has are left out, even if a resumed run writes them."""

    name = "track"

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        (self.folder / "logs").mkdir(exist_ok=True)
        self._tracker_name = self.config["track"]
        self._tracker_class = TRACKERS[self._tracker_name]
        self._tracker_state = read_json(self.folder / STATE_FILE)
        if self._tracker_state.get("tracker") != self._tracker_name:
            project = os.environ.get(self._tracker_class.project_variable) or DEFAULT_PROJECT
            self._tracker_state = {
                "tracker": self._tracker_name,
                "project": project,
                "id": uuid.uuid4().hex,
                "sent": {},
                "end": "",
            }
        self._tracker: Tracker | None = None
        self._log_file = (self.folder / "logs/track.log").open("a", buffering=1)
        self._lock_file = (self.folder / ".track.lock").open("w")
        self._record_reader = RecordReader(self.folder / "metrics.jsonl")
        self._next_poll_at = 0.0
        self._is_warned = False

    def look(self, final_state: str) -> bool:
        if (time.monotonic() < self._next_poll_at and not final_state) or not self.has_training_begun():
            return False
        self._next_poll_at = time.monotonic() + SECONDS_BETWEEN_POLLS
        sys.stdout = sys.stderr = self._log_file  # the trackers' packages print a lot
        try:
            self.send_new(final_state)
            return True
        except UserError as error:
            problem = error
        self._next_poll_at = time.monotonic() + SECONDS_AFTER_REJECTION
        if not self._is_warned:
            self._is_warned = True
            self.log.warning("%s Training continues.", problem)
        return bool(final_state)

    def send_new(self, final_state: str) -> None:
        """Send the records that are new, and after the end of the run the summary.

        Args:
            final_state: how the run has ended (empty while it lives).

        Raises:
            OSError: if another try may succeed.
            UserError: if the tracker or its package rejects the run.
        """
        try:
            tracker = self._tracker or self._open_tracker()
            records = [record for record in self._record_reader.read_new() if record["kind"] in ("train", "eval")]
            for at in range(0, len(records), ROWS_PER_REQUEST):
                self._send_records(tracker, records[at : at + ROWS_PER_REQUEST])
                self.show_life()
            if final_state:
                self._close_tracker(tracker, final_state)
        except Exception as error:  # each package has exceptions of its own
            self._tracker = None
            status = getattr(error, "get_http_status_code", int)()
            is_final = isinstance(error, ImportError | ValueError) or type(error).__name__ in REJECTION_ERRORS
            first = [*str(error).strip().splitlines(), type(error).__name__][0].rstrip(".")
            first = first if len(first) < 300 else f"{first[:140]} ... {first[-140:]}"  # the cause is at the end
            text = redact_secrets(f"--track {self._tracker_name} cannot send records ({first}).")
            if isinstance(error, UserError):
                raise UserError(f"{text} Wait until that program has ended.") from None
            if is_final or (400 <= status < 500 and status not in (408, 429)):
                remedy = self._tracker_class.remedy
                if isinstance(error, ImportError):
                    remedy = f"Run pip install {self._tracker_name}."
                raise UserError(f"{text} {remedy}") from error
            raise OSError(text) from error

    def _open_tracker(self) -> Tracker:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two programs would send each record twice
        except BlockingIOError:
            raise UserError(f"another track.py sends the records of {self.folder}") from None
        except OSError:  # this storage has no locks
            pass
        tracker_state, settings = self._tracker_state, read_json(self.folder / "config.json")  # it holds no secrets
        # written first, because a kill may follow and the next try has to find the run
        replace_json(self.folder / STATE_FILE, tracker_state)
        self._tracker = self._tracker_class(tracker_state["id"], tracker_state["project"], settings, self.folder)
        tracker_state["sent"] = self._tracker.open(tracker_state["sent"])
        tracker_state["id"] = self._tracker.id
        replace_json(self.folder / STATE_FILE, tracker_state)
        self._record_reader = RecordReader(self.folder / "metrics.jsonl")
        return self._tracker

    def _send_records(self, tracker: Tracker, records: list[dict[str, Any]]) -> None:
        rows, sent = [], dict(self._tracker_state["sent"])
        for record in records:
            group = sanitize_name(record.get("split", "train") + ("_ema" if record.get("weights") == "ema" else ""))
            if record["step"] > sent.get(group, -1):
                sent[group] = record["step"]
                rows.append((record["step"], flatten_numbers(group, record)))
        if rows:
            tracker.send(rows)
            self._tracker_state["sent"] = sent
            replace_json(self.folder / STATE_FILE, self._tracker_state, fsync=False)

    def _close_tracker(self, tracker: Tracker, final_state: str) -> None:
        """Send the summary, once and only for a run that has not failed, and close the tracker."""
        summary = read_json(self.folder / "summary.json") if final_state in ("completed", "preempted") else {}
        end = f"{final_state} {summary.get('steps')}"
        is_new = self._tracker_state["end"] != end
        tracker.close(final_state, summary.get("steps", 0), flatten_numbers("summary", summary) if is_new else {})
        self._tracker, self._tracker_state["end"] = None, end
        replace_json(self.folder / STATE_FILE, self._tracker_state)

    def leave(self) -> None:
        self._next_poll_at, tracker = float("inf"), self._tracker
        with suppress(Exception):
            if tracker:
                tracker.close(self.read_final_state() or "failed", 0, {})


def is_started_by_hand() -> bool:
    """Return whether a user has started this program. A rank would send the plan through a pipe at once."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return True
    return not (select.select([0], [], [], SECONDS_TO_GET_PLAN)[0] and cast(BufferedReader, sys.stdin.buffer).peek(1))


def send_ended_run(folder: Path, *argv: str) -> int:
    """Send what the tracker lacks of a run that has ended, and return the exit code of the program."""
    files = (read_json(folder / name) for name in ("config.json", "status.json", STATE_FILE))
    config, status, tracker_state = files
    name = [*argv, tracker_state.get("tracker") or config.get("track", "")][0]
    if name not in TRACKERS or not config:
        usage = f"track.py RUN {'|'.join(TRACKERS)}"
        if not config:
            print(f"{folder} holds no run. Give the folder of a run: {usage}", file=sys.stderr)
        else:
            print(f"The tracker must be one of {', '.join(TRACKERS)}, got {name}: {usage}", file=sys.stderr)
        return 2
    plan = {"config": config | {"track": name}, "folder": folder.absolute(), "checkpoints": folder / "checkpoints"}
    track = TrackCompanion(plan)
    try:
        track.send_new(status.get("state", "failed"))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    print(f"The tracker {name} has all records of {folder}.")
    return 0


if __name__ == "__main__":
    sys.exit(
        send_ended_run(Path(sys.argv[1]), *sys.argv[2:])
        if is_started_by_hand()
        else follow_run(TrackCompanion(read_plan()))
    )
