"""The reference: the training of train.py in one process, without DDP, checkpoints and worker processes.

This file is plain, so that nobody can doubt it. The tests compare the weights of a run on any number of ranks with the
weights that it computes. Of this repository it uses model.py and dataset.py, and nothing else. Read it from the top:
random numbers, samples, the learning rate, BatchNorm, the loss, one optimizer step, and the loop at the end.
"""

import functools
import hashlib
import inspect
import math
import random
from collections import Counter
from types import SimpleNamespace as Progress

import numpy
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import model as your_model
from dataset import create_dataset
from model import compute_loss, create_model, param_groups

# ---- random numbers: each draw is a function of a key, such as ("order", seed, epoch) ----


def number(*key):
    """Return a seed for this key: the first 63 bits of its SHA-256, as an integer."""
    text = "/".join(str(part) for part in key)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") // 2


def seed_host(*key):
    """Seed the generators that a data set may draw from: those of Python, NumPy and torch."""
    value = number(*key)
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


def seed_torch(*key):
    """Seed the generators of torch on all devices. torch.manual_seed takes 100 us more, and this loop is timed too."""
    value = number(*key)
    for generator in [torch.default_generator, *torch.cuda.default_generators]:
        generator.manual_seed(value)


# ---- samples ----


def epoch_order(config, epoch, size):
    """Return the order of the samples in an epoch: a permutation of 0 to size - 1, int64."""
    generator = torch.Generator().manual_seed(number("order", config.seed, epoch))
    return torch.randperm(size, generator=generator)


def cut_into_global_batches(order, batch_size, micro_batches_per_step):
    """Return a list of global batches. Each is a list of micro-batches, and each of these a tensor of indices."""
    global_batches = order.split(batch_size * micro_batches_per_step)
    return [global_batch.split(batch_size) for global_batch in global_batches]


def reads_samples_at_once(data):
    """Return whether the data set has `__getitems__`. torch's Subset always has it, so the data set inside decides."""
    while isinstance(data, torch.utils.data.Subset):
        data = data.dataset
    return hasattr(data, "__getitems__")


def read_samples(data, indices, seed, epoch):
    """Return the samples. What the data set draws for a sample depends on the seed, the epoch and its index only.

    If the data set reads the samples of a micro-batch at once, it depends on all their indices.
    """
    if reads_samples_at_once(data):
        seed_host("sample", seed, epoch, *indices)
        return data.__getitems__(indices)
    samples = []
    for index in indices:
        seed_host("sample", seed, epoch, index)
        samples.append(data[index])
    return samples


def create_batch(data, indices, seed, epoch):
    """Return a micro-batch as compute_loss gets it, on the device if the data set moves it there."""
    samples = read_samples(data, indices.tolist(), seed, epoch)
    collate = getattr(data, "collate", torch.utils.data.default_collate)
    batch = collate(samples)
    if hasattr(data, "device_transform"):
        batch = data.device_transform(batch, seed, epoch, indices)
    return batch


# ---- the learning rate and the optimizer ----


