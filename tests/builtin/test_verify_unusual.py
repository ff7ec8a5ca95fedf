# extra: verify and template
"""scripts/verify.py raises no alarm on forks that are unusual, but correct."""

from itertools import product

import pytest

import forks
from ranks import copy_repository, slow
from test_verify import INVARIANTS, outcomes
from test_verify_findings import FLAGS, LINEAR, REGRESSION

PRELUDE = """
import functools, os, random, tempfile
import numpy
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

plain_create, plain_loss, plain_forward, plain_init = create_model, compute_loss, Net.forward, Net.__init__
"""
LION = """
class Lion(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                update = average.lerp(p.grad, 1 - group["betas"][0]).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])

def create_optimizer(groups, config):
    return Lion(groups, config.lr)
"""
COMPILED = """
@torch.compile
def gated(x, weight):
    return x * torch.sigmoid(x @ weight)

def init(self):
    plain_init(self)
    self.gate = nn.Parameter(0.1 * torch.randn(8, 8))

def forward(self, x):
    return plain_forward(self, gated(x, self.gate))

Net.__init__, Net.forward = init, forward
"""
COUNT = """group["count"] = group.get("count", 0) + 1
            for p in"""
SAMPLE = "        return self.x[index], self.y[index]\n"
IN_INIT = """
def init(self):
    plain_init(self)
    BUILD

Net.__init__ = init
"""
FORWARD = """
def forward(self, x):
    COMPUTE

Net.forward = forward
"""
LOSS = """
def compute_loss(model, batch):
    x, y = batch
    COMPUTE
"""
CLASSES = "logits = torch.cat([model(x), -model(x)], 1)"
BY_LENGTH = """        return self.x[index, :1].expand(2 + index % 7, 8), self.y[index]

    def collate(self, samples):
        rows, y = zip(*samples)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack(y)

    def epoch_order(self, seed, epoch, n):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        by_length = order[torch.argsort(order % 7, stable=True)]
        whole, rest = by_length[: n // 4 * 4].view(-1, 4), by_length[n // 4 * 4 :]
        generator = torch.Generator().manual_seed(1000 * seed + epoch + 1)
        return torch.cat([whole[torch.randperm(len(whole), generator=generator)].flatten(), rest])
"""
PADDED = "torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)"
NESTED = FORWARD.replace("COMPUTE", "return self.net(torch.stack([row.mean(0) for row in x.unbind()]))")
SPARSE = """        return self.x[index] * (self.x[index] > 0), self.y[index]

    def collate(self, samples):
        x, y = zip(*samples)
        return torch.stack(x).SPARSE(), torch.stack(y)
"""
FROM_SPARSE = FORWARD.replace("COMPUTE", "return self.net(x.to_dense())")
OF_DICT = """
def compute_loss(model, batch):
    return {"loss": ((model(batch["x"]) - batch["y"]).square().sum(), len(batch["y"]))}

def predict(model, batch):
    return {"value": model(batch["x"])}
"""
BAGS = """        generator = torch.Generator().manual_seed(index)
        return torch.randint(20, (1 + index % 3,), generator=generator), self.y[index]

    def collate(self, samples):
        bags, y = zip(*samples)
        sizes = torch.tensor([0, *map(len, bags)])
        return torch.cat(bags), sizes.cumsum(0)[:-1], torch.stack(y)
"""
VAE = IN_INIT.replace("BUILD", "self.net[2] = nn.Linear(32, 8); self.decoder = nn.Linear(4, 8)") + FORWARD.replace(
    "COMPUTE",
    "mean, log = self.net(x).chunk(2, 1)\n"
    "    return mean, log, self.decoder(mean + (log / 2).exp() * torch.randn_like(mean))",
)
VAE += LOSS.replace(
    "COMPUTE",
    "mean, log, found = model(x)\n    loss = (found - x).square().sum() + (mean.square() + log.exp() - log).sum()"
    "\n    return {'loss': (loss, len(x))}",
)
UNUSUAL = {  # what is added to model.py, and what replaces __getitem__ of the data
    "checkpoint": (
        FORWARD.replace(
            "COMPUTE",
            "return self.net[2](checkpoint(lambda x: F.dropout(self.net[:2](x), 0.5, self.training), x,"
            " use_reentrant=False))",
        ),
        SAMPLE,
    ),
    "reentrant checkpoint": (
        FORWARD.replace(
            "COMPUTE",
            "x = self.net[0](x)\n    return self.net[2](checkpoint(lambda x: F.dropout(x, 0.5, self.training), x,"
            " use_reentrant=True))",
        ),
        SAMPLE,
    ),
    "cache": (
        "",
        """        if "cache" not in vars(self):
            self.cache = {}
        if index not in self.cache:
            self.cache[index] = self.x[index] * 2, self.y[index]
        return self.cache[index]
""",
    ),
    "lru_cache": (
        "",
        """        return self.decoded(index)

    @__import__("functools").lru_cache(maxsize=50)
    def decoded(self, index):
        return self.x[index], self.y[index]
""",
    ),
    "lru_cache of a function": (
        "",
        """        return decoded(index, len(self))

@__import__("functools").cache
def decoded(index, seed):
    generator = torch.Generator().manual_seed(index + seed)
    return torch.randn(8, generator=generator), torch.randn(1, generator=generator)

class Rest:
    pass
""",
    ),
    "Lion": (LION, SAMPLE),
    "an optimizer that counts in its groups": (LION.replace("for p in", COUNT), SAMPLE),
    "an optimizer without weight decay": (
        LION.replace(', "weight_decay": 0.1', "").replace('group["weight_decay"]', "0.1"),
        SAMPLE,
    ),
    "temperature": (
        IN_INIT.replace("BUILD", "self.temperature = nn.Parameter(torch.tensor(1.0))")
        + FORWARD.replace("COMPUTE", "return plain_forward(self, x) * self.temperature.exp()")
        + "\ndef after_step(model, progress, taken):\n    model.temperature.clamp_(max=1.001)\n",
        SAMPLE,
    ),
    "lengths": (
        FORWARD.replace("COMPUTE", "return self.net(x.sum(1))"),
        BY_LENGTH,
    ),
    "label smoothing": (
        LOSS.replace("(model, batch)", "(model, batch, progress)").replace(
            "COMPUTE",
            f"{CLASSES}\n    smoothing = 0.1 * (1 - progress.step / progress.total_steps) * torch.is_grad_enabled()\n"
            "    each = -logits.log_softmax(1)\n"
            "    hard = each.gather(1, (y > 0).long()).sum()\n"
            "    return {'loss': (hard * (1 - smoothing) + each.mean(1).sum() * smoothing, len(y))}",
        ),
        SAMPLE,
    ),
    "frozen stem": (
        IN_INIT.replace(
            "BUILD",
            "self.stem = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).requires_grad_(False)",
        )
        + FORWARD.replace("COMPUTE", "return self.net(self.stem(x))")
        + "\ndef train(self, mode=True):\n    nn.Module.train(self, mode)\n    self.stem.eval()\n    return self\n\n"
        "Net.train = train\n",
        SAMPLE,
    ),
    "random negatives": (
        LOSS.replace(
            "COMPUTE",
            "negatives = torch.randn(len(x), 5, 8, dtype=x.dtype, device=x.device)\n"
            "    scores = torch.cat([model(x)[:, None], model(negatives.flatten(0, 1)).view(-1, 5, 1)], 1)[..., 0]\n"
            "    loss = F.cross_entropy(scores, torch.zeros(len(x)).long(), reduction='sum')\n"
            "    return {'loss': (loss, len(x))}",
        ),
        SAMPLE,
    ),
    "log file": (
        "",
        """        import os, tempfile
        if vars(self).get("pid") != os.getpid():
            self.pid, self.log = os.getpid(), open(f"{tempfile.mkdtemp()}/{os.getpid()}.log", "w")
        print(index, file=self.log)
        return self.x[index], self.y[index]
""",
    ),
    "memmap": (
        "",
        """        import os, tempfile, numpy
        if vars(self).get("pid") != os.getpid():
            path = f"{tempfile.mkdtemp()}/x.npy"
            numpy.save(path, self.x.numpy())
            self.pid, self.map = os.getpid(), numpy.load(path, mmap_mode="r")
        return torch.from_numpy(self.map[index].copy()), self.y[index]
""",
    ),
    "weight norm": (IN_INIT.replace("BUILD", "self.net[0] = parametrizations.weight_norm(self.net[0])"), SAMPLE),
    "orthogonal": (IN_INIT.replace("BUILD", "self.net[0] = parametrizations.orthogonal(self.net[0])"), SAMPLE),
    "EmbeddingBag": (
        IN_INIT.replace("BUILD", "self.bags = nn.EmbeddingBag(20, 8)")
        + "\ndef forward(self, words, offsets):\n    return self.net(self.bags(words, offsets))\n\n"
        "Net.forward = forward\n\ndef predict(model, batch):\n    return {'value': model(*batch[:2])}\n\n"
        "def compute_loss(model, batch):\n"
        "    *x, y = batch\n    return {'loss': ((model(*x) - y).square().sum(), len(y))}\n",
        BAGS,
    ),
    "VAE": (VAE + "\ndef predict(model, batch):\n    return {'mean': model(batch[0])[0]}\n", SAMPLE),
    "stochastic depth": (
        FORWARD.replace(
            "COMPUTE",
            "h = self.net[0](x)\n    kept = torch.rand(len(h), 1) < 0.7 if self.training else 0.7\n"
            "    return self.net[2](h + kept * F.relu(h))",
        ),
        SAMPLE,
    ),
    "diffusion": (
        IN_INIT.replace("BUILD", "self.net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))")
        + LOSS.replace(
            "COMPUTE",
            "t, noise = torch.rand(len(x), 1).to(x), torch.randn_like(x)\n"
            "    found = model(torch.cat([x * (1 - t) + noise * t, t], 1))\n"
            "    return {'loss': ((found - (noise - x)).square().mean(1).sum(), len(x))}",
        )
        + "\ndef predict(model, batch):\n    return {'value': model(F.pad(batch[0], (0, 1)))}\n",
        SAMPLE,
    ),
    "GroupNorm": (IN_INIT.replace("BUILD", "self.net[1] = nn.Sequential(nn.GroupNorm(4, 32), nn.ReLU())"), SAMPLE),
    "own generator": (
        IN_INIT.replace("BUILD", "self.generator = torch.Generator()")
        + FORWARD.replace(
            "COMPUTE",
            "self.generator.manual_seed(int(x.double().abs().sum() * 1000))\n"
            "    noise = torch.randn(x.shape, generator=self.generator)\n"
            "    return plain_forward(self, x + 0.1 * noise * self.training)",
        ),
        SAMPLE,
    ),
    "numpy draws": (
        "",
        "        import numpy\n        x = self.x[index] + torch.from_numpy(numpy.random.randn(8)).float() *"
        " (len(self) > 100)\n        return x, self.y[index]\n",
    ),
    "tied weights": (
        IN_INIT.replace(
            "BUILD", "self.out = nn.Linear(32, 8, bias=False)\n    self.out.weight.data = torch.randn(8, 32)"
        )
        + FORWARD.replace(
            "COMPUTE", "return plain_forward(self, F.linear(F.linear(x, self.out.weight.T), self.out.weight))"
        ),
        SAMPLE,
    ),
    "straight-through": (
        IN_INIT.replace("BUILD", "self.codes = nn.Parameter(torch.randn(6, 32))")
        + FORWARD.replace(
            "COMPUTE",
            "h = self.net[0](x)\n    code = self.codes[torch.cdist(h, self.codes).argmin(1)]\n"
            "    return self.net[2](h + (code - h).detach()) + (code - h.detach()).square().sum(1, True)"
            " + 0 * self.codes.sum()",
        ),
        SAMPLE,
    ),
    "Gumbel": (FORWARD.replace("COMPUTE", "return self.net[2](F.gumbel_softmax(self.net[:2](x), tau=0.5))"), SAMPLE),
    "lazy": (
        "\ndef create_model(config, device):\n    net = plain_create(config, device)\n"
        "    net.net[0] = nn.LazyLinear(32)\n    net(torch.zeros(2, 8))\n    return net\n",
        SAMPLE,
    ),
    "strings in a batch": (
        "\ndef compute_loss(model, batch):\n    return {'loss': ((model(batch['x']) - batch['y']).square().sum(), "
        "len(batch['name']))}\n\ndef predict(model, batch):\n    return {'value': model(batch['x'])}\n",
        "        return {'x': self.x[index], 'y': self.y[index], 'name': f'sample {index}'}\n",
    ),
    "terms": (
        "\ndef loss_counts(batch):\n    return {'first': (batch[1] > 0).sum(), 'second': len(batch[1])}\n"
        + LOSS.replace(
            "COMPUTE",
            "found, counts = model(x), loss_counts(batch)\n    error = (found - y).square()\n"
            "    return {'loss': {'first': ((error * (y > 0)).sum(), counts['first'], 1.0),"
            " 'second': (found.abs().sum(), counts['second'], 0.1)}}",
        ),
        SAMPLE,
    ),
    "draws by weight": (
        "",
        SAMPLE
        + """
    with_replacement = True

    def epoch_order(self, seed, epoch, n):
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        return torch.multinomial(torch.arange(1.0, n + 1), n, replacement=True, generator=generator)
""",
    ),
    "augmented on the device": (
        "",
        SAMPLE
        + """
    def device_transform(self, batch, seed, epoch, indices):
        from utils.rng import sample_draws
        x, y = batch
        if len(self) > 100:
            x = x * (1 + 0.1 * sample_draws(seed, epoch, indices, 8).to(x) / 2**32)
        return x, y
""",
    ),
    "an object in a batch": (
        OF_DICT,
        """        from types import SimpleNamespace
        meta = SimpleNamespace(t=self.x[index, :2], names=["t", f"sample {index}"])
        return {"x": self.x[index], "y": self.y[index], "meta": meta}

    def collate(self, samples):
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")}
        return batch | {"meta": samples[0]["meta"], "names": {name for each in samples for name in each["meta"].names}}
""",
    ),
    "jagged": (NESTED, BY_LENGTH.replace(PADDED, "torch.nested.nested_tensor(list(rows), layout=torch.jagged)")),
    "nested": (NESTED, BY_LENGTH.replace(PADDED, "torch.nested.nested_tensor(list(rows))")),
    "sparse": (FROM_SPARSE, SPARSE.replace("SPARSE", "to_sparse")),
    "sparse rows": (FROM_SPARSE, SPARSE.replace("SPARSE", "to_sparse_csr")),
    "a compiled function": (COMPILED, SAMPLE),
    "a metric in evaluation only": (
        LOSS.replace(
            "COMPUTE",
            "found = model(x)\n    metrics = {'loss': ((found - y).square().sum(), len(y))}\n"
            "    if not torch.is_grad_enabled():\n        metrics['error'] = (found - y).abs().sum(), len(y)\n"
            "    return metrics",
        ),
        SAMPLE,
    ),
}
DEFAULT = ("lengths", "temperature")
ROWS = [(name, 2) for name in DEFAULT] + [
    slow(*row) for row in product(UNUSUAL, (0, 2)) if row not in [(name, 2) for name in DEFAULT]
]


