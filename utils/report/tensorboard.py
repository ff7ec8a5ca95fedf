"""TensorBoard from rank 0: scalars on the optimizer step, a layout that lays train over eval, the config, a grid of
images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.files import AppendedFile

GRID = 8  # images a side
NOT_SCALARS = ("kind", "epoch", "step", "split", "weights", "count")


class Board:
    """Writes to `folder`, or nowhere where there is none (on other ranks than 0)."""

    def __init__(self, folder: Path | None, start_step: int) -> None:
        self._writer = None
        self._has_layout = False
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second or two

            # what an earlier attempt wrote beyond the step that is resumed from is hidden
            self._writer = SummaryWriter(folder, purge_step=start_step + 1 if start_step else None)
            self._writer.file_writer.event_writer = _Events(self._writer.file_writer.event_writer)

    def texts(self, **values: dict[str, Any]) -> None:
        if self._writer:
            for name, value in values.items():
                self._writer.add_text(name, f"```json\n{json.dumps(value, indent=2)}\n```", 0)

    def images(self, images: Tensor) -> None:
        """The first images as one grid: [B, C, H, W], floats in [0, 1]."""
        if self._writer:
            self._writer.add_image("train/augmented", tile(images[: GRID * GRID].float().cpu()), 0)

    def scalars(self, record: dict[str, Any]) -> None:
        """The numbers of a train or eval record, under `train/...`, `val/...` or `val_ema/...`."""
        if not self._writer:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        group = (
            "train" if record["kind"] == "train" else record["split"] + ("_ema" if record["weights"] == "ema" else "")
        )
        numbers = {name: value for name, value in record.items() if name not in NOT_SCALARS and value is not None}
        values = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in numbers.items()]
        # one event: add_scalar writes one for each number
        self._writer.file_writer.add_summary(Summary(value=values), record["step"])
        self._writer.flush()

    def layout(self, train_names: list[str], records: list[dict[str, Any]]) -> None:
        """Lay train and evaluation curves of one name over each other: once, when the names are known."""
        if not self._writer or self._has_layout:
            return
        self._has_layout = True
        groups = dict.fromkeys(r["split"] + ("_ema" if r["weights"] == "ema" else "") for r in records)
        evaluated = [name for name in records[0] if name not in NOT_SCALARS]
        pairs = {name: [f"train/{name}"] if name in train_names else [] for name in evaluated}
        if "top1" in pairs and "accuracy" in train_names:
            pairs["top1"] = ["train/accuracy"]
        charts = {name: ["Multiline", tags + [f"{group}/{name}" for group in groups]] for name, tags in pairs.items()}
        self._writer.add_custom_scalars({"train and evaluation": charts})

    def close(self) -> None:
        if self._writer:
            self._writer.close()


class _Events:
    """In the place of TensorBoard's writer of events, which at the first write that fails ends itself, and the run with
    it."""

    def __init__(self, theirs: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        theirs.close()
        self._records = RecordWriter(AppendedFile(Path(theirs._file_name)))

    def add_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Nothing is held back but what the disk does not take."""

    def close(self) -> None:
        """As `flush`."""


def tile(images: Tensor) -> Tensor:
    """[B, C, H, W] in [0, 1] -> one image [3 or 1, rows * H, columns * W], black where images are missing."""
    batch, channels, height, width = images.shape
    columns = min(GRID, batch)
    rows = -(-batch // columns)
    grid = torch.zeros(rows * columns, 3 if channels >= 3 else 1, height, width)
    grid[:batch] = images[:, : grid.shape[1]].clamp(0, 1)
    return (
        grid.view(rows, columns, -1, height, width).permute(2, 0, 3, 1, 4).reshape(-1, rows * height, columns * width)
    )
