# extra: companions
"""Keep a copy of the run in object storage (`--mirror`).

This program decides how the run starts, and uploads what the run writes.

mirror.py RUN --first    fetches what the folder lacks, claims the URL, and answers how the run starts
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

from config import can_train_longer
from scripts.companions.follow import (
    SECONDS_TO_STOP,
    Companion,
    OtherOwnerError,
    RecordReader,
    answer_rank,
    follow_run,
    read_plan,
)
from scripts.companions.owner import SECONDS_BETWEEN_HEARTBEATS, Mirror
from scripts.lib.mirrored_run import SECONDS_BETWEEN_LOG_LINES, list_rank_files
from utils.checkpoint import format as checkpoint
from utils.extras.companions.programs import EXIT_OTHER_OWNER
from utils.files import TEMPORARY_SUFFIX, read_json, replace_json
from utils.settings.errors import StartError, UserError

SECONDS_UNTIL_WARNING = 60.0  # a warning follows if an upload makes no progress for this time
SECONDS_BETWEEN_REQUESTS = 0.5  # between two requests of a node whose run folder is its own
EXCLUDED_PREFIXES = (".", "superseded-", "traces")  # files and folders whose names begin so are not uploaded
MIRROR_FILE = "mirror.json"  # this file in the run folder says which run its mirror is a copy of
WANTED_FILE = "wanted.json"  # this object names the checkpoint whose shards other nodes have to upload


# ---- the start ----


def decide_start(plan: dict[str, Any]) -> dict[str, Any]:
    """Decide how the run starts: claim the URL, and fetch what the folder lacks.

    Returns:
        A dict with what this attempt owns (generation, run), lock.json of the run if it was fetched (owner), whether
        the run is complete (is_completed), and notes.

    Raises:
        UserError: if another job is alive, the URL holds another run than the folder, or no checkpoint is valid.
    """
    config, folder, checkpoints = plan["config"], Path(plan["folder"]), Path(plan["checkpoints"])
    mirror = Mirror(config["mirror"])
    is_same_launch = mirror.check_is_free(plan["launch_id"])
    is_continued = is_same_launch or config["resume_from"] == "auto"
    valid, local_paths = mirror.read_manifests(), checkpoint.list_step_checkpoints(checkpoints)
    if valid and not is_continued:
        raise UserError(
            f"--mirror {mirror.url} holds a run already. Add --resume_from auto to continue that run, or give another"
            " --mirror."
        )
    run_id = read_json(folder / MIRROR_FILE).get("run", "") if is_continued else ""
    if valid and (local_paths or (folder / "metrics.jsonl").exists()) and run_id != mirror.run_id:
        raise UserError(f"--run_dir {folder} and --mirror {mirror.url} hold different runs. Give another --run_dir.")
    decision: dict[str, Any] = {"notes": []}
    if valid:
        replace_json(folder / MIRROR_FILE, {"url": mirror.url, "run": mirror.run_id})  # first, as a kill may follow
    if valid and valid[-1]["step"] > max(map(checkpoint.parse_step, local_paths), default=-1):
        decision["owner"] = mirror.restore_records(folder)
        saved = read_json(folder / "config.json")
        has_more = can_train_longer(config, saved)
        if read_json(folder / "status.json").get("state") == "completed" and not has_more:
            return decision | {"is_completed": True}
    if valid:
        decision["notes"] = fetch_latest_checkpoint(mirror, folder, checkpoints)
    mirror.claim(plan["token"], plan["launch_id"], plan["host"], run_id)
    return decision | {"generation": mirror.generation, "run": mirror.run_id}


def fetch_latest_checkpoint(mirror: Mirror, folder: Path, checkpoints: Path) -> list[str]:
    """Fetch the latest valid checkpoint, if it is later than that of the folder.

    Returns:
        Why later checkpoints were skipped.

    Raises:
        UserError: if the mirror has checkpoints, but none of them is valid.
    """
    step, notes = -1, []
    for path in reversed(checkpoint.list_step_checkpoints(checkpoints)):
        try:
            step = checkpoint.verify_checkpoint(path).step
            break
        except StartError:
            raise
        except UserError as error:
            notes.append(str(error))
    fetched, skipped = mirror.fetch_latest_checkpoint(checkpoints, step, folder / "metrics.jsonl")
    if fetched is None and step < 0:
        problem = f"--mirror {mirror.url} has no valid checkpoint. Start over with another --run_dir and --mirror."
        raise UserError("\n".join([*notes, *skipped, problem]))
    return [*notes, *skipped]


def restore_node_records(plan: dict[str, Any]) -> dict[str, Any]:
    """Fetch the samples and logs of a node's ranks, if its run folder is its own and has fewer of them."""
    if plan["resume_from"]:
        ranks = next(ranks for ranks in plan["apart"] if ranks[0] == plan["rank"])
        Mirror(plan["config"]["mirror"]).restore_rank_records(Path(plan["folder"]), ranks)
    return {}


# ---- while it runs ----


