"""A run in object storage, as it is read: after a kill at any request, and as a local copy for other programs."""

import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from test_mirror import WHERE, Attempt, quick, steps_of  # noqa: F401

from config import TrainingConfig
from scripts.companions import follow as follow_module
from scripts.companions.mirror import MirrorUploader
from scripts.companions.owner import Mirror
from scripts.lib import mirrored_run, storage
from test_checkpoint import payload
from training import wait_until
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.checkpoint.remote import local_checkpoint
from utils.extras.companions.node_local import find_node_local_ranks
from utils.files import read_json, replace_json
from utils.run.run_lock import RunLock
from utils.settings.errors import UserError


@pytest.fixture(params=WHERE)
def url(request, tmp_path):
    return f"memory://{uuid.uuid4().hex}/a" if request.param == "memory" else f"file://{tmp_path}/bucket/a"


class Killed(BaseException):
    pass


class Wire:
    """All requests to storage in memory. The process is killed at one of them: before it, or when it is answered.

    at: which one, from 1.
    """

    REQUESTS = "find cat_file cat_ranges pipe_file put_file exists rm".split()

    def __init__(self, monkeypatch, at, is_answered):
        self.count, self.at, self.is_answered, self.is_dead = 0, at, is_answered, False
        self._nested = threading.local()
        self._lock = threading.Lock()
        for name in self.REQUESTS:
            monkeypatch.setattr(MemoryFileSystem, name, self.counted(getattr(MemoryFileSystem, name)))

    def counted(self, plain):
        def request(*args, **options):
            if getattr(self._nested, "is_on", False):  # one of them uses another one
                return plain(*args, **options)
            with self._lock:
                self.count += 1
                is_last = self.count == self.at
                self.is_dead |= is_last and not self.is_answered
            if self.is_dead:
                raise Killed
            self._nested.is_on = True
            try:
                response = plain(*args, **options)
            finally:
                self._nested.is_on = False
            self.is_dead |= is_last
            if self.is_dead:
                raise Killed
            return response

        return request


def without_beats(monkeypatch):
    """Whose requests come at any time, and whose threads would stay."""
    monkeypatch.setattr(MirrorUploader, "_write_heartbeats", lambda self: None)
    monkeypatch.setattr(RunLock, "_touch_periodically", lambda self: None)


def step_of_the_next_attempt(url, folder):
    """It goes on from a checkpoint of the killed one, in an empty folder, and leaves nothing of that one over."""
    second = Attempt(url, folder / "c", launch_id="job")
    step = checkpoint.parse_step(second.run.resume_path)
    assert (
        second.run.resume_path.read_bytes()
        == checkpoint.step_checkpoint_path(folder / "a/checkpoints", step).read_bytes()
    )
    assert {step} <= {record["step"] for record in second.run.records.read("train")}
    second.upload(40, 50).suspend()
    assert steps_of(url) == [40, 50]
    assert sum(name.endswith(".pt") for name in second.mirror.list_objects()) == 2
    return step


@pytest.mark.guarantee("mirror-resume")
@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("what", ["save", "start"])
def test_a_kill_at_any_request_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, what, is_answered):
    without_beats(monkeypatch)
    steps, at, is_killed = set(), 0, True
    while is_killed:
        at += 1
        url, folder = f"memory://{uuid.uuid4().hex}/a", tmp_path / f"{at}"
        first = Attempt(url, folder / "a", launch_id="job").upload(10, 20)
        if what == "start":
            first.suspend()
        with monkeypatch.context() as patched:
            wire = Wire(patched, at, is_answered)
            with suppress(Killed):
                if what == "save":
                    first.upload(30)
                else:
                    Attempt(url, folder / "b", launch_id="job")
            is_killed = wire.is_dead
            wire.is_dead = True
        steps.add(step_of_the_next_attempt(url, folder))
    assert steps == ({20, 30} if what == "save" else {20})
    print(f"killed at each of {at - 1} requests")
    assert at > 10


