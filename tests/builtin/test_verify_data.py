# extra: verify and template
"""What scripts/verify.py finds in the data of a fork, and what it does not take for a fault."""

import re

import pytest

import forks
from ranks import copy_repository, torchrun
from test_verify import outcomes
from test_verify_findings import FLAGS, LINEAR, REGRESSION

MODEL = LINEAR.replace("OUTPUT", "self.net(x)").replace("PREDICTED", "model(x)")


def verified(folder, data, model=MODEL, *flags, ranks=0):
    """How verify.py ended on a fork with this dataset.py and model.py."""
    fork = copy_repository(folder)
    (fork / "dataset.py").write_text(data.replace("20000 + 20 *", "0.0 +"))
    (fork / "model.py").write_text(model)
    return forks.run(fork, ranks, "scripts/verify.py", *FLAGS, *flags)


def broken(ended):
    return [name for name, outcome in outcomes(ended.out).items() if outcome == "BROKEN"]


def line_of(ended, name):
    return re.search(rf"^\w+ +{name} .*", ended.out, re.MULTILINE)[0]


# ---- the order of outputs ----

LENGTHS = """        return self.x[index], self.y[index], 1 + index * 7 % 11

    def collate(self, samples):
        COLLATE

def is_prepared"""
TEXT = REGRESSION.replace("        return self.x[index], self.y[index]\n\ndef is_prepared", LENGTHS)
READS = """
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_sequence

def sequences(samples):
    return [x[:1].expand(length, 8) * torch.arange(1, length + 1)[:, None] / 9 for x, _, length in samples]
"""
TEXT = TEXT.replace("class Rows", f"{READS.strip()}\n\nclass Rows", 1)
SORTS = "samples = sorted(samples, key=lambda each: -each[2])\n        "
PACKS = "return {'x': pack_sequence(sequences(samples)), 'y': torch.stack([y for _, y, _ in samples])}"
PADS = "return {'x': pad_sequence(sequences(samples), batch_first=True), 'y': torch.stack([y for _, y, _ in samples])}"
KEEPS = (
    "lengths = [length for *_, length in samples]\n"
    "        x = pack_padded_sequence(pad_sequence(sequences(samples)), lengths, enforce_sorted=False)\n"
    "        return {'x': x, 'y': torch.stack([y for _, y, _ in samples])}"
)
RESTORES = (
    "place = sorted(range(len(samples)), key=lambda k: -samples[k][2])\n"
    "        x = pack_sequence(sequences([samples[k] for k in place]))\n"
    "        x = x._replace(unsorted_indices=torch.tensor(place).argsort())\n"
    "        return {'x': x, 'y': torch.stack([y for _, y, _ in samples])}"
)
RNN = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[1][0])

def create_model(config, device):
    return Net().to(device)

def param_groups(model, config):
    return [{"params": list(model.parameters())}]

def compute_loss(model, batch):
    return {"loss": (F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))}

def predict(model, batch):
    return {"value": model(batch["x"])}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collate", "is_found", "others"),
    [
        (SORTS + PACKS, True, []),
        (SORTS + PADS, True, ["content", "loss"]),
        (
            f"if len(samples) > 1 and not self.is_training:\n            {SORTS}    {PADS}\n        {PADS}",
            True,
            ["loss"],
        ),
        (KEEPS, False, []),
        (RESTORES, False, []),
        (PADS, False, ["loss"]),  # an output depends on the padding, and so on the other lines
    ],
)
def test_a_collate_that_reorders_samples_is_found(tmp_path, collate, is_found, others):
    data = TEXT.replace("COLLATE", collate).replace(
        "        generator =", "        self.is_training = count > 100\n        generator =", 1
    )
    ended = verified(tmp_path, data, RNN)
    assert broken(ended) == [*others, *["evaluation"] * is_found], ended.text
    assert ("The outputs of a batch are in another order" in ended.out) == is_found


# ---- what a sample depends on ----

