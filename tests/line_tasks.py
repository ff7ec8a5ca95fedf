"""A task of lines of unequal length, with a loss per predicted token."""

import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Lines(Dataset):
    """Lines of 2 to 9 tokens; a third of them is replaced at random, with each generator that a transform may use."""

    def __init__(self, size, split):
        generator = torch.Generator().manual_seed(size if split == "train" else 1000 + size)
        lengths = torch.randint(2, 10, (size,), generator=generator).tolist()
        self.lines = [torch.randint(16, (length,), generator=generator) for length in lengths]
        self.lengths = lengths

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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.first = nn.Linear(12, 20)
        self.second = nn.Linear(20, 12)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.second(self.dropout(torch.tanh(self.first(self.norm(x)))))


class BlockModel(nn.Module):
    """Four blocks, of which two share a weight; the head has the weight of the embedding; 13 does not divide evenly."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 12), nn.Sequential(*(Block() for _ in range(4)))
        self.middle, self.back = nn.Linear(12, 13), nn.Linear(13, 12)
        self.head = nn.Linear(12, 16)
        self.head.weight = self.embed.weight
        self.blocks[2].first.weight = self.blocks[1].first.weight
        self.register_buffer("scale", torch.full((12,), 0.5), persistent=False)

    def forward(self, ids):
        return self.head(self.back(torch.tanh(self.middle(self.blocks(self.embed(ids) * self.scale)))))


def token_loss(net, lines):
    logits = net(lines[:, :-1].clamp(min=0)).flatten(0, 1)
    targets = lines[:, 1:].flatten()
    right, count = ((logits.argmax(1) == targets) & (targets >= 0)).sum(), (targets >= 0).sum()
    loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    return {"loss": (loss, count), "accuracy": (right, count)}


def create_lines(config, split):
    sizes = {"train": config.dataset_size, "val": 7, "test": 0}
    return Lines(sizes[split], split) if sizes.get(split) else None
