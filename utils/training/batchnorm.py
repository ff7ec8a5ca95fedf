"""BatchNorm's running statistics, updated once per optimizer step with the mean statistics of its micro-batches.

nn.BatchNorm updates them with every micro-batch of its own rank, so that they depend on ranks x accumulation and
differ between ranks. Here the layers have momentum 1, so a micro-batch only leaves its own statistics in their buffers,
which are views of one flat tensor. These statistics are summed, weighted by samples, over micro-batches and ranks
(step_sums.py), and merged into the committed statistics when the step is taken. Between two steps every rank holds the
same statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.data.sampler import GlobalBatchSampler
from utils.distributed.context import DistributedContext
from utils.settings.errors import UserError


class RunningStats:
    """The running statistics of all BatchNorm layers of a model. Sets the momentum of the layers to 1.

    Create it before the model is wrapped or copied.

    Raises:
        UserError: for a layer with momentum=None (a cumulative average).
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[_BatchNorm] = []
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                self._layers.append(module)
        self.size = 0  # how many numbers a step sums
        self._momenta: list[float] = []
        self._training_flags: list[bool] = []  # of each layer, in this epoch
        if not self._layers:
            return
        if any(layer.momentum is None for layer in self._layers):
            raise UserError(
                "BatchNorm with momentum=None (a cumulative average) cannot be resumed exactly."
                " Give a momentum, e.g. 0.1."
            )
        # A micro-batch leaves its statistics in the layers' buffers. Between two steps these hold the committed ones.
        self._buffers = _flatten_buffers(self._layers, ("running_mean", "running_var"))
        self._buffer_counts = _flatten_buffers(self._layers, ("num_batches_tracked",))
        self._committed = self._buffers.clone()
        self._committed_counts = self._buffer_counts.clone()
        self.size = len(self._buffers)
        self._sum = torch.zeros_like(self._buffers, dtype=torch.float64)
        self._work = torch.zeros_like(self._buffers)
        self._momenta = [float(layer.momentum or 0) for layer in self._layers]
        for layer in self._layers:
            layer.momentum = 1.0
        self.begin_epoch()

    @property
    def has_layers(self) -> bool:
        return bool(self._layers)

    @property
    def momenta(self) -> list[float]:
        """Return the different momenta of the layers whose statistics move, as of the last `begin_epoch`."""
        momenta = set()
        for momentum, is_training in zip(self._momenta, self._training_flags, strict=True):
            if is_training and momentum != 0:
                momenta.add(momentum)
        return sorted(momenta)

    def use_accumulator(self, accumulator: Tensor) -> None:
        """Sum the statistics of a step in this tensor.

        Args:
            accumulator: float64 [size], zeros. The owner sums it over the ranks, and zeroes it again.
        """
        if self.has_layers:
            self._sum = accumulator

    def begin_epoch(self) -> None:
        """Note which layers train: the others (a frozen trunk) keep their statistics bit for bit.

        Call it after model.train().
        """
        training_flags = [layer.training for layer in self._layers]
        if training_flags == self._training_flags:
            return  # nothing to rebuild: copying the masks to the device would wait for it in each epoch
        self._training_flags = training_flags
        rates_by_layer = []
        for layer, momentum in zip(self._layers, self._momenta, strict=True):
            rate = momentum if layer.training else 0.0
            rates_by_layer.append(torch.full((2 * layer.num_features,), rate))  # of its means and its variances
        self._momentum_rates = torch.cat(rates_by_layer).to(self._buffers)
        self._training_mask = torch.tensor(training_flags).to(self._buffer_counts)

    def add(self, samples: int) -> None:
        """Add the statistics of a micro-batch with this many samples. Call it after the forward pass."""
        if self.has_layers:
            self._sum.add_(self._buffers, alpha=samples)

    def commit(self, samples: int, is_finite: Tensor) -> None:
        """Update the statistics with the mean over the global batch, or leave them unchanged if the step is skipped.

        Args:
            samples: the number of samples in the global batch.
            is_finite: whether the step is taken: 0-dimensional bool, on the device.
        """
        if self.has_layers:
            torch.div(self._sum, samples, out=self._work)
            # _work is the mean here, and then committed + rate * (mean - committed)
            torch.lerp(self._committed, self._work, self._momentum_rates, out=self._work)
            # torch.where and not a product, since NaN * 0 is NaN
            torch.where(is_finite, self._work, self._committed, out=self._committed)
            self._committed_counts.addcmul_(self._training_mask, is_finite)
            self.discard()

    def discard(self) -> None:
        """Restore the committed statistics in the layers' buffers.

        Call it after each backward pass. Otherwise a layer that the next micro-batch does not use would add the
        statistics of this one again.
        """
        if self.has_layers:
            self._buffers.copy_(self._committed)
            self._buffer_counts.copy_(self._committed_counts)

    def read_buffers(self) -> None:
        """Commit the statistics in the layers' buffers, into which a checkpoint was loaded."""
        if self.has_layers:
            self._committed.copy_(self._buffers)
            self._committed_counts.copy_(self._buffer_counts)


def check_sync_batchnorm(model: nn.Module, sampler: GlobalBatchSampler, ctx: DistributedContext) -> None:
    """Raise UserError if SyncBatchNorm would run on the CPU, or wait for a rank that has no micro-batch."""
    if not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return
    if ctx.device.type != "cuda":
        raise UserError("SyncBatchNorm works on CUDA only. Leave out --sync_bn on the CPU.")
    full_step = sampler.micro_batches_per_step
    last_step = sampler.micro_batches_per_epoch % full_step
    is_uneven = full_step % ctx.world_size != 0 or last_step % ctx.world_size != 0
    if is_uneven or (sampler.is_packed and not sampler.drop_last):
        raise UserError(
            "SyncBatchNorm needs the same number of micro-batches on every rank in every step. "
            "Add --drop_last and use a global batch size that the number of ranks divides."
        )


def _flatten_buffers(layers: list[_BatchNorm], names: tuple[str, ...]) -> Tensor:
    """Move the layers' buffers of these names into one flat tensor, of which they become views. Returns the tensor."""
    buffers: list[Tensor] = []
    for layer in layers:
        for name in names:
            buffer = getattr(layer, name)
            buffers.append(buffer.reshape(-1))
    flat = torch.cat(buffers)

    begin = 0
    for layer in layers:
        for name in names:
            buffer = getattr(layer, name)
            end = begin + buffer.numel()
            setattr(layer, name, flat[begin:end].view(buffer.shape))
            begin = end
    return flat
