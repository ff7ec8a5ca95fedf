# extra: template
"""Activation checkpointing: a bitwise equal run that keeps fewer activations."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from ranks import run_ranks
from tasks import TASKS, train_task
from training import assert_same_state
from utils.extras.compile.activation_checkpointing import checkpoint_activations
from utils.settings.errors import UserError
from utils.training.blocks import find_blocks

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.norm(self.conv(x)).relu())


class BlockNet(nn.Module):
    """float [B, 3, 8, 8] -> logits [B, 10]; three blocks with BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 3, 2, 1), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def train_blocks(flags):
    """Train, and return how often a block was computed in the backward pass."""
    recomputed, plain = [0], Block.forward

    def forward(self, x):
        recomputed[0] += torch._C._current_graph_task_id() != -1
        return plain(self, x)

    net = {"create_model": lambda config, device: BlockNet().to(device)}
    with mock.patch.object(Block, "forward", forward), mock.patch.dict(TASKS["images"], net):
        train_task("images", flags)
    return recomputed[0]


@pytest.mark.guarantee("activation")
@pytest.mark.parametrize("precision", [pytest.param("--no-use_amp", marks=pytest.mark.slow), "--amp_dtype bf16"])
def test_losses_weights_and_statistics_are_bitwise_equal(runs, precision):
    """Two ranks, accumulation, dropout, averaged weights, a short last global batch with an idle rank."""
    flags = "--dataset_size 34 --epochs 2 --grad_accum_steps 2 --lr 0.02 --log_interval 1".split()
    flags += ["--ema_decay", "0.9"]
    flags += precision.split()
    assert run_ranks(2, train_blocks, runs.words("kept", *flags)) == [0, 0]
    again = run_ranks(2, train_blocks, runs.words("again", *flags, "--activation_checkpointing"))
    assert again == [3 * (4 + 10)] * 2  # 3 blocks, in 4 first passes and 2 * (2 * 2 + 1) micro-batches
    kept, again = runs.last("kept"), runs.last("again")
    assert_same_state(kept, again)
    counts = [value for name, value in kept["model"].items() if name.endswith("num_batches_tracked")]
    assert counts and all(count == 6 for count in counts)
    losses = [[record["loss"] for record in runs.records(name, "train")] for name in ("kept", "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def bytes_kept(model, images):
    """The bytes that autograd saves for the backward pass, without the weights; each storage counts once."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # a reference, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(images).sum()
    return sum(size for size, _ in kept.values()), loss


@pytest.mark.guarantee("activation")
def test_only_the_input_of_a_block_is_kept():
    model, images = BlockNet(), torch.randn(4, 3, 8, 8)
    all_kept, _ = bytes_kept(model, images)
    checkpoint_activations(model, find_blocks(model))
    inputs_kept, _ = bytes_kept(model, images)
    # inputs of stem, three blocks and head, for 4 images in float32
    assert inputs_kept == 4 * 4 * (3 * 8 * 8 + 3 * WIDTH * 4 * 4 + WIDTH)
    assert all_kept > 2 * inputs_kept


def test_the_model_keeps_its_names_and_a_copy_computes_with_its_own_weights():
    model, images = BlockNet().eval(), torch.randn(2, 3, 8, 8)
    names, kinds = list(model.state_dict()), [type(module).__name__ for module in model.modules()]
    plain = copy.deepcopy(model)
    checkpoint_activations(model, find_blocks(model))
    assert len(find_blocks(model)) == 3 and list(model.state_dict()) == names
    assert [type(module).__name__ for module in model.modules()] == kinds
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(other(images), plain(images)) and not torch.equal(model(images), plain(images))


@pytest.mark.parametrize("wrong", ["layer1", nn.ModuleList([nn.Linear(2, 2)])])
def test_blocks_that_cannot_be_called_are_rejected(wrong):
    with pytest.raises(UserError, match=f"returned {type(wrong).__name__} .*. Return modules with a forward"):
        checkpoint_activations(nn.Linear(2, 2), [wrong])


def test_a_model_without_blocks_is_rejected():
    with pytest.raises(
        UserError, match=r"--activation_checkpointing needs blocks, but Linear has none .*\. Leave out --act"
    ):
        checkpoint_activations(nn.Linear(2, 2), [])
