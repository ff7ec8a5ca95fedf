"""The checkpoint of a sharded run: a folder of checkpoint files (archive.py), one per rank, and a manifest.

part_<rank>.pt   the state as this rank has it: of a sharded tensor its rows and their place, and everything else
manifest.json    the step, and the checksum of each shard

Any number of ranks can read it: rows are joined.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.checkpoint import archive
from utils.checkpoint.archive import MANIFEST_FILE
from utils.checkpoint.format import FileFormat
from utils.files import read_json, retry
from utils.settings.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def shard_file_name(rank: int) -> str:
    return f"part_{rank:05d}.pt"


class FolderFormat(FileFormat):
    """How the checkpoint of a sharded run is read."""

    def verify(self, path: Path, reader_and_count: tuple[int, int]) -> archive.Trailer:
        """The step and the checksum of the manifest. Raises UserError if a shard is missing or does not match it.

        reader_and_count: (number, readers): compute only every so many-th checksum, as each reader does.
        """
        try:
            text = retry((path / MANIFEST_FILE).read_bytes)
            manifest = json.loads(text)
            step, files = int(manifest["step"]), {str(name): str(digest) for name, digest in manifest["files"].items()}
        except FileNotFoundError:
            raise UserError(f"{path} lacks {MANIFEST_FILE}. Give another checkpoint.") from None
        except OSError as error:
            raise archive.explain_unreadable(path, error) from None
        except (AttributeError, ValueError, KeyError, TypeError):
            raise UserError(f"The {MANIFEST_FILE} of {path} is damaged. Give another checkpoint.") from None
        if ".metadata" in files:
            raise UserError(
                f"{path} is in the format of torch.distributed.checkpoint, which versions of the template up to"
                " November 2026 used. Export its weights with such a version, and give them with --init_from."
            )
        missing = [name for name in [shard_file_name(0), *files] if name not in files or not (path / name).is_file()]
        if missing:
            raise UserError(f"{path} lacks {missing[0]}. Give another checkpoint.")
        reader, readers = reader_and_count
        for number, name in enumerate(sorted(files)):
            trailer = archive.verify_archive(path / name, computes_checksum=number % readers == reader)
            if trailer != (step, files[name]):
                raise UserError(f"{path} is damaged: {name} does not match {MANIFEST_FILE}. Give another checkpoint.")
        archive.check_step_in_name(path.resolve(), step)
        return archive.Trailer(step, hashlib.sha256(text).hexdigest())

    def read_manifest(self, path: Path) -> tuple[int, dict[str, str]]:
        manifest = read_json(path / MANIFEST_FILE)
        return manifest.get("step", -1), manifest.get("files", {})

    def read(self, path: Path, trailer: archive.Trailer, sharded: dict[str, Tensor]) -> dict[str, Any]:
        """The content of the checkpoint. Raises UserError if it is damaged or incomplete.

        sharded: sharded parameters by name: of these, and of their optimizer state, only this rank's rows are read.
        """
        shards = [archive.read_archive(file, trailer) for file in sorted(path.glob("part_*.pt"))]
        names = shards[0]["optimizer"].get("names", [])

        def join_values(values: list[Any], key_path: tuple = ()) -> Any:
            first = values[0]
            if not isinstance(first, dict):
                return first
            if first.keys() == {"rows", "first", "size"}:
                name = names[key_path[2]] if key_path[0] == "optimizer" else key_path[1]
                return _join_rows(values, sharded.get(name))
            return {key: join_values([value[key] for value in values], (*key_path, key)) for key in first}

        try:
            return join_values(shards)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"The shards of {path} do not fit together ({type(error).__name__}). Give another checkpoint."
            ) from None


def _join_rows(shards: list[dict[str, Any]], like: Tensor | None) -> Tensor:
    """The whole tensor; or, sharded as `like`, the rows that this rank has of it."""
    import torch

    from utils.distributed.dtensor import create_dtensor, local_row_range

    size = torch.Size(shards[0]["size"])
    is_shard = like is not None and like.shape == size
    first, count = local_row_range(like) if is_shard else (0, size[0])
    rows, filled = torch.empty(count, *size[1:], dtype=shards[0]["rows"].dtype), 0
    for shard in shards:
        begin, end = max(first, shard["first"]), min(first + count, shard["first"] + len(shard["rows"]))
        if begin < end:
            rows[begin - first : end - first] = shard["rows"][begin - shard["first"] : end - shard["first"]]
            filled += end - begin
    if filled != count:
        raise ValueError(f"{filled} rows of {count}")
    return create_dtensor(rows, like) if is_shard else rows
