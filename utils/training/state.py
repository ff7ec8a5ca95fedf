"""The state in a checkpoint: model, averaged weights, optimizer, scaler and progress. The schedule and random streams
are not in it, since both are functions of the optimizer step."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from config import TrainingConfig, UserError
from utils.data.sampler import GlobalBatchSampler
from utils.distributed.dtensor import device_of, group_of, is_sharded, local, norm_over, shard_of
from utils.memory import is_out_of_memory
from utils.metrics import Metrics, MetricTracker
from utils.training.interval import Interval, Read, SkippedStep
from utils.training.optimizer import WeightAverage, checked_groups, factors_of, load_optimizer, optimizer_state, prepare
from utils.training.parallel import thawed_error, unused_error
from utils.training.precision import Precision
from utils.training.schedule import Progress, Schedule
from utils.training.seams import Seams
from utils.training.sharding import check_elementwise, unscale
from utils.training.step_sums import StepSums
from utils.training.unsaved import KEY, complete, digests, left_out


class TrainState:
    """The training state. Raises UserError if the model or the parameter groups cannot be trained."""

    def __init__(
        self,
        model: nn.Module,
        seams: Seams,
        config: TrainingConfig,
        precision: Precision,
    ) -> None:
        self.model, self.precision = model, precision  # the model is not wrapped in DDP
        self.schedule = Schedule(config, seams.lr_factor)
        self.sums = StepSums(model, is_exact=config.reduction == "exact")
        self.average = WeightAverage(model, config.ema_decay) if config.ema_decay else None
        if sparse := [name for name, module in model.named_modules() if getattr(module, "sparse", None) is True]:
            raise UserError(f"model: {sparse[0]} has sparse gradients, which are not supported; set sparse=False")
        self.unsaved = digests(left_out(model, seams.is_saved))  # of what checkpoints leave out, by name
        names = {p: name for name, p in model.named_parameters()}
        groups = checked_groups(seams.param_groups(model, config), names)
        self._shard_group = group_of(list(names))
        tensors = {p: p for p in names}
        if self._shard_group:  # the optimizer gets the local shards, in the same memory
            tensors = {p: nn.Parameter(local(p.detach()), p.requires_grad) for p in names}
            groups = [group | {"params": [tensors[p] for p in group["params"]]} for group in groups]
        self.owners = {tensor: p for p, tensor in tensors.items()}  # of a tensor of the optimizer: the parameter
        self.optimizer = seams.create_optimizer(groups, config)
        if self._shard_group:
            check_elementwise(self.optimizer)
        self.skips_on_device = prepare(self.optimizer)
        self._config, self._view = config, seams.progress
        self._after_step, self._finds_unused = seams.after_step, config.find_unused_parameters
        self._terms = seams.terms
        self.factor = 0.0  # of the schedule, at the last step taken; the largest if groups have their own
        device = device_of(model)
        self.scaler = torch.amp.GradScaler(precision.device_type, enabled=precision.is_scaled)
        self.interval = Interval(device)
        self._clip = config.clip_grad_norm
        self._has_cuda_graphs = config.compile == "reduce-overhead"
        held = {p for group in self.optimizer.param_groups for p in group["params"]}
        # in the model's order, which is the same in all processes: the norm is a sum, and groups may come in any
        # order
        self._names = {tensors[p]: name for p, name in names.items() if tensors[p] in held}
        self._parameters = list(self._names)
        # fused kernels take a float32 divisor, which is exact enough only for float32
        self._divides_in_step = self.skips_on_device and all(p.dtype is torch.float32 for p in self._parameters)
        trainable = [p for p in names if p.requires_grad]  # those in no group are not trained
        self._frozen = {p: name for p, name in names.items() if not p.requires_grad}
        self._with_gradients = [*dict.fromkeys([*trainable, *self._parameters])]
        self._loss_scale, self._first_count = torch.ones((), device=device), 1.0
        scalar: dict[str, Any] = {"dtype": torch.float32, "device": device}  # as found_inf must be, even with float64
        self._is_offloaded = self._parameters[0].device != device  # the optimizer's tensors
        self._zero, self._one = torch.zeros((), **scalar), torch.ones((), **scalar)
        self.spoiled_at: dict[str, Any] = {}  # the progress before the first step that this rank has spoiled

    @property
    def progress(self) -> Progress:
        return self.schedule.progress

    def lay_out(self, metrics: Metrics) -> None:
        """Allocate space for the metrics that compute_loss returned for a batch. Call before the first step."""
        self.sums.lay_out(metrics)
        self.interval.lay_out(metrics | {"grad_norm": (0.0, 0), "skipped_steps": (0.0, 0)})
        self._first_count = 1.0 if self._terms else float(metrics["loss"][1])

    def plan(self, sampler: GlobalBatchSampler, world_size: int) -> None:
        """Plan the schedule of the whole run, which continues from `progress`."""
        progress, config = self.progress, self._config
        if progress.loss_shift < 0:
            count = max(1.0, self._first_count) * sampler.micro_batches_per_step
            progress.loss_shift = 0 if self._terms else round(math.log2(count))  # terms are divided before
        # DDP averages gradients over ranks, exact sums and FSDP do not; a power of two changes no bit of them
        divisor = 1 if config.reduction == "exact" or self._shard_group else world_size
        self._loss_scale.fill_(divisor * 2.0**-progress.loss_shift)
        self.schedule.plan(sampler)

    def show(self, progress: Progress, total_steps: int = 0) -> None:
        """Let compute_loss and after_step of a fork see this progress. total_steps: by default those of this run."""
        if self._view:
            self._view.fill(progress, total_steps or self.schedule.total_steps)

    def factors_at(self, step: int, progress: Progress) -> list[float]:
        """The schedule's factors on the learning rates of the groups at this step, from 0. Raises UserError."""
        return factors_of(self.optimizer.param_groups, self.schedule.factor_at(step, progress))

    def _set_lr(self) -> None:
        factors = self.factors_at(self.progress.step, self.progress)
        self.factor = max(factors)
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            group["lr"] = group["base_lr"] * factor

    def check_gradients(self) -> None:
        """Call after a backward pass. Raises UserError if a parameter got no gradient, for which DDP would wait."""
        if self._finds_unused:
            return
        unused = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise UserError(
                f"model: the loss does not depend on {', '.join(unused[:3])}{more}, and DDP would wait for the"
                " gradient; use it in every forward pass, add --find_unused_parameters, or freeze it in create_model"
                " with requires_grad_(False)"
            )

    @property
    def norm(self) -> torch.Tensor:
        """The gradient norm of the step just taken: 0-dimensional, on the device."""
        return self.interval.norms[-1]

    @property
    def lrs(self) -> list[float]:
        """The learning rate of each parameter group in the last step taken."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def backward(self, loss: torch.Tensor, is_padding: bool) -> None:
        """The backward pass of the summed loss, scaled so that its gradient has about the size of that of the mean.

        Padding has a gradient of 0.
        """
        total = self._terms.mean(loss) if self._terms else loss
        self.scaler.scale(total).backward(self._zero if is_padding else self._loss_scale)

    def drop_gradients(self) -> None:
        """Call before the next global batch. With CUDA graphs, gradients are zeroed: a replay overwrites new ones."""
        if self._has_cuda_graphs:
            self.optimizer.zero_grad(set_to_none=False)
            return
        for parameter in self._with_gradients:  # optimizer.zero_grad takes 20 us more, for the profiler
            parameter.grad = None

    def update_if_finite(self, samples: int) -> None:
        """Divide, clip, step, average. If the gradient is not finite, all of this is skipped on the device.

        After the all-reduces, gradient and loss are the same on every rank, so all ranks decide alike without
        communication. Only an optimizer that does not support `found_inf` needs a read from the device.

        samples: of all ranks in the global batch.
        """
        if any(p.requires_grad for p in self._frozen):
            raise thawed_error([name for p, name in self._frozen.items() if p.requires_grad], self.progress.step + 1)
        self._set_lr()
        self.sums.wait()
        if self._terms:
            self._terms.note(self.sums.metrics.count_of("loss"))
        for shard in self._parameters if self._shard_group else ():
            shard.grad = local(self.owners[shard].grad)
        unscale(self.scaler, self.optimizer, self._shard_group)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(gradients) < len(self._parameters) and not self._finds_unused:
            raise unused_error([name for p, name in self._names.items() if p.grad is None])
        divisor = self.sums.loss_count * 2.0**-self.progress.loss_shift
        # get_total_norm, which sorts by device, takes five times as long; 0 / 0, of an empty global batch, is NaN
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        norm = norm_over(self._shard_group, norm) / divisor
        norm = torch.add(norm, self.sums.loss, alpha=0)  # 0 times a non-finite loss is NaN
        self.interval.note_gradient(norm, divisor, self.sums.loss if self.scaler.is_enabled() else None)
        if self._clip:
            divisor = divisor * ((norm + 1e-6) / self._clip).clamp(min=1)
        is_finite = norm < math.inf  # NaN is not
        skipped = torch.where(is_finite, self._zero, self._one)  # exactly 0 or 1
        if self._is_offloaded:
            divisor, skipped = divisor.cpu(), skipped.cpu()
        if self._divides_in_step:
            self.optimizer.grad_scale = divisor.float()
        else:
            torch._foreach_div_(gradients, divisor)
        if self.skips_on_device:
            self.optimizer.found_inf = skipped
        if self.skips_on_device or is_finite:
            self.optimizer.step()
        self.scaler.update()
        self.drop_gradients()
        # float16 skips steps to find its scale, and their loss counts
        is_loss_finite = self.sums.loss.isfinite() if self.scaler.is_enabled() else is_finite
        self.sums.commit(samples, is_finite, self.interval, is_loss_finite)
        if self._after_step and self._view:
            with torch.no_grad():
                self._after_step(self.model, self._view, (1 - skipped).double())
        if self.average:  # of the weights that after_step leaves
            self.average.update(1 - skipped)

    def spoil(self, metrics: Metrics) -> Metrics:
        """Metrics of a stand-in for samples that could not be fetched, with which all ranks skip the step."""
        self.spoiled_at = self.spoiled_at or copy.deepcopy(vars(self.progress))
        total, *rest = metrics["loss"]
        return {**metrics, "loss": (math.nan * total, *rest)}

    def take_back(self, at: dict[str, Any]) -> None:
        """Let the state be that of an earlier step, since when all steps were skipped.

        at: `spoiled_at` of some rank.
        """
        self.read_skips()
        progress, number = self.progress, self.progress.step - at["step"]
        self.interval.take_back(at["step"], progress.step)
        for name in ("samples_in_epoch", "samples_seen"):
            setattr(progress, name, at[name])
        progress.skipped_steps -= number
        progress.skipped_in_row -= number
        if number:  # the learning rates of the last step that was taken
            progress.step, progress.user = at["step"] - 1, copy.deepcopy(at["user"])
            self._set_lr()
        progress.step, progress.user = at["step"], at["user"]

    def advance(self, samples: int) -> None:
        self.progress.step += 1
        progress = self.progress
        self.interval.note_step(SkippedStep(progress.step, progress.epoch, progress.samples_in_epoch, samples))
        progress.samples_in_epoch += samples
        progress.samples_seen += samples

    def begin_read(self, *more: torch.Tensor) -> Read:
        """Begin to copy what `finish_read` returns to the host. more: float64 or int64, on the device."""
        scale = self.scaler.scale(self._one) if self.scaler.is_enabled() else self._zero
        counts = self._terms.take_steps() if self._terms else self._zero.new_empty(0)
        return self.interval.begin_read(scale.double(), counts.double(), *more)

    def finish_read(self, read: Read) -> tuple[MetricTracker, list[SkippedStep], list[torch.Tensor]]:
        """The sums of the interval, the steps that were skipped since the last read, which this counts, and `more`.
        Waits for the device to reach the copy. Raises UserError if loss_counts is wrong."""
        sums, skipped, (counts, *more) = self.interval.finish_read(read, self.progress)
        if self._terms:
            self._terms.check_steps(counts)
        return sums, skipped, more

    def read_skips(self) -> list[SkippedStep]:
        """Count and return the steps that were skipped since the last read, the same on all ranks. Waits for the
        device, and adds the norms of the gradients to `interval`."""
        _, skipped, _ = self.finish_read(self.begin_read())
        self.interval.keep_norms()
        return skipped

    def state_dict(self) -> dict[str, Any]:
        """The training state for a checkpoint. Tensors are not copied."""
        return {
            "model": self._saved_of(self.model.state_dict()),
            "ema": self._saved_of(self.average.state_dict()) if self.average else {},
            "optimizer": optimizer_state(self.optimizer, self._names, self.owners),
            "scaler": self.scaler.state_dict(),
            "progress": dataclasses.asdict(self.progress) | {"interval": self.interval.state()},
        }

    def _saved_of(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in state.items() if name not in self.unsaved} if self.unsaved else state

    def load_state_dict(self, payload: dict[str, Any]) -> None:
        """Load the state of a checkpoint; learning rate, decay and the like are those of the config.

        Raises:
            UserError: if something does not fit, with its name. The state may be partially loaded by then.
        """
        try:
            self._load(payload)
        except UserError:
            raise
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"the checkpoint's state does not fit ({error}); give another checkpoint") from error

    def _load(self, payload: dict[str, Any]) -> None:
        names = {field.name for field in dataclasses.fields(Progress)} | {"interval"}
        missing = sorted(names - payload["progress"].keys())
        if missing:
            raise UserError(f"the checkpoint's progress lacks {', '.join(missing)}; give another checkpoint")
        self.load_model(payload)
        load_optimizer(self.optimizer, payload["optimizer"], self._names, self.owners)
        if self.average:
            self.average.load_state_dict(self._complete(payload["ema"] or payload["model"], payload))
        if self.scaler.is_enabled() and payload["scaler"]:
            self.scaler.load_state_dict(payload["scaler"])
        progress = dict(payload["progress"])
        self.interval.load_state(progress.pop("interval"))
        for name, value in progress.items():
            setattr(self.progress, name, value)
        if self.average:
            skipped = self.progress.skipped_steps + self.progress.overflow_steps
            self.average.continue_from(self.progress.step - skipped)

    def _complete(self, weights: dict[str, Any], payload: dict[str, Any]) -> dict[str, Any]:
        saved = payload.get("provenance", {}).get(KEY, {})
        return complete(weights, saved, self.model, self.unsaved, "the checkpoint")

    def load_model(self, payload: dict[str, Any], kind: str = "model") -> None:
        """Load the weights of a checkpoint. kind: "model", or "ema" for the averaged ones. Raises UserError."""
        weights, likes = self._complete(payload[kind], payload), self.layouts()
        try:
            self.model.load_state_dict({name: shard_of(each, likes.get(name)) for name, each in weights.items()})
        except RuntimeError as error:
            raise UserError(f"the checkpoint's model does not fit ({error}); give the model it was made with") from None
        self.sums.running_stats.reload()

    def weights(self) -> dict[str, AbstractContextManager]:
        """The weights to evaluate, each with the context in which the model has them. The last selects the best."""
        return {"model": nullcontext()} | ({"ema": self.average.swapped()} if self.average else {})

    def weights_of(self, payload: dict[str, Any]) -> dict[str, AbstractContextManager]:
        """Those in a checkpoint, which replace the weights of the model for good; without one, those of the model."""
        found: dict[str, AbstractContextManager] = {}
        for kind in ("model", "ema") if payload else ():
            if payload[kind]:
                found[kind] = self._loaded(payload, kind)
        return found or {"model": nullcontext()}

    @contextmanager
    def _loaded(self, payload: dict[str, Any], kind: str) -> Iterator[None]:
        self.load_model(payload, kind)
        yield

    def layouts(self) -> dict[str, torch.Tensor]:
        """The sharded parameters by name."""
        return {name: p for name, p in self.model.state_dict(keep_vars=True).items() if is_sharded(p)}