@pytest.mark.parametrize(("name", "ranks"), ROWS)
def test_an_unusual_fork_that_is_correct_raises_no_alarm(tmp_path, name, ranks):
    code, sample = UNUSUAL[name]
    fork, data = copy_repository(tmp_path), REGRESSION.replace("20000 + 20 *", "0.0 +")
    assert SAMPLE in data
    (fork / "dataset.py").write_text(data.replace(SAMPLE, sample))
    model = LINEAR.replace("OUTPUT", "self.net(x)").replace("PREDICTED", "model(x)")
    (fork / "model.py").write_text(model + PRELUDE + code)
    ended = forks.run(fork, ranks, "scripts/verify.py", *FLAGS, "--batch_size", 4)
    assert ended.code == 0 and outcomes(ended.out) == dict.fromkeys(INVARIANTS, "ok"), ended.text


@pytest.mark.guarantee("verify")
def test_a_value_in_a_parameter_group_that_no_checkpoint_can_hold_is_named(tmp_path):
    """An object is neither a number, a text nor a tensor, which are what a checkpoint holds of a group."""
    count = COUNT.replace(
        'group["count"] = group.get("count", 0) + 1', 'group.setdefault("count", Count()).number += 1'
    )
    counter = "\nclass Count:\n    number = 0\n"
    fork = copy_repository(tmp_path)
    (fork / "dataset.py").write_text(REGRESSION.replace("20000 + 20 *", "0.0 +"))
    model = LINEAR.replace("OUTPUT", "self.net(x)").replace("PREDICTED", "model(x)")
    (fork / "model.py").write_text(model + PRELUDE + counter + LION.replace("for p in", count))
    ended = forks.run(fork, 0, "scripts/verify.py", *FLAGS, "--batch_size", 4)
    assert ended.code == 1, ended.text
    assert "BROKEN  training    A checkpoint cannot hold optimizer.param_groups[0].count" in ended.out, ended.text


