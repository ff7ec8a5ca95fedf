"""--check_every: ranks compute a micro-batch of each other; a wrong gradient is found before the update."""

import contextlib
import os
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

import tasks
import train
from config import TrainingError, UserError
from ddp_utils import setup_distributed
from lib.benchmark.ours import Ours
from ranks import run_ranks, slow
from tasks import SmallNet
from training import train_flags

FLAGS = "--dataset_size 92 --epochs 2 --lr 0.05 --ema_decay 0.5 --log_interval 1 --record_samples".split()


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
        (3, 1, "terms", ("--grad_accum_steps", 2, "--amp_dtype", "bf16")),
        slow(4, 2, "images", ("--grad_accum_steps", 2, "--reduction", "exact", "--num_workers", 2)),
        slow(2, 1, "images", ("--amp_dtype", "fp16")),
        slow(4, 1, "terms", ("--grad_accum_steps", 2, "--reduction", "exact")),
        slow(4, 2, "lines", ()),
        slow(2, 2, "blocks", ("--activation_checkpointing", "--num_workers", 1)),
        slow(2, 2, "taught", ("--comm_hook", "fp16")),
        slow(2, 2, "ramped", ("--compile", "default")),
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


def flip(tensor, draw):
    """A copy in which a bit of a value that is not 0 is flipped; the value stays finite."""
    wrong = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = wrong.view(-1)
    places = flat.nonzero().flatten()
    value = flat[places[draw.randrange(len(places))]] if len(places) else flat[0]
    value.view(torch.int32).bitwise_xor_(1 << draw.randrange(30))
    return wrong if wrong.isfinite().all() else tensor.detach()


def place_fault(model, draw, now):
    """Flip bits somewhere in the model, always or once, while now["on"]. Returns the hooks."""
    kind, is_always = draw.choice(["activation", "gradient", "parameter"]), now["always"]
    seed, count, which = draw.random(), draw.choice([1, 1, 3]), draw.random()

    def corrupt(tensor):
        if not now["on"]:
            return None
        here = random.Random(seed if is_always else draw.random())
        for _ in range(count):
            tensor = tensor + (flip(tensor, here) - tensor.detach())
        return tensor

    if kind == "parameter":
        parameters = [*model.parameters()]
        return parameters[int(which * len(parameters))].register_hook(corrupt)
    modules = [module for module in model.modules() if not [*module.children()]]
    module = modules[int(which * len(modules))]
    if kind == "activation":
        return module.register_forward_hook(lambda _, inputs, output: corrupt(output))
    return module.register_full_backward_pre_hook(lambda _, gradients: (corrupt(gradients[0]),) if now["on"] else None)


def campaign(words, folder, faults):
    """Steps of one run, each with a fault on one rank. [(bad rank, always, what was found, equal gradients)]"""
    with tasks.using("images"):
        config = tasks.config_of(words)
        ours = Ours(config, setup_distributed(config), folder, 0)
        training, found = ours.training, []
        check, rank, draw = training.cross_check, training.attempt.ctx.rank, random.Random(3)
        check._save, check._warn, check._event = (lambda: None), (lambda text: None), lambda *_, **e: events.append(e)
        steps, now = [[]], {"on": False, "always": False}
        plain = partial(train.compute_gradient, training)

        def compute(micro_batches):
            def begun():
                for micro_batch in micro_batches:
                    is_now = now["always"] or (micro_batch.is_check == now["in_check"] and not now.get("over"))
                    now["on"] = rank == bad and is_now
                    try:
                        yield micro_batch
                    finally:
                        now["on"], now["over"] = False, now.get("over") or is_now

            return plain(begun())

        def gradient(function):
            function(iter(step))
            taken = [p.grad.clone() for p in training.state.model.parameters()]
            check._undo()
            return taken

        training.model.train()
        for micro_batch in training.loader.micro_batches(0):
            steps[-1].append(micro_batch)
            steps += [[]] if micro_batch.is_last else []
        for number in range(faults):
            at = number % (len(steps) - 2)
            step, progress, events = steps[at], training.state.progress, []
            progress.step, progress.samples_in_epoch = at, at * training.loader.sampler.global_batch_size
            clean = gradient(lambda each: check.run(each, plain))
            bad, here = draw.randrange(4), random.Random(draw.random())
            now.clear()
            now |= {"on": False, "always": number % 2 == 0, "in_check": draw.random() < 0.5}
            hook = place_fault(training.state.model, here, now)
            named, is_same = "none", True
            try:
                wrong = gradient(lambda each: check.run(each, compute))
                is_same = all(torch.equal(a, b) for a, b in zip(clean, wrong, strict=True))
                named = [e["rank"] for e in events] or "none"
            except TrainingError as error:
                named = f"ended by {error.rank}"
            except UserError:
                named = "not deterministic"
            hook.remove()
            check._undo()
            found.append((bad, now["always"], named, is_same))
        return found


@pytest.mark.guarantee("cross-check")
@pytest.mark.slow
def test_no_wrong_bit_at_seeded_places_reaches_a_gradient_unseen(runs):
    """100 faults that stay and 100 that come once. A bit that is lost in rounding or behind a ReLU changes nothing."""
    words = runs.words("run", *FLAGS, "--dataset_size", 400, "--epochs", 1000, "--check_every", 1)
    rows = run_ranks(4, campaign, words, runs.folder("ours"), 200)
    assert all(row == rows[0] for row in rows)
    for bad, _, named, is_same in rows[0]:  # a fault that stays may have an effect on some samples only
        assert is_same and named in ("none", [bad], f"ended by {bad}")
    counts = Counter(
        (always, named.split()[0] if isinstance(named, str) else "once") for _, always, named, _ in rows[0]
    )
    print(counts)
    assert counts[True, "ended"] > 80 and counts[False, "ended"] == 0
    assert sum(counts[always, "none"] for always in (True, False)) < 20


@pytest.mark.guarantee("cross-check")
@pytest.mark.slow
@pytest.mark.parametrize("task", ["images", "terms", "lines", "blocks", "taught"])
def test_two_thousand_clean_steps_raise_no_alarm(runs, task):
    flags = ["--dataset_size", 92, "--epochs", 10**6, "--max_steps", 2000, "--lr", 0.02, "--eval_every", 10**6]
    runs.train(4, "run", *flags, "--save_every", 0, "--check_every", 1, task=task, deadline=300)
    assert runs.json("run", "summary.json")["steps"] == 2000 and not runs.events("run", "gradient_differs")
