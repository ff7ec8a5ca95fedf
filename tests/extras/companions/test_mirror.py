"""The copy of a run in object storage: what is read of it, who owns it, and what a damaged object costs."""

import sys
import threading
import uuid
from pathlib import Path
from unittest import mock

import pytest

from config import TrainingConfig
from scripts.companions import mirror as mirror_module
from scripts.companions import owner as owner_module
from scripts.companions.follow import OtherOwnerError
from scripts.companions.mirror import MirrorUploader
from scripts.companions.owner import Mirror
from scripts.lib import storage
from test_checkpoint import flip, payload
from training import wait_until
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.extras.companions import programs
from utils.extras.companions.programs import EXIT_OTHER_OWNER, create_companion_plan
from utils.files import replace_json
from utils.run.folder import RunFolder
from utils.run.start_decision import decide_start
from utils.settings.errors import StartError, TrainingError, UserError

WHERE = ["memory", "file"]


def be_quick(monkeypatch):
    """The mirror decides in this process, without its pauses."""
    plain_ask = programs.call_program

    def ask(name, plan, title, *flags):
        if name == "mirror":
            return mirror_module.decide_start(plan)
        return plain_ask(name, plan, title, *flags)

    monkeypatch.setattr(programs, "call_program", ask)
    monkeypatch.setattr(owner_module, "SECONDS_UNTIL_READ_BACK", 0.0)
    monkeypatch.setattr(mirror_module, "SECONDS_BETWEEN_HEARTBEATS", 0.05)
    monkeypatch.setattr(owner_module, "SECONDS_TO_SEE_HEARTBEAT", 0.5)
    monkeypatch.setattr(mirror_module, "SECONDS_BETWEEN_REQUESTS", 0.02)
    monkeypatch.setattr(mirror_module, "_exit", lambda code: Attempt.lost.append(code) or sys.exit())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    be_quick(monkeypatch)
    yield
    for attempt in Attempt.all:  # a watchdog's stacks show at most 100 threads
        attempt.suspend()
        attempt.run.close()
    Attempt.all.clear()
    Attempt.lost.clear()


@pytest.fixture(params=WHERE)
def url(request, tmp_path):
    return f"memory://{uuid.uuid4().hex}/a" if request.param == "memory" else f"file://{tmp_path}/bucket/a"


class Attempt:
    """A run of one rank in a folder of its own, and its mirror's program, as an object in this process."""

    all, lost = [], []

    def __init__(self, url, folder, launch_id="", **flags):
        self.config = TrainingConfig(run_dir=str(folder), mirror=url, keep_last=2, **{"resume_from": "auto"} | flags)
        lock, self.start = decide_start(self.config, "here", launch_id, False)
        self.run = RunFolder(Path(folder), self.config.checkpoint_folder, 0, "here", self.start, lock, mock.Mock())
        self.run.status.mark_running()
        self.run.mark_training()
        self.uploads = MirrorUploader(self.plan(launch_id))
        self.mirror = self.uploads.mirror
        self.uploads.start_heartbeat()
        self.all.append(self)

    def plan(self, launch_id="", apart=()):
        more = {"resume_from": self.start.resume_from, "decision": self.start.mirror_decision, "apart": apart}
        return create_companion_plan(self.config, 0, "here", self.start.token, launch_id, **more)

    def save(self, step, best=False):
        path = checkpoint.step_checkpoint_path(self.run.checkpoint_folder, step)
        archive.write_archive(path, payload(step))
        self.run.records.append("train", step=step, loss=1.0)
        if best:
            self.run.checkpoint_files.link_best(step)
            self.run.records.append_event("best", step)
        return path

    def upload(self, *steps, **options):
        for step in steps:
            self.save(step, **options)
            assert self.uploads.look("")
            checkpoint.prune_checkpoints(self.run.checkpoint_folder, 2)
        return self

    def end(self, state="preempted"):
        self.run.status.write(state)
        self.run.mark_ended()
        assert self.uploads.look(self.uploads.read_final_state())
        self.run.close()

    def suspend(self):
        """As SIGSTOP does: its heartbeats stop. The folder's lock stays."""
        self.uploads._stop_event.set()
        self.uploads._heartbeat_thread.join()


