# extra: companions
"""Read a run in object storage, which scripts/companions/mirror.py writes: its valid checkpoints and its records.

These objects are there:

owners/<generation>.json        a claim, with token, host and the checkpoints that are valid at that moment ("inherits")
owners/<generation>.beat        a counter that moves while its run is alive
<generation>/manifests/*.json   the bytes and checksums of a checkpoint's files, written when all of them are there
<generation>/*.pt               the files of checkpoints
<generation>/records/           the other files of the run folder
<generation>/nodes/*.json       up to which step a node whose folder is its own has uploaded the records of its ranks

Objects cannot be locked or renamed. So each attempt claims the next generation, and a reader considers only the
manifests of the latest generation and those that it inherits. A former owner that wakes up changes nothing that is
read.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from scripts.lib.storage import MAX_TRIES, Storage
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.files import read_records, replace_file, replace_json
from utils.logger import LOGGER_NAME
from utils.settings.errors import StartError, UserError

SECONDS_BETWEEN_LOG_LINES = 10.0  # between two lines about the progress of a download
STAGING_PREFIX = ".fetched-"  # such a folder has the part of a checkpoint that has been fetched


class MirroredRun(Storage):
    """The run at a URL, as its readers see it."""

    def find_latest_generation(self) -> int:
        """Return the latest generation (0: there is none)."""
        return max((int(Path(name).stem) for name in self.list_objects("owners") if name.endswith(".json")), default=0)

    def read_manifests(self) -> list[dict[str, Any]]:
        """Return the manifests of the checkpoints that count, in the order of their steps.

        They are those of the latest generation, and those that it inherits.
        """
        latest = self.find_latest_generation()
        owner = self.read_json(f"owners/{latest:08d}.json")
        names = [*owner.get("inherits", []), *self.list_objects(f"{latest:08d}/manifests")]
        manifests = [self.read_json(name) | {"manifest": name} for name in names]
        manifests = [manifest for manifest in manifests if "files" in manifest]  # the others were deleted
        return sorted(manifests, key=lambda manifest: (manifest["step"], manifest["manifest"][:8], manifest["time"]))

    def restore_records(self, folder: Path) -> dict[str, Any]:
        """Fetch the run's files other than checkpoints.

        Returns:
            The content of its lock.json. The file itself is not replaced.
        """
        records = self._list_records()
        for file, (name, _) in records.items():
            if file != "lock.json":
                self._restore_file(name, folder / file)
        return self.read_json(records["lock.json"][0]) if "lock.json" in records else {}

    def restore_rank_records(self, folder: Path, ranks: list[int]) -> None:
        """Fetch the samples and logs of these ranks, unless the folder has more."""
        for file, (name, size) in self._list_records().items():
            path = folder / file
            if file in list_rank_files(ranks) and not (path.exists() and path.stat().st_size >= size):
                self._restore_file(name, path)

    def _list_records(self) -> dict[str, tuple[str, int]]:
        """Return the files of the latest generation that has records.

        The names of the objects and their bytes are by the names of the files in the run folder.
        """
        sizes = {name: size for name, size in self.list_objects().items() if name[8:17] == "/records/"}
        latest = max((name[:9] for name in sizes if name.endswith("/records/status.json")), default="-")
        return {name[17:]: (name, size) for name, size in sizes.items() if name.startswith(latest)}

    def _restore_file(self, name: str, path: Path) -> None:
        data = self._request(partial(self._filesystem.cat_file, f"{self._root}/{name}"), MAX_TRIES)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, partial(_write_bytes, data))

    def fetch_latest_checkpoint(self, folder: Path, after_step: int, records: Path) -> tuple[Path | None, list[str]]:
        """Fetch the latest valid checkpoint after this step, and the best one at that time.

        Args:
            folder: the folder for checkpoints.
            after_step: only later checkpoints are fetched.
            records: the path of metrics.jsonl.

        Returns:
            The path of the checkpoint (None: there is none), and why later ones were skipped.
        """
        valid, notes = {manifest["step"]: manifest for manifest in self.read_manifests()}, []
        for number in sorted((valid_step for valid_step in valid if valid_step > after_step), reverse=True):
            try:
                path = self.fetch_checkpoint(valid[number], folder)
            except StartError:
                raise
            except UserError as error:
                notes.append(str(error))
                continue
            best = find_best_step(records, number)
            if best in valid and best != number:
                try:
                    self.fetch_checkpoint(valid[best], folder)
                except UserError as error:
                    notes.append(str(error))
            return path, notes
        return None, notes

    def fetch_checkpoint(self, manifest: dict[str, Any], folder: Path) -> Path:
        """Fetch a checkpoint into this folder, and return its path. Raises UserError if the checkpoint is damaged."""
        staging, path = folder / f"{STAGING_PREFIX}{Path(manifest['manifest']).stem}", folder / manifest["name"]
        digests = {name: file["sha256"] for name, file in manifest["files"].items()}
        with suppress(UserError):
            if checkpoint.read_checksums(path) == digests and checkpoint.verify_checkpoint(path):
                return path
        for stale in folder.glob(f"{STAGING_PREFIX}*"):
            if stale != staging:
                shutil.rmtree(stale, ignore_errors=True)
        staging.mkdir(exist_ok=True)
        source, log = f"{self.url}/{manifest['manifest']}", logging.getLogger(LOGGER_NAME)
        total, logged_at = sum(file["bytes"] for file in manifest["files"].values()), time.monotonic()
        done = sum(entry.stat().st_size for entry in staging.iterdir())

        def on_progress(count: int) -> None:
            nonlocal done, logged_at
            done += count
            if time.monotonic() - logged_at > SECONDS_BETWEEN_LOG_LINES:
                logged_at = time.monotonic()
                log.info("Fetched %.0f of %.0f MB of %s so far.", done / 1e6, total / 1e6, source)

        try:
            for part, file in manifest["files"].items():
                self.download(file["object"], staging / part, file["bytes"], on_progress)
                if archive.verify_archive(staging / part).checksum != file["sha256"]:
                    raise UserError("The checksum differs.")
        except StartError:
            raise
        except UserError:
            shutil.rmtree(staging)
            raise UserError(f"{file['object']} of {source} is missing or damaged. Give another checkpoint.") from None
        if path.suffix:
            (staging / part).replace(path)
            staging.rmdir()
        else:
            replace_json(staging / archive.MANIFEST_FILE, {"step": manifest["step"], "files": digests})
            checkpoint.replace_folder(staging, path)
        log.info("%s was fetched (%.0f MB).", source, total / 1e6)
        return path


def list_rank_files(ranks: Iterable[int]) -> set[str]:
    """Return the files of the run folder that each of these ranks writes itself."""
    return {file for rank in ranks for file in (f"samples/rank{rank}.jsonl", f"logs/rank{rank}.log")}


def _write_bytes(data: bytes, file: BinaryIO) -> None:
    file.write(data)


def find_best_step(records: Path, last_step: int | None = None) -> int:
    """Return the step of the best checkpoint of those up to this step (-1: there is none)."""
    events = [record["step"] for *_, record in read_records(records) if record.get("event") == "best"]
    return next((step for step in reversed(events) if last_step is None or step <= last_step), -1)


def local_run(source: str, choose_steps: Callable[[list[int], int], Iterable[int]] = lambda steps, best: []) -> Path:
    """Return the folder of a run. For a run at a URL, it is a local copy with the records and the chosen checkpoints.

    Args:
        source: a path or a URL.
        choose_steps: a function that returns the steps of the checkpoints that are needed. It gets the steps of all
            checkpoints in rising order, and the step of the best one.

    Raises:
        UserError: if there is no run, or a checkpoint is damaged.
    """
    if "://" not in source:
        return Path(source)
    run = MirroredRun(source)
    folder = _cache_folder(run.url) / Path(run.url).name
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:  # all ranks of a node share one copy
        fcntl.flock(lock, fcntl.LOCK_EX)
        valid = {manifest["step"]: manifest for manifest in run.read_manifests()}
        run.restore_records(folder)
        if not (folder / "status.json").exists():
            raise UserError(f"{source} holds no run. Give the URL that the run had as --mirror.")
        best = find_best_step(folder / "metrics.jsonl")
        best = best if best in valid else -1
        for path in checkpoint.list_step_checkpoints(checkpoints):
            if path.name not in {manifest["name"] for manifest in valid.values()}:
                checkpoint.remove_checkpoint(path)
        for step in choose_steps(list(valid), best):
            path = run.fetch_checkpoint(valid[step], checkpoints)
            if step == best:
                checkpoint.link_best(path)
    return folder


def local_checkpoint(source: str) -> Path:
    """Return the path of a checkpoint or another file. For one at a URL, it is that of a local copy.

    Args:
        source: a path, the URL of a file, or a checkpoint of a run at a URL. Such a checkpoint is
            RUN/checkpoints/step_00000012.pt, RUN/checkpoints/best.pt, or just RUN. RUN may be a folder too. It means
            the best checkpoint or, without an evaluation, the latest one.

    Raises:
        UserError: if the file is not there or damaged.
    """
    if "://" not in source:
        return checkpoint.find_best_or_latest(Path(source), prefer_best=True)[0]
    url, _, name = source.partition("/checkpoints/")
    if not name and Path(url).suffix:
        return _fetch_file(source)
    chosen: list[int] = []

    def choose_steps(steps: list[int], best: int) -> list[int]:
        step = archive.STEP_NAME_PATTERN.fullmatch(name)
        wanted = int(step[1]) if step else best if best >= 0 or name else max(steps, default=-1)
        if wanted not in steps:
            available = ", ".join(map(str, steps)) or "none"
            raise UserError(f"There is no {source}. The run has checkpoints of these steps: {available}.")
        chosen.append(wanted)
        return chosen

    folder = local_run(url, choose_steps) / "checkpoints"
    return next(path for path in checkpoint.list_step_checkpoints(folder) if checkpoint.parse_step(path) in chosen)


def _fetch_file(url: str) -> Path:
    """Return a local copy of an object, which is fetched again only when it has changed. Raises UserError."""
    folder, _, name = url.rpartition("/")
    storage = Storage(folder, url)
    size, version = storage.read_version(name)
    cache_folder = _cache_folder(url)
    path = cache_folder / hashlib.sha256(version.encode()).hexdigest()[:16] / name
    cache_folder.mkdir(parents=True, exist_ok=True)
    with (cache_folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            for stale in cache_folder.glob("*/"):
                shutil.rmtree(stale)
            path.parent.mkdir()
            part = path.with_name(f"{STAGING_PREFIX}{name}")
            storage.download(name, part, size, lambda count: None)
            part.replace(path)
    return path


def _cache_folder(url: str) -> Path:
    """Return the folder for copies of what is at this URL. It is where torch keeps its downloads ($TORCH_HOME)."""
    home = os.environ.get("TORCH_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "torch"))
    return Path(os.path.expanduser(home), "hub/copies", hashlib.sha256(url.encode()).hexdigest()[:16])
