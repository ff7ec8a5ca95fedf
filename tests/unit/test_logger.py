# extra: template
"""Logger: rank 0 prints, the others only warn; the lines for a step and an epoch (files:
builtin/test_whole_run.py)."""

import io
import math
import os
import sys
import time
from unittest import mock

import pytest
import torch

from utils.logger import format_duration, log_epoch_summary, log_training_step, setup_logger, show_progress_bar
from utils.report import terminal
from utils.report.reporter import count_targets

RECORD = {
    "epoch": 2,
    "step": 40,
    "loss": 1.25,
    "top1": 0.5,
    "lr": 0.01,
    "samples_per_s": 2000.0,
}
RECORD |= {"data_wait_s": 0.01, "step_s": 0.1, "peak_memory_bytes": 2**30}


def test_rank_0_shows_information_and_other_ranks_only_warnings(capsys):
    setup_logger(0).info("hello")
    assert capsys.readouterr().out == "hello\n"
    logger = setup_logger(3)
    logger.info("hello")
    logger.warning("trouble")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "[rank 3] trouble\n")


def test_files_of_other_ranks_have_warnings_and_tracebacks(tmp_path):
    """Thousands of ranks would otherwise write the same lines to the same storage."""
    texts = []
    for rank in (0, 3):
        logger = setup_logger(rank, tmp_path / str(rank))
        logger.info("hello")
        logger.warning("trouble")
        logger.debug("traceback", exc_info=ValueError("bad"))
        texts.append((tmp_path / str(rank)).read_text())
    assert all("WARNING trouble" in text and "ValueError: bad" in text for text in texts)
    assert ["hello" in text for text in texts] == [True, False]


def test_a_training_line_has_position_metrics_speed_and_time_left(capsys):
    def line(world_size=1, metrics=(), targets_per_s=0.0, **changed):
        log_training_step(setup_logger(0), RECORD | changed, [*metrics], 640, world_size, targets_per_s)
        return capsys.readouterr().out.rstrip("\n")

    begin = "epoch 2 | step 40/640 | loss 1.2500"  # epochs count from 1 in the log, from 0 in records
    rate, left, memory = "lr 0.01 | 2,000 samples/s", "1 min 00 s left", "mem 1.00 GiB"
    assert line(metrics=["top1"]) == f"{begin} | top1 0.5000 | {rate} | {left} | data wait 10%"  # full
    assert line(data_wait_s=0.0009) == f"{begin} | {rate} | {left} | {memory}"
    assert line(4, data_wait_s=0) == f"{begin} | {rate} (500 per rank) | {left} | {memory}"
    assert line(targets_per_s=81_234.4, data_wait_s=0) == f"{begin} | {rate} | {left} | 81,234 targets/s | {memory}"
    assert line(step=640).endswith(f"{rate} | data wait 10% | {memory}") and "loss not finite" in line(loss=None)
    many = {f"metric_{k}": 0.5 for k in range(9)}
    assert len(output := line(4, many, 1e7, **many)) <= 120 and "metric_1" in output and left in output


def test_an_epoch_line_has_each_split_and_kind_of_weights(capsys):
    record = {"kind": "eval", "epoch": 3, "step": 9, "split": "val", "weights": "model", "loss": 0.5, "top1": 0.9}
    record["count"] = 1000
    log_epoch_summary(setup_logger(0), [record, record | {"weights": "ema", "top1": 0.95}], 3.0, is_best=True)
    line = capsys.readouterr().out
    scores = "val: loss 0.5000, top1 0.9000 | val (ema): loss 0.5000, top1 0.9500"
    assert line == f"epoch 3 | {scores} | 1,000 samples in 3 s | best so far\n"
    log_epoch_summary(setup_logger(0), [record | {"split": "test", "count": 1}], 0.2, False, "best checkpoint")
    assert capsys.readouterr().out == "best checkpoint | test: loss 0.5000, top1 0.9000 | 1 sample in 0.2 s\n"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_evaluation_whose_loss_is_not_finite_is_a_warning_also_with_eval_only(capsys, loss):
    record = {"kind": "eval", "epoch": 3, "step": 9, "split": "val", "weights": "model", "loss": loss, "count": 4}
    log_epoch_summary(setup_logger(0), [record, record | {"weights": "ema"}], 3.0, is_best=False)
    message = (
        f"The loss of the evaluation of val is {loss}. To find the sample, write all outputs with scripts/predict.py."
    )
    assert capsys.readouterr().out.count(message) == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_progress_bar_only_on_a_terminal(monkeypatch, is_terminal):
    screen = io.StringIO()
    screen.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", screen)
    logger = setup_logger(0)
    show_progress_bar(logger, 3, 12, "step", " | loss 0.5" + 200 * ".")
    logger.info("a line")
    text = screen.getvalue()
    assert ("[######" in text and "step 3/12 | loss 0.5" in text) is is_terminal and len(text) < 120  # one line
    assert text.endswith("a line\n")


@pytest.mark.parametrize(
    "speak", [lambda logger: logger.info("a line"), lambda logger: show_progress_bar(logger, 3, 12, "step")]
)
def test_a_run_continues_when_its_terminal_closes(monkeypatch, speak):
    ours, tty_fd = os.openpty()
    with os.fdopen(tty_fd, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        logger = setup_logger(0)
        os.close(ours)
        monkeypatch.setattr(logger.handlers[0].stream, "isatty", lambda: True)  # it closes right after the check
        speak(logger)
        terminal.flush()  # as the interpreter does at exit, where an error would change the exit code


def test_durations():
    assert [format_duration(s) for s in (0.04, 0.5, 5, 65, 3725)] == [
        "0.1 s",
        "0.5 s",
        "5 s",
        "1 min 05 s",
        "1 h 02 min",
    ]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2048.0, 2048), (64.0, 0), (0.0, 0), (12.0, 12), (63.25, 0), ([3.0, 4.0], 0)],
    ids=["tokens", "samples", "nothing", "fewer", "weights", "terms"],
)
def test_targets_are_shown_where_they_say_more_than_the_samples(count, expected):
    assert count_targets(torch.tensor(count, dtype=torch.float64), 64) == expected


@pytest.mark.parametrize(
    ("steps", "ends"), [(70, "1 h 00 min left, until 13:00"), (1450, "24 h 00 min left, until Fri 12:00")]
)
def test_the_progress_bar_says_when_the_run_will_end(monkeypatch, steps, ends):
    shown = []
    monkeypatch.setattr(terminal, "show_progress_bar", lambda *args, suffix, **options: shown.append(suffix))
    monkeypatch.setattr(time, "time", lambda: 12 * 3600.0)  # on a Thursday
    monkeypatch.setattr(time, "localtime", time.gmtime)
    latest = {"step_s": 60.0, "loss": 0.5, "samples_per_s": 1000.0}
    terminal.Terminal.show_step(mock.MagicMock(_has_bar=True, _latest_record=latest, _total_steps=steps), 10)
    assert shown == [f" | loss 0.5000 | 1,000 samples/s | {ends}"]
