"""`fingerprint` in train records and checkpoints: equal where the state is, and compared when a run resumes."""

import os
from unittest import mock

import pytest

from ranks import run_ranks, slow
from training import train_flags
from utils.training.state import TrainState

SMALL = "--dataset_size 48 --epochs 1 --log_interval 1 --global_batch_size 16".split()


def fingerprints(runs, name):
    by_step = {record["step"]: record["fingerprint"] for record in runs.records(name, "train")}
    assert all(len(value) == 16 and int(value, 16) for value in by_step.values()) and len({*by_step.values()}) == len(
        by_step
    )
    return by_step


def complaints(runs, name):
    return [line for event in runs.events(name, "resumed") for line in event["changed"] if "fingerprint" in line]


@pytest.mark.guarantee("fingerprint")
def test_with_exact_sums_it_is_equal_on_1_2_and_4_ranks_and_after_a_resume_on_another_number(runs):
    words = [*SMALL, "--reduction", "exact", "--optimizer", "adamw"]
    for ranks in (1, 2, 4):
        runs.train(ranks, f"r{ranks}", *words, "--save_every_steps", 1, "--keep_last", 9)
    whole = fingerprints(runs, "r1")
    assert [*whole] == [1, 2, 3] and fingerprints(runs, "r2") == fingerprints(runs, "r4") == whole
    runs.train(1, "resumed", *words, "--resume_from", runs.checkpoints("r4")[0])
    assert fingerprints(runs, "resumed") == {step: whole[step] for step in (2, 3)} and not complaints(runs, "resumed")
    assert runs.last("r4")["provenance"]["fingerprint"] == whole[3]


def load_and_flip(words, wrong_rank):
    """Train; on this rank one bit of a weight is another one after the state was loaded."""
    plain = TrainState.load_state_dict

    def load(state, payload):
        plain(state, payload)
        if int(os.environ["RANK"]) == wrong_rank:
            next(state.model.parameters()).data.view(-1)[0] *= -1

    with mock.patch.object(TrainState, "load_state_dict", load):
        train_flags(words)


@pytest.mark.guarantee("fingerprint")
def test_a_state_with_other_bits_after_loading_is_reported_with_its_rank(runs):
    words = runs.words("run", *SMALL, "--save_every_steps", 1, "--keep_last", 9)
    run_ranks(2, train_flags, [*words, "--max_steps", "1"])
    with pytest.raises(
        AssertionError, match="The weights or the optimizer state of rank 1 on .* differ from those of the other ranks"
    ):
        run_ranks(2, load_and_flip, [*words, "--resume_from", "auto"], 1)
    (line,) = complaints(runs, "run")
    assert line.startswith("The state that rank 1 on ") and line.endswith("an optimizer that converts what it loads.")
    assert line in runs.log("run")


@pytest.mark.guarantee("fingerprint")
@pytest.mark.parametrize("optimizer", [slow("sgd"), "adamw"])
def test_of_a_sharded_state_it_is_that_of_the_whole(runs, optimizer):
    """A sharded run and one process load each other's checkpoints, and compute the fingerprint that is in them."""
    words = [*SMALL, "--optimizer", optimizer, "--save_every_steps", 1, "--keep_last", 9]
    runs.train(2, "sharded", *words, "--sharding", "zero3")
    saved = runs.last("sharded")["provenance"]["fingerprint"]
    assert saved == fingerprints(runs, "sharded")[3]
    runs.train(1, "whole", *words, "--epochs", 2, "--resume_from", runs.checkpoints("sharded")[-1])
    runs.train(
        3, "shards", *words, "--epochs", 3, "--sharding", "zero2", "--resume_from", runs.checkpoints("whole")[-1]
    )
    for name in ("whole", "shards"):
        assert runs.events(name, "resumed") and not complaints(runs, name)
