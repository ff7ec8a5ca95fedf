"""The process that writes checkpoints, the digest of weights, records on a full disk, the user's command."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from config import UserError
from test_checkpoint import payload
from utils import files as lines
from utils.checkpoint import format as checkpoint
from utils.checkpoint.writer import Writer
from utils.files import LinesFile, read_lines
from utils.run.lock import Claim
from utils.run.saver import Hook, digest_of, diverged
from utils.signals import STOP_SIGNALS


@pytest.fixture
def writer():
    writer = Writer()
    yield writer
    writer.end()


@pytest.fixture
def claim(tmp_path):
    claim = Claim(tmp_path, "here")
    claim.take(tmp_path)
    return claim


def send(writer, claim, step, name=None):
    """What Saver does, but for the thread."""
    written = payload(step) | {"ema": {"counter": torch.tensor(step), "nothing": torch.empty(0, 3)}}
    written["progress"]["epoch"] = 0
    written["model"]["conv"] = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    apart, tensors = checkpoint.flatten(written)
    for view, tensor in zip(writer.fit(tensors), tensors, strict=True):
        view.copy_(tensor)
    path = claim.file.parent / (name or f"step_{step:08d}.pt")
    writer.send(path, apart, 2, claim.file, claim.number)
    return path, written


def test_it_writes_what_it_was_given_once_it_is_committed_and_keeps_its_memory(writer, claim):
    views = []
    for step in (10, 20, 30):
        path, written = send(writer, claim, step)
        views.append(writer._views[0].data_ptr())
        time.sleep(0.05)
        assert not path.exists()  # before the commit
        writer.commit()
        outcome = writer.wait(60)
        assert (outcome.path, outcome.step, outcome.problem) == (path, step, "")
        found = checkpoint.read(path)[0]
        assert all(torch.equal(found["model"][name], tensor) for name, tensor in written["model"].items())
        assert found["model"]["conv"].stride() == written["model"]["conv"].stride() and found["ema"]["counter"] == step
        assert found["ema"]["nothing"].shape == (0, 3) and found["config"] == written["config"]
        assert torch.load(path, weights_only=True)["progress"] == {"step": step, "epoch": 0}
    assert len(set(views)) == 1
    # keep_last
    assert [path.name for path in checkpoint.step_checkpoints(path.parent)] == [
        "step_00000020.pt",
        "step_00000030.pt",
    ]


def test_no_stop_signal_ends_it_not_even_one_that_comes_right_after_the_fork(claim, monkeypatch):
    def signals_to_itself():
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(os, "setsid", signals_to_itself)  # what the new process does first
    writer = Writer()
    for number in STOP_SIGNALS:
        os.kill(writer.pid, number)
    path, _ = send(writer, claim, 10)
    writer.commit()
    assert not writer.wait(60).problem and path.exists()
    writer.end()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)  # this process hears them again


def test_a_writer_that_dies_is_replaced_and_the_memory_still_holds_the_state(writer, claim):
    path, written = send(writer, claim, 10)
    os.kill(writer.pid, signal.SIGKILL)
    writer.commit()
    outcome = writer.wait(60)
    assert outcome.problem.endswith("the process that wrote it was killed") and not path.exists()
    writer.again()
    writer.commit()
    assert not writer.wait(60).problem and torch.equal(
        checkpoint.read(path)[0]["model"]["weight"], written["model"]["weight"]
    )


def test_the_commit_of_a_job_that_failed_before_it_does_not_commit_the_next_one(writer, claim):
    send(writer, claim, 10, name="nowhere/step_00000010.pt")
    outcome = writer.wait(60)
    assert (
        "step_00000010.pt: cannot be written (No such file or directory); it needs 0.0 MB, its folder cannot be seen"
        in outcome.problem
    )
    writer.commit()
    path, _ = send(writer, claim, 20)
    assert writer.wait(0.5) is None and not path.exists()
    writer.commit()
    assert not writer.wait(60).problem and path.exists()


def test_a_run_that_was_taken_over_does_not_commit(writer, claim, tmp_path, monkeypatch):
    path, _ = send(writer, claim, 10)
    monkeypatch.setattr("fcntl.lockf", lambda *_: None)
    Claim(tmp_path, "here").take(tmp_path)
    writer.commit()
    outcome = writer.wait(60)
    assert outcome.is_final and "another job has taken over this run (claim 2 after 1); end this one" in outcome.problem
    assert not path.exists() and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"a": [1, {"b": Path("x")}]},
            r"model.a\[1\].b: is of type pathlib.PosixPath, which no checkpoint can hold; make it",
        ),
        ({"v": torch.__version__}, "model.v: is of type torch.torch_version.TorchVersion"),
        ({"x": (1.0, {3})}, r"model.x\[1\]: is of type builtins.set"),
        ({(1, 2): 3}, "model: has a key of type builtins.tuple"),
    ],
)
def test_what_torch_load_would_refuse_is_refused_at_save_time_by_name(value, said):
    with pytest.raises(UserError, match=said):
        checkpoint.flatten({"model": value})


def test_weights_that_are_tied_stay_one_tensor():
    tied = nn.Linear(3, 3)
    apart, tensors = checkpoint.flatten({"a": tied.weight, "b": {"c": tied.weight}, "d": tied.weight.detach().clone()})
    assert len(tensors) == 2 and apart["a"] == apart["b"]["c"] != apart["d"]


def test_the_digest_changes_with_any_bit_of_any_weight_and_names_the_rank_that_differs():
    torch.manual_seed(0)
    weights = [
        torch.randn(5, 3, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(7),
        torch.randn(2, 2).bfloat16(),
    ]
    before = digest_of(weights)
    assert digest_of([weight.clone() for weight in weights]) == before
    for weight in weights:
        bits = weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight.view(torch.int32)
        for bit in (0, 14):
            bits[(0,) * bits.ndim] ^= 1 << bit
            assert digest_of(weights) != before
            bits[(0,) * bits.ndim] ^= 1 << bit
    assert digest_of(weights) == before
    assert (
        diverged([5, 5, 5, 5]) == []
        and diverged([5, 5, 6, 5]) == [2]
        and diverged([5, 6]) == [1]
        and diverged([6, 5, 5, 5]) == [0]
    )


def test_records_that_do_not_fit_on_a_full_disk_are_written_later_whole_and_once(tmp_path, monkeypatch):
    file = LinesFile(tmp_path / "records.jsonl")
    file.append('{"n": 0}')
    plain_write = os.write
    monkeypatch.setattr(lines.os, "write", lambda descriptor, data: plain_write(descriptor, data[:3]))
    file.append('{"n": 1}')
    monkeypatch.setattr(lines.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    file.append('{"n": 2}')
    assert [record["n"] for record in read_lines(tmp_path / "records.jsonl")] == [0]
    monkeypatch.setattr(lines.os, "write", plain_write)
    file.append('{"n": 3}')
    assert (tmp_path / "records.jsonl").read_text() == "".join(f'{{"n": {n}}}\n' for n in range(4))


def test_the_users_command_gets_the_newest_path_and_its_failure_is_a_warning(tmp_path):
    said, out, may_end = [], tmp_path / "out", tmp_path / "may_end"
    hook = Hook(f"sh -c 'while ! [ -e {may_end} ]; do sleep 0.02; done; echo $0 >> {out}'", said.append)
    for step in (1, 2, 3):
        hook.run(Path(f"step_{step}.pt"))
    may_end.touch()
    hook.wait()
    assert out.read_text() == "step_1.pt\nstep_3.pt\n"  # 2 and 3 came while the first ran, and 3 is newer
    for command, problem in (
        ("false", "ended with exit code 1"),
        ("no-such-program", "cannot be run (No such file or directory)"),
    ):
        hook = Hook(command, said.append)
        hook.run(Path("a.pt"))
        hook.wait()
        assert said[-1].startswith(f"on_checkpoint: {command} {problem}; the checkpoint itself is whole")
    (tmp_path / "a b.pt").write_text("new")
    hook = Hook(f"cp {{}} {out}", said.append)
    hook.run(tmp_path / "a b.pt")  # no shell: the space is part of the name
    hook.wait()
    assert out.read_text() == "new"
