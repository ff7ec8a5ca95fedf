# extra: verify
"""The model, data and flags of a fork, which verify.py checks.

No other module of verify.py calls train.py.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from config import SETTINGS, TrainingConfig, list_fork_settings
from ddp_utils import DistributedContext, cleanup_distributed, setup_distributed
from lib.values import compute_sums, error_text, is_dense, scramble_global_rngs, spread_rows
from lib.verify import hidden_state
from lib.verify.result import NOT_CHECKED
from utils import assembly
from utils.batch import list_tensors, map_tensors
from utils.data.loader import GlobalBatchLoader
from utils.data.sampler import MapDataset
from utils.data.sets import SampleSubset
from utils.data.transfer import to_device
from utils.distributed.collectives import all_gather_json, is_peer_failure, on_all_ranks
from utils.distributed.context import environment_without_launcher
from utils.distributed.dtensor import create_dtensor, gather_full_tensor
from utils.metrics import MetricTracker
from utils.report.reporter import Reporter
from utils.report.tensorboard import TensorBoardWriter
from utils.rng import derive_seed, seed_evaluation
from utils.settings.errors import TrainingError, UserError
from utils.training.evaluation import Evaluation
from utils.training.hooks import ModelHooks
from utils.training.outputs import OutputCollector
from utils.training.parts.summary import OutputSummary
from utils.training.precision import Precision
from utils.training.schedule import Progress
from utils.training.state import TrainState

ACCUMULATION_STEPS = 2  # micro-batches of a rank in an optimizer step


class RoundingRecorder(TorchDispatchMode):
    """Notes whether an operator returns floating-point numbers other than float64, and what cancels out in sums."""

    supports_higher_order_operators = True  # those operators get functions
    is_narrow = False
    # The largest absolute value that cancels out where terms are added to a number, or to one for each sample. The
    # rounding of a small difference of large sums is that of the sums. Terms of one sign cancel nothing, so that a mean
    # is not taken for rounding, and neither do masks of -1e9.
    max_cancelled = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, size = kwargs or {}, torch.tensor(0.0)
        name = getattr(func, "overloadpacket", func).__name__.strip("_")
        if all(is_dense(tensor) and tensor.is_floating_point() for tensor in list_tensors([*args])):
            if name in ("sum", "mean"):
                size = func(abs(args[0]), *args[1:], **kwargs)
            elif name in ("add", "sub", "rsub"):
                size = abs(args[0]) + abs(args[1])
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.is_narrow |= leaf.dtype is not torch.float64
                if size.any() and leaf.ndim < 2:
                    lost = (size - abs(leaf)).max().item()
                    self.max_cancelled = max(self.max_cancelled, lost if math.isfinite(lost) else 0.0)
        return result


def measure_cancellation(action: Callable[[], Any]) -> tuple[Any, float]:
    """Return what the action returns, and the largest value that cancels out in its sums."""
    try:
        with RoundingRecorder() as rounding:
            return action(), rounding.max_cancelled
    except Exception:  # flex_attention has to be compiled, which no mode lets torch do
        return action(), 0.0


@contextmanager
def default_dtype(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Compute with this default dtype, also where random numbers are drawn. By default it is that of a run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class BrokenInvariant(UserError):
    """An invariant does not hold. The message says what was found and the likely cause, and ends with the fix."""


class SkippedCheck(UserError):
    """A check was not made, since an earlier one is broken."""


def allow_failure(subject: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Decorate a check that may itself fail. Its text then says that `subject` was not checked.

    A fork may not accept what such a check does, and is not broken then.
    """

    def decorate(check: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(check)
        def call(*args: Any) -> str:
            try:
                return check(*args)
            except BrokenInvariant:
                raise
            except Exception as error:
                return f"{NOT_CHECKED}{subject} ({error_text(error)})."

        return call

    return decorate


@dataclass
class PlainProgress(Progress):
    """The progress that the plain loop shows to `lr_factor` and `compute_loss`."""

    total_steps: int = 0


@dataclass
class OptimizerUpdate:
    """The gradients and settings that the optimizer received in one step."""

    gradients: dict[nn.Parameter, Tensor]
    settings: list[tuple[float, float]]  # learning rate and weight decay of each group

    def gather_gradients(self, state: TrainState) -> None:
        """Replace the gradients of shards by those of whole parameters. Call this on all ranks."""
        self.gradients = {
            state.parameters_by_tensor[p]: gather_full_tensor(create_dtensor(gradient, state.parameters_by_tensor[p]))
            for p, gradient in self.gradients.items()
        }


@dataclass
class Fork:
    """The config, data and ranks to verify, and the short runs made so far, as one rank sees them."""

    config: TrainingConfig  # the config whose `auto` fields are resolved
    train_set: MapDataset
    held_out: MapDataset | None
    ctx: DistributedContext
    folder: Path  # the folder of the short runs, which is deleted at the end
    hooks: ModelHooks
    given_config: TrainingConfig  # the config with `auto` fields
    new_process: Any = None  # rank 0 has a NewProcess here
    dtype: torch.dtype = torch.float32  # the dtype of the computations
    loss_dtype: torch.dtype = torch.float32  # the dtype of the loss or of a value in it, such as logits.float()
    trainings: dict[str, train.Training] = field(default_factory=dict)  # the short runs that completed, by name
    first_pass: Any = None  # a PassResult of loss_checks.py
    sharded_loss: float = 0.0  # with sharding, it is the `compute_sample_loss` after the run "whole"
    # what the data sets and the fork's modules hold at the start, and what short runs remember after each epoch
    initial_hidden_state: hidden_state.HiddenState = field(init=False)
    hidden_states: dict[str, list[dict[str, tuple[str, str]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.initial_hidden_state = hidden_state.HiddenState(self._hidden_state_roots())

    def _hidden_state_roots(self) -> dict[str, Any]:
        sets = {"training set": self.train_set, "held-out set": self.held_out}
        return sets | {module.__name__: module for module in hidden_state.list_fork_modules()}

    def clean_up(self) -> None:
        if self.new_process:
            self.new_process.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def single_process_ctx(self) -> DistributedContext:
        """Return the context of a single process."""
        return replace(self.ctx, rank=0, world_size=1, local_world_size=1)

    @property
    def settings(self) -> dict[str, object]:
        """Return the flags for which the result holds.

        They are the flags that change a run, without those that `small_config` replaces.
        """
        names = {"data_dir", *(setting.name for setting in list_fork_settings())}
        names.add("cache")  # extra: cache
        names.add("activation_checkpointing")  # extra: compile
        names |= {setting.name for setting in SETTINGS if setting.resume != "free"}
        values = self.config.to_json()
        return {name: values[name] for name in sorted(names - {"epochs", "max_steps", "batch_size"})}

    @property
    def small_config(self) -> TrainingConfig:
        """Return the config with small micro-batches, so that even a small data set has two steps per epoch."""
        largest = len(self.train_set) // (ACCUMULATION_STEPS * self.ctx.world_size + 2)
        off = ("global_batch_size", "dataset_size", "max_steps", "max_time", "patience", "save_every")
        values: dict[str, Any] = dict.fromkeys(off, 0)
        values |= {"epochs": 2, "eval_every": 1, "log_interval": 2, "keep_last": 99, "save_every_minutes": 0.0}
        values |= {"drop_last": False, "record_samples": True, "checkpoint_dir": ""}
        values["enable_profiling"] = False
        values |= {"batch_tokens": 0, "too_long": "error", "bucket_window": 100}  # extra: lengths
        return replace(
            self.config,
            **values,
            init_from="",  # the plain loop has the initial weights of create_model
            batch_size=max(1, min(4, self.config.batch_size, largest)),
            eval_batch_size=0,
            grad_accum_steps=ACCUMULATION_STEPS,
            deterministic=self.config.deterministic or self.ctx.device.type == "cuda",
        )

    @default_dtype()
    def small_train_set(self) -> Subset:
        """Return samples for two global batches and a short one.

        The last micro-batch of the short batch has two samples, and one of the ranks is left idle.
        """
        size, ranks = self.small_config.batch_size, self.ctx.world_size
        short = (size if ranks > 2 else 0) + min(2, size)
        count = min(2 * size * ACCUMULATION_STEPS * ranks + short, len(self.train_set))
        count -= count > 1 == count % size  # BatchNorm cannot train on one sample of one pixel
        sampler = self.create_loader(self.train_set).sampler
        return Subset(self.train_set, sampler.epoch_order(0)[:count] % len(self.train_set), self.dtype)

    def held_out_subset(self, count: int) -> Subset:
        """Return `count` held-out samples, in runs of the size of a micro-batch.

        A data set may return views of what it stores for adjacent samples. The runs are spread over the set, because
        it may be sorted by class.
        """
        held_out: Any = self.held_out
        size = min(self.small_config.batch_size, count, len(held_out))
        rows = spread_rows(-(-count // size), len(held_out) - size + 1)[:, None] + torch.arange(size)
        return Subset(held_out, rows.unique()[:count], self.dtype)

    def modes(self) -> Iterator[tuple[bool, Subset]]:
        """Yield how compute_loss is called (True means as in training), and samples for it.

        An evaluation gets held-out samples, which may be of another structure.
        """
        yield True, self.small_train_set()
        if self.held_out is not None:
            yield False, self.held_out_subset(4 * self.small_config.batch_size)

    # ---- calls into train.py ----

    def create_loader(
        self, dataset: MapDataset, config: TrainingConfig | None = None, ctx: DistributedContext | None = None
    ) -> GlobalBatchLoader:
        """Return the training loader. By default it is that of a single process with the small config."""
        loader, _ = assembly.create_distributed_dataloader(
            dataset, config or self.small_config, ctx or self.single_process_ctx
        )
        return loader

    def create_model(self) -> nn.Module:
        """Return the model at step 0, as create_train_state creates it."""
        torch.manual_seed(self.config.seed)
        return self.hooks.create_model(self.config, self.ctx.device)

    def choose_precision(self) -> None:
        """Choose float64 if the model can compute in it, so that small errors are not taken for rounding.

        Call this on all ranks.
        """

        def is_possible() -> bool:
            torch.set_default_dtype(torch.float64)
            self.dtype = self.loss_dtype = torch.float64
            try:
                for is_training, subset in self.modes():
                    _, _, batch = self.create_loader(subset).fetch_samples([0, min(1, len(subset) - 1)])
                    net = self.create_model().train(is_training)
                    with RoundingRecorder() as rounding, torch.set_grad_enabled(is_training):
                        loss = self.hooks.compute_loss(net, batch)["loss"][0].sum()
                    if is_training:
                        loss.backward()
                    if rounding.is_narrow:
                        self.loss_dtype = min(
                            self.loss_dtype, loss.dtype, torch.float32, key=lambda dtype: dtype.itemsize
                        )
                return not any(p.dtype is torch.float32 for p in net.parameters())  # the fork has asked for it
            except Exception:  # it has a custom kernel or a hard-coded dtype (the checks report other errors)
                return False

        if not all(all_gather_json(self.run_on_all_ranks(is_possible), self.ctx)):
            torch.set_default_dtype(torch.float32)
            self.dtype = self.loss_dtype = torch.float32

    def evaluate(self, model: nn.Module, dataset: MapDataset) -> dict[str, float]:
        """Return loss, metrics and "count" over all ranks."""
        loader = self.run_on_all_ranks(
            lambda: assembly.create_evaluation_dataloader(dataset, self.small_config, self.ctx)
        )
        try:
            precision = Precision(self.ctx.device.type, None)
            return Evaluation(model, self.hooks, precision, self.ctx, self.hooks.parts).evaluate(loader)
        except RuntimeError as error:
            if "evaluation counted" not in str(error):
                raise
            raise BrokenInvariant(
                f"The evaluation of the held-out set failed ({error}). A sampler of your own may be the cause, too. Use"
                " create_evaluation_dataloader."
            ) from None

    def evaluate_in_one_process(
        self, subset: Subset, net: nn.Module, noise: int = 0, split: str = "val"
    ) -> dict[str, float]:
        """Return the size, mean loss and metrics of a set in one process.

        The global generators are seeded by `noise`, apart from those of torch. These are seeded as in the evaluation
        of `split`.
        """
        loader, tracker = self.create_loader(subset), MetricTracker(self.ctx.device)
        seed = functools.partial(seed_evaluation, self.ctx.device, self.small_config.seed)
        summary = self.hooks.find_part(OutputSummary)
        outputs = OutputCollector(self.hooks.predict, functools.partial(seed, "predict", split))
        for indices in torch.arange(len(subset)).split(self.small_config.batch_size):
            *_, batch = loader.fetch_samples(indices.tolist())
            scramble_global_rngs(noise)  # comes after the fetch, which seeds the generators by the samples
            seed("compute_loss", split, indices.tolist())
            with torch.no_grad():
                tracker.update(self.hooks.compute_loss(net, batch))
                if summary:
                    outputs.add(net, batch, indices.tolist())
        metrics = {"count": len(subset)} | tracker.means()
        if summary:
            metrics |= summary.summarize_outputs(outputs)
        return metrics

    def compute_sample_loss(self, model: nn.Module, device: torch.device) -> float:
        """Return the summed loss of the first batch of the small set, as in training."""
        batch = to_device(self.create_loader(self.small_train_set()).fetch_example_batch(), device)
        torch.manual_seed(self.config.seed)  # the loss may draw random numbers
        return compute_sums(self.hooks, model, batch, is_training=True)["loss's sum"].sum().item()

    def train_short_run(
        self, name: str, is_alone: bool = False, on_epoch_end: Callable[[train.Training], Any] = id, **changes: Any
    ) -> None:
        """Train on the small set with train.train, and keep the training in `trainings`.

        Args:
            name: the name of the run in `trainings`.
            is_alone: whether rank 0 trains in a single process.
            on_epoch_end: a function that all ranks call with the training after each epoch, while shards can still be
                gathered.
            changes: fields of the config that this run has otherwise.
        """
        config = replace(self.small_config, run_dir=str(self.folder / name), **changes)
        held_out = None if self.held_out is None else self.held_out_subset(config.batch_size + 1)
        sets = {"train": self.small_train_set(), "val": held_out, "test": None}
        cleanup_distributed()
        scramble_global_rngs(100 * self.ctx.rank + len(self.trainings))
        problem, outcome, latest, remembered = None, None, None, []

        def after_epoch(training: train.Training) -> None:
            nonlocal latest
            latest = training
            on_epoch_end(training)
            remembered.append(hidden_state.collect_hidden_state(training, self._hidden_state_roots()))

        data = SimpleNamespace(**vars(train.your_data) | {"create_dataset": lambda _, split: sets[split]})
        alone = mock.patch.dict(os.environ, environment_without_launcher(), clear=True) if is_alone else nullcontext()
        with alone, mock.patch.object(assembly, "Reporter", QuietReporter):
            try:
                if self.ctx.is_main or not is_alone:
                    outcome = train.train(config, data, after_epoch)
            except (UserError, TrainingError) as error:
                if isinstance(error, TrainingError) and (error.rank is None or is_peer_failure(error)):
                    raise
                problem = BrokenInvariant(str(error))
        self.ctx = setup_distributed(self.config)
        self.run_on_all_ranks(lambda: raise_if(problem))
        if outcome and outcome["state"] == "preempted":
            raise KeyboardInterrupt
        self.hidden_states[name] = remembered
        if latest:
            self.trainings[name] = latest

    def run_on_all_ranks(self, action: Callable[[], Any]) -> Any:
        """Run `action` on every rank. If it fails on one rank, all ranks raise UserError."""

        def run_action() -> Any:
            try:
                return action()
            except UserError:
                raise
            except Exception as error:
                raise BrokenInvariant(
                    f"The check failed with an error ({error_text(error)}). Fix that first."
                ) from error

        return on_all_ranks(run_action, self.ctx)

    def divide_among_ranks(self, actions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run each action on one rank, and return all results on every rank. If one fails, all raise UserError."""
        rank, ranks = self.ctx.rank, self.ctx.world_size
        rank_results = all_gather_json(
            self.run_on_all_ranks(lambda: [action() for action in actions[rank::ranks]]), self.ctx
        )
        return [rank_results[number % ranks][number // ranks] for number in range(len(actions))]


class QuietReporter(Reporter):
    """A reporter without TensorBoard and images, which take time and change nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["log_images"] = None
        super().__init__(*args, **options)
        self._tensorboard = TensorBoardWriter(None, 0)


class Subset(SampleSubset):
    """Some samples of a data set in the template's order, with floats cast to `dtype`.

    The data set's own order has its own check.
    """

    def __init__(self, dataset: Any, indices: Tensor, dtype: torch.dtype) -> None:
        super().__init__(dataset, indices)
        self._dtype = dtype
        self.device_transform = self._cast

    @default_dtype()  # random numbers and cached values have to be those of a run
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)

    @default_dtype()
    def __getitems__(self, indices: list[int]) -> Any:
        return super().__getitems__(indices)

    @default_dtype()
    def _subset_order(self, seed: int, epoch: int, n: int) -> Tensor:
        self.dataset.epoch_order(seed, epoch, len(self.dataset))  # it may set what __getitem__ reads
        return torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed("order", seed, epoch)))

    def _cast(self, batch: Any, seed: int, epoch: int, indices: Tensor) -> Any:
        if hasattr(self.dataset, "device_transform"):
            batch = self._transform(batch, seed, epoch, indices)
        return map_tensors(lambda tensor: tensor.to(self._dtype) if tensor.is_floating_point() else tensor, batch)


@contextmanager
def record_updates(updates: list[OptimizerUpdate]) -> Iterator[None]:
    """Record what each optimizer step receives, and set the learning rate to 0 so that the weights do not change."""
    depth = 0  # an optimizer's step may call that of its base class

    def exit_step(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def enter_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth > 1:
            return
        groups = [group for group in optimizer.param_groups if any(p.grad is not None for p in group["params"])]
        divisor = getattr(optimizer, "grad_scale", None)  # fused kernels divide within the step
        divisor = 1.0 if divisor is None else divisor
        gradients = {p: p.grad / divisor for group in groups for p in group["params"] if p.grad is not None}
        updates.append(
            OptimizerUpdate(gradients, [(float(group["lr"]), group.get("weight_decay", 0.0)) for group in groups])
        )
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    handles = register_optimizer_step_pre_hook(enter_step), register_optimizer_step_post_hook(exit_step)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def perturb_parameters(net: nn.Module, number: int) -> nn.Module:
    """Add noise to each parameter, of a tenth of its mean size.

    Args:
        net: the model that is changed and returned.
        number: the seed of the noise (0: no noise).
    """
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for p in net.parameters() if number else ():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
            p.add_(0.1 * (p.abs().mean() + 0.01) * noise)
    return net


def raise_if(problem: Exception | None) -> None:
    if problem:
        raise problem


@contextmanager
def pretend_rank(rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """Let code that asks for the rank or the number of ranks see these. By default it sees a single process."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    environment = environment_without_launcher() | {name: str(value) for name, value in names.items() if ranks > 1}
    dist_values = {"is_initialized": ranks > 1, "get_rank": rank, "get_world_size": ranks}
    answers: Any = {name: lambda *_, value=value, **__: value for name, value in dist_values.items()}
    with mock.patch.dict(os.environ, environment, clear=True), mock.patch.multiple(dist, **answers):
        yield
