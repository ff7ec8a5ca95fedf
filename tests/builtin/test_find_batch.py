"""benchmark.py --find-batch on the shipped model: what it finds, and the flags that it prints."""

import re
import sys

import pytest

from benching import find_batch
from ranks import launch
from training import TINY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits of a process")]
GIB = 1.5
LIMITED = """
from benching.find_batch import limit_to
plain = train.warm_up
def warm_up(model, batch, *rest):
    plain(model, [each[:2] for each in batch], *rest)
    limit_to({memory})
    return plain(model, batch, *rest)
train.warm_up = warm_up
"""


def test_what_find_batch_finds_can_be_trained_with_and_half_as_much_again_cannot(runs):
    memory, said = int(GIB * 2**30), []
    words = [*"--image_size 16 --backend gloo --ema_decay 0.9 --run_dir".split(), str(runs.folder("none"))]
    room = int(memory * (1 - find_batch.HEAD_ROOM))
    trials = find_batch.search(find_batch.on_cpu(words, room), 32, 5_000, room, True, said.append)
    best = max(each.size for each in trials if each.end == find_batch.FIT)
    assert not runs.folder("none").exists()  # it trains nothing
    program = runs.program(LIMITED.format(memory=memory), task="")
    for batch, code in ((best, 0), (best * 3 // 2, 1)):
        flags = [
            *words[:-1],
            runs.folder(f"of-{batch}"),
            "--batch_size",
            batch,
            "--dataset_size",
            2 * batch,
            "--epochs",
            2,
        ]
        ended = launch([sys.executable, program, *flags])
        assert ended.code == code and ("does not fit into the memory of" in ended.text) == bool(code), (
            said,
            ended.text,
        )


def test_find_batch_prints_the_flags_to_paste():
    words = [
        "--find-batch",
        "--ranks",
        "2",
        "--memory",
        "4",
        *TINY,
        *"--batch_size 6 --grad_accum_steps 3 --dataset_size 20".split(),
    ]
    ended = launch([sys.executable, "scripts/benchmark.py", *words])
    assert (ended.code, ended.left) == (0, 0), ended.text
    assert "\n  20 sample(s): fits, " in ended.out
    assert re.search(
        r"\nas given: 20 samples, .*a step, .* samples/s\n.* no micro-batch is larger\n  --batch_size 18"
        r" --global_batch_size 36 ",
        ended.out,
    )
    assert re.search(r"\nwith --activation_checkpointing: ", ended.out)
