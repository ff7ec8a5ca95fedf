"""The oracle: the same training in one process, as plainly as it can be written. It shares no line with what it judges.

No DDP, no checkpoint, no workers; of ours only the model, the data set and the config. README.md shows it beside train.py.
"""

import hashlib
import math

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from dataset import create_dataset
from model import compute_loss, create_model, param_groups


def number(*key):
    return int.from_bytes(hashlib.sha256("/".join(str(part) for part in key).encode()).digest()[:8], "big") // 2


def plain_loop(config, micro_batches_per_step, max_steps=10**9):
    """Returns the model, its average (or None) and the loss of each step. micro_batches_per_step: ranks x accumulation."""
    data = create_dataset(config, "train")
    collate = getattr(data, "collate", default_collate)
    transform = getattr(data, "device_transform", lambda batch, *_: batch)
    fetch = getattr(data, "__getitems__", lambda indices: [data[i] for i in indices])
    weights = torch.as_tensor(getattr(data, "weights", [1.0] * len(data)), dtype=torch.float64)
    torch.manual_seed(config.seed)
    model = create_model(config, torch.device("cpu")).train()
    groups = param_groups(model, config)
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999))
    else:
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    peaks = [group["lr"] for group in optimizer.param_groups]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay), use_buffers=True) if config.ema_decay else None
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]

    size = config.batch_size * micro_batches_per_step
    steps_per_epoch = math.ceil(len(data) / size)
    total = min(config.epochs * steps_per_epoch, config.max_steps or 10**9)
    warm_up = round(config.warmup_epochs * steps_per_epoch)
    losses = []
    for epoch in range(config.epochs):
        shuffle = torch.Generator().manual_seed(number("order", config.seed, epoch))
        for window in torch.randperm(len(data), generator=shuffle).split(size):
            step = len(losses)
            if step >= min(total, max_steps):
                return model, average and average.module, losses
            divisor = weights[window].sum().item()
            before = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
            means = [(torch.zeros_like(mean), torch.zeros_like(var)) for mean, var in before]
            loss_of_step = 0.0
            for m, chosen in enumerate(window.split(config.batch_size)):
                batch = transform(collate(fetch(chosen.tolist())), config.seed, epoch, chosen)
                torch.manual_seed(number("step", config.seed, step, m))
                for norm in norms:
                    norm.momentum = 1.0  # leaves the statistics of this micro-batch
                loss_sum, _ = compute_loss(model, batch)
                (loss_sum / divisor).backward()
                loss_of_step += loss_sum.item() / divisor
                for norm, (mean, var) in zip(norms, means, strict=True):
                    mean += norm.running_mean * (len(chosen) / len(window))
                    var += norm.running_var * (len(chosen) / len(window))
            for norm, rate, old, new in zip(norms, momenta, before, means, strict=True):
                norm.running_mean.copy_((1 - rate) * old[0] + rate * new[0])
                norm.running_var.copy_((1 - rate) * old[1] + rate * new[1])
            if config.clip_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                cosine = 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, total - warm_up))
                group["lr"] = peak * ((step + 1) / warm_up if step < warm_up else cosine)
            optimizer.step()
            optimizer.zero_grad()
            if average:
                average.update_parameters(model)
            losses.append(loss_of_step)
    return model, average and average.module, losses