def schedule(config, step, total_steps, warmup_steps, progress):
    """Return the factor on the peak learning rate: a linear warm-up to 1, then the way down to min_lr / lr.

    Args:
        step: the number of the optimizer step, from 0.
        progress: is not used here. A function lr_factor of model.py may use it.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if config.schedule == "constant":
        factor = 1
    elif config.schedule == "linear":
        factor = 1 - done
    elif config.schedule == "cosine":
        factor = 0.5 + 0.5 * math.cos(math.pi * done)
    elif config.schedule == "wsd":  # warm-up, stable, decay: linear to 0 over the last fifth
        factor = min(1, 5 * (1 - done))
    elif config.schedule == "step" and done < 0.5:
        factor = 1
    elif config.schedule == "step" and done < 0.75:
        factor = 0.1
    else:  # "step", in the last quarter
        factor = 0.01
    lowest = config.min_lr / config.lr
    return lowest + (1 - lowest) * factor


def build_optimizer(groups, config, fused):
    """Return the optimizer of model.py, if it defines create_optimizer, and else SGD or AdamW of torch."""
    if hasattr(your_model, "create_optimizer"):
        return your_model.create_optimizer(groups, config)
    if config.optimizer == "adamw":
        betas = (config.momentum, config.beta2)  # --momentum is beta1 of AdamW
        return torch.optim.AdamW(groups, config.lr, betas, weight_decay=config.weight_decay, fused=fused)
    return torch.optim.SGD(
        groups,
        config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov and config.momentum > 0,
        fused=fused,
    )


def set_learning_rates(optimizer, peak_rates, factor):
    """Multiply the peak learning rate of each parameter group by a factor.

    Args:
        factor: one number for all groups, or a dict with a number for each name of a group.
    """
    for group, peak_rate in zip(optimizer.param_groups, peak_rates, strict=True):
        if isinstance(factor, dict):
            group["lr"] = peak_rate * factor[group["name"]]
        else:
            group["lr"] = peak_rate * factor


# ---- BatchNorm ----


class RunningStatistics:
    """The running means and variances of all BatchNorm layers, which move once per global batch.

    Each micro-batch starts from the statistics before the step. Those after the step are the mean over the
    micro-batches, weighted by their samples. So they do not depend on the rank that computes a micro-batch.
    """

    def __init__(self, model):
        self.buffers = []
        for layer in model.modules():
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
                self.buffers += [layer.running_mean, layer.running_var]
        self.before_step = [torch.empty_like(buffer) for buffer in self.buffers]
        self.means = [torch.empty_like(buffer) for buffer in self.buffers]

    def begin_step(self):
        if self.buffers:
            torch._foreach_copy_(self.before_step, self.buffers)
            torch._foreach_zero_(self.means)

    def begin_micro_batch(self):
        if self.buffers:
            torch._foreach_copy_(self.buffers, self.before_step)

    def end_micro_batch(self, fraction):
        """Add the layers' statistics, weighted by the micro-batch's fraction of the samples of the global batch."""
        if self.buffers:
            torch._foreach_add_(self.means, torch._foreach_mul(self.buffers, fraction))

    def end_step(self):
        if self.buffers:
            torch._foreach_copy_(self.buffers, self.means)


# ---- the loss ----


def fill_in(function, **arguments):
    """Return the function with those arguments filled in that it has a parameter for."""
    parameters = inspect.signature(function).parameters
    known = {name: value for name, value in arguments.items() if name in parameters}
    return functools.partial(function, **known)


def count_loss_terms(batches, config):
    """Return the count of each loss term over the global batch. It is empty if model.py does not define loss_counts.

    A sum of two Counters leaves out the terms whose count is 0, so a term that counted nothing adds nothing.
    """
    counts = Counter()
    if hasattr(your_model, "loss_counts"):
        loss_counts = fill_in(your_model.loss_counts, config=config)
        for batch in batches:
            counts = counts + Counter(loss_counts(batch))
    return counts


def combine_loss_terms(terms, counts):
    """Return the loss of a micro-batch if each of its terms is divided by a count of its own.

    Args:
        terms: for each name the sum of the term, its count in this micro-batch, which is not needed, and its weight.
        counts: for each name the count in the global batch.
    """
    loss = 0
    for name, count in counts.items():
        term_sum, _, weight = terms[name]
        loss = loss + weight * term_sum / count
    return loss


# ---- one optimizer step ----


def sum_gradients(model, statistics, micro_batches, batches, config, step, progress):
    """Add the gradient of a global batch to that of the parameters.

    Args:
        micro_batches: the indices of the samples of each micro-batch.
        batches: the samples of each micro-batch.
        progress: is passed to compute_loss if it has a parameter of this name.

    Returns:
        The loss summed over the global batch, float64, and its count. The gradient is that of the summed loss.
    """
    loss_function = fill_in(compute_loss, config=config, progress=progress)
    term_counts = count_loss_terms(batches, config)
    samples_in_step = sum(len(indices) for indices in micro_batches)
    loss_sum = 0.0
    loss_count = 0.0
    statistics.begin_step()
    for position, (indices, batch) in enumerate(zip(micro_batches, batches, strict=True)):
        statistics.begin_micro_batch()
        seed_torch("step", config.seed, step, position)
        metrics = loss_function(model, batch)
        if term_counts:
            loss = combine_loss_terms(metrics["loss"], term_counts)
            count = 1 / len(micro_batches)  # the sum is 1, since the terms are divided by their counts already
        else:
            loss, count = metrics["loss"]
        loss.backward()
        loss_sum = loss_sum + loss.detach().double()
        loss_count = loss_count + float(count)
        statistics.end_micro_batch(len(indices) / samples_in_step)
    statistics.end_step()
    return loss_sum, loss_count


def divide_and_clip_gradients(model, divisor, clip_grad_norm):
    """Divide the summed gradient by the count of the global batch. Then clip it, unless clip_grad_norm is 0."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_div_(gradients, divisor)
    max_norm = clip_grad_norm or math.inf  # a run always computes the norm, and its speed is compared with this loop's
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def update_average(average, model, step, ema_decay):
    """Move the averaged weights towards those of the model. The decay grows from 0, since early weights are poor."""
    average.multi_avg_fn = get_ema_multi_avg_fn(min(ema_decay, step / (9 + step)))
    average.update_parameters(model)


