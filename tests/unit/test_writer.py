"""The process that writes checkpoints, the digest of weights, records on a full disk, the user's command."""

import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import train
from config import TrainingConfig, UserError
from ranks import run_ranks
from tasks import train_task
from test_checkpoint import payload
from training import wait_until
from utils.checkpoint import format as checkpoint
from utils.checkpoint.writer import Writer
from utils.files import LinesFile, read_lines
from utils.rng import digest_of, diverged
from utils.run import saver
from utils.run.lock import RunLock
from utils.run.saver import Hook
from utils.run.watchdog import GONE, state_of
from utils.signals import STOP_SIGNALS


@pytest.fixture
def writer():
    writer = Writer()
    yield writer
    writer.end()


@pytest.fixture
def lock(tmp_path):
    lock = RunLock(tmp_path, "here")
    lock.write()
    return lock


def send(writer, lock, folder, step):
    """What Saver does, without its thread."""
    written = payload(step) | {"ema": {"counter": torch.tensor(step), "nothing": torch.empty(0, 3)}}
    written["progress"] |= {"epoch": 0, "samples_in_epoch": 0}
    written["model"]["conv"] = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    flat, tensors = checkpoint.flatten(written)
    for view, tensor in zip(writer.fit(tensors), tensors, strict=True):
        view.copy_(tensor)
    path = checkpoint.step_path(folder, step)
    writer.send(path, flat, (2, 0), lock._file, lock.number)
    return path, written


def test_the_writer_writes_a_job_once_it_is_committed(writer, lock, tmp_path):
    places = set()
    for step in (10, 20, 30):
        path, written = send(writer, lock, tmp_path, step)
        places.add(writer._views[0].data_ptr())
        assert writer.wait(0.1) is None and not path.exists()
        writer.commit()
        outcome = writer.wait(60)
        assert (outcome.path, outcome.step, outcome.problem) == (path, step, "")
        found = checkpoint.read(path)[0]
        assert all(torch.equal(found["model"][name], tensor) for name, tensor in written["model"].items())
        assert found["model"]["conv"].stride() == written["model"]["conv"].stride() and found["ema"]["counter"] == step
        assert found["ema"]["nothing"].shape == (0, 3) and found["config"] == written["config"]
    assert len(places) == 1  # the shared memory is reused
    assert [path.name for path in checkpoint.step_checkpoints(tmp_path)] == ["step_00000020.pt", "step_00000030.pt"]


def test_stop_signals_do_not_end_the_writer_even_right_after_the_fork(lock, tmp_path, monkeypatch):
    def signal_itself():
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(os, "setsid", signal_itself)  # the first call of the new process
    writer = Writer()
    for number in STOP_SIGNALS:
        os.kill(writer.pid, number)
    path, _ = send(writer, lock, tmp_path, 10)
    writer.commit()
    assert not writer.wait(60).problem and path.exists()
    writer.end()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)  # unblocked again in this process


def test_the_writer_keeps_only_its_own_files_open_and_tries_no_others(monkeypatch):
    """Where Python was built without close_range, os.closerange calls close up to a limit that may be 1e9."""
    monkeypatch.setattr(os, "closerange", mock.Mock(side_effect=AssertionError))
    reader, end = os.pipe()
    writer = Writer()
    os.close(end)
    assert os.read(reader, 1) == b""  # returns once the writer has closed its copy, too
    wait_until(lambda: len(os.listdir(f"/proc/{writer.pid}/fd")) == 4)  # and the connection
    writer.end()
    os.close(reader)


def test_a_failed_pinning_is_a_warning_and_its_error_is_cleared(writer, monkeypatch, caplog):
    cleared = []
    cudart = SimpleNamespace(cudaError=SimpleNamespace(success=0), cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: cleared.append(device))
    writer._allocate(4096, is_pinned=True)
    assert cleared == ["cuda"] and writer._pinned is None and len(writer._memory) == 4096
    assert "cannot be pinned: checkpoints are copied more slowly" in caplog.text


def allocations(flags):
    """How often a run allocated the memory for its checkpoints, before the first step and in total."""
    plain, plain_epoch, count, before = Writer._allocate, train.train_one_epoch, [], []

    def epoch(training):
        before.append(len(count))
        return plain_epoch(training)

    with (
        mock.patch.object(Writer, "_allocate", lambda self, *args: (count.append(args), plain(self, *args))),
        mock.patch.object(train, "train_one_epoch", epoch),
    ):
        train_task("images", flags)
    return before[0], len(count)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_memory_for_checkpoints_is_allocated_once_before_the_first_step(runs, optimizer):
    words = runs.words("run", *f"--dataset_size 16 --epochs 2 --save_every_steps 1 --optimizer {optimizer}".split())
    assert run_ranks(1, allocations, words) == [(1, 1)]


