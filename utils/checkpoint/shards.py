"""The checkpoint of a sharded run: a folder to which each rank writes its shards while training goes on.

.metadata, __<rank>_0.distcp   the sharded tensors, by torch.distributed.checkpoint
rest.pt                        everything else, as in a checkpoint file (format.py)
manifest.json                  the step, and the SHA-256 of every other file

Rank 0 writes the manifest and gives the folder its name when the files of all ranks are on the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pickle
import queue
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from config import UserError
from utils.checkpoint import format as checkpoint
from utils.checkpoint.writer import Background, Job, Outcome, check_owner, check_room, outcome_of, problem_of
from utils.distributed.collectives import all_gather_json
from utils.distributed.context import DistributedContext
from utils.distributed.dtensor import is_sharded, local, wrap
from utils.files import TEMPORARY, replace_json

MANIFEST, REST = checkpoint.MANIFEST, "rest.pt"
ALLOWED = {  # in the pickled .metadata
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}


def verify(folder: Path, part: tuple[int, int] = (0, 1)) -> checkpoint.Trailer:
    """The step and the checksum of the manifest. Raises UserError if a file is missing or does not match it.

    part: (number, readers): compute only every so many-th checksum, as each reader does.
    """
    try:
        if not (folder / MANIFEST).exists():
            raise UserError(f"{folder}: lacks {MANIFEST}; give another checkpoint")
        text = (folder / MANIFEST).read_bytes()
        manifest = json.loads(text)
        step, files = int(manifest["step"]), dict(manifest["files"])
        missing = sorted(name for name in files if not (folder / name).is_file())
        if missing or REST not in files:
            raise UserError(f"{folder}: lacks {(missing or [REST])[0]}; give another checkpoint")
        for name in sorted(files)[part[0] :: part[1]]:
            if digest_of_file(folder / name) != files[name]:
                raise UserError(f"{folder}: is damaged: {name} does not match {MANIFEST}; give another checkpoint")
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); give the path of a checkpoint") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: its {MANIFEST} is damaged; give another checkpoint") from None
    if (name := checkpoint.STEP_NAME.fullmatch(folder.resolve().name)) and int(name[1]) != step:
        raise UserError(f"{folder}: is the checkpoint of step {step} under another name; rename it or give another")
    return checkpoint.Trailer(step, hashlib.sha256(text).hexdigest())


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(folder: Path, trailer: checkpoint.Trailer, layouts: dict[str, Tensor]) -> dict[str, Any]:
    """The content of the checkpoint. Raises UserError if it is damaged or incomplete.

    layouts: sharded parameters by name: of these, and of their optimizer state, only this rank's shards are read.
    """
    payload = checkpoint.read(folder / REST, trailer)[0]
    try:
        _read_tensors(folder, payload, layouts)
    except BaseException as error:  # torch's own CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | UserError | MemoryError):
            raise
        raise UserError(
            f"{folder}: its tensors cannot be read ({type(_cause(error)[1]).__name__}); give another checkpoint"
        ) from None
    return payload


def _read_tensors(folder: Path, payload: dict[str, Any], layouts: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with (folder / ".metadata").open("rb") as file:
                return _Unpickler(file).load()

    tensors, reader, names = {}, Reader(folder), payload["optimizer"]["names"]
    for key, each in reader.read_metadata().state_dict_metadata.items():
        section, name = key.split("/", 1)
        like = layouts.get(names[int(name.split("/")[0])] if section == "optimizer" else name)
        is_part = like is not None and like.shape == each.size
        empty = torch.empty(local(like).shape if is_part else each.size, dtype=each.properties.dtype)
        tensors[key] = wrap(empty, like) if is_part else empty
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    for key, tensor in tensors.items():
        section, name = key.split("/", 1)
        if section == "optimizer":
            number, name = name.split("/", 1)
            payload[section]["state"].setdefault(int(number), {})[name] = tensor
        else:
            payload[section][name] = tensor


class _Unpickler(pickle.Unpickler):
    """Never runs code from the file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3: of an enum and a member's name
            return lambda kind, member: kind.__members__[member]
        if name not in ALLOWED.get(module, ()):
            raise UserError(f".metadata holds a {module}.{name}, which no checkpoint needs; give another checkpoint")
        return super().find_class(module, name)


