# extra: companions
"""`--mirror`: a copy of the run in object storage. It decides how the run starts, and uploads what the run writes.

mirror.py RUN --first    answers how the run starts, after it has fetched what the folder lacks, and claimed the URL
mirror.py RUN            follows the run
"""

from __future__ import annotations

import sys
import threading
import time
from os import _exit
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from config import trains_longer
from scripts.companions.follow import SECONDS_TO_LEAVE, Companion, Lines, OtherOwnerError, answer, follow, read_plan
from scripts.companions.owner import SECONDS_BETWEEN_HEARTBEATS, Mirror
from scripts.lib.mirrored_run import SECONDS_BETWEEN_LINES, files_of
from utils.checkpoint import format as checkpoint
from utils.extras.companions.programs import OTHER_OWNER
from utils.files import TEMPORARY, read_json, replace_json
from utils.settings.errors import StartError, UserError

SECONDS_TO_WARN = 60.0  # of an upload without progress
SECONDS_BETWEEN_REQUESTS = 0.5  # of a node whose run folder is its own
LEFT_OUT = (".", "superseded-", "traces")  # how names of files and folders begin that are not uploaded
MIRRORED = "mirror.json"  # in the run folder: which run its mirror is a copy of
WANTED = "wanted.json"  # the checkpoint of which other nodes upload their parts, samples and logs


# ---- the start ----


def decide(plan: dict[str, Any]) -> dict[str, Any]:
    """How the run starts, as seen from its mirror: what the folder lacks is fetched, and the URL is claimed.

    Returns:
        generation, run: what this attempt owns; owner: lock.json of the run, if it was fetched; is_completed; notes.

    Raises:
        UserError: if another job is alive, the URL holds another run than the folder, or no checkpoint is valid.
    """
    config, folder, checkpoints = plan["config"], Path(plan["folder"]), Path(plan["checkpoints"])
    mirror = Mirror(config["mirror"])
    is_same_launch = mirror.check_is_free(plan["launch_id"])
    is_continued = is_same_launch or config["resume_from"] == "auto"
    valid, local_paths = mirror.checkpoints(), checkpoint.step_checkpoints(checkpoints)
    if valid and not is_continued:
        raise UserError(
            f"mirror={mirror.url}: holds a run already; add --resume_from auto to continue it, or give another --mirror"
        )
    run_id = read_json(folder / MIRRORED).get("run", "") if is_continued else ""
    if valid and (local_paths or (folder / "metrics.jsonl").exists()) and run_id != mirror.run_id:
        raise UserError(f"run_dir={folder}: holds another run than mirror={mirror.url}; give another --run_dir")
    decision: dict[str, Any] = {"notes": []}
    if valid:
        replace_json(folder / MIRRORED, {"url": mirror.url, "run": mirror.run_id})  # first: a kill may follow
    if valid and valid[-1]["step"] > max(map(checkpoint.parse_step, local_paths), default=-1):
        decision["owner"] = mirror.restore_records(folder)
        saved = read_json(folder / "config.json")
        has_more = trains_longer(config, saved)
        if read_json(folder / "status.json").get("state") == "completed" and not has_more:
            return decision | {"is_completed": True}
    if valid:
        decision["notes"] = fetch_latest(mirror, folder, checkpoints)
    mirror.claim(plan["token"], plan["launch_id"], plan["host"], run_id)
    return decision | {"generation": mirror.generation, "run": mirror.run_id}


def fetch_latest(mirror: Mirror, folder: Path, checkpoints: Path) -> list[str]:
    """Fetch the latest valid checkpoint, if it is later than that of the folder. Returns why others were skipped.

    Raises:
        UserError: if there are checkpoints, but none is valid.
    """
    step, notes = -1, []
    for path in reversed(checkpoint.step_checkpoints(checkpoints)):
        try:
            step = checkpoint.verify(path).step
            break
        except StartError:
            raise
        except UserError as error:
            notes.append(str(error))
    fetched, skipped = mirror.fetch_latest(checkpoints, step, folder / "metrics.jsonl")
    if fetched is None and step < 0:
        remedy = "start over with another --run_dir and --mirror"
        raise UserError("\n".join([*notes, *skipped, f"mirror={mirror.url}: has no valid checkpoint; {remedy}"]))
    return [*notes, *skipped]