# ---- the loop ----


def plain_loop(config, micro_batches_per_step, device="cpu", fused=False, packed=None):
    """Train, and yield after each optimizer step.

    Args:
        micro_batches_per_step: in a run, this is the number of ranks x grad_accum_steps.
        fused: use the fused kernels of torch's optimizer.
        packed: the global batches of each epoch, if the samples are packed by their lengths (--batch_tokens).

    Yields:
        The model, its averaged copy or None, the loss summed over the global batch (float64), and its count.
    """
    device = torch.device(device)
    seed_host("create_dataset", config.seed)
    data = create_dataset(config, "train")
    torch.manual_seed(config.seed)
    model = create_model(config, device).train()
    statistics = RunningStatistics(model)
    average = None
    if config.ema_decay:
        average = AveragedModel(model, use_buffers=True)
    optimizer = build_optimizer(param_groups(model, config), config, fused)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    lr_factor = getattr(your_model, "lr_factor", schedule)

    # the length of the run
    samples_per_step = config.batch_size * micro_batches_per_step
    samples_per_epoch = len(data)
    if config.drop_last:
        samples_per_epoch -= len(data) % samples_per_step
    if packed:
        steps_per_epoch = len(packed[0])
    else:
        steps_per_epoch = math.ceil(samples_per_epoch / samples_per_step)
    max_epochs, max_steps = config.limits
    total_steps = int(min(max_epochs * steps_per_epoch, max_steps))
    warmup_steps = config.warmup_steps
    if warmup_steps == "auto":
        warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    schedule_steps = config.schedule_steps or total_steps

    step = 0
    user_progress = {}  # values that a fork keeps between two steps
    for epoch in range(math.ceil(total_steps / steps_per_epoch)):
        if packed:
            global_batches = packed[epoch]
        else:
            order = epoch_order(config, epoch, len(data))[:samples_per_epoch]
            global_batches = cut_into_global_batches(order, config.batch_size, micro_batches_per_step)
            global_batches = global_batches[: total_steps - step]

        for micro_batches in global_batches:
            samples_seen = epoch * samples_per_epoch + (step % steps_per_epoch) * samples_per_step
            counts = {"step": step, "total_steps": total_steps, "epoch": epoch, "samples_seen": samples_seen}
            counts_on_device = {name: torch.full((), value, device=device) for name, value in counts.items()}
            progress_on_device = Progress(**counts_on_device)

            batches = [create_batch(data, indices, config.seed, epoch) for indices in micro_batches]
            loss_sum, loss_count = sum_gradients(
                model=model,
                statistics=statistics,
                micro_batches=micro_batches,
                batches=batches,
                config=config,
                step=step,
                progress=progress_on_device,
            )
            divide_and_clip_gradients(model, loss_count, config.clip_grad_norm)
            progress = Progress(**counts, user=user_progress)
            factor = lr_factor(config, step, schedule_steps, warmup_steps, progress)
            set_learning_rates(optimizer, peak_rates, factor)
            optimizer.step()
            optimizer.zero_grad()

            if hasattr(your_model, "after_step"):
                after_step = fill_in(your_model.after_step, config=config)
                is_updated = torch.ones((), dtype=torch.float64, device=device)  # this loop skips no step
                with torch.no_grad():
                    after_step(model, progress_on_device, is_updated)
            if average:
                update_average(average, model, step, config.ema_decay)
            step += 1
            yield model, average and average.module, loss_sum, loss_count
