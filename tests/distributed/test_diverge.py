# extra: replay and reports
"""scripts/runs.py --diverge: two runs that differ in one planted thing are found to differ there, and in what."""

import contextlib
import re
import sys
from unittest import mock

import pytest
import torch

import replay
import tasks
from ranks import run_ranks, slow
from scripts import runs as script
from scripts.lib.diverge import find_divergence
from tasks import SmallNet, create_images, image_loss
from utils.data.sampler import GlobalBatchSampler
from utils.settings.errors import UserError
from utils.training.state import TrainState

SAMPLE, STEP = 17, 6
WORDS = "--dataset_size 48 --epochs 2 --global_batch_size 8 --lr 0.05 --reduction exact --record_samples".split()
WORDS += "--save_every_steps 1 --keep_last 2 --keep_every 2".split()


def other_pixel(config, split):
    data = create_images(config, split)
    if split == "train":
        data.images[SAMPLE, 0, 3, 3] ^= 1
    return data


def other_kernel(config, device):
    """The second convolution is computed in another way."""
    net = SmallNet(True, 10)
    conv = net.features[3]
    conv.forward = lambda x: torch.nn.functional.conv2d(
        x.double(), conv.weight.double(), conv.bias.double(), 2, 1
    ).float()
    return net


def other_loss(net, batch):
    metrics = image_loss(net, batch)
    return metrics | {"loss": (metrics["loss"][0] * (1 + 1e-6), metrics["loss"][1])}


def other_gradient(net, batch):
    metrics = image_loss(net, batch)
    if net.training:
        metrics["loss"][0].register_hook(lambda gradient: gradient * (1 + 1e-6))
    return metrics


def in_task(**functions):
    return lambda: mock.patch.dict(tasks.TASKS["images"], functions)


def other_rate():
    plain = TrainState._set_lr

    def set_lr(state):
        plain(state)
        for group in state.optimizer.param_groups:
            group["lr"] *= 1.5 if state.progress.step == STEP - 1 else 1.0

    return mock.patch.object(TrainState, "_set_lr", set_lr)


def flipped_bit():
    plain = TrainState.update_if_finite

    def update(state, global_batch):
        plain(state, global_batch)
        if state.progress.step == STEP - 1:
            state.model.head.weight.data.view(torch.int32)[2, 3] ^= 1

    return mock.patch.object(TrainState, "update_if_finite", update)


def flipped_moment():
    plain = TrainState.update_if_finite

    def update(state, global_batch):
        plain(state, global_batch)
        if state.progress.step == STEP - 1:
            moment = state.optimizer.state[state.model.head.weight]["momentum_buffer"].view(torch.int32)
            moment[2, 3] ^= 1 << 16  # a lower bit can be lost in the rounding of the next weight

    return mock.patch.object(TrainState, "update_if_finite", update)


def gradient_changed_in_the_step():
    """Between the backward pass and the update, as a wrong sum over micro-batches would."""
    plain = TrainState.update_if_finite

    def update(state, global_batch):
        if state.progress.step == STEP - 1:
            state.model.head.bias.grad[4] *= 1.5
        plain(state, global_batch)

    return mock.patch.object(TrainState, "update_if_finite", update)


def swapped_samples():
    plain = GlobalBatchSampler.epoch_order

    def order(sampler, epoch):
        permutation = plain(sampler, epoch).clone()
        if epoch == 0 and sampler.shuffle:
            permutation[[13, 43]] = permutation[[43, 13]]
        return permutation

    return mock.patch.object(GlobalBatchSampler, "epoch_order", order)


@contextlib.contextmanager
def replaying(folder, plant):
    """Replays of this run have the planted difference, as on the machine or with the code that made it."""
    plain = replay.open_replay

    @contextlib.contextmanager
    def opened(run, step, flags):
        with (
            plant() if run == folder else contextlib.nullcontext(),
            tasks.using("images"),
            plain(run, step, flags) as it,
        ):
            yield it

    with mock.patch.object(replay, "open_replay", opened):
        yield