ORDERED = """        return self.x[index], self.y[index]

    def epoch_order(self, seed, epoch, n):
        ORDER
        return torch.randperm(n, generator=torch.Generator().manual_seed(1000 * seed + epoch))

    MORE

def is_prepared"""
STATEFUL = REGRESSION.replace("        return self.x[index], self.y[index]\n\ndef is_prepared", ORDERED)
BY_EPOCH = "def device_transform(self, batch, seed, epoch, indices):\n        return batch[0] * (1 + epoch), batch[1]"
BY_STATE = "def collate(self, samples):\n        batch = torch.utils.data.default_collate(samples)\n        return {}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "more", "is_found"),
    [
        ("self.epoch = epoch", BY_STATE.format("batch[0] * (1 + self.epoch // 2), batch[1]"), True),
        (
            "self.calls = getattr(self, 'calls', 0) + 1",
            BY_STATE.format("batch[0] * min(self.calls, 4), batch[1]"),
            True,
        ),
        ("self.epoch = epoch", "", False),  # which nothing reads
        ("self.lengths = getattr(self, 'lengths', self.x.sum(1))", "", False),
        ("", BY_EPOCH, False),
    ],
)
def test_samples_that_depend_on_what_an_order_sets_are_found(tmp_path, order, more, is_found):
    ended = verified(tmp_path, STATEFUL.replace("ORDER", order).replace("MORE", more))
    assert ("content" in broken(ended)) == is_found and bool(broken(ended)) == is_found, ended.text
    assert not is_found or "epoch_order, collate or device_transform changes" in line_of(ended, "content")


IMPORTS = "import torch\nimport datetime, getpass, os, platform, socket, time\nSTARTED = time.time()\n"
PROCESS = REGRESSION.replace("import torch\n", IMPORTS, 1).replace(
    "        self.x =", "        number = torch.as_tensor(NUMBER) % 61 / 61\n        self.x = number +", 1
)
IN_SET = "[int(word) for word in list({str(k) for k in range(8)})]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "text"),
    [
        (IN_SET, "samples differ in a new process"),
        ("[hash(str(k)) % 61 for k in range(8)]", "samples differ in a new process"),
        ("len(os.environ.get('USER', '')) + len(os.environ.get('HOSTNAME', ''))", "samples differ in a new"),
        ("len(getpass.getuser())", "samples differ in a new process"),
        ("sum(map(ord, socket.gethostname()))", "samples differ in a new process"),
        ("sum(map(ord, platform.node())) + sum(map(ord, os.uname().nodename))", "samples differ in a new process"),
        ("time.localtime(0).tm_hour * 60 + time.localtime(0).tm_min", "samples differ in a new process"),
        ("STARTED // 86400 % 100", "samples differ in a new process"),
        ("datetime.datetime.now().year", "samples differ in a new process"),
        ("datetime.date.today().month", "samples differ in a new process"),
        ("int(time.strftime('%j'))", "samples differ in a new process"),
        (IN_SET.replace("list(", "sorted("), ""),
        ("len(os.environ['HOME']) + len(os.environ.get('DATA_ROOT', '')) + len(os.getcwd())", ""),
        ("isinstance(datetime.datetime.fromisoformat('2020-01-01'), datetime.datetime)", ""),
        ("isinstance(datetime.datetime.now(), datetime.date) + (datetime.datetime.now().year > 2000)", ""),
        ("1 // (platform.node() != 'elsewhere')", " Not checked: the data in a new process (ZeroDivisionError: "),
    ],
)
def test_samples_that_depend_on_the_process_are_found(tmp_path, number, text):
    ended = verified(tmp_path, PROCESS.replace("NUMBER", number))
    is_found = text.startswith("samples")
    assert broken(ended) == ["content"] * is_found and text in line_of(ended, "content"), ended.text
    assert ("Not checked" in line_of(ended, "content")) == ("Not checked" in text)


@pytest.mark.slow
def test_ranks_with_another_order_of_a_set_are_told_so(tmp_path):
    """torchrun's ranks have hash seeds of their own."""
    fork = copy_repository(tmp_path)
    (fork / "dataset.py").write_text(PROCESS.replace("20000 + 20 *", "0.0 +").replace("NUMBER", IN_SET))
    (fork / "model.py").write_text(MODEL)
    env = {"PYTHONPATH": str(fork), "PYTHONHASHSEED": "random"}
    ended = torchrun(3, *FLAGS, script="scripts/verify.py", cwd=fork, env=env)
    message = "Make create_dataset independent of the order of a set, the environment and the clock."
    assert ended.code == 1 and message in ended.text, ended.text


