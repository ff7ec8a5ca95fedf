"""What a fork draws in an evaluation is a function of the sample's place: alike on any ranks, in every evaluation."""

import json
import os
import random
import re
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import model
import scripts.predict
import train
from ranks import run_ranks, slow
from tasks import TASKS, image_loss
from test_predict_and_export import run_main
from training import train_flags

FLAGS = "--dataset_size 46 --epochs 2 --no-use_amp --lr 0.02 --eval_batch_size 3 --save_every 0".split()


def noisy_loss(net, batch):
    """As of a diffusion model: noise and times are drawn for each sample, in training and evaluation."""
    noise, times = torch.randn_like(batch[0]), torch.randint(1, 9, (len(batch[0]),))
    return image_loss(net, (batch[0] + noise / times[:, None, None, None], batch[1]))


def dropped_loss(net, batch):
    return image_loss(net, (F.dropout(batch[0], 0.5), batch[1]))


def sampled_loss(net, batch):
    """Some of the samples are drawn, and the draws need several calls."""
    chosen = torch.stack([torch.bernoulli(torch.tensor(0.5)) for _ in batch[1]]) + 0.5
    loss = F.cross_entropy(net(batch[0]), batch[1], reduction="none") * chosen
    return {"loss": (loss.sum(), len(batch[1])), "chosen": (chosen.sum(), len(batch[1]))}


def predict(net, batch):
    return {"score": net(batch[0])[:, 0] + torch.randn(len(batch[0]))}


def summarize(outputs):
    return {"in_order": (outputs["score"].double() * torch.arange(len(outputs["score"]))).sum()}


def train_drawing(flags, loss):
    with (
        mock.patch.dict(TASKS["images"], compute_loss=loss),
        mock.patch.multiple(model, create=True, predict=predict),
        mock.patch.multiple(model, create=True, summarize=summarize),
    ):
        random.seed(os.getpid())
        torch.manual_seed(os.getpid())
        return train_flags(flags)


@pytest.mark.guarantee("eval-only", "evaluation-means")
@pytest.mark.parametrize(
    ("loss", "worlds"),
    [
        (noisy_loss, ((1, 0), (2, 1))),
        slow(dropped_loss, ((1, 2), (4, 0))),
        slow(sampled_loss, ((1, 0), (2, 0), (4, 1))),
    ],
)
def test_draws_are_the_same_on_any_number_of_ranks_and_in_eval_only(runs, loss, worlds):
    """10 validation samples in 4 micro-batches. The order of the sums is that of exact ones; the draws are alike in
    fast ones too, up to the last bit of the mean."""
    for ranks, workers in worlds:
        words = runs.words(f"on{ranks}", *FLAGS, "--num_workers", workers, "--global_batch_size", 16)
        run_ranks(ranks, train_drawing, [*words, "--reduction", "exact"], loss)
        records = runs.records(f"on{ranks}", "eval")
        assert len(records) == 2 and records == runs.records("on1", "eval")
        for size, is_equal in (("3", True), ("5", False)):
            again = [*words, "--reduction", "exact", "--eval_only", "--eval_batch_size", size]
            run_ranks(3 - ranks % 2, train_drawing, again, loss)
            file = next(runs.folder(f"on{ranks}").glob("eval-*.json"))
            [actual] = json.loads(file.read_text())["records"]
            assert (actual in records) == is_equal
            file.unlink()
        run_ranks(ranks, train_drawing, [*words, "--eval_only"], loss)
        [actual] = runs.json(f"on{ranks}", file.name)["records"]
        expected = next(record for record in records if record["step"] == actual["step"])
        names = ["loss"]
        names += ["in_order"]
        for name in names:
            assert actual[name] == pytest.approx(expected[name], rel=1e-12)


def predict_drawing(words):
    run_main(scripts.predict, "images", predict, words)


def test_predict_py_draws_what_summarize_has_seen(runs):
    run_ranks(1, train_drawing, runs.words("run", *FLAGS), noisy_loss)
    for ranks in (1, 2):
        run_ranks(ranks, predict_drawing, [runs.checkpoints("run")[-1], "--out", runs.root / "out.pt"])
        summary = summarize(torch.load(runs.root / "out.pt", weights_only=True))
        assert summary["in_order"].item() == runs.records("run", "eval")[-1]["in_order"]


def train_watching(flags):
    """Train, and return whether each evaluation left torch's generator as it was, and what log_images was given."""
    plain, unchanged, seen, at = train.validate, [], [], []

    def validate(training):
        before = torch.random.get_rng_state()
        at.append(training.state.progress.step)
        plain(training)
        unchanged.append(torch.equal(torch.random.get_rng_state(), before))

    def log_images(net, batch):
        seen.append((net.training, len(batch[1]), at[-1], torch.rand(()).item()))
        return {"x": torch.zeros(1, 3, 8, 8, dtype=torch.uint8)}

    with (
        mock.patch.object(train, "validate", validate),
        mock.patch.multiple(model, create=True, log_images=log_images),
    ):
        train_drawing(flags, noisy_loss)
    return unchanged, seen


@pytest.mark.guarantee("eval-only")
def test_training_draws_the_same_with_and_without_evaluations(runs):
    """log_images is called on rank 0, in evaluation mode, with the same random numbers in each evaluation."""
    for name, every in (("with", "1"), ("without", "9")):
        words = runs.words(name, *FLAGS, "--eval_every", every, "--num_workers", 0, "--log_interval", 1)
        (unchanged, seen), (_, of_rank_1) = run_ranks(2, train_watching, words)
        steps = [6, 12] if name == "with" else [12]
        assert [(mode, step) for mode, _, step, _ in seen] == [(False, step) for step in steps] and not of_rank_1
        assert len({draw for *_, draw in seen}) == 1 and all(unchanged) and len(unchanged) == len(steps)
    assert [len(runs.records(name, "eval")) for name in ("with", "without")] == [2, 1]
    assert runs.records("with", "train")[-1]["fingerprint"] == runs.records("without", "train")[-1]["fingerprint"]


def train_without_held_out(flags):
    plain = TASKS["images"]["create_dataset"]
    only_train = {"create_dataset": lambda config, split: plain(config, split) if split == "train" else None}
    with mock.patch.dict(TASKS["images"], only_train):
        return train_watching(flags)[1]


def test_without_a_held_out_set_images_of_the_training_set_are_logged(runs):
    seen, _ = run_ranks(2, train_without_held_out, runs.words("run", *FLAGS))
    assert [entry[:3] for entry in seen] == [(False, 4, 6), (False, 4, 12)]
    assert re.search("evaluation +none: the data has no validation or test set", runs.log("run"))
