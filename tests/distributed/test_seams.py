"""What a fork may define, on real ranks: counts of a loss, shapes of metrics, schedules, optimizers, fields."""

import contextlib
import json
import os
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import model
from config import UserError
from ranks import WarmLaunch, finish, run_ranks, slow
from tasks import TASKS, Images, SmallNet, image_loss
from training import assert_same_state, train_flags
from utils.rng import draw_integers, sample_draws

FLAGS = "--dataset_size 46 --epochs 2 --no-use_amp --save_every 0".split()


def train_with(flags, **seams):
    """Train in a rank with these functions instead of the task's; returns the state or the error."""
    dtype = torch.float64 if "float64" in flags else torch.float32
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(TASKS["images"], seams))
        for name in seams.keys() & {
            "lr_factor",
            "create_optimizer",
            "log_images",
        }:  # `using` replaces only existing functions
            stack.enter_context(mock.patch.object(model, name, seams[name], create=True))
        try:
            return train_flags([flag for flag in flags if flag != "float64"], dtype)["state"]
        except UserError as error:
            return str(error)


# ---- the count of the loss depends on the batch ----


class Pixels(Dataset):
    """float images [1, 8, 8] and masks of three classes, 255 is ignored; randomly cropped on the device."""

    in_memory = True

    def __init__(self, size):
        generator = torch.Generator().manual_seed(3)
        self.masks = torch.randint(0, 3, (size, 8, 8), generator=generator)
        noise = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
        self.images = self.masks.double()[:, None] + noise
        self.masks[torch.rand(size, 8, 8, generator=generator) < 0.3] = 255
        self.masks[20:24] = 255  # nothing counts in these

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, index):
        return self.images[index], self.masks[index]

    def device_transform(self, batch, seed, epoch, indices):
        return crop(*batch, seed, epoch, indices)


def crop(images, masks, seed, epoch, indices):
    """A crop of 6 x 6 pixels of each sample, at a position drawn per sample."""
    places = draw_integers(sample_draws(seed, epoch, indices, 2), 3)
    cut = [(slice(top, top + 6), slice(left, left + 6)) for top, left in places.tolist()]
    images = torch.stack([image[:, rows, columns] for image, (rows, columns) in zip(images, cut, strict=True)])
    return images, torch.stack([mask[rows, columns] for mask, (rows, columns) in zip(masks, cut, strict=True)])


def pixel_loss(net, batch):
    logits, masks = net(batch[0]), batch[1]
    valid = masks != 255
    found, classes = logits.argmax(1)[valid], torch.arange(3)[:, None]
    is_true, is_found = masks[valid] == classes, found == classes
    return {
        "loss": (F.cross_entropy(logits, masks, ignore_index=255, reduction="sum"), valid.sum()),
        "miou": ((is_true & is_found).sum(1), (is_true | is_found).sum(1), lambda iou: iou.nanmean()),
        "recall": ((is_true & is_found).sum(1), is_true.sum(1), lambda each: {"c0": each[0], "c2": each[2]}),
    }


def pixel_net(config, device):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 1)).to(device)


PIXELS = {
    "create_model": pixel_net,
    "compute_loss": pixel_loss,
    "create_dataset": lambda config, split: Pixels(46) if split != "test" else None,
}