@pytest.mark.guarantee("verify")
def test_a_batch_without_tensors_gets_the_sentence_of_train_py(tmp_path):
    """They are not moved to the device. Their pickles differ by memory, which is no fault of collate."""
    collate = """
    def collate(self, samples):
        from types import SimpleNamespace
        x, y = zip(*samples)
        return SimpleNamespace(x=torch.stack(x), y=torch.stack(y))
"""
    fork, data = copy_repository(tmp_path), REGRESSION.replace("20000 + 20 *", "0.0 +")
    (fork / "dataset.py").write_text(data.replace(SAMPLE, SAMPLE + collate))
    model = LINEAR.replace("OUTPUT", "self.net(x)").replace("PREDICTED", "model(x)")
    (fork / "model.py").write_text(model.replace("x, y = batch", "x, y = batch.x, batch.y"))
    trained = forks.run(fork, 0, "train.py", *FLAGS, "--batch_size", 4, "--max_steps", 1)
    (sentence,) = [line for line in trained.text.splitlines() if "No tensor is found in a batch of Rows" in line]
    assert trained.code == 2, trained.text
    ended = forks.run(fork, 2, "scripts/verify.py", *FLAGS, "--batch_size", 4)
    (content,) = [line for line in ended.out.splitlines() if line.startswith("BROKEN  content ")]
    assert ended.code == 1 and sentence.partition("dataset: ")[2] in content, ended.text
