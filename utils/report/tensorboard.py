"""TensorBoard from rank 0: scalars by optimizer step, train and evaluation in one chart, the config, images."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.logger import RESERVED

GRID = 8  # images per side
WHERE = ("epoch", "step", "count")


class Board:
    """Writes to `folder`, or does nothing if it is None (on ranks other than 0).

    A failed write (a full disk) ends TensorBoard's thread: the next write starts a new file.
    """

    def __init__(self, folder: Path | None, start_step: int) -> None:
        self._folder, self._step, self._has_layout = folder, start_step, False
        self._writer: Any = None

    def _write(self, action: Callable[[Any], None]) -> None:
        if self._folder is None:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter  # takes a second or two

                # purge_step hides what an earlier attempt wrote beyond this step; its thread flushes, as a flush here
                # would wait for it
                purge_step = self._step + 1 if self._step else None
                place = str(self._folder)
                if not place.isprintable():  # it writes no files below a name that is not UTF-8
                    self._folder.mkdir(exist_ok=True)
                    place = f"/proc/self/fd/{os.open(self._folder, os.O_RDONLY)}"
                self._writer = SummaryWriter(place, purge_step=purge_step, flush_secs=1)
            action(self._writer)
        except OSError:
            self._writer = None

    def texts(self, **values: dict[str, Any]) -> None:
        for name, value in values.items():
            text = f"```json\n{json.dumps(value, indent=2)}\n```"
            self._write(methodcaller("add_text", name, text, 0))

    def images(self, group: str, images: dict[str, Tensor], step: int) -> None:
        """The first images of each name as one grid: uint8 [B, C, H, W]. Raises TypeError for anything else."""
        if not isinstance(images, dict):
            raise TypeError(f"returned a {type(images).__name__}; return {{name: uint8 [B, 3, H, W]}}")
        for name, batch in images.items():
            if not isinstance(batch, Tensor) or batch.dtype != torch.uint8 or batch.ndim != 4:
                what = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
                raise TypeError(f"{name} is {what}; return uint8 [B, 3, H, W]")
            grid = tile(batch[: GRID * GRID].cpu())
            self._write(methodcaller("add_image", f"{group}/{name}", grid, step))

    def scalars(self, record: dict[str, Any]) -> None:
        """The numbers of a train or eval record, under `train/...`, `val/...` or `val_ema/...`."""
        group = "train" if record["kind"] == "train" else _group(record)

        def write(writer: Any) -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            numbers = {
                name: value for name, value in record.items() if isinstance(value, int | float) and name not in WHERE
            }
            values = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in numbers.items()]
            # one event for all: add_scalar takes 84 us each
            writer.file_writer.add_summary(Summary(value=values), record["step"])

        self._write(write)
        self._step = record["step"]

    def layout(self, train_names: list[str], records: list[dict[str, Any]]) -> None:
        """Put train and evaluation curves of the same name into one chart. Done once, when the names are known."""
        if self._has_layout:
            return
        self._has_layout = True
        groups = dict.fromkeys(map(_group, records))
        names = [name for name in records[0] if name not in RESERVED]
        pairs = {name: [f"train/{name}"] if name in train_names else [] for name in names}
        charts = {name: ["Multiline", tags + [f"{group}/{name}" for group in groups]] for name, tags in pairs.items()}
        self._write(methodcaller("add_custom_scalars", {"train and evaluation": charts}))

    def close(self) -> None:
        if self._writer:
            self._write(methodcaller("close"))


def _group(record: dict[str, Any]) -> str:
    return record["split"] + ("_ema" if record["weights"] == "ema" else "")


def tile(images: Tensor) -> Tensor:
    """uint8 [B, C, H, W] -> one image [3 or 1, rows * H, columns * W], black where images are missing."""
    batch, channels, height, width = images.shape
    columns = min(GRID, batch)
    rows = -(-batch // columns)
    grid = torch.zeros(rows * columns, 3 if channels >= 3 else 1, height, width, dtype=torch.uint8)
    grid[:batch] = images[:, : grid.shape[1]]
    return (
        grid.view(rows, columns, -1, height, width).permute(2, 0, 3, 1, 4).reshape(-1, rows * height, columns * width)
    )
