"""--reduction exact: the same bits on 1, 2, 4 and 8 ranks, in weights, optimizer, statistics, average and records."""

import pytest

# 10 micro-batches per step, of which the last step of an epoch has 6, the last of them short; ranks hold 1 to 10
FLAGS = "--dataset_size 142 --epochs 3 --global_batch_size 40 --lr 0.05 --ema_decay 0.9 --clip_grad_norm 1".split()
FLAGS += "--reduction exact --log_interval 2 --save_every 0".split()
BF16 = "--amp_dtype bf16 --optimizer adamw".split()


@pytest.mark.parametrize(
    "task, flags",
    [
        ("images", ["--no-use_amp"]),
        ("images", BF16),
        pytest.param("lines", ["--no-use_amp", "--optimizer", "adamw"], marks=pytest.mark.slow),
    ],
)
def test_runs_on_1_2_4_and_8_ranks_have_the_same_bits(runs, task, flags):
    for ranks in (1, 2, 4, 8):
        runs.train(ranks, f"on-{ranks}", *FLAGS, *flags, task=task)
    for ranks in (2, 4, 8):
        runs.assert_same("on-1", f"on-{ranks}")
