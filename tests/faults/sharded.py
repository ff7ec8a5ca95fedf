# extra: template and sharding
"""Checkpoints of sharded runs: files that are missing or damaged, and ranks that are killed or cannot write."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoints import cut
from drill import FLAGS, HOST, Drill, fault
from forged import Call
from ranks import run_ranks
from storage import ENDS_AT_A_STOP, ENDS_IN_SECONDS, RUN, ends_without
from tasks import train_task
from training import says
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.extras.sharding.folder_format import shard_file_name

ZERO3 = [*RUN, "--sharding", "zero3"]
KILLED = """
import signal
from utils.checkpoint import archive
from utils.extras.sharding import folder_layout as layouts
def kill_at(name, moment, rank):
    owner = {'write_archive': archive, 'replace_folder': layouts}[name]
    plain = getattr(owner, name)
    def replaced(path, *rest, **options):
        is_it = 'step_00000020' in str(path) and RANK == rank
        if is_it and moment == 'before':
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(path, *rest, **options)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, replaced)
"""
STALLED = """
from utils.checkpoint import archive
plain_write = archive.write_archive
def write(path, payload, before_rename=None, on_progress=lambda: None):
    for number in range(WRITES if RANK == 1 and 'step_00000020' in str(path) else 0):
        if number < 24:
            on_progress()
        time.sleep(0.5)
    return plain_write(path, payload, before_rename, on_progress)
archive.write_archive = write
"""


def stopped_at_30(drill: Drill) -> Path:
    """A run stopped at step 30; returns its folder with the checkpoints of steps 10, 20 and 30."""
    words = [*FLAGS, "--run_dir", drill.folder / "run", *ZERO3]
    run_ranks(2, train_task, "images", words, torch.float32, [29], False)
    folder = drill.folder / "run/checkpoints"
    assert [path.name for path in checkpoint.list_step_checkpoints(folder)] == [
        f"step_000000{step}" for step in (10, 20, 30)
    ]
    return folder


def without_a_shard(last: Path) -> None:
    (last / shard_file_name(1)).unlink()


def with_a_short_shard(last: Path) -> None:
    cut(last / shard_file_name(0))


def with_a_shard_of_another_step(last: Path) -> None:
    shutil.copy(last.with_name("step_00000020") / shard_file_name(1), last)


def with_another_shard(last: Path) -> None:
    """Of the same step and with a valid checksum, but not of this run's seed."""
    payload = archive.load_weights_only(last / shard_file_name(1), "")
    payload["config"]["seed"] += 1
    archive.write_archive(last / shard_file_name(1), payload)


def without_a_manifest(last: Path) -> None:
    (last / "manifest.json").unlink()


def under_another_name(last: Path) -> None:
    shutil.copytree(last.with_name("step_00000020"), last.with_name("step_00000040"))
    shutil.rmtree(last)


def with_a_malicious_part(last: Path) -> None:
    """With correct checksums; it touches a file when it is unpickled."""
    payload = archive.load_weights_only(last / shard_file_name(1), "")
    payload["model"] = Call(os.system, f"touch {last.parent}/marker")
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["files"][shard_file_name(1)] = archive.write_archive(last / shard_file_name(1), payload)
    (last / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = (
    (with_another_shard, r"step_00000030 is damaged: part_00001\.pt does not match manifest\.json"),
    (with_a_short_shard, r"step_00000030/part_00000\.pt has no checksum at its end, so it is truncated"),
    (without_a_shard, r"step_00000030 lacks part_00001\.pt"),
    (with_a_shard_of_another_step, r"step_00000030 is damaged: part_00001\.pt does not match manifest\.json"),
    (without_a_manifest, r"step_00000030 lacks manifest.json"),
    (under_another_name, r"step_00000040 is the checkpoint of step 20 under another name"),
)


@fault("newest checkpoint damaged", DAMAGES[:1], is_default=True, guarantees="sharded-damage")
@fault("newest checkpoint damaged in other ways", DAMAGES[1:], guarantees="sharded-damage")
def damaged(drill: Drill, damages: tuple[tuple[Callable[[Path], None], str], ...]) -> None:
    whole = stopped_at_30(drill)
    shutil.copytree(drill.folder / "run", drill.folder / "before")
    for damage, pattern in damages:
        shutil.rmtree(drill.folder / "run")
        shutil.copytree(drill.folder / "before", drill.folder / "run")
        damage(whole / "step_00000030")
        drill.resumes(2, *ZERO3)
        assert drill.events("resumed")[-1]["step"] == 20
        says(drill.runs.log("run"), pattern)


@fault("malicious part", guarantees="sharded-damage")
def malicious(drill: Drill) -> None:
    folder = stopped_at_30(drill)
    with_a_malicious_part(folder / "step_00000030")
    job = drill.start(2, *ZERO3, "--resume_from", folder / "step_00000030")
    ended = job.end()
    assert ended.code == 1 and not (folder / "marker").exists()
    says(ended.text, r"part_00001\.pt is not a checkpoint \(UnpicklingError\)")


@fault("rank 0 killed while shards are written", "write_archive", "before", 0, 10, guarantees="sharded-save")
@fault("rank killed after its shards are on the disk", "write_archive", "after", 1, 10, guarantees="sharded-save")
@fault("rank 0 killed before the folder gets its name", "replace_folder", "before", 0, 10, guarantees="sharded-save")
@fault("rank 0 killed after the folder has its name", "replace_folder", "after", 0, 20, guarantees="sharded-save")
def killed(drill: Drill, function: str, moment: str, rank: int, step: int) -> None:
    job = drill.start(2, *ZERO3, code=f"{KILLED}\nkill_at({function!r}, {moment!r}, {rank})")
    sentences: list[str] = []
    failed_rank: int | None = None  # without the watchdog, the rank that lost its peer reports
    sentences, failed_rank = [rf"Rank {rank} on {HOST} was killed or cut off"], rank  # extra: watch
    drill.fails(job, *sentences, rank=failed_rank)
    names = [path.name for path in checkpoint.list_step_checkpoints(job.folder / "checkpoints")]
    assert names[-1] == f"step_000000{step}"
    drill.resumes(2, *ZERO3)


@fault("storage of one rank hangs", False, guarantees="stalled-write")
@fault("SIGTERM while the storage of one rank hangs", True, guarantees="stalled-write")
def stalled(drill: Drill, is_asked: bool) -> None:
    job = drill.start(2, *ZERO3, code=f"WRITES = 9999\n{ENDS_AT_A_STOP if is_asked else ENDS_IN_SECONDS}{STALLED}")
    ends_without(drill, job, is_asked, rank=1)
    drill.resumes(2, *ZERO3)


@fault("storage of one rank is slow", guarantees="stalled-write")
def slow(drill: Drill) -> None:
    """It takes three times as long as a write without progress may."""
    job = drill.start(2, *ZERO3, code=f"WRITES = 24\n{ENDS_IN_SECONDS}{STALLED}")
    drill.has_completed(job)
    assert [event["step"] for event in drill.events("checkpoint")] == [10, 20, 30, 40, 50]
    drill.is_whole(2, *ZERO3)
