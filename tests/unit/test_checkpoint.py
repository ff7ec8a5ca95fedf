"""The checkpoint file: an ordinary file of torch.save with a checksum behind it; whole, or not there."""

import dataclasses
import os
import stat
from pathlib import Path

import pytest
import torch

from config import TrainingConfig, UserError
from utils.checkpoint import format as checkpoint
from utils.files import TEMPORARY, replace_file, replace_json
from utils.run.resume import compare, is_other_best


def payload(step=10, **changes):
    config = TrainingConfig(**changes).to_dict()
    provenance = {"fingerprint": "abc", "global_batch_size": 64}
    return {
        "model": {"weight": torch.randn(50, 20)},
        "ema": {},
        "optimizer": {},
        "scaler": {},
        "progress": {"step": step},
        "config": config,
        "provenance": provenance,
    }


def test_a_checkpoint_comes_back_and_opens_with_plain_torch_load(tmp_path):
    path = checkpoint.step_path(tmp_path, 10)
    written = payload()
    checkpoint.write(path, written, claim=3)
    assert path.name == "step_00000010.pt"
    read, digest = checkpoint.read(path)
    plain = torch.load(path, weights_only=True)
    for found in (read, plain):
        assert (
            torch.equal(found["model"]["weight"], written["model"]["weight"]) and found["config"] == written["config"]
        )
    assert checkpoint.verify(path) == checkpoint.seal_of(path) == (3, 10, digest)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_checkpoints_of_which_none_is_whole_are_an_error_and_none_at_all_are_not(tmp_path):
    assert checkpoint.newest_whole(tmp_path) == (None, [])
    checkpoint.write(checkpoint.step_path(tmp_path, 1), payload(1))
    flip(checkpoint.step_path(tmp_path, 1), 500)
    with pytest.raises(UserError, match="has no whole checkpoint; give one with --resume_from, or --overwrite"):
        checkpoint.newest_whole(tmp_path)


def test_the_newest_stay_by_step_not_by_name(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        checkpoint.write(checkpoint.step_path(tmp_path, step), payload(step))
    (tmp_path / "best.pt").touch()
    checkpoint.prune(tmp_path, keep_last=2)
    assert [path.name for path in checkpoint.step_checkpoints(tmp_path)] == ["step_99999999.pt", "step_100000000.pt"]
    checkpoint.prune(tmp_path, keep_last=1)
    assert [path.name for path in checkpoint.step_checkpoints(tmp_path)] == ["step_100000000.pt"]
    assert (tmp_path / "best.pt").exists()


def test_a_write_that_fails_leaves_what_was_there_and_no_partial_file(tmp_path):
    path = tmp_path / "file"
    replace_file(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_file(path, fail)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    replace_json(path, {"a": None})
    assert path.read_text() == '{\n  "a": null\n}\n' and not list(tmp_path.glob(f"*{TEMPORARY}"))


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    """What a power cut would show, in the order of the calls; test_every_system_call sees the same in the kernel."""
    said, plain_fsync, plain_rename = [], os.fsync, os.rename

    def fsync(descriptor):
        said.append("fsync of the folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync of the file")
        plain_fsync(descriptor)

    def replace(path, target):
        said.append("rename")
        plain_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    (tmp_path / "folder").mkdir()
    replace_file(tmp_path / "folder" / "file.pt", lambda file: file.write(b"new"), lambda: said.append("claim"))
    assert said == ["fsync of the file", "claim", "rename", "fsync of the folder"]


def test_weights_come_from_a_checkpoint_or_a_bare_state_dict(tmp_path):
    checkpoint.write(tmp_path / "c.pt", payload())
    torch.save({"weight": torch.ones(3)}, tmp_path / "bare.pt")
    assert checkpoint.load_weights(tmp_path / "c.pt")["weight"].shape == (50, 20)
    assert checkpoint.load_weights(tmp_path / "bare.pt")["weight"].shape == (3,)
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name in ("list.pt", "text.pt"):
        with pytest.raises(
            UserError, match=f"init_from=.*{name}: (holds no weights|is no file of tensors alone); give"
        ):
            checkpoint.load_weights(tmp_path / name)
    flip(tmp_path / "c.pt", 2000)
    with pytest.raises(UserError, match="c.pt: is damaged"):
        checkpoint.load_weights(tmp_path / "c.pt")


# ---- what may differ on resume ----


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"batch_size": 32},
        {"dataset_size": 10},
        {"model": "resnet18"},
        {"optimizer": "adamw"},
        {"num_classes": 5},
    ],
)
def test_what_must_match_is_refused_with_the_field(changes):
    with pytest.raises(
        UserError, match=f"{next(iter(changes))}=.*the checkpoint has .*\n.*these must match; give them as they were"
    ):
        compare(payload(), TrainingConfig(**changes), "abc", 64)


def test_all_that_differs_and_must_not_is_listed_and_the_data_too():
    with pytest.raises(UserError) as refused:
        compare(payload(), TrainingConfig(seed=1, batch_size=32), "other", 64)
    assert len(str(refused.value).splitlines()) == 4 and "the training set is not the one of the checkpoint" in str(
        refused.value
    )


def test_what_may_change_is_said_and_what_is_free_is_not():
    free = {
        "run_dir": "elsewhere",
        "num_workers": 3,
        "log_interval": 1,
        "save_every_steps": 5,
        "keep_last": 9,
        "timeout": 9.0,
    }
    assert compare(payload(), TrainingConfig(**free), "abc", 64) == []
    said = compare(payload(), TrainingConfig(lr=0.3, epochs=20), "abc", 128)
    assert [line.split(":")[0] for line in said] == ["epochs=20", "lr=0.3", "global batch"]


def test_a_global_batch_that_was_asked_for_must_match():
    with pytest.raises(UserError, match="global batch: 128 samples an optimizer step, the checkpoint has 64"):
        compare(payload(), TrainingConfig(global_batch_size=128), "abc", 128)
    assert compare(payload(), TrainingConfig(global_batch_size=64), "abc", 64) == []


def test_every_field_has_a_class_on_resume():
    classes = {field.name: field.metadata["resume"] for field in dataclasses.fields(TrainingConfig)}
    assert set(classes.values()) == {"must", "may", "free"}
    assert {name for name, kind in classes.items() if kind == "must"} >= {
        "seed",
        "batch_size",
        "dataset",
        "dataset_size",
        "model",
    }


def test_the_newest_may_be_the_best(tmp_path):
    """best.pt is a file of its own where no checkpoint was due at its step."""
    checkpoint.write(tmp_path / "best.pt", payload(15))
    assert checkpoint.newest_whole(tmp_path) == (tmp_path / "best.pt", [])
    for step, newest in ((10, "best.pt"), (20, "step_00000020.pt")):
        checkpoint.write(checkpoint.step_path(tmp_path, step), payload(step))
        assert checkpoint.newest_whole(tmp_path)[0].name == newest
    for name in ("best.pt", "step_00000020.pt"):
        flip(tmp_path / name, 2000)
    path, skipped = checkpoint.newest_whole(tmp_path)
    assert (
        path.name == "step_00000010.pt" and "00020.pt: is damaged" in skipped[0] and "best.pt: is damaged" in skipped[1]
    )


def test_a_best_value_of_another_metric_or_of_other_weights_is_none():
    saved = payload()
    assert not is_other_best(saved, TrainingConfig())
    assert is_other_best(saved, TrainingConfig(best_metric="loss")) and is_other_best(
        saved, TrainingConfig(ema_decay=0.9)
    )
