# extra: benchmark and template
"""benchmark.py --find-batch on the built-in model: the size that it finds, and the flags that it prints."""

import re
import sys

import pytest

from lib.benchmark import find_batch
from ranks import launch
from recipe_data import lines_of_words
from recipe_forks import Fork
from training import TINY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits of a process")]
GIB = 1.5
LIMITED = """
from lib.benchmark.find_batch import limit_memory
from utils import assembly
plain = assembly.run_first_passes
def run_first_passes(*args, **options):
    plain(*args, **options)
    limit_memory(options["ctx"].device, {memory})
    return plain(*args, **options)
assembly.run_first_passes = run_first_passes
"""


def test_the_size_found_can_be_trained_and_half_as_much_again_cannot(runs):
    printed, flags = [], "--image_size 16 --backend gloo".split()
    flags += ["--ema_decay", "0.9"]
    words = [*flags, "--run_dir", str(runs.folder("none"))]

    def trial(size):
        return find_batch.Trial(size, **find_batch.start_trial(size, 1, GIB, words))

    trials = find_batch.search_largest_size(trial, 32, 5_000, printed.append)
    best = max(candidate.size for candidate in trials if candidate.outcome == find_batch.FITS)
    assert not runs.folder("none").exists()  # it trains nothing
    program = runs.program(LIMITED.format(memory=int(GIB * 2**30)), task="")
    for batch, code in ((best, 0), (best * 3 // 2, 1)):
        sizes = ["--batch_size", batch, "--dataset_size", 2 * batch, "--epochs", 2]
        ended = launch([sys.executable, program, *flags, "--run_dir", runs.folder(f"of-{batch}"), *sizes])
        is_explained = " ran out of memory (" in ended.text
        assert ended.code == code and is_explained == bool(code), (printed, ended.text)


def test_find_batch_prints_the_flags_to_paste():
    words = "--find-batch --ranks 2 --memory 4 --batch_size 6 --grad_accum_steps 3 --dataset_size 20".split()
    ended = launch([sys.executable, "scripts/benchmark.py", *TINY, *words])
    assert (ended.code, ended.left) == (0, 0), ended.text
    assert "\n  20 samples: fits, " in ended.out
    given = r"\nas given: 20 samples, .*per micro-batch, .* samples/s\n  This is the whole training set.\n"
    assert re.search(given + r"  --batch_size 18 --global_batch_size 36 ", ended.out)
    assert re.search(r"\nwith --activation_checkpointing: ", ended.out)  # extra: compile


def test_a_budget_of_tokens_is_found(tmp_path):  # extra: lengths
    """The largest one holds the whole set as often as its longest line."""
    fork = Fork(tmp_path, "text")
    lines_of_words(fork.folder / "FOLDER")
    words = "--find-batch --memory 4 --batch_tokens 9000 --global_batch_size 36000".split()
    flags = [*words, "--data_dir", "FOLDER", "--backend", "gloo"]
    ended = launch([sys.executable, "scripts/benchmark.py", *flags], cwd=fork.folder)
    assert ended.code == 0 and "\n  9,000 tokens: fits, " in ended.out, ended.text
    assert re.search(r"\nas given: [\d,]+ tokens, .* tokens/s\n  This is the whole training set.\n", ended.out)
    assert re.search(r"\n  --batch_tokens \d+ --global_batch_size 36000 ", ended.out)