def steps_of(url):
    return [manifest["step"] for manifest in Mirror(url).read_manifests()]


def test_a_run_goes_on_from_its_mirror_in_an_empty_folder(url, tmp_path):
    Attempt(url, tmp_path / "a").upload(10, 20).end()
    second = Attempt(url, tmp_path / "b")
    assert second.run.resume_path == tmp_path / "b/checkpoints/step_00000020.pt" and second.start.attempt == 2
    before, after = (tmp_path / name / "checkpoints/step_00000020.pt" for name in "ab")
    assert before.read_bytes() == after.read_bytes()
    assert [record["step"] for record in second.run.records.read("train")] == [10, 20]
    assert not list((tmp_path / "b/checkpoints").glob(".*"))
    second.upload(30).end("completed")
    lock, start = decide_start(
        TrainingConfig(run_dir=str(tmp_path / "c"), mirror=url, resume_from="auto"), "x", "", False
    )
    assert start.is_completed and not list((tmp_path / "c/checkpoints").iterdir())  # nothing large is fetched
    lock.close()


def test_a_run_that_patience_has_ended_goes_on_from_its_mirror_with_more_patience(url, tmp_path):
    first = Attempt(url, tmp_path / "a", patience=2)
    config = first.config.to_dict()
    replace_json(tmp_path / "a/config.json", config)
    archive.write_archive(first.save(10), payload(10) | {"config": config})
    assert first.uploads.look("")
    first.end("completed")
    for name, patience, is_completed in [("b", 2, True), ("c", 1, True), ("d", 3, False)]:
        config = TrainingConfig(run_dir=str(tmp_path / name), mirror=url, resume_from="auto", patience=patience)
        lock, start = decide_start(config, "x", name, False)
        assert start.is_completed == is_completed, name
        lock.close()


@pytest.mark.guarantee("keep-last")
@pytest.mark.parametrize("has_links", [True, False])
def test_the_latest_checkpoints_and_the_best_one_are_kept(url, tmp_path, monkeypatch, has_links):
    """Without symbolic links best.pt is a copy."""
    if not has_links:
        monkeypatch.setattr(Path, "symlink_to", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    first = Attempt(url, tmp_path / "a").upload(10, best=True)
    first.upload(20, 30, 40)
    assert steps_of(url) == [10, 30, 40]
    first.end()
    second = Attempt(url, tmp_path / "b")
    assert sorted(path.name[:13] for path in second.run.checkpoint_folder.iterdir()) == [
        "step_00000010",
        "step_00000040",
    ]
    assert (
        second.run.checkpoint_files.restore_best(10)
        and checkpoint.verify_checkpoint(second.run.checkpoint_folder / "best.pt").step == 10
    )
    second.upload(50, 60)
    assert steps_of(url) == [10, 50, 60]
    names = second.mirror.list_objects()
    assert sum("/manifests/" in name for name in names) == 3 and sum(name.endswith(".pt") for name in names) == 3
    assert {name[:9] for name in names if "/records/" in name} == {"00000002/"}  # earlier ones are gone
    second.end()


@pytest.mark.guarantee("mirror-resume")
def test_a_later_checkpoint_of_the_folder_counts_and_is_uploaded(url, tmp_path):
    first = Attempt(url, tmp_path / "a").upload(10, 20)
    first.save(30)
    first.suspend()
    first.run.lock.close()
    second = Attempt(url, tmp_path / "a")
    assert second.run.resume_path.name == "step_00000030.pt"
    assert second.uploads.look("")
    assert steps_of(url) == [20, 30]
    second.end()


@pytest.mark.guarantee("mirror-resume")
@pytest.mark.parametrize("damage", ["bit", "short", "missing", "manifest"])
def test_a_damaged_object_is_passed_over_by_name(tmp_path, damage):
    url = f"file://{tmp_path}/bucket/a"
    Attempt(url, tmp_path / "a").upload(10, 20).end()
    (file,) = (tmp_path / "bucket/a/00000001").glob("step_00000020*")
    (manifest,) = (tmp_path / "bucket/a/00000001/manifests").glob("step_00000020*")
    if damage == "bit":
        flip(file, 99)
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-99])
    elif damage == "missing":
        file.unlink()
    else:
        manifest.write_text(manifest.read_text()[:-9])
    second = Attempt(url, tmp_path / "b")
    assert second.run.resume_path.name == "step_00000010.pt"
    assert damage == "manifest" or (
        file.name in second.start.notes[0] and "is missing or damaged" in second.start.notes[0]
    )
    second.end()
    for path in (tmp_path / "bucket/a").rglob("step_00000010*.pt"):
        flip(path, 99)
    with pytest.raises(UserError, match=r"has no valid checkpoint\. Start over"):
        Attempt(url, tmp_path / "c")


