"""Ranks that really cannot allocate, by a limit of the kernel: how a run says it, and what benchmark.py --find-batch finds."""

import re
import sys

import pytest

from benching import find_batch
from ranks import ROOT, launch, torchrun
from training import TINY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits of a process")
LARGE = [*TINY, "--batch_size", "512", "--dataset_size", "600", "--epochs", "1", "--no-use_amp"]
GIB = 1.5


def limited(path, when, megabytes, rank=0):
    """The program is ours; from its first call of a function of train.py one rank may take so much more memory."""
    path.write_text(
        f"import os, resource, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'train.py'\n"
        "import train\n"
        "from utils.memory import own_memory\n"
        f"plain = train.{when}\n"
        "def call(*args, **options):\n"
        f"    if os.environ.get('RANK', '0') == '{rank}':\n"
        f"        most = own_memory('VmData') + int({megabytes} * 2**20)\n"
        "        resource.setrlimit(resource.RLIMIT_DATA, (most, most))\n"
        "    return plain(*args, **options)\n"
        f"train.{when} = call\n"
        "train.run_as_script()\n"
    )
    return path


def ends_with(runs, ended, rank, said):
    """One sentence, in the status and in the output; the rank is named, the exit code is 1, nothing is left behind."""
    assert (ended.code, ended.left) == (1, 0), ended.text
    status = runs.json("run", "status.json")
    assert (status["state"], status["rank"]) == ("failed", rank)
    assert re.fullmatch(f"rank {rank}: {said}", status["error"]), status["error"]
    assert status["error"] in ended.text


PLACE = (
    r" does not fit into the memory of \S+ \((it asked for [\d.,]+ [MG]iB, )?[\d.,]+ [MG]iB of [\d.,]+ [MG]iB is free by ulimit -d, .*?\); "
)
BATCH = r"a micro-batch of 512 samples \(float32 \[512, 3, 8, 8\] and int64 \[512\]\)" + PLACE
MODEL = "the model, with its gradients and what the optimizer keeps," + PLACE + "give a smaller --model.*"
FRESH = r"give --batch_size 256 --global_batch_size {} \(the same global batch\), or --activation_checkpointing; python scripts/benchmark.*"
EVALUATION = r"give --batch_size 32 --global_batch_size 512 \(the same global batch\); python scripts/benchmark.*"
GOES_ON = (
    r"the micro-batch of a run that goes on is fixed: give --activation_checkpointing, .* --batch_size 256 --global_batch_size 512 "
    r"--init_from \S+step_0{7}2\.pt --run_dir NEW; .*"
)


@pytest.mark.parametrize(
    ("when", "megabytes", "said"),
    [
        ("create_state", 8, MODEL),
        ("warm_up", 40, BATCH + FRESH.format(512)),
        ("evaluate", 0, f"the evaluation of {BATCH.replace('512', '120')}{EVALUATION}"),
    ],
)
def test_a_rank_alone_says_what_does_not_fit(runs, when, megabytes, said):
    program = limited(runs.root / "fork.py", when, megabytes)
    ended = launch([sys.executable, program, *LARGE, "--run_dir", runs.folder("run")])
    ends_with(runs, ended, 0, said)


@pytest.mark.parametrize("when", ["warm_up", "train_one_epoch"])
def test_one_rank_of_two_that_has_too_little_is_named(runs, when):
    program = limited(runs.root / "fork.py", when, 0 if when == "train_one_epoch" else 40, rank=1)
    ended = torchrun(2, *LARGE, "--dataset_size", "1100", "--run_dir", runs.folder("run"), script=program)
    ends_with(runs, ended, 1, BATCH + FRESH.format(1024))
    assert ended.text.count("another rank failed first") <= 1


def test_a_resumed_run_is_told_what_it_may_change(runs):
    runs.train(1, "run", *LARGE, "--save_every_steps", "1", "--max_steps", "2")
    program, before = limited(runs.root / "fork.py", "warm_up", 40), runs.checkpoints("run")[-1]
    ended = launch([sys.executable, program, *LARGE, "--epochs", "9", "--run_dir", runs.folder("other"), "--resume_from", before])
    assert ended.code == 1 and re.search(BATCH + GOES_ON, ended.text), ended.text


def under(memory, runs, path, batch):
    """Train two epochs of so large batches in a process that may take so much memory."""
    path.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'scripts')!r}]; sys.argv[0] = 'train.py'\n"
        "import train\n"
        "from benching.find_batch import limit_to\n"
        "plain = train.warm_up\n"
        "def warm_up(model, batch, *rest):\n"
        "    plain(model, [each[:2] for each in batch], *rest)\n"
        f"    limit_to({memory})\n"
        "    return plain(model, batch, *rest)\n"
        "train.warm_up = warm_up\n"
        "train.run_as_script()\n"
    )
    words = [
        "--image_size",
        "16",
        "--backend",
        "gloo",
        "--batch_size",
        batch,
        "--dataset_size",
        2 * batch,
        "--epochs",
        2,
        "--ema_decay",
        "0.9",
    ]
    return launch([sys.executable, path, *map(str, words), "--run_dir", runs.folder(f"of-{batch}")])


@pytest.mark.drill
def test_what_find_batch_finds_can_be_trained_with_and_half_as_much_again_cannot(runs):
    memory, said = int(GIB * 2**30), []
    words = ["--image_size", "16", "--backend", "gloo", "--ema_decay", "0.9", "--run_dir", str(runs.folder("none"))]
    room = int(memory * (1 - find_batch.HEAD_ROOM))
    trials = find_batch.search(find_batch.on_cpu(words, room), 32, 5_000, room, True, said.append)
    best = max(each.size for each in trials if each.end == find_batch.FIT)
    assert not runs.folder("none").exists()  # it trains nothing
    program = runs.root / "fork.py"
    ended = under(memory, runs, program, best)
    assert ended.code == 0, (said, ended.text)
    ended = under(memory, runs, program, best * 3 // 2)
    assert ended.code == 1 and "does not fit into the memory of" in ended.text, (said, ended.text)


def test_find_batch_prints_the_flags_to_paste():
    words = ["--find-batch", "--ranks", "2", "--memory", "4", *TINY, "--batch_size", "6", "--grad_accum_steps", "3", "--dataset_size", "20"]
    ended = launch([sys.executable, "scripts/benchmark.py", *words])
    assert (ended.code, ended.left) == (0, 0), ended.text
    assert "\n  20 sample(s): fits, " in ended.out
    assert re.search(
        r"\nas given: 20 samples, .*a step, .* samples/s\n.* no micro-batch is larger\n  --batch_size 18 --global_batch_size 36 ", ended.out
    )
    assert re.search(r"\nwith --activation_checkpointing: ", ended.out)
