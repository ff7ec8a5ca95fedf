# extra: verify and template
"""verify raises no alarm on sound losses that are called, added up or joined in another way than usual, and finds a
fault beside each of them."""

from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import forks
from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from lib.verify import data_checks, loss_checks, model_checks
from lib.verify.fork import BrokenInvariant, Fork, measure_cancellation
from lib.verify.precision_checks import measure_rounding
from ranks import copy_repository, slow
from test_verify import INVARIANTS, outcomes
from test_verify_findings import FLAGS, LINEAR, REGRESSION
from utils.training.hooks import ModelHooks


class Rows(torch.utils.data.Dataset):
    num_classes, in_channels, image_size = 2, 3, 8

    def __init__(self, count, is_training):
        generator = torch.Generator().manual_seed(count)
        self.is_training = is_training
        self.x = torch.randn(count, 8, generator=generator)
        self.y = self.x[:, :1] + 0.3 * torch.randn(count, 1, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32, dtype=dtype), nn.ReLU(), nn.Linear(32, 1, dtype=dtype))

    def forward(self, x):
        return self.net(x)


@pytest.fixture(autouse=True)
def alone():
    yield
    cleanup_distributed()


def fork_of(compute_loss, data=Rows, create_model=lambda *_: Net(), has_held_out=True, size=4, **functions):
    """What verify checks, in this process."""
    hooks = {"compute_loss": compute_loss, "create_model": create_model}
    hooks["param_groups"] = lambda model, _: [{"params": [*model.parameters()]}]
    config = TrainingConfig(
        batch_size=size, backend="gloo", num_workers=0, use_amp=True, amp_dtype="bf16", image_size=8
    )
    cleanup_distributed()
    ctx = setup_distributed(config)
    held_out = data(24, False) if has_held_out else None
    hooks = ModelHooks.from_module(SimpleNamespace(**hooks, **functions))
    fork = Fork(config, data(60, True), held_out, ctx, None, hooks, config)
    fork.new_process = mock.Mock()
    fork.new_process.answer.return_value = None, "is not asked"
    fork.choose_precision()
    return fork


def problems(fork, is_repeated=False):
    """The texts of the findings."""
    checks = [partial(loss_checks.check_sums_add_up, number=number) for number in range(3)]
    if is_repeated:
        checks = [loss_checks.check_loss_is_sum]
    messages = []
    for check in (*checks, loss_checks.describe_loss, measure_rounding, model_checks.evaluation, data_checks.content):
        try:
            text = check(fork)
            for reason in ("the data in a new process (is not asked)", "there is no held-out set"):
                text = text.replace(f"Not checked: {reason}", "")
            assert "Not checked" not in text, text
        except BrokenInvariant as problem:
            messages.append(str(problem))
    return messages


# ---- small differences of large sums ----


def squared(model, x, y):
    return (model(x) - y).square().sum()


def free_energy(model, batch):
    x, y = batch
    energy = (model(x) + 1e4 - 1e-3).float()
    return {"loss": (energy.sum() - (model(x) + 1e4).float().sum() + squared(model, x, y) * 0.01, len(x))}


def free_energy_mean(model, batch):
    x, y = batch
    energy = (model(x) + 100).float()
    return {"loss": (energy.mean() - (model(x) + 100).float().mean() + squared(model, x, y) / len(x), len(x))}


def bias(model, batch, cast=torch.Tensor.float, reduce=torch.sum):
    x, y = batch
    error = cast(1e5 * (model(x) - y))
    balanced = torch.cat([error, -error - 1e-3])
    return {"loss": (squared(model, x, y), len(x)), "bias": (reduce(balanced), len(x))}


def bias_in_evaluation(model, batch):
    if torch.is_grad_enabled():
        return {"loss": (squared(model, *batch), len(batch[0]))}
    return bias(model, batch, lambda error: error.float())


def bias_that_does_not_add_up(model, batch):
    x, y = batch
    return {"loss": (squared(model, x, y), len(x)), "bias": ((model(x) - y).float().sum().square(), len(x))}


def exact_zero(model, batch):
    x, y = batch
    centred = model(x) - y - (model(x) - y).mean()
    return {"loss": (squared(model, x, y), len(x)), "zero": (centred.sum(), len(x))}


def masked(model, batch):
    """As GPT-2 of transformers, whose masks are as large as floats can be."""
    x, y = batch
    lowest = torch.full([], torch.finfo(torch.float32).min)
    mask = torch.where(torch.arange(8) < 6, 0.0, -1e9).float() + torch.linspace(-1, 1, 8, dtype=torch.float32)
    scores = torch.where(x.float() > 0, x.float() + mask, lowest).softmax(1)
    return {"loss": (squared(model, x, y) + scores.amax(1).sum(), len(x))}


