"""--check_every: ranks compute a micro-batch of each other; a wrong gradient is found before the update."""

import contextlib
import os
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

import tasks
import train
from config import UserError
from ranks import run_ranks, slow
from tasks import SmallNet
from training import train_flags

FLAGS = "--dataset_size 92 --epochs 2 --lr 0.05 --log_interval 1 --record_samples".split()
FLAGS += ["--ema_decay", "0.5"]  # extra: average


@contextlib.contextmanager
def fault(kind, rank, step, is_once=False, seed=0):
    """On this rank a bit at a seeded place is wrong in every pass from that step on, or once in its first own pass."""
    plain, plain_model = train.compute_gradient, tasks.TASKS["images"]["create_model"]
    is_here, here = int(os.environ["RANK"]) == rank, {"on": False}

    def compute(training, micro_batches):
        def begun():
            for micro_batch in micro_batches:
                is_first = not micro_batch.is_check and training.state.progress.step == step and not here.get("over")
                here["on"] = is_here and (is_first if is_once else training.state.progress.step >= step)
                try:
                    yield micro_batch
                finally:
                    here["on"], here["over"] = False, here.get("over") or is_first

        return plain(training, begun())

    def corrupt(tensor):
        if not here["on"]:
            return tensor
        draw = random.Random(seed)
        wrong = tensor.detach().clone(memory_format=torch.contiguous_format)
        flat = wrong.view(-1)
        place = flat[draw.choice(flat.nonzero().flatten().tolist())]  # a bit of 0 is lost in the next product
        place.view(torch.int32).bitwise_xor_(1 << draw.randrange(20, 27))  # the result is finite
        return wrong if kind == "gradient" else tensor + (wrong - tensor.detach())

    def create_model(config, device):
        net = plain_model(config, device)
        if kind == "activation":
            net.features[3].register_forward_hook(lambda module, inputs, output: corrupt(output))
        else:
            net.features[3].register_full_backward_pre_hook(lambda module, gradients: (corrupt(gradients[0]),))
        return net

    with (
        mock.patch.object(train, "compute_gradient", compute),
        mock.patch.dict(tasks.TASKS["images"], create_model=create_model),
    ):
        yield


def train_with(fault_of, words, task="images"):
    with fault(*fault_of):
        return train_flags(words, task=task)


@pytest.mark.guarantee("cross-check")
@pytest.mark.parametrize(
    ("ranks", "every", "task", "flags"),
    [
        slow(2, 2, "images", ("--grad_accum_steps", 2, "--num_workers", 2)),
        (4, 3, "images", ("--reduction", "exact")),
        (3, 1, "terms", ("--grad_accum_steps", 2, "--amp_dtype", "bf16")),  # extra: terms
        slow(4, 2, "images", ("--grad_accum_steps", 2, "--reduction", "exact", "--num_workers", 2)),
        slow(2, 1, "images", ("--amp_dtype", "fp16")),
        slow(4, 1, "terms", ("--grad_accum_steps", 2, "--reduction", "exact")),  # extra: terms
        slow(4, 2, "lines", ()),
        slow(2, 2, "blocks", ("--activation_checkpointing", "--num_workers", 1)),  # extra: compile
        slow(2, 2, "taught", ("--comm_hook", "fp16")),  # extra: steps
        slow(2, 2, "ramped", ("--compile", "default")),  # extra: compile and steps
    ],
)
def test_checks_change_nothing_and_raise_no_alarm(runs, ranks, every, task, flags):
    """The last global batch is short, so that with accumulation some ranks are idle in it."""
    for name, words in (("plain", ()), ("checked", ("--check_every", every))):
        runs.train(ranks, name, *FLAGS, *flags, *words, task=task)
    runs.assert_same("plain", "checked")
    assert not runs.events("checked", "gradient_differs")