@pytest.mark.guarantee("mirror-resume")
def test_a_broken_transfer_goes_on_where_it_stopped(url, tmp_path, monkeypatch):
    Attempt(url, tmp_path / "a").upload(10).end()
    monkeypatch.setattr(storage, "BLOCK_BYTES", 512)
    monkeypatch.setattr(storage, "MAX_REQUESTS", 2)
    monkeypatch.setattr(storage, "MAX_TRIES", 1)
    offsets, failing = [], [True]
    plain = type(Mirror(url)._filesystem).cat_ranges

    def cat_ranges(self, paths, starts, ends, **options):
        offsets.append(starts[0])
        if failing and starts[0] >= 2048:
            raise ConnectionResetError("AKIAIOSFODNN7EXAMPLE12 reset")
        return plain(self, paths, starts, ends, **options)

    monkeypatch.setattr(type(Mirror(url)._filesystem), "cat_ranges", cat_ranges)
    with pytest.raises(StartError, match=r"cannot be read or written \(ConnectionResetError: \[redacted\]") as caught:
        Attempt(url, tmp_path / "b")
    assert "AKIA" not in str(caught.value)
    failing.clear()
    offsets.clear()
    attempt = Attempt(url, tmp_path / "b")
    assert offsets[0] == 2048 and attempt.run.resume_path.name == "step_00000010.pt"
    attempt.end()


@pytest.mark.guarantee("mirror-owner")
def test_fifty_former_owners_that_wake_up_commit_nothing(tmp_path):
    url, former = f"memory://{uuid.uuid4().hex}", []
    for number in range(50):
        attempt = Attempt(url, tmp_path / str(number), launch_id="job")
        attempt.upload(number + 1)
        attempt.suspend()
        former.append(attempt)
    last = Attempt(url, tmp_path / "last", launch_id="job").upload(60, 70)
    before = Mirror(url).read_manifests()
    for number, attempt in enumerate(former):
        attempt.save(100 + number)
        with pytest.raises(OtherOwnerError):
            attempt.uploads.look("")
        attempt.uploads._stop_event.clear()
        with pytest.raises(SystemExit):
            attempt.uploads._write_heartbeats()
    assert Attempt.lost == [EXIT_OTHER_OWNER] * 50
    assert Mirror(url).read_manifests() == before and [entry["step"] for entry in before] == [60, 70]
    # and one that has passed the check, and writes its manifest late
    former[0].mirror.write_json(
        former[0].mirror.object_name("manifests/step_00000999.0.json"), {"step": 999, "files": {}, "time": ""}
    )
    assert Mirror(url).read_manifests() == before
    last.upload(80).end()
    assert steps_of(url) == [70, 80]


