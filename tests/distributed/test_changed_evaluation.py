# extra: template
"""What is evaluated is compared with what the checkpoint has seen, as a resume compares the training set."""

import contextlib
import io
import logging
from unittest import mock

import pytest
import torch

from ranks import run_ranks, slow
from scripts import export, predict
from tasks import TASKS
from test_predict_and_export import run_main, tokens
from training import train_flags
from utils.settings.errors import UserError

FLAGS = "--dataset_size 40 --epochs 1 --no-use_amp".split()


def changed(plain, split, share, attributes):
    """create_dataset whose set of this split has other lines, a share of them; all sets have these attributes."""

    def create(config, name):
        data = plain(config, "val" if name == "predict" else name)
        if data and name == split:
            count = round(share * len(data))
            data.lines[:count] = [(line + 1) % 16 for line in data.lines[:count]]
        for key, value in attributes.items() if data else ():
            setattr(data, key, value)
        return data

    return create


def run_again(words, is_predicted, *changes):
    """Evaluate or predict with changed data. Returns the error and what is logged about changes."""
    records = []
    logging.setLogRecordFactory(lambda *args, **more: records.append(logging.LogRecord(*args, **more)) or records[-1])
    create = {"create_dataset": changed(TASKS["lines"]["create_dataset"], *changes)}
    error = ""
    with mock.patch.dict(TASKS["lines"], create):
        try:
            run_main(predict, "lines", tokens, words) if is_predicted else train_flags(words, task="lines")
        except UserError as problem:
            error = str(problem)
    texts = [record.getMessage() for record in records]
    return error, [text for text in texts if text.startswith("changed: ")]


ALL = "The {0} set has samples that differ from the checkpoint's: {1} of {1} compared ones"


@pytest.mark.guarantee("must-match")
@pytest.mark.parametrize(
    ("flags", "split", "share", "attributes", "error", "change"),
    [
        ([], "val", 1, {}, ALL.format("val", 7), None),
        ([], "val", 0.25, {}, None, "The val set has samples that differ from the checkpoint's: 2 of 7 compared ones"),
        slow([], "train", 1, {}, None, None),
        slow(
            [], "val", 0, {"mean": torch.ones(1)}, "The mean of the training set is 1.0, but the checkpoint has ", None
        ),
        slow([], "val", 0, {"fingerprint": 5}, "The val set differs from the checkpoint's", None),
        slow(["--data_dir", "elsewhere"], "val", 1, {}, None, ALL.format("val", 7)),
        slow(["--split", "val"], "val", 1, {}, ALL.format("val", 7), None),
        (["--split", "train"], "train", 1, {}, ALL.format("train", 40), None),
        slow(["--split", "train", "--data_dir", "elsewhere"], "train", 1, {}, None, ALL.format("train", 40)),
        slow(["--split", "val"], "train", 1, {}, None, None),
        slow(["--split", "predict"], "predict", 1, {}, None, None),
    ],
)
def test_other_data_than_the_checkpoints_is_an_error_or_said(runs, flags, split, share, attributes, error, change):
    runs.train(1, "run", *FLAGS, task="lines")
    is_predicted = "--split" in flags
    words = runs.words("run", *FLAGS, "--eval_only", *flags)
    if is_predicted:
        words = [runs.checkpoints("run")[-1], "--out", runs.root / "out.pt", *flags]
    for actual_error, texts in run_ranks(2, run_again, words, is_predicted, split, share, attributes):
        assert actual_error.startswith(error) if error else not actual_error, actual_error
        assert len(texts) == (change is not None) and all(text.startswith(f"changed: {change}") for text in texts)


def export_again(words, *changes):
    """Export with changed data. Returns what is printed about it."""
    create = {"create_dataset": changed(TASKS["lines"]["create_dataset"], *changes)}
    with mock.patch.dict(TASKS["lines"], create), contextlib.redirect_stderr(io.StringIO()) as stderr:
        run_main(export, "lines", tokens, words)
    return stderr.getvalue()


def test_an_export_says_that_its_inputs_are_others(runs):
    runs.train(1, "run", *FLAGS, task="lines")
    words = [runs.checkpoints("run")[-1], runs.root / "out.pt"]
    message = "changed: The train set has samples that differ"
    for share, expected in ((0, ""), (0.25, message), (1, ALL.format("train", 40))):
        [output] = run_ranks(1, export_again, words, "train", share, {})
        assert output.startswith(expected) and bool(output) == bool(share), output
    assert (runs.root / "out.pt").exists()
