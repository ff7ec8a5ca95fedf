# extra: template
"""Seeded corruptions, malicious files and other files under a checkpoint's name: none is loaded and no code runs."""

import io
import os
import pickle
import random
import re
from unittest import mock

import pytest
import torch

from ddp_utils import DistributedContext, load_checkpoint
from forged import Call, payload_of, small_state
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.settings.errors import UserError

PAGE, TRAILER = 4096, archive.TRAILER_BYTES
CTX = DistributedContext(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Valid checkpoints of one run, by step, and one of a model with other shapes."""
    path, state, contents = tmp_path_factory.mktemp("valid") / "c.pt", small_state(), {}
    for name, saved, step in ((10, state, 10), (20, state, 20), (30, state, 30), ("other", small_state(8, seed=1), 7)):
        archive.write_archive(path, payload_of(saved, step))
        contents[name] = path.read_bytes()
    return contents


def flip(data, rng, count):
    data = bytearray(data)
    for position in rng.sample(range(len(data)), count):
        data[position] ^= 1 << rng.randrange(8)
    return bytes(data)


def zero(data, start, count):
    return data[:start] + bytes(len(data[start : start + count])) + data[start + count :]


def block(data, rng):
    return rng.randrange(len(data) // PAGE) * PAGE


def splice(data, split, other, rng):
    return rng.choice([data[:split] + other[split:], other[:split] + data[split:]])


def append(data, rng):
    return data + rng.choice([b"\0", b"\n", data[-TRAILER:], bytes(PAGE), data, rng.randbytes(rng.randrange(1, PAGE))])


BYTES = {  # each returns changed bytes; `other` is another valid file
    "bit flipped": lambda data, rng, other: flip(data, rng, 1),
    "bits flipped": lambda data, rng, other: flip(data, rng, rng.randrange(2, 1000)),
    "bit of the trailer flipped": lambda data, rng, other: data[:-TRAILER] + flip(data[-TRAILER:], rng, 1),
    "page zeroed": lambda data, rng, other: zero(data, block(data, rng), PAGE),
    "end zeroed": lambda data, rng, other: zero(data, rng.randrange(len(data)), len(data)),
    "truncated": lambda data, rng, other: data[: rng.randrange(len(data))],
    "truncated in the trailer": lambda data, rng, other: data[: -rng.randrange(1, TRAILER + 1)],
    "empty": lambda data, rng, other: b"" if rng.randrange(2) else bytes(len(data)),
    "appended to": lambda data, rng, other: append(data, rng),
    "spliced": lambda data, rng, other: splice(data, block(data, rng), other, rng),
    "another's trailer": lambda data, rng, other: splice(data, -TRAILER, other, rng),
    "another step's": lambda data, rng, other: other,
}


def link(path, rng):
    """Link to another step's checkpoint, to nothing, or to itself."""
    path.symlink_to(path.with_name(rng.choice(["step_00000010.pt", "gone", path.name])))


def special(path, rng):
    kind = rng.choice(["folder", "pipe", "/dev/zero", "/dev/null", "/dev/tty"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)


KINDS = {**BYTES, "a link": link, "no ordinary file": special}


def corrupt(path, kind, rng, files):
    """Write a corruption of this kind to the path, replacing the last one."""
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    if kind not in BYTES:
        KINDS[kind](path, rng)
        return
    data, others = files[20], [files[10], files[30], files["other"]]
    while data == files[20]:  # it zeroed bytes that were zero: draw again
        data = BYTES[kind](files[20], rng, rng.choice(others))
    path.write_bytes(data)


def is_rejected(action, path):
    """Whether it raises a UserError with the path and a fix, and nothing else."""
    with pytest.raises(UserError) as error:
        action(path)
    text = str(error.value)
    is_safe = "weights_only" not in text or "use the command only if you trust the file" in text
    return str(path) in text and re.search(r"\. (Give|Rename) ", text) and is_safe


@pytest.mark.guarantee("damaged")
@pytest.mark.parametrize("count", [5, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_corrupt_checkpoint_is_loaded_and_the_previous_one_is_found(kind, count, files, tmp_path):
    older, path = (checkpoint.step_checkpoint_path(tmp_path, step) for step in (10, 20))
    older.write_bytes(files[10])
    path.write_bytes(files[20])
    assert checkpoint.find_latest_valid(tmp_path) == (path, [])
    ways = [checkpoint.verify_checkpoint, checkpoint.read_checkpoint, lambda path: load_checkpoint(path, CTX)]
    if kind not in ("another step's", "a link"):  # valid weights of another step
        ways.append(checkpoint.load_weights)
    for number in range(count):
        corrupt(path, kind, random.Random(f"{kind} {number}"), files)
        assert all(is_rejected(way, path) for way in ways), number
        latest, (reason,) = checkpoint.find_latest_valid(tmp_path)
        assert latest == older == checkpoint.find_best_or_latest(tmp_path, prefer_best=False)[0] and str(path) in reason


def test_a_valid_checkpoint_of_another_model_does_not_fit(tmp_path):
    path = checkpoint.step_checkpoint_path(tmp_path, 20)
    archive.write_archive(path, payload_of(small_state(width=8, seed=1), 20))
    with pytest.raises(UserError, match="do not fit the model"):
        small_state().load_state_dict(load_checkpoint(path, CTX))


def zipped(payload, is_new=True):
    file = io.BytesIO()
    torch.save(payload, file, _use_new_zipfile_serialization=is_new)
    return file.getvalue()


@pytest.mark.guarantee("untrusted")
@pytest.mark.parametrize(
    "write", [lambda payload: pickle.dumps(payload, 2), zipped, lambda payload: zipped(payload, is_new=False)]
)
def test_no_malicious_file_runs_code_or_is_loaded(write, tmp_path):
    """Its checksum is correct."""
    honest, marker = payload_of(small_state(), 10), tmp_path / "marker"
    path, weights = checkpoint.step_checkpoint_path(tmp_path, 10), tmp_path / "weights.pt"
    for bomb in (Call(os.system, f"touch {marker}"), Call(eval, f"open({str(marker)!r}, 'w')")):
        pickle.loads(pickle.dumps(bomb))
        marker.unlink()  # loading it by pickle does run code
        data = write(honest | {"model": bomb})
        weights.write_bytes(data)
        with mock.patch("torch.save", lambda payload, file, data=data: file.write(data)):
            archive.write_archive(path, honest)
        ways = [checkpoint.read_checkpoint, lambda path: load_checkpoint(path, CTX), checkpoint.load_weights]
        assert all(is_rejected(way, path) for way in ways) and is_rejected(checkpoint.load_weights, weights)
        assert not marker.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("progress", {"epoch": "10"}), ("model", {"0.weight": "x"}), ("optimizer", {"names": 5}), ("config", "text")],
)
def test_a_value_of_the_wrong_type_is_rejected(tmp_path, key, value):
    payload, path = payload_of(small_state(), 10), checkpoint.step_checkpoint_path(tmp_path, 10)
    archive.write_archive(path, payload | {key: payload[key] | value if isinstance(value, dict) else value})
    with pytest.raises(UserError, match=r"\. (Give|Use) "):
        small_state().load_state_dict(load_checkpoint(path, CTX))
