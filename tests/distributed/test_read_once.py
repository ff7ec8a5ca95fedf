# extra: template
"""Many ranks: data and checkpoints are read once per file system or node, and damage on one node is still noticed."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from forged import payload_of, small_state
from ranks import lack, run_ranks
from test_refusals import group
from training import difference
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.distributed.collectives import read_once_per_file_system
from utils.run.resume import load_checkpoint
from utils.settings.errors import UserError


def read_folder(root):
    """Ranks 0 and 2 see one folder, 1 and 3 another. Returns the bytes or the error, and how often it read."""
    with group() as ctx:
        folder, reads = Path(root) / str(ctx.rank % 2), []

        def read():
            reads.append(1)
            return (folder / "data").read_bytes()

        try:
            return bytes(read_once_per_file_system(folder, read, "{other} and {first} hold different data", ctx)), len(
                reads
            )
        except UserError as error:
            return str(error), len(reads)


@pytest.mark.guarantee("data-once")
def test_a_folder_is_read_once_per_file_system_and_must_be_the_same_on_all(tmp_path):
    for name in "01":
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(b"\0abc" * 1000)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run_ranks(4, read_folder, tmp_path) == [(b"\0abc" * 1000, reads) for reads in (1, 1, 0, 0)]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before  # the data may be read-only
    (tmp_path / "1" / "data").write_bytes(b"\0abd" * 1000)
    for text, _ in run_ranks(4, read_folder, tmp_path):
        assert "(rank 1) and " in text and text.endswith("(rank 0) hold different data")


def load_on_nodes(root, nodes):
    """With two ranks on each of `nodes` nodes: the loaded sum or the error, and the bytes that this rank read."""

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    with group() as ctx:
        ctx = dataclasses.replace(ctx, hosts=tuple(f"node{rank // 2}" for rank in range(2 * nodes)))
        before = bytes_read()
        try:
            payload = load_checkpoint(Path(root) / ctx.host / "step_00000010.pt", ctx)
            result = sum(tensor.double().sum().item() for tensor in payload["model"].values())
        except UserError as error:
            result = str(error)
        return result, bytes_read() - before


@pytest.mark.guarantee("damaged")
def test_a_checkpoint_is_verified_once_per_node_and_damage_on_one_node_is_noticed(tmp_path):
    if not Path("/proc/self/io").exists():
        lack("/proc/self/io does not exist")
    state = small_state(width=2000)
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
    path = checkpoint.step_checkpoint_path(tmp_path / "node0", 10)
    archive.write_archive(path, payload_of(state, 10))
    copy = Path(shutil.copy(path, tmp_path / "node1"))
    total, size = sum(tensor.double().sum().item() for tensor in state.model.state_dict().values()), path.stat().st_size
    ranks = run_ranks(4, load_on_nodes, tmp_path, 2)
    assert [value for value, _ in ranks] == [total] * 4
    assert [round(count / size, 1) for _, count in ranks] == [1, 0, 1, 0]
    with copy.open("r+b") as file:  # one bit of a weight
        file.seek(size // 2)
        byte = file.read(1)[0]
        file.seek(size // 2)
        file.write(bytes([byte ^ 1]))
    for text, _ in run_ranks(4, load_on_nodes, tmp_path, 2):
        assert re.match(rf"Rank 2 on node1 failed: {re.escape(str(copy))} is damaged", text), text


def test_a_loaded_state_uses_no_memory_of_the_file(tmp_path):
    """It could not be deleted, and on network storage another node may delete it."""
    maps, path = Path("/proc/self/maps"), checkpoint.step_checkpoint_path(tmp_path, 10)
    if not maps.exists():
        lack("/proc/self/maps does not exist")
    written, state = (small_state(seed=seed, optimizer="adamw") for seed in (1, 2))
    archive.write_archive(path, payload_of(written, 10))
    payload = checkpoint.read_checkpoint(path)[0]
    assert path.name in maps.read_text()
    state.load_state_dict(payload)
    del payload
    assert path.name not in maps.read_text()
    assert difference(*(training_state.state_dict()["optimizer"]["state"] for training_state in (state, written))) == []