def test_the_writer_is_forked_before_the_process_group_starts(monkeypatch):
    monkeypatch.setattr(train, "Writer", mock.Mock(side_effect=InterruptedError))
    monkeypatch.setattr(train, "setup_distributed", mock.Mock(side_effect=AssertionError))
    with pytest.raises(InterruptedError):
        train.train(TrainingConfig())


def test_a_killed_writer_is_replaced_and_the_shared_memory_still_holds_the_state(writer, lock, tmp_path):
    path, written = send(writer, lock, tmp_path, 10)
    os.kill(writer.pid, signal.SIGKILL)
    writer.commit()
    outcome = writer.wait(60)
    assert outcome.was_killed and outcome.problem.endswith("the writer process was killed") and not path.exists()
    writer.again()
    writer.commit()
    assert not writer.wait(60).problem
    assert torch.equal(checkpoint.read(path)[0]["model"]["weight"], written["model"]["weight"])


def test_a_commit_of_an_already_failed_job_does_not_commit_the_next_one(writer, lock, tmp_path):
    send(writer, lock, tmp_path / "no" / "where", 10)
    problem = writer.wait(60).problem
    assert "00010.pt: cannot be written (No such file or directory); it needs 0.0 MB, its folder cannot be" in problem
    writer.commit()
    path, _ = send(writer, lock, tmp_path, 20)
    assert writer.wait(0.5) is None and not path.exists()
    writer.commit()
    assert not writer.wait(60).problem and path.exists()


def test_a_deleted_checkpoints_folder_is_created_again_unless_the_run_folder_is_gone_too(writer, lock, tmp_path):
    path, _ = send(writer, lock, tmp_path / "checkpoints", 10)
    writer.commit()
    assert not writer.wait(60).problem and path.exists()
    shutil.rmtree(path.parent)
    (tmp_path / "lock.json").unlink()  # as on a mount point whose disk is gone
    send(writer, lock, path.parent, 20)
    assert "its folder cannot be accessed" in writer.wait(60).problem and not path.parent.exists()


def test_nothing_is_committed_to_a_run_that_another_job_has_taken_over(writer, lock, tmp_path):
    path, _ = send(writer, lock, tmp_path, 10)
    RunLock(tmp_path, "here").write()
    writer.commit()
    outcome = writer.wait(60)
    assert outcome.is_final and "another job has taken over this run (owner 2); end this one" in outcome.problem
    assert not path.exists() and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [1, {"b": Path("x")}]}, r"model.a\[1\].b: a checkpoint cannot hold this pathlib.PosixPath; use tensors"),
        ({"v": torch.__version__}, "model.v: .* this torch.torch_version.TorchVersion"),
        ({"x": (1.0, {3})}, r"model.x\[1\]: .* this builtins.set"),
        ({(1, 2): 3}, "model: .* dicts whose keys are numbers or text"),
    ],
)
def test_values_that_torch_load_would_reject_are_rejected_by_name_when_saved(value, problem):
    with pytest.raises(UserError, match=problem):
        checkpoint.flatten({"model": value})


def test_tied_weights_stay_one_tensor():
    tied = nn.Linear(3, 3).weight
    flat, tensors = checkpoint.flatten({"a": tied, "b": {"c": tied}, "d": tied.detach().clone()})
    assert len(tensors) == 2 and flat["a"] == flat["b"]["c"] != flat["d"]


