"""The checkpoint of a small run, and a value that runs code when it is unpickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from config import TrainingConfig
from utils.data.sampler import MicroBatch
from utils.distributed.context import DistributedContext
from utils.training.hooks import ModelHooks
from utils.training.parts.create import create_parts
from utils.training.precision import Precision
from utils.training.state import TrainState

AVERAGED = {}
AVERAGED["ema_decay"] = 0.9

SAMPLES = 4
MICRO_BATCH = MicroBatch(0, 0, [0, 1, 2, 3], is_padding=False, is_last=True, micro_batches_in_step=1)


class Call:
    """Pickled as a function call, which unpickling executes."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.parts = function, args

    def __reduce__(self) -> tuple:
        return self.parts


def small_state(width: int = 48, seed: int = 0, optimizer: str = "sgd") -> TrainState:
    """Model, momenta and average of a run before its first step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, width), nn.ReLU(), nn.Linear(width, 10))
    config = TrainingConfig(warmup_epochs=0, optimizer=optimizer, **AVERAGED)
    hooks = ModelHooks(None, lambda *_: [{"params": model.parameters()}], None)
    precision = Precision("cpu", None)
    state = TrainState(model, hooks, config, precision)
    ctx = DistributedContext(0, 0, 1, torch.device("cpu"))
    state.parts += create_parts((), model, None, config, ctx, precision)
    state.allocate_metrics({"loss": (0.0, 4)})
    return state


def payload_of(state: TrainState, step: int) -> dict[str, Any]:
    """The content of a checkpoint after one more optimizer step, numbered `step`."""
    state.schedule.total_steps = 100
    loss = state.model(torch.randn(4, 300)).square().mean()
    state.step_sums.add({"loss": (loss, 4)}, MICRO_BATCH)
    loss.backward()
    state.update_if_finite(SAMPLES)
    state.progress.step = step
    return state.state_dict() | {
        "config": TrainingConfig(**AVERAGED).to_dict(),
        "provenance": {"identity": "abc", "content": "", "sketches": [], "global_batch_size": 64},
    }
