"""One optimizer step, and what survives a restart: weights, their average, optimizer, scaler and progress.

The learning rate and the random numbers are functions of the step, so a checkpoint does not hold them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from config import TrainingConfig
from utils.data.sampler import GlobalBatchSampler
from utils.distributed.context import DistributedContext
from utils.distributed.dtensor import is_sharded, model_device, shard_like
from utils.logger import join_first
from utils.memory import is_out_of_memory
from utils.metrics import Metrics
from utils.settings.errors import UserError
from utils.training.gradient_strategy import GradientStrategy
from utils.training.hooks import ModelHooks
from utils.training.log_window import LogWindow, StepRecord
from utils.training.optimizer import list_group_lr_factors
from utils.training.parts.part import P, Part, find_part
from utils.training.precision import Precision
from utils.training.schedule import Progress, Schedule
from utils.training.step_sums import StepSums
from utils.training.updater import Updater


class TrainState:
    """The objects that an optimizer step works on: the model, the optimizer, the schedule and the sums of a step.

    After the backward passes, `.grad` is the gradient of the loss summed over the global batch, times 2^-loss_shift.
    The factor brings it near the gradient of the mean loss, and as a power of two it rounds nothing. The update divides
    by count * 2^-loss_shift, where count is that of the loss in the global batch.

    Args:
        model: the model, which is not wrapped in DDP.
        strategy: how the ranks combine their gradients. None stands for a single rank.

    Raises:
        UserError: if the model or the parameter groups cannot be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        hooks: ModelHooks,
        config: TrainingConfig,
        precision: Precision,
        strategy: GradientStrategy | None = None,
    ) -> None:
        device = model_device(model)
        if strategy is None:
            single_rank = DistributedContext(rank=0, local_rank=0, world_size=1, device=device)
            strategy = GradientStrategy(config, single_rank)
        self._config = config
        # filled later by `create_parts`: parts may copy the model, whose BatchNorm buffers `step_sums` replaces first
        self.parts: list[Part] = []
        self.strategy = strategy
        self.model = model
        self.precision = precision
        self.schedule = Schedule(config, hooks.lr_factor)
        self.step_sums = StepSums(model, strategy.create_rank_sum())
        _check_no_sparse_gradients(model)
        self.updater = Updater(
            model=model,
            hooks=hooks,
            config=config,
            precision=precision,
            strategy=strategy,
            device=device,
        )
        self.log_window = LogWindow(device, self.updater.scaler, self.parts)
        self.lr_factor = 0.0  # the schedule's factor in the last step, for the log; the largest one of the groups
        # a backward pass begins with gradient_divisor * 2^-loss_shift: the first factor undoes DDP's division by ranks
        self._backward_start = torch.ones((), device=device)
        self._first_loss_count = 1.0  # the count of the loss in the first example batch, which decides the loss shift

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.updater.optimizer

    @property
    def parameters_by_tensor(self) -> dict[nn.Parameter, nn.Parameter]:
        return self.updater.parameters_by_tensor

    @property
    def scaler(self) -> torch.amp.GradScaler:
        return self.updater.scaler

    @property
    def progress(self) -> Progress:
        return self.schedule.progress

    def allocate_metrics(self, metrics: Metrics) -> None:
        """Allocate the sums of a step for the metrics of the first example batch, before the first step.

        Called again with the metrics of a later example batch, it compares them with the first ones.

        Args:
            metrics: what compute_loss returned.

        Raises:
            UserError: if the metrics of a later example batch have other names or shapes.
        """
        summed = self.after_forward(metrics, number=0)
        if self.step_sums.metrics.shapes:
            self.step_sums.metrics.update(summed)
            self.step_sums.metrics.values.zero_()
            return
        self.step_sums.allocate(summed)
        # the entries of the step come last, because `StepSums.commit` adds the metrics to the leading entries
        step_entries = {"grad_norm": (0.0, 0), "skipped_steps": (0.0, 0)}
        self.log_window.allocate(summed | step_entries)
        self._first_loss_count = float(summed["loss"][1])

    def plan_schedule(self, sampler: GlobalBatchSampler) -> None:
        """Plan the schedule of the whole run, which continues from `progress`."""
        progress = self.progress
        if progress.loss_shift < 0:  # a fresh run; a resumed one keeps its shift
            count = max(1.0, self._first_loss_count) * sampler.micro_batches_per_step
            progress.loss_shift = round(math.log2(count))
        # `gradient_divisor` is what the strategy divides the sum over ranks by: the ranks for DDP, 1 for exact sums
        self._backward_start.fill_(self.strategy.gradient_divisor * 2.0**-progress.loss_shift)
        self.schedule.plan(sampler)

    def notify_progress(self, progress: Progress, total_steps: int = 0) -> None:
        """Show this progress to the parts before a step or an evaluation.

        Args:
            total_steps: the optimizer steps of the run. 0 stands for those of the schedule.
        """
        if total_steps == 0:
            total_steps = self.schedule.total_steps
        for part in self.parts:
            part.see_progress(progress, total_steps)

    def after_forward(self, metrics: Metrics, number: int) -> Metrics:
        """Let the parts change the metrics of a training micro-batch.

        Args:
            metrics: what compute_loss returned.
            number: the number of the micro-batch in its global batch.

        Returns:
            The metrics that the step sums.
        """
        for part in self.parts:
            metrics = part.after_forward(metrics, number)
        return metrics

    def compute_lr_factors(self, step: int, progress: Progress) -> list[float]:
        """Return the schedule's factor on the learning rate of each parameter group at this step.

        Args:
            step: from 0.

        Raises:
            UserError: if the names of the factors are not those of the groups.
        """
        factor = self.schedule.compute_lr_factor(step, progress)
        return list_group_lr_factors(self.optimizer.param_groups, factor)

    def _set_lr(self) -> None:
        factors = self.compute_lr_factors(self.progress.step, self.progress)
        self.lr_factor = max(factors)
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            group["lr"] = group["base_lr"] * factor

    def check_gradients(self) -> None:
        """Check after a backward pass that each trainable parameter got a gradient.

        Raises:
            UserError: if a parameter got none. DDP would wait for its gradient.
        """
        if self._config.find_unused_parameters:
            return
        unused = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                unused.append(name)
        if unused:
            raise UserError(
                f"The loss does not depend on {join_first(unused)} of the model, and DDP would wait for the gradient."
                " Use this parameter in every forward pass, add --find_unused_parameters, or freeze the parameter in"
                " create_model with requires_grad_(False)."
            )

    def find_part(self, kind: type[P]) -> P | None:
        """Return the part of this class, if there is one."""
        return find_part(self.parts, kind)

    @property
    def gradient_norm(self) -> torch.Tensor:
        """Return the gradient norm of the last step, before the log window is read: 0-dimensional, on the device."""
        return self.log_window.norms[-1]

    @property
    def learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group in the last step taken."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def backward(self, loss: torch.Tensor, is_padding: bool) -> None:
        """Run the backward pass of a micro-batch.

        Args:
            loss: the loss summed over the micro-batch, 0-dimensional.
            is_padding: whether the gradient is 0, since another rank computes this micro-batch.
        """
        start = self.updater.zero if is_padding else self._backward_start
        scaled_loss = self.scaler.scale(loss)  # float16's scale; otherwise the loss itself
        scaled_loss.backward(start)
        self.step_sums.running_stats.discard()  # here, since activation checkpointing has run forward passes again

    def update_if_finite(self, samples: int) -> None:
        """Divide and clip the gradient, update the weights, and let the parts follow (weight averaging).

        All of this is skipped on the device if the loss or the gradient is not finite.

        Args:
            samples: the number of samples in the global batch.
        """
        self._set_lr()
        self.step_sums.wait()  # for the all-reduce of the loss, its count and BatchNorm's statistics
        with torch.no_grad():
            for part in self.parts:
                part.before_update(self.model, self.step_sums.metrics)

        progress = self.progress
        step_number = progress.step + 1
        loss = self.step_sums.loss
        divisor = self.step_sums.loss_count * 2.0**-progress.loss_shift
        norm, is_finite, skipped = self.updater.step(divisor, loss, step_number)

        record = StepRecord(
            step=step_number,
            epoch=progress.epoch,
            first_sample=progress.samples_in_epoch,
            samples=samples,
        )
        # float16 skips steps in the search for its scale, and the losses of these steps are valid: they are logged
        is_float16 = self.scaler.is_enabled()
        is_loss_finite = loss.isfinite() if is_float16 else is_finite
        self.log_window.record_step(record, norm, divisor, loss=loss if is_float16 else None)
        self.step_sums.commit(
            samples,
            is_finite,
            log_window=self.log_window,
            is_loss_finite=is_loss_finite,
        )

        with torch.no_grad():
            for part in self.parts:
                part.after_update(self.model, skipped)

    def advance(self, samples: int) -> None:
        """Count a step in the progress, also if it was skipped.

        Args:
            samples: the number of samples in the global batch.
        """
        self.progress.step += 1
        self.progress.samples_in_epoch += samples
        self.progress.samples_seen += samples

    def read_skipped_steps(self) -> list[StepRecord]:
        """Wait for the device, and count the steps that were skipped since the last read in the progress.

        Call it before `state_dict`. It also adds the norms of the gradients to `log_window`.

        Returns:
            The skipped steps, the same on all ranks.
        """
        read = self.log_window.begin_read()
        values = self.log_window.finish_read(read, self.progress)
        self.log_window.add_read_norms()
        return values.skipped_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the training state for a checkpoint. Tensors are not copied."""
        progress = dataclasses.asdict(self.progress)
        progress["interval"] = self.log_window.state()  # the key is an earlier name of the log window
        state = {
            "model": self.model.state_dict(),
            "ema": {},  # the part that averages weights fills it
            **self.updater.state_dict(),
            "progress": progress,
        }
        for part in self.parts:
            part.save(state)
        return state

    def load_state_dict(self, payload: dict[str, Any]) -> None:
        """Load the state of a checkpoint. Hyperparameters come from the config, not from the checkpoint.

        Raises:
            UserError: if something does not fit, with its name. The state may be partially loaded by then.
        """
        try:
            self._load(payload)
        except UserError:  # a ValueError with a message of its own
            raise
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"The state in the checkpoint does not fit ({error}). Use the model.py and the settings of its run, or"
                " load its weights with --init_from."
            ) from error

    def _load(self, payload: dict[str, Any]) -> None:
        required = {field.name for field in dataclasses.fields(Progress)}
        required.add("interval")
        required.discard("best_metric")  # earlier versions did not save it
        missing = sorted(required - payload["progress"].keys())
        if missing:
            raise UserError(
                f"The checkpoint is incomplete: its progress lacks {', '.join(missing)}. Give another checkpoint."
            )
        payload = self._run_before_load(payload)
        self._load_weights(payload["model"])
        self.updater.load_state_dict(payload)
        progress = dict(payload["progress"])
        self.log_window.load_state(progress.pop("interval"))
        for name, value in progress.items():
            setattr(self.progress, name, value)
        for part in self.parts:
            part.after_load(payload, self.progress)

    def _run_before_load(self, payload: dict[str, Any]) -> dict[str, Any]:
        for part in self.parts:
            payload = part.before_load(payload)
        return payload

    def load_model_weights(self, payload: dict[str, Any], kind: str = "model") -> None:
        """Load the weights of a checkpoint into the model.

        Args:
            kind: "model", "ema" for the averaged weights, or a name from the `weights` of a part.

        Raises:
            UserError: if the weights do not fit the model.
        """
        payload = self._run_before_load(payload)
        self._load_weights(payload[kind])

    def _load_weights(self, weights: dict[str, Any]) -> None:
        sharded = self.sharded_parameters()
        try:
            local_weights = {}
            for name, value in weights.items():
                local_weights[name] = shard_like(value, sharded.get(name))
            self.model.load_state_dict(local_weights)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"The weights in the checkpoint do not fit the model ({error}). Use the model.py and the settings of"
                " its run, or load its weights with --init_from."
            ) from None
        self.step_sums.running_stats.read_buffers()

    def weight_contexts(self) -> dict[str, AbstractContextManager]:
        """Return a context for each kind of weights to evaluate, in which the model has these weights.

        The last kind selects the best checkpoint.
        """
        contexts: dict[str, AbstractContextManager] = {"model": nullcontext()}
        for part in self.parts:
            contexts |= part.weights()
        return contexts

    def saved_weight_contexts(self, payload: dict[str, Any]) -> dict[str, AbstractContextManager]:
        """Return a context for each kind of weights in a checkpoint that is to be evaluated.

        Entering a context loads the weights into the model. Leaving it does not bring the earlier ones back.

        Args:
            payload: the content of the checkpoint. If it is empty, the model is evaluated as it is.
        """
        kinds = dict.fromkeys(["model", "ema", *self.weight_contexts()])  # "ema" also if this run averages none
        contexts: dict[str, AbstractContextManager] = {}
        for kind in kinds:
            if payload.get(kind):
                contexts[kind] = self._load_weights_of_kind(payload, kind)
        return contexts or {"model": nullcontext()}

    @contextmanager
    def _load_weights_of_kind(self, payload: dict[str, Any], kind: str) -> Iterator[None]:
        self.load_model_weights(payload, kind)
        yield

    def sharded_parameters(self) -> dict[str, torch.Tensor]:
        """Return the sharded tensors of the model by name."""
        sharded = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if is_sharded(tensor):
                sharded[name] = tensor
        return sharded


def _check_no_sparse_gradients(model: nn.Module) -> None:
    """Raise UserError if a layer has sparse gradients (nn.Embedding with sparse=True)."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", None) is True:
            raise UserError(f"{name} of the model has sparse gradients, which are not supported. Set sparse=False.")