def test_the_digest_changes_with_any_bit_of_any_weight():
    torch.manual_seed(0)
    image = torch.randn(5, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    weights = [image, torch.randn(7), torch.randn(2, 2).bfloat16()]
    before = digest_of(weights)
    assert digest_of([weight.clone() for weight in weights]) == before
    for weight in weights:
        bits = weight.view(torch.int16 if weight.dtype is torch.bfloat16 else torch.int32)
        for bit in (0, 14):
            bits[(0,) * bits.ndim] ^= 1 << bit
            assert digest_of(weights) != before
            bits[(0,) * bits.ndim] ^= 1 << bit


@pytest.mark.parametrize(
    ("digests", "ranks"), [([5, 5, 5, 5], []), ([5, 5, 6, 5], [2]), ([5, 6], [1]), ([6, 5, 5, 5], [0])]
)
def test_ranks_whose_weights_differ_from_the_majority_are_named(digests, ranks):
    assert diverged(digests) == ranks


def test_records_that_do_not_fit_on_a_full_disk_are_written_later_complete_and_once(tmp_path):
    path, plain_write = tmp_path / "records.jsonl", os.write
    file = LinesFile(path)
    file.append('{"n": 0}')
    with mock.patch("os.write", lambda descriptor, data: plain_write(descriptor, data[:3])):
        file.append('{"n": 1}')
    with mock.patch("os.write", side_effect=OSError(28, "No space left on device")):
        file.append('{"n": 2}')
    assert read_lines(path) == [{"n": 0}]
    file.append('{"n": 3}')
    assert path.read_text() == "".join(f'{{"n": {n}}}\n' for n in range(4))


def test_the_users_command_gets_the_latest_path_and_its_failure_is_a_warning(tmp_path):
    warnings, out, may_end = [], tmp_path / "out", tmp_path / "may_end"
    hook = Hook(f"sh -c 'while ! [ -e {may_end} ]; do sleep 0.02; done; echo $0 >> {out}'", warnings.append)
    for step in (1, 2, 3):
        hook.run(Path(f"step_{step}.pt"))
    may_end.touch()
    while hook.is_running():
        time.sleep(0.05)
    assert out.read_text() == "step_1.pt\nstep_3.pt\n"  # 2 and 3 arrived while the first command ran; 3 is later
    (tmp_path / "a b.pt").write_text("new")
    commands = {
        "false": "ended with exit code 1; the checkpoint is valid",
        "no-such-program": "cannot be run (No such file or directory); the checkpoint is valid",
        f"cp {{}} {out}": None,  # no shell: the space is part of the name
    }
    for command in commands:
        hook = Hook(command, warnings.append)
        hook.run(tmp_path / "a b.pt")
        while hook.is_running():
            time.sleep(0.05)
    assert warnings == [f"on_checkpoint: {command} {problem}" for command, problem in commands.items() if problem]
    assert out.read_text() == "new"


def test_a_command_that_hangs_is_reported_and_ended_with_its_children_when_the_run_is_over(tmp_path, monkeypatch):
    warnings, out = [], tmp_path / "out"
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep 600 &\necho $1 $! >> {out}\nwait\nwait\n")
    command.chmod(0o755)
    monkeypatch.setattr(saver, "SECONDS_OF_A_COMMAND", 0.1)
    monkeypatch.setattr(saver, "SECONDS_TO_TERMINATE", 0.1)
    hook = Hook(str(command), warnings.append)
    for step in (1, 2):
        hook.run(Path(f"step_{step}.pt"))
    wait_until(lambda: hook.is_running() and warnings)
    assert warnings == ["on_checkpoint: the command has been running for 0 min; later checkpoints wait for it"]
    hook.end_after(600.0)
    assert hook.is_running() and len(warnings) == 1
    for step in (1, 2):  # that of the latest checkpoint gets its time, too
        wait_until(out.exists)
        wait_until(lambda: out.read_text().endswith("\n"))
        name, child = out.read_text().split()
        out.unlink()
        hook.end_after(0.0)
        said = f"was ended after 0 min, since the run is over; run it again for step_{step}.pt"
        assert warnings[-1] == f"on_checkpoint: the command {said}"
        wait_until(lambda pid=int(child): state_of(pid) in GONE)
        assert name == f"step_{step}.pt" and hook.is_running() == (step == 1)


def test_a_writer_that_hangs_holds_up_nobody(writer, lock, tmp_path, monkeypatch):
    send(writer, lock, tmp_path, 10)
    os.kill(writer.pid, signal.SIGSTOP)
    writer.commit()
    pid, seconds = writer.pid, 0.0
    monkeypatch.setattr("utils.checkpoint.writer.SECONDS_COUNTED", 0.5)
    while seconds < 1.2:
        assert writer.wait(0.1) is None
        before, (path, seconds, flush) = seconds, writer.stalled()
        assert path.name == "step_00000010.pt" and 0 <= seconds - before <= 0.5 and 0 < flush < 0.1
    time.sleep(0.7)  # as if this process had been suspended, too
    assert writer.stalled()[1] < seconds + 0.51
    began = time.monotonic()
    writer.end(seconds=0.2)
    assert time.monotonic() - began < 10
    wait_until(lambda: state_of(pid) in GONE)
