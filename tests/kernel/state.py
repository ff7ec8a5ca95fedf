# extra: template
"""One optimizer step: sums over the global batch, BatchNorm, the update."""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Sums:
    """Sums and counts by name, and more numbers behind them: float64, in one vector that the ranks sum."""

    def __init__(self, metrics: dict[str, tuple], more: int = 0) -> None:
        self.names = list(metrics)
        self.values = torch.zeros(2 * len(metrics) + more, dtype=torch.float64)
        self.more = self.values[2 * len(metrics) :]

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        at = 2 * self.names.index(name)
        return self.values[at], self.values[at + 1]

    def add(self, metrics: dict[str, tuple]) -> None:
        for name, (total, count, *_) in metrics.items():
            for place, value in zip(self.of(name), (total, count), strict=True):
                place.add_(value.detach() if isinstance(value, Tensor) else value)

    def means(self) -> dict[str, float]:
        return {name: (total / count).item() for name in self.names for total, count in [self.of(name)]}


class RunningStatistics:
    """BatchNorm's statistics: a micro-batch leaves its own in the buffers, and a step moves those before the step
    towards their mean over the global batch."""

    def __init__(self, model: nn.Module) -> None:
        layers: list[Any] = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self.buffers = [buffer for m in layers for buffer in (m.running_mean, m.running_var)]
        self.counts = [m.num_batches_tracked for m in layers]
        self.rates = torch.cat(
            [torch.full((2 * m.num_features,), float(m.momentum)) for m in layers] or [torch.ones(0)]
        )
        for layer in layers:
            layer.momentum = 1.0
        self.keep()

    def now(self) -> Tensor:
        return torch.cat([torch.zeros(0), *self.buffers])

    def keep(self) -> None:
        self.kept, self.kept_counts = self.now(), [count.clone() for count in self.counts]

    def restore(self) -> None:
        for buffer, kept in zip(self.buffers, self.kept.split([len(tensor) for tensor in self.buffers]), strict=True):
            buffer.copy_(kept)
        for count, kept in zip(self.counts, self.kept_counts, strict=True):
            count.copy_(kept)

    def commit(self, means: Tensor) -> None:
        self.kept = torch.lerp(self.kept, means.float(), self.rates)
        for count in self.kept_counts:
            count.add_(1)


class State:
    """What a checkpoint holds: the model, the optimizer, the scaler of float16, and where the run is."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]], config: Any, ranks: int) -> None:
        self.model, self.config, self.ranks = model, config, ranks
        self.statistics = RunningStatistics(model)
        rest: dict[str, Any] = {"weight_decay": config.weight_decay, "fused": True}
        if config.optimizer == "adamw":
            self.optimizer: Any = torch.optim.AdamW(groups, config.lr, (config.momentum, config.beta2), **rest)
        else:
            nesterov = config.nesterov and config.momentum > 0
            self.optimizer = torch.optim.SGD(groups, config.lr, config.momentum, nesterov=nesterov, **rest)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        for p in self.parameters if config.optimizer == "sgd" and config.momentum else ():
            self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)  # for a first step that is skipped
        self.dtype = TYPES.get(config.amp_dtype) if config.use_amp else None
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.dtype is torch.float16)
        self.step = self.epoch = self.start = 0  # start: the next sample of the epoch
        self.shift = -1  # the loss is divided by 2^shift until the update
        self.is_done = False
        self.evaluations: list[dict[str, float]] = []
        self.work: Any = None

    def autocast(self) -> AbstractContextManager:
        return torch.autocast("cpu", self.dtype, enabled=self.dtype is not None)

    def begin(self, metrics: dict[str, tuple], per_step: int) -> None:
        """metrics: of the first batch."""
        self.sums = Sums(metrics, len(self.statistics.kept))
        if self.shift < 0:
            self.shift = round(math.log2(max(1.0, float(metrics["loss"][1])) * per_step))

    def add(self, metrics: dict[str, tuple], samples: int) -> None:
        self.sums.add(metrics)
        self.sums.more.add_(self.statistics.now(), alpha=samples)

    def start_reduce(self) -> None:
        self.work = dist.all_reduce(self.sums.values, async_op=True) if self.ranks > 1 else None

    def backward(self, loss: Tensor, is_padding: bool) -> None:
        """DDP divides by the number of ranks."""
        self.scaler.scale(loss).backward(torch.tensor(0.0 if is_padding else self.ranks * 2.0**-self.shift))

    def update(self, samples: int, factor: float) -> None:
        """Divide by the count of the loss, clip, and step unless a number is not finite."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        if self.work:
            self.work.wait()
        self.scaler.unscale_(self.optimizer)
        loss, count = self.sums.of("loss")
        divisor = count * 2.0**-self.shift
        gradients: list[Any] = [p.grad for p in self.parameters]
        norms = torch._foreach_norm(gradients)
        norm = torch.linalg.vector_norm(torch.stack(norms)) / divisor + 0 * loss
        if self.config.clip_grad_norm:
            divisor = divisor * ((norm + 1e-6) / self.config.clip_grad_norm).clamp(min=1)
        is_finite = bool(norm.isfinite())
        self.optimizer.grad_scale, self.optimizer.found_inf = divisor.float(), torch.tensor(float(not is_finite))
        self.optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad()
        if is_finite:
            self.statistics.commit(self.sums.more / samples)
        self.statistics.restore()
        self.sums.values.zero_()
        self.step, self.start = self.step + 1, self.start + samples

    def state_dict(self) -> dict[str, Any]:
        where = {name: getattr(self, name) for name in ("step", "epoch", "start", "shift", "is_done", "evaluations")}
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler")}
        return {**parts, "where": where}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scaler"):
            getattr(self, name).load_state_dict(saved[name])
        for name, value in saved["where"].items():
            setattr(self, name, value)
        self.statistics.keep()
