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
from utils.logger import NAME
from utils.settings.errors import UserError

SECONDS_BETWEEN_HEARTBEATS, SECONDS_TO_SEE_HEARTBEAT = 10.0, 30.0
SECONDS_TO_READ_BACK = 2.0  # a claim: not every object storage can create an object only if it is absent


class Mirror(MirroredRun):
    """The run at a URL. Raises UserError if no package can open it.

    Args:
        generation: that this attempt has claimed; 0: none yet.
        run_id: of the run, whichever attempt owns it.
    """

    def __init__(self, url: str, generation: int = 0, run_id: str = "") -> None:
        super().__init__(url, f"mirror={url.rstrip('/')}")
        self.generation, self.run_id = generation, run_id
        self._seen, self._count = 0, 0  # the latest generation at the start; beats

    # ---- the owner ----

    def check_is_free(self, launch_id: str) -> bool:
        """Whether the latest owner is an attempt of this launch. Raises UserError if another run is alive."""
        latest = self._seen = self.latest()
        owner, name = self.read_json(f"owners/{latest:08d}.json"), f"owners/{latest:08d}.beat"
        self.run_id = owner.get("run", "")
        if not latest or (launch_id and owner.get("launch_id") == launch_id):
            return bool(latest)
        beat, ends = self.read_json(name), time.monotonic() + SECONDS_TO_SEE_HEARTBEAT
        if beat.get("state", "running") == "running":
            owner_text = f"a job on {owner.get('host', '?')} since {owner.get('time', '?')}"
            text = "%s: looking for up to %.0f s whether its owner, %s, is alive"
            logging.getLogger(NAME).warning(text, self.url, SECONDS_TO_SEE_HEARTBEAT, owner_text)
            while time.monotonic() < ends:
                time.sleep(SECONDS_TO_SEE_HEARTBEAT / 20)
                if self.read_json(name) != beat:
                    raise UserError(
                        f"mirror={self.url}: is in use by {owner_text}; end that job or give another --mirror"
                    )
        return False

    def claim(self, token: str, launch_id: str, host: str, run_id: str) -> None:
        """Become the owner: the generation after that of `check_is_free`. Raises UserError if another job is faster."""
        inherits = [manifest["manifest"] for manifest in self.checkpoints()]
        generation = self._seen + 1
        name, self.run_id = f"owners/{generation:08d}.json", self.run_id or run_id or uuid.uuid4().hex
        owner = {"token": token, "run": self.run_id, "launch_id": launch_id, "host": host, "time": now()}
        data, path = json.dumps(owner | {"inherits": inherits}, indent=2).encode(), f"{self._root}/{name}"
        try:
            self.create(name, data)
        except Exception:  # there is one, or this storage cannot do it: each has errors of its own
            self._ask(lambda: self._files.exists(path) or self._files.pipe_file(path, data))
        time.sleep(0 if self._is_local else SECONDS_TO_READ_BACK)
        if self.read_json(name).get("token") != token:
            raise UserError(f"mirror={self.url}: another job has claimed it; end that job or give another --mirror")
        self.generation = generation

    def check_owner(self) -> None:
        """Raises OtherOwnerError if another job has claimed the URL since."""
        if self.latest() > self.generation:
            raise OtherOwnerError

    def beat(self) -> None:
        """Show that the owner is alive. Call it each ten seconds. Raises OtherOwnerError as `check_owner`."""
        self.check_owner()
        self._count += 1
        self.write_json(f"owners/{self.generation:08d}.beat", {"count": self._count, "state": "running", "time": now()})

    def end(self, status: dict[str, Any]) -> None:
        """The next owner need not wait for a beat. status: of the run, which is written there if it has failed."""
        name = self.own("records/status.json")
        if status.get("state") == "failed" and self.read_json(name):  # else the earlier records count
            self.write_json(name, status)
        self.write_json(f"owners/{self.generation:08d}.beat", {"state": "ended"})

    def has_ended(self) -> bool:
        return self.read_json(f"owners/{self.generation:08d}.beat").get("state") == "ended"

    # ---- checkpoints ----

    def own(self, name: str) -> str:
        """The name of an object of this generation."""
        return f"{self.generation:08d}/{name}"

    def commit(self, path: Path, files: dict[str, dict[str, Any]]) -> None:
        """Write the manifest of a checkpoint whose files are all there. Raises OtherOwnerError as `check_owner`."""
        self.check_owner()
        name = self.own(f"manifests/{path.stem}.{next(iter(files.values()))['sha256'][:8]}.json")
        step = checkpoint.parse_step(path)
        self.write_json(name, {"step": step, "name": path.name, "files": files, "time": now()})

    def prune(self, keep_last: int, keep_every: int, best: int) -> None:
        """Delete superseded checkpoints and what else no reader considers. best: the step of the best checkpoint."""
        valid = {manifest["step"]: manifest for manifest in self.checkpoints()}
        if not valid:  # the storage lists what was there some time ago
            return
        gone = checkpoint.superseded_steps(valid, keep_last, keep_every)
        kept = [manifest for step, manifest in valid.items() if step not in gone or step == best]
        used = {manifest["manifest"] for manifest in kept}
        used |= {file["object"] for manifest in kept for file in manifest["files"].values()}
        every = self.names()
        has_records = self.own("records/status.json") in every

        def is_removed(name: str) -> bool:
            if name in used or name.startswith("owners/"):
                return False
            if "/records/" in name:
                return has_records and name < self.own("")
            step = archive.STEP_NAME.match(Path(name).name)
            is_superseded = step is not None and int(step[1]) < max(valid)
            return name < self.own("") or (name.startswith(self.own("")) and is_superseded)

        removed = sorted(filter(is_removed, every), key=lambda name: "/manifests/" not in name)  # these first
        if removed:
            self.remove(removed)


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
