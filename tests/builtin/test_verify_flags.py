# extra: verify and template
"""scripts/verify.py finds nothing on the template as shipped, with any flag that changes the result (with --all)."""

import io
import re
import time
from unittest import mock

import pytest

import forks
from config import SETTINGS
from ranks import copy_repository
from scripts import verify
from test_verify import FLAGS, outcomes

ROWS = """
--schedule cosine --warmup_epochs 0
--schedule linear --warmup_epochs 0.1
--schedule constant --warmup_epochs 1
--schedule wsd --min_lr 0.001
--schedule cosine --min_lr 0.001 --schedule_steps 5 --warmup_steps 1
--schedule step
--optimizer sgd --lr 3 --warmup_epochs 0
--optimizer adamw --lr 0.001
--optimizer adamw --lr 1e-6 --momentum 0.8 --beta2 0.99
--optimizer adamw --weight_decay 0.1 --schedule linear
--no-nesterov
--momentum 0
--momentum 0.5 --no-nesterov
--weight_decay 0
--weight_decay 0.1
--clip_grad_norm 0.1
--label_smoothing 0.1
--sharding zero2
--sharding zero3 --cpu_offload
--sharding hybrid
--amp_dtype fp16
--dataset_size 1
--dataset_size 2 --seed 0
--image_size 4 --dataset_size 37
--reduction exact
--grad_accum_steps 2
--global_batch_size 256
--batch_size 3
--drop_last --batch_size 8
--max_steps 1
--epochs 1
--seed 0
--deterministic
--comm_hook bf16
--bucket_cap_mb 1
--no-use_amp
--amp_dtype bf16
--augment none
--channels_last false
--norm_weight_decay 0 --weight_decay 0.1
--freeze backbone
--in_channels 1 --num_classes 3
--best_metric top5
--patience 1
--save_every_steps 1 --eval_every 0
--eval_every_steps 2 --eval_batch_size 3
--find_unused_parameters
""".strip().splitlines()
ROWS += ["--optimizer adamw --drop_last --batch_size 8 --global_batch_size 16"]
ROWS += ["--activation_checkpointing"]  # extra: compile
ROWS += ["--ema_decay 0.9"]
ROWS += ["--sharding zero3 --ema_decay 0.9 --optimizer adamw"]  # extra: sharding
ROWS += ["--cache ram"]  # extra: cache
ROWS += [
    "--mixup_alpha 0.2 --cutmix_alpha 1",
    "--augment_repeats 2",
    "--model resnet18 --image_size 32",
]  # extra: images
ELSEWHERE = {  # flags without a row
    "dataset": "test_recipes.py",
    "dataset_size": "FLAGS",
    **dict.fromkeys("crop_scale crop_ratio auto_augment random_erase".split(), "test_image_files.py"),  # extra: images
    **dict.fromkeys("train_size resize_size interpolation".split(), "test_image_files.py"),  # extra: images
    **dict.fromkeys(("batch_tokens", "bucket_window"), "test_recipes.py: speech"),  # extra: lengths
    "sync_bn": "CUDA only",
}


def test_each_flag_that_changes_the_result_has_a_row():
    fields = [setting.name for setting in SETTINGS if setting.resume != "free"]
    given = {name.replace("no-", "") for row in [*ROWS, *FLAGS] for name in re.findall(r"--(\S+)", row)}
    assert not set(fields) - given - ELSEWHERE.keys() and not ELSEWHERE.keys() - {*fields}


@pytest.mark.guarantee("verify")
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_verify_finds_nothing_on_the_template_with(tmp_path, row):
    began, fork = time.monotonic(), copy_repository(tmp_path)
    ended = forks.run(fork, 2, "scripts/verify.py", *FLAGS, *row.split())
    print(f"{time.monotonic() - began:5.1f} s  {row}")  # shown with -rP or -s
    assert ended.code == 0 and set(outcomes(ended.out).values()) == {"ok"}, ended.text
    assert "Use --no-use_amp or a float32" not in ended.out


@pytest.mark.parametrize(
    ("ranks", "note"),
    [
        (1, "1 rank does not exercise every summation order"),
        (2, "2 ranks do not exercise every summation order"),
        (3, "3 ranks do not exercise every summation order"),
        (4, ""),
    ],
)
def test_the_note_on_few_ranks_is_in_the_singular_for_one(ranks, note):
    fork = mock.MagicMock(ctx=mock.Mock(world_size=ranks, is_main=True), train_set=[0], dtype="torch.float64")
    with mock.patch.object(verify, "STDOUT", io.StringIO()) as out:
        verify.CheckRunner(fork, [], 11)
    output = out.getvalue()
    assert "(1 sample) on" in output and (note in output if note else "note" not in output.lower())
