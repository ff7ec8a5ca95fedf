"""The checkpoint of a small run, and archives that anybody could have made."""

from __future__ import annotations

import io
import pickle
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from config import TrainingConfig
from utils.data.sampler import GlobalBatch
from utils.training.precision import Precision
from utils.training.state import TrainState

WINDOW = GlobalBatch(samples=4, weight=4.0, micro_batches=[])


def small_state(width: int = 48, seed: int = 0) -> TrainState:
    """Model, momenta and average of a run before its first step; in a world of one."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    config = TrainingConfig(warmup_epochs=0, ema_decay=0.9)
    state = TrainState(model, [{"params": list(model.parameters())}], config, Precision("cpu", None))
    state.plan(steps_left=100, steps_per_epoch=10, config=config)
    return state


def train_to(state: TrainState, step: int) -> dict[str, Any]:
    """The checkpoint's content after so many steps."""
    while state.progress.step < step:
        loss = state.model(torch.randn(4, 3, 8, 8)).square().mean()
        state.running_stats.add(4)
        state.running_stats.start_reduce()
        loss.backward()
        state.update_if_finite(WINDOW)
        state.advance(WINDOW)
    provenance = {"fingerprint": "abc", "global_batch_size": 64, "ledger": {}}
    return state.state_dict([state.interval.state()]) | {
        "config": TrainingConfig(ema_decay=0.9).to_dict(),
        "provenance": provenance,
    }


def limit_memory(more: int) -> tuple[int, int]:
    """Let this process have so many bytes of addresses beside those that it has. The limits from before."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if Path("/proc/self/statm").exists():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    return before


# ---- archives as torch.save writes them, but for what is asked ----


class Call:
    """Pickled as a call: whoever unpickles it calls the function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.parts = function, args

    def __reduce__(self) -> tuple:
        return self.parts


class Storage:
    """The claim that a record holds so many float32."""

    def __init__(self, key: str, count: int) -> None:
        self.id = ("storage", torch.FloatStorage, key, "cpu", count)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple | None:
        return value.id if isinstance(value, Storage) else None


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(value)
    return file.getvalue()


def disguised(payload: Any, records: dict[str, bytes]) -> Any:
    """The payload with every tensor as a claim about a record; the records' bytes are added."""
    if isinstance(payload, torch.Tensor):
        key = str(len(records))
        values = payload.detach().float()
        records[key] = values.numpy().tobytes()
        storage = Storage(key, values.numel())
        return Call(
            torch._utils._rebuild_tensor_v2, storage, 0, tuple(values.shape), values.stride(), False, OrderedDict()
        )
    if isinstance(payload, dict):
        return {key: disguised(value, records) for key, value in payload.items()}
    return [disguised(value, records) for value in payload] if isinstance(payload, list) else payload


def archive(data_pkl: bytes, records: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        members.writestr("archive/data.pkl", data_pkl)
        members.writestr("archive/byteorder", b"little")
        for key, value in records.items():
            members.writestr(f"archive/data/{key}", value)
        members.writestr("archive/version", b"3\n")
    return file.getvalue()
