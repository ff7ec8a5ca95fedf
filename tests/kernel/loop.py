# extra: template
"""The kernel: a second training program with DDP and checkpoints of its own, whose results are those of train.py bit
for bit on the same ranks. plain_loop.py is one process, and equal up to the order of sums.

It shares model.py, dataset.py and the random keys of utils/rng.py with the repository, and nothing else. It does not do
averages of weights, exact sums, sharding and the optional functions of model.py.
"""

import inspect
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dataset
import model
from kernel.plan import Plan
from kernel.state import State, Sums
from utils.rng import seed_device, seed_host

CPU = torch.device("cpu")


def train(config: Any, checkpoint: Path, until: float = math.inf) -> dict[str, Any]:
    """Train on this rank, from the checkpoint if there is one, to the end or to a step, and save a checkpoint there.

    config: a TrainingConfig. Returns the state.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    run = Kernel(config, rank, ranks)
    if checkpoint.exists():
        run.state.load_state_dict(torch.load(checkpoint))
    run.train(until)
    if ranks > 1:
        dist.barrier()  # all have read the checkpoint
        dist.destroy_process_group()
    if rank == 0:
        torch.save(run.state.state_dict(), checkpoint)
    return run.state.state_dict()


class Shared(DistributedDataParallel):
    """DDP with the attributes of its module, which `unwrap` of the repository does not know."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class Kernel:
    """Everything of one rank."""

    def __init__(self, config: Any, rank: int, ranks: int) -> None:
        self.config, self.ranks, self.evaluated = config, ranks, 0
        seed_host("create_dataset", config.seed)
        data, held_out = (dataset.create_dataset(config, split) for split in ("train", "val"))
        size, per_step = config.batch_size, config.global_batch_size // config.batch_size
        whom, seed = (rank, ranks), config.seed
        self.plan = Plan(data, size, per_step or ranks * config.grad_accum_steps, *whom, seed, True, config.drop_last)
        self.held_out = Plan(held_out, config.eval_batch_size or size, ranks, *whom, seed, shuffles=False)
        torch.manual_seed(config.seed)
        net = model.create_model(config, CPU)
        self.state = State(net, model.param_groups(net, config), config, ranks)
        options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": config.bucket_cap_mb}
        is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters  # torch 2.15
        options |= {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
        self.model: Any = Shared(net, **options) if ranks > 1 else net
        self.first_passes()

    def first_passes(self) -> None:
        """In the first two passes DDP orders its buckets."""
        state, batch = self.state, self.plan.batch([*range(min(self.plan.size, len(self.plan.data)))])
        for _ in range(2):
            with state.autocast():
                metrics = self.compute_loss(self.model.train(), batch)
            metrics["loss"][0].backward()
        state.optimizer.zero_grad()
        state.statistics.restore()
        state.begin(metrics, self.plan.per_step)

    def compute_loss(self, net: Any, batch: Any) -> Any:
        """compute_loss of model.py, with the config if it asks for that."""
        if "config" in inspect.signature(model.compute_loss).parameters:
            return model.compute_loss(net, batch, config=self.config)
        return model.compute_loss(net, batch)

    def train(self, until: float) -> None:
        config, state, plan = self.config, self.state, self.plan
        epochs, steps = config.limits
        self.total = min(epochs * plan.steps_per_epoch, steps)
        while not state.is_done:
            self.train_one_epoch(min(until, self.total))
            if state.step >= until:
                return
            state.is_done = state.step == self.total
            if state.is_done or (config.eval_every and (state.epoch + 1) % config.eval_every == 0):
                self.evaluate()
            state.epoch, state.start = state.epoch + 1, 0

    def train_one_epoch(self, until: float) -> None:
        state, plan = self.state, self.plan
        self.model.train()
        for micro_batch in plan.micro_batches(state.epoch, state.start):
            if state.step >= until:
                return
            batch = plan.batch(micro_batch.indices, state.epoch)
            with nullcontext() if micro_batch.is_last or self.ranks == 1 else self.model.no_sync():
                seed_device(CPU, "step", self.config.seed, state.step, micro_batch.number)
                with state.autocast():
                    metrics = self.compute_loss(self.model, batch)
                if not micro_batch.is_padding:
                    state.add(metrics, len(micro_batch.indices))
                if micro_batch.is_last:
                    state.start_reduce()
                state.backward(metrics["loss"][0], micro_batch.is_padding)
            if micro_batch.is_last:
                state.update(micro_batch.samples, self.factor())
                if self.config.eval_every_steps and state.step % self.config.eval_every_steps == 0:
                    self.evaluate()

    def factor(self) -> float:
        """Of the learning rate: a linear warm-up, then a cosine to 0."""
        config, step = self.config, self.state.step
        warm_up = config.warmup_steps
        if warm_up == "auto":
            warm_up = round(config.warmup_epochs * self.plan.steps_per_epoch)
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, (config.schedule_steps or self.total) - warm_up))
        return 0.5 * (1 + math.cos(math.pi * done))

    @torch.no_grad()
    def evaluate(self) -> None:
        """The means over the held-out set: each sample counts once."""
        state, sums = self.state, cast(Any, None)
        if state.step == self.evaluated:
            return
        self.evaluated = state.step
        self.model.eval()
        for micro_batch in self.held_out.micro_batches(0):
            batch = self.held_out.batch(micro_batch.indices)
            seed_device(CPU, "evaluation", self.config.seed, "compute_loss", "val", micro_batch.indices[0])
            with state.autocast():
                metrics = self.compute_loss(state.model, batch)
            sums = sums or Sums(metrics)
            if not micro_batch.is_padding:
                sums.add(metrics)
        if self.ranks > 1:
            dist.all_reduce(sums.values)
        state.evaluations.append(sums.means())
        self.model.train()
