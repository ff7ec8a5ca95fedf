# extra: verify and template
"""What scripts/verify.py asks a person to judge in a model and its loss; each row is a fork, beside sound ones."""

import copy
import math
import re
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from config import TrainingConfig
from ddp_utils import DistributedContext
from lib.values import spread_rows
from lib.verify.fork import Fork
from lib.verify.loss_notes import inspect_passes
from lib.verify.model_notes import inspect_statistics, inspect_weights
from utils.settings.errors import UserError
from utils.training.hooks import ModelHooks

CPU = torch.device("cpu")


class Rows(torch.utils.data.Dataset):
    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        return tuple(column[index] for column in self.columns)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(most, *shape, seed=0):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed))


CLASSES = Rows(draw(200, 8), whole(10, 200))
TOKENS = Rows(whole(20, 100, 13))


def fork_of(create, loss, data=CLASSES, **changes):
    module = types.SimpleNamespace(
        create_model=lambda config, device: create(),
        param_groups=lambda model, config: [{"params": list(model.parameters())}],
        compute_loss=loss,
    )
    config = TrainingConfig(**{"epochs": 2, "batch_size": 100, "num_workers": 0} | changes)
    fork = Fork(config, data, data, DistributedContext(0, 0, 1, CPU), None, ModelHooks.from_module(module), config)
    fork.dtype = torch.float64
    return fork


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def linear():
    return nn.Linear(8, 10)


def classify(metric):
    """A loss with one more metric."""

    def compute_loss(model, batch):
        x, y = batch
        logits = model(x)
        return {"loss": (F.cross_entropy(logits, y, reduction="sum"), len(y)), **metric(logits, y)}

    return compute_loss


def correct(logits, y, k=1):
    return (logits.topk(k).indices == y[:, None]).any(1)


def by_one(logits, y):
    total = torch.zeros((), dtype=torch.int8)
    for one in correct(logits, y):
        total += one
    return total


NARROW, HALF = "overflows above", "float16 may reach"


@pytest.mark.parametrize(
    ("metric", "size", "expected"),
    [
        (lambda x, y: {"right": (correct(x, y).to(torch.uint8).sum(dtype=torch.uint8), len(y))}, 300, NARROW),
        (lambda x, y: {"right": (correct(x, y).sum(dtype=torch.uint8).item(), len(y))}, 300, NARROW),
        (lambda x, y: {"right": (correct(x, y).sum().to(torch.uint8), len(y))}, 300, NARROW),
        (lambda x, y: {"right": (by_one(x, y), len(y))}, 200, NARROW),
        (lambda x, y: {"right": (correct(x, y).sum(), torch.tensor(len(y), dtype=torch.uint8))}, 300, NARROW),
        (lambda x, y: {"right": (correct(x, y).short().sum(dtype=torch.int16).int(), 1)}, 40_000, NARROW),
        (lambda x, y: {"error": ((x.half() * 40).square().sum(), len(y))}, 10_000, HALF),
        (lambda x, y: {"error": (F.mse_loss(x.half(), x.half() * 9, reduction="sum").float(), len(y))}, 100_000, HALF),
        # sound
        (lambda x, y: {"right": (correct(x, y).sum(dtype=torch.uint8), len(y))}, 200, ""),
        (lambda x, y: {"right": (correct(x, y).sum(), len(y))}, 100_000, ""),
        (lambda x, y: {"right": (correct(x, y).half().sum(), len(y))}, 30_000, ""),
        (lambda x, y: {"size": (torch.tensor(9, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8))}, 9_000, ""),
        (lambda x, y: {"size": ((x > 0).sum(1, dtype=torch.uint8).double().sum(), len(y))}, 9_000, ""),
        (lambda x, y: {"size": (torch.ones(40, dtype=torch.uint8).sum(dtype=torch.uint8).double(), 1)}, 9_000, ""),
        (lambda x, y: {"size": (x.bfloat16().mean(1).sum().float(), len(y))}, 9_000, ""),
        (lambda x, y: {"size": ((255 * x.sigmoid()).byte().amax().double(), 1)}, 9_000, ""),
    ],
)
def test_a_sum_that_overflows_in_batches_of_the_run_is_found(metric, size, expected):
    fork = fork_of(linear, classify(metric), batch_size=10, eval_batch_size=size)
    if expected == NARROW:
        with pytest.raises(UserError, match=expected):
            inspect_passes(fork)
    else:
        assert expected in (note := inspect_passes(fork)) and bool(note) == bool(expected)


