"""`--mirror URL`: the copy of a run in object storage, as fsspec opens it, and who owns it.

owners/<generation>.json        a claim: token, host, and the checkpoints that are valid at that moment ("inherits")
owners/<generation>.beat        a counter that moves while its run is alive
<generation>/manifests/*.json   a checkpoint: its files, their bytes and checksums; written when all of them are there
<generation>/*.pt               these files
<generation>/records/           the other files of the run folder

Objects cannot be locked or renamed. So each attempt claims the next generation, and a reader considers only the
manifests of the latest one and those that it inherits: a former owner that wakes up changes nothing that is read.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from config import StartError, UserError
from utils.checkpoint import archive, shards
from utils.checkpoint import format as checkpoint
from utils.files import replace_file, replace_json
from utils.logger import NAME
from utils.redact import redacted
from utils.run.provenance import now

T = TypeVar("T")

SECONDS_BETWEEN_BEATS, SECONDS_TO_SEE_A_BEAT = 10.0, 30.0
SECONDS_TO_READ_BACK = 2.0  # a claim: not every storage can create an object only if it is absent
SECONDS_BETWEEN_LINES = 10.0  # of progress
BLOCK_BYTES, BLOCKS = 2**24, 8  # of a request, and requests at a time, when a checkpoint is fetched
TRIES = 5
FETCHED = ".fetched-"  # a folder with the part of a checkpoint that has been fetched


class Mirror:
    """The run at a URL. Raises UserError if no package can open it."""

    def __init__(self, url: str) -> None:
        self.url, self.generation, self.run_id = url.rstrip("/"), 0, ""
        self.lost = ""  # why this run must end: another one has claimed the URL
        self._seen, self._end = 0, threading.Event()  # the latest generation at the start
        self._thread = threading.Thread(target=self._beat, name="mirror", daemon=True)  # of rank 0
        from fsspec.core import url_to_fs  # only here: not every run needs it
        from fsspec.registry import known_implementations

        protocol = url.partition("://")[0]
        known = known_implementations.get(protocol, {})
        try:
            options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
            self._files, self._root = url_to_fs(self.url, **options)
        except ImportError:
            package = known.get("class", "").partition(".")[0]
            raise UserError(f"mirror={url}: {known.get('err')}; pip install {package}") from None
        except ValueError:
            raise UserError(f"mirror={url}: {protocol} is unknown to fsspec; give s3://, gs:// or az://") from None
        self._is_local = bool(options)

    # ---- objects ----

    def _ask(self, action: Callable[[], T], tries: int = 1) -> T:
        """The result of a request. Raises UserError if it fails, or StartError if that may pass."""
        for left in reversed(range(tries)):
            try:
                return action()
            except Exception as error:  # each storage has errors of its own
                lasts = isinstance(error, FileNotFoundError | PermissionError)
                if left and not lasts:
                    time.sleep(2.0 ** (tries - left))
                    continue
                reason = redacted(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
                remedy = "check the address, and the keys in the environment or the provider's files"
                text = f"mirror={self.url}: cannot be read or written ({reason}); {remedy}"
                raise (UserError if lasts else StartError)(text) from None
        raise AssertionError

    def names(self, folder: str = "") -> dict[str, int]:
        """The objects below a folder, by their names from the URL, with their bytes."""

        def find() -> dict[str, dict[str, Any]]:
            self._files.invalidate_cache()
            with suppress(FileNotFoundError):
                return self._files.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            return {}

        return {name[len(self._root) + 1 :]: each["size"] for name, each in sorted(self._ask(find).items())}

    def read_json(self, name: str) -> dict[str, Any]:
        """The dict in an object; an empty one if there is none or it is damaged."""

        def read() -> bytes:
            with suppress(FileNotFoundError):
                return self._files.cat_file(f"{self._root}/{name}")
            return b""

        try:
            found = json.loads(self._ask(read))
            return found if isinstance(found, dict) else {}
        except json.JSONDecodeError:
            return {}

    def write_json(self, name: str, value: Any) -> None:
        data = json.dumps(value, indent=2).encode()
        self._ask(lambda: self._files.pipe_file(f"{self._root}/{name}", data))

    def put(self, path: Path, name: str, tick: Callable[[int], None] = lambda sent: None) -> None:
        """Upload a file; the object is whole or absent. tick: called with the bytes sent, where the storage tells."""
        from fsspec.callbacks import Callback

        hook = Callback(hooks={"tick": lambda size, value, **_: tick(value)})
        target = f"{self._root}/{name}"
        written = f"{target}.part" if self._is_local else target
        self._ask(lambda: self._files.put_file(str(path), written, callback=hook))
        if self._is_local:
            os.replace(written, target)

    def get(self, name: str, path: Path, size: int, tick: Callable[[int], None]) -> None:
        """Fetch an object of this size. It continues where an earlier call was interrupted.

        tick: called with the bytes of some blocks.
        """
        with path.open("ab") as file:
            while (begin := file.tell()) < size:
                starts = list(range(begin, min(size, begin + BLOCKS * BLOCK_BYTES), BLOCK_BYTES))
                ends = [min(size, start + BLOCK_BYTES) for start in starts]
                request = partial(self._files.cat_ranges, [f"{self._root}/{name}"] * len(starts), starts, ends)
                blocks = self._ask(partial(request, on_error="raise"), TRIES)
                file.writelines(blocks)
                tick(sum(map(len, blocks)))
                if sum(map(len, blocks)) < ends[-1] - begin:
                    return  # it is too short, which its checksum shows

    # ---- the owner ----

    def latest(self) -> int:
        """The latest generation; 0: none."""
        return max((int(Path(name).stem) for name in self.names("owners") if name.endswith(".json")), default=0)

    def check_is_free(self, launch_id: str) -> bool:
        """Whether the latest owner is an attempt of this launch. Raises UserError if another run is alive."""
        latest = self._seen = self.latest()
        owner, name = self.read_json(f"owners/{latest:08d}.json"), f"owners/{latest:08d}.beat"
        self.run_id = owner.get("run", "")
        if not latest or (launch_id and owner.get("launch_id") == launch_id):
            return bool(latest)
        beat, ends = self.read_json(name), time.monotonic() + SECONDS_TO_SEE_A_BEAT
        if beat.get("state", "running") == "running":
            who = f"a job on {owner.get('host', '?')} since {owner.get('time', '?')}"
            text = "%s: looking for up to %.0f s whether its owner, %s, is alive"
            logging.getLogger(NAME).warning(text, self.url, SECONDS_TO_SEE_A_BEAT, who)
            while time.monotonic() < ends:
                time.sleep(SECONDS_TO_SEE_A_BEAT / 20)
                if self.read_json(name) != beat:
                    raise UserError(f"mirror={self.url}: is in use by {who}; end that job or give another --mirror")
        return False

    def claim(self, token: str, launch_id: str, host: str, run_id: str) -> None:
        """Become the owner: the generation after that of `check_is_free`. Raises UserError if another job is faster."""
        inherits = [each["manifest"] for each in self.checkpoints()]
        generation = self._seen + 1
        name, self.run_id = f"owners/{generation:08d}.json", self.run_id or run_id or uuid.uuid4().hex
        owner = {"token": token, "run": self.run_id, "launch_id": launch_id, "host": host, "time": now()}
        data, path = json.dumps(owner | {"inherits": inherits}, indent=2).encode(), f"{self._root}/{name}"
        try:
            self._files.pipe_file(path, data, mode="create")
        except Exception:  # there is one, or this storage cannot do it: each has errors of its own
            self._ask(lambda: self._files.exists(path) or self._files.pipe_file(path, data))
        time.sleep(SECONDS_TO_READ_BACK)
        if self.read_json(name).get("token") != token:
            raise UserError(f"mirror={self.url}: another job has claimed it; end that job or give another --mirror")
        self.generation = generation
        self._thread.start()

    def join(self, generation: int) -> None:
        """On a rank other than 0: the generation that rank 0 has claimed."""
        self.generation = generation

    def is_ours(self) -> bool:
        """Whether no other job has claimed the URL since. Sets `lost` if one has."""
        if self.latest() > self.generation:
            self.lost = f"mirror={self.url}: another job has taken over this run; end this one"
        return not self.lost

    def _beat(self) -> None:
        count = 0
        while not self.lost:
            with suppress(UserError):  # the next one may succeed
                if self.is_ours():
                    self.write_json(f"owners/{self.generation:08d}.beat", {"count": count, "state": "running"})
            count += 1
            if self._end.wait(SECONDS_BETWEEN_BEATS):
                return

    def close(self) -> None:
        """Stop the beats. On rank 0 the next owner need not wait for one."""
        self._end.set()
        if self.generation:
            self._thread.join(SECONDS_BETWEEN_BEATS)  # its last beat comes before this one
            with suppress(UserError):
                self.write_json(f"owners/{self.generation:08d}.beat", {"state": "ended"})

    # ---- checkpoints ----

    def own(self, name: str) -> str:
        """The name of an object of this generation."""
        return f"{self.generation:08d}/{name}"

    def checkpoints(self) -> list[dict[str, Any]]:
        """The manifests of the checkpoints that count, by step: the latest generation's and those that it inherits."""
        latest = self.latest()
        owner = self.read_json(f"owners/{latest:08d}.json")
        names = [*owner.get("inherits", []), *self.names(f"{latest:08d}/manifests")]
        found = [self.read_json(name) | {"manifest": name} for name in names]
        found = [each for each in found if "files" in each]  # others were deleted
        return sorted(found, key=lambda each: (each["step"], each["manifest"][:8], each["time"]))

    def commit(self, path: Path, step: int, files: dict[str, dict[str, Any]]) -> bool:
        """Write the manifest of a checkpoint whose files are all there. Returns False if another job owns the URL."""
        if not self.is_ours():
            return False
        name = self.own(f"manifests/{path.stem}.{next(iter(files.values()))['sha256'][:8]}.json")
        self.write_json(name, {"step": step, "name": path.name, "files": files, "time": now()})
        return True

    def prune(self, keep_last: int, keep_every: int, best: str) -> None:
        """Delete superseded checkpoints and what else no reader considers. best: the name of the best checkpoint."""
        valid = {each["step"]: each for each in self.checkpoints()}
        gone = checkpoint.superseded(valid, keep_last, keep_every)
        kept = [each for step, each in valid.items() if step not in gone or each["name"] == best]
        used = {each["manifest"] for each in kept}
        used |= {file["object"] for each in kept for file in each["files"].values()}
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
            self._ask(lambda: self._files.rm([f"{self._root}/{name}" for name in removed]))

    def restore_records(self, folder: Path) -> dict[str, Any]:
        """Fetch the run's files other than checkpoints. Returns the content of its lock.json, which is not replaced."""
        records = [name for name in self.names() if name[8:17] == "/records/"]
        latest = max((name[:9] for name in records if name.endswith("/records/status.json")), default="-")
        for name in [name for name in records if name.startswith(latest) and name[17:] != "lock.json"]:
            data = self._ask(partial(self._files.cat_file, f"{self._root}/{name}"), TRIES)
            (folder / name[17:]).parent.mkdir(parents=True, exist_ok=True)
            replace_file(folder / name[17:], partial(_write, data))
        return self.read_json(f"{latest}records/lock.json")

    def fetch_latest(self, folder: Path, step: int) -> tuple[Path | None, list[str]]:
        """Fetch the latest valid checkpoint after this step, and the best one at that time.

        Returns:
            Its path (None: there is none), and why later ones were skipped.
        """
        valid, notes = {each["step"]: each for each in self.checkpoints()}, []
        for number in sorted((each for each in valid if each > step), reverse=True):
            try:
                path = self._fetch(valid[number], folder)
            except StartError:
                raise
            except UserError as error:
                notes.append(str(error))
                continue
            best = _progress(path).get("best_step", -1)
            here = map(checkpoint.step_of, checkpoint.step_checkpoints(folder))
            if best in valid and best not in here:
                try:
                    self._fetch(valid[best], folder)
                except UserError as error:
                    notes.append(str(error))
            return path, notes
        return None, notes

    def _fetch(self, manifest: dict[str, Any], folder: Path) -> Path:
        """A checkpoint, under its name in this folder. Raises UserError if it is damaged."""
        place, path = folder / f"{FETCHED}{Path(manifest['manifest']).stem}", folder / manifest["name"]
        digests = {name: file["sha256"] for name, file in manifest["files"].items()}
        with suppress(UserError):
            if checkpoint.digests(path) == digests and checkpoint.verify(path):
                return path
        for other in folder.glob(f"{FETCHED}*"):
            if other != place:
                shutil.rmtree(other, ignore_errors=True)
        place.mkdir(exist_ok=True)
        source, log = f"{self.url}/{manifest['manifest']}", logging.getLogger(NAME)
        total, said = sum(file["bytes"] for file in manifest["files"].values()), time.monotonic()
        done = sum(each.stat().st_size for each in place.iterdir())

        def tick(count: int) -> None:
            nonlocal done, said
            done += count
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                log.info("fetching %s: %.0f of %.0f MB", source, done / 1e6, total / 1e6)

        try:
            for part, file in manifest["files"].items():
                self.get(file["object"], place / part, file["bytes"], tick)
                if archive.verify(place / part).digest != file["sha256"]:
                    raise UserError("another checksum")
        except StartError:
            raise
        except UserError:
            shutil.rmtree(place)
            raise UserError(f"{source}: {file['object']} is missing or damaged; give another checkpoint") from None
        if path.suffix:
            (place / part).replace(path)
            place.rmdir()
        else:
            replace_json(place / shards.MANIFEST, {"step": manifest["step"], "files": digests})
            checkpoint.replace_folder(place, path)
        log.info("fetched %s (%.0f MB)", source, total / 1e6)
        return path


def _write(data: bytes, file: BinaryIO) -> None:
    file.write(data)


def _progress(path: Path) -> dict[str, Any]:
    file = path / shards.part_name(0) if path.is_dir() else path
    return archive.load(file, f"{path}: is not a checkpoint", is_mapped=True)["progress"]