def train_pixels(flags):
    return train_with([*flags, "float64"], **PIXELS)


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 2), slow(4, 1)])
def test_the_loss_is_the_mean_over_the_valid_pixels_of_the_global_batch(runs, ranks, accumulation):
    """The expected loss is computed over all pixels of a step at once. 1e-12: order of sums."""
    flags = "--epochs 1 --lr 1e-300 --warmup_epochs 0 --log_interval 1 --no-use_amp --record_samples".split()
    words = runs.words("run", *flags, "--grad_accum_steps", accumulation)
    assert run_ranks(ranks, train_pixels, words) == ["completed"] * ranks
    torch.set_default_dtype(torch.float64)  # as in the ranks
    data, net = Pixels(46), pixel_net(None, torch.device("cpu"))
    torch.set_default_dtype(torch.float32)
    samples, records = runs.samples("run"), runs.records("run", "train")
    assert len(records) == -(-46 // (4 * ranks * accumulation))
    for record in records:
        indices = torch.tensor(samples[record["step"]])
        images, masks = crop(data.images[indices], data.masks[indices], 42, 0, indices)
        with torch.no_grad():
            logits = net(images)
        expected = F.cross_entropy(logits, masks, ignore_index=255)  # the mean over valid pixels
        assert record["loss"] == pytest.approx(expected.item(), rel=1e-12)
        hits = [((masks == k) & (logits.argmax(1) == k)).sum() for k in range(3)]
        union = [((masks == k) | ((logits.argmax(1) == k) & (masks != 255))).sum() for k in range(3)]
        miou = sum(a / b for a, b in zip(hits, union, strict=True)).item() / 3
        assert record["miou"] == pytest.approx(miou, rel=1e-6)
        assert record["recall/c2"] == pytest.approx((hits[2] / (masks == 2).sum()).item(), rel=1e-6)
    evaluated = runs.records("run", "eval")[-1]
    assert {"loss", "miou", "recall/c0", "recall/c2", "count"} < evaluated.keys()


def only_odd_steps(flags):
    """Train with all pixels of every second global batch ignored."""

    def loss(net, batch):
        metrics = pixel_loss(net, batch)
        total, count = metrics["loss"]
        is_empty = bool((batch[0].sum() * 1e6).long() % 2) if net.training else False
        return metrics | {"loss": (total * (not is_empty), count * (not is_empty))}

    return train_with([*flags, "float64"], **PIXELS | {"compute_loss": loss})


def test_a_global_batch_that_counts_nothing_is_a_skipped_step(runs):
    flags = "--epochs 2 --log_interval 1 --no-use_amp --save_every_steps 1 --keep_last 99".split()
    assert run_ranks(1, only_odd_steps, runs.words("run", *flags)) == ["completed"]
    skipped = runs.events("run", "skipped_step")
    assert {event["reason"] for event in skipped} == {"empty"} and 3 < len(skipped) < 21
    losses = {record["step"]: record["loss"] for record in runs.records("run", "train")}
    assert all((losses[step] is None) == (step in {event["step"] for event in skipped}) for step in losses)


# ---- schedules and optimizers ----


def plateau(config, step, total_steps, warmup_steps, progress):
    """Divides by 10 each time the last evaluation was not the best one; state is in progress.user."""
    user = progress.user
    if progress.evaluations_since_best and user.get("seen") != progress.evaluated_step:
        user["seen"], user["cuts"] = progress.evaluated_step, user.get("cuts", 0) + 1
    return 0.1 ** user.get("cuts", 0)


def train_plateau(flags):
    return train_with(flags, lr_factor=plateau)


def test_a_schedule_that_follows_the_metric_resumes_exactly(runs):
    flags = [*FLAGS[:2], *"--epochs 6 --no-use_amp --lr 0.3 --best_metric max:loss --log_interval 1".split()]
    flags += ["--keep_last", "99"]
    run_ranks(2, train_plateau, runs.words("whole", *flags))
    rates = [record["lr"] for record in runs.records("whole", "train")]
    assert rates[0] == 0.3 and rates[-1] < 0.1 and runs.last("whole")["progress"]["user"]["cuts"] > 0
    middle = runs.checkpoints("whole")[2]
    run_ranks(2, train_plateau, runs.words("resumed", *flags, "--resume_from", middle))
    resumed = [record["lr"] for record in runs.records("resumed", "train")]
    assert resumed == rates[len(rates) - len(resumed) :]
    assert_same_state(runs.last("whole"), runs.last("resumed"))


def train_groups(flags, own):
    """Train two groups. own: the settings of the second one, such as its learning rate."""

    def groups(net, config):
        return [{"params": list(net.features.parameters())}, {"params": list(net.head.parameters()), **own}]

    return train_with(flags, param_groups=groups)


@pytest.mark.parametrize("own", [{}, {"lr": 0.1}])
def test_records_have_the_lr_of_the_schedule_and_of_groups_that_differ(runs, own):
    flags = "--epochs 2 --lr 0.4 --schedule linear --warmup_epochs 0 --log_interval 1".split()
    run_ranks(1, train_groups, runs.words("run", *FLAGS, *flags), own)
    records, factors = runs.records("run", "train"), [1 - step / 24 for step in range(24)]
    assert [record["lr"] for record in records] == pytest.approx([0.4 * factor for factor in factors])
    expected = [pytest.approx([0.4 * factor, 0.1 * factor]) if own else None for factor in factors]
    assert [record.get("lr_of_groups") for record in records] == expected


class Signed(torch.optim.Optimizer):
    """Sign of the momentum; does not support found_inf."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + p.grad
                p.sub_(group["lr"] * state["momentum"].sign())


def train_signed(flags, bad_step):
    passes = []

    def loss(net, batch):
        metrics = image_loss(net, batch)
        passes.append(net.training)
        is_bad = net.training and sum(passes) == bad_step + 2 and os.environ["RANK"] == "1"
        total, count = metrics["loss"]
        return metrics | {"loss": (total * (float("nan") if is_bad else 1.0), count)}

    seams = {"create_optimizer": lambda groups, config: Signed(groups, config.lr), "compute_loss": loss}
    return train_with(flags, **seams)


def test_any_optimizer_trains_skips_and_resumes(runs):
    flags = [*FLAGS, *"--lr 0.001 --save_every_steps 1 --keep_last 99 --ema_decay 0.9".split()]
    assert run_ranks(2, train_signed, runs.words("whole", *flags), 3) == ["completed"] * 2
    assert [event["step"] for event in runs.events("whole", "skipped_step")] == [3]
    before, bad = (torch.load(path, weights_only=True) for path in runs.checkpoints("whole")[1:3])
    assert all(torch.equal(before["model"][name], bad["model"][name]) for name in before["model"])
    assert "Signed: one device read per step" in runs.log("whole")
    first = runs.checkpoints("whole")[4]
    run_ranks(2, train_signed, runs.words("resumed", *flags, "--resume_from", first), 99)
    assert_same_state(runs.last("whole"), runs.last("resumed"))


# ---- configurations that cannot be trained are rejected ----


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Empty(Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError


def lists_twice(net, config):
    return [{"params": [*net.parameters(), net.head.weight]}]


def of_split(wanted, replacement):
    plain = TASKS["images"]["create_dataset"]
    return lambda config, split: replacement if split == wanted else plain(config, split)


def with_table(config, device):
    net = SmallNet(True, 10).to(device)
    net.table = nn.Embedding(3, 4, sparse=True)
    return net


PROBLEMS = {
    "a tensor": ({"compute_loss": lambda net, batch: net(batch[0]).sum()}, "model.compute_loss: returned a Tensor; "),
    "stream": ({"create_dataset": of_split("train", Stream())}, "create_dataset: Stream (train) has no __len__"),
    "empty": ({"create_dataset": of_split("val", Empty())}, "create_dataset: Empty (val) has no samples; return None"),
    "twice": ({"param_groups": lists_twice}, "param_groups: lists head.weight twice, which would be updated twice"),
    "closure": (
        {"create_optimizer": lambda groups, config: torch.optim.LBFGS(groups[0]["params"])},
        "create_optimizer: LBFGS needs a closure",
    ),
    "no groups": ({"param_groups": lambda net, config: net.parameters()}, "param_groups: returned no list of groups; "),
    "sparse": (
        {"create_model": with_table},
        "model: table has sparse gradients, which are not supported; set sparse=False",
    ),
}


def train_wrongly(flags):
    return [train_with([*flags, "--overwrite"], **seams) for seams, _ in PROBLEMS.values()]


def test_a_violated_contract_is_rejected_in_one_sentence(runs):
    for texts in run_ranks(2, train_wrongly, runs.words("run", *FLAGS)):
        for text, (_, expected) in zip(texts, PROBLEMS.values(), strict=True):
            assert text.startswith(expected), text


SHOWN = {  # what log_images returns for a batch: the warning
    "fails": (lambda batch: {}["images"], "KeyError: 'images'"),
    "floats": (lambda batch: {"x": batch[0]}, "TypeError: x is torch.float32 [4, 3, 8, 8]; return uint8 [B, 3, H, W]"),
    "one": (lambda batch: {"x": batch[0][0].byte()}, "TypeError: x is torch.uint8 [3, 8, 8]; return uint8"),
    "none": (lambda batch: None, "TypeError: returned a NoneType; return {name: uint8 [B, 3, H, W]}"),
    "array": (lambda batch: {"x": batch[0].byte().numpy()}, "TypeError: x is ndarray; return uint8 [B, 3, H, W]"),
}


def train_showing(flags, folder):
    """The final states of runs whose log_images fails, one run per case."""
    return [
        train_with([*flags, "--run_dir", f"{folder}/{name}"], log_images=lambda net, batch, shown=shown: shown(batch))
        for name, (shown, _) in SHOWN.items()
    ]


@pytest.mark.slow
def test_images_that_cannot_be_shown_cause_one_warning(runs):
    """One warning for two evaluations, on rank 0 only."""
    for states in run_ranks(2, train_showing, runs.words("run", *FLAGS), runs.root):
        assert states == ["completed"] * len(SHOWN)
    for name, (_, warning) in SHOWN.items():
        assert f"log_images: {warning}" in runs.log(name), runs.log(name)
        assert runs.log(name).count("log_images") == 1 and len(runs.records(name, "eval")) == 2


SOMETIMES = """
from torch import nn
plain_model, plain_loss = train.your_model.create_model, train.your_model.compute_loss
calls = []
def create_model(config, device):
    net = plain_model(config, device)
    net.spare = nn.Linear(2, 3)
    return net
def compute_loss(net, batch):
    metrics = plain_loss(net, batch)
    inner = getattr(net, 'module', net)
    calls.append(net.training)
    if net.training and sum(calls) != 5:  # two passes before the first step
        total, count = metrics['loss']
        metrics['loss'] = total + 0 * sum(p.sum() for p in inner.spare.parameters()), count
    return metrics
train.your_model.create_model, train.your_model.compute_loss = create_model, compute_loss
"""


@pytest.mark.guarantee("unused")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_only_some_batches_use_is_named(runs, ranks):
    ended = finish(WarmLaunch(ranks, runs.program(SOMETIMES), runs.words("run", *FLAGS, "--log_interval", 1)), 60)
    assert ended.code == 1 and ended.left == 0
    assert "model: spare.weight, spare.bias got no gradient in this step, while other batches use it" in ended.text
    assert "Traceback" not in ended.text.replace("traceback :", "")
    assert "parameter indices" not in ended.text.lower()


def test_init_from_and_dataset_size_work_for_any_fork(runs):
    """The task's create_model does not know init_from, its data set does not know subsets."""
    runs.train(1, "first", *FLAGS)
    source = runs.checkpoints("first")[-1]
    runs.train(1, "second", *FLAGS, "--init_from", source, "--max_steps", 1, "--lr", 1e-30)
    first, second = runs.last("first")["model"], runs.last("second")["model"]
    assert all(torch.equal(first[name], second[name]) for name in first if "running" not in name and "num_" not in name)
    assert "init_from: loaded" in runs.log("second")
    (state,) = run_ranks(1, train_subset, runs.words("subset", "--dataset_size", 10, "--epochs", 1, "--record_samples"))
    assert state == "completed"
    indices = [index for step in runs.samples("subset").values() for index in step]
    assert sorted(indices) == list(range(10))
    log = json.loads((runs.folder("subset") / "provenance.json").read_text())
    assert log["global_batch_size"] == 4


def train_subset(flags):
    def create(config, split):
        return Images(100, split) if split == "train" else None

    return train_with(flags, create_dataset=create)
