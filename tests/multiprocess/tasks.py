"""Small tasks of a forker's own in the place of model.py and dataset.py, quick enough for many steps in float64; and eyes on the loop.

images  the built-in images, a small network with BatchNorm and dropout
plain   the same images, GroupNorm, no dropout: nothing in it depends on the micro-batch
lines   lines of unequal length that weigh as many tokens as they predict, with random transforms of their own on the CPU, dropout
"""

import contextlib
import hashlib
import os
import random
import signal
from unittest import mock

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import dataset
import model
import plain_loop
import train
import utils.agreement
from config import TrainingConfig
from utils.loading import Window
from utils.report import Reporter


class SmallNet(nn.Module):
    """float [B, 3, 8, 8] -> logits [B, classes]; 2,090 parameters with 10 classes, in several buckets of 2 kB."""

    def __init__(self, has_batch_norm, classes):
        super().__init__()
        norms = (nn.BatchNorm2d, nn.BatchNorm2d) if has_batch_norm else (lambda n: nn.GroupNorm(2, n),) * 2
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), norms[0](8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), norms[1](16), nn.ReLU())
        self.dropout = nn.Dropout(0.2 if has_batch_norm else 0.0)
        self.head = nn.Linear(64, classes)
        self.label_smoothing = 0.0

    def forward(self, x):
        return self.head(self.dropout(self.features(x).flatten(1)))


class Lines(Dataset):
    """Lines of 2 to 9 tokens; a third of the tokens is replaced at random, by each of the generators a transform may use."""

    def __init__(self, size, split):
        generator = torch.Generator().manual_seed(size if split == "train" else 1000 + size)
        lengths = torch.randint(2, 10, (size,), generator=generator).tolist()
        self.lines = [torch.randint(16, (length,), generator=generator) for length in lengths]
        self.weights = [length - 1 for length in lengths]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        line = self.lines[index].clone()
        for place in range(len(line)):
            if random.random() < 0.33:
                line[place] = (int(torch.randint(16, ())) + int(numpy.random.randint(16))) % 16
        return line

    def collate(self, lines):
        return pad_sequence(lines, batch_first=True, padding_value=-1)


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.dropout = nn.Embedding(16, 12), nn.GRU(12, 16, batch_first=True), nn.Dropout(0.2)
        self.head = nn.Linear(16, 16)

    def forward(self, ids):
        return self.head(self.dropout(self.rnn(self.embed(ids))[0]))


def token_loss(net, lines):
    logits = net(lines[:, :-1].clamp(min=0)).flatten(0, 1)
    targets = lines[:, 1:].flatten()
    right = ((logits.argmax(1) == targets) & (targets >= 0)).sum()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum"), {"accuracy": (right, (targets >= 0).sum())}


TASKS = {
    "images": {"create_model": lambda config, device: SmallNet(True, 10).to(device)},
    "plain": {"create_model": lambda config, device: SmallNet(False, 10).to(device)},
    "lines": {
        "create_model": lambda config, device: TokenModel().to(device),
        "compute_loss": token_loss,
        "create_dataset": lambda config, split: Lines(config.dataset_size if split == "train" else 7, split) if split != "test" else None,
    },
}
BUCKETS = ["--bucket_cap_mb", "0.002"]  # several buckets for these small models


@contextlib.contextmanager
def using(task):
    """The task's functions in place of those of model.py and dataset.py, for the loop and for the oracle."""
    with contextlib.ExitStack() as stack:
        for name, function in TASKS[task].items():
            for module in (train, plain_loop, dataset if name == "create_dataset" else model):
                stack.enter_context(mock.patch.object(module, name, function))
        yield


def config_of(flags, dtype=torch.float32):
    torch.set_default_dtype(dtype)
    return TrainingConfig.from_args([*BUCKETS, *flags])


def train_task(task, flags, dtype=torch.float32, stops=(), is_watched=False, goes_on=True):
    """Train in a rank. After each step in `stops` a signal reaches one rank, all stop and, where it `goes_on`, start again.

    Returns the state that the last attempt ended in, and the micro-batches as `watching` saw them.
    """
    found, stops = [], list(stops)
    with using(task), watching(found if is_watched else None), signals_after(stops):
        flags = [*map(str, flags)]
        outcome = train.train(config_of(flags, dtype))
        while outcome["state"] == "preempted" and goes_on:
            stops.pop(0)
            outcome = train.train(config_of([*flags, "--resume_from", "auto"], dtype))
    return outcome["state"], found


@contextlib.contextmanager
def signals_after(stops):
    """SIGUSR1 to the last rank at the end of the step that stops[0] names; the ranks hear of it at once and stop one step later."""
    plain_done = Reporter.step_done

    def done(self, samples, step):
        plain_done(self, samples, step)
        if stops and step == stops[0] and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with mock.patch.object(Reporter, "step_done", done), mock.patch.object(utils.agreement, "MOST_STEPS_BETWEEN_WORDS", 1):
        yield


@contextlib.contextmanager
def watching(found):
    """Of each micro-batch that the loop computes: (epoch, step, number, indices, digest of the batch, seed of the device's stream)."""
    if found is None:
        yield
        return
    plain_iter, plain_loss, plain_state = Window.__iter__, train.compute_loss, train.create_state
    here = {}

    def iterate(self):
        for micro_batch in plain_iter(self):
            here["micro_batch"] = micro_batch
            yield micro_batch

    def loss(net, batch):
        micro_batch = here.get("micro_batch")
        if micro_batch and net.training and micro_batch.batch is batch and micro_batch.is_counted:
            progress, seed = here["state"].progress, torch.default_generator.initial_seed()
            found.append((progress.epoch, progress.step, micro_batch.number, tuple(micro_batch.indices), digest(batch), seed))
        return plain_loss(net, batch)

    def state(*args):
        here["state"] = plain_state(*args)
        return here["state"]

    with (
        mock.patch.object(Window, "__iter__", iterate),
        mock.patch.object(train, "compute_loss", loss),
        mock.patch.object(train, "create_state", state),
    ):
        yield


def digest(batch):
    tensors = batch if isinstance(batch, tuple | list) else [batch]
    return hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in tensors)).hexdigest()