def diverge(*words):
    """The exit code and the output of runs.py --diverge."""
    printed = []
    with (
        mock.patch.object(sys, "argv", ["runs.py", "--diverge", *map(str, words)]),
        mock.patch("builtins.print", lambda *texts, **_: printed.append(" ".join(map(str, texts)))),
    ):
        code = script.main()
    return code, "\n".join(printed)


def plant_and_find(planted, words_of, folders):
    """Train run a, and b with each of these differences. What is found with a replay."""
    tasks.train_task("images", words_of["a"])
    outcomes = {}
    for name in planted:
        plant = PLANTS[name][0]
        with plant():
            tasks.train_task("images", words_of[name])
        with replaying(folders[name], plant):
            outcomes[name] = diverge(folders["a"], folders[name], "--replay")
    return outcomes


PLANTS = {
    "pixel": (
        in_task(create_dataset=other_pixel),
        f"the content of sample {SAMPLE} differs between a and pixel: 1 of ",
    ),
    "rate": (other_rate, r"the learning rate is 0\.0\d+ in a and 0\.0\d+ in rate"),
    "bit": (
        flipped_bit,
        r"the update of head.weight \(1 of 640 values\) differs, with equal gradients \(before clipping\)",
    ),
    "swap": (swapped_samples, r"sample 1 of micro-batch 1 is \d+ in a and \d+ in swap"),
    "kernel": (
        in_task(create_model=other_kernel),
        r"the output of features.3 \(Conv2d\) differs first, for micro-batch 0",
    ),
    "loss": (in_task(compute_loss=other_loss), "the loss of micro-batch 0 is .* equal outputs of all modules. Look at"),
    "used": (
        gradient_changed_in_the_step,
        r"the gradient of head.bias \(1 of 10 values\) that the optimizer gets differs, but it is equal when computed",
    ),
    "moment": (
        flipped_moment,
        r"the update of the optimizer's head.weight/momentum_buffer \(1 of 640 values\) differs",
    ),
    "gradient": (
        in_task(compute_loss=other_gradient),
        r"the gradient of head.bias .* and \d+ more differs, with equal",
    ),
}
INTERVALS = {"rate": 4, "bit": 4, "used": 4, "moment": 4, "pixel": 1}  # of records; else 5


@pytest.mark.guarantee("diverge")
@pytest.mark.parametrize("planted", [("pixel", "rate", "used", "gradient"), slow(tuple(PLANTS))])
def test_planted_differences_are_found_at_their_step_with_their_kind(runs, planted):
    names = ["a", *planted]
    words_of = {name: runs.words(name, *WORDS, "--log_interval", INTERVALS.get(name, 5)) for name in names}
    words_of["a"] = runs.words("a", *WORDS, "--log_interval", 1)
    folders = {name: runs.folder(name) for name in names}
    (outcomes,) = run_ranks(1, plant_and_find, planted, words_of, folders, deadline=300)
    steps = dict.fromkeys(PLANTS, 1) | {"swap": 2} | dict.fromkeys(("rate", "bit", "used", "moment"), STEP)
    steps["pixel"] = next(step for step, samples in runs.samples("a").items() if SAMPLE in samples)
    for name, (code, text) in outcomes.items():
        line = text.splitlines()[-1]
        until = f"until step {steps[name] - 1}" if steps[name] > 1 else "at the start"
        assert code == 1 and line.startswith(f"Replay: The runs are equal {until}. In step {steps[name]} "), text
        assert re.search(PLANTS[name][1], line), text
        assert len(text.splitlines()) < 40


def train_with_a_flipped_bit(words):
    with flipped_bit():
        tasks.train_task("images", words)


def diverge_with_replays(*folders):
    with replaying(None, contextlib.nullcontext):
        return diverge(*folders, "--replay")