def masked_mean(model, batch):
    total, count = masked(model, batch)["loss"]
    return {"loss": (total / count, count)}


def in_float32(model, batch):
    x, y = batch[0].float(), batch[1].float()
    return free_energy(model, (x, y))


def in_float32_mean(model, batch):
    total, count = in_float32(model, batch)["loss"]
    return {"loss": (total + 1000 * squared(model, batch[0].float(), batch[1].float()) / count, count)}


def made_in_float32(*_):
    return Net(torch.float32)


SUMS = {  # a sound loss, one with a fault, and what creates the model
    "loss": (free_energy, free_energy_mean, Net),
    "metric": (bias, partial(bias, reduce=lambda error: error.abs().mean()), Net),
    "metric that is float64 again": (
        partial(bias, cast=lambda error: error.float().double()),
        bias_that_does_not_add_up,
        Net,
    ),
    "metric in evaluation": (bias_in_evaluation, partial(bias, reduce=lambda error: error.abs().mean()), Net),
    "zero but for rounding": (exact_zero, bias_that_does_not_add_up, Net),
    "large masks": (masked, masked_mean, Net),
    "parameters in float32": (in_float32, in_float32_mean, partial(Net, torch.float32)),
}


@pytest.mark.guarantee("verify")
@pytest.mark.parametrize("kind", SUMS)
def test_the_rounding_of_large_sums_is_no_fault_and_a_mean_is_one(kind):
    sound, faulty, create = SUMS[kind]
    assert not problems(fork_of(sound, create_model=lambda *_: create()))
    assert [text for text in problems(fork_of(faulty, create_model=lambda *_: create())) if "for its halves" in text]


def test_the_dtype_of_the_checks_is_that_of_the_parameters():
    fork = fork_of(in_float32, create_model=lambda *_: Net(torch.float32))
    assert (fork.dtype, fork.loss_dtype) == (torch.float32, torch.float32)
    fork = fork_of(bias_in_evaluation)
    assert (fork.dtype, fork.loss_dtype) == (torch.float64, torch.float32)
    fork = fork_of(exact_zero)
    assert (fork.dtype, fork.loss_dtype) == (torch.float64, torch.float64)


def higher_order(model, batch):
    """Operators that get functions."""
    x, y = batch
    twice = torch.cond(x.sum() > 0, lambda x: 2 * x, lambda x: x + x, (x,))
    return {"loss": (squared(model, twice / 2, y), len(x))}


@pytest.mark.parametrize("sound", [free_energy, bias, bias_in_evaluation, exact_zero, masked, higher_order])
def test_a_repeated_sum_of_a_small_difference_is_no_mean(sound):
    assert not problems(fork_of(sound), is_repeated=True)


def test_what_torch_has_to_compile_is_called_without_a_look_at_its_sums():
    x = torch.randn(1, 1, 4, 8)
    total, cancelled = measure_cancellation(lambda: flex_attention(x, x, x).sum() - 1e3)
    assert torch.equal(total, flex_attention(x, x, x).sum() - 1e3) and not cancelled
    assert measure_cancellation(lambda: x.abs().sum() - x.abs().sum() + 1e-3)[1] > 1


@pytest.mark.parametrize("faulty", [free_energy_mean, masked_mean])
def test_a_repeated_mean_is_found(faulty):
    assert [text for text in problems(fork_of(faulty), is_repeated=True) if loss_checks.IS_MEAN in text]


# ---- tensors as long as the batch that are no rows ----


class Tagged(Rows):
    """One tag for each sample, by default."""

    def count(self, index):
        return 1

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(20, (self.count(index),), generator=generator), self.y[index]

    def collate(self, samples):
        tags, y = zip(*samples, strict=True)
        return torch.cat(tags), self.places(torch.tensor([len(sample_tags) for sample_tags in tags])), torch.stack(y)

    def places(self, counts):
        return counts.cumsum(0) - counts


class Several(Tagged):
    def count(self, index):
        return 1 + index % 3


class MaybeNone(Tagged):
    def count(self, index):
        return index % 2


class Ends(Several):
    def places(self, counts):
        return counts.cumsum(0)


class Pointers(Several):
    def places(self, counts):
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


class Owners(Tagged):
    def places(self, counts):
        return torch.arange(len(counts)).repeat_interleave(counts)


