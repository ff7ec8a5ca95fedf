# extra: verify
"""Load the data and ask lr_factor in a new process, which new_process.py starts.

In this process the clock is ahead, the host has another name, and folders list their files backwards.

It reads {"given": {...}, "config": {...}, "imports": [...]}. These are the config as given, the config as resolved by
the data, and packages to import first. It prints [name, [value, problem]] in a line for each answer.
"""

import contextlib
import datetime
import functools
import importlib
import json
import os
import platform
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:1] = [str(ROOT), str(ROOT / "scripts")]
ahead, real_datetime = 5e7, datetime.datetime  # 19 months change the year, month, day of the week and hour
listdir, scandir = os.listdir, os.scandir
answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr


def shift_clock(read, scale=1):
    return lambda: read() + type(read())(ahead * scale)


def default_to_shifted_time(convert):
    return lambda seconds=None: convert(time.time() if seconds is None else seconds)


def format_shifted_time(strftime, form, when=None):
    return strftime(form, when or time.localtime())


class DatetimeMeta(type):
    """Makes times that other code creates instances of the replacement, too."""

    def __instancecheck__(cls, value):
        return isinstance(value, real_datetime)


class ShiftedDatetime(datetime.datetime, metaclass=DatetimeMeta):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.UTC).replace(tzinfo=None)


class ReversedScandir(AbstractContextManager, Iterator):
    """Lists a folder backwards, in place of what os.scandir returns."""

    def __init__(self, *path):
        with scandir(*path) as entries:
            self.entries = reversed([*entries])

    def __next__(self):
        return next(self.entries)

    def __exit__(self, *_):
        pass

    close = __exit__


question = json.load(sys.stdin)
for name in question["imports"]:  # these imports come before datetime is replaced
    with contextlib.suppress(Exception):
        importlib.import_module(name)
for name in ("time", "monotonic", "perf_counter"):
    setattr(time, f"{name}_ns", shift_clock(getattr(time, f"{name}_ns"), 10**9))
    setattr(time, name, shift_clock(getattr(time, name)))
time.localtime, time.gmtime, time.ctime = map(default_to_shifted_time, (time.localtime, time.gmtime, time.ctime))
time.strftime = functools.partial(format_shifted_time, time.strftime)
datetime.datetime = ShiftedDatetime  # type: ignore[misc]  # date.today() needs no patch, since it asks time.time()
machine = os.uname_result(["elsewhere" if k == 1 else field for k, field in enumerate(os.uname())])
os.uname, socket.gethostname, platform.node = lambda: machine, lambda: "elsewhere", lambda: "elsewhere"


def factors(request):
    import model
    from lib.verify.schedule_check import sample_factors
    from utils.training.hooks import ModelHooks

    global ahead
    ahead += 1e7  # as if time had passed since the import
    random.seed(1)
    torch.manual_seed(1)
    return sample_factors(ModelHooks.from_module(model), TrainingConfig(**request["config"]))


@functools.cache
def load():
    import dataset
    from utils.data.sets import load_data
    from utils.distributed.context import DistributedContext

    os.chdir(folder)
    return load_data(dataset, TrainingConfig(**question["given"]), DistributedContext(0, 0, 1, torch.device("cpu")))


def order(request):
    from lib.verify.new_process import hash_order

    return hash_order(load().train, request["given"]["seed"])


def samples(request):
    from lib.verify.new_process import summarize_dataset

    sets = load()
    return [
        summarize_dataset(dataset, request["given"]["seed"])
        for dataset in (sets.train, next(iter(sets.held_out.values()), None))
    ]


folder = os.getcwd()
os.chdir("/")
import torch  # comes after the clocks are replaced, because the fork may import them by name

from config import TrainingConfig
from lib.verify.new_process import NO_ANSWER

torch.set_num_threads(1)
vars(os).update(listdir=lambda *path: listdir(*path)[::-1], scandir=ReversedScandir)
problem = ""
try:
    import train  # noqa: F401  # this imports the modules of the fork
except Exception as error:
    problem = f"{NO_ANSWER}: {type(error).__name__}: {error}"
for answer in (factors, order, samples):
    value, failed = None, problem
    try:
        value = None if problem else answer(question)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    print(json.dumps([answer.__name__, [value, failed]]), file=answers, flush=True)
