"""TensorBoard from rank 0: scalars by optimizer step, the config, images."""

from __future__ import annotations

import json
import logging
import os
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.logger import LOGGER_NAME
from utils.packages import explain_import_error

MAX_IMAGES = 64
POSITION_KEYS = ("epoch", "step", "count")


class TensorBoardWriter:
    """Writes to `folder`, or does nothing if it is None (on ranks other than 0).

    A failed write (a full disk) ends TensorBoard's thread: the next write starts a new file. If the package is missing
    or broken, a warning says so, and nothing more is written: a viewer must not end a run.
    """

    def __init__(self, folder: Path | None, start_step: int) -> None:
        self._folder = folder
        self._step = start_step  # of the last record
        self._writer: Any = None

    def _call_writer(self, method: str, *values: Any) -> None:
        """Call a method of the writer, which is created before the first call."""
        if self._folder is None:
            return
        try:
            if self._writer is None:
                self._writer = self._create_writer(self._folder)
            call = attrgetter(method)(self._writer)
            call(*values)
        except Exception as error:
            if isinstance(error, OSError) and "torch.utils.tensorboard" in sys.modules:  # of the disk
                self._writer = None
                return
            if method == "add_images":  # only these need Pillow; the caller shows no more of them
                raise
            self._folder = None
            text = (
                "Training continues, but TensorBoard shows no more of this attempt. metrics.jsonl has all values."
                " TensorBoard needs %s"
            )
            logging.getLogger(LOGGER_NAME).warning(text, explain_import_error("tensorboard", error))

    def _create_writer(self, folder: Path) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # takes a second or two

        # purge_step hides what an earlier attempt wrote beyond this step
        purge_step = self._step + 1 if self._step else None
        log_dir = str(folder)
        if not log_dir.isprintable():  # SummaryWriter writes no files below a name that is not UTF-8
            folder.mkdir(exist_ok=True)
            log_dir = f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}"
        # the writer's thread flushes each second, as a flush by the main thread would wait for it
        return SummaryWriter(log_dir, purge_step=purge_step, flush_secs=1)

    def write_texts(self, **values: dict[str, Any]) -> None:
        """Write each value as JSON, under its name."""
        for name, value in values.items():
            text = f"```json\n{json.dumps(value, indent=2)}\n```"
            self._call_writer("add_text", name, text, 0)

    def write_images(self, group: str, images: dict[str, Tensor], step: int) -> None:
        """Write the first images of each name as one grid.

        Args:
            images: a tensor by name: uint8 [B, C, H, W].

        Raises:
            TypeError: for anything else.
        """
        if not isinstance(images, dict):
            raise TypeError(f"got a {type(images).__name__} instead of {{name: uint8 [B, 3, H, W]}}")
        for name, batch in images.items():
            if not isinstance(batch, Tensor) or batch.dtype != torch.uint8 or batch.ndim != 4:
                description = type(batch).__name__
                if isinstance(batch, Tensor):
                    description = f"{batch.dtype} {list(batch.shape)}"
                raise TypeError(f"{name} is {description} instead of uint8 [B, 3, H, W]")
            channels = 3 if batch.shape[1] >= 3 else 1
            shown = batch[:MAX_IMAGES, :channels].cpu()
            if len(shown):
                self._call_writer("add_images", f"{group}/{name}", shown, step)

    def write_scalars(self, record: dict[str, Any]) -> None:
        """Write the numbers of a train or eval record, under `train/...`, `val/...` or `val_ema/...`."""
        if self._folder is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # `write_texts` has imported it

        group = record.get("split", "train")
        if record.get("weights") == "ema":
            group += "_ema"
        values = []
        for name, value in record.items():
            if isinstance(value, int | float) and name not in POSITION_KEYS:
                values.append(Summary.Value(tag=f"{group}/{name}", simple_value=value))
        # one event for all: add_scalar takes 84 us each
        self._call_writer("file_writer.add_summary", Summary(value=values), record["step"])
        self._step = record["step"]

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._writer:
            self._call_writer("close")