BY_EPOCH = "\ndef lr_factor(config, step, total_steps, warmup_steps, progress):\n    return 0.5 ** progress.epoch\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags", "text"),
    [
        (
            MODEL + BY_EPOCH,
            "--epochs 10 --warmup_epochs 2",
            "The run has 160 steps, 32 of them warm-up. lr_factor is 1 at step 0, 0.5 at step 16, 0.25 at step 32,"
            " 0.0312 at step 80, 0.00195 at step 159.",
        ),
        (
            MODEL,
            "--max_steps 90 --warmup_steps 0 --schedule linear",
            "The run has 90 steps without warm-up. lr_factor is 1 at step 0, 0.5 at step 45, 0.0111 at step 89.",
        ),
        (
            MODEL,
            "--epochs 3 --warmup_steps 10 --schedule constant",
            "The run has 48 steps, 10 of them warm-up. lr_factor is 0.1 at step 0, 0.6 at step 5, 1 at step 10, 1 at"
            " step 24, 1 at step 47.",
        ),
        (
            MODEL,
            "--epochs 3 --warmup_steps 0 --schedule linear --schedule_steps 2000",
            "The run has 2,000 steps without warm-up. lr_factor is 1 at step 0, 0.5 at step 1,000, 0.0005 at step"
            " 1,999.",
        ),
        (MODEL, "--max_steps 1 --warmup_steps 0", "The run has 1 step without warm-up. lr_factor is 1 at step 0."),
    ],
)
def test_the_factors_are_those_of_a_run_with_these_flags(tmp_path, model, flags, text):
    ended = verified(tmp_path, REGRESSION, model, "--batch_size", 32, *flags.split())
    assert ended.code == 0 and f" schedule    {text}  [" in ended.out, ended.text


ORDERED = """        return self.x[index], self.y[index]

    def epoch_order(self, seed, epoch, n):
        return torch.randperm(n, generator=torch.Generator().manual_seed(1000 * seed + EPOCH))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epoch", "text"),
    [
        ("epoch", " Each epoch has a new order.  ["),
        ("0", "All epochs have the same order"),
        ("epoch // 2", " 22 epochs have only 11 orders. Please check: Epochs 1 and 2 have the same order."),
        ("epoch % 2", " 22 epochs have only 2 orders. Please check: Epochs 1 and 3 have the same order."),
        ("min(epoch, 9)", " 22 epochs have only 10 orders. Please check: Epochs 10 and 11 have the same order."),
        ("max(epoch, 3)", " 22 epochs have only 19 orders. Please check: Epochs 1 and 2 have the same order."),
    ],
)
def test_orders_that_repeat_are_told_from_new_ones(tmp_path, epoch, text):
    order = ORDERED.replace("EPOCH", epoch)
    ended = verified(tmp_path, REGRESSION.replace("        return self.x[index], self.y[index]\n", order))
    assert text in line_of(ended, "order"), ended.text
    assert broken(ended) == ["order"] * text.startswith("All epochs"), ended.text


# ---- notes ----

NOTED = REGRESSION.replace(
    "        self.y =", "        self.is_training = count > 100\n        SCALE\n        self.y =", 1
).replace(
    "        return self.x[index], self.y[index]\n",
    "        x = self.x[index]\n        DRAW\n        return x, self.y[index]\n",
)
OWN = "self.x = (self.x - self.x.mean(0)) / self.x.std(0)"
OF_TRAINING = "self.x = (self.x - 0.01) / 1.02"
OF_SAMPLES = "self.x = (self.x - self.x.mean(1, True)) / self.x.std(1, correction=0, keepdim=True)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "draw", "text"),
    [
        ("", "x = x + torch.randn(8)", "Held-out samples differ between epochs, so they are augmented at random"),
        ("", "x = x + torch.randn(8) * self.is_training", ""),
        (
            "",
            "torch.manual_seed(index); x = x + torch.randn(8)",
            "__getitem__ draws random numbers, but its samples are the same in all epochs",
        ),
        (OWN, "", "Held-out columns have mean 0 and deviation 1, as training columns have"),
        (OF_TRAINING, "", ""),
        (OF_SAMPLES, "", ""),
        (OWN + " if self.is_training else self.x + 0.1", "", ""),
    ],
)
def test_what_is_seldom_meant_is_a_note(tmp_path, scale, draw, text):
    ended = verified(tmp_path, NOTED.replace("SCALE", scale).replace("DRAW", draw))
    assert not broken(ended), ended.text
    line = line_of(ended, "content")
    assert f"Please check: {text}" in line if text else "Please check" not in line, line
