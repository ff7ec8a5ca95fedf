"""Small tasks that replace model.py and dataset.py, quick enough for many steps in float64; tools to watch the loop.

images  images in memory, augmented on the device; a small network with BatchNorm and dropout
ramped  the same, with a loss that knows the step
taught  a student that learns from its own moving average too, with a bound on its weights, both of after_step
thawing a trunk that is trained from the eighth step on, and a head with another schedule
experts the same images, with layers that are dropped at random, a head for some labels and a layer without use
terms   the same, with a loss of three terms, each with a count of its own
joint   ramped, taught, thawing and terms in one
plain   the same images, GroupNorm, no dropout: nothing depends on the micro-batch
lines   lines of unequal length, with a loss per predicted token, random transforms on the CPU, dropout
blocks  the same lines, a network of blocks with tied weights, dropout
soft, graphs, preferences  see port_tasks.py
"""

import contextlib
import functools
import hashlib
import math
import os
import signal
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import dataset
import model
import plain_loop
import train
from config import TrainingConfig
from line_tasks import BlockModel, TokenModel, create_lines, token_loss
from port_tasks import PORTS
from utils import assembly
from utils.distributed.consensus import Consensus
from utils.example.augment import augment_images, normalize
from utils.metrics import count_correct
from utils.report.reporter import Reporter


class SmallNet(nn.Module):
    """float [B, 3, 8, 8] -> logits [B, classes]; 2,090 parameters with 10 classes, in several buckets of 2 kB."""

    def __init__(self, has_batch_norm, classes):
        super().__init__()
        norm = nn.BatchNorm2d if has_batch_norm else functools.partial(nn.GroupNorm, 2)
        first, second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.features = nn.Sequential(first, norm(8), nn.ReLU(), second, norm(16), nn.ReLU())
        self.dropout = nn.Dropout(0.2 if has_batch_norm else 0.0)
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.dropout(self.features(x).flatten(1)))


class LeavesOut(nn.BatchNorm2d):
    """A layer that half of the micro-batches leave out in training, with no parameters that DDP would wait for."""

    def forward(self, x):
        return super().forward(x) if not self.training or torch.rand(()) < 0.5 else x


class Images(Dataset):
    """uint8 images of 3 x 8 x 8 in memory: one pattern per class plus noise, so that a network can learn them."""

    in_memory = cacheable = True
    mean, std, image_size, in_channels = torch.full((3,), 0.5), torch.full((3,), 0.2), 8, 3

    def __init__(self, size, split, augment="crop", classes=10):
        generator = torch.Generator().manual_seed(5)
        patterns = torch.randn(classes, 3, 8, 8, generator=generator)
        generator.manual_seed(size + 1000 * ("train", "val", "test").index(split))
        self.labels = torch.arange(size) % classes
        noise = torch.randn(size, 3, 8, 8, generator=generator)
        self.images = (128 + 25 * patterns[self.labels] + 40 * noise).clamp(0, 255).byte()
        self.split, self.augment = split, augment if split == "train" else "none"
        self.targets, self.num_classes = self.labels.tolist(), classes
        self.classes = [f"class_{k}" for k in range(classes)]
        self.fingerprint = hashlib.sha256(self.images.numpy().tobytes()).hexdigest()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]

    def __getitems__(self, indices):
        return self.images[indices], self.labels[indices]

    def collate(self, batch):
        return batch

    def device_transform(self, batch, seed, epoch, indices):
        images = augment_images(batch[0], self.augment, self.image_size, seed, epoch, indices)
        return normalize(images, self.mean, self.std), batch[1]


def image_loss(net, batch):
    logits, labels = net(batch[0]), batch[1]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if net.training:
        return {"loss": (loss, len(labels)), "top1": (count_correct(logits, labels), len(labels))}
    return {"loss": (loss, len(labels))} | {f"top{k}": (count_correct(logits, labels, k), len(labels)) for k in (1, 5)}


def ramped_loss(net, batch, progress):
    """Adds a penalty on the logits that grows with everything that a loss may know of the step, in evaluation too."""
    logits, labels = net(batch[0]), batch[1]
    ramp = progress.step / progress.total_steps + 0.5 * progress.epoch + 0.001 * progress.samples_seen
    loss = F.cross_entropy(logits, labels, reduction="sum") + 0.1 * ramp * logits.square().sum()
    return {"loss": (loss, len(labels)), "ramp": (ramp * len(labels), len(labels))}