class Graphs(Rows):
    """A batch of two graphs has edges of shape [2, E], too."""

    def __getitem__(self, index):
        return self.x[index].view(4, 2), torch.tensor([[0, 1, 2, 3], [1, 2, 3, index % 4]]), self.y[index]

    def collate(self, samples):
        nodes, edges, y = zip(*samples, strict=True)
        moved = [edge + 4 * number for number, edge in enumerate(edges)]
        return {"nodes": torch.cat(nodes), "edges": torch.cat(moved, 1), "y": torch.stack(y)}


class Ordered(Rows):
    """With the place of each row after sorting."""

    def collate(self, samples):
        x, y = map(torch.stack, zip(*samples, strict=True))
        return x, x[:, 0].argsort(), y


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.net = nn.EmbeddingBag(20, 8), Net()

    def forward(self, tags, places, count):
        if len(places) == count + 1:
            places = places[:-1]
        elif count and places[0] > 0:
            places = F.pad(places, (1, 0))[:-1]
        return self.net(self.bags(tags, places))


class Owned(Bags):
    def forward(self, tags, owners, count):
        return self.net(torch.zeros(count, 8).index_add(0, owners, self.bags.weight[tags]))


class Padded(Several):
    """Padded tags and the number of tags of each sample."""

    def collate(self, samples):
        tags, y = zip(*samples, strict=True)
        padded = nn.utils.rnn.pad_sequence(tags, batch_first=True)
        return padded, torch.tensor([len(sample_tags) for sample_tags in tags]), torch.stack(y)


class OfPadded(Bags):
    def forward(self, tags, counts, count):
        is_tag = (torch.arange(tags.shape[1]) < counts[:, None]).to(self.bags.weight.dtype)
        return self.net((self.bags.weight[tags] * is_tag[..., None]).sum(1))


class OfGraphs(Bags):
    def forward(self, nodes, edges, count):
        summed = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
        return self.net(summed.view(count, 8))


class OfOrdered(Bags):
    def forward(self, x, order, count):
        output = self.net(x[order])
        return torch.empty_like(output).index_copy(0, order, output)


def of_parts(model, batch, power=0):
    x, places, y = batch.values() if isinstance(batch, dict) else batch
    return {"loss": ((model(x, places, len(y)) - y).square().sum() / len(y) ** power, len(y))}


def predict_parts(model, batch):
    x, places, y = batch.values() if isinstance(batch, dict) else batch
    return {"value": model(x, places, len(y))}


class DroppedTag(Several):
    def collate(self, samples):
        tags, places, y = super().collate(samples)
        return tags, places.clamp(max=2), y


PARTS = {
    "a tag for each sample": (Tagged, Bags),
    "one to three tags": (Several, Bags),
    "a tag or none": (MaybeNone, Bags),
    "ends of bags": (Ends, Bags),
    "pointers": (Pointers, Bags),
    "the sample of each tag": (Owners, Owned),
    "edges": (Graphs, OfGraphs),
    "padded tags": (Padded, OfPadded),
    "order": (Ordered, OfOrdered),
}


class Neighbours(Rows):
    """Training samples are mixed with the next one of their micro-batch on the device."""

    def device_transform(self, batch, seed, epoch, indices):
        if not self.is_training:
            return batch
        return tuple((part + part.roll(1, 0)) / 2 for part in batch)


@pytest.mark.parametrize("is_mean", [False, True])
def test_samples_that_are_mixed_on_the_device_add_up_where_they_are_joined(is_mean):
    def loss(model, batch):
        x, y = batch
        return {"loss": (squared(model, x, y) / len(x) ** is_mean, len(x))}

    texts = problems(fork_of(loss, data=Neighbours, predict=lambda model, batch: {"value": model(batch[0])}))
    assert len(texts) == 3 * is_mean, texts


ALL_PARTS = [*product(PARTS, [False, True], [2, 4])]
DEFAULT = [("a tag for each sample", False, 4)]


@pytest.mark.guarantee("verify")
@pytest.mark.parametrize(
    ("kind", "is_repeated", "size"), [case if case in DEFAULT else slow(*case) for case in ALL_PARTS]
)
def test_tensors_that_are_as_long_as_the_batch_may_be_no_rows(kind, is_repeated, size):
    data, model = PARTS[kind]

    def problems_with(power):
        loss = partial(of_parts, power=power)
        return problems(fork_of(loss, data, lambda *_: model(), size=size, predict=predict_parts), is_repeated)

    assert not problems_with(0)
    # the joined tags of repeated samples are all of the first ones, which is no mean
    is_hidden = is_repeated and kind == "the sample of each tag"
    assert is_hidden or [text for text in problems_with(1) if loss_checks.IS_MEAN in text]


