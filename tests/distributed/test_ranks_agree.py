"""What only one rank sees or knows does not separate it from the others; a start that fails leaves what was saved."""

import math
import os
import signal
from unittest import mock

import pytest

import ddp_utils
import tasks
import train
from config import UserError
from ranks import run_ranks
from tasks import TASKS, Images, image_loss
from training import train_flags
from utils.run import failures as ending
from utils.run import provenance

SMALL = "--dataset_size 16 --epochs 1".split()


def other_data_on_rank_1(words):
    """As where two hosts have folders that should be alike."""
    with mock.patch.object(provenance, "fingerprint", lambda dataset: os.environ["RANK"]):
        train_flags(words)


def test_ranks_that_see_different_data_are_refused(runs):
    with pytest.raises(
        AssertionError, match=r"holds other data on \S+ \(rank 1\) than on \S+ \(rank 0\); make them alike"
    ):
        run_ranks(2, other_data_on_rank_1, runs.words("run", *SMALL))


def refusals_of(words, changes):
    said = []
    for change in changes:
        with pytest.raises(UserError) as refused:
            train_flags([*words, *change])
        said.append(str(refused.value))
    return said


def test_overwrite_with_a_bad_flag_leaves_the_run_as_it_was(runs):
    runs.train(2, "run", *SMALL)
    files = {
        path: path.read_bytes()
        for path in runs.folder("run").rglob("*")
        if path.is_file() and path.name != "claim.json" and path.parent.name != "watch"
    }
    bad = [["--best_metric", "f1"], ["--activation_checkpointing"]]
    said = run_ranks(2, refusals_of, runs.words("run", *SMALL, "--overwrite"), bad)[1]
    assert [text.split(":")[0].split("=")[0] for text in said] == [change[0][2:] for change in bad], said
    assert {path: path.read_bytes() for path in files} == files


def own_cards_met(words):
    """Whether this rank finds its own card of an earlier run in the store, for each of two runs in this process."""
    plain, met = ddp_utils._introduce, []

    def introduce(store, launch, *args):
        met.append(store.check([f"card/{launch.rank}"]))
        return plain(store, launch, *args)

    with mock.patch.object(ddp_utils, "_introduce", introduce):
        for name in ("a", "b"):
            assert train_flags([*words, "--run_dir", f"{words[-1]}{name}"])["state"] == "completed"
    return met


def test_two_runs_in_each_of_two_processes(runs):
    assert (
        run_ranks(2, own_cards_met, [*runs.words("run", *SMALL), "--run_dir", str(runs.folder("run"))])
        == [[False, False]] * 2
    )


def train_with_loss(words, loss):
    with mock.patch.dict(TASKS["images"], {"compute_loss": loss}):
        outcome = train_flags(words)
    return outcome["best_value"], outcome["state"]


def with_overflowing_metric(model, batch):
    loss_sum, metrics = image_loss(model, batch)
    return loss_sum, metrics | {"perplexity": (loss_sum * 1e4, len(batch[1]), math.exp)}


def test_ranks_agree_on_what_is_best_where_one_alone_evaluates(runs):
    """A validation set of one micro-batch, and a metric whose last function overflows."""
    words = runs.words("run", *SMALL, "--epochs", 2, "--best_metric", "min:perplexity")
    assert run_ranks(2, train_with_loss, words, with_overflowing_metric) == [(None, "completed")] * 2


def not_a_number_in_evaluation(model, batch):
    loss_sum, metrics = image_loss(model, batch)
    return (loss_sum if model.training else loss_sum * math.nan), metrics


def test_an_evaluation_whose_loss_is_not_finite_is_not_the_best(runs):
    assert (
        run_ranks(2, train_with_loss, runs.words("run", *SMALL), not_a_number_in_evaluation)
        == [(None, "completed")] * 2
    )
    assert runs.records("run", "eval")[0]["loss"] is None and runs.records("run", "eval")[0]["top1"] is not None


def test_a_rank_that_lost_its_peer_reports_after_the_one_that_failed(monkeypatch):
    """torchrun blames the rank that failed first."""
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:51369.")
    # of this rank: nothing is hidden
    own = ddp_utils.dist.DistBackendError("NCCL error: ncclInvalidUsage, duplicate GPU detected")
    for error, seconds in ((gloo, [ending.SECONDS_OF_BLAME]), (own, []), (KeyError("a bug"), [])):
        slept = []
        monkeypatch.setattr(ending.time, "sleep", slept.append)
        monkeypatch.setattr(train, "train", lambda config, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            train.main([])
        assert slept == seconds


def with_a_test_set(config, split):
    return Images(40, split) if split == "test" else tasks.create_images(config, split)


def train_with_a_test_set(words, is_stopped):
    plain = train.evaluate

    def evaluate(model, loader, *args):
        if loader.dataset.split == "test" and is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(model, loader, *args)

    with (
        mock.patch.dict(TASKS["images"], {"create_dataset": with_a_test_set}),
        mock.patch.object(train, "evaluate", evaluate),
    ):
        return train_flags(words)["state"]


def test_a_stop_in_the_last_evaluation_is_a_preemption_and_resume_makes_it(runs):
    words = runs.words("run", *SMALL)
    assert run_ranks(2, train_with_a_test_set, words, True) == ["preempted"] * 2
    assert run_ranks(2, train_with_a_test_set, [*words, "--resume_from", "auto"], False) == ["completed"] * 2
    assert runs.json("run", "summary.json")["test"][0]["count"] == 40
