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
    """Holds an exponential moving average of the weights and the running statistics, as a copy of the state dict.

    Averages of 16-bit weights are float32, since an update is smaller than the spacing of 16-bit numbers. The model has
    them rounded to its dtype.

    After n updates the decay is min(decay, n / (9 + n)): the first update copies, then follows the warm-up of
    TensorFlow's ExponentialMovingAverage, so that the average of a short run does not hold its first weights. A skipped
    step is no update, and leaves the average unchanged without a read by the host. torch.optim.swa_utils takes its
    decay from the host, and the weights of `_foreach_lerp_` must be as large as the parameters.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._weights: dict[str, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                self._weights[name] = value
        self._average_by_value: dict[Tensor, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []  # each average, and the weights that it follows
        self._averages: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._counter_copies: list[Tensor] = []  # integers have no average
        self._counters: list[Tensor] = []
        for value in dict.fromkeys(self._weights.values()):  # a tied weight once
            source = local_shard(value.detach())
            average = copy_in_float32(source)
            self._average_by_value[value] = average
            self._pairs.append((average, source))
            if source.is_floating_point():
                self._averages.append(average)
                self._sources.append(source)
            else:
                self._counter_copies.append(average)
                self._counters.append(source)
        device = local_shard(next(model.parameters())).device
        self._min_rate = 1.0 - decay
        self._steps_taken = torch.zeros((), dtype=torch.float64, device=device)  # the updates so far

    def after_update(self, model: nn.Module, skipped: Tensor) -> None:
        self.update(1 - skipped)

    def save(self, state: dict[str, Any]) -> None:
        state["ema"] = self.state_dict()

    def after_load(self, payload: dict[str, Any], progress: Progress) -> None:
        self.load_state_dict(payload["ema"] or payload["model"])
        steps_taken = progress.step - progress.skipped_steps - progress.overflow_steps
        self._steps_taken.fill_(steps_taken)

    def weights(self) -> dict[str, AbstractContextManager]:
        return {"ema": self.swap_weights()}

    @torch.no_grad()
    def update(self, is_step_taken: Tensor) -> None:
        """Move the average towards the weights, unless the step was skipped.

        Args:
            is_step_taken: 1 if the step was taken, 0 if it was skipped: float, 0-dimensional, on the device.
        """
        gaps = torch._foreach_sub(self._sources, self._averages)
        rate = (9 / (9 + self._steps_taken)).clamp(min=self._min_rate)  # 1 minus the decay
        rate = rate * is_step_taken
        torch._foreach_mul_(gaps, rate.to(gaps[0].dtype))
        torch._foreach_add_(self._averages, gaps)
        self._steps_taken.add_(is_step_taken)
        if self._counters:
            torch._foreach_copy_(self._counter_copies, self._counters)

    @contextmanager
    def swap_weights(self) -> Iterator[None]:
        """Exchange the average and the weights of the model until the end of the context."""
        exact_copies = []  # of averages that the model has rounded
        for average, source in self._pairs:
            if average.dtype != source.dtype:
                exact_copies.append((average, average.clone()))
        self._swap_tensors()
        try:
            yield
        finally:
            self._swap_tensors()
            for average, exact_copy in exact_copies:
                average.copy_(exact_copy)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with the average in it."""
        averages = {}
        for name, value in self._weights.items():
            averages[name] = create_dtensor(self._average_by_value[value], value)
        return self._model.state_dict() | averages

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the average from a state dict of the model, whose tensors are whole or shards."""
        for name, value in self._weights.items():
            shard = local_shard(shard_like(state[name], value))
            self._average_by_value[value].copy_(shard)

    @torch.no_grad()
    def _swap_tensors(self) -> None:
        """Exchange the values of each average and its weights."""
        for average, source in self._pairs:
            before = average.clone()
            average.copy_(source)
            source.copy_(before)
        self._pairs.reverse()  # the way back is the inverse, also where one tensor is a view of another


def copy_in_float32(value: Tensor) -> Tensor:
    """Return a copy, in float32 if the value is a float of fewer bits."""
    if value.is_floating_point() and value.element_size() < 4:
        return value.float()
    return value.clone()
