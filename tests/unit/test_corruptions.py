"""Seeded corruptions of a checkpoint, swapped files among them: none is loaded, and the one before it is found."""

import collections
import contextlib
import os
import random
import re
import resource
import signal
import socket

import pytest

from config import TrainingConfig, UserError
from ddp_utils import cleanup_distributed, load_checkpoint, setup_distributed
from forged import limit_memory, small_state, train_to
from utils.checkpoint import format as checkpoint

PAGE, TRAILER = 4096, checkpoint.TRAILER_BYTES
SENTENCE = r"[^\n]*; (give|make|put|start|move|delete) [^\n]+"  # ends with the fix


@pytest.fixture(scope="module")
def ctx():
    yield setup_distributed(TrainingConfig(backend="gloo"))
    cleanup_distributed()


@contextlib.contextmanager
def bounded():
    """What waits for ever (on a pipe that nobody writes to) or reads for ever (/dev/zero) fails."""

    def fail(*_):
        pytest.fail("took more than 60 s")

    handler, limits = signal.signal(signal.SIGALRM, fail), limit_memory(2**30)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(scope="module")
def files(ctx, tmp_path_factory):
    """Whole files: of one run, by step, and of others."""
    folder = tmp_path_factory.mktemp("whole")
    state = small_state()
    found = {}
    for step in (10, 20, 30):
        checkpoint.write(folder / "c.pt", train_to(state, step))
        found[step] = (folder / "c.pt").read_bytes()
    checkpoint.write(folder / "c.pt", train_to(small_state(width=8, seed=1), 7))
    found["other shapes"] = (folder / "c.pt").read_bytes()
    assert max(map(len, found.values())) < 300_000
    return found


# ---- the kinds: each gives other bytes ----


def flip(data, rng, count):
    data = bytearray(data)
    for position in rng.sample(range(len(data)), count):
        data[position] ^= 1 << rng.randrange(8)
    return bytes(data)


def zero(data, start, count):
    return data[:start] + bytes(len(data[start : start + count])) + data[start + count :]


def block(data, rng):
    return rng.randrange(len(data) // PAGE) * PAGE


def spliced(data, split, other, rng):
    return rng.choice([data[:split] + other[split:], other[:split] + data[split:]])


def appended(data, rng):
    return data + rng.choice([b"\0", b"\n", data[-TRAILER:], bytes(PAGE), data, rng.randbytes(rng.randrange(1, PAGE))])


BYTES = {
    "bit flipped": lambda data, rng, other: flip(data, rng, 1),
    "bits flipped": lambda data, rng, other: flip(data, rng, rng.randrange(2, 1000)),
    "bit of the trailer flipped": lambda data, rng, other: data[:-TRAILER] + flip(data[-TRAILER:], rng, 1),
    "page zeroed": lambda data, rng, other: zero(data, block(data, rng), PAGE),
    "end zeroed": lambda data, rng, other: zero(data, rng.randrange(len(data)), len(data)),
    "end of the trailer zeroed": lambda data, rng, other: zero(data, len(data) - rng.randrange(1, TRAILER), len(data)),
    "cut short": lambda data, rng, other: data[: rng.randrange(len(data))],
    "cut by less than the trailer": lambda data, rng, other: data[: -rng.randrange(1, TRAILER)],
    "cut by the trailer": lambda data, rng, other: flip(data, rng, rng.randrange(2))[:-TRAILER],
    "emptied": lambda data, rng, other: b"" if rng.randrange(2) else bytes(len(data)),
    "appended to": lambda data, rng, other: appended(data, rng),
    "spliced": lambda data, rng, other: spliced(data, block(data, rng), other, rng),
    "another's trailer": lambda data, rng, other: spliced(data, -TRAILER, other, rng),
}


# ---- the kinds: something else under the name ----


def swapped(path, rng, files):
    path.write_bytes(files[rng.choice([10, 30, "other shapes"])])  # whole, but not of step 20


def linked(path, rng, files):
    target = path.with_name(rng.choice(["step_00000010.pt", "gone", path.name]))  # another step, nothing, itself
    path.symlink_to(target)


def of_no_file(path, rng, files):
    kind = rng.choice(["folder", "pipe", "socket", "device"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/dev/tty"]))
    else:
        with socket.socket(socket.AF_UNIX) as server:
            path.parent.joinpath("s").unlink(missing_ok=True)
            server.bind(os.path.relpath(path))  # a name of a socket may have 107 characters


SWAPS = {"files swapped": swapped, "a link": linked, "no file": of_no_file}
KINDS = [*BYTES, *SWAPS]


def clear(path):
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def corrupt(path, number, files):
    """Put the corruption of this number under the path. Its kind."""
    rng, kind = random.Random(number), KINDS[number % len(KINDS)]
    clear(path)
    if kind in SWAPS:
        SWAPS[kind](path, rng, files)
        return kind
    data = files[20]
    while data in files.values():  # zeroed what was zero, put where it was: drawn again
        data = BYTES[kind](files[20], rng, files[rng.choice([10, 30, "other shapes"])])
    path.write_bytes(data)
    return kind


def outcome(way, *args):
    """What it gave; or, as a text, why it refused: never another exception, and never nothing."""
    with bounded():
        try:
            return way(*args)
        except UserError as refusal:
            assert re.search(SENTENCE, str(refusal)) and "weights_only" not in str(refusal), refusal
            return str(refusal)


@pytest.mark.parametrize("each", [5, pytest.param(48, marks=pytest.mark.slow)])
def test_no_corrupt_checkpoint_is_loaded_and_the_one_before_it_is_found(each, ctx, files, tmp_path, monkeypatch):
    """So many of each kind: 80 of them, or 768."""
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    older, path = (checkpoint.step_path(tmp_path, step) for step in (10, 20))
    older.write_bytes(files[10])
    path.write_bytes(files[20])
    assert checkpoint.newest_whole(tmp_path) == (path, []) and checkpoint.read(path)[0]["progress"]["step"] == 20
    counts, taken = collections.Counter(), collections.Counter()
    for number in range(each * len(KINDS)):
        kind = corrupt(path, number, files)
        counts[kind] += 1
        ways = {
            "verify": checkpoint.verify,
            "read": checkpoint.read,
            "load_checkpoint": lambda path: load_checkpoint(path, ctx),
        }
        if kind not in ("files swapped", "a link"):  # good weights, of whatever step
            ways["load_weights"] = checkpoint.load_weights
        for name, way in ways.items():
            why = outcome(way, path)
            taken[kind, name] += not (isinstance(why, str) and str(path) in why)
        found = outcome(checkpoint.newest_whole, tmp_path)
        taken[kind, "newest_whole"] += not (found[0] == older and len(found[1]) == 1 and str(path) in found[1][0])
        taken[kind, "best_or_newest"] += outcome(checkpoint.best_or_newest, tmp_path, False) != older
    assert counts == dict.fromkeys(KINDS, each)
    assert not +taken, "\n".join(
        f"{kind}: {count} of {each} taken by {name}" for (kind, name), count in (+taken).items()
    )


def test_a_whole_file_of_another_run_under_the_right_name_does_not_fit(ctx, tmp_path):
    path, state = checkpoint.step_path(tmp_path, 20), small_state()
    checkpoint.write(path, train_to(small_state(width=8, seed=1), 20))
    assert "does not fit" in outcome(state.load_state_dict, load_checkpoint(path, ctx), 0, 1)