@pytest.mark.guarantee("mirror-owner")
def test_a_mirror_of_a_live_run_is_not_claimed(url, tmp_path, caplog):
    first = Attempt(url, tmp_path / "a").upload(10)
    with pytest.raises(UserError, match=r"is in use by a job on here since .*\. End that job, or give another "):
        Attempt(url, tmp_path / "b")
    assert f"whether the owner of {url}" in caplog.text and "(a job on here since" in caplog.text
    first.end()
    caplog.clear()
    second = Attempt(url, tmp_path / "c")  # it has ended: nobody waits
    assert "whether its owner" not in caplog.text and second.mirror.generation == 2
    second.suspend()
    assert Attempt(url, tmp_path / "d").mirror.generation == 3


@pytest.mark.guarantee("mirror-owner")
def test_a_failed_run_says_so_at_its_mirror_and_the_next_owner_need_not_wait(url, tmp_path, caplog):
    first = Attempt(url, tmp_path / "a").upload(10)
    first.run.report_failure(TrainingError("disk"), 12)
    first.uploads.leave()
    status = first.mirror.read_json("00000001/records/status.json")
    assert (status["state"], status["error"], status["step"]) == ("failed", "disk", 12)
    assert Attempt(url, tmp_path / "b").start.attempt == 2 and "whether its owner" not in caplog.text


@pytest.mark.guarantee("mirror-owner")
def test_one_of_two_that_claim_at_the_same_time_is_rejected(url, tmp_path, monkeypatch):
    monkeypatch.setattr(owner_module, "SECONDS_UNTIL_READ_BACK", 0.5)
    outcomes, barrier = [], threading.Barrier(4)

    def start(number):
        mirror = Mirror(url)
        mirror.check_is_free("")
        barrier.wait()
        try:
            mirror.claim(f"token{number}", "", "here", "")
            outcomes.append("owner")
        except UserError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("owner") <= 1
    assert all("Another job has claimed --mirror " in outcome for outcome in outcomes if outcome != "owner")
    with pytest.raises(FileExistsError):
        Mirror(url).create_object("owners/00000001.json", b"")


@pytest.mark.guarantee("mirror-owner")
def test_a_fresh_start_on_a_run_and_another_run_in_the_folder_are_rejected(url, tmp_path):
    Attempt(url, tmp_path / "a").upload(10).end()
    for flags in ({"resume_from": ""}, {"resume_from": "", "overwrite": True}):
        with pytest.raises(UserError, match=r"holds a run already\. Add --resume_from auto to continue that run, or"):
            Attempt(url, tmp_path / "b", **flags)
        assert not (tmp_path / "b").exists()
    other = f"{url}-other"
    Attempt(other, tmp_path / "c").upload(10).end()
    with pytest.raises(UserError, match=r"and --mirror .* hold different runs\. Give another --run_dir"):
        Attempt(url, tmp_path / "c")
    assert steps_of(url) == [10] and steps_of(other) == [10]


@pytest.mark.guarantee("mirror-owner")
@pytest.mark.parametrize("kind", [UserError, StartError, TrainingError])
def test_a_start_that_is_rejected_leaves_no_copy_of_its_mirror(url, tmp_path, kind):
    """Another job of the launch may go on with what has been fetched. A new run keeps its folder, for status.json."""
    first = Attempt(url, tmp_path / "a").upload(10)
    assert not first.start.renamed_folders
    first.end()
    config = TrainingConfig(run_dir=str(tmp_path / "b"), mirror=url, resume_from="auto")
    lock, start = decide_start(config, "here", "", False)
    run = RunFolder(config.run_folder, config.checkpoint_folder, 0, "here", start, lock)
    run.status.mark_running()
    assert run.resume_path.exists() and (run.folder / "metrics.jsonl").exists()
    run.report_failure(kind("lr=1: must be as in the checkpoint"))
    run.close()
    assert run.folder.exists() == (kind is not UserError)
    assert steps_of(url) == [10]
    Attempt(url, tmp_path / "b").upload(20).end()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("bucket/a", '--mirror must be a URL such as s3://BUCKET/NAME, got "bucket/a". Give'),
        (
            "s3://key:geheim@bucket/a",
            '--mirror must not contain a key, got "s3://[redacted]@bucket/a". Give the key in the environment',
        ),
        ("s3://bucket/a?X-Amz-Signature=geheim", '--mirror must not contain a key, got "s3://bucket/a?[redacted]"'),
    ],
)
def test_a_url_without_protocol_or_with_a_key_is_rejected(given, problem):
    with pytest.raises(UserError) as caught:
        TrainingConfig(mirror=given)
    assert problem in str(caught.value) and "geheim" not in str(caught.value)


