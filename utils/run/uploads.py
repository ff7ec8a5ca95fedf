"""The thread that uploads a run to its mirror (mirror.py). It delays no training, and its failures end no run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from config import TrainingError, UserError
from utils.checkpoint import format as checkpoint
from utils.checkpoint import shards
from utils.checkpoint.stored import SECONDS_BETWEEN_LINES, files_of
from utils.files import TEMPORARY
from utils.logger import NAME
from utils.run.folder import Run
from utils.run.mirror import Mirror

SECONDS_TO_WARN = 60.0  # of failing uploads, or of one without progress
SECONDS_BETWEEN_LOOKS = 2.0  # of the ranks of a sharded run at what is there
MAX_PAUSE = 60.0  # seconds between two tries
SECONDS_TO_END = 5.0
LEFT_OUT = (".", "superseded-", "traces")  # how names of files and folders begin that are not uploaded
WANTED = "wanted.json"  # the sharded checkpoint of which each rank uploads its part


class Uploads:
    """On rank 0: uploads the latest checkpoint, the best one and the records of the run folder each time it is woken.

    Each other rank of a sharded run: uploads its part of the checkpoint that rank 0 has chosen. The first rank of a
    node with a folder of its own: uploads the samples and logs of its ranks before the checkpoint becomes valid.

    Args:
        keep: keep_last and keep_every.
        step: at which the run is.
    """

    def __init__(self, run: Run, mirror: Mirror, keep: tuple[int, int], step: int = 0) -> None:
        self._run, self._mirror, self._keep, self._log = run, mirror, keep, logging.getLogger(NAME)
        self.name = ""  # of the checkpoint in upload, which must not be deleted
        self._there: dict[str, dict[str, str]] = {}  # uploaded checkpoints: the checksums of their files
        self._has_looked = False
        self._records: dict[Path, tuple[int, int]] = {}  # uploaded ones: bytes and time
        self._of_node = next((files_of(ranks) for ranks in run.start.apart if ranks[0] == run.rank), set[str]())
        self._of_others = files_of(rank for ranks in run.start.apart for rank in ranks) - self._of_node
        self._step = step
        self._asked, self._done = int(run.has_own_folder), 0  # calls of `wake`, and how many of them are served
        self._sent, self._moved_at, self._is_warned = 0, 0.0, False
        self._awake, self._is_closed = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    def wake(self, step: int = 0) -> None:
        """Call when the run folder has a new checkpoint, another best one or new records. step: of the records."""
        self._step = max(self._step, step)
        self._asked += 1
        self._awake.set()

    def look(self) -> None:
        """Warn of an upload without progress. Raises TrainingError if another job owns the mirror."""
        if self._mirror.lost:
            raise TrainingError(self._mirror.lost)
        stands = time.monotonic() - self._moved_at
        if self.name and stands > SECONDS_TO_WARN and not self._is_warned:
            self._is_warned = True
            text = "mirror=%s: the upload of %s has made no progress for %.0f s; training continues"
            self._log.warning(text, self._mirror.url, self.name, stands)

    def finish(self, seconds: float, tick: Callable[[], object]) -> None:
        """Wait until everything is uploaded, at most so long. tick: called meanwhile."""
        self.wake()
        began = said = time.monotonic()
        while self._done < self._asked and time.monotonic() - began < seconds:
            tick()
            self.look()
            time.sleep(0.1)
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said, text = time.monotonic(), "waiting for the upload of %s to %s: %.0f MB"
                self._log.info(text, self.name or "records", self._mirror.url, self._sent / 1e6)
        if self._done < self._asked:
            text = "mirror=%s: lacks the latest checkpoint or records after %.0f s; they are in %s"
            self._log.warning(text, self._mirror.url, seconds, self._run.folder)

    def close(self) -> None:
        """End the thread, unless a request of it hangs."""
        self._is_closed = True
        self._awake.set()
        self._thread.join(SECONDS_TO_END)

    # ---- in the thread ----

    def _work(self) -> None:
        failing_since, pause, is_said = 0.0, 1.0, False
        while not self._mirror.lost:
            self._awake.wait(None if self._run.is_main else SECONDS_BETWEEN_LOOKS)
            self._awake.clear()
            if self._is_closed:
                return
            asked = self._asked
            try:
                self._upload_all() if self._run.is_main else self._follow()
                self._done, failing_since, pause, is_said = asked, 0.0, 1.0, False
            except (UserError, OSError) as error:
                failing_since = failing_since or time.monotonic()
                failing = time.monotonic() - failing_since
                if failing > SECONDS_TO_WARN and not is_said:
                    is_said, text = True, "uploads have failed for %.0f s, and training continues: %s"
                    self._log.warning(text, failing, error)
                self._awake.wait(pause)
                pause = min(2 * pause, MAX_PAUSE)
                self._awake.set()
            self.name = ""

    def _upload_all(self) -> None:
        if not self._has_looked:  # what earlier attempts have uploaded
            for each in self._mirror.checkpoints():
                self._there[each["name"]] = {name: file["sha256"] for name, file in each["files"].items()}
            self._has_looked = True
        for is_best in (False, True):
            paths = checkpoint.step_checkpoints(self._run.checkpoints)
            best = checkpoint.best_name(self._run.checkpoints)
            for path in [path for path in paths if path.name == best] if is_best else paths[-1:]:
                if self._there.get(path.name) != checkpoint.digests(path):
                    self._begin(path)
                    self._upload(path)
        if self._is_a_node_behind(0):  # these records would count without those of that node
            raise OSError("another node has not uploaded its samples and logs yet")
        self._upload_records()

    def _is_a_node_behind(self, step: int) -> bool:
        """Whether a node with a folder of its own has not yet uploaded the samples and logs up to this step."""
        places = [self._mirror.own(f"nodes/{ranks[0]}.json") for ranks in self._run.start.apart]
        return any(self._mirror.read_json(place).get("step", -1) < step for place in places)

    def _upload(self, path: Path) -> None:
        mirror, digests, began = self._mirror, checkpoint.digests(path), time.monotonic()
        objects = {name: mirror.own(f"{path.stem}.{digest[:8]}.{name}") for name, digest in digests.items()}
        if path.is_dir():
            mirror.write_json(mirror.own(WANTED), {"name": path.name, "files": digests})
        self._put_own(path, digests)
        step = checkpoint.step_of(path)
        while set(objects.values()) - (sizes := mirror.names(mirror.own(""))).keys() or self._is_a_node_behind(step):
            time.sleep(SECONDS_BETWEEN_LOOKS)
            if checkpoint.digests(path) != digests:
                break
        if checkpoint.digests(path) != digests:  # saved again meanwhile, which has woken this thread
            return
        self._upload_records()  # before the manifest: who resumes from the checkpoint needs them
        files = {
            name: {"object": objects[name], "bytes": sizes[objects[name]], "sha256": digest}
            for name, digest in digests.items()
        }
        if mirror.commit(path, step, files):
            self._there[path.name] = digests
            self._log.info("uploaded %s to %s in %.1f s", path.name, mirror.url, time.monotonic() - began)
            mirror.prune(*self._keep, checkpoint.best_name(self._run.checkpoints))

    def _follow(self) -> None:
        if self._of_node and self._done < self._asked:
            step = self._step
            self._upload_records()
            self._mirror.write_json(self._mirror.own(f"nodes/{self._run.rank}.json"), {"step": step})
        wanted = self._mirror.read_json(self._mirror.own(WANTED))
        path = self._run.checkpoints / wanted.get("name", "")
        if wanted and self._there.get(path.name) != wanted["files"] == checkpoint.digests(path):
            self._begin(path)
            self._put_own(path, wanted["files"])
            self._there[path.name] = wanted["files"]

    def _begin(self, path: Path) -> None:
        self._sent, self._moved_at, self._is_warned, self.name = 0, time.monotonic(), False, path.name

    def _put_own(self, path: Path, digests: dict[str, str]) -> None:
        """Upload the file, or this rank's part of the folder."""

        def tick(sent: int) -> None:
            self._sent, self._moved_at = sent, time.monotonic()

        name = shards.part_name(self._run.rank) if path.is_dir() else path.name
        if name in digests:
            target = self._mirror.own(f"{path.stem}.{digests[name][:8]}.{name}")
            self._mirror.put(path / name if path.is_dir() else path, target, tick)

    def _upload_records(self) -> None:
        folder = self._run.folder
        for path in sorted(folder.rglob("*"), key=lambda path: (path.name == "status.json", path)):  # with it all count
            name = path.relative_to(folder)
            is_left_out = any(part.startswith(LEFT_OUT) for part in name.parts) or path.suffix == TEMPORARY
            is_left_out |= str(name) in self._of_others or (self._run.has_own_folder and str(name) not in self._of_node)
            if not is_left_out and path.is_file() and not path.is_relative_to(self._run.checkpoints):
                stamp = path.stat().st_size, path.stat().st_mtime_ns
                if self._records.get(path) != stamp:
                    self._mirror.put(path, self._mirror.own(f"records/{name}"))
                    self._records[path] = stamp