EQUAL = "Please check: {} have equal sums and counts"


def precision(logits, y):
    predicted, real = logits[:, 0] > 0, y > 4
    both = (predicted & real).sum()
    return both, predicted.sum(), real.sum()


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (
            lambda x, y: dict.fromkeys(("precision", "recall"), precision(x, y)[:2]),
            EQUAL.format("precision and recall"),
        ),
        (lambda x, y: {f"top{k}": (correct(x, y).sum(), len(y)) for k in (1, 5)}, EQUAL.format("top1 and top5")),
        (
            lambda x, y: {} if torch.is_grad_enabled() else dict.fromkeys("ab", (correct(x, y, 3).sum(), len(y))),
            EQUAL.format("a and b"),
        ),
        # sound
        (lambda x, y: {f"top{k}": (correct(x, y, k).sum(), len(y)) for k in (1, 5)}, ""),
        (lambda x, y: {"precision": precision(x, y)[:2], "recall": precision(x, y)[::2]}, ""),
        (lambda x, y: {name: (x.isnan().sum(), len(y)) for name in ("nan", "inf")}, ""),
        (lambda x, y: {"ce": (F.cross_entropy(x, y, reduction="sum"), len(y))}, ""),
        (
            lambda x, y: {
                "nll": (F.cross_entropy(x, y, reduction="sum"), len(y)),
                "perplexity": (F.cross_entropy(x, y, reduction="sum"), len(y), math.exp),
            },
            "",
        ),
        (
            lambda x, y: {
                "hard": (correct(x, y).sum(), len(y)),
                "mixed": (correct(x, y).sum() * (0.5 if torch.is_grad_enabled() else 1), len(y)),
            },
            "",
        ),
    ],
)
def test_two_metrics_that_are_always_equal_are_a_note(metric, expected):
    note = inspect_passes(fork_of(linear, classify(metric)))
    assert expected in note and bool(note) == bool(expected)


class Sequence(nn.Module):
    """Tokens [B, T] -> logits [B, T, 20]; layer: of vectors [B, T, 16]."""

    def __init__(self, layer, classes=20):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layer = layer
        self.head = nn.Linear(16, classes)

    def forward(self, ids):
        return self.head(self.layer(self.tokens(ids)))


class Attention(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.is_causal = is_causal

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, mask if self.is_causal else None)