@pytest.mark.guarantee("diverge")
@pytest.mark.slow
def test_a_fault_that_came_once_is_told_from_a_difference_that_a_replay_has_too(runs):
    """And two equal runs, on one rank and on two, do not differ."""
    for ranks, name in ((1, "a"), (2, "same")):
        run_ranks(ranks, tasks.train_task, "images", runs.words(name, *WORDS, "--log_interval", 1))
    run_ranks(2, train_with_a_flipped_bit, runs.words("b", *WORDS, "--log_interval", 1))
    code, text = diverge(runs.folder("a"), runs.folder("same"))
    assert code == 0 and text.endswith("The records do not differ up to step 12."), text
    code, text = diverge(runs.folder("a"), runs.folder("b"))
    assert code == 1 and "Records: The runs are equal until step 5. In the record of step 6 these differ:\n" in text, (
        text
    )
    ((code, text),) = run_ranks(1, diverge_with_replays, runs.folder("a"), runs.folder("b"))
    message = "In step 6 b did what its replay here does not: loss and gradient norm are repeated, and weights or"
    assert code == 1 and message in text, text


def train_longer_and_replay(words, folder):
    tasks.train_task("images", [*words, "--max_steps", "4"])
    tasks.train_task("images", [*words, "--max_steps", "8", "--resume_from", "auto"])
    with replaying(None, contextlib.nullcontext):
        return replay.record_steps(folder, 5, 8)


def test_the_steps_of_a_run_that_was_made_longer_are_replayed_with_its_later_settings(runs):
    words = runs.words("longer", *WORDS, "--log_interval", 1)
    ((again),) = run_ranks(1, train_longer_and_replay, words, runs.folder("longer"), deadline=100)
    records = {record["step"]: record["fingerprint"] for record in runs.records("longer", "train")}
    assert {step: again[step]["fingerprint"] for step in again} == {step: records[step] for step in (5, 6, 7, 8)}


@pytest.mark.guarantee("diverge")
def test_records_differ_by_their_fingerprints_and_by_all_values_where_there_is_none():
    common = {"loss": 1.0, "top1": 0.5, "step_s": 0.1}
    a = {step: {"step": step, "fingerprint": f"{step}"} | common for step in (5, 10, 15)}
    b = {step: record | {"top1": 0.6, "step_s": 0.2} for step, record in a.items()}
    assert find_divergence(a, b) == (15, 0, [])  # another metric does not change the training
    b[10] |= {"fingerprint": "f", "loss": 2.0, "samples": [1, 3]}
    a[10] |= {"samples": [1, 2]}
    rows = [["fingerprint", "10", "f"], ["samples", "1 of its own: 2", "1 of its own: 3"]]
    assert find_divergence(a, b) == (5, 10, [*rows, ["loss", "1.0", "2.0"], ["top1", "0.5", "0.6"]])
    assert find_divergence(a, b, has_means=False) == (5, 10, rows)
    for record in (*a.values(), *b.values()):
        del record["fingerprint"]
    assert find_divergence(a, b) == (0, 5, [["top1", "0.5", "0.6"]])
    with pytest.raises(
        UserError, match="a step with a train record in both runs, but there is none. Give runs with the same --log_"
    ):
        find_divergence(a, {4: a[5]})


@pytest.mark.guarantee("diverge")
@pytest.mark.parametrize("step", [3, 4])
def test_dumps_of_two_machines_are_compared_without_the_runs(tmp_path, step):
    """A decoder that gives other pixels on one of them."""
    batch = torch.arange(24.0).reshape(4, 3, 2)
    other = batch.clone()
    other[2, 1, 0] += 0.5
    state = {"before": {}, "after": {}, "gradients": {}, "lrs": [0.1], "outputs": [], "micro_losses": []}
    for name, host, content, number in (("a", "nodeA", batch, 3), ("b", "nodeB", other, step)):
        where = {"number": number, "host": host, "micro_batches": [[5, 3, 8113, 9]], "batches": [(content, "x")]}
        torch.save(state | where, tmp_path / f"{name}.pt")
    with mock.patch("sys.stderr") as errors:
        code, text = diverge(tmp_path / "a.pt", tmp_path / "b.pt")
    message = (
        "In step 3 the content of sample 8,113 differs between a.pt (on nodeA) and b.pt (on nodeB): 1 of 24 values, by"
    )
    if step == 3:
        assert (code, text) == (1, f"{message} at most 0.5.")
    else:
        assert code == 2 and not errors.write.called, text
        assert text == "--diverge needs two dumps of the same step, but these are of steps 3 and 4."