@pytest.mark.guarantee("cross-check")
@pytest.mark.parametrize(("kind", "ranks"), [("activation", 4), slow("gradient", 2)])
def test_a_rank_that_is_always_wrong_ends_the_run_before_the_update(runs, kind, ranks):
    """It is named, of two ranks the pair. The state before the step is saved, from which another machine goes on."""
    flags = [*FLAGS, "--check_every", 3, "--epochs", 1]
    flags += ["--global_batch_size", 16]
    runs.train(ranks, "clean", *flags)
    words = runs.words("run", *tasks.BUCKETS, *flags)
    with pytest.raises(AssertionError, match="computed a wrong gradient of .* also when it was repeated"):
        run_ranks(ranks, train_with, (kind, ranks - 2, 2), words)
    status, events = runs.json("run", "status.json"), runs.events("run", "gradient_differs")
    named = [2] if ranks == 4 else [0, 1]
    assert [event["rank"] for event in events] == named and f"rank {named[0]} on " in status["error"]
    assert (status["state"], status["rank"], status["host"]) == ("failed", named[-1], events[0]["host"])
    assert len(events[0]["samples"]) == 4 and events[0]["device"] and events[0]["step"] == 2  # steps before it
    assert runs.last("run")["progress"]["step"] == 2 and "after step 1, the last one checked" in status["error"]
    run_ranks(ranks, train_flags, [*words, "--resume_from", "auto"])
    runs.assert_same("clean", "run")


@pytest.mark.guarantee("cross-check")
@pytest.mark.parametrize(
    ("kind", "ranks", "flags"),
    [
        ("activation", 4, ()),
        slow("gradient", 2, ("--grad_accum_steps", "2", "--num_workers", "1")),
        slow("gradient", 4, ("--reduction", "exact")),
        slow("activation", 2, ("--reduction", "exact", "--grad_accum_steps", "2")),
    ],
)
def test_a_wrong_gradient_that_is_not_repeated_is_recorded_and_changes_nothing(runs, kind, ranks, flags):
    flags = [*FLAGS, *flags, "--check_every", 3]
    runs.train(ranks, "clean", *flags)
    run_ranks(ranks, train_with, (kind, 1, 5, True), runs.words("run", *tasks.BUCKETS, *flags))
    (event,) = runs.events("run", "gradient_differs")
    assert event["rank"] == 1 and event["step"] == 5 and event["parameter"] == "features.0.weight"
    assert set(event["samples"]) <= set(runs.samples("run")[6])
    assert f"rank 1 on {event['host']} (cpu) computed a wrong gradient of features.0.weight" in runs.log("run")
    runs.assert_same("clean", "run")


class Noise(torch.nn.Module):
    def forward(self, x):
        return x + random.random() if self.training else x


def train_noisy(words):
    """Noise before the head, from a generator that no micro-batch seeds."""

    def create_model(config, device):
        net = SmallNet(True, 10)
        net.head = torch.nn.Sequential(Noise(), net.head)
        return net

    random.seed(os.getpid())
    with mock.patch.dict(tasks.TASKS["images"], create_model=create_model):
        return train_flags(words)


@pytest.mark.guarantee("cross-check")
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_that_is_not_deterministic_is_rejected_in_the_first_step(runs, ranks):
    words = runs.words("run", *tasks.BUCKETS, *FLAGS, "--check_every", 100, "--num_workers", 1)
    said = "disagree on the gradient of .* of step 1, also when they repeat it, so training is not deterministic"
    with pytest.raises(AssertionError, match=said):
        run_ranks(ranks, train_noisy, words)


def checked_on(names, words):
    """The answer of a rank of several with these devices."""
    plain = train.CrossCheck

    def create(state, loader, config, ctx, *rest):
        return plain(state, loader, config, replace(ctx, device_names=names), *rest)

    with mock.patch.object(train, "CrossCheck", create), pytest.raises(UserError) as error:
        train_flags(words)
    return str(error.value)


def test_ranks_on_different_devices_are_rejected(runs):
    words = runs.words("run", *tasks.BUCKETS, *FLAGS, "--check_every", 2)
    for text in run_ranks(2, checked_on, ("H100", "A100"), words):
        assert text.startswith("check_every: A100 and H100 round differently")


def test_one_rank_trains_without_checks_and_says_so(runs):
    runs.train(1, "run", *FLAGS, "--check_every", 2)
    assert "check_every: one rank has no other one that could check it" in runs.log("run")


@pytest.mark.guarantee("cross-check")
@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "images",
        "terms",  # extra: terms
        "lines",
        "blocks",
        "taught",  # extra: steps
    ],
)
def test_two_thousand_clean_steps_raise_no_alarm(runs, task):
    flags = ["--dataset_size", 92, "--epochs", 10**6, "--max_steps", 2000, "--lr", 0.02, "--eval_every", 10**6]
    runs.train(4, "run", *flags, "--save_every", 0, "--check_every", 1, task=task, deadline=300)
    assert runs.json("run", "summary.json")["steps"] == 2000 and not runs.events("run", "gradient_differs")