class Taught(nn.Module):
    """A student and its teacher, frozen weights that after_step moves; `clock` sums the numbers of the steps."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = SmallNet(False, 10), SmallNet(False, 10).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("clock", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.student(x), self.teacher(x)


class Moved(SmallNet):
    """Each forward pass in training moves a buffer, as spectral norms, codebooks and queues do."""

    def __init__(self):
        super().__init__(False, 10)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.seen += x.mean((0, 2, 3))
        return super().forward(x) * (1 + 1e-3 * self.seen.sum())


def taught_loss(net, batch):
    (logits, taught), labels = net(batch[0]), batch[1]
    loss = F.cross_entropy(logits, labels, reduction="sum") + 0.1 * (logits - taught).square().sum()
    return {"loss": (loss, len(labels)), "top1": (count_correct(taught, labels), len(labels))}


def teach(net, progress, taken):
    """The weights' bound comes first, so that the order of after_step and the average matters."""
    for weight in net.student.parameters():
        weight.clamp_(-0.3, 0.3)
    for teacher, student in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
        teacher.lerp_(student, 0.1 * taken)
    net.clock.add_((progress.step + 100 * progress.epoch) * taken)


def term_loss(net, batch):
    """Three terms: per class, which counts as its number; for images of two classes only; and per image."""
    logits, labels = net(batch[0]), batch[1]
    errors, bright = F.cross_entropy(logits, labels, reduction="none"), batch[0].mean((1, 2, 3))
    sums = {
        "size": logits.square().mean(1).sum(),
        "rare": ((logits[:, 0] - bright).square() * (labels % 5 == 4)).sum(),
        "classes": (errors * (labels + 1)).sum(),
    }
    weights, counts = {"classes": 1.0, "rare": torch.tensor(0.3, device=labels.device), "size": 0.1}, term_counts(batch)
    loss = {name: (total, counts[name], weights[name]) for name, total in sums.items()}
    return {"loss": loss, "top1": (count_correct(logits, labels), len(labels))}


def term_counts(batch):
    return {"classes": (batch[1] + 1).sum(), "rare": (batch[1] % 5 == 4).sum(), "size": len(batch[1])}


def joint_loss(net, batch, progress):
    """The terms of the student, and a distance to its teacher whose weight grows with the step."""
    (logits, taught), labels = net(batch[0]), batch[1]
    terms = term_loss(lambda images: logits, batch)["loss"]
    ramp = progress.step / progress.total_steps + 0.5 * progress.epoch + 0.001 * progress.samples_seen
    terms["taught"] = ((logits - taught).square().mean(1).sum(), len(labels), ramp)
    return {
        "loss": terms,
        "ramp": (ramp * len(labels), len(labels)),
        "top1": (count_correct(taught, labels), len(labels)),
    }


def create_images(config, split):
    sizes = {"train": config.dataset_size or 100, "val": math.ceil((config.dataset_size or 100) / 5), "test": 0}
    return Images(sizes[split], split) if sizes.get(split) else None


