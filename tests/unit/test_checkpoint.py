"""The checkpoint file, what may differ when a run resumes from it, and files that are replaced atomically."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

import utils.files
from config import TrainingConfig
from utils.checkpoint import archive
from utils.checkpoint import format as checkpoint
from utils.extras.exact.reduction import SUM_ORDER  # extra: exact
from utils.files import TEMPORARY_SUFFIX, replace_file, replace_json
from utils.run.resume import compare_best, compare_checkpoint, compare_data, compare_listings
from utils.settings.errors import StartError, UserError
from utils.settings.removed import REMOVED_SETTINGS


def payload(step=10, **changes):
    empty = {key: {} for key in archive.PAYLOAD_KEYS}
    return empty | {
        "model": {"weight": torch.randn(50, 20)},
        "progress": {"step": step},
        "config": TrainingConfig(**changes).to_dict(),
        "provenance": origin(),
    }


def origin(identity="abc", size=64, threads=1, content="1", sketches=()):
    data = {"identity": identity, "content": content, "sketches": list(sketches)}
    data |= {"global_batch_size": size, "cpu_threads": threads}
    data["exact_sums"] = SUM_ORDER  # extra: exact
    return data


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.guarantee("all-damaged")
def test_a_folder_of_invalid_checkpoints_is_an_error_and_an_empty_folder_is_not(tmp_path):
    assert checkpoint.find_latest_valid(tmp_path) == (None, [])
    archive.write_archive(checkpoint.step_checkpoint_path(tmp_path, 1), payload(1))
    flip(checkpoint.step_checkpoint_path(tmp_path, 1), 500)
    with pytest.raises(
        UserError, match="has no valid checkpoint. Give one with --resume_from, or start over with --ov"
    ):
        checkpoint.find_latest_valid(tmp_path)


@pytest.mark.parametrize(
    "is_folder",
    [
        False,
        True,  # extra: sharding
    ],
)
def test_a_checkpoint_that_storage_fails_to_read_is_not_taken_for_damaged(tmp_path, monkeypatch, is_folder):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = checkpoint.step_checkpoint_path(tmp_path, 1)
    if is_folder:
        (path.with_suffix("")).mkdir()
        (path.with_suffix("") / archive.MANIFEST_FILE).touch()
        monkeypatch.setattr(Path, "read_bytes", fail)
    else:
        archive.write_archive(path, payload(1))
        monkeypatch.setattr(archive, "read_trailer", fail)
    monkeypatch.setattr(utils.files, "SECONDS_BETWEEN_TRIES", 0)
    with pytest.raises(StartError, match=r"cannot be read in three tries .*\. Repair the storage and start again, or"):
        checkpoint.find_latest_valid(tmp_path)


@pytest.mark.guarantee("keep-last")
def test_the_latest_checkpoints_are_kept_by_step_not_by_name(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        checkpoint.step_checkpoint_path(tmp_path, step).touch()
    (tmp_path / "best.pt").touch()
    checkpoint.prune_checkpoints(tmp_path, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "step_100000000.pt", "step_99999999.pt"]


def test_one_checkpoint_of_every_so_many_steps_is_kept(tmp_path):
    for step in range(4, 64, 4):
        checkpoint.step_checkpoint_path(tmp_path, step).touch()
        checkpoint.prune_checkpoints(tmp_path, keep_last=2, keep_every=10)
    kept = [int(path.stem[-8:]) for path in checkpoint.list_step_checkpoints(tmp_path)]
    assert kept == [4, 12, 20, 32, 40, 52, 56, 60]


@pytest.mark.guarantee("whole-file")
def test_a_failed_write_leaves_the_old_file_and_no_partial_file(tmp_path):
    path = tmp_path / "file"
    replace_file(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_file(path, fail)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    replace_json(path, {"a": None})
    assert path.read_text() == '{\n  "a": null\n}\n' and not list(tmp_path.glob(f"*{TEMPORARY_SUFFIX}"))


@pytest.mark.guarantee("whole-file")
def test_writers_of_one_file_never_share_a_temporary_file(tmp_path):
    """In containers on two hosts even their process ids are the same."""
    path = tmp_path / "file"
    replace_file(path, lambda file: (file.write(b"first"), replace_file(path, lambda other: other.write(b"second"))))
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file"]


@pytest.mark.guarantee("plain-load")
def test_weights_come_from_a_checkpoint_or_a_bare_state_dict(tmp_path):
    archive.write_archive(tmp_path / "c.pt", payload())
    torch.save({"weight": torch.ones(3)}, tmp_path / "bare.pt")
    assert checkpoint.load_weights(tmp_path / "c.pt")["weight"].shape == (50, 20)
    assert checkpoint.load_weights(tmp_path / "bare.pt")["weight"].shape == (3,)
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name in ("list.pt", "text.pt"):
        with pytest.raises(
            UserError, match=f"--init_from .*{name} (holds no weights of one model but list|is a text file).*. Give"
        ):
            checkpoint.load_weights(tmp_path / name)
    flip(tmp_path / "c.pt", 2000)
    with pytest.raises(UserError, match="c.pt is damaged"):
        checkpoint.load_weights(tmp_path / "c.pt")


# ---- what may differ on resume ----


MUST_MATCH = {"seed": 1, "batch_size": 32, "dataset_size": 10, "optimizer": "adamw", "num_classes": 5}
MUST_MATCH = {name: value for name, value in MUST_MATCH.items() if hasattr(TrainingConfig, name)}  # a fork has others
FREE = {"run_dir": "elsewhere", "num_workers": 3, "log_interval": 1, "save_every_steps": 5, "keep_last": 9}


@pytest.mark.guarantee("must-match")
def test_all_fields_that_must_match_are_rejected_in_one_error(tmp_path):
    with pytest.raises(UserError) as error:
        compare_checkpoint(payload(), TrainingConfig(**MUST_MATCH), origin("other"))
    *lines, data, remedy = str(error.value).splitlines()
    assert {line.split()[0].removeprefix("--") for line in lines} == set(
        MUST_MATCH
    ) and "--seed is 1, but the checkpoint has --seed 42." in lines
    assert "The training set differs from the checkpoint's" in data
    assert "must be as they were for --resume_from. Restore them" in remedy


@pytest.mark.guarantee("changed-data")
def test_changed_files_are_named_up_to_twenty_and_rejected_from_one_percent_on():
    def listing(**sizes):
        return b"\0" + b"".join(b"%b %d\0" % item for item in zip(map(str.encode, sizes), sizes.values(), strict=True))

    whole = {f"a b/{k:04d}": k for k in range(2000)}
    for count in (1, 20, 21):
        files = compare_listings(listing(**whole), listing(**whole | dict.fromkeys([*whole][:count], 5000)))
        names = ", ".join([*[*whole][:20][:count], *["..."] * (count > 20)])
        line = f"The training set has files of another size than in the checkpoint: {count} of 2,000 ({names})."
        assert compare_data(origin(), origin(content="2"), files, True) == (line, count > 20)
    assert compare_listings(listing(**whole), listing(**whole)) == compare_listings(b"", listing(**whole)) == {}
    files = compare_listings(listing(a=1, b=2), listing(b=2, c=1))
    line, is_other = compare_data(origin(), origin("other"), files, True)
    assert is_other and " new: c. These files are missing: a. Put them back, or give copies" in line


@pytest.mark.guarantee("other-samples")  # extra: sketches
def test_half_of_the_samples_may_differ_or_all_if_the_code_has_changed():
    before = origin(sketches=[[k, 1.0, 0.5] for k in range(4)])
    for number in range(5):
        current = origin(sketches=[[k + 10 * (k < number), 1.0, 0.5] for k in range(4)])
        for is_same_code in (False, True):
            line, is_other = compare_data(before, current, {}, is_same_code)
            assert is_other == (is_same_code and number > 2) and bool(line) == (number > 0)
    assert compare_data(before, origin(sketches=[None] * 4), {}, True) == ("", False)


@pytest.mark.guarantee("changed-settings")
def test_changes_of_may_fields_are_listed_and_of_free_fields_are_not():
    assert compare_checkpoint(payload(), TrainingConfig(**FREE), origin()) == []
    changed = compare_checkpoint(payload(), TrainingConfig(lr=0.3, epochs=20), origin(size=128))
    assert [line.split(", but")[0] for line in changed] == [
        "--epochs is 20",
        "--lr is 0.3",
        "The global batch has 128 samples per optimizer step",
    ]


def test_a_requested_global_batch_must_match():
    with pytest.raises(
        UserError, match="The global batch has 128 samples per optimizer step, but the checkpoint has 64."
    ):
        compare_checkpoint(payload(), TrainingConfig(global_batch_size=128), origin(size=128))
    assert compare_checkpoint(payload(), TrainingConfig(global_batch_size=64), origin()) == []


def test_the_number_of_cpu_threads_must_match_for_exact_sums():  # extra: exact
    exact = {"reduction": "exact"}
    assert compare_checkpoint(payload(), TrainingConfig(), origin(threads=2)) == []
    assert compare_checkpoint(payload(**exact), TrainingConfig(**exact), origin()) == []
    with pytest.raises(UserError, match=r"exact OMP_NUM_THREADS must be 1, as in the checkpoint, got 2\."):
        compare_checkpoint(payload(**exact), TrainingConfig(**exact), origin(threads=2))


@pytest.mark.guarantee("exact-ranks")
def test_a_checkpoint_of_a_version_with_another_order_of_exact_sums_is_reported():  # extra: exact
    old, exact = {**origin(), "exact_sums": None}, TrainingConfig(reduction="exact")
    [line] = compare_checkpoint(payload(reduction="exact") | {"provenance": old}, exact, origin())
    expected = "With --reduction exact this version sums in another order than the checkpoint's, so the bits change."
    assert line == expected
    assert compare_checkpoint(payload() | {"provenance": old}, TrainingConfig(), origin()) == []


@pytest.mark.parametrize(
    ("rule", "value", "problem"),
    [
        ("must", 1, ""),
        ("must", 2, "The checkpoint has --gone_field 2, but this fork has no such flag (docs/extras.md)."),
        ("may", 2, "The checkpoint has --gone_field 2, but this fork has no such flag (docs/extras.md)."),
        ("free", 2, ""),
    ],
)
def test_a_field_that_this_fork_has_deleted_counts_if_it_is_not_at_its_default(rule, value, problem):
    saved = payload()
    saved["config"] |= {"gone_field": value}
    saved["provenance"] |= {"fields": {"gone_field": [1, rule], "lr": [0.1, "may"]}}
    if problem and rule == "must":
        with pytest.raises(UserError, match=re.escape(problem)):
            compare_checkpoint(saved, TrainingConfig(), origin())
    else:
        assert compare_checkpoint(saved, TrainingConfig(), origin()) == [problem] * bool(problem)
    assert "gone_field" not in vars(TrainingConfig.from_args([], saved["config"]))


@pytest.mark.guarantee("changed-settings")
@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_a_removed_setting_of_a_checkpoint_is_ignored_at_its_default_and_said_otherwise(name):
    default, needed = REMOVED_SETTINGS[name].default, REMOVED_SETTINGS[name].required_setting
    saved = payload(**({needed: 9} if needed else {}))
    current = TrainingConfig.from_args([], saved["config"])
    saved["config"][name] = default
    saved["provenance"]["fields"] = {name: [default, "free"]}
    assert compare_checkpoint(saved, current, origin()) == []
    saved["config"][name] = default + 5
    answer = f"{needed} is used." if needed else REMOVED_SETTINGS[name].replacement
    message = f"{name}={default + 5} of the checkpoint is ignored, since {name} was removed. {answer}"
    assert compare_checkpoint(saved, current, origin()) == [message]
    if needed:
        started = f"The run of --resume_from was started with --{name} {default + 5:g}, which was removed"
        with pytest.raises(UserError, match=f"^{re.escape(started)}. Add --{needed} 9.$"):
            compare_checkpoint(saved, TrainingConfig(), origin())


def test_a_best_value_of_another_metric_or_of_other_weights_is_dropped():
    saved, current = payload(best_metric="loss"), {"held_out": {}}
    assert compare_best(saved, TrainingConfig(best_metric="loss"), current, "min:loss") == ([], True)
    assert compare_best(saved, TrainingConfig(), current, "min:loss") == ([], False)
    averaged = TrainingConfig(best_metric="loss", ema_decay=0.9)
    assert compare_best(saved, averaged, current, "min:loss") == ([], False)
