"""What a run prints at its end."""

import re
from types import SimpleNamespace

import pytest

from utils.report.goodput import TIME_ACCOUNTS
from utils.report.reporter import describe_run_end

SUMMARY = {
    "state": "completed",
    "epochs": 1,
    "steps": 40,
    "skipped_steps": 0,
    "samples_seen": 2000,
    "samples_per_s": 100.0,
    "peak_memory_bytes": 2**30,
    "best_metric": "top1",
    "best_value": 0.5,
    "best_epoch": 1,
    "final": {"top1": 0.5},
    "restarts": 0,
    "time": {f"{name}_s": 0.0 for name in TIME_ACCOUNTS},
}


def text_of(folder, training_s=20.0, is_averaged=False, overwrite=False, **changed):
    run = SimpleNamespace(folder=folder, checkpoint_folder=folder / "checkpoints")
    seconds = SUMMARY["time"] | {"training_s": training_s, "start_up_s": 10.0, "down_s": changed.pop("down_s", 0.0)}
    return describe_run_end(
        SUMMARY | {"time": seconds} | changed, run, 20.0, is_averaged=is_averaged, overwrite=overwrite
    )


def test_it_has_results_correct_plurals_epochs_from_1_and_the_next_commands(tmp_path):
    text = text_of(tmp_path)
    assert "completed: 1 epoch, 40 steps, 2,000 samples in 20 s of training, 100 samples/s, peak memory 1.00" in text
    assert "best: top1 0.5000 in epoch 1\n" in text
    commands = re.findall(r"^  (\S+ \S+)", text, re.MULTILINE)
    scripts = [
        "scripts/runs.py",  # extra: reports
        "train.py",
        "scripts/export.py",
    ]
    assert commands == ["tensorboard --logdir", *(f"python {script}" for script in scripts)]
    assert "--eval_only" not in text_of(tmp_path, final={})  # nothing to evaluate
    assert text_of(tmp_path, state="preempted").endswith("To continue, run the same command with --resume_from auto.")


def test_it_names_averaged_weights_and_the_flag_that_would_start_over(tmp_path):
    assert "best: top1 0.5000 (averaged weights) in epoch 1\n" in text_of(tmp_path, is_averaged=True)
    text = text_of(tmp_path, state="preempted", overwrite=True)
    assert text.endswith("run the same command with --resume_from auto instead of --overwrite.")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "time: 30 s (training 20 s, start up 10 s)"),  # start-up time dominates the goodput of a short run
        ({"training_s": 90.0}, "time: 1 min 40 s (training 1 min 30 s, start up 10 s), goodput 90%"),
        (
            {"training_s": 90.0, "down_s": 50.0, "restarts": 1},  # time between attempts is not lost work
            "time: 1 min 40 s (training 1 min 30 s, start up 10 s), goodput 90%, 1 restart, 50 s between attempts",
        ),
    ],
)
def test_goodput_excludes_time_between_attempts_and_is_shown_for_runs_over_a_minute(tmp_path, changed, line):
    assert f"\n{line}\n" in text_of(tmp_path, **changed)