def test_a_missing_package_and_an_unknown_protocol_are_rejected_in_one_sentence(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(UserError, match=r"^--mirror az://a/b .*Install adlfs to .*\)\. Run pip install adlfs\.$"):
        Mirror("az://a/b")
    with pytest.raises(UserError, match=r"^--mirror s4://a/b .* fsspec does not know .* s4\. Give .* s3://, gs://"):
        Mirror("s4://a/b")


@pytest.mark.guarantee("mirror-resume")
def test_a_run_that_fails_before_its_first_upload_leaves_the_records_of_the_attempt_before(url, tmp_path):
    Attempt(url, tmp_path / "a").upload(10).end()
    second = Attempt(url, tmp_path / "b")
    second.run.report_failure(TrainingError("disk"), 12)
    second.uploads.leave()
    third = Attempt(url, tmp_path / "c")
    assert third.run.resume_path and [record["step"] for record in third.run.records.read("train")] == [10]


def test_nothing_is_deleted_while_the_storage_lists_no_checkpoint(url, tmp_path, monkeypatch):
    attempt = Attempt(url, tmp_path / "a").upload(10, 20)
    names = attempt.mirror.list_objects()
    with monkeypatch.context() as stale:
        stale.setattr(Mirror, "read_manifests", lambda self: [])
        attempt.mirror.prune(1, 0, -1)
    assert attempt.mirror.list_objects().keys() >= names.keys() and steps_of(url) == [10, 20]


@pytest.mark.guarantee("mirror-resume")
def test_a_checkpoint_counts_once_the_other_nodes_have_uploaded_their_samples(url, tmp_path, monkeypatch):
    """Rank 0 leaves their files to them, although it has copies of an earlier attempt."""
    attempt = Attempt(url, tmp_path / "run")
    attempt.suspend()
    main = MirrorUploader(attempt.plan(apart=[[1, 2]]))
    node = MirrorUploader(attempt.plan(apart=[[1, 2]]) | {"rank": 1})  # it has the same folder here
    for rank in (0, 2):
        attempt.run.folder.joinpath("samples").mkdir(exist_ok=True)
        attempt.run.folder.joinpath(f"samples/rank{rank}.jsonl").write_text("{}\n")
    attempt.save(5)
    upload = threading.Thread(target=main.look, args=("",), daemon=True)
    upload.start()
    wait_until(lambda: attempt.mirror.read_json(attempt.mirror.object_name("wanted.json")))
    assert attempt.mirror.read_manifests() == []
    assert "00000001/records/samples/rank2.jsonl" not in attempt.mirror.list_objects()
    node.look("")
    assert "00000001/records/samples/rank2.jsonl" in attempt.mirror.list_objects()
    upload.join(20)
    assert [manifest["step"] for manifest in attempt.mirror.read_manifests()] == [5]
    names = attempt.mirror.list_objects()
    assert attempt.mirror.object_name("records/samples/rank0.jsonl") in names
    assert not node.look("completed")  # rank 0's program may still want parts of it
    main.start_heartbeat()
    end = threading.Thread(target=main.look, args=("completed",), daemon=True)
    end.start()
    wait_until(lambda: node.look("completed"), 20)
    end.join(20)
    assert attempt.mirror.has_ended()
