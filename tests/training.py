"""Train in real ranks, and read the files of a run."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

import train
from config import TrainingConfig
from ranks import ROOT, run_ranks
from tasks import BUCKETS, train_task, using
from utils import assembly
from utils.checkpoint import format as checkpoint
from utils.files import read_json, read_records
from utils.report.goodput import AttemptTimes, split_attempts
from utils.run.checkpoints import Checkpoints


class PatientCheckpoints(Checkpoints):
    """Waits for the write before, so that the saved steps do not depend on the clock."""

    def save(self, blocking: bool = False, force: bool = False) -> None:
        super().save(blocking=True, force=force)


assembly.Checkpoints = PatientCheckpoints
STATE = ("model", "ema", "optimizer", "scaler", "progress")  # the entries of a checkpoint that define a run
ENDS = "epochs steps skipped_steps samples_seen best_value best_epoch best final".split()  # entries of a summary
# of records: they differ between equal runs
TIMES = ("samples_per_s", "tokens_per_s", "data_wait_s", "step_s", "peak_memory_bytes", "time", "seconds")
SIZE = ["--image_size", "8"] if hasattr(TrainingConfig, "image_size") else []  # a fork may delete the field
TINY = [*SIZE, *"--batch_size 4 --log_interval 5 --save_every_minutes 0 --backend gloo".split()]


def train_flags(flags, dtype=torch.float32, task="images"):
    torch.set_default_dtype(dtype)
    with using(task):
        return train.train(TrainingConfig.from_args(flags))


class Runs:
    """Trains in the test's folder, and reads the files of its runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        return self.root / name

    def words(self, name: str, *flags: object) -> list[str]:
        return [*map(str, [*TINY, "--run_dir", self.folder(name), "--data_dir", self.root / "data", *flags])]

    def program(self, code: str = "", task: str = "images") -> Path:
        """Write a script for WarmLaunch: train.py with a task, after these lines of code."""
        begin = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.argv[0] = 'train.py'\n"
        begin += "import os, signal, time, tasks, train\nfrom utils import assembly\n"
        begin += f"TASK = tasks.using({task!r})\nTASK.__enter__()\n"
        path = self.root / "program.py"
        path.write_text(f"{begin}{code}\ntrain.run_as_script()\n")
        return path

    def train(self, world_size: int, name: str, *flags, dtype=torch.float32, task="images", **options) -> list[dict]:
        """Train in real ranks. task: one of tasks.py; "" uses model.py and dataset.py."""
        words = self.words(name, *(BUCKETS if task else []), *flags)
        return run_ranks(world_size, train_flags, words, dtype, task, **options)

    def train_with_stops(
        self, world_size: int, name: str, *flags, stops: tuple, dtype=torch.float32, task="images", goes_on=True
    ) -> None:
        """Like tasks.train_task: a signal after each of these steps, then another attempt if `goes_on`."""
        run_ranks(world_size, train_task, task, self.words(name, *flags), dtype, stops, goes_on)

    def checkpoints(self, name: str) -> list[Path]:
        return checkpoint.list_step_checkpoints(self.folder(name) / "checkpoints")

    def last(self, name: str) -> dict:
        return checkpoint.read_checkpoint(self.checkpoints(name)[-1])[0]

    def json(self, name: str, file: str) -> dict:
        return json.loads((self.folder(name) / file).read_text())

    def records(self, name: str, kind: str) -> list[dict]:
        lines = (self.folder(name) / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def events(self, name: str, event: str) -> list[dict]:
        return [record for record in self.records(name, "event") if record["event"] == event]

    def log(self, name: str, rank: int = 0) -> str:
        return (self.folder(name) / "logs" / f"rank{rank}.log").read_text()

    def samples(self, name: str) -> dict[int, list[int]]:
        """The sample indices of each step, of all ranks together, sorted."""
        steps: dict[int, list[int]] = {}
        for file in sorted(self.folder(name).glob("samples/rank*.jsonl")):
            for line in file.read_text().splitlines():
                record = json.loads(line)
                steps.setdefault(record["step"], []).extend(record["indices"])
        return {step: sorted(indices) for step, indices in steps.items()}

    def assert_same(self, a: str, b: str) -> None:
        """The last checkpoints, recorded samples and records are equal, except for times and rates."""
        assert_same_state(self.last(a), self.last(b))
        for kind in ("train", "eval"):
            left, right = ([record | dict.fromkeys(TIMES) for record in self.records(name, kind)] for name in (a, b))
            assert left == right
        ends = [{key: self.json(name, "summary.json")[key] for key in ENDS} for name in (a, b)]
        assert ends[0] == ends[1] and self.samples(a) == self.samples(b)


def wait_until(what: Callable[[], object], seconds: float = 60.0) -> object:
    """Wait until what() is true; returns its value."""
    ends = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < ends, f"not true within {seconds} s"
        time.sleep(0.01)
    return result


def wait_for_step(run: Path, rank: int, step: int) -> int:
    """Wait until the run has completed this step. Returns the process of the rank on this machine, 0 if there is none.

    A loader worker has the same command, and its rank as the parent.
    """
    status = run / "status.json"
    wait_until(lambda: read_json(status).get("step", 0) >= step, 120)
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, environ = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            is_of_run = any(word.endswith(b"train.py") for word in words[:3]) and os.fsencode(run) in words
            name = "RANK" if any(variable.startswith(b"RANK=") for variable in environ) else "SLURM_PROCID"
            if is_of_run and f"{name}={rank}".encode() in environ:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return next((pid for pid, parent in parents.items() if parent not in parents), 0)


def assert_same_state(a: dict, b: dict) -> None:
    """Two checkpoints hold bitwise equal states."""
    assert {key: difference(a[key], b[key]) for key in STATE} == {key: [] for key in STATE}


def relative(got: dict, want: dict) -> float:
    """The largest relative distance of two state dicts' tensors."""
    pairs = [(got[name].double(), want[name].double()) for name in want if want[name].is_floating_point()]
    return max(((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)


def difference(a, b, path=""):
    """Where two nested structures of dicts, lists and tensors differ, compared bitwise."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = a.keys() | b.keys()
        return [entry for key in keys for entry in difference(a.get(key), b.get(key), f"{path}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [entry for k, (x, y) in enumerate(zip(a, b, strict=True)) for entry in difference(x, y, f"{path}/{k}")]
    is_same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
    return [] if is_same else [path]


def says(text: str, pattern: str) -> None:
    """The pattern is in the text."""
    assert re.search(pattern, text), f"{pattern!r} is not in\n{text}"


def attempts_in(folder: Path) -> list[AttemptTimes]:
    """The attempts of a run, from its files."""
    records = [record for *_, record in read_records(folder / "metrics.jsonl") if isinstance(record.get("step"), int)]
    status = read_json(folder / "status.json")
    return split_attempts(records, status.get("time"), status.get("step"))
