# extra: verify
"""What a person has to judge in a loss: narrow sums, metrics that are equal, and a model that sees what it predicts."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lib.values import is_dense, one_line, relative_error, scramble_global_rngs, spread
from lib.verify.fork import Broken, Fork, Subset, perturbed
from utils.batch import map_tensors

COMPARES = re.compile("loss|entropy|^gather$")  # functions of predictions and targets
BATCHES = 8  # in which metrics are equal
SAMPLES = 48  # whose targets equal a column of the input
CHANCE = 1e-4  # that a column does so by chance
NEXT_INPUT = (
    "; please check: targets are the next inputs of a sequence, and predictions depend on these inputs; use a causal"
    " mask, and let the target of position t be the input of t + 1"
)
AN_INPUT = (
    f"; please check: the targets of {SAMPLES} samples are also an input of the model, and predictions depend on it;"
    " take it out of the input"
)
Change = Callable[[Tensor], Tensor]


class Watch(TorchFunctionMode):
    """A call of compute_loss: its metrics, the model's inputs, what loss functions compare, and sums in 8 or 16 bits.

    Args:
        changes: functions of the model's inputs, by their number.
    """

    def __init__(
        self, fork: Fork, net: nn.Module, batch: Any, is_training: bool, changes: Mapping[int, Change] | None = None
    ) -> None:
        super().__init__()
        self._changes = changes or {}
        self._is_inside = False
        self.inputs: list[Tensor] = []
        self.compared: list[list[Tensor]] = []  # a prediction and its target, or the reverse
        self.narrow: list[tuple[torch.dtype, float]] = []  # of a sum, and how large it may be
        hooks = net.register_forward_pre_hook(self._enter, with_kwargs=True), net.register_forward_hook(self._leave)
        with self, torch.set_grad_enabled(is_training):
            self.metrics = fork.seams.compute_loss(net.train(is_training), batch)
        for hook in hooks:
            hook.remove()
        for total, count, *_ in self.metrics.values():
            self._note_sum(total, torch.as_tensor(count).max().item())
            self._note_sum(count)

    @property
    def numbers(self) -> dict[str, list[float]]:
        """The sum and count of each metric that is their quotient, without the loss."""
        plain = {name: entry for name, entry in self.metrics.items() if name != "loss" and len(entry) == 2}
        return {
            name: torch.cat([torch.as_tensor(part).double().flatten().cpu() for part in entry]).tolist()
            for name, entry in plain.items()
        }

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self._is_inside = True
        return map_tensors(self._note_input, (args, kwargs))

    def _note_input(self, tensor: Tensor) -> Tensor:
        change = self._changes.get(len(self.inputs))
        self.inputs.append(change(tensor) if change else tensor)
        return self.inputs[-1]

    def _leave(self, *_: Any) -> None:
        self._is_inside = False

    def _note_sum(self, total: Any, most: float = 0.0) -> None:
        if isinstance(total, Tensor) and total.dtype.itemsize < 4 and total.dtype is not torch.bool:
            self.narrow.append((total.dtype, max(most, total.abs().double().max().item())))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and is_dense(each)]
        if len(tensors) > 1 and (COMPARES.search(name) or ("sub" in name and not self._is_inside)):
            self.compared.append([each.detach() for each in tensors[:2]])
        if tensors and (name.endswith("sum") or kwargs.get("reduction") == "sum"):
            is_mask = ((tensors[0] == 0) | (tensors[0] == 1)).all()  # a model that is trained may be right everywhere
            self._note_sum(result, tensors[0].numel() / result.numel() if is_mask else 0.0)
        return result


def batch_of(fork: Fork, count: int, number: int = 0) -> Any:
    """Samples from all over the training set, others for each number."""
    rows = (spread(count, len(fork.train_set)) + number) % len(fork.train_set)
    return fork.loader(Subset(fork.train_set, rows, fork.dtype)).fetch([*range(len(rows))])[2]


def look_at_passes(fork: Fork) -> str:
    """Notes on what a few passes show. Raises Broken if an integer overflows at the size of the run's batches."""
    net = perturbed(fork.new_model(), 1)  # some layers have no effect at first
    batch = batch_of(fork, fork.small_config.batch_size)
    watches = {is_training: Watch(fork, net, batch, is_training) for is_training in (True, False)}
    found = "".join(check_narrow(fork, net, is_training) for is_training, watch in watches.items() if watch.narrow)
    found += equal_metrics(fork, net, watches)
    try:
        return found + sees_answers(fork, net, batch, watches[False])
    except Exception as error:  # the fork may check its inputs
        return f"{found}; not checked: whether the model sees its targets, since {one_line(error)}"


def check_narrow(fork: Fork, net: nn.Module, is_training: bool) -> str:
    """Raises Broken if an integer sum overflows in a batch of the run's size. A note if one in float16 may."""
    size = fork.config.batch_size
    if not is_training:
        size = fork.config.eval_batch_size or size
    few, more = (Watch(fork, net, batch_of(fork, count), is_training).narrow for count in (2, 4))
    for (dtype, two), (_, four) in zip(few, more, strict=False):
        largest = two + (four - two) / 2 * (size - 2)
        limit = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
        text = (
            f"a sum in {dtype} may reach {largest:.0f} in a batch of {size} samples, but overflows above {limit:.0f};"
            " let sums and counts be int64 or float32"
        )
        if largest > limit and not dtype.is_floating_point:
            raise Broken(text)
        if not largest <= limit:
            return f"; please check: {text}"
    return ""


