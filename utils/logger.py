"""Log output: one line per log interval on rank 0's terminal, everything in its file, warnings in the others'."""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.files import AppendOnlyFile

LOGGER_NAME = "ddp"
RESERVED_NAMES = (  # keys of a record besides the metrics
    *("kind", "epoch", "step", "split", "weights", "count", "lr", "lr_of_groups", "grad_norm", "samples_per_s"),
    *("skipped_steps", "data_wait_s", "step_s", "peak_memory_bytes", "fingerprint", "tokens_per_s", "padding", "mfu"),
)
RANK_0_WARNING = 25  # the level of a warning that all ranks have: only rank 0 shows it
logging.addLevelName(RANK_0_WARNING, "WARNING")
BAR_WIDTH = 24
MAX_COLUMNS = 120  # maximum width of a line


def join_first(names: list[str], limit: int = 3) -> str:
    """The first names as text, and how many more there are: "a, b, c and 4 more"."""
    others_text = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + others_text


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
    """Whole lines, with a progress bar below them on a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        self.show_bar("")
        super().emit(record)

    def show_bar(self, bar: str) -> None:
        """Replace the progress bar."""
        try:
            if self.stream.isatty():
                self.stream.write(f"\r\x1b[2K{bar}")
                self.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.handleError(logging.makeLogRecord({"msg": bar}))

    def handleError(self, record: logging.LogRecord) -> None:
        # `| head`, a closed terminal, a full disk; see repair_standard_streams in utils/run/command_line.py
        if isinstance(sys.exc_info()[1], OSError):
            # the run continues; data left in the buffer would make the exit code 120
            with suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        else:
            super().handleError(record)


class _FileHandler(logging.Handler):
    """Whole lines; those that a full disk rejects are written later."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._lines = AppendOnlyFile(file)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


def setup_logger(rank: int, file: Path | None = None) -> logging.Logger:
    """Return the logger of this rank. On the terminal, rank 0 logs from INFO up, the others only warnings.

    Args:
        file: a file to which lines are appended: on rank 0 all of them, on the others warnings and tracebacks.
    """
    logger = logging.getLogger(LOGGER_NAME)
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
        handler.addFilter(lambda record: rank == 0 or record.levelno >= logging.WARNING or bool(record.exc_info))
        logger.addHandler(handler)
    return logger


def log_training_step(
    logger: logging.Logger,
    record: dict[str, Any],
    metrics: list[str],
    total_steps: int,
    world_size: int,
    targets_per_s: float = 0,
) -> None:
    """Log a train record in one line of at most 120 columns; metrics and details that do not fit are left out.

    targets_per_s: what the loss counts: tokens, pixels. 0: left out.
    """
    rate = record["samples_per_s"]
    step_s = record["step_s"]
    loss = f"loss {format_value(record['loss'])}"
    if record.get("skipped_steps"):
        loss += f" ({record['skipped_steps']} skipped)"
    begin = [f"epoch {record['epoch']}", f"step {record['step']}/{total_steps}", loss]
    end = [f"lr {record['lr']:.3g}", f"{rate:,.0f} samples/s"]
    if "tokens_per_s" in record:
        end.append(f"{record['tokens_per_s']:,.0f} tokens/s ({record['padding']:.0%} padding)")
    steps_left = total_steps - record["step"]
    if steps_left:
        end.append(f"{format_duration(step_s * steps_left)} left")

    def has_room(part: str) -> bool:
        return len(" | ".join([*begin, *end, part])) <= MAX_COLUMNS

    for name in metrics:
        metric = f"{name} {format_value(record[name])}"
        if has_room(metric):
            begin.append(metric)
    if world_size > 1 and has_room(f"{rate:,.0f} per rank"):
        end[1] += f" ({rate / world_size:,.0f} per rank)"
    details = []
    if step_s and record["data_wait_s"] / step_s >= 0.01:
        details.append(f"data wait {record['data_wait_s'] / step_s:.0%}")
    if "mfu" in record:
        details.append(f"mfu {record['mfu']:.0%}")
    if targets_per_s >= 0.5:
        details.append(f"{targets_per_s:,.0f} targets/s")
    details.append(f"mem {record['peak_memory_bytes'] / 2**30:.2f} GiB")
    for detail in details:
        if has_room(detail):
            end.append(detail)
    logger.info("%s", " | ".join(begin + end))


def log_epoch_summary(
    logger: logging.Logger, records: list[dict[str, Any]], seconds: float, is_best: bool, title: str = ""
) -> None:
    """Log an evaluation in one line: the metrics of each split and kind of weights. Warn if a loss is not finite.

    title: what was evaluated, unless it is the model at the end of an epoch.
    """
    parts = [title or f"epoch {records[0]['epoch']}"]
    for record in records:
        values = ", ".join(
            f"{name} {format_value(value)}" for name, value in record.items() if name not in RESERVED_NAMES
        )
        weights = " (ema)" if record["weights"] == "ema" else ""
        parts.append(f"{record['split']}{weights}: {values}")
    parts.append(f"{format_count(records[0]['count'], 'sample')} in {format_duration(seconds)}")
    if is_best:
        parts.append("best so far")
    logger.info("%s", " | ".join(parts))
    for record in records:
        if not math.isfinite(record["loss"]):
            logger.log(
                RANK_0_WARNING,
                "The loss of the evaluation of %s is %s. To find the sample, write all outputs with scripts/predict.py."
                ' If the set has no labels, return it as "predict" from create_dataset.',
                record["split"],
                record["loss"],
            )
            break


def has_terminal(logger: logging.Logger) -> bool:
    return any(isinstance(handler, _ConsoleHandler) and handler.stream.isatty() for handler in logger.handlers)


def show_progress_bar(logger: logging.Logger, step: int, total_steps: int, label: str, suffix: str = "") -> None:
    """Show a progress bar, if this logger writes to a terminal."""
    filled = BAR_WIDTH * step // max(1, total_steps)
    bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {label} {step}/{total_steps}{suffix}"
    for handler in logger.handlers:
        if isinstance(handler, _ConsoleHandler) and handler.level == logging.INFO:
            handler.show_bar(bar[: shutil.get_terminal_size().columns - 1])  # a wrapped one could not be replaced


def error_text(error: BaseException) -> str:
    """Return the message of an error, and its notes."""
    parts = [str(error).strip(), *getattr(error, "__notes__", [])]
    message = "; ".join(part for part in parts if part)
    return message or type(error).__name__


def format_count(items: Any, noun: str) -> str:
    """Return a number and its noun: 1 node, 2 nodes."""
    number = items if isinstance(items, int) else len(items)
    if number != 1:
        noun += "s"
    return f"{number:,} {noun}"


def format_value(value: float | str | None) -> str:
    """Return a number with four decimals. Text stays as it is, and None is "not finite"."""
    if isinstance(value, str):
        return value
    if value is None:
        return "not finite"
    return f"{value:.4f}"


def format_duration(seconds: float) -> str:
    """Seconds as text: 0.5 s, 5 s, 1 min 05 s, 1 h 02 min."""
    if 0 < seconds < 0.95:
        return f"{max(seconds, 0.1):.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