def decide_on_node(plan: dict[str, Any]) -> dict[str, Any]:
    """On a node whose run folder is its own: fetch the samples and logs of its ranks, if the folder has less."""
    if plan["resume_from"]:
        ranks = next(ranks for ranks in plan["apart"] if ranks[0] == plan["rank"])
        Mirror(plan["config"]["mirror"]).restore_own_records(Path(plan["folder"]), ranks)
    return {}


# ---- while it runs ----


class Uploads(Companion):
    """On rank 0: uploads the latest checkpoint, the best one and the records of the run folder.

    On a node whose run folder is its own: uploads the samples and logs of its ranks, and of a sharded checkpoint their
    parts, before the checkpoint becomes valid.
    """

    name = "mirror"

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self.mirror = Mirror(self.config["mirror"], plan["decision"]["generation"], plan["decision"]["run"])
        apart, rank = plan["apart"], plan["rank"]
        self._nodes = [ranks[0] for ranks in apart]
        self._of_node = next((files_of(ranks) for ranks in apart if ranks[0] == rank), set[str]())
        self._of_others = files_of(global_rank for ranks in apart for global_rank in ranks) - self._of_node
        self._there: dict[str, dict[str, str]] = {}  # uploaded checkpoints: the checksums of their files
        self._records: dict[Path, tuple[int, int]] = {}  # uploaded ones: bytes and time
        self._lines, self._best, self._is_new = Lines(self.folder / "metrics.jsonl"), -1, True
        self._next_request, self._state = 0.0, ""
        self._uploading, self._moved_at, self._said_at, self._is_warned = "", 0.0, 0.0, False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    # ---- life ----

    def start(self) -> None:
        """Begin to show that the owner is alive."""
        if self.plan["rank"] == 0:
            self._thread.start()

    def _beat(self) -> None:
        while not self._end.is_set():
            try:
                self.mirror.beat()
                if self._uploading:  # not every storage tells the progress of an upload
                    self.show_life()
            except OtherOwnerError:
                _exit(OTHER_OWNER)
            except UserError:
                pass  # the next one may succeed
            stands = time.monotonic() - self._moved_at
            if self._uploading and stands > SECONDS_TO_WARN and not self._is_warned:
                self._is_warned, text = True, "mirror=%s: the upload of %s has made no progress for %.0f s"
                self.log.warning(text + "; training continues", self.mirror.url, self._uploading, stands)
            self._end.wait(SECONDS_BETWEEN_HEARTBEATS)

    def leave(self) -> None:
        self._end.set()
        if self.plan["rank"] == 0:
            self._thread.join(SECONDS_TO_LEAVE / 2)  # its last beat comes before this one
            self.mirror.end(read_json(self.folder / "status.json"))

    def look(self, state: str) -> bool:
        if not self.has_begun():
            return False
        if self.plan["rank"]:
            return self._look_on_node(state)
        if self._is_new:  # what earlier attempts have uploaded
            replace_json(self.folder / MIRRORED, {"url": self.mirror.url, "run": self.mirror.run_id})
            for manifest in self.mirror.checkpoints():
                self._there[manifest["name"]] = {name: file["sha256"] for name, file in manifest["files"].items()}
        has_changed, before, self._state = self._is_new, self._best, state
        for record in self._lines.new():
            self._best = record["step"] if record.get("event") == "best" else self._best
        has_changed |= before != self._best
        paths = checkpoint.step_checkpoints(self.checkpoints)
        for path in [*paths[-1:], *(path for path in paths if checkpoint.parse_step(path) == self._best)]:
            if self._there.get(path.name) != checkpoint.read_checksums(path):
                self._upload(path)
                has_changed = True
        while state and self._is_a_node_behind(0, state):
            self._wait_for_nodes()
        if state or (has_changed and self._there and not self._is_a_node_behind(0)):  # else its records would not count
            self._upload_records()
            self.mirror.prune(self.config["keep_last"], self.config["keep_every"], self._best)
        self._is_new = False
        if state:
            self._end.set()
            self._thread.join()
            self.mirror.end({})
        return True

    def _wait_for_nodes(self) -> None:
        self.show_life()
        time.sleep(SECONDS_BETWEEN_REQUESTS)

    # ---- uploads ----

    def _of_nodes(self) -> list[dict[str, Any]]:
        """What each node with a folder of its own has uploaded: samples and logs up to a `step`, or to the end."""
        return [self.mirror.read_json(self.mirror.own(f"nodes/{rank}.json")) for rank in self._nodes]

    def _is_a_node_behind(self, step: int, state: str = "") -> bool:
        return any(node.get("step", -1) < step or (state and not node.get("state")) for node in self._of_nodes())

    def _upload(self, path: Path) -> None:
        mirror, began = self.mirror, time.monotonic()
        with self.kept(path) as source:
            digests, step = checkpoint.read_checksums(source), checkpoint.parse_step(path)
            objects = {name: mirror.own(f"{path.stem}.{digest[:8]}.{name}") for name, digest in digests.items()}
            if self._nodes:
                mirror.write_json(mirror.own(WANTED), {"name": path.name, "step": step, "files": digests})
            self._put_parts(source, objects, path.name)
            wanted = set(objects.values())
            while wanted - (sizes := mirror.names(mirror.own(""))).keys() or self._is_a_node_behind(step):
                if checkpoint.read_checksums(path) not in ({}, digests):
                    return  # saved again meanwhile
                if any(node_status.get("lacks") == path.name for node_status in self._of_nodes()):
                    self._there[path.name] = digests  # superseded there before its parts were uploaded
                    return
                self._wait_for_nodes()
        self._upload_records()  # before the manifest: who resumes from the checkpoint needs them
        files = {
            name: {"object": objects[name], "bytes": sizes[objects[name]], "sha256": digest}
            for name, digest in digests.items()
        }
        mirror.commit(path, files)
        self._there[path.name] = digests
        self.log.info("uploaded %s to %s in %.1f s", path.name, mirror.url, time.monotonic() - began)

    def _look_on_node(self, state: str) -> bool:
        if time.monotonic() < self._next_request:
            return False
        self._next_request = time.monotonic() + SECONDS_BETWEEN_REQUESTS
        wanted, mirror = self.mirror.read_json(self.mirror.own(WANTED)), self.mirror
        path = self.checkpoints / wanted.get("name", "")
        is_wanted, lacks = wanted and self._there.get(path.name) != wanted["files"], ""
        if is_wanted and not path.suffix:  # a sharded one
            has_parts = checkpoint.read_checksums(path) == wanted["files"]
            latest = self.latest()
            if has_parts:
                with self.kept(path) as source:
                    digests = wanted["files"].items()
                    objects = {name: mirror.own(f"{path.stem}.{digest[:8]}.{name}") for name, digest in digests}
                    self._put_parts(source, objects, path.name)
            elif latest and checkpoint.parse_step(latest) > wanted["step"]:
                lacks = path.name
            else:
                return False  # it appears here in a moment
        if is_wanted or state != self._state:
            self._upload_records()
            reached = {"step": wanted.get("step", -1), "state": state, "lacks": lacks}
            mirror.write_json(mirror.own(f"nodes/{self.plan['rank']}.json"), reached)
            self._there[path.name], self._state = wanted.get("files", {}), state
        return bool(state) and mirror.has_ended()

    def _put_parts(self, source: Path, objects: dict[str, str], title: str) -> None:
        """Upload the file, or those parts of the folder that are here."""

        def on_progress(sent: int) -> None:
            self._moved_at = time.monotonic()
            self.show_life()
            if self._state and self._moved_at - self._said_at > SECONDS_BETWEEN_LINES:
                self._said_at = self._moved_at
                self.log.info("waiting for the upload of %s to %s: %.0f MB", title, self.mirror.url, sent / 1e6)

        self._uploading, self._moved_at, self._is_warned = title, time.monotonic(), False
        for name, target in objects.items():
            file = source / name if source.is_dir() else source
            if file.exists():
                self.mirror.put(file, target, on_progress)
        self._uploading = ""

    def _upload_records(self) -> None:
        folder = self.folder
        for path in sorted(folder.rglob("*"), key=lambda path: (path.name == "status.json", path)):  # with it all count
            name = path.relative_to(folder)
            is_left_out = any(part.startswith(LEFT_OUT) for part in name.parts) or path.suffix == TEMPORARY
            is_left_out |= str(name) in self._of_others or (bool(self._of_node) and str(name) not in self._of_node)
            if not is_left_out and path.is_file() and not path.is_relative_to(self.checkpoints):
                stamp = path.stat().st_size, path.stat().st_mtime_ns
                if self._records.get(path) != stamp:
                    self.mirror.put(path, self.mirror.own(f"records/{name}"))
                    self.show_life()
                    self._records[path] = stamp


def main() -> int:
    if sys.argv[2:] == ["--first"]:
        answer(lambda plan: decide_on_node(plan) if plan["rank"] else decide(plan))
    uploads = Uploads(read_plan())
    uploads.start()
    return follow(uploads)


if __name__ == "__main__":
    sys.exit(main())