@pytest.mark.guarantee("mirror-resume")
@pytest.mark.parametrize("is_answered", [False, True])
def test_a_program_that_is_killed_at_any_request_is_started_again_and_uploads_all(tmp_path, monkeypatch, is_answered):
    """With the same plan: it claims nothing, and nothing is left over."""
    without_beats(monkeypatch)
    at, is_killed = 0, True
    while is_killed:
        at += 1
        url = f"memory://{uuid.uuid4().hex}/a"
        first = Attempt(url, tmp_path / f"{at}").upload(10, 20)
        with monkeypatch.context() as patched:
            wire = Wire(patched, at, is_answered)
            with suppress(Killed):
                first.upload(30)
            is_killed = wire.is_dead
        again = MirrorUploader(first.plan())
        assert again.look("")
        assert steps_of(url) == [20, 30] and again.mirror.find_latest_generation() == 1
        assert sum(name.endswith(".pt") for name in again.mirror.list_objects()) == 2
    assert at > 10


@pytest.mark.guarantee("mirror-fails")
def test_a_failing_upload_is_a_warning_and_is_tried_again(url, tmp_path, monkeypatch, caplog):
    attempt, files = Attempt(url, tmp_path / "a"), Mirror(url)._filesystem
    monkeypatch.setattr(follow_module, "SECONDS_UNTIL_WARNING", 0.3)
    monkeypatch.setattr(follow_module, "MAX_SECONDS_BETWEEN_RETRIES", 0.1)
    for name in ("stop_with_rank", "setup_logger"):
        monkeypatch.setattr(follow_module, name, lambda *_: None)
    plain, is_down = type(files).put_file, [True]

    def put_file(self, *args, **options):
        if is_down:
            raise TimeoutError("no answer")
        return plain(self, *args, **options)

    monkeypatch.setattr(type(files), "put_file", put_file)
    attempt.save(10)
    program = threading.Thread(target=follow_module.follow_run, args=(attempt.uploads,), daemon=True)
    program.start()
    wait_until(lambda: "The tries of --mirror have failed" in caplog.text and "TimeoutError: no answer" in caplog.text)
    assert "Training continues." in caplog.text or "and training continues" in caplog.text
    time.sleep(0.5)
    assert caplog.text.count("The tries of ") == 1 and steps_of(url) == []
    is_down.clear()
    wait_until(lambda: steps_of(url) == [10])
    attempt.run.status.write("preempted")
    attempt.run.mark_ended()
    program.join(20)
    assert not program.is_alive() and attempt.mirror.has_ended()


def shard(checkpoints, step, rank):
    """The folder of a sharded checkpoint of two ranks, on the node of this one."""
    folder = checkpoint.step_checkpoint_path(checkpoints, step).with_suffix("")
    names = ["part_00000.pt", "part_00001.pt"]
    folder.mkdir(parents=True)
    torch.manual_seed(step)
    digests = {name: archive.write_archive(folder / name, payload(step)) for name in names}
    (folder / names[1 - rank]).unlink()
    replace_json(folder / "manifest.json", {"step": step, "files": digests})


def test_parts_of_another_node_are_waited_for_and_of_a_superseded_checkpoint_given_up(url, tmp_path):  # extra: sharding
    attempt = Attempt(url, tmp_path / "a")
    attempt.suspend()
    plan = attempt.plan(apart=[[1]])
    main, node = MirrorUploader(plan), MirrorUploader(plan | {"rank": 1, "checkpoints": str(tmp_path / "node")})
    (tmp_path / "node").mkdir()

    def upload(step, *on_node):
        """Rank 0's program uploads; the other node gets these checkpoints meanwhile."""
        shard(attempt.run.checkpoint_folder, step, 0)
        program = threading.Thread(target=main.look, args=("",), daemon=True)
        program.start()
        wait_until(lambda: main.mirror.read_json(main.mirror.object_name("wanted.json")).get("step") == step)
        for _ in range(3):
            node._next_request_at = 0.0
            assert not node.look("")  # it appears there a moment later
        for node_step in on_node:
            shard(tmp_path / "node", node_step, 1)
        wait_until(lambda: node.look("") or not program.is_alive(), 20)
        return steps_of(url)

    assert upload(10, 10) == [10]
    assert upload(20, 30) == [10]  # 20 was deleted there
    shard(attempt.run.checkpoint_folder, 30, 0)
    program = threading.Thread(target=main.look, args=("",), daemon=True)
    program.start()
    wait_until(lambda: node.look("") or not program.is_alive(), 20)
    assert steps_of(url) == [10, 30]
    assert len(main.mirror.read_manifests()[-1]["files"]) == 2


