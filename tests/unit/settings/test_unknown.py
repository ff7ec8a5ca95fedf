"""Unknown flags: typing errors get the flag that was meant, other words do not."""

import pytest

from utils.settings import other_trainers, unknown_flags
from utils.settings.unknown_flags import explain_unknown_flag

NAMES = """run_dir seed batch_size global_batch_size eval_batch_size epochs warmup_epochs max_steps max_time lr momentum
beta2 cache save_every_steps eval_every keep_last log_interval find_unused_parameters num_workers data_dir
activation_checkpointing config print_config""".split()


def answer(word):
    return explain_unknown_flag(word, NAMES)[0]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("epcohs", "epochs"),
        ("epoch", "epochs"),
        ("epochss", "epochs"),
        ("epohs", "epochs"),
        ("seeds", "seed"),
        ("sede", "seed"),
        ("chache", "cache"),
        ("momentun", "momentum"),
        ("batchsize", "batch_size"),
        ("batch-size-", "batch_size"),
        ("btach_size", "batch_size"),
        ("batch_siz", "batch_size"),
        ("bacth-size", "batch_size"),
        ("global-batchsize", "global_batch_size"),
        ("globl_batch_sizes", "global_batch_size"),
        ("max-step", "max_steps"),
        ("maxsteps", "max_steps"),
        ("save_evry_steps", "save_every_steps"),
        ("eval_evrey", "eval_every"),
        ("print-confg", "print_config"),
        ("find_unused_paramters", "find_unused_parameters"),
        ("activation_chekpointing", "activation_checkpointing"),
        ("num_worker", "num_workers"),
        ("beta_2", "beta2"),
    ],
)
def test_a_typing_error_gets_the_flag_that_was_meant(word, meant):
    assert answer(f"--{word}=1") == f"--{word} is not a flag here. Did you mean --{meant}?"
    assert answer(word) == f"{word} is not a setting. Did you mean {meant}?"  # the key of a file


@pytest.mark.parametrize(
    "word",
    [
        "beta3",  # digits are never a typing error
        "beta",
        "batch_size2",
        "speed",  # seed, with another letter
        "feed",
        "data_dim",
        "data_dip",
        "max_tide",
        "rnu_dri",  # two errors in few letters
        "batch",
        "size",
        "size_batch",
        "epochs_warmup",
        "sample_every",
        "keep_list_of",
        "my_epochs",
        "no_seed",
        "nonsense",
        "x",
        "_",
    ],
)
def test_another_word_gets_no_flag(word):
    assert "Did you mean" not in answer(f"--{word}")


def test_the_option_of_another_trainer_is_no_typing_error():
    message = explain_unknown_flag("--window_size", ["windows_size"])[0]
    assert message.startswith("--window_size is not a flag here. Set it in dataset.py")


def test_a_group_before_the_name_is_left_out():
    assert answer("--trainer.batch_size") == "--trainer.batch_size is not a flag here. Did you mean --batch_size?"


def test_removed_and_deleted_settings_and_those_of_torchrun_are_named(monkeypatch):
    monkeypatch.setattr(unknown_flags, "read_deleted_extras", lambda: {"cache": {"cache_size": 1}})
    assert answer("--minutes").startswith("--minutes was removed. Train 50 steps")
    assert (
        answer("--no-cache-size")
        == "--no-cache-size needs the extra cache, which this fork has deleted. See docs/extras.md."
    )
    assert answer("--nproc-per-node=2").startswith("--nproc-per-node is not a flag here. Start the ranks with torchrun")
    assert answer("--nonsense") == "--nonsense is not a flag here. See --help all for all flags."


@pytest.mark.parametrize("has_script", [True, False])
def test_an_answer_names_a_script_only_if_the_fork_has_it(monkeypatch, tmp_path, has_script):
    monkeypatch.setattr(other_trainers, "ROOT", tmp_path)
    if has_script:
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts/benchmark.py").touch()
    expected = "--auto_scale_batch_size is not a flag here. Give the largest --batch_size that fits."
    if has_script:
        expected += " scripts/benchmark.py --find-batch finds it."
    assert answer("--auto_scale_batch_size") == expected


def test_the_option_of_another_trainer_for_a_deleted_flag_gets_the_extra(monkeypatch):
    monkeypatch.setattr(unknown_flags, "read_deleted_extras", lambda: {"sharding": {"sharding": "none"}})
    assert (
        answer("--fsdp")
        == "--fsdp is not a flag here. --sharding needs the extra sharding, which this fork has deleted."
        " See docs/extras.md."
    )
    assert answer("--torch_compile").endswith('Add a field to the block "yours" of config.py, or leave it out.')
