"""The model, yours to change. The training loop uses three functions; docs/reference.md lists those you may add.

create_model(config, device)            the network
param_groups(model, config)             which parameters are trained, with which weight decay and learning rate
compute_loss(model, batch, config)      the loss and metrics, as sums over a micro-batch and their counts
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from config import TrainingConfig, unless_auto
from ddp_utils import wrap_ddp
from utils.checkpoint.format import load_weights
from utils.checkpoint.remote import local_checkpoint
from utils.example.choices import PUBLISHED_WEIGHTS, check_model, library_model
from utils.example.freezing import freeze_backbone
from utils.example.pictures import label_pictures
from utils.metrics import Metrics, count_correct

# wrap_ddp is published under the name of this module, too
__all__ = ["MiniResNet", "compute_loss", "create_model", "param_groups", "wrap_ddp"]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., "Deep residual learning", 2015).

    Input: float [B, in_channels, H, W]. Output: float [B, out_channels, H / stride, W / stride].
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(residual)) + self.shortcut(x))


class MiniResNet(nn.Module):
    """A small ResNet for small images: 2,777,674 parameters for 3 channels and 10 classes.

    Input: float [B, in_channels, H, W], H and W at least 4. Output: logits [B, num_classes].
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential(
            ResidualBlock(64, 64, 1),
            ResidualBlock(64, 64, 1),
            ResidualBlock(64, 128, 2),
            ResidualBlock(128, 128, 1),
            ResidualBlock(128, 256, 2),
            ResidualBlock(256, 256, 1),
        )
        self.head = nn.Linear(256, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(x.mean(dim=(2, 3)))


def check_config(config: TrainingConfig) -> None:
    """Called before the data are loaded. Raises UserError for an unknown model."""
    check_model(config.model)


def create_model(config: TrainingConfig, device: torch.device) -> nn.Module:
    """Create the network on its device.

    Raises:
        UserError: for an unknown model, or one that does not fit the config.
    """
    # In a run, the data have replaced "auto" already. Otherwise these are the sizes of the synthetic set.
    num_classes = unless_auto(config.num_classes, 10)
    in_channels = unless_auto(config.in_channels, 3)
    image_size = unless_auto(config.image_size, 32)
    if config.model == "mini_resnet":
        model: Any = MiniResNet(in_channels, num_classes)
    else:
        model = library_model(config.model, num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    if config.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.freeze == "backbone":
        freeze_backbone(model)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(device, memory_format=layout)


def initial_weights(config: TrainingConfig) -> dict[str, Tensor]:
    """Return the weights of --init_from by name: those of a file, or published ones. Raises UserError."""
    if config.init_from in PUBLISHED_WEIGHTS:
        return PUBLISHED_WEIGHTS[config.init_from].load(config)
    return load_weights(local_checkpoint(config.init_from))


def param_groups(model: nn.Module, config: TrainingConfig) -> list[dict[str, Any]]:
    """Return the parameter groups. Each may have its own "lr", and a "name" for lr_factor.

    Parameters of one dimension get no weight decay: biases, and most of those in normalization layers. With
    norm_weight_decay all parameters of normalization layers get that value.

    Parameters in no group are not trained; freeze them in create_model with requires_grad_(False), so that DDP skips
    them.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = []
    if config.norm_weight_decay != "auto":
        norms: set[nn.Parameter] = set()
        for module in model.modules():
            if isinstance(module, (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
                norms.update(module.parameters(recurse=False))
        groups = [{"params": [p for p in trained if p in norms], "weight_decay": config.norm_weight_decay}]
        trained = [p for p in trained if p not in norms]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        *groups,
    ]


def compute_loss(model: nn.Module, batch: Any, config: TrainingConfig | None = None) -> Metrics:
    """Return the loss and each metric as a sum over the micro-batch and its count: {"loss": (sum, count), ...}.

    Args:
        model: in training or evaluation mode, and possibly wrapped in DDP. Ask torch.is_grad_enabled() in which one,
            and not the model: it may keep itself in evaluation mode, and its DDP wrapper then says something else.
        batch: the output of the data set's device_transform: images float [B, C, H, W] and labels int64 [B], or the
            share of each class, float [B, num_classes].
        config: of the run, with the values that the data have resolved. Without it labels are not smoothed.
    """
    images, labels = batch
    logits = model(images)
    if torch.is_grad_enabled():  # training
        smoothing = config.label_smoothing if config else 0.0
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        return {"loss": (loss, len(labels)), "top1": (count_correct(logits, labels), len(labels))}
    loss = F.cross_entropy(logits, labels, reduction="sum")
    top = {f"top{k}": (count_correct(logits, labels, k), len(labels)) for k in (1, 5)}
    return {"loss": (loss, len(labels))} | top


def log_images(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return images with their predicted and true class: {name: uint8 [B, 3, H, W]}. Each evaluation logs them."""
    images, labels = batch
    if labels.ndim == 2:  # the share of each class in a mixed image
        labels = labels.argmax(1)
    predicted = model(images).argmax(1)  # of the whole batch, since the model may be compiled for its size
    pictures = label_pictures(images[:16], predicted[:16].tolist(), labels[:16].tolist())
    return {"predictions": pictures}