class Recurrent(nn.Module):
    def __init__(self, bidirectional):
        super().__init__()
        self.net = nn.LSTM(16, 16 // (1 + bidirectional), batch_first=True, bidirectional=bidirectional)

    def forward(self, x):
        return self.net(x)[0]


class Convolution(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.net, self.padding = nn.Conv1d(16, 16, 3), (left, right)

    def forward(self, x):
        return self.net(F.pad(x.transpose(1, 2), self.padding)).transpose(1, 2)


class Pooled(nn.Module):
    def forward(self, x):
        return x + x.mean(1, keepdim=True)


class Inside(nn.Module):
    """Shifts its labels itself, as models of transformers do."""

    def __init__(self, layer):
        super().__init__()
        self.net = Sequence(layer)

    def forward(self, input_ids, labels):
        logits = self.net(input_ids)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def language(model, batch):
    inputs, targets = batch[0][:, :-1], batch[0][:, 1:]
    return {"loss": (F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())}


def unshifted(model, batch):
    return {"loss": (F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten(), reduction="sum"), 13)}


def classes_second(model, batch):
    logits = model(batch[0][:, :-1]).transpose(1, 2)
    return {"loss": (F.cross_entropy(logits, batch[0][:, 1:], reduction="sum"), batch[0][:, 1:].numel())}


def gathered(model, batch):
    log_probs = model(batch[0])[:, :-1].log_softmax(-1).gather(2, batch[0][:, 1:, None])
    return {"loss": (-log_probs.sum(), log_probs.numel())}


def masked(model, batch):
    targets = batch[0].masked_fill(torch.rand(batch[0].shape) > 0.2, -100)
    logits = model(batch[0].masked_fill(targets >= 0, 0))
    return {"loss": (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum())}


def padded(model, batch):
    targets = batch[0][:, 1:].clone()
    targets[:, 6:] = -100
    return {"loss": (F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum"), 24)}


def of_labels(model, batch):
    return {"loss": (model(input_ids=batch[0], labels=batch[0])["loss"] * len(batch[0]), len(batch[0]))}


def series(model, batch):
    x = batch[0][:, :, None] * 0.1
    return {"loss": ((model(x[:, :-1]) - x[:, 1:]).square().sum(), x[:, 1:].numel())}


class OfSeries(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), layer, nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x - x.mean((0, 1)).detach() * 0)


SEEN = "predictions depend on these inputs. Use a causal mask"
UNSHIFTED = "Shift the targets by one, or mask"


@pytest.mark.parametrize(
    ("create", "loss", "expected"),
    [
        (lambda: Sequence(Attention(False)), language, SEEN),
        (lambda: Sequence(Attention(False)), classes_second, SEEN),
        (lambda: Sequence(Attention(False)), gathered, SEEN),
        (lambda: Sequence(Attention(False)), padded, SEEN),
        (lambda: Inside(Attention(False)), of_labels, SEEN),
        (lambda: Sequence(Recurrent(True)), language, SEEN),
        (lambda: Sequence(Convolution(1, 1)), language, SEEN),
        (lambda: Sequence(Convolution(0, 2)), language, SEEN),
        (lambda: Sequence(Pooled()), language, SEEN),
        (lambda: OfSeries(Recurrent(True)), series, SEEN),
        (lambda: Sequence(Attention(True)), unshifted, UNSHIFTED),
        (lambda: Sequence(Recurrent(False)), unshifted, UNSHIFTED),
        # sound
        (lambda: Sequence(Attention(True)), language, ""),
        (lambda: Sequence(Attention(True)), classes_second, ""),
        (lambda: Sequence(Attention(True)), gathered, ""),
        (lambda: Sequence(Attention(True)), padded, ""),
        (lambda: Inside(Attention(True)), of_labels, ""),
        (lambda: Sequence(Recurrent(False)), language, ""),
        (lambda: Sequence(Convolution(2, 0)), language, ""),
        (lambda: OfSeries(Recurrent(False)), series, ""),
        (lambda: Sequence(Attention(False)), masked, ""),
    ],
)
def test_a_model_of_sequences_that_sees_its_targets_is_a_note(create, loss, expected):
    note = inspect_passes(fork_of(create, loss, TOKENS))
    assert expected in note and bool(note) == bool(expected)


X, NOISE, PRICE = draw(200, 6), draw(200, 1, seed=1), draw(200, seed=2)
PAIRS = Rows(torch.cat([X, PRICE[:, None]], 1), PRICE)
BINARY = Rows(torch.cat([X, (PRICE > 0)[:, None]], 1), (PRICE > 0).long())


def regress(model, batch):
    predicted = model(batch[0])[:, 0]
    return {"loss": (F.mse_loss(predicted, batch[1], reduction="sum"), len(predicted))}


def by_hand(model, batch):
    return {"loss": ((batch[1] - model(batch[0])[:, 0]).square().sum(), len(batch[1]))}


def rebuilt(model, batch):
    return {"loss": (F.mse_loss(model(batch[0]), batch[0], reduction="sum"), len(batch[0]))}


def in_model(model, batch):
    return {"loss": (model(batch[0], labels=batch[1]) * len(batch[0]), len(batch[0]))}


class WithLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 10)

    def forward(self, x, labels):
        return F.cross_entropy(self.net(x), labels)


class SinceTheLast(nn.Module):
    """Forecasts the difference to the last value."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(7, 1)

    def forward(self, x):
        last = x[:, -1:]
        return self.net(x - last) + last


class WithoutTheLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 10)

    def forward(self, x):
        return self.net(x[:, :6])


ANSWER = "also an input of the model"
SPARSE = draw(200, 900)
SPARSE[:, 5] = 0.0
SPARSE[spread_rows(48, 200)[10], 5] = 1.0


@pytest.mark.parametrize(
    ("create", "loss", "data", "expected"),
    [
        (lambda: nn.Linear(7, 1), regress, PAIRS, ANSWER),
        (lambda: nn.Linear(7, 1), by_hand, PAIRS, ANSWER),
        (lambda: nn.Linear(7, 2), classify(lambda x, y: {}), BINARY, ANSWER),
        # sound
        (lambda: nn.Linear(6, 1), regress, Rows(X, PRICE), ""),
        (lambda: nn.Linear(7, 7), rebuilt, PAIRS, ""),
        (lambda: nn.Linear(1, 1), rebuilt, Rows(NOISE), ""),
        (WithLabels, in_model, CLASSES, ""),
        (WithoutTheLast, classify(lambda x, y: {}), BINARY, ""),
        (SinceTheLast, by_hand, Rows(torch.cat([X, NOISE], 1), PRICE), ""),
        (
            lambda: nn.Linear(900, 2),
            classify(lambda x, y: {}),
            Rows((draw(200, 900) > 1.8) * 1.0, whole(100, 200) // 99),
            "",
        ),
        (lambda: nn.Linear(7, 2), classify(lambda x, y: {}), Rows(torch.ones(90, 7), torch.ones(90).long()), ""),
        # one positive of 48 samples, which one of many columns has by chance
        (lambda: nn.Linear(900, 2), classify(lambda x, y: {}), Rows(SPARSE, SPARSE[:, 5].long()), ""),
    ],
)
def test_a_target_among_the_inputs_is_a_note(create, loss, data, expected):
    note = inspect_passes(fork_of(create, loss, data))
    assert expected in note and bool(note) == bool(expected)


CODE = """
import numpy, torch
from torch import nn

def seeded():
    torch.manual_seed(3)
    return nn.Linear(8, 10)

def forked():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        nn.init.normal_(net[1].weight)
    return net

def own_generator():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10))
    nn.init.normal_(net[1].weight, generator=torch.Generator().manual_seed(3))
    return net

