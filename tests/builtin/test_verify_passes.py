# extra: verify and template
"""scripts/verify.py finds a loss that depends on more than its micro-batch and the weights: on how the work is divided,
on a generator that is seeded again, or on random numbers that the backward pass draws again. tests/faults has more."""

from itertools import product

import pytest

import forks
from ranks import slow
from test_verify import outcomes
from test_verify_findings import FLAGS, fork_with

USUAL = """    x, y = batch
    return {"loss": ((model(x) - y).square().sum(), len(y))}

import os, random
import numpy
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

plain_create, plain_loss, plain_forward = create_model, compute_loss, Net.forward

def scaled(factor, metrics):
    return {"loss": (factor * metrics["loss"][0], metrics["loss"][1])}
"""
ACCUMULATED = """
def create_model(config, device):
    net = plain_create(config, device)
    net.steps = config.grad_accum_steps
    return net

def compute_loss(model, batch):
    return scaled(1 / getattr(model, "module", model).steps, plain_loss(model, batch))
"""
LOSS = """
def compute_loss(model, batch):
    return scaled(FACTOR, plain_loss(model, batch))
"""
NOISY = """
def compute_loss(model, batch):
    x, y = batch
    loss = (model(x + 0.5 * torch.randn_like(x)) - y).square().sum() * FACTOR
    return {"loss": (loss, len(y))}
"""
IMPORTED = """
from torch.distributed import get_world_size, is_initialized

def forward(self, x):
    return plain_forward(self, x) / (get_world_size() if is_initialized() else 1)

Net.forward = forward
"""
RATE = """
def param_groups(model, config):
    return [{"params": list(model.parameters()), "lr": config.lr * config.grad_accum_steps}]
"""
SEEDED = """
def forward(self, x):
    SEED
    return self.net(F.dropout(x, 0.5, self.training))

Net.forward = forward
"""
IN_EVALUATION = """
def compute_loss(model, batch):
    if not torch.is_grad_enabled():
        torch.manual_seed(0)
    return plain_loss(model, batch)
"""
IN_BACKWARD = """
def forward(self, x):
    x = F.dropout(plain_forward(self, x), 0.5, self.training)
    if x.requires_grad:
        x.register_hook(lambda gradient: torch.manual_seed(0) and None)
    return x

Net.forward = forward
"""
OWN_GENERATOR = SEEDED.replace("SEED", "x = x + torch.randn(8, generator=torch.Generator().manual_seed(0))")
RECOMPUTED = """
def forward(self, x):
    layers = nn.Sequential(self.net[0], nn.Dropout(0.5).train(self.training), self.net[1])
    return self.net[2](checkpoint(CHOSEN, use_reentrant=False, preserve_rng_state=KEPT))

Net.forward = forward
"""
ROUNDED = """
def forward(self, x):
    x = plain_forward(self, x)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * (1 + 0.01 * torch.rand_like(gradient)))
    return x

Net.forward = forward
"""
DIVISION, SEED, AGAIN = "Leave that out, since the template divides", "seeds it again", "drawn in the backward pass"
WORLD = "(dist.get_world_size() if dist.is_initialized() else 1)"
RANK = "int(os.environ.get('RANK', 0))"
BROKEN = {  # code: the invariants that are broken on one rank, and the text
    "accumulation": (ACCUMULATED, "loss gradient", "changes with grad_accum_steps, so the model or compute_loss"),
    "rate": (RATE, "gradient", "depends on the ranks or on grad_accum_steps"),
    "environment when imported": (
        LOSS.replace("FACTOR", "1 / COUNT") + "\nCOUNT = int(os.environ.get('WORLD_SIZE', 1))\n",
        "loss",
        DIVISION,
    ),
    "imported by name": (IMPORTED, "loss", DIVISION),
    "rank": (LOSS.replace("FACTOR", f"1 + 0.1 * {RANK}"), "loss", DIVISION),
    "rank in evaluation": (
        LOSS.replace("FACTOR", f"1 if torch.is_grad_enabled() else 1 + 0.1 * {RANK}"),
        "loss",
        DIVISION,
    ),
    "a state": (
        "STATE = torch.get_rng_state()\n" + SEEDED.replace("SEED", "torch.set_rng_state(STATE)"),
        "loss",
        "torch's global generator has the same state after a forward pass",
    ),
    "the generator": (SEEDED.replace("SEED", "torch.default_generator.manual_seed(3)"), "loss", SEED),
    "random": (SEEDED.replace("SEED", "random.seed(0)"), "loss", "Python's global generator has the same state"),
    "in evaluation": (IN_EVALUATION, "loss", SEED),
    "in backward": (IN_BACKWARD, "gradient", "has the same state after a backward pass"),
    "a mean of random numbers": (NOISY.replace("FACTOR", "1 / len(y)"), "loss", "a mean instead of a sum"),
    "a checkpoint of a function": (
        RECOMPUTED.replace("CHOSEN", "lambda x: F.dropout(x, 0.5, self.training) @ self.net[0].weight.T, x").replace(
            "KEPT", "False"
        )
        + "\nplain_groups = param_groups\n\ndef create_model(config, device):\n    net = plain_create(config, device)\n"
        "    net.net[0].bias = None\n    return net\n",
        "gradient",
        AGAIN,
    ),
}
OTHERS = [name for name in BROKEN if name != "accumulation"]
SOUND = {
    "a generator of its own": (OWN_GENERATOR, ""),
    "fork_rng": (
        SEEDED.replace("SEED", "with torch.random.fork_rng():\n        torch.manual_seed(0)\n        torch.rand(2)"),
        "",
    ),
    "noise": (NOISY.replace("FACTOR", "1"), ""),
    "dropout": (SEEDED.replace("SEED", "pass"), ""),
    "the number of ranks in a message": (LOSS.replace("FACTOR", f"1 if print('ranks', {WORLD}) is None else 0"), ""),
    "a checkpoint": (RECOMPUTED.replace("CHOSEN", "layers, x").replace("KEPT", "True"), ""),
    "a checkpoint without dropout": (RECOMPUTED.replace("CHOSEN", "self.net[:2], x").replace("KEPT", "False"), ""),
    "rounding at random": (
        ROUNDED,
        "Please check: The gradient depends on random numbers that the backward pass draws",
    ),
}


@pytest.mark.guarantee("verify")
@pytest.mark.parametrize(
    ("name", "ranks"), [("accumulation", 0), slow("accumulation", 2), *(slow(*row) for row in product(OTHERS, (0, 2)))]
)
def test_a_loss_that_depends_on_more_than_its_micro_batch_is_named(tmp_path, name, ranks):
    code, expected, text = BROKEN[name]
    ended = forks.run(fork_with(tmp_path, USUAL + code), ranks, "scripts/verify.py", *FLAGS)
    broken = [name for name, outcome in outcomes(ended.out).items() if outcome == "BROKEN"]
    assert set(expected.split()) <= {*broken} and text in ended.out, ended.text
    assert ranks or broken == expected.split(), ended.text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("name", SOUND)
def test_a_loss_that_depends_on_its_micro_batch_alone_is_no_finding(tmp_path, name, ranks):
    code, note = SOUND[name]
    ended = forks.run(fork_with(tmp_path, USUAL + code), ranks, "scripts/verify.py", *FLAGS)
    assert ended.code == 0 and note in ended.out, ended.text
    notes = {line.partition(" Please check: ")[2] for line in ended.out.splitlines() if "ok      gradient" in line}
    assert bool("".join(notes)) == bool(note), ended.text
