"""Twenty SIGKILLs in one run: no sample of a committed step is lost or repeated, whoever goes on."""

import json
import random
from collections import Counter

import pytest
import torch

from killer import Place, kill_one, train_and_say_where
from ranks import CONTEXT, run_ranks
from tasks import train_task
from test_exact_ranks import relative
from training import STATE, TINY, difference

KILLS, MOST_KILLS = 20, 40
AIMS = ("data", "forward", "backward", "save", "evaluation")
FLAGS = [
    *TINY,
    "--dataset_size",
    "154",
    "--epochs",
    "16",
    "--global_batch_size",
    "16",
    "--lr",
    "0.02",
    "--ema_decay",
    "0.9",
    "--no-use_amp",
]
FLAGS += ["--record_samples", "--num_workers", "1", "--save_every_steps", "3", "--timeout", "30"]


@pytest.mark.parametrize(("choices", "dtype", "seed"), [((1, 2, 4), torch.float64, 11), ((4,), torch.float32, 12)], ids=["1-2-4", "4"])
def test_twenty_kills_leave_the_run_that_was_never_killed(runs, choices, dtype, seed):
    """Each of five phases is hit at least twice; each time a random number of ranks goes on from the newest whole checkpoint."""
    run_ranks(4, train_task, "lines", [*FLAGS, "--run_dir", runs.folder("whole"), "--save_every_steps", "0"], dtype)
    folder, rng, hits, attempts = runs.folder("killed"), random.Random(seed), Counter(), []
    folder.mkdir()
    flags = [*FLAGS, "--run_dir", folder / "run", "--resume_from", "auto"]
    aims = [aim for aim in AIMS for _ in range(KILLS // len(AIMS))]
    rng.shuffle(aims)
    while len(attempts) < KILLS or any(hits[aim] < 2 for aim in AIMS):
        assert len(attempts) < MOST_KILLS, hits
        aim = aims.pop() if aims else min(AIMS, key=lambda each: hits[each])
        ranks, report = rng.choice(choices), folder / f"report{len(attempts)}"
        for rank in range(ranks):
            Place(folder, rank).write(pid=0, phase=0, steps=0)  # nothing of the attempt before
        killer = CONTEXT.Process(target=kill_one, args=(folder, ranks, rng.random(), aim, report))
        killer.start()
        try:
            with pytest.raises(AssertionError, match="exit codes .*-9"):
                run_ranks(ranks, train_and_say_where, folder, "lines", flags, dtype)
        finally:
            killer.join(10)
            killer.kill()
        found = json.loads(report.read_text())
        hits[found["phase"]] += 1
        attempts.append((ranks, found["victim"], found["phase"], found["steps"]))
    print(f"seed {seed}: (ranks, victim, phase, steps of the attempt) {attempts}; {dict(hits)}")
    assert run_ranks(rng.choice(choices), train_and_say_where, folder, "lines", flags, dtype)[0] == "completed"
    killed, whole = type(runs)(folder), runs
    assert killed.samples("run") == whole.samples("whole") and len(whole.samples("whole")) == 160
    assert len({ranks for ranks, *_ in attempts}) == len(choices)
    resumed = [record["step"] for record in killed.records("run", "event") if record["event"] == "resumed"]
    print("resumed at", resumed)
    if choices == (4,):
        got, want = killed.last("run"), whole.last("whole")
        assert {key: difference(want[key], got[key]) for key in STATE} == {key: [] for key in STATE}
    else:  # float64: the order of sums alone, over 160 steps
        assert relative(killed.last("run")["model"], whole.last("whole")["model"]) < 1e-10
