"""A mirror on a real S3 server, behind a proxy that loses, cuts, refuses and delays, or a process that is killed."""

import os
import random
import signal
from functools import partial
from types import SimpleNamespace

import pytest
from test_mirror import Attempt, be_quick, quick, steps_of  # noqa: F401
from test_mirrored_run import step_of_the_next_attempt, without_beats
from test_object_storage import bucket  # noqa: F401

from proxy import Proxy
from ranks import run_ranks
from scripts.lib import storage
from utils.checkpoint import format as checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("bucket", ["moto"], indirect=True)]


def port_of(env):
    return int(env["AWS_ENDPOINT_URL"].rpartition(":")[2])


@pytest.fixture
def behind(bucket, monkeypatch):  # noqa: F811
    """A function that puts a proxy with these faults before the server."""
    _, env = bucket
    proxies = []

    def put(fault):
        proxies.append(Proxy(port_of(env), fault))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxies[-1].url)
        __import__("s3fs").S3FileSystem.clear_instance_cache()  # its instances know the server itself
        return proxies[-1]

    yield put
    for attempt in Attempt.all:
        attempt.suspend()
    for proxy in proxies:
        proxy.close()


@pytest.mark.guarantee("mirror-fails")
@pytest.mark.parametrize("seed", range(3))
def test_what_a_network_does_to_requests_costs_time_only(bucket, behind, tmp_path, monkeypatch, seed):  # noqa: F811
    """One request of five meets a fault: while a run saves, while the next one starts from the mirror, and again."""
    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=lambda seconds: None))  # between tries
    chance, met = random.Random(seed), []

    def fault(number, method, path):
        kinds = ["delay", "503", "refuse", "lose", "cut", "stale"] if chance.random() < 0.2 else [""]
        met.append(chance.choice(kinds))
        return met[-1]

    behind(fault)
    url, _ = bucket
    for number in range(3):
        attempt = Attempt(url, tmp_path / f"{number}", launch_id="job")
        if number:
            path = checkpoint.step_checkpoint_path(attempt.run.checkpoint_folder, 20 * number)
            assert attempt.run.resume_path == path
            assert path.read_bytes() == (tmp_path / f"{number - 1}/checkpoints" / path.name).read_bytes()
            assert [record["step"] for record in attempt.run.records.read("train")][-1] == 20 * number
        attempt.upload(20 * number + 10, 20 * number + 20).end()
    assert steps_of(url)[-2:] == [50, 60]  # one that is superseded stays until the next save if its deletion fails
    print({kind: met.count(kind) for kind in sorted(set(met))})


@pytest.mark.guarantee("mirror-resume")
def test_an_object_that_is_too_short_is_passed_over(bucket, tmp_path, monkeypatch):  # noqa: F811
    """A server rejects a range beyond its end."""
    url, _ = bucket
    first = Attempt(url, tmp_path / "a").upload(10, 20)
    first.end()
    monkeypatch.setattr(storage, "BLOCK_BYTES", 512)
    (name,) = [name for name in first.mirror.list_objects() if name.endswith("step_00000020.pt")]
    first.mirror._filesystem.pipe_file(f"{first.mirror._root}/{name}", b"short")
    second = Attempt(url, tmp_path / "b")
    assert second.run.resume_path.name == "step_00000010.pt" and "is missing or damaged" in second.start.notes[0]


def count_requests(what, env, url, folder, at, is_answered):
    """Those of a save or of a start. The proxy in this process kills it at one: before it, or when it is answered."""
    os.environ.update(env)
    kill, count, is_armed = partial(os.kill, os.getpid(), signal.SIGKILL), 0, False

    def fault(*_):
        nonlocal count
        count += is_armed
        if is_armed and count == at and not is_answered:
            kill()
        return kill if is_armed and count == at else ""

    os.environ["AWS_ENDPOINT_URL"] = Proxy(port_of(env), fault).url
    with pytest.MonkeyPatch.context() as patched:
        be_quick(patched)
        without_beats(patched)
        first = Attempt(url, folder / "a", launch_id="job").upload(10, 20)
        if what == "start":
            first.suspend()
        is_armed = True
        if what == "start":
            Attempt(url, folder / "b", launch_id="job")
        else:
            first.upload(30)
    return count


@pytest.mark.guarantee("mirror-resume")
@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("what", ["save", "start"])
@pytest.mark.parametrize("part", [0, 1])  # every second request each: all take minutes
def test_sigkill_at_any_http_request_leaves_the_old_or_the_new_checkpoint(
    bucket,  # noqa: F811
    tmp_path,
    monkeypatch,
    what,
    is_answered,
    part,
):
    base, env = bucket
    without_beats(monkeypatch)
    steps, at, is_killed = set(), part - 1, True
    while is_killed:
        at += 2
        url, folder = f"{base}-{at}", tmp_path / f"{at}"
        is_killed = False
        try:
            run_ranks(1, count_requests, what, env, url, folder, at, is_answered)
        except AssertionError as error:
            assert "exit codes [-9]" in str(error), error
            is_killed = True
        steps.add(step_of_the_next_attempt(url, folder))
    print(f"killed at every second of {at - 1} requests")
    assert at > 10 and 20 in steps <= ({20, 30} if what == "save" else {20})
