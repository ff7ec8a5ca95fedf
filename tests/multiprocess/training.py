"""Training in real ranks, and reading what a run left. What ranks need is imported once, by the server they are forked from."""

import json
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it, in seconds, with the first optimizer
import torch.utils.tensorboard

import train
import utils.saving
from config import TrainingConfig
from ranks import run_ranks
from utils import checkpoint

utils.saving.PATIENCE = 60.0  # each save that is due waits for the one before: which steps have a checkpoint does not depend on the clock
STATE = ("model", "ema", "optimizer", "scaler", "progress")  # of a checkpoint, what makes a run
TIMES = ("samples_per_s", "data_wait_s", "step_s", "peak_memory_bytes")  # of a record, what differs each time
TINY = ["--image_size", "8", "--batch_size", "4", "--log_interval", "5", "--save_every_minutes", "0", "--backend", "gloo"]


def train_flags(flags, dtype=torch.float32):
    torch.set_default_dtype(dtype)
    return train.train(TrainingConfig.from_args(flags))


class Runs:
    """Trains in a folder of the test's own, and reads what a run left there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str) -> Path:
        return self.root / name

    def train(self, world_size: int, name: str, *flags: str, dtype: torch.dtype = torch.float32, **options) -> list[dict]:
        words = [*TINY, "--run_dir", str(self.folder(name)), "--data_dir", str(self.root / "data"), *map(str, flags)]
        return run_ranks(world_size, train_flags, words, dtype, **options)

    def checkpoints(self, name: str) -> list[Path]:
        return checkpoint.step_checkpoints(self.folder(name) / "checkpoints")

    def last(self, name: str) -> dict:
        return checkpoint.read(self.checkpoints(name)[-1])[0]

    def json(self, name: str, file: str) -> dict:
        return json.loads((self.folder(name) / file).read_text())

    def records(self, name: str, kind: str) -> list[dict]:
        lines = (self.folder(name) / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def samples(self, name: str) -> dict[int, list[int]]:
        """The sample indices of each step, of all ranks together, sorted."""
        steps: dict[int, list[int]] = {}
        for file in sorted(self.folder(name).glob("samples/rank*.jsonl")):
            for line in file.read_text().splitlines():
                record = json.loads(line)
                steps.setdefault(record["step"], []).extend(record["indices"])
        return {step: sorted(indices) for step, indices in steps.items()}


def difference(a, b, path=""):
    """Where two nests of dicts, lists and tensors differ, to the bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = a.keys() | b.keys()
        return [found for key in keys for found in difference(a.get(key), b.get(key), f"{path}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [found for k, (x, y) in enumerate(zip(a, b, strict=True)) for found in difference(x, y, f"{path}/{k}")]
    is_same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
    return [] if is_same else [path]
