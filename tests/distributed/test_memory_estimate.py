# extra: benchmark and sharding
"""benchmark.py --sharding-memory: what one process finds for each strategy beside the bytes counted in real ranks."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import train
import utils.report.reporter
from config import TrainingConfig
from ddp_utils import setup_distributed
from lib.benchmark import memory
from ranks import run_ranks
from tasks import DEFAULTS, TASKS, using
from training import train_flags
from utils.data.sets import load_data

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


TASK = DEFAULTS | {
    "create_model": lambda config, device: Layers().to(device),
    "compute_loss": loss,
    "create_dataset": lambda config, split: Lines() if split == "train" else None,
}


def estimated(words, cases):
    """For each (ranks, sharding): bytes of parameters, of optimizer state with average, and of all tensors."""
    with mock.patch.dict(TASKS, {"layers": TASK}), using("layers"):
        config = TrainingConfig.from_args(words)
        ctx = setup_distributed(config)
        data = load_data(train.your_data, config, ctx).train
        dist.destroy_process_group()
        return [
            [*memory.measure_sharding(config, ctx, data, sharding, ranks, ranks).values()] for ranks, sharding in cases
        ]


def counted(words):
    counts, plain = [], train.train_one_epoch

    def epoch(training):
        counts.append([*memory.count_bytes(training.state, lambda: plain(training)).values()])
        return training.consensus.vote_and_wait()

    # 20 MB at a log point, of any model; the peak of this one is less than that
    no_fingerprint = mock.patch.object(utils.report.reporter, "fingerprint_state", lambda state: torch.tensor(0))
    with mock.patch.object(train, "train_one_epoch", epoch), mock.patch.dict(TASKS, {"layers": TASK}), no_fingerprint:
        train_flags(words, task="layers")
    return counts[0]


SHARDED = [(2, "zero2"), (4, "zero2"), (4, "zero3")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "cases"),
    [
        (
            "--ema_decay 0.9 --grad_accum_steps 2 --no_use_amp",
            [(1, "none"), (2, "none"), (2, "zero3"), *SHARDED],
        ),
        ("", [(1, "none"), (2, "none"), (2, "zero3"), *SHARDED]),
        ("--amp_dtype bf16", [(2, "none"), (2, "zero3")]),
        ("--reduction exact --grad_accum_steps 2", [(2, "none")]),
        (
            "--activation_checkpointing --optimizer sgd",
            [(1, "none"), (2, "none"), (2, "zero3"), *SHARDED],
        ),  # extra: compile
    ],
)
def test_one_process_finds_the_bytes_of_real_ranks(runs, flags, cases):
    words = ["--epochs", "1", "--max_steps", "2", "--optimizer", "adamw", "--num_workers", "0", *flags.split()]
    estimates = run_ranks(1, estimated, runs.words("estimate", *words), cases)[0]
    for (ranks, sharding), estimate in zip(cases, estimates, strict=True):
        measured = run_ranks(ranks, counted, runs.words(f"{sharding}-{ranks}", *words, "--sharding", sharding))
        most = [max(column) for column in zip(*measured, strict=True)]
        print(flags, ranks, sharding, estimate, most)
        assert estimate == pytest.approx(most, abs=400), (ranks, sharding)


def shown(words):
    """What --sharding-memory prints: with enough memory, with little, and if nothing can be allocated."""
    texts, counts, plain = [], [], memory.count_bytes

    def measure(*args):
        counts.append(plain(*args))
        return counts[-1]

    with mock.patch.dict(TASKS, {"layers": TASK}), using("layers"):
        config = TrainingConfig.from_args(words)
        full = mock.Mock(side_effect=torch.OutOfMemoryError)
        for room, count in ((10**12, measure), (10**6, lambda *_: counts.pop(0)), (10**12, full)):
            facts, lines = {"memory": room, "used": 0}, []
            with mock.patch.multiple(memory, count_bytes=count, read_device_memory=lambda device, facts=facts: facts):
                memory.print_sharding_memory(config, setup_distributed(config), [1, 2], lines.append)
            texts.append("\n".join(lines))
    return texts


@pytest.mark.slow
def test_the_table_has_a_row_for_each_strategy_and_the_first_flag_that_fits(runs):
    ((table, little, full),) = run_ranks(1, shown, runs.words("table", "--optimizer", "adamw"))
    rows = [line.split() for line in table.splitlines()[2:-1]]
    assert [row[1:3] for row in rows] == [["none", "1"], ["none", "2"], ["zero2", "2"], ["zero3", "2"]]
    sizes = [[float(cell) for cell in row[3:]] for row in rows]
    assert sizes[0][1] == pytest.approx(2 * sizes[0][0], abs=0.2)  # AdamW
    assert [row[0] for row in sizes] == pytest.approx([sizes[0][0]] * 2 + [sizes[0][0] / 2] * 2, abs=0.2)
    assert sizes[3][2] < sizes[2][2] < sizes[1][2]
    assert table.splitlines()[-1].startswith("Flags: --sharding none   (the first whose peak fits into 90% of ")
    assert "The model does not fit into 90% of 0.0 GB per rank, on 2 ranks. Use more ranks, a smaller" in little
    assert full.count("does not fit into the memory of this process") == 4


@pytest.mark.slow
def test_a_strategy_that_cannot_be_used_has_its_reason_in_the_table(runs):
    ((table, *_),) = run_ranks(1, shown, runs.words("exact", "--reduction", "exact"))
    assert table.count("reduction=exact: does not work with sharding=zero") == 2