@pytest.fixture
def copies(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "copies"))
    return tmp_path / "copies"


def test_a_run_at_a_url_is_copied_as_far_as_it_is_needed(url, tmp_path, copies):
    first = Attempt(url, tmp_path / "a").upload(10, best=True)
    first.upload(20, 30)
    folder = mirrored_run.local_run(url)
    assert read_json(folder / "status.json")["state"] == "running" and not checkpoint.list_step_checkpoints(folder)
    steps = {f"{url}/checkpoints/step_00000020.pt": 20, f"{url}/checkpoints/best.pt": 10, url: 10}
    for source, step in steps.items():
        path = mirrored_run.local_checkpoint(source)
        assert checkpoint.verify_checkpoint(path).step == step and path.is_relative_to(copies)
    assert (folder / "checkpoints/best.pt").readlink() == Path("step_00000010.pt")
    first.upload(40)
    with pytest.raises(UserError, match=r"There is no .*step_00000020.pt. The run has .* these steps: 10, 30, 40.$"):
        mirrored_run.local_checkpoint(f"{url}/checkpoints/step_00000020.pt")
    if url.startswith("file"):  # as a rank asks for it
        assert local_checkpoint(url) == path
        with pytest.raises(UserError, match="There is no .*step_00000020.pt."):
            local_checkpoint(f"{url}/checkpoints/step_00000020.pt")
    mirrored_run.local_run(url, lambda steps, best: steps[-1:])
    assert [checkpoint.parse_step(path) for path in checkpoint.list_step_checkpoints(folder / "checkpoints")] == [
        10,
        40,
    ]
    first.end()
    with pytest.raises(UserError, match="nothing holds no run. Give the URL that the run had as --mirror."):
        mirrored_run.local_run(f"{url}/nothing")


def test_a_file_at_a_url_is_fetched_again_when_it_has_changed(url, tmp_path, copies):
    place = storage.Storage(url)
    for size in (1000, 2000):
        (tmp_path / "w.pt").write_bytes(bytes(size))
        place.upload(tmp_path / "w.pt", "w.pt")
        path = mirrored_run.local_checkpoint(f"{url}/w.pt")
        assert path.name == "w.pt" and path.stat().st_size == size
    before = path.stat().st_mtime_ns
    assert mirrored_run.local_checkpoint(f"{url}/w.pt").stat().st_mtime_ns == before
    assert sum(file.is_file() for file in copies.rglob("w.pt")) == 1
    with pytest.raises(UserError, match=r"other.pt cannot be read or written \(FileNotFoundError"):
        mirrored_run.local_checkpoint(f"{url}/other.pt")
    with pytest.raises(UserError, match=r"must not contain a key, .*\. Give the key in the environment"):
        TrainingConfig(init_from="s3://key:secret@b/w.pt")


@pytest.mark.guarantee("mirror-resume")
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("a", 0, False), ("a", 1, False), ("b", 0, True), ("b", 1, False)], [[2, 3]]),
        ([("a", 0, False), ("b", 0, True), ("a", 1, False), ("b", 1, False)], [[1, 3]]),  # srun --distribution=cyclic
        ([("a", 0, False), ("a", 0, True)], [[1]]),  # two nodes with one host name
        ([("a", 0, False), ("b", 0, False)], []),
    ],
)
def test_ranks_belong_to_the_first_rank_of_their_node(ranks, expected):
    assert find_node_local_ranks(ranks) == expected
