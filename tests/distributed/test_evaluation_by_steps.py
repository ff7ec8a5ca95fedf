"""--eval_every_steps and patience."""

import pytest

from training import assert_same_state


@pytest.mark.guarantee("evaluation-by-steps")
def test_patience_counts_evaluations_within_an_epoch_and_a_resume_from_a_saved_step_repeats_none(runs):
    flags = "--epochs 3 --dataset_size 78 --num_workers 1 --no-use_amp --lr 1e-30 --eval_every_steps 2".split()
    flags += "--save_every_steps 1 --keep_last 99 --best_metric min:loss --log_interval 1 --patience 3".split()
    runs.train(2, "run", *flags, task="plain")
    steps = [record["step"] for record in runs.records("run", "eval")]
    assert runs.json("run", "summary.json")["state"] == "completed" and steps == [2, 4, 6, 8]
    assert "3 evaluations had no improvement" in runs.log("run")
    for path in runs.checkpoints("run")[3:5]:
        name = f"from_{path.stem}"
        runs.train(2, name, *flags, "--resume_from", path, task="plain")
        assert_same_state(runs.last("run"), runs.last(name))
        first = int(path.stem.removeprefix("step_"))
        assert [record["step"] for record in runs.records(name, "eval")] == [step for step in steps if step >= first]
