# extra: verify
"""Check what the run's own precision does to the outputs of the model and to the loss.

The other checks are in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lib.values import flatten_nested, is_dense
from lib.verify.fork import BrokenInvariant, Fork, allow_failure, default_dtype, perturb_parameters
from lib.verify.result import PLEASE_CHECK
from utils.batch import list_tensors, map_tensors
from utils.training.precision import Precision

SIZE, BATCHES = 4, 8  # samples in a micro-batch, and micro-batches
LARGE_ROUNDING = 0.25  # rounding relative to the spread (docs/verify.md has measurements)
MAX_ROUNDING_COST = 0.1  # loss of rounded perfect outputs, relative to that of their mean


@allow_failure("how the precision of the run rounds")
def measure_rounding(fork: Fork) -> str:
    """Compare a few micro-batches in the run's precision with float64, at the same weights."""
    config, ctx = fork.config, fork.ctx
    precision = Precision.choose(
        use_amp=config.use_amp, amp_dtype=config.amp_dtype, device=ctx.device, fast_bf16=ctx.fast_bf16
    )
    subset = fork.small_train_set()
    size, loader, run_outputs, exact_outputs = min(SIZE, len(subset)), fork.create_loader(subset), [], []
    starts = range(0, min(BATCHES * size, len(subset) - size + 1), size)
    batches = [loader.fetch_samples([*range(start, start + size)])[2] for start in starts]
    with default_dtype():
        kind = precision.name
        net = perturb_parameters(fork.create_model(), 1)
    exact = fork.create_model()
    exact.load_state_dict(net.state_dict())
    for module in (*net.modules(), *exact.modules()):  # the models are in training mode, but without dropout
        module.training = module in (net, exact) or isinstance(module, nn.modules.batchnorm._BatchNorm)
    for batch in batches:
        exact_outputs.append(run_forward(fork, exact, batch))
        with default_dtype(), precision.autocast():
            run_outputs.append(
                run_forward(fork, net, map_tensors(lambda t: t.float() if t.is_floating_point() else t, batch))
            )
    errors = {
        name: compute_rounding_error(name, run_outputs, exact_outputs, precision)
        for name in run_outputs[0].keys() & exact_outputs[0]
    }
    for name in errors.keys() - {"loss"}:
        check_targets(
            fork, exact, batches, name, find_rounded_dtype([outputs[name] for outputs in run_outputs], precision)
        )
    name = max(errors, key=errors.__getitem__)
    text = f"{kind} rounds the {name} by {errors[name]:.1%} of its spread."
    if errors[name] > LARGE_ROUNDING:
        return f"{PLEASE_CHECK}{text} Use --no-use_amp or a float32 {name}, unless that is precise enough."
    return text


def run_forward(
    fork: Fork, net: nn.Module, batch: Any, change: Callable[[Any], Any] = lambda output: output
) -> dict[str, Tensor]:
    """Return the outputs of the model by name, and the summed "loss".

    Args:
        fork: the fork that is checked.
        net: the model.
        batch: the micro-batch.
        change: a function that is applied to the output of the model.
    """
    outputs: dict[str, Tensor] = {}

    def record_outputs(_: nn.Module, __: Any, output: Any) -> Any:
        dense = {
            name: leaf for name, leaf in flatten_nested(output).items() if isinstance(leaf, Tensor) and is_dense(leaf)
        }
        named = {f"output {name}".strip(): leaf for name, leaf in dense.items()}
        outputs.update({name: leaf.detach() for name, leaf in named.items() if leaf.ndim and leaf.is_floating_point()})
        return change(output)

    handle = net.register_forward_hook(record_outputs)
    try:
        return outputs | {"loss": fork.hooks.compute_loss(net, batch)["loss"][0].detach().sum().reshape(1)}
    finally:
        handle.remove()


def compute_rounding_error(
    name: str, run_outputs: list[dict[str, Tensor]], exact_outputs: list[dict[str, Tensor]], precision: Precision
) -> float:
    """Return the rounding of an output relative to its spread over samples.

    For the loss, the spread is that over micro-batches. Errors from within the model are left out, because random
    weights amplify them.
    """
    pairs = [(a[name].double(), b[name].double()) for a, b in zip(run_outputs, exact_outputs, strict=True)]
    if name == "loss":
        pairs = [(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))]
    dtype = find_rounded_dtype([outputs[name] for outputs in run_outputs], precision)
    error = sum((a - b).square().sum().item() for a, b in pairs)
    rounded = sum((b.to(dtype).double() - b).square().sum().item() for _, b in pairs)
    spread = sum((b - b.mean(0)).square().sum().item() for _, b in pairs)
    return (min(error, rounded) / spread) ** 0.5 if spread else 0.0


def find_rounded_dtype(values: list[Tensor], precision: Precision) -> torch.dtype:
    """Return the dtype to which the values are rounded. It is still bfloat16 for the values of `head(x).float()`."""
    flat = torch.cat([value.flatten() for value in values])
    dtypes = (precision.dtype or torch.float32, torch.float32, torch.float64)
    return next(dtype for dtype in dtypes if torch.equal(flat.to(dtype).to(flat.dtype), flat))


def check_targets(fork: Fork, net: nn.Module, batches: list[Any], name: str, dtype: torch.dtype) -> None:
    """Raise BrokenInvariant if outputs in `dtype` cannot come near their targets.

    Targets are tensors of the batch that have the output's size, and that give a lower loss than their mean does.
    """

    def compute_loss(tensor_index: int, function: Callable[[Tensor], Tensor]) -> float:
        """Return the loss of outputs that are a function of a tensor of the batch."""
        total = 0.0
        for batch in batches:
            target = function(list_tensors(batch)[tensor_index])

            def change(output: Any, target: Tensor = target) -> Any:
                output_leaf = flatten_nested(output)[name.removeprefix("output").strip()]
                return map_tensors(
                    lambda leaf: target.reshape(output_leaf.shape) if leaf is output_leaf else leaf, output
                )

            total += run_forward(fork, net, batch, change)["loss"].item()
        return total

    for tensor_index, target in enumerate(list_tensors(batches[0])):
        perfect = rounded = constant = 0.0
        with suppress(Exception):  # the tensor may have another size
            perfect = compute_loss(tensor_index, lambda t: t)
            constant = compute_loss(tensor_index, lambda t: t.mean(0, True).expand_as(t))
            rounded = compute_loss(tensor_index, lambda t: t.to(dtype).to(t.dtype))
        gain = constant - perfect
        if gain > 0.1 * max(abs(constant), abs(perfect)) and not rounded - perfect <= MAX_ROUNDING_COST * gain:
            raise BrokenInvariant(
                f"The {name} is {str(dtype).removeprefix('torch.')}, which is too coarse for its targets (near"
                f" {target.double().mean():.6g}, spread {target.double().std():.3g}). Rounding perfect outputs costs"
                f" {(rounded - perfect) / gain:.0%} of the loss of predicting the mean. Subtract the mean from the"
                " targets, scale the output in float32, or use --no-use_amp."
            )