def test_a_bag_that_gets_the_tags_of_another_sample_is_found():
    assert problems(fork_of(of_parts, DroppedTag, lambda *_: Bags(), predict=predict_parts))


# ---- another batch in training than in evaluation ----


class Mixed(Rows):
    """Soft labels in training, classes in evaluation."""

    def __getitem__(self, index):
        label = int(self.y[index] > 0)
        return self.x[index], torch.eye(2)[label] * 0.9 + 0.05 if self.is_training else label


class Views(Rows):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"views": torch.stack([x, -x]), "y": y} if self.is_training else {"x": x, "y": y}


def of_mixed(model, batch, powers=(0, 0)):
    x, labels = batch
    logits = torch.cat([model(x), -model(x)], 1)
    power = powers[torch.is_grad_enabled()]
    if torch.is_grad_enabled():
        loss = -(labels * logits.log_softmax(1)).sum()
    else:
        loss = F.nll_loss(logits.log_softmax(1), labels, reduction="sum")
    return {"loss": (loss / len(x) ** power, len(x))}


def of_views(model, batch, powers=(0, 0)):
    power, count = powers[torch.is_grad_enabled()], len(batch["y"])
    if torch.is_grad_enabled():
        one, other = batch["views"].unbind(1)
        return {"loss": ((model(one) - model(other)).square().sum() / count**power, count)}
    error = (model(batch["x"]) - batch["y"]).abs().sum()
    return {"loss": (error / count**power, count), "error": (error, count)}


def predict_first(model, batch):
    if isinstance(batch, dict):
        return {"value": model(batch.get("x", batch["y"].expand(-1, 8)))}
    return {"value": model(batch[0])}


@pytest.mark.guarantee("verify")
@pytest.mark.parametrize("is_repeated", [False, slow(True)])
@pytest.mark.parametrize(("data", "loss"), [(Mixed, of_mixed), slow(Views, of_views)])
def test_a_loss_gets_training_batches_in_training_and_held_out_batches_in_evaluation(data, loss, is_repeated):
    make = partial(fork_of, data=data, predict=predict_first)
    assert not problems(make(loss), is_repeated)
    assert not problems(make(loss, has_held_out=False), is_repeated)
    for powers in ((0, 1), (1, 0)):
        assert [
            text for text in problems(make(partial(loss, powers=powers)), is_repeated) if loss_checks.IS_MEAN in text
        ]


# ---- floats that are drawn in the default dtype ----


DRAWN = """
import functools

KEY = 0

def drawn(key, count):
    return torch.rand(count, generator=torch.Generator().manual_seed(KEY + key))

@functools.cache
def hash_order(seed, epoch, n):
    return drawn(1000 * seed + epoch, n).argsort()

class Drawn(Rows):
    in_memory, cache = True, None

    def __getitem__(self, index):
        self.cache = self.cache or {}
        if index not in self.cache:
            own = 1000 * len(self) + index
            self.cache[index] = drawn(own, 8) + 0.1 * torch.rand(8), drawn(own, 1)
        return self.cache[index]

    def epoch_order(self, seed, epoch, n):
        return hash_order(seed, epoch, n)

    @property
    def fingerprint(self):
        return str(drawn(1, 3).tolist())

def create_dataset(config, split):
    return Drawn(60 if split == "train" else 24, len(split)) if split != "test" else None
"""
FACTOR = """
from dataset import drawn

def param_groups(model, config):
    return [{"params": [*model.parameters()], "name": "all"}]

def lr_factor(config, step, total_steps, warmup_steps, progress):
    return 1 - step / total_steps * drawn(step, 1).item()
"""


@pytest.mark.guarantee("verify")
@pytest.mark.parametrize(("key", "broken"), [("0", []), slow('hash("key") % 1000', ["order", "content", "schedule"])])
def test_floats_that_a_fork_draws_are_those_of_a_run(tmp_path, key, broken):
    """verify computes in float64, in which torch.rand draws other numbers."""
    fork = copy_repository(tmp_path)
    (fork / "dataset.py").write_text(REGRESSION + DRAWN.replace("KEY = 0", f"KEY = {key}"))
    (fork / "model.py").write_text(LINEAR.replace("OUTPUT", "self.net(x)").replace("PREDICTED", "model(x)") + FACTOR)
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS, "--batch_size", 4)
    outcome = outcomes(ended.out)
    assert [name for name in INVARIANTS if outcome[name] == "BROKEN"] == broken, ended.text