class MirrorUploader(Companion):
    """Uploads what the run writes.

    On rank 0 it uploads the latest checkpoint, the best one and the records of the run folder. On a node whose run
    folder is its own, it uploads the samples and logs of the node's ranks. It also uploads their shards of a sharded
    checkpoint, before the checkpoint becomes valid.
    """

    name = "mirror"

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self.mirror = Mirror(self.config["mirror"], plan["decision"]["generation"], plan["decision"]["run"])
        node_local_ranks, rank = plan["apart"], plan["rank"]
        self._node_leaders = [ranks[0] for ranks in node_local_ranks]
        self._node_files = next((list_rank_files(ranks) for ranks in node_local_ranks if ranks[0] == rank), set[str]())
        self._other_nodes_files = (
            list_rank_files(global_rank for ranks in node_local_ranks for global_rank in ranks) - self._node_files
        )
        self._uploaded_checkpoints: dict[str, dict[str, str]] = {}  # by checkpoint, the checksums of its files
        self._uploaded_records: dict[Path, tuple[int, int]] = {}  # by file, its bytes and its time when it was uploaded
        self._record_reader = RecordReader(self.folder / "metrics.jsonl")
        self._best_step = -1
        self._is_first_poll = True
        self._next_request_at, self._final_state = 0.0, ""
        self._upload_title, self._progress_at, self._logged_at, self._is_warned = "", 0.0, 0.0, False
        self._stop_event = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._write_heartbeats, daemon=True)

    # ---- life ----

    def start_heartbeat(self) -> None:
        """Begin to show that the owner is alive."""
        if self.plan["rank"] == 0:
            self._heartbeat_thread.start()

    def _write_heartbeats(self) -> None:
        while not self._stop_event.is_set():
            try:
                self.mirror.write_heartbeat()
                if self._upload_title:  # not every storage tells the progress of an upload
                    self.show_life()
            except OtherOwnerError:
                _exit(EXIT_OTHER_OWNER)
            except UserError:
                pass  # the next heartbeat may succeed
            stalled_s = time.monotonic() - self._progress_at
            if self._upload_title and stalled_s > SECONDS_UNTIL_WARNING and not self._is_warned:
                self._is_warned, text = True, "The upload of %s to --mirror %s has made no progress for %.0f s."
                self.log.warning(f"{text} Training continues.", self._upload_title, self.mirror.url, stalled_s)
            self._stop_event.wait(SECONDS_BETWEEN_HEARTBEATS)

    def leave(self) -> None:
        self._stop_event.set()
        if self.plan["rank"] == 0:
            self._heartbeat_thread.join(SECONDS_TO_STOP / 2)  # the last heartbeat of the thread comes before this one
            self.mirror.mark_ended(read_json(self.folder / "status.json"))

    def look(self, final_state: str) -> bool:
        if not self.has_training_begun():
            return False
        if self.plan["rank"]:
            return self._poll_on_node(final_state)
        if self._is_first_poll:  # earlier attempts may have uploaded checkpoints
            replace_json(self.folder / MIRROR_FILE, {"url": self.mirror.url, "run": self.mirror.run_id})
            for manifest in self.mirror.read_manifests():
                self._uploaded_checkpoints[manifest["name"]] = {
                    name: file["sha256"] for name, file in manifest["files"].items()
                }
        has_changed, before, self._final_state = self._is_first_poll, self._best_step, final_state
        for record in self._record_reader.read_new():
            self._best_step = record["step"] if record.get("event") == "best" else self._best_step
        has_changed |= before != self._best_step
        paths = checkpoint.list_step_checkpoints(self.checkpoints)
        for path in [*paths[-1:], *(path for path in paths if checkpoint.parse_step(path) == self._best_step)]:
            if self._uploaded_checkpoints.get(path.name) != checkpoint.read_checksums(path):
                self._upload_checkpoint(path)
                has_changed = True
        while final_state and self._is_node_behind(0, final_state):
            self._wait_for_nodes()
        # records without a checkpoint would not count
        if final_state or (has_changed and self._uploaded_checkpoints and not self._is_node_behind(0)):
            self._upload_records()
            self.mirror.prune(self.config["keep_last"], self.config["keep_every"], self._best_step)
        self._is_first_poll = False
        if final_state:
            self._stop_event.set()
            self._heartbeat_thread.join()
            self.mirror.mark_ended({})
        return True

    def _wait_for_nodes(self) -> None:
        self.show_life()
        time.sleep(SECONDS_BETWEEN_REQUESTS)

    # ---- uploads ----

    def _read_node_statuses(self) -> list[dict[str, Any]]:
        """Return how far each node with a folder of its own has uploaded samples and logs: a `step`, or the end."""
        return [self.mirror.read_json(self.mirror.object_name(f"nodes/{rank}.json")) for rank in self._node_leaders]

    def _is_node_behind(self, step: int, final_state: str = "") -> bool:
        statuses = self._read_node_statuses()
        return any(node.get("step", -1) < step or (final_state and not node.get("state")) for node in statuses)

    def _upload_checkpoint(self, path: Path) -> None:
        mirror, began = self.mirror, time.monotonic()
        with self.temporary_copy(path) as source:
            digests, step = checkpoint.read_checksums(source), checkpoint.parse_step(path)
            objects = {name: mirror.object_name(f"{path.stem}.{digest[:8]}.{name}") for name, digest in digests.items()}
            if self._node_leaders:
                mirror.write_json(mirror.object_name(WANTED_FILE), {"name": path.name, "step": step, "files": digests})
            self._upload_files(source, objects, path.name)
            wanted = set(objects.values())
            while wanted - (sizes := mirror.list_objects(mirror.object_name(""))).keys() or self._is_node_behind(step):
                if checkpoint.read_checksums(path) not in ({}, digests):
                    return  # the checkpoint was saved again meanwhile
                if any(node_status.get("lacks") == path.name for node_status in self._read_node_statuses()):
                    self._uploaded_checkpoints[path.name] = digests  # the node has deleted its shards before an upload
                    return
                self._wait_for_nodes()
        self._upload_records()  # before the manifest: who resumes from the checkpoint needs them
        files = {
            name: {"object": objects[name], "bytes": sizes[objects[name]], "sha256": digest}
            for name, digest in digests.items()
        }
        mirror.write_manifest(path, files)
        self._uploaded_checkpoints[path.name] = digests
        self.log.info("%s was uploaded to %s in %.1f s.", path.name, mirror.url, time.monotonic() - began)

    def _poll_on_node(self, final_state: str) -> bool:
        if time.monotonic() < self._next_request_at:
            return False
        self._next_request_at = time.monotonic() + SECONDS_BETWEEN_REQUESTS
        wanted, mirror = self.mirror.read_json(self.mirror.object_name(WANTED_FILE)), self.mirror
        path = self.checkpoints / wanted.get("name", "")
        is_wanted, lacks = wanted and self._uploaded_checkpoints.get(path.name) != wanted["files"], ""
        if is_wanted and not path.suffix:  # it is a sharded checkpoint
            has_shards = checkpoint.read_checksums(path) == wanted["files"]
            latest = self.find_latest_checkpoint()
            if has_shards:
                with self.temporary_copy(path) as source:
                    digests = wanted["files"].items()
                    objects = {name: mirror.object_name(f"{path.stem}.{digest[:8]}.{name}") for name, digest in digests}
                    self._upload_files(source, objects, path.name)
            elif latest and checkpoint.parse_step(latest) > wanted["step"]:
                lacks = path.name
            else:
                return False  # the checkpoint appears here in a moment
        if is_wanted or final_state != self._final_state:
            self._upload_records()
            node_status = {"step": wanted.get("step", -1), "state": final_state, "lacks": lacks}
            mirror.write_json(mirror.object_name(f"nodes/{self.plan['rank']}.json"), node_status)
            self._uploaded_checkpoints[path.name], self._final_state = wanted.get("files", {}), final_state
        return bool(final_state) and mirror.has_ended()

    def _upload_files(self, source: Path, objects: dict[str, str], title: str) -> None:
        """Upload the file `source`, or those files of the folder `source` that are on this node."""

        def on_progress(sent: int) -> None:
            self._progress_at = time.monotonic()
            self.show_life()
            if self._final_state and self._progress_at - self._logged_at > SECONDS_BETWEEN_LOG_LINES:
                self._logged_at = self._progress_at
                text = "The run waits for the upload of %s to %s: %.0f MB are sent."
                self.log.info(text, title, self.mirror.url, sent / 1e6)

        self._upload_title, self._progress_at, self._is_warned = title, time.monotonic(), False
        for name, target in objects.items():
            file = source / name if source.is_dir() else source
            if file.exists():
                self.mirror.upload(file, target, on_progress)
        self._upload_title = ""

    def _upload_records(self) -> None:
        folder = self.folder
        # status.json is the last file, because the records of this attempt do not count without it
        for path in sorted(folder.rglob("*"), key=lambda path: (path.name == "status.json", path)):
            name = path.relative_to(folder)
            is_left_out = (
                any(part.startswith(EXCLUDED_PREFIXES) for part in name.parts) or path.suffix == TEMPORARY_SUFFIX
            )
            is_left_out |= str(name) in self._other_nodes_files or (
                bool(self._node_files) and str(name) not in self._node_files
            )
            if not is_left_out and path.is_file() and not path.is_relative_to(self.checkpoints):
                stamp = path.stat().st_size, path.stat().st_mtime_ns
                if self._uploaded_records.get(path) != stamp:
                    self.mirror.upload(path, self.mirror.object_name(f"records/{name}"))
                    self.show_life()
                    self._uploaded_records[path] = stamp


def main() -> int:
    if sys.argv[2:] == ["--first"]:
        answer_rank(lambda plan: restore_node_records(plan) if plan["rank"] else decide_start(plan))
    uploads = MirrorUploader(read_plan())
    uploads.start_heartbeat()
    return follow_run(uploads)


if __name__ == "__main__":
    sys.exit(main())
