"""Logger: rank 0 speaks, the others warn; what a line says of a step and of an epoch (files:
builtin/test_whole_run.py)."""

import io
import os
import sys

import pytest

from utils.logger import duration, log_epoch_summary, log_training_step, setup_logger, show_progress

RECORD = {
    "epoch": 1,
    "step": 40,
    "loss": 1.25,
    "accuracy": 0.5,
    "lr": 0.01,
    "samples_per_s": 2000.0,
    "counts_per_s": 2000.0,
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


def test_a_training_line_says_where_how_well_how_fast_and_how_long(capsys):
    log_training_step(setup_logger(0), RECORD, ["accuracy"], total_steps=640, world_size=4)
    line = capsys.readouterr().out
    for part in ("epoch 1", "step 40/640", "loss 1.2500", "accuracy 0.5000", "lr 0.01", "2,000 samples/s (500 a rank)"):
        assert part in line
    for part in ("data wait 10%", "mem 1.00 GiB", "1 min 00 s left"):
        assert part in line
    log_training_step(setup_logger(0), RECORD | {"loss": None}, [], 640, 1)
    assert "loss not finite" in capsys.readouterr().out
    log_training_step(setup_logger(0), RECORD, [], 640, 4, counts_per_s=81_234.4)
    assert "2,000 samples/s (500 a rank), 81,234 counts/s" in capsys.readouterr().out


def test_an_epoch_line_has_each_split_and_kind_of_weights(capsys):
    record = {"kind": "eval", "epoch": 2, "step": 9, "split": "val", "weights": "model", "loss": 0.5, "top1": 0.9}
    record["count"] = 1000
    log_epoch_summary(setup_logger(0), [record, record | {"weights": "ema", "top1": 0.95}], 3.0, is_best=True)
    line = capsys.readouterr().out
    assert "epoch 2" in line and "val: loss 0.5000, top1 0.9000 on 1,000 samples" in line
    assert "val (ema): loss 0.5000, top1 0.9500" in line and "best so far" in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_progress_bar_only_on_a_terminal(monkeypatch, is_terminal):
    screen = io.StringIO()
    screen.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", screen)
    logger = setup_logger(0)
    show_progress(logger, 3, 12, "step")
    logger.info("a line")
    text = screen.getvalue()
    assert ("[######" in text and "step 3/12" in text) is is_terminal
    assert text.endswith("a line\n")


@pytest.mark.parametrize(
    "speak", [lambda logger: logger.info("a line"), lambda logger: show_progress(logger, 3, 12, "step")]
)
def test_a_run_goes_on_when_its_terminal_closes(monkeypatch, speak):
    ours, its = os.openpty()
    with os.fdopen(its, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        logger = setup_logger(0)
        os.close(ours)
        monkeypatch.setattr(logger.handlers[0].stream, "isatty", lambda: True)  # it closes right after that was asked
        speak(logger)
        terminal.flush()  # as the interpreter does at its end: an error would be its exit code


def test_durations():
    assert [duration(s) for s in (5, 65, 3725)] == ["5 s", "1 min 05 s", "1 h 02 min"]