def split(payload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The payload without its sharded tensors, and these with a name for each."""
    tensors = {}

    def without(values: dict[Any, Any], place: str) -> dict[Any, Any]:
        tensors.update({f"{place}/{name}": value for name, value in values.items() if is_sharded(value)})
        return {name: value for name, value in values.items() if not is_sharded(value)}

    optimizer = payload["optimizer"]
    states = {number: without(state, f"optimizer/{number}") for number, state in optimizer["state"].items()}
    rest = {section: without(payload[section], section) for section in ("model", "ema")}
    return payload | rest | {"optimizer": optimizer | {"state": states}}, tensors


class ShardWriter(Background):
    """Has the methods of `Writer`, and is used on all ranks: its thread writes this rank's shards.

    The threads of the ranks speak to each other in a group of their own. All of them have the same outcome.
    """

    def __init__(self, ctx: DistributedContext) -> None:
        super().__init__()
        self._ctx = dataclasses.replace(ctx, control=dist.new_group(backend="gloo", timeout=timedelta(hours=24)))
        self._jobs, self._outcomes = queue.Queue(), queue.Queue()
        self._thread = threading.Thread(target=self._serve, name="shards", daemon=True)
        self._thread.start()
        self._task = Path(f"/proc/self/task/{self._thread.native_id}")

    def commit(self, is_right: bool = True) -> None:
        """Let it write the last job, or drop that."""
        if is_right:
            self._jobs.put(self._job)
        else:
            self._outcomes.put(outcome_of(self._job, 0.0, "dropped", is_final=True))

    def wait(self, seconds: float) -> Outcome | None:
        """The outcome of the job, after at most this many seconds."""
        try:
            return self._outcomes.get(timeout=seconds) if seconds else self._outcomes.get_nowait()
        except queue.Empty:
            return None

    def close(self, seconds: float) -> None:
        """End the thread after it has written what was committed. It is waited for at most so long."""
        self._jobs.put(None)
        self._thread.join(seconds)

    # ---- the thread ----

    def _serve(self) -> None:
        while job := self._jobs.get():
            begin, problem, is_final = time.monotonic(), "", False
            folder = job.path.with_name(f"{job.path.name}.{job.lock_number}-{job.number}{TEMPORARY}")
            try:
                self._save(job, folder)
            except Exception as error:
                is_final = isinstance(error, UserError)
                problem = str(error) if is_final or isinstance(error, OSError) else problem_of(job, error)
                if self._ctx.is_main:
                    shutil.rmtree(folder, ignore_errors=True)
            self._outcomes.put(outcome_of(job, time.monotonic() - begin, problem, is_final))

    def _save(self, job: Job, folder: Path) -> None:
        parts: list[Any] = []
        self._agree(job, lambda: parts.extend(self._prepare(job, folder)))
        digests = self._agree(job, lambda: self._write(job, folder, *parts))
        sums = {name: digest for each in digests for name, digest in each.items()}
        self._agree(job, lambda: self._publish(job, folder, sums) if self._ctx.is_main else None)

    @contextlib.contextmanager
    def _waiting(self, is_waiting: bool = True) -> Iterator[None]:
        """Whether a rank without progress waits for another one now, which then looks at its own progress."""
        before, self._is_waiting = self._is_waiting, is_waiting
        try:
            yield
        finally:
            self._is_waiting = before

    def _agree(self, job: Job, action: Callable[[], Any]) -> list[Any]:
        """The results of all ranks. If the action fails on one of them, all raise its error."""
        result, problem, is_final = None, "", False
        try:
            result = action()
        except BaseException as error:  # torch's own CheckpointException is no Exception
            rank, cause = _cause(error, self._ctx.rank)
            is_final = isinstance(cause, UserError)
            problem = str(cause) if is_final else f"{problem_of(job, cause)} (rank {rank} on {self._ctx.hosts[rank]})"
        with self._waiting():
            found = all_gather_json([result, problem, is_final], self._ctx)
        for _, text, is_final in found:
            if text:
                raise UserError(text) if is_final else OSError(text)
        return [result for result, *_ in found]

    def _prepare(self, job: Job, folder: Path) -> tuple[Any, ...]:
        """What may fail before the ranks begin to write together, where a missing one would hold up the others."""
        import torch.distributed.checkpoint as dcp

        check_room(job)
        storage = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)  # no stream, which would be one of GPU 0
        storage.write_data = self._waiting(False)(storage.write_data)
        storage.finish = self._waiting(False)(storage.finish)
        return *split(checkpoint.unflatten(job.flat, self._views)), storage

    def _write(self, job: Job, folder: Path, rest: dict[str, Any], tensors: dict[str, Tensor], storage: Any) -> dict:
        """Write this rank's files. Returns their checksums."""
        import torch.distributed.checkpoint as dcp

        with self._waiting():
            dcp.save(tensors, storage_writer=storage, process_group=self._ctx.control)
        names = [path.name for path in folder.glob(f"__{self._ctx.rank}_*")]
        if self._ctx.is_main:
            checkpoint.write(folder / REST, rest)
            names += [".metadata", REST]
        return {name: digest_of_file(folder / name) for name in names}

    def _publish(self, job: Job, folder: Path, digests: dict[str, str]) -> None:
        """On rank 0: give the folder its name."""
        check_owner(job)
        replace_json(folder / MANIFEST, {"step": job.flat["progress"]["step"], "files": digests})
        checkpoint.replace_folder(folder, job.path)
        with contextlib.suppress(OSError):
            checkpoint.prune(job.path.parent, *job.keep)


def _cause(error: BaseException, rank: int = 0) -> tuple[int, BaseException]:
    """The error of a rank in the exception that torch.distributed.checkpoint raises on all ranks, and that rank."""
    for failed, (cause, _) in getattr(error, "failures", {}).items():
        return failed, cause
    return rank, error