def groups_of(net, config):
    """Two groups, one without weight decay."""
    trained = [p for p in net.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


class Experts(nn.Module):
    """Layers that most micro-batches drop (LayerDrop), a head for samples of the first class, and a spare layer."""

    def __init__(self):
        super().__init__()
        self.trunk = SmallNet(False, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head, self.rare, self.spare = nn.Linear(64, 10), nn.Linear(64, 10), nn.Linear(2, 2)

    def forward(self, x):
        x = self.trunk(x)
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.2:  # from the generator that each micro-batch seeds
                x = x + torch.tanh(layer(x))
        return self.head(x), self.rare(x)


def expert_loss(net, batch):
    (logits, rare), labels = net(batch[0]), batch[1]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if (labels == 0).any():
        loss = loss + F.cross_entropy(rare[labels == 0], labels[labels == 0], reduction="sum")
    return {"loss": (loss, len(labels)), "top1": (count_correct(logits, labels), len(labels))}


def named_groups(net, config):
    """The head, and the trunk in two groups of one name, with a learning rate of its own."""
    trunk = [group | {"name": "trunk", "lr": config.lr / 2} for group in groups_of(net.features, config)]
    return [{"params": list(net.head.parameters()), "name": "head"}, *trunk]


def thaw(config, step, total_steps, warmup_steps, progress):
    return {"trunk": 0.0 if step < 7 else 1 - step / total_steps, "head": 0.5 ** (progress.epoch + step / total_steps)}


DEFAULTS = {"param_groups": groups_of, "is_prepared": lambda config: True, "prepare_data": lambda config: None}
IMAGES = {**DEFAULTS, "create_dataset": create_images, "compute_loss": image_loss}
TASKS = {
    "images": {**IMAGES, "create_model": lambda config, device: SmallNet(True, 10).to(device)},
    "plain": {**IMAGES, "create_model": lambda config, device: SmallNet(False, 10).to(device)},
    "lines": {
        **DEFAULTS,
        "create_model": lambda config, device: TokenModel().to(device),
        "compute_loss": token_loss,
        "create_dataset": create_lines,
    },
}
TASKS["moved"] = TASKS["plain"] | {"create_model": lambda config, device: Moved().to(device)}
TASKS["left_out"] = TASKS["images"] | {
    "create_model": lambda config, device: nn.Sequential(LeavesOut(3, affine=False), SmallNet(True, 10)).to(device)
}
TASKS["ramped"] = TASKS["images"] | {"compute_loss": ramped_loss}
TASKS["terms"] = TASKS["images"] | {"compute_loss": term_loss, "loss_counts": term_counts}
TASKS["blocks"] = TASKS["lines"] | {"create_model": lambda config, device: BlockModel().to(device)}
TASKS["experts"] = TASKS["plain"] | {
    "create_model": lambda config, device: Experts().to(device),
    "compute_loss": expert_loss,
}
TASKS["thawing"] = TASKS["plain"] | {"param_groups": named_groups, "lr_factor": thaw}
TASKS["taught"] = IMAGES | {
    "create_model": lambda config, device: Taught().to(device),
    "compute_loss": taught_loss,
    "after_step": teach,
}
TASKS["joint"] = TASKS["taught"] | {
    "compute_loss": joint_loss,
    "loss_counts": lambda batch: term_counts(batch) | {"taught": len(batch[1])},
    "param_groups": lambda net, config: named_groups(net.student, config),
    "lr_factor": thaw,
}
TASKS |= PORTS
OPTIONAL = ("after_step", "create_optimizer", "is_saved", "loss_counts", "lr_factor", "log_images")
OF_THIS_FORK = {name: getattr(model, name) for name in OPTIONAL if hasattr(model, name)}
BUCKETS = ["--bucket_cap_mb", "0.002"]  # several buckets for these small models


@contextlib.contextmanager
def using(task):
    """Use the task's functions instead of those of model.py and dataset.py, in the loop and the oracle; "": no task.

    Optional functions of this fork are not used, but those are that a test has put in their place.
    """
    with contextlib.ExitStack() as stack:
        for name, function in OF_THIS_FORK.items() if task else ():
            if getattr(model, name, None) is function and name not in TASKS[task]:
                stack.callback(setattr, model, name, function)
                delattr(model, name)
        for name, function in TASKS[task].items() if task else ():
            for module in (train, plain_loop, model, dataset):
                if hasattr(module, name) or (module is model and name in OPTIONAL):
                    stack.enter_context(mock.patch.object(module, name, function, create=True))
        yield


def config_of(flags, dtype=torch.float32):
    torch.set_default_dtype(dtype)
    return TrainingConfig.from_args([*BUCKETS, *flags])


def train_task(task, flags, dtype=torch.float32, stops=(), goes_on=True):
    """Train in a rank. After each step in `stops` a signal reaches one rank, all stop and, if `goes_on`, restart.

    Returns the final state of the last attempt.
    """
    stops = list(stops)
    with using(task), signals_after(stops):
        flags = [*map(str, flags)]
        outcome = train.train(config_of(flags, dtype))
        while outcome["state"] == "preempted" and goes_on:
            stops.pop(0)
            outcome = train.train(config_of([*flags, "--resume_from", "auto"], dtype))
    return outcome["state"]


class EagerConsensus(Consensus):
    """Votes at every step."""

    def _start_vote(self, steps_between_votes):
        super()._start_vote(1)


@contextlib.contextmanager
def signals_after(stops):
    """Send SIGUSR1 to the last rank at the end of step stops[0]; all ranks stop one step later."""
    plain_done = Reporter.record_step

    def done(self, samples, indices):
        plain_done(self, samples, indices)
        step = self._state.progress.step
        if stops and step == stops[0] and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    eager = mock.patch.object(assembly, "Consensus", EagerConsensus)
    with mock.patch.object(Reporter, "record_step", done), eager:
        yield


@contextlib.contextmanager
def training_under(mode, done):
    """Run epochs under a dispatch mode; done(step) is called after each optimizer step."""
    plain_epoch, plain_done = train.train_one_epoch, Reporter.record_step

    def epoch(training):
        with mode:
            return plain_epoch(training)

    def step_done(self, samples, indices):
        done(self._state.progress.step)
        plain_done(self, samples, indices)

    with mock.patch.object(train, "train_one_epoch", epoch), mock.patch.object(Reporter, "record_step", step_done):
        yield
