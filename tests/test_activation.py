"""Activation checkpointing: the same run to the bit, with less kept for the backward pass."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torchvision import models

import train
from config import Refused, TrainingConfig
from model import MiniResNet
from ranks import run_ranks
from training import STATE, TINY, difference
from utils.activation import checkpoint_blocks, find_blocks
from utils.running_stats import RunningStats


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.norm(self.conv(x)).relu())


class BlockNet(nn.Module):
    """float [B, 3, 8, 8] -> logits [B, 10], by three blocks with BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.ModuleList(Block(8) for _ in range(3)), nn.Linear(8, 10)
        self.label_smoothing = 0.0

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def train_blocks(flags):
    """Train; how often a block was computed in the backward pass."""
    again, plain = [0], Block.forward

    def forward(self, x):
        again[0] += torch._C._current_graph_task_id() != -1
        return plain(self, x)

    with (
        mock.patch.object(Block, "forward", forward),
        mock.patch.object(train, "create_model", lambda config, device: BlockNet().to(device)),
    ):
        train.train(TrainingConfig.from_args(flags))
    return again[0]


@pytest.mark.parametrize("precision", [["--no-use_amp"], ["--amp_dtype", "bf16"]], ids=["fp32", "bf16"])
def test_losses_weights_and_statistics_are_the_same_to_the_bit(runs, precision):
    """Two ranks, accumulation, dropout, averaged weights, a short last window in which a rank is idle."""
    flags = [*TINY, "--dataset_size", "34", "--epochs", "2", "--grad_accum_steps", "2", "--ema_decay", "0.9", "--lr", "0.02", *precision]
    flags += ["--log_interval", "1", "--data_dir", str(runs.root / "data"), "--bucket_cap_mb", "0.002"]
    assert run_ranks(2, train_blocks, [*flags, "--run_dir", str(runs.folder("kept"))]) == [0, 0]
    again = run_ranks(2, train_blocks, [*flags, "--activation_checkpointing", "--run_dir", str(runs.folder("again"))])
    assert again == [3 * (2 + 10)] * 2  # 3 blocks, in 2 passes of the warm-up and 2 * (2 * 2 + 1) micro-batches
    kept, again = runs.last("kept"), runs.last("again")
    assert {key: difference(kept[key], again[key]) for key in STATE} == {key: [] for key in STATE}
    counts = [value for name, value in kept["model"].items() if name.endswith("num_batches_tracked")]
    assert counts and all(count == 6 for count in counts)
    losses = [[record["loss"] for record in runs.records(name, "train")] for name in ("kept", "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def bytes_kept(model, images):
    """What autograd saves for the backward pass, weights aside; each storage once."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(images).sum()
    return sum(size for size, _ in kept.values()), loss


def test_of_a_block_only_its_input_is_kept():
    """MiniResNet at 32 x 3 x 32 x 32, in float32."""
    images = torch.randn(32, 3, 32, 32)
    torch.manual_seed(0)
    model = MiniResNet()
    RunningStats(model)
    all_kept, loss = bytes_kept(model, images)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint_blocks(model)
    inputs_kept, loss = bytes_kept(model, images)
    loss.backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))
    wide = 32 * 64 * 32 * 32 * 4  # bytes of an activation of the first stage
    block_inputs = wide + wide + wide + wide // 2 + wide // 2 + wide // 4
    stem = images.nbytes + wide + 2 * 64 * 4  # its own input; BatchNorm's, with mean and deviation; its output is the first block's input
    head = 32 * 256 * 4
    assert inputs_kept == block_inputs + stem + head
    assert all_kept > 3 * inputs_kept


@pytest.mark.parametrize(
    ("name", "blocks", "kind"),
    [
        ("resnet50", 16, "Bottleneck"),
        ("vit_b_16", 12, "EncoderBlock"),
        ("convnext_tiny", 18, "CNBlock"),
        ("swin_t", 12, "SwinTransformerBlock"),
    ],
)
def test_the_blocks_of_known_models_are_found(name, blocks, kind):
    with torch.device("meta"):
        found = find_blocks(models.get_model(name, weights=None))
    assert sum(type(block).__name__ == kind for block in found) == blocks


def test_the_model_keeps_its_names_and_a_copy_computes_with_its_own_weights():
    model = MiniResNet()
    names, kinds = list(model.state_dict()), [type(module).__name__ for module in model.modules()]
    plain = copy.deepcopy(model)
    checkpoint_blocks(model)
    assert len(find_blocks(model)) == 6
    assert list(model.state_dict()) == names and {*dict(model.named_parameters()), *dict(model.named_buffers())} == {*names}
    assert [type(module).__name__ for module in model.modules()] == kinds
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    images = torch.randn(2, 3, 8, 8)
    logits = plain(images)
    assert torch.equal(other(images), logits) and not torch.equal(model(images), logits)
    assert torch.equal(other.eval()(images), plain.eval()(images))


def test_a_model_without_blocks_is_refused():
    with pytest.raises(Refused, match=r"activation_checkpointing=True: Linear has no blocks .*; leave it out, or build"):
        checkpoint_blocks(nn.Linear(2, 2))