def of_numpy():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10))
    net[1].weight.data = torch.from_numpy(numpy.random.default_rng(3).normal(size=(10, 8)))
    return net
"""
OF_A_FORK = {}
exec(compile(CODE, "model.py", "exec"), OF_A_FORK)  # seeds in files of the template are not changed


def frozen_features():
    net = OF_A_FORK["own_generator"]()
    net[1].requires_grad_(False)
    return net


def constants():
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 10))
    nn.init.eye_(net[2].weight)
    net[3].weight.data = torch.arange(80.0).view(10, 8).sin()
    return net


def loaded():
    net = nn.Linear(8, 10)
    net.weight.data = WEIGHTS.clone()
    return net


WEIGHTS = draw(10, 8).double()


def tied(change):
    """A change of a model whose embedding and output layer share a parameter."""

    def create():
        net = Sequence(nn.Identity())
        net.head = nn.Linear(16, 20, bias=False)
        net.head.weight = net.tokens.weight
        return change(net) or net

    return create


def broken(net):
    net.head.weight = nn.Parameter(net.tokens.weight.clone())


def broken_by_a_copy(net):
    net.head = copy.deepcopy(net.head)


def with_reference(net):
    net.reference = copy.deepcopy(net.head).requires_grad_(False)


def with_towers(net):
    net.other = copy.deepcopy(net.tokens)
    net.critics = nn.ModuleList([nn.Linear(3, 3)])
    net.critics.append(copy.deepcopy(net.critics[0]))


def of_two_sides(is_whole):
    """An embedding, or a whole tower, that is copied for a second side."""
    first = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4))
    second = copy.deepcopy(first) if is_whole else nn.Sequential(copy.deepcopy(first[0]), nn.Linear(8, 4))
    return nn.ModuleDict({"encoder": first, "decoder": second})


def transposed():
    net = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 6))
    net[1].weight = nn.Parameter(net[0].weight.detach().t().contiguous())
    return net


def transformer():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3)


SEED, TIE = "A seed in the code determines the initial values of", "but are two parameters"


@pytest.mark.parametrize(
    ("create", "expected"),
    [
        (OF_A_FORK["seeded"], f"Please check: {SEED} weight, bias"),
        (OF_A_FORK["forked"], f"Please check: {SEED} 1.weight"),
        (OF_A_FORK["own_generator"], f"Please check: {SEED} 1.weight"),
        (OF_A_FORK["of_numpy"], f"Please check: {SEED} 1.weight"),
        (tied(broken), f"Please check: tokens.weight and head.weight have the same random values, {TIE}"),
        (tied(broken_by_a_copy), TIE),
        (lambda: of_two_sides(False), f"encoder.0.weight and decoder.0.weight have the same random values, {TIE}"),
        (transposed, TIE),
        # sound
        (linear, ""),
        (frozen_features, ""),
        (constants, ""),
        (loaded, ""),
        (transformer, ""),
        (lambda: of_two_sides(True), ""),
        (tied(lambda net: None), ""),
        (tied(with_reference), ""),
        (tied(with_towers), ""),
    ],
)
def test_weights_of_a_fixed_seed_and_broken_ties_are_notes(create, expected):
    note = inspect_weights(fork_of(create, None))
    assert expected in note and bool(note) == bool(expected)


class Kept(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


class OfTheBatch(nn.BatchNorm1d):
    """Never updates its statistics, nor uses them in training."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True)


