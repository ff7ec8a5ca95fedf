# extra: verify
"""Notes on what a person has to judge in a loss.

They are about narrow sums, metrics that are equal, and a model that sees what it predicts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lib.values import is_dense, relative_error, scramble_global_rngs, spread_rows
from lib.verify.fork import BrokenInvariant, Fork, Subset, allow_failure, perturb_parameters
from lib.verify.result import PLEASE_CHECK, join_parts
from utils.batch import map_tensors

COMPARING_FUNCTIONS = re.compile("loss|entropy|^gather$")  # functions of predictions and targets
BATCHES = 8  # batches in which metrics have to be equal
SAMPLES = 48  # samples whose targets have to equal a column of the input
CHANCE = 1e-4  # the largest probability that a column does so by chance
NEXT_INPUT = (
    f"{PLEASE_CHECK}Targets are the next inputs of a sequence, and predictions depend on these inputs. Use a causal"
    " mask, and let the target of position t be the input of t + 1."
)
SAME_INPUT = (
    f"{PLEASE_CHECK}Targets are the inputs of a sequence at the same positions, and predictions depend on these inputs."
    " Shift the targets by one, or mask what is to be predicted, unless this is an autoencoder."
)
AN_INPUT = (
    f"{PLEASE_CHECK}The targets of {SAMPLES} samples are also an input of the model, and predictions depend on that"
    " input. Take the targets out of the input."
)


class LossCall(TorchFunctionMode):
    """A call of compute_loss, and what it shows.

    It shows the metrics, the model's inputs, the tensors that loss functions compare, and sums in 8 or 16 bits.

    Args:
        change: a function that changes one of the model's inputs, and the number of that input.
    """

    def __init__(
        self, fork: Fork, net: nn.Module, batch: Any, is_training: bool, change: Any = None, number: int = -1
    ) -> None:
        super().__init__()
        self._change = change
        self._number = number
        self._is_in_model = False
        self.inputs: list[Tensor] = []
        self.compared_tensors: list[list[Tensor]] = []  # pairs of prediction and target, in any order
        self.narrow_sums: list[tuple[torch.dtype, float]] = []  # the dtype of each sum, and how large it may get
        hooks = (
            net.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            net.register_forward_hook(self._leave_model),
        )
        net.eval()  # this turns off dropout and batch statistics
        net.training = is_training
        with self, torch.set_grad_enabled(is_training):
            metrics = fork.hooks.compute_loss(net, batch)
        for hook in hooks:
            hook.remove()
        for total, count, *_ in metrics.values():
            self._note_sum(total, torch.as_tensor(count).max().item())
            self._note_sum(count)
        # only metrics that are reported as a quotient are numbers
        plain = {name: entry for name, entry in metrics.items() if name != "loss" and len(entry) == 2}
        self.metric_values = {name: [torch.as_tensor(part).item() for part in entry] for name, entry in plain.items()}

    def _enter_model(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self._is_in_model = True
        changed = map_tensors(self._note_input, (args, kwargs))
        return changed if self._change else None

    def _leave_model(self, *_: Any) -> None:
        self._is_in_model = False

    def _note_input(self, tensor: Tensor) -> Tensor:
        if is_dense(tensor) and tensor.ndim:
            if len(self.inputs) == self._number:
                tensor = self._change(tensor)
            self.inputs.append(tensor)
        return tensor

    def _note_sum(self, total: Any, largest: float = 0.0, terms: Tensor | None = None) -> None:
        if not isinstance(total, Tensor) or total.dtype.itemsize > 2 or total.dtype is torch.bool:
            return
        if terms is not None and ((terms == 0) | (terms == 1)).all():
            largest = terms.numel() / total.numel()  # all terms may become 1 later
        self.narrow_sums.append((total.dtype, max(largest, total.abs().double().max().item())))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [
            argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor) and is_dense(argument)
        ]
        if len(tensors) > 1 and (COMPARING_FUNCTIONS.search(name) or ("sub" in name and not self._is_in_model)):
            self.compared_tensors.append([tensor.detach() for tensor in tensors[:2]])
        if tensors and (name == "sum" or kwargs.get("reduction") == "sum"):
            self._note_sum(result, terms=tensors[0])
        return result


def fetch_batch(fork: Fork, is_training: bool, count: int, number: int = 0) -> Any:
    """Return a batch of samples from all over the training set or a held-out set. Each number gives other samples."""
    dataset: Any = fork.train_set if is_training else fork.held_out
    rows = (spread_rows(count, len(dataset)) + number) % len(dataset)
    return fork.create_loader(Subset(dataset, rows, fork.dtype)).fetch_samples([*range(len(rows))])[2]


@allow_failure("sums in few bits, metrics that are equal, and targets that are inputs")
def inspect_passes(fork: Fork) -> str:
    """Return notes on what a few passes show.

    Raises:
        BrokenInvariant: if an integer overflows at the size of the run's batches.
    """
    net = perturb_parameters(fork.create_model(), 1)  # some layers of a new model have no effect
    batches = {mode: fetch_batch(fork, mode, max(2, fork.small_config.batch_size)) for mode, _ in fork.modes()}
    calls = {mode: LossCall(fork, net, batch, mode) for mode, batch in batches.items()}
    narrow = [check_narrow_sums(fork, net, mode) for mode, call in calls.items() if call.narrow_sums]
    equal = note_equal_metrics(fork, net, calls)
    return join_parts(*narrow, equal, note_target_leak(fork, net, batches[True], calls[True]))


def check_narrow_sums(fork: Fork, net: nn.Module, is_training: bool) -> str:
    """Raise BrokenInvariant if an integer sum overflows in a batch of the run's size.

    A sum in float16 that may overflow gives a note.
    """
    size = fork.config.batch_size
    if not is_training:
        size = fork.config.eval_batch_size or size
    few, many = (
        LossCall(fork, net, fetch_batch(fork, is_training, count), is_training).narrow_sums for count in (2, 4)
    )
    for (dtype, two), (_, four) in zip(few, many, strict=False):
        largest = two + (four - two) / 2 * (size - 2)
        limit = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
        text = (
            f"A sum in {dtype} may reach {largest:.0f} in a batch of {size} samples, but overflows above {limit:.0f}."
            " Let sums and counts be int64 or float32."
        )
        if largest > limit and not dtype.is_floating_point:
            raise BrokenInvariant(text)
        if not largest <= limit:
            return f"{PLEASE_CHECK}{text}"
    return ""


def note_equal_metrics(fork: Fork, net: nn.Module, calls: dict[bool, LossCall]) -> str:
    """Return a note on two metrics, other than the loss, that have equal sums and counts in all batches."""
    values_by_pair: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for number in range(BATCHES):
        for call in calls.values():
            for name_a, name_b in combinations(call.metric_values, 2):
                values_by_pair[name_a, name_b].append([call.metric_values[name_a], call.metric_values[name_b]])
        equal = [
            pair
            for pair, values in values_by_pair.items()
            if all(numbers_a == numbers_b for numbers_a, numbers_b in values)
        ]
        if not equal:
            return ""
        size = fork.small_config.batch_size
        calls = {mode: LossCall(fork, net, fetch_batch(fork, mode, size, number + 1), mode) for mode in calls}
    pairs = [pair for pair in equal if len({numbers[0] for numbers, _ in values_by_pair[pair]}) > 1]
    if not pairs:
        return ""
    names = dict.fromkeys(name for pair in pairs for name in pair)
    return (
        f"{PLEASE_CHECK}{' and '.join(names)} have equal sums and counts in {BATCHES} batches. Compute each metric from"
        " its own numbers, or leave one out."
    )


def note_target_leak(fork: Fork, net: nn.Module, batch: Any, call: LossCall) -> str:
    """Return a note if predictions depend on an input that is their target."""
    for location in product(range(len(call.inputs)), range(len(call.compared_tensors)), (0, 1)):
        match = find_target_in_input(call, *location)
        if not match:
            continue
        note, samples = NEXT_INPUT, batch
        if match[0] == match[1]:
            note = SAME_INPUT
        if match[2].shape[1] == 1:
            note, samples = AN_INPUT, fetch_batch(fork, True, SAMPLES)
            match = find_target_in_input(LossCall(fork, net, samples, is_training=True), *location, chance=CHANCE)
        if match and is_input_used(fork, net, samples, location, *match):
            return note
    return ""


def find_target_in_input(
    call: LossCall, number: int, pair: int, side: int, chance: float = math.inf
) -> tuple[int, int, Tensor] | None:
    """Find an input that holds the targets. Each sample is flattened.

    If there is one target for each sample, the input has one column that equals it, and not by chance. Otherwise it
    holds, for each position, the next element of a sequence, or the same element of a sequence of integers. Negative
    integers are not counted.

    Returns:
        A column of the targets, the column of the input that equals it, and the targets. None if there is no such
        input.
    """
    x, target = call.inputs[number], call.compared_tensors[pair][side]
    if not x.numel() or not target.numel() or target.numel() % len(x):
        return None
    inputs, targets = x.reshape(len(x), -1), target.reshape(len(x), -1)
    if targets.shape[1] == 1:
        counts = targets.unique(return_counts=True)[1].double()
        orders = torch.lgamma(counts.sum() + 1) - torch.lgamma(counts + 1).sum()  # the logarithm of their number
        same = (inputs == targets).all(0).nonzero().flatten().tolist()
        is_all = inputs.shape[1] * len(call.inputs) == 1  # this is an autoencoder of one number
        is_chance = inputs.shape[1] * math.exp(-orders) > chance
        return (0, same[0], targets) if same and not is_all and not is_chance else None
    step = inputs.shape[1] // x.unsqueeze(-1).shape[1]
    length = inputs.shape[1] - step
    if targets.shape[1] not in (length, length + step):
        return None
    is_counted = (targets[:, :length] >= 0) | targets.is_floating_point()
    is_next, is_same = (targets[:, :length] == inputs[:, k : k + length] for k in (step, 0))
    not_next, not_same = ((is_counted & ~is_equal).sum() for is_equal in (is_next, is_same))
    if not 20 * not_next < not_same:  # this is an autoencoder, or a model of masked tokens
        if targets.is_floating_point() or not_same or not is_counted.any() or not not_next:
            return None
        step = 0
    column = int((is_counted & (inputs != inputs.roll(1, 0))[:, step : step + length]).sum(0).argmax())
    return column, column + step, targets


def is_input_used(
    fork: Fork,
    net: nn.Module,
    batch: Any,
    location: tuple[int, int, int],
    column: int,
    input_column: int,
    targets: Tensor,
) -> bool:
    """Return whether predictions change if samples exchange a column of the input.

    Raises:
        RuntimeError: if predictions are random.
    """

    def exchange_column(x: Tensor) -> Tensor:
        flat = x.reshape(len(x), -1).clone()
        flat[:, input_column] = flat[:, input_column].roll(1)
        return flat.view_as(x)

    number, pair, side = location
    seen = []
    for changed in (-1, -1, number):
        scramble_global_rngs(0)
        compared = LossCall(fork, net, batch, True, exchange_column, changed).compared_tensors[pair]
        prediction = compared[1 - side]
        if prediction.ndim > compared[side].ndim:  # the second dimension is that of the classes
            prediction = prediction.movedim(1, -1)
        seen.append(prediction.reshape(*targets.shape, -1)[:, column].double())
    if not torch.equal(seen[0], seen[1]):
        raise RuntimeError("The outputs of the model are random.")
    return relative_error(seen[2], seen[0]) > 1e-5
