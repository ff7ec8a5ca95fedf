# extra: template
"""A run that accumulates gradients says at its start how BatchNorm's statistics move."""

import pytest

LINE = "BatchNorm    The running statistics move once per optimizer step, not per micro-batch. Use momentum "
ONE_STEP = ("--max_steps", 1, "--schedule_steps", 1, "--dataset_size", 64)
CASES = [
    pytest.param(("--grad_accum_steps", 4), "0.344 for the memory that 0.1 has in torch", id="accumulation"),
    pytest.param(("--global_batch_size", 16), "0.19 for the memory that 0.1 has in torch", id="derived"),
    pytest.param((), "", id="none"),
    pytest.param(("--grad_accum_steps", 4, "--freeze", "backbone"), "", id="frozen"),
]


@pytest.mark.parametrize(("flags", "line"), CASES)
def test_the_start_of_a_run_says_how_the_statistics_move(runs, flags, line):
    runs.train(1, "run", *ONE_STEP, "--batch_size", 8, *flags, task="")
    assert (LINE + line in runs.log("run")) if line else ("BatchNorm  " not in runs.log("run"))
