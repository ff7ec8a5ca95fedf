"""`--ema_decay`: an exponential moving average of the weights, which is evaluated, selected, saved and exported too.

It costs a copy of the model, two passes over the weights in each step, and a second evaluation. Who wants better
weights at the end of a run, above all with a constant learning rate or a diffusion model, needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from utils.distributed.dtensor import create_dtensor, local_shard, shard_like
from utils.training.parts.part import Part
from utils.training.schedule import Progress


class WeightAverage(Part):
    """An exponential moving average of the weights and the running statistics: a copy of each tensor of the state dict.

    Averages of 16-bit weights are float32, since an update is smaller than the spacing of 16-bit numbers. The model has
    them rounded to its dtype.

    After n updates its decay is min(decay, n / (9 + n)): the first update copies, then follows the warm-up of
    TensorFlow's ExponentialMovingAverage, so that the average of a short run does not hold its first weights. A skipped
    step is no update, and leaves the average unchanged without a read by the host. torch.optim.swa_utils takes its
    decay from the host, and the weights of `_foreach_lerp_` must be as large as the parameters.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._weights = {
            name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
        }
        sources = {value: local_shard(value.detach()) for value in self._weights.values()}  # a tied weight once
        self._average_by_value = {value: copy_in_float32(source) for value, source in sources.items()}
        self._pairs = [(self._average_by_value[value], source) for value, source in sources.items()]
        self._averages, self._sources = zip(*[pair for pair in self._pairs if pair[1].is_floating_point()], strict=True)
        device = local_shard(next(model.parameters())).device
        self._min_rate = 1.0 - decay
        self._steps_taken = torch.zeros((), dtype=torch.float64, device=device)  # the updates so far
        self._counters = [pair for pair in self._pairs if not pair[1].is_floating_point()]

    def after_update(self, model: nn.Module, skipped: Tensor) -> None:
        self.update(1 - skipped)

    def save(self, state: dict[str, Any]) -> None:
        state["ema"] = self.state_dict()

    def after_load(self, payload: dict[str, Any], progress: Progress) -> None:
        self.load_state_dict(payload["ema"] or payload["model"])
        self._steps_taken.fill_(progress.step - progress.skipped_steps - progress.overflow_steps)

    def weights(self) -> dict[str, AbstractContextManager]:
        return {"ema": self.swap_weights()}

    @torch.no_grad()
    def update(self, is_step_taken: Tensor) -> None:
        """is_step_taken: float, 0-dimensional, on the device, 1 where the step was taken and 0 where it was skipped."""
        gaps = torch._foreach_sub(self._sources, self._averages)
        rate = (9 / (9 + self._steps_taken)).clamp(min=self._min_rate) * is_step_taken  # 1 minus the decay
        torch._foreach_mul_(gaps, rate.to(gaps[0].dtype))
        torch._foreach_add_(self._averages, gaps)
        self._steps_taken.add_(is_step_taken)
        if self._counters:
            torch._foreach_copy_([average for average, _ in self._counters], [source for _, source in self._counters])

    @contextmanager
    def swap_weights(self) -> Iterator[None]:
        """Let the model have the average, and the average the model's weights, until the end of the context."""
        rounded = [(average, average.clone()) for average, source in self._pairs if average.dtype != source.dtype]
        self._swap_tensors()
        try:
            yield
        finally:
            self._swap_tensors()
            for average, exact in rounded:
                average.copy_(exact)

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict with the average in it."""
        averages = {name: create_dtensor(self._average_by_value[value], value) for name, value in self._weights.items()}
        return self._model.state_dict() | averages

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._weights.items():
            self._average_by_value[value].copy_(local_shard(shard_like(state[name], value)))

    @torch.no_grad()
    def _swap_tensors(self) -> None:
        for average, source in self._pairs:
            before = average.clone()
            average.copy_(source)
            source.copy_(before)
        self._pairs.reverse()  # the way back is the inverse, also where one tensor is a view of another


def copy_in_float32(value: Tensor) -> Tensor:
    """A copy, in float32 if the value is of fewer bits."""
    return value.float() if value.is_floating_point() and value.element_size() < 4 else value.clone()
