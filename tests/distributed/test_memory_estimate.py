"""scaling.py --memory: the estimate of each strategy beside the bytes that are counted in a run."""

import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

import train
from config import TrainingConfig
from ddp_utils import setup_distributed
from lib.scaling import memory
from ranks import run_ranks
from tasks import SEAMS, TASKS, using
from training import train_flags
from utils.distributed.dtensor import local

WIDTH, DEPTH, WORDS, LENGTH = 128, 6, 64, 32


class Lines(torch.utils.data.Dataset):
    in_memory = True

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Layers(nn.Module):
    """A transformer of 1.2 million parameters, with tied weights."""

    def __init__(self):
        super().__init__()
        layer = functools.partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(*(layer() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def loss(net, ids):
    return {"loss": (F.cross_entropy(net(ids).flatten(0, 1), ids.flatten(), reduction="sum"), ids.numel())}


TASK = SEAMS | {
    "create_model": lambda config, device: Layers().to(device),
    "compute_loss": loss,
    "create_dataset": lambda config, split: Lines() if split == "train" else None,
}


class Tracker(MemTracker):
    """Counts all tensors, and none by module: those hooks allow one pass only."""

    def _ignore(self, *_):
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _ignore


def estimated(words):
    with mock.patch.dict(TASKS, {"layers": TASK}), using("layers"):
        config = TrainingConfig.from_args(words)
        return memory.measure(config, setup_distributed(config))


def counted(words):
    """Bytes of parameters, of optimizer state with average, and of all tensors at the peak of an epoch."""
    found, plain = [], train.train_one_epoch

    def epoch(training):
        tracker, state = Tracker(), training.state
        copies = state.average._copies.values() if state.average else ()
        tracker.track_external(state.model, state.optimizer, *copies)
        for parameter in state.model.parameters():  # DDP's buckets are counted when they are used
            parameter.grad = None
        with tracker:
            stopped = plain(training)
        states = [
            v for state in state.optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim
        ]
        parameters = [local(p.detach()) for p in state.model.parameters()]
        sizes = [sum(t.nbytes for t in tensors) for tensors in (parameters, [*states, *copies])]
        found.append([*sizes, tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]])
        return stopped

    with mock.patch.object(train, "train_one_epoch", epoch), mock.patch.dict(TASKS, {"layers": TASK}):
        train_flags(words, task="layers")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["", "--ema_decay 0.9 --grad_accum_steps 2 --no_use_amp", "--activation_checkpointing --optimizer sgd"]
)
def test_the_estimate_is_within_a_tenth_of_the_counted_bytes(runs, flags):
    words = ["--epochs", "1", "--max_steps", "2", "--optimizer", "adamw", "--num_workers", "0", *flags.split()]
    found = run_ranks(1, estimated, runs.words("estimate", *words))[0]
    for ranks, sharding in [(1, "none"), (2, "none"), (2, "zero2"), (2, "zero3"), (4, "zero2"), (4, "zero3")]:
        name = f"{sharding}-{ranks}"
        here = run_ranks(ranks, counted, runs.words(name, *words, "--sharding", sharding))
        each = memory.estimate(found, sharding, ranks, ranks, "accum" in flags)
        expected = [each.parameters, each.optimizer, each.peak]
        most = [max(column) for column in zip(*here, strict=True)]
        print(flags, name, expected, most, [round(a / b, 3) for a, b in zip(expected, most, strict=True)])
        assert expected == pytest.approx(most, rel=0.1), name


def test_the_table_has_a_row_for_each_strategy_and_the_first_flag_that_fits():
    part = memory.Part([nn.Parameter(torch.zeros(1000, 1000))], kept=10**6, backward=2 * 10**6)
    found = memory.Measured([part] * 4, memory.Part([]), states=2.0, has_average=False, buffers=0)
    table = functools.partial(memory.text, TrainingConfig.from_args([]), found, "cpu", [1, 2, 8], 4)
    lines = table(10**12).splitlines()
    assert [line.split()[1:3] for line in lines[2:-1]] == [
        ["none", "1"],
        *([sharding, str(ranks)] for ranks in (2, 8) for sharding in ("none", "zero2", "hybrid", "zero3")),
    ]
    assert [line.split()[3:6] for line in lines[2:-1] if line.split()[2] == "8"] == [
        ["16.0", "16.0", "32.0"],
        ["2.0", "2.0", "4.0"],
        ["4.0", "4.0", "8.0"],
        ["2.0", "2.0", "4.0"],
    ]
    assert (
        lines[-1] == "flags: --sharding none   (the first whose peak fits into 90% of 1,000.0 GB per rank, on 8 ranks)"
    )
    assert "flags: --sharding zero3 " in table(34 * 10**6) and "does not fit into 90% of" in table(10**6)
