# extra: replay and exact
"""scripts/replay.py: a step of a run on several ranks, repeated bitwise in one process, and what it finds out."""

import re
import signal
import sys
from unittest import mock

import pytest
import torch
from test_exact_reduction import train_until
from torch import nn

import replay
import tasks
from ranks import run_ranks
from training import difference

FLAGS = "--dataset_size 142 --epochs 3 --global_batch_size 40 --lr 0.05 --clip_grad_norm 1".split()
FLAGS += ["--ema_decay", "0.9"]
FLAGS += "--log_interval 1 --save_every_steps 1 --keep_last 2 --keep_every 5 --resume_from auto".split()


def replayed(run, step, *words, changes=None, task="images"):
    """The exit code and the output of replay.py."""
    words = ["replay.py", str(run), "--step", str(step), *map(str, words)]
    printed = []
    with (
        mock.patch.dict(tasks.TASKS["images"], changes or {}),
        tasks.using(task),
        mock.patch.object(sys, "argv", words),
        mock.patch("builtins.print", lambda *texts, **_: printed.append(" ".join(map(str, texts)))),
    ):
        code = replay.main()
    return code, "\n".join(printed)


def replayed_steps(run, dumps):
    return {step: replayed(run, step, "--dump", dump) for step, dump in dumps.items()}


@pytest.mark.slow
def test_steps_of_a_killed_run_on_four_ranks_are_bitwise_equal_in_one_process(runs, tmp_path):
    words = runs.words("run", *FLAGS, "--reduction", "exact")
    for step, victim in ((3, 2), (7, 0)):
        with pytest.raises(AssertionError, match="exit codes .*-9"):
            run_ranks(4, train_until, words, signal.SIGKILL, step, victim)
    run_ranks(4, train_until, words, signal.SIGKILL, 0, 0)
    kept = {int(path.stem[5:]): path for path in runs.checkpoints("run")}
    records = {record["step"]: record for record in runs.records("run", "train")}
    dumps = {step: tmp_path / f"{step}.pt" for step in range(3, 13)}
    (results,) = run_ranks(1, replayed_steps, runs.folder("run"), dumps)
    for step, (code, text) in results.items():
        assert code == 0 and re.search(rf"The records of the run from step \d+ to {step} are bitwise equal\.", text), (
            text
        )
        dump = torch.load(dumps[step], weights_only=True)
        assert (dump["loss"], dump["norm"]) == (records[step]["loss"], records[step]["grad_norm"])
        assert len(dump["losses"]) == len(dump["indices"]) == (22 if step % 4 == 0 else 40)
        if step in kept:
            assert f"The state after the step and step_{step:08d}.pt are bitwise equal." in text
            weights = torch.load(kept[step], weights_only=True)["model"]
            assert difference(dump["after"], {name: weights[name] for name in dump["after"]}) == []


def replayed_terms(run, dump):
    return replayed(run, 6, "--dump", dump, task="terms")


@pytest.mark.guarantee("terms")
def test_a_step_of_a_loss_with_terms_is_bitwise_equal_in_one_process(runs, tmp_path):
    runs.train(2, "run", *FLAGS, "--reduction", "exact", task="terms")
    ((code, text),) = run_ranks(1, replayed_terms, runs.folder("run"), tmp_path / "6.pt")
    assert code == 0 and re.search(r"The records of the run from step \d+ to 6 are bitwise equal\.", text), text
    dump, record = torch.load(tmp_path / "6.pt", weights_only=True), runs.records("run", "train")[5]
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in dump["gradients"].values()])).item()
    assert dump["loss"] == record["loss"] and norm == pytest.approx(record["grad_norm"], rel=1e-5)
    assert len(dump["losses"]) == 40 and min(dump["losses"]) > 0


class NoWhite(nn.Module):
    """NaN for a white image, whose values are 2.5."""

    def forward(self, x):
        return x + 0 * torch.log(2.4 - x.mean((1, 2, 3), keepdim=True))


def images_with_a_white_one(config, split):
    data = tasks.create_images(config, split)
    if split == "train":
        data.images[WHITE], data.augment = 255, "none"
    return data


def net_that_knows_no_white(config, device):
    return nn.Sequential(NoWhite(), tasks.SmallNet(True, 10))


WHITE = 17
CHANGES = {"create_model": net_that_knows_no_white, "create_dataset": images_with_a_white_one}


def train_with_a_white_image(words):
    with mock.patch.dict(tasks.TASKS["images"], CHANGES):
        return tasks.train_task("images", words)


def test_a_nan_is_traced_to_its_sample_and_module(runs):
    assert run_ranks(2, train_with_a_white_image, runs.words("run", *FLAGS)) == ["completed"] * 2
    step = runs.events("run", "skipped_step")[1]["step"]
    [(code, text)] = run_ranks(1, replayed_with_a_white_image, runs.folder("run"), step)
    assert code == 0 and re.search(rf"\nsample {WHITE} +in 0 \(NoWhite\)", text), text
    assert len(re.findall(r"\nsample \d+ +in ", text)) == 1 and len(re.findall(r"\nmicro-batch \d+ +in 0 ", text)) == 1
    assert re.search(rf"\n{WHITE} +nan\n", text) and "loss nan, gradient norm nan" in text


def replayed_with_a_white_image(run, step):
    return replayed(run, step, changes=CHANGES)
