# extra: template
"""Ranks agree on what only one of them sees or knows; a failed start leaves saved files unchanged."""

import math
import os
import re
import signal
from unittest import mock

import pytest
import torch

import ddp_utils
import tasks
from ranks import run_ranks
from tasks import TASKS, Images, create_images, image_loss
from test_run_folder import contents
from training import assert_same_state, train_flags
from utils.settings.errors import UserError
from utils.training.evaluation import Evaluation

SMALL = "--dataset_size 16 --epochs 1".split()


def train_on_lines(words, changed_ranks, share=0.5):  # extra: sketches
    """Train on lines, a set without names; on these ranks a share of the lines differs. Returns the error."""
    plain = TASKS["lines"]["create_dataset"]

    def create(config, split):
        data = plain(config, split)
        if data and split == "train" and int(os.environ["RANK"]) in changed_ranks:
            count = int(share * len(data))
            data.lines[:count] = [(line + 1) % 16 for line in data.lines[:count]]
        return data

    with mock.patch.dict(TASKS["lines"], {"create_dataset": create}):
        try:
            return train_flags(words, task="lines")["state"]
        except UserError as error:
            return str(error)


@pytest.mark.guarantee("other-samples")  # extra: sketches
def test_data_without_names_are_compared_by_decoded_samples(runs):
    """Over the ranks, and with the checkpoint of a resumed run."""
    words = runs.words("run", *SMALL, "--epochs", 2, "--max_steps", 1, "--data_dir", "{d}")
    for text in run_ranks(2, train_on_lines, words, [1]):
        seen = r"^\S+ \(rank 1\) and \S+ \(rank 0\) have different data in --data_dir {d}\. Make create_dataset i"
        assert re.search(seen, text), text  # one host has one copy
    assert run_ranks(2, train_on_lines, words, []) == ["completed"] * 2
    again = [*runs.words("run", *SMALL, "--epochs", 2, "--data_dir", "{d}"), "--resume_from", "auto"]
    line = "The training set has samples that differ from the checkpoint's: {} of 16 compared ones."
    for text in run_ranks(2, train_on_lines, again, [0, 1], 0.6):
        assert text.startswith(
            f"{line.format(9)}\nThese values must be as they were for --resume_from. Restore them, or start a new run"
        ), text
    assert run_ranks(1, train_on_lines, [*again, "--global_batch_size", "8"], [0], 0.5) == ["completed"]
    assert line.format(8) in runs.events("run", "resumed")[-1]["changed"] and line.format(8) in runs.log("run")


def errors_of(words, changes):
    texts = []
    for change in changes:
        with pytest.raises(UserError) as error:
            train_flags([*words, *change])
        texts.append(str(error.value))
    return texts


@pytest.mark.guarantee("nothing-lost")
def test_overwrite_with_a_bad_flag_leaves_the_run_unchanged(runs):
    runs.train(2, "run", *SMALL)
    before = contents(runs.folder("run"))
    bad = [["--best_metric", "f1"]]
    bad += [["--activation_checkpointing"]]  # extra: compile
    texts = run_ranks(2, errors_of, runs.words("run", *SMALL, "--overwrite"), bad)[1]
    for text, (flag, *_) in zip(texts, bad, strict=True):
        assert text.startswith((flag, f"{flag[2:]}=")), text
    assert {path: path.read_bytes() for path in before} == before


def train_two_runs(words, folder):
    """For each of two runs in this process: whether the store has what this rank told in the earlier run."""
    plain, stored = ddp_utils.exchange_rank_info, []

    def exchange_rank_info(launch, store, rank_info, **options):
        stored.append(store.check([f"rank_info/{launch.rank}"]))
        return plain(launch, store, rank_info, **options)

    with mock.patch.object(ddp_utils, "exchange_rank_info", exchange_rank_info):
        for name in "ab":
            assert train_flags([*words, "--run_dir", str(folder / name)])["state"] == "completed"
    return stored


@pytest.mark.guarantee("one-process")
def test_two_runs_in_the_same_processes_are_equal(runs):
    assert run_ranks(2, train_two_runs, runs.words("run", *SMALL), runs.root) == [[False, False]] * 2
    assert_same_state(runs.last("a"), runs.last("b"))


def train_with_loss(words, loss):
    with mock.patch.dict(TASKS["images"], {"compute_loss": loss}):
        outcome = train_flags(words)
    return outcome["best_value"], outcome["state"]


def with_overflowing_metric(model, batch):
    metrics = image_loss(model, batch)
    return metrics | {"perplexity": (metrics["loss"][0] * 1e4, len(batch[1]), math.exp)}


def not_a_number_in_evaluation(model, batch):
    metrics = image_loss(model, batch)
    loss_sum, count = metrics["loss"]
    return metrics | {"loss": (loss_sum if model.training else loss_sum * math.nan, count)}


