# extra: verify and template
"""scripts/verify.py tells a dropout that is active in evaluation from other random numbers, which are allowed, and
notes label smoothing in evaluation, and metrics that count otherwise than the loss."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forks
from lib.verify.randomness import DropoutRecorder
from ranks import copy_repository
from test_verify import FLAGS, INVARIANTS, outcomes

NOISE = """
def compute_loss(model, batch):
    noise = torch.randn_like(batch[0]) * torch.rand(len(batch[0]), 1, 1, 1, dtype=batch[0].dtype)
    logits = model(batch[0] + noise)
    return {"loss": (F.cross_entropy(logits, batch[1], reduction="sum"), len(logits))}
"""
OF_NUMPY = """
def compute_loss(model, batch):
    import numpy
    loss = F.cross_entropy(model(batch[0] * numpy.random.rand()), batch[1], reduction="sum")
    return {"loss": (loss, len(batch[1]))}
"""
NOT_IN_TRAINING = NOISE.replace("torch.randn_like(batch[0])", "torch.randn_like(batch[0]) * model.training")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "ranks", "broken", "message"),
    [
        (
            NOISE,
            2,
            None,
            "Please check: loss depends on random numbers, which are the same ones for each --eval_batch_size.",
        ),
        (NOISE, 0, None, "Please check: loss depends on random numbers"),
        (
            NOT_IN_TRAINING,
            2,
            None,
            "In sets of 11 and 1 samples each counts once. Loss and metrics are as in one process.  [",
        ),
        (OF_NUMPY, 2, "evaluation", "random numbers of Python or numpy"),
    ],
)
def test_draws_in_an_evaluation_are_a_note_unless_they_are_not_keyed(tmp_path, code, ranks, broken, message):
    fork = copy_repository(tmp_path)
    with (fork / "model.py").open("a") as file:
        file.write(code)
    ended = forks.run(fork, ranks, "scripts/verify.py", *FLAGS)
    (line,) = re.findall("^(?:ok    |BROKEN)  evaluation .*", ended.out, re.MULTILINE)
    assert message in line, ended.text
    if broken:
        assert line.startswith("BROKEN")
    else:
        assert ended.code == 0 and outcomes(ended.out) == dict.fromkeys(INVARIANTS, "ok"), ended.text


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


def left_in_training(module):
    net = nn.Sequential(module).eval()
    module.train()
    return net


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (nn.Dropout(0.5).eval(), None),
        (left_in_training(nn.Dropout(0.5)), "dropout"),
        (left_in_training(nn.Dropout2d(0.5)), "dropout2d"),
        (left_in_training(nn.AlphaDropout(0.5)), "alpha_dropout"),
        (left_in_training(nn.RReLU()), "rrelu"),
        (Attention(0.0), None),
        (Attention(0.5), "scaled_dot_product_attention"),
        (lambda x: torch.dropout(x, 0.5, True), "dropout"),
        (lambda x: F.dropout(x, 0.0), None),
        (lambda x: x * torch.bernoulli(torch.ones_like(x)), None),  # may be wanted
    ],
)
def test_a_dropout_that_draws_is_named(net, name):
    with torch.no_grad(), DropoutRecorder() as dropping:
        net(-torch.ones(2, 3, 4, 4))
    assert dropping.dropout_calls == [name] * (name is not None)


SMOOTHED = """
def compute_loss(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum", label_smoothing=0.1 * CONDITION)
    return {"loss": (loss, len(batch[1])), "sizes": (loss.detach(), COUNT)}
"""
IN_EVALUATION = "Please check: Labels are smoothed in evaluation too"
COUNTS = (
    "Please check: Metrics of training samples are means over other counts than the loss. The counts per sample are"
    " loss 1, sizes 2."
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "count", "in_loss", "in_evaluation"),
    [
        ("1", "len(batch[1])", "", IN_EVALUATION),
        ("torch.is_grad_enabled()", "len(batch[1])", "", ""),
        ("torch.is_grad_enabled()", "2 * len(batch[1])", COUNTS, ""),
    ],
)
def test_smoothing_in_evaluation_and_other_counts_are_notes(tmp_path, condition, count, in_loss, in_evaluation):
    fork = copy_repository(tmp_path)
    with (fork / "model.py").open("a") as file:
        file.write(SMOOTHED.replace("CONDITION", condition).replace("COUNT", count))
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS)
    assert ended.code == 0, ended.text
    for name, note in (("loss", in_loss), ("evaluation", in_evaluation)):
        (line,) = re.findall(f"^ok      {name} .*", ended.out, re.MULTILINE)
        assert note in line and bool(note) == ("Please check" in line), line


@pytest.mark.parametrize(
    ("loss", "is_found"),
    [
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), True),
        (lambda x, y: F.cross_entropy(x, y, None, None, -100, None, "sum", 0.1), True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (nn.CrossEntropyLoss(), False),
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.0), False),
    ],
)
def test_smoothed_labels_are_seen(loss, is_found):
    with torch.no_grad(), DropoutRecorder() as seen:
        loss(torch.ones(2, 3), torch.tensor([0, 1]))
    assert seen.has_label_smoothing == is_found
