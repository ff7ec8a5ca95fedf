"""A run that is resumed on another number of ranks without --global_batch_size."""

import pytest


@pytest.mark.guarantee("global-batch")
def test_without_global_batch_size_a_changed_global_batch_is_a_warning(runs):
    """It is in the log and in the record of the resume; the epoch continues at the same sample."""
    flags = "--dataset_size 46 --epochs 1 --no-use_amp --record_samples".split()
    runs.train_with_stops(2, "run", *flags, stops=(2,), goes_on=False)
    runs.train_with_stops(1, "run", *flags, "--resume_from", "auto", stops=())
    change = "The global batch has 4 samples per optimizer step, but the checkpoint has 8."
    assert f"WARNING changed: {change}" in runs.log("run")
    jump = "The learning rate jumps: at step 3 it was 0.1, and it would be 0.05 now."  # more steps per epoch
    assert runs.events("run", "resumed")[0]["changed"] == [change, jump]
    samples = runs.samples("run")
    assert [len(samples[step]) for step in sorted(samples)] == [8, 8, 8, 4, 4, 4, 4, 4, 2]
    assert sorted(k for indices in samples.values() for k in indices) == list(range(46))
