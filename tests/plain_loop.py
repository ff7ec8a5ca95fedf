"""The reference: the same training in one process, without DDP, checkpoints or workers. verify.py uses it too."""

import functools
import hashlib
import inspect
import math
import random
import sys
from collections import Counter
from types import SimpleNamespace as Progress

import numpy
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dataset import create_dataset
from model import compute_loss, create_model, param_groups


def number(*key):
    return int.from_bytes(hashlib.sha256("/".join(str(part) for part in key).encode()).digest()[:8], "big") // 2


def seed(*key):
    random.seed(n := number(*key)), torch.default_generator.manual_seed(n), numpy.random.seed(n % 2**32)


def samples(data, indices, *key):
    if len(indices) > 1 and not hasattr(data, "__getitems__"):
        return [samples(data, [index], *key)[0] for index in indices]
    seed("sample", *key, *indices)
    return data.__getitems__(indices) if hasattr(data, "__getitems__") else [data[index] for index in indices]


def schedule(config, step, total, warm_up, progress):
    done, least = min(1, (step - warm_up) / max(1, total - warm_up)), config.min_lr / config.lr
    shapes = {"cosine": 0.5 + 0.5 * math.cos(math.pi * done), "linear": 1 - done, "constant": 1}
    shapes |= {"wsd": min(1, 5 * (1 - done)), "step": 1 if done < 0.5 else 0.1 if done < 0.75 else 0.01}
    return (step + 1) / warm_up if step < warm_up else least + (1 - least) * shapes[config.schedule]


def with_config(function, config):
    """The function with its argument `config`, if it has one."""
    if "config" not in inspect.signature(function).parameters:
        return function
    return functools.partial(function, config=config)


def plain_loop(config, micro_batches_per_step, device="cpu", fused=False, packed=None):
    """Yields model, average, summed loss and its count for each step of ranks x accumulation, or of packed[epoch]."""
    hooks, average = vars(sys.modules["model"]), None
    seed("create_dataset", config.seed)
    data = create_dataset(config, "train")
    collate = getattr(data, "collate", torch.utils.data.default_collate)
    transform = getattr(data, "device_transform", lambda batch, *_: batch)
    torch.manual_seed(config.seed)
    model = create_model(config, device := torch.device(device)).train()
    groups, rest = param_groups(model, config), {"weight_decay": config.weight_decay, "fused": fused}
    generators = [torch.default_generator, *torch.cuda.default_generators]  # torch.manual_seed takes 100 us
    optimizer = torch.optim.SGD(groups, config.lr, mu := config.momentum, nesterov=config.nesterov and mu > 0, **rest)
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, config.lr, (config.momentum, config.beta2), **rest)
    rule = lambda *weights: get_ema_multi_avg_fn(min(config.ema_decay, step / (9 + step)))(*weights)  # noqa: E731
    optimizer = hooks.get("create_optimizer", lambda *_: optimizer)(param_groups(model, config), config)
    average = AveragedModel(model, multi_avg_fn=rule, use_buffers=True) if config.ema_decay else None
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    statistics = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)] or [torch.zeros(1)]
    before, means = ([torch.empty_like(s) for s in statistics] for _ in range(2))
    size = (batch_size := config.batch_size) * micro_batches_per_step
    used = len(data) - config.drop_last * (len(data) % size)
    per_epoch, (most_epochs, most_steps) = len(packed[0]) if packed else math.ceil(used / size), config.limits
    total = int(min(most_epochs * per_epoch, most_steps))
    warm_up = round(config.warmup_epochs * per_epoch) if config.warmup_steps == "auto" else config.warmup_steps
    factor_at, step, user = hooks.get("lr_factor", schedule), -1, {}
    loss_of = with_config(compute_loss, config)
    counts_of = with_config(hooks.get("loss_counts", lambda batch: {}), config)
    after_step = torch.no_grad()(with_config(hooks.get("after_step", lambda *_: None), config))
    for epoch in range(math.ceil(total / per_epoch)):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(number("order", config.seed, epoch)))
        for parts in (
            packed[epoch] if packed else [w.split(batch_size) for w in order[:used].split(size)[: total - step - 1]]
        ):
            seen, step, count, loss_of_step = epoch * used + (step + 1) % per_epoch * size, step + 1, 0.0, 0.0
            now = {"step": step, "total_steps": total, "epoch": epoch, "samples_seen": seen}
            view = Progress(**{name: torch.full((), value, device=device) for name, value in now.items()})
            more = {"progress": view} if "progress" in inspect.signature(loss_of).parameters else {}
            torch._foreach_copy_(before, statistics), torch._foreach_zero_(means)
            key, whole = (config.seed, epoch), sum(map(len, parts))
            batches = [transform(collate(samples(data, part.tolist(), *key)), *key, part) for part in parts]
            counts = sum(map(Counter, map(counts_of, batches)), Counter())
            for m, (chosen, batch) in enumerate(zip(parts, batches, strict=True)):
                torch._foreach_copy_(statistics, before)  # each micro-batch moves those before the step
                [generator.manual_seed(number("step", config.seed, step, m)) for generator in generators]
                loss = loss_of(model, batch, **more)["loss"]
                if counts:  # of the global batch, without terms that counted nothing
                    loss = sum(loss[name][2] * loss[name][0] / n for name, n in counts.items()), 1 / len(parts)
                loss[0].backward()
                loss_of_step, count = loss_of_step + loss[0].detach().double(), count + float(loss[1])
                torch._foreach_add_(means, torch._foreach_mul(statistics, len(chosen) / whole))
            torch._foreach_copy_(statistics, means)
            torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], count)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm or math.inf)
            factor = factor_at(config, step, config.schedule_steps or total, warm_up, Progress(**now, user=user))
            for group in optimizer.param_groups:
                rate = factor[group["name"]] if isinstance(factor, dict) else factor
                group["lr"] = group.setdefault("peak", group["lr"]) * rate
            optimizer.step()
            optimizer.zero_grad()
            after_step(model, view, torch.ones((), dtype=torch.float64, device=device))
            if average:
                average.update_parameters(model)
            yield model, average and average.module, loss_of_step, count
