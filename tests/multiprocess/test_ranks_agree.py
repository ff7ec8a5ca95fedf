"""What one rank alone meets, or knows, does not part it from the others; and a start that fails leaves what was saved."""

import math
import os
import signal

import pytest

import ddp_utils
import train
from config import TrainingConfig
from images import folder_of_images, save_images
from ranks import run_ranks
from test_refusals import refusal_of
from training import TINY
from utils import ending


def other_data_on_rank_1(words, root):
    """Two hosts, two folders that should be alike."""
    own = f"{root}{os.environ['RANK']}"
    train.train(TrainingConfig.from_args([*words, "--data_dir", own]))


def test_ranks_that_see_different_data_are_refused(runs):
    for rank in (0, 1):
        words = folder_of_images(runs.root / f"images{rank}")
    (runs.root / "images1/train/dog/003.png").rename(runs.root / "images1/train/cat/00a.png")
    flags = [*TINY, *words, "--run_dir", str(runs.folder("run"))]
    with pytest.raises(AssertionError, match=r"holds other data on \S+ \(rank 1\) than on \S+ \(rank 0\); make them alike"):
        run_ranks(2, other_data_on_rank_1, flags, str(runs.root / "images"))


def test_overwrite_with_a_bad_flag_leaves_the_run_as_it_was(runs):
    runs.train(2, "run", "--dataset_size", 16, "--epochs", 1)
    files = {
        path: path.read_bytes()
        for path in runs.folder("run").rglob("*")
        if path.is_file() and path.name != "claim.json" and path.parent.name != "watch"
    }
    for flags in (["--data_dir", "/typo", "--dataset", "imagefolder"], ["--model", "resnet81"], ["--best_metric", "f1"]):
        assert "Refused" in refusal_of(runs, *flags, "--overwrite")
        assert {path: path.read_bytes() for path in files} == files
    best = runs.folder("run") / "checkpoints" / "best.pt"
    runs.train(2, "run", "--dataset_size", 16, "--epochs", 1, "--overwrite", "--init_from", best)  # read before it is replaced
    assert best.exists() and not list(runs.folder("run").glob("superseded-*"))  # replaced, not continued


def own_cards_met(words):
    """Whether this rank finds its own card of an earlier run in the store, run by run."""
    plain, met = ddp_utils._introduce, []

    def introduce(store, launch, *args):
        met.append(store.check([f"card/{launch.rank}"]))
        return plain(store, launch, *args)

    ddp_utils._introduce = introduce
    assert train_twice(words) == ["completed"] * 2
    return met


def train_twice(words):
    states = []
    for name in ("a", "b"):
        flags = [*words[:-1], f"{words[-1]}{name}"]
        states.append(train.train(TrainingConfig.from_args(flags))["state"])
    return states


def test_two_runs_in_each_of_two_processes(runs):
    words = [*TINY, "--dataset_size", "16", "--epochs", "1", "--run_dir", str(runs.folder("run"))]
    assert run_ranks(2, own_cards_met, words) == [[False, False]] * 2


def one_rank_evaluates(words):
    """A validation set of one micro-batch, and a metric whose last function overflows."""
    plain = train.compute_loss

    def loss(model, batch):
        loss_sum, metrics = plain(model, batch)
        return loss_sum, metrics | {"perplexity": (loss_sum * 1e4, len(batch[1]), math.exp)}

    train.compute_loss = loss
    outcome = train.train(TrainingConfig.from_args(words))
    return outcome["best_value"], outcome["state"]


def test_ranks_agree_on_what_is_best_where_one_alone_evaluates(runs):
    words = [*TINY, "--dataset_size", "16", "--epochs", "2", "--best_metric", "min:perplexity", "--run_dir", str(runs.folder("run"))]
    assert run_ranks(2, one_rank_evaluates, words) == [(None, "completed")] * 2


def evaluations_are_not_numbers(words):
    plain = train.compute_loss

    def loss(model, batch):
        loss_sum, metrics = plain(model, batch)
        return (loss_sum if model.training else loss_sum * math.nan), metrics

    train.compute_loss = loss
    outcome = train.train(TrainingConfig.from_args(words))
    return outcome["best_value"], outcome["state"]


def test_an_evaluation_whose_loss_is_not_finite_is_not_the_best(runs):
    words = [*TINY, "--dataset_size", "16", "--epochs", "1", "--run_dir", str(runs.folder("run"))]
    assert run_ranks(2, evaluations_are_not_numbers, words) == [(None, "completed")] * 2
    assert runs.records("run", "eval")[0]["loss"] is None and runs.records("run", "eval")[0]["top1"] is not None


def test_a_rank_that_lost_its_peer_reports_after_the_one_that_failed(monkeypatch):
    """torchrun blames the earliest second."""
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:51369.")
    own = ddp_utils.dist.DistBackendError("NCCL error: ncclInvalidUsage, duplicate GPU detected")  # of this rank: nothing is hidden
    for error, seconds in ((gloo, [ending.SECONDS_OF_BLAME]), (own, []), (KeyError("a bug"), [])):
        slept = []
        monkeypatch.setattr(ending.time, "sleep", slept.append)
        monkeypatch.setattr(train, "train", lambda config, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            train.main([])
        assert slept == seconds


def stopped_in_the_last_evaluation(words):
    plain = train.evaluate

    def evaluate(model, loader, *args):
        if loader.dataset.split == "test":
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(model, loader, *args)

    train.evaluate = evaluate
    return train.train(TrainingConfig.from_args(words))["state"]


def test_a_stop_in_the_last_evaluation_is_a_preemption_and_resume_makes_it(runs):
    words = folder_of_images(runs.root / "images")
    save_images(runs.root / "images" / "test", {"cat": 20, "dog": 20})
    flags = [*TINY, *words, "--epochs", "1", "--run_dir", str(runs.folder("run"))]
    assert run_ranks(2, stopped_in_the_last_evaluation, flags) == ["preempted"] * 2
    runs.train(2, "run", *words, "--epochs", "1", "--resume_from", "auto")
    assert runs.json("run", "summary.json")["test"][0]["count"] == 40