class AlwaysOfTheBatch(OfTheBatch):
    def forward(self, x):
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True)


class Pretrained(Kept):
    def __init__(self, size):
        super().__init__(size)
        self.running_mean += 0.1


def nested(norm, freeze):
    def create():
        net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), norm(8)), nn.Linear(8, 10))
        net[0].requires_grad_(not freeze)
        return net

    return create


class Averaged(nn.Sequential):
    """A frozen teacher, whose weights are an average of those that are trained."""

    def forward(self, x):
        self[1].weight.data += 0.1
        return super().forward(x)


def averaged():
    return Averaged(nn.Linear(8, 8), nn.BatchNorm1d(8).requires_grad_(False), nn.Linear(8, 10))


class Own(nn.Module):
    """Statistics of the batch in training, and kept ones in evaluation."""

    rate = 0.0

    def __init__(self, size):
        super().__init__()
        self.register_buffer("moving_mean", torch.zeros(size))

    def forward(self, x):
        if not self.training:
            return x - self.moving_mean
        self.moving_mean.lerp_(x.mean(0).detach(), self.rate)
        return x - x.mean(0)


class Updated(Own):
    rate = 0.1


class Shifted(Own):
    """Not a statistic: training uses it as evaluation does."""

    def forward(self, x):
        return x - self.moving_mean


class OfDomains(nn.Module):
    """Evaluation has a norm of its own."""

    def __init__(self, size):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for _ in range(2))

    def forward(self, x):
        return self.norms[not torch.is_grad_enabled()](x)


def plain_norm(size):
    return nn.BatchNorm1d(size, affine=False)


MOVES, INITIAL = "The running statistics of frozen layers move", "still 0 or 1"


@pytest.mark.parametrize(
    ("create", "expected"),
    [
        (nested(nn.BatchNorm1d, True), MOVES),
        (nested(plain_norm, True), rf"{MOVES} in training \(0\.1\)"),
        (nested(lambda size: nn.BatchNorm1d(size, momentum=0.0), False), INITIAL),
        (nested(OfTheBatch, False), INITIAL),
        (nested(Kept, False), INITIAL),
        (
            nested(Own, False),
            rf"An evaluation normalizes by running statistics that are {INITIAL} after training \(0\.1\.moving_mean\)",
        ),
        (nested(OfDomains, False), rf"{INITIAL} .*\(0\.1\.norms\.1\.running_mean, 0\.1\.norms\.1\.running_var\)"),
        # sound
        (nested(nn.BatchNorm1d, False), ""),
        (nested(plain_norm, False), ""),
        (nested(Pretrained, True), ""),
        (averaged, ""),
        (nested(AlwaysOfTheBatch, False), ""),
        (nested(Updated, False), ""),
        (nested(Shifted, False), ""),
        (nested(lambda size: nn.BatchNorm1d(size, track_running_stats=False), True), ""),
        (nested(nn.LayerNorm, True), ""),
        (lambda: nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 10)), ""),
    ],
)
def test_statistics_that_move_in_frozen_layers_or_never_are_notes(create, expected):
    fork = fork_of(create, classify(lambda x, y: {}))
    net = fork.create_model().train()
    for number in range(3):
        net(draw(4, 8, seed=number).double())
    fork.trainings["whole"] = types.SimpleNamespace(state=types.SimpleNamespace(model=net))
    note = inspect_statistics(fork)
    assert re.search(expected, note) and bool(note) == bool(expected)


def refuses(at):
    """create_model that fails at one of its calls, as with a seed or a second model that a fork does not accept."""
    calls = []

    def create():
        calls.append(1)
        if len(calls) == at:
            raise RuntimeError("no second model")
        return linear()

    return create


@pytest.mark.parametrize(
    ("look", "create", "what"),
    [
        (inspect_weights, refuses(2), "whether the initial weights follow --seed"),
        (inspect_weights, refuses(3), "whether the initial weights follow --seed"),
        (inspect_passes, refuses(1), "sums in few bits"),
        (inspect_statistics, refuses(2), "the running statistics"),
    ],
)
def test_a_look_that_fails_is_no_finding(look, create, what):
    fork = fork_of(create, classify(lambda x, y: {}))
    if look is inspect_statistics:
        fork.trainings["whole"] = types.SimpleNamespace(state=types.SimpleNamespace(model=fork.create_model()))
    note = look(fork)
    assert note.startswith(f"Not checked: {what}") and note.endswith("(RuntimeError: no second model)."), note
