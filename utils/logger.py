"""What people read while it runs: one line a log interval on rank 0's terminal, everything in each rank's own file."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from utils.files import LinesFile
from utils.metrics import RESERVED

NAME = "ddp"
BAR_WIDTH = 24


class _FileFormatter(logging.Formatter):
    """`<ISO time> <rank> <host> <message>` on every line, so that `sort -m` merges the files of all ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._host = rank, socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        lines = super().format(record).splitlines() or [""]
        return "\n".join(f"{when} {self._rank} {self._host} {level}{line}" for line in lines)


class _ConsoleHandler(logging.StreamHandler):
    """Whole lines, and on a terminal a progress bar below them."""

    def emit(self, record: logging.LogRecord) -> None:
        self.show_bar("")
        super().emit(record)

    def show_bar(self, bar: str) -> None:
        """Replace the line of the bar."""
        try:
            if self.stream.isatty():
                self.stream.write(f"\r\x1b[2K{bar}")
                self.flush()
        except OSError:
            self.handleError(logging.makeLogRecord({"msg": bar}))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):  # `| head`; a closed terminal
            # the run continues; what is left in the buffer would make the interpreter's exit code 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        else:
            super().handleError(record)


class _FileHandler(logging.Handler):
    """Whole lines; what a full disk does not take comes later."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._lines = LinesFile(file)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


def setup_logger(rank: int, file: Path | None = None) -> logging.Logger:
    """The logger of this rank. On the terminal rank 0 logs from INFO, the others only warnings, marked with their rank.

    file: takes everything; it is appended to. None: no file.
    """
    logger = logging.getLogger(NAME)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    plain, marked = logging.Formatter("%(message)s"), logging.Formatter(f"[rank {rank}] %(message)s")
    if rank == 0:
        console = _ConsoleHandler(sys.stdout)
        console.setLevel(logging.INFO)
        console.addFilter(lambda record: record.levelno < logging.ERROR)
        console.setFormatter(plain)
        logger.addHandler(console)
    errors = _ConsoleHandler(sys.stderr)
    errors.setLevel(logging.ERROR if rank == 0 else logging.WARNING)
    errors.setFormatter(plain if rank == 0 else marked)
    logger.addHandler(errors)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(file)
        handler.setFormatter(_FileFormatter(rank))
        logger.addHandler(handler)
    return logger


def log_training_step(
    logger: logging.Logger,
    record: dict[str, Any],
    metrics: list[str],
    total_steps: int,
    world_size: int,
    counts_per_s: float | None = None,
) -> None:
    """One line for a train record. counts_per_s: of what the loss counts, shown where that is not samples."""
    rate, step_s = record["samples_per_s"], record["step_s"]
    shown = [f"epoch {record['epoch']}", f"step {record['step']}/{total_steps}", f"loss {show(record['loss'])}"]
    shown += [f"{name} {show(record[name])}" for name in metrics]
    shown += [f"lr {record['lr']:.3g}", f"{rate:,.0f} samples/s ({rate / world_size:,.0f} a rank)"]
    if counts_per_s is not None and round(counts_per_s) != round(rate):
        shown[-1] += f", {counts_per_s:,.0f} counts/s"
    shown.append(f"data wait {record['data_wait_s'] / step_s if step_s else 0:.0%}")
    shown.append(f"mem {record['peak_memory_bytes'] / 2**30:.2f} GiB")
    shown.append(f"{duration(step_s * (total_steps - record['step']))} left")
    logger.info("%s", " | ".join(shown))


def log_epoch_summary(logger: logging.Logger, records: list[dict[str, Any]], seconds: float, is_best: bool) -> None:
    """One line for the evaluations at the end of an epoch: each split and kind of weights, with their metrics."""
    parts = []
    for record in records:
        values = ", ".join(f"{name} {show(value)}" for name, value in record.items() if name not in RESERVED)
        name = record["split"] + (" (ema)" if record["weights"] == "ema" else "")
        parts.append(f"{name}: {values} on {record['count']:,} samples")
    ending = f" in {duration(seconds)}" + (" -- best so far" if is_best else "")
    logger.info("== epoch %s done, %s%s", records[0]["epoch"], "; ".join(parts), ending)


def has_terminal(logger: logging.Logger) -> bool:
    return any(isinstance(handler, _ConsoleHandler) and handler.stream.isatty() for handler in logger.handlers)


def show_progress(logger: logging.Logger, step: int, total_steps: int, label: str) -> None:
    """A progress bar, only where this logger writes to a terminal."""
    filled = BAR_WIDTH * step // max(1, total_steps)
    bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {label} {step}/{total_steps}"
    for handler in logger.handlers:
        if isinstance(handler, _ConsoleHandler) and handler.level == logging.INFO:
            handler.show_bar(bar)


def show(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """Seconds for people: 5 s, 1 min 05 s, 1 h 02 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