def equal_metrics(fork: Fork, net: nn.Module, watches: dict[bool, Watch]) -> str:
    """A note on two metrics, other than the loss, that have equal sums and counts in all batches."""
    seen: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for number in range(BATCHES):
        for watch in watches.values():
            for one, other in combinations(watch.numbers, 2):
                seen[one, other].append([watch.numbers[one], watch.numbers[other]])
        equal = [pair for pair, values in seen.items() if all(one == other for one, other in values)]
        if not equal:
            return ""
        batch = batch_of(fork, fork.small_config.batch_size, number + 1)
        watches = {is_training: Watch(fork, net, batch, is_training) for is_training in watches}
    pairs = [pair for pair in equal if len({one[0] for one, _ in seen[pair]}) > 1]
    if not pairs:
        return ""
    return (
        f"; please check: {' and '.join(pairs[0])} have equal sums and counts in {BATCHES} batches; compute each metric"
        " from its own numbers, or leave one out"
    )


def sees_answers(fork: Fork, net: nn.Module, batch: Any, watch: Watch) -> str:
    """A note if predictions depend on an input that is their target."""
    for place in product(range(len(watch.inputs)), range(len(watch.compared)), (0, 1)):
        columns = next_columns(watch, *place)
        if columns and is_used(fork, net, batch, place, *columns):
            return NEXT_INPUT
        if equal_columns(watch, *place):
            larger = batch_of(fork, SAMPLES)
            same = equal_columns(Watch(fork, net, larger, is_training=False), *place, chance=CHANCE)
            if same and is_used(fork, net, larger, place, 0, same[0]):
                return AN_INPUT
    return ""


def flat_pair(watch: Watch, number: int, pair: int, side: int) -> tuple[Tensor, Tensor]:
    """An input and a target, by sample; empty ones if they do not fit."""
    x, target = watch.inputs[number], watch.compared[pair][side]
    if not is_dense(x) or not x.ndim or not len(x) or target.numel() % len(x):
        return x.new_zeros(0, 0), x.new_zeros(0, 0)
    return x.reshape(len(x), -1), target.reshape(len(x), -1)


def next_columns(watch: Watch, number: int, pair: int, side: int) -> tuple[int, int] | None:
    """A column of targets and that of the inputs which it equals, if the targets of a sequence are its next inputs.

    Negative integers are not counted.
    """
    x = watch.inputs[number]
    inputs, targets = flat_pair(watch, number, pair, side)
    step = inputs.shape[1] // x.shape[1] if x.ndim > 1 and x.shape[1] else 0
    length = inputs.shape[1] - step
    if not step or targets.shape[1] not in (length, length + step):
        return None
    targets = targets[:, :length]
    is_counted = (targets >= 0) | targets.is_floating_point()
    next_differ, same_differ = (((targets != inputs[:, k : k + length]) & is_counted).sum() for k in (step, 0))
    if not 20 * next_differ < same_differ:  # or it is an autoencoder, or predicts masked tokens
        return None
    column = int(((targets != targets.roll(1, 0)) & is_counted).sum(0).argmax())
    return column, column + step


def equal_columns(watch: Watch, number: int, pair: int, side: int, chance: float = 1.0) -> list[int]:
    """The columns of an input that equal the one target of each sample, unless they may do so by chance."""
    inputs, targets = flat_pair(watch, number, pair, side)
    is_all = sum(each.numel() for each in watch.inputs) == len(inputs)  # an autoencoder of one number
    if targets.shape[1] != 1 or is_all:
        return []
    counts = targets.unique(return_counts=True)[1].double()
    orders = torch.lgamma(counts.sum() + 1) - torch.lgamma(counts + 1).sum()  # the logarithm of their number
    if chance < 1 and orders < math.log(inputs.shape[1] / chance):
        return []
    return (inputs == targets).all(0).nonzero().flatten().tolist()


def is_used(
    fork: Fork, net: nn.Module, batch: Any, place: tuple[int, int, int], target_column: int, input_column: int
) -> bool:
    """Whether predictions change if samples exchange a column of the input. Raises RuntimeError if they are random."""
    number, pair, side = place

    def exchanged(x: Tensor) -> Tensor:
        flat = x.reshape(len(x), -1).clone()
        flat[:, input_column] = flat[:, input_column].roll(1)
        return flat.view_as(x)

    seen = []
    for changed in ({}, {}, {number: exchanged}):
        scramble_global_rngs(0)
        watch = Watch(fork, net, batch, is_training=False, changes=changed)
        target, prediction = watch.compared[pair][side], watch.compared[pair][1 - side]
        if prediction.ndim > target.ndim:  # classes are its second dimension
            prediction = prediction.movedim(1, -1)
        seen.append(prediction.reshape(*flat_pair(watch, *place)[1].shape, -1)[:, target_column].double())
    if not torch.equal(seen[0], seen[1]):
        raise RuntimeError("its outputs are random")
    return relative_error(seen[2], seen[0]) > 1e-5
