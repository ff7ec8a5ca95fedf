"""Outputs of a batch in another order than its samples are found, and outputs that depend on the batch are none."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_sequence

from scripts.lib.row_order import check_row_order
from utils.settings.errors import UserError

SIZE = 40


class Net(nn.Module):
    """A bidirectional GRU, whose outputs depend on padding unless the batch is packed."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True, bidirectional=True), nn.Linear(16, 5)

    def forward(self, batch):
        return self.head(self.rnn(batch)[1].transpose(0, 1).flatten(1))


def by_length(samples):
    return sorted(samples, key=len, reverse=True)


def padded(samples):
    return pad_sequence(samples, batch_first=True)


def packed_as_given(samples):
    return pack_padded_sequence(padded(samples), [len(sample) for sample in samples], True, enforce_sorted=False)


def beside_others(net, batch):
    """An output that depends on the mean of its batch."""
    outputs = net(batch)
    return outputs + outputs.mean(0)


def noisy(net, batch):
    outputs = net(batch)
    return outputs + torch.randn(outputs.shape)


PLAIN = lambda net, batch: net(batch)  # noqa: E731
COLLATES = {  # (collate, predict, whether the order changes)
    "packed": (lambda samples: pack_sequence(by_length(samples)), PLAIN, True),
    "padded": (lambda samples: padded(by_length(samples)), PLAIN, True),
    "shortest first": (lambda samples: padded(by_length(samples)[::-1]), PLAIN, True),
    "by value": (lambda samples: padded(sorted(samples, key=lambda sample: sample.sum())), PLAIN, True),
    "reversed": (lambda samples: packed_as_given(samples[::-1]), PLAIN, True),
    "two exchanged": (lambda samples: packed_as_given([*samples[1::-1], *samples[2:]]), PLAIN, True),
    "shuffled": (lambda samples: padded([samples[k] for k in torch.randperm(len(samples))]), PLAIN, True),
    "by predict": (padded, lambda net, batch: net(batch).sort(0).values[:, :1], True),
    "by predict, a class": (packed_as_given, lambda net, batch: net(batch).argmax(1).flip(0), True),
    "per step": (lambda samples: padded(by_length(samples)), lambda net, batch: net.rnn(batch)[0], True),
    "kept, packed": (packed_as_given, PLAIN, False),
    "kept, padded": (padded, PLAIN, False),
    "kept, per step": (padded, lambda net, batch: net.rnn(batch)[0], False),
    "kept, in 16 bits": (packed_as_given, lambda net, batch: net(batch).bfloat16(), False),
    "kept, a class": (padded, lambda net, batch: net(batch).argmax(1), False),
    "all alike": (padded, lambda net, batch: 0 * net(batch) + 1, False),
    "beside others": (padded, beside_others, False),
    "at random": (padded, noisy, False),
    "no batch of one": (padded, lambda net, batch: net(batch).squeeze(0), False),
    "another kind": (padded, lambda net, batch: [1], False),
}


@pytest.mark.parametrize("name", COLLATES)
def test_outputs_in_another_order_are_found_and_nothing_else(name):
    collate, predict, is_moved = COLLATES[name]
    torch.manual_seed(0)
    samples, net = [torch.randn(int(length), 3) for length in torch.randint(2, 12, (SIZE,))], Net()
    with (
        pytest.raises(UserError, match="^The outputs of a batch are in another order .*. Keep")
        if is_moved
        else nullcontext()
    ):
        check_row_order(
            lambda batch: {"output": predict(net, batch)}, lambda rows: collate([samples[k] for k in rows]), SIZE
        )
