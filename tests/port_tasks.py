"""Tasks of the shapes that real code has: soft targets (timm), objects as samples and batches (torch_geometric), a
frozen reference beside the model (DPO), and an optimizer that counts its steps in the parameter groups."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from utils.metrics import count_correct


class Adan(torch.optim.Optimizer):
    """Adam with the step of the bias correction in the parameter group, as in timm's Adan and Lamb."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            rate = group["lr"] * math.sqrt(1 - second ** group["step"]) / (1 - first ** group["step"])
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 - first)
                square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad.square(), 1 - second)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-rate)


def create_timm_optimizer(groups, config):
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(groups, opt="lamb", lr=config.lr)


# ---- soft targets ----


class SoftImages(Dataset):
    """Images of two classes at once: float [3, 8, 8], with the share of each of ten classes."""

    num_classes = 10

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(size, 3, 8, 8, generator=generator)
        self.labels = torch.randint(10, (size, 2), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        share = torch.rand(()).item()
        one, other = F.one_hot(self.labels[index], 10).to(torch.get_default_dtype())
        return self.images[index].to(torch.get_default_dtype()), one * share + other * (1 - share)


def create_soft_model(config, device):
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(72, 10)).to(device)


def soft_loss(net, batch):
    images, targets = batch
    logits = net(images)
    loss = -(targets * logits.log_softmax(1)).sum()
    return {"loss": (loss, len(targets)), "top1": (count_correct(logits, targets), len(targets))}


# ---- objects as samples and batches ----


class Graph:
    """A sample: features of nodes, edges between them, and a class."""

    def __init__(self, x, edges, y):
        self.x, self.edges, self.y = x, edges, y


class GraphBatch:
    """Several graphs as one, like torch_geometric's Batch: it has `to`, and is no container."""

    def __init__(self, graphs):
        first = [0]
        for graph in graphs:
            first.append(first[-1] + len(graph.x))
        self.x = torch.cat([graph.x for graph in graphs])
        self.edges = torch.cat([graph.edges + start for graph, start in zip(graphs, first, strict=False)], 1)
        self.graph = torch.cat([torch.full((len(graph.x),), k) for k, graph in enumerate(graphs)])
        self.y = torch.tensor([graph.y for graph in graphs])
        self.count = len(graphs)

    def to(self, device, non_blocking=False):
        for name in ("x", "edges", "graph", "y"):
            setattr(self, name, getattr(self, name).to(device, non_blocking=non_blocking))
        return self


class Graphs(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.graphs = []
        for _ in range(size):
            nodes = int(torch.randint(2, 7, (), generator=generator))
            x = torch.randn(nodes, 5, generator=generator)
            edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
            self.graphs.append(Graph(x, edges, int(x.sum() > 0)))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, index):
        graph = self.graphs[index]
        noise = torch.randn(graph.x.shape) / 10
        return Graph((graph.x + noise).to(torch.get_default_dtype()), graph.edges, graph.y)

    def collate(self, graphs):
        return GraphBatch(graphs)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.message, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, batch):
        nodes = torch.tanh(self.embed(batch.x))
        source, target = batch.edges
        nodes = nodes + torch.zeros_like(nodes).index_add(0, target, self.message(nodes[source]))
        return self.head(nodes.new_zeros(batch.count, 8).index_add(0, batch.graph, nodes))


def graph_loss(net, batch):
    logits = net(batch)
    loss = F.cross_entropy(logits, batch.y, reduction="sum")
    return {"loss": (loss, batch.count), "top1": (count_correct(logits, batch.y), batch.count)}


# ---- a frozen reference ----


@dataclass
class Pairs:
    """A batch: tokens of the chosen and of the rejected lines, int64 [B, 6]."""

    chosen: torch.Tensor
    rejected: torch.Tensor


class Preferences(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(12, (size, 2, 6), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]

    def collate(self, lines):
        return Pairs(*torch.stack(lines).unbind(1))


class Policy(nn.Module):
    """A language model, and a frozen copy of it that it is compared with."""

    def __init__(self):
        super().__init__()
        self.policy = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, pairs):
        margins = []
        for net in (self.policy, self.reference):
            chosen, rejected = (log_probability(net, tokens) for tokens in (pairs.chosen, pairs.rejected))
            margins.append(chosen - rejected)
        return margins[0] - margins[1]


def log_probability(net, tokens):
    log_probs = net(tokens[:, :-1]).log_softmax(2)
    return log_probs.gather(2, tokens[:, 1:, None]).squeeze(2).sum(1)


def preference_loss(net, pairs):
    margin = net(pairs)
    loss = -F.logsigmoid(0.5 * margin).sum()
    return {"loss": (loss, len(margin)), "chosen": ((margin > 0).sum(), len(margin))}


def create_sets(kind):
    def create_dataset(config, split):
        sizes = {"train": config.dataset_size, "val": 7}
        return kind(sizes[split], len(split)) if split in sizes else None

    return create_dataset


def param_groups(net, config):
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


COMMON = {
    "is_prepared": lambda config: True,
    "prepare_data": lambda config: None,
    "param_groups": param_groups,
    "create_optimizer": lambda groups, config: Adan(groups, config.lr),
}
PORTS = {
    "soft": {
        **COMMON,
        "create_dataset": create_sets(SoftImages),
        "create_model": create_soft_model,
        "compute_loss": soft_loss,
    },
    "graphs": {
        **COMMON,
        "create_dataset": create_sets(Graphs),
        "create_model": lambda config, device: GraphNet().to(device),
        "compute_loss": graph_loss,
    },
    "preferences": {
        **COMMON,
        "create_dataset": create_sets(Preferences),
        "create_model": lambda config, device: Policy().to(device),
        "compute_loss": preference_loss,
    },
}
PORTS["timm"] = PORTS["soft"] | {"create_optimizer": create_timm_optimizer}
