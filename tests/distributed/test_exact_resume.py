"""A run that stops and resumes at any step, any number of times, is bitwise equal to the uninterrupted run."""

import pytest

FLAGS = "--epochs 2 --num_workers 1 --log_interval 3 --lr 0.02 --record_samples --keep_last 99".split()
FLAGS += ["--ema_decay", "0.9"]
FLAGS += "--clip_grad_norm 1 --save_every 0 --patience 9".split()


@pytest.mark.guarantee("resume", "records-once")
def test_stops_and_resumes_within_an_epoch_change_nothing(runs):
    """Three stops by a signal, two of them in one epoch; a persistent worker; a short last step. It looks at averages,
    records and samples too."""
    flags = [*FLAGS, "--amp_dtype", "fp16", "--dataset_size", 61]  # 8 steps per epoch
    runs.train(2, "whole", *flags)
    stops = (1, 5, 11)
    runs.train_with_stops(2, "parts", *flags, stops=stops)
    assert [record["step"] for record in runs.events("parts", "resumed")] == [stop + 1 for stop in stops]
    assert runs.last("whole")["progress"]["step"] == 16 and len(runs.samples("whole")) == 16
    assert runs.json("whole", "summary.json")["best_value"] > 0
    runs.assert_same("whole", "parts")
