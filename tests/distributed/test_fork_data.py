"""Data sets of a fork, on real ranks: other labels in training, splits of other libraries, random splits."""

import os
import random
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

import train
from ranks import run_ranks
from tasks import Images, image_loss
from test_hooks import FLAGS, train_with


class Mixing(Images):
    """Gives shares of classes in training, and classes otherwise."""

    def device_transform(self, batch, seed, epoch, indices):
        images, labels = super().device_transform(batch, seed, epoch, indices)
        return images, F.one_hot(labels, 10).float() * 0.8 + 0.02 if self.split == "train" else labels


def mixed_loss(net, batch):
    assert batch[1].ndim == 1 + torch.is_grad_enabled()
    return image_loss(net, batch)


HELD_OUT = {"none": {}, "val": {"val": 9}, "both": {"val": 9, "test": 5}}


def train_mixed(flags, folder):
    states = []
    for name, held_out in HELD_OUT.items():
        sizes = {"train": 46, **held_out}
        created = lambda config, split, sizes=sizes: Mixing(sizes[split], split) if split in sizes else None  # noqa: E731
        flags = [*flags, "--run_dir", str(folder / name)]
        states.append(train_with(flags, create_dataset=created, compute_loss=mixed_loss))
    return states


def test_a_batch_is_evaluated_as_it_is_only_if_it_is_held_out(runs):
    assert run_ranks(2, train_mixed, runs.words("run", *FLAGS), runs.root) == [["completed"] * 3] * 2
    for name, held_out in HELD_OUT.items():
        assert {record["split"] for record in runs.records(name, "eval")} == {*held_out}


class Foreign(Images):
    """Like a datasets.Dataset, whose split is None or an object of its own, without a setter."""

    split = property(lambda self: None, lambda self, value: None)

    def __init__(self, size, split):
        super().__init__(size, split, augment="none")


def create_foreign(config, split):
    return None if split == "test" else Foreign(9, split)


def train_foreign(flags):
    return train_with(flags, create_dataset=create_foreign)


def test_the_split_of_a_data_set_of_another_library_is_that_it_was_created_for(runs):
    assert run_ranks(2, train_foreign, runs.words("run", "--num_workers", 1, "--epochs", 1)) == ["completed"] * 2
    assert {record["split"] for record in runs.records("run", "eval")} == {"val"}


def train_split(flags, by_split):
    """A random split without a generator, as in a LightningDataModule; this rank's generators have another state."""
    torch.manual_seed(int(os.environ["RANK"])), random.seed(torch.initial_seed()), numpy.random.seed(1)

    def create(config, split):
        order = random.sample(range(46), 46), torch.randperm(46).tolist(), numpy.random.permutation(46).tolist()
        by_split.setdefault(split, order)
        parts = dict(
            zip(
                ("train", "val"),
                random_split(TensorDataset(torch.rand(46, 3, 8, 8), torch.arange(46) % 10), [36, 10]),
                strict=True,
            )
        )
        by_split[f"{split} rows"] = sorted(parts[split].indices) if split in parts else []
        return parts.get(split)

    return train_with(flags, create_dataset=create), by_split


def test_a_random_split_is_the_same_for_each_split_and_on_each_rank(runs):
    (state, first), (_, second) = run_ranks(2, train_split, runs.words("run", "--epochs", 1), {})
    assert state == "completed" and first == second and first["train"] == first["val"] == first["test"]
    assert sorted(first["train rows"] + first["val rows"]) == list(range(46))


class Opaque(Images):
    """The batches of one split are objects in which no tensor is found."""

    opaque_split = ""

    def device_transform(self, batch, seed, epoch, indices):
        batch = super().device_transform(batch, seed, epoch, indices)
        return SimpleNamespace(batch=batch) if self.split == self.opaque_split else batch


def train_opaque(flags, opaque_split):
    kind = type(opaque_split.title(), (Opaque,), {"opaque_split": opaque_split})
    return train_with(flags, create_dataset=lambda config, split: None if split == "test" else kind(46, split))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_batch_in_which_no_tensor_is_found_ends_the_run_before_the_first_step(runs, split):
    text = (
        f"No tensor is found in a batch of {split.title()}, which is a SimpleNamespace. Return tensors in tuples,"
        " lists, dicts or dataclasses, or give the class of the batch a method to(device)."
    )
    with mock.patch.object(train, "train_one_epoch", side_effect=AssertionError):
        assert run_ranks(2, train_opaque, runs.words("run", *FLAGS), split) == [text] * 2
