"""Ask lr_factor in a new process, with a clock that is ahead, another working directory, hash seed and random state.

Reads {"config": {...}, "steps": [...], "total": N, "warmup": N} and prints the factors as the last line.
"""

import datetime
import json
import os
import random
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])
ahead = 0.0


def shifted(plain):
    return lambda: plain() + ahead


class Later(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)


time.time, time.monotonic, time.perf_counter = map(shifted, (time.time, time.monotonic, time.perf_counter))
datetime.datetime = Later  # type: ignore[misc]  # as a test would patch it

import torch  # after the clocks, which the fork may import by name

import model
from config import TrainingConfig
from utils.training.schedule import Progress
from utils.training.seams import Seams

asked = json.load(sys.stdin)
os.chdir("/")
ahead = 1e7  # seconds since the import
random.seed(1)
torch.manual_seed(1)
config, ask = TrainingConfig(**asked["config"]), Seams.of(model).lr_factor
factors = [ask(config, step, asked["total"], asked["warmup"], Progress(step=step)) for step in asked["steps"]]
by_name = [factor if isinstance(factor, dict) else {"": factor} for factor in factors]  # as in schedule_check.py
print(f"\n{json.dumps([{name: float(each) for name, each in factor.items()} for factor in by_name])}")