@pytest.mark.parametrize(
    ("loss", "metric"), [(with_overflowing_metric, "min:perplexity"), (not_a_number_in_evaluation, "top1")]
)
def test_ranks_agree_that_a_non_finite_value_is_not_the_best(runs, loss, metric):
    """Only one rank evaluates: the validation set has one micro-batch."""
    words = runs.words("run", *SMALL, "--epochs", 2, "--best_metric", metric)
    assert run_ranks(2, train_with_loss, words, loss) == [(None, "completed")] * 2
    assert runs.records("run", "eval")[0]["loss" if metric == "top1" else "perplexity"] is None


def in_another_order_on_rank_1(model, batch):
    metrics = image_loss(model, batch)
    return dict(reversed(metrics.items())) if os.environ["RANK"] == "1" else metrics


def test_metrics_in_another_order_on_a_rank_are_rejected(runs):
    """They are summed over the ranks by position."""
    with pytest.raises(AssertionError, match="reports different metrics on .*. Report the same metrics on all"):
        run_ranks(2, train_with_loss, runs.words("run", *SMALL), in_another_order_on_rank_1)


def with_a_test_set(config, split):
    return Images(40, split) if split == "test" else tasks.create_images(config, split)


def train_with_a_test_set(words, is_stopped):
    plain = Evaluation.evaluate_all_weights

    def records(self, split, *rest, **options):
        if split == "test" and is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, split, *rest, **options)

    with (
        mock.patch.dict(TASKS["images"], {"create_dataset": with_a_test_set}),
        mock.patch.object(Evaluation, "evaluate_all_weights", records),
    ):
        return train_flags(words)["state"]


@pytest.mark.guarantee("test-split")
def test_a_stop_in_the_last_evaluation_is_a_preemption_and_a_resume_repeats_it(runs):
    words = runs.words("run", *SMALL)
    assert run_ranks(2, train_with_a_test_set, words, True) == ["preempted"] * 2
    assert run_ranks(2, train_with_a_test_set, [*words, "--resume_from", "auto"], False) == ["completed"] * 2
    assert runs.json("run", "summary.json")["test"][0]["count"] == 40


def train_without_labels(words):
    def create(config, split):
        data = create_images(config, split)
        if split == "val":
            data.labels = torch.full((len(data),), -100)  # cross_entropy ignores them: 0 / 0
        return data

    def loss(net, batch):
        metrics = image_loss(net, batch)
        return metrics | {"loss": (metrics["loss"][0], (batch[1] >= 0).sum())}

    with mock.patch.dict(TASKS["images"], {"create_dataset": create, "compute_loss": loss}):
        return train_flags(words)["state"]


def test_an_evaluation_without_labels_is_a_warning_and_an_event(runs):
    assert run_ranks(2, train_without_labels, runs.words("run", *SMALL, "--epochs", 1)) == ["completed"] * 2
    (event,) = runs.events("run", "non_finite_evaluation")
    assert event["split"] == "val"
    assert "The loss of the evaluation of val is nan. To find the sample, write all outputs with" in runs.log("run")


class OwnBuffers(tasks.SmallNet):
    """Buffers that a rank updates by itself: `kind` is one with floats, integers or another shape on each rank."""

    def __init__(self, kind):
        super().__init__(True, 10)
        self.kind = kind
        self.register_buffer("means", torch.zeros(64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(0, 64))
        self.register_buffer("mine", torch.zeros(64), persistent=False)

    def forward(self, x):
        features = self.features(x).flatten(1)
        if self.training:
            batch_mean, rank = features.detach().mean(0), int(os.environ["RANK"])
            self.mine += batch_mean
            if self.kind == "integers":
                self.seen += rank
            elif self.kind == "shapes":
                self.queue = torch.cat([self.queue, features.detach()])[-8 * (2 + rank) :]
            elif self.kind == "alike":
                torch.distributed.all_reduce(batch_mean)
            if self.kind in ("floats", "alike"):
                self.means += batch_mean
        return self.head(features)


def train_with_buffers(words, kind):
    create = lambda config, device: OwnBuffers(kind).to(device)  # noqa: E731
    with mock.patch.dict(TASKS["images"], {"create_model": create}):
        return train_flags(words)["state"]


@pytest.mark.guarantee("other-buffers")
@pytest.mark.parametrize("kind", ["floats", "integers", "shapes", "alike"])
def test_buffers_that_a_rank_updates_by_itself_are_an_event_at_each_save_and_a_warning(runs, kind):
    """BatchNorm's and those that are not persistent are not compared; training continues and saves rank 0's."""
    flags = "--dataset_size 64 --epochs 2 --num_workers 1".split()
    assert run_ranks(2, train_with_buffers, runs.words("run", *flags), kind) == ["completed"] * 2
    saved = [event["step"] for event in runs.events("run", "checkpoint")]
    differing = [(event["step"], event["rank"]) for event in runs.events("run", "buffers_differ")]
    assert len(saved) == 2 and differing == ([] if kind == "alike" else [(step, 1) for step in saved])
    text = r"Rank 1 on \S+ has other values in persistent buffers than rank 0\. The values of rank 0 are saved\."
    assert len(re.findall(text, runs.log("run"))) == (kind != "alike")
