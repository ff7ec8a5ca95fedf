"""A process that kills one rank of a run: it knows their pids, a seeded clock, and the phase in which the victim says it is."""

import contextlib
import json
import mmap
import os
import random
import signal
import struct
import time
from pathlib import Path
from unittest import mock

import ddp_utils
import train
from tasks import config_of, using
from utils.loading import Window
from utils.saving import Saver
from utils.train_state import TrainState

PHASES = ("start", "data", "forward", "backward", "update", "save", "evaluation")
FORM = struct.Struct("=qqq")  # pid, phase, steps taken in this attempt


class Place:
    """Where a rank is, in a file that both sides map: what the rank wrote last is still there after it was killed."""

    def __init__(self, folder, rank):
        path = Path(folder, f"phase{rank}")
        if not path.exists() or path.stat().st_size != FORM.size:
            path.write_bytes(FORM.pack(0, 0, 0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), FORM.size)

    def read(self):
        return FORM.unpack(self._map[:])

    def write(self, **changes):
        names = ("pid", "phase", "steps")
        self._map[:] = FORM.pack(*(dict(zip(names, self.read(), strict=True)) | changes).values())


@contextlib.contextmanager
def saying_where(place):
    """The loop says where it is. Fetching data is what happens between two micro-batches."""
    plain_iter, plain_loss, plain_update = Window.__iter__, train.compute_loss, TrainState.update_if_finite
    plain_save, plain_evaluate, phase = Saver.save, train.evaluate, {name: number for number, name in enumerate(PHASES)}
    is_evaluating = []

    def enter(name):
        place.write(phase=phase["evaluation" if is_evaluating else name])
        time.sleep(0.002)  # so that no phase of this small model passes unseen

    def iterate(self):
        micro_batches = plain_iter(self)
        enter("data")
        for micro_batch in micro_batches:
            enter("forward")
            yield micro_batch
            enter("data")

    def loss(net, batch):
        found = plain_loss(net, batch)
        enter("backward")
        return found

    def update(self, window):
        enter("update")
        plain_update(self, window)
        place.write(steps=place.read()[2] + 1)

    def save(*args, **options):
        enter("save")
        try:
            return plain_save(*args, **options)
        finally:
            enter("data")

    def evaluate(*args):
        is_evaluating.append(True)
        enter("evaluation")
        try:
            return plain_evaluate(*args)
        finally:
            is_evaluating.pop()
            enter("data")

    with (
        mock.patch.object(Window, "__iter__", iterate),
        mock.patch.object(train, "compute_loss", loss),
        mock.patch.object(TrainState, "update_if_finite", update),
        mock.patch.object(Saver, "save", save),
        mock.patch.object(train, "evaluate", evaluate),
        mock.patch.object(ddp_utils, "MOST_STRIKES", 10**6),  # kills may well hit the same step three times in a row
    ):
        yield


def train_and_say_where(folder, task, flags, dtype):
    place = Place(folder, int(os.environ["RANK"]))
    place.write(pid=os.getpid(), phase=0, steps=0)
    with using(task), saying_where(place):
        return train.train(config_of([*map(str, flags)], dtype))["state"]


def kill_one(folder, ranks, seed, target, report):
    """Wait until all ranks train, a seeded while more, and for the victim to come into the phase; kill it; report where it was."""
    clock, ends = random.Random(seed), time.monotonic() + 60
    places = [Place(folder, rank) for rank in range(ranks)]
    while not all(place.read()[2] > 0 for place in places) and time.monotonic() < ends:
        time.sleep(0.002)
    time.sleep(clock.uniform(0.0, 0.15))
    victim = 0 if target == "save" else clock.randrange(ranks)  # in a save rank 0 writes
    while places[victim].read()[1] != PHASES.index(target) and time.monotonic() < ends:
        time.sleep(0.0002)
    time.sleep(clock.uniform(0.0, 0.01 if target in ("save", "evaluation") else 0.003))
    if pid := places[victim].read()[0]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.01)
    Path(report).write_text(json.dumps({"victim": victim, "phase": PHASES[places[victim].read()[1]], "steps": places[victim].read()[2]}))
