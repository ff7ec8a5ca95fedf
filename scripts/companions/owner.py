# extra: companions
"""Who owns a run in object storage (scripts/lib/mirrored_run.py), and what its owner writes there."""

from __future__ import annotations

import json
import logging
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.companions.follow import OtherOwnerError
from scripts.lib.mirrored_run import MirroredRun
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.logger import LOGGER_NAME
from utils.settings.errors import UserError

SECONDS_BETWEEN_HEARTBEATS, SECONDS_TO_SEE_HEARTBEAT = 10.0, 30.0
# A claim is read back after this time. Not every object storage can create an object only if it is absent.
SECONDS_UNTIL_READ_BACK = 2.0


class Mirror(MirroredRun):
    """The run at a URL, as its owner sees it.

    Args:
        generation: the generation that this attempt has claimed (0: none yet).
        run_id: the identity of the run, whichever attempt owns it.

    Raises:
        UserError: if no package can open the URL.
    """

    def __init__(self, url: str, generation: int = 0, run_id: str = "") -> None:
        super().__init__(url, f"--mirror {url.rstrip('/')}")
        self.generation, self.run_id = generation, run_id
        self._generation_seen, self._heartbeat_count = 0, 0  # `check_is_free` sets the first one

    # ---- the owner ----

    def check_is_free(self, launch_id: str) -> bool:
        """Return whether the latest owner is an attempt of this launch.

        Raises:
            UserError: if another run is alive.
        """
        latest = self._generation_seen = self.find_latest_generation()
        owner, name = self.read_json(f"owners/{latest:08d}.json"), f"owners/{latest:08d}.beat"
        self.run_id = owner.get("run", "")
        if not latest or (launch_id and owner.get("launch_id") == launch_id):
            return bool(latest)
        heartbeat, ends = self.read_json(name), time.monotonic() + SECONDS_TO_SEE_HEARTBEAT
        if heartbeat.get("state", "running") == "running":
            owner_text = f"a job on {owner.get('host', '?')} since {owner.get('time', '?')}"
            text = "The start waits for up to %.0f s to see whether the owner of %s (%s) is alive."
            logging.getLogger(LOGGER_NAME).warning(text, SECONDS_TO_SEE_HEARTBEAT, self.url, owner_text)
            while time.monotonic() < ends:
                time.sleep(SECONDS_TO_SEE_HEARTBEAT / 20)
                if self.read_json(name) != heartbeat:
                    text = f"--mirror {self.url} is in use by {owner_text}."
                    raise UserError(f"{text} End that job, or give another --mirror.")
        return False

    def claim(self, token: str, launch_id: str, host: str, run_id: str) -> None:
        """Become the owner by claiming the generation after the one that `check_is_free` has seen.

        Raises:
            UserError: if another job is faster.
        """
        inherits = [manifest["manifest"] for manifest in self.read_manifests()]
        generation = self._generation_seen + 1
        name, self.run_id = f"owners/{generation:08d}.json", self.run_id or run_id or uuid.uuid4().hex
        owner = {"token": token, "run": self.run_id, "launch_id": launch_id, "host": host, "time": utc_now()}
        data, path = json.dumps(owner | {"inherits": inherits}, indent=2).encode(), f"{self._root}/{name}"
        try:
            self.create_object(name, data)
        except Exception:  # the object exists, or this storage cannot do it (each storage has errors of its own)
            self._request(lambda: self._filesystem.exists(path) or self._filesystem.pipe_file(path, data))
        time.sleep(0 if self._is_local else SECONDS_UNTIL_READ_BACK)
        if self.read_json(name).get("token") != token:
            text = f"Another job has claimed --mirror {self.url}."
            raise UserError(f"{text} End that job, or give another --mirror.")
        self.generation = generation

    def check_owner(self) -> None:
        """Raise OtherOwnerError if another job has claimed the URL since."""
        if self.find_latest_generation() > self.generation:
            raise OtherOwnerError

    def write_heartbeat(self) -> None:
        """Show that the owner is alive. Call this every ten seconds. Raises OtherOwnerError like `check_owner`."""
        self.check_owner()
        self._heartbeat_count += 1
        self.write_json(
            f"owners/{self.generation:08d}.beat",
            {"count": self._heartbeat_count, "state": "running", "time": utc_now()},
        )

    def mark_ended(self, status: dict[str, Any]) -> None:
        """Note that the run has ended, so that the next owner need not wait for a heartbeat.

        Args:
            status: the status of the run, which is written to the storage if the run has failed.
        """
        name = self.object_name("records/status.json")
        if status.get("state") == "failed" and self.read_json(name):  # else the earlier records count
            self.write_json(name, status)
        self.write_json(f"owners/{self.generation:08d}.beat", {"state": "ended"})

    def has_ended(self) -> bool:
        return self.read_json(f"owners/{self.generation:08d}.beat").get("state") == "ended"

    # ---- checkpoints ----

    def object_name(self, name: str) -> str:
        """Return the name of an object of this generation."""
        return f"{self.generation:08d}/{name}"

    def write_manifest(self, path: Path, files: dict[str, dict[str, Any]]) -> None:
        """Write the manifest of a checkpoint whose files are all there. Raises OtherOwnerError like `check_owner`."""
        self.check_owner()
        name = self.object_name(f"manifests/{path.stem}.{next(iter(files.values()))['sha256'][:8]}.json")
        step = checkpoint.parse_step(path)
        self.write_json(name, {"step": step, "name": path.name, "files": files, "time": utc_now()})

    def prune(self, keep_last: int, keep_every: int, best_step: int) -> None:
        """Delete superseded checkpoints, and other objects that no reader considers.

        Args:
            keep_last: how many of the latest checkpoints are kept.
            keep_every: checkpoints at multiples of this number of steps are kept (0: none).
            best_step: the step of the best checkpoint, which is kept.
        """
        valid = {manifest["step"]: manifest for manifest in self.read_manifests()}
        if not valid:  # the storage may list what was there some time ago
            return
        superseded = checkpoint.find_superseded_steps(valid, keep_last, keep_every)
        kept_manifests = [manifest for step, manifest in valid.items() if step not in superseded or step == best_step]
        referenced_objects = {manifest["manifest"] for manifest in kept_manifests}
        referenced_objects |= {file["object"] for manifest in kept_manifests for file in manifest["files"].values()}
        object_sizes = self.list_objects()
        has_records = self.object_name("records/status.json") in object_sizes

        def is_removed(name: str) -> bool:
            if name in referenced_objects or name.startswith("owners/"):
                return False
            if "/records/" in name:
                return has_records and name < self.object_name("")
            step = archive.STEP_NAME_PATTERN.match(Path(name).name)
            is_superseded = step is not None and int(step[1]) < max(valid)
            return name < self.object_name("") or (name.startswith(self.object_name("")) and is_superseded)

        removed = sorted(filter(is_removed, object_sizes), key=lambda name: "/manifests/" not in name)  # these first
        if removed:
            self.delete_objects(removed)


def utc_now() -> str:
    """Return the time in UTC, in the format of ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
