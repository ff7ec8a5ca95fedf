# extra: verify or replay
"""Compare nested values, and format them for messages. The checks use these helpers."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import hashlib
import io
import pickle
import random
import sys
from collections.abc import Mapping
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from utils.batch import list_tensors, map_leaves, map_tensors
from utils.metrics import Metrics, check_metrics
from utils.training.hooks import ModelHooks
from utils.training.parts.loss_terms import LossTerms

STATE_KEYS = ("model", "ema", "optimizer", "scaler", "progress")  # the keys of a checkpoint with its state
# These fields of records differ between equal runs.
TIMING_FIELDS = ("samples_per_s", "tokens_per_s", "data_wait_s", "step_s", "peak_memory_bytes", "mfu")
# These relative differences are tolerated between sums in different orders, and between the losses of a batch and of
# its halves, for which layers may choose other kernels.
ROUNDING_TOLERANCE = {torch.bfloat16: 1e-1, torch.float16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-11}
ADDITIVITY_TOLERANCE = {torch.bfloat16: 1e-1, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-11}
MAX_SET_DEPTH = 3  # sets within each other whose content is compared


def scramble_global_rngs(number: int) -> None:
    """Seed the global generators differently each time, to expose results that depend on them."""
    random.seed(number)
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def flatten_nested(nest: Any, path: str = "") -> dict[str, Any]:
    """Return the values in nested mappings, lists, tuples and dataclasses, by path.

    Of other objects, only those that may be values of a batch are returned.
    """
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        nest = {field.name: getattr(nest, field.name, None) for field in dataclasses.fields(nest)}
    elif not isinstance(nest, Tensor | Mapping | list | tuple):
        values: list[Any] = []
        map_leaves(values.append, copy_without_cache(nest))
        nest = values if any(isinstance(value, Tensor) for value in values) else nest
    if isinstance(nest, Mapping | list | tuple):
        parts = nest.items() if isinstance(nest, Mapping) else enumerate(nest)
        return {name: leaf for key, value in parts for name, leaf in flatten_nested(value, f"{path}/{key}").items()}
    return {path.lstrip("/"): nest}


def copy_without_cache(value: Any) -> Any:
    """Return the object, or a copy without what functools.cached_property has stored in it."""
    kind, values = type(value), getattr(value, "__dict__", {})
    cached = [name for name in values if isinstance(getattr(kind, name, None), functools.cached_property)]
    if cached:
        value = copy.copy(value)
        for name in cached:
            del value.__dict__[name]
    return value


def hash_nested(nest: Any, unhashed_types: set[str] | None = None, depth: int = 0) -> str:
    """Return a hash of names, dtypes, shapes and bytes. Equal content has one digest, also in other processes.

    Args:
        nest: the nested values.
        unhashed_types: a set to which the types of objects are added that have no pickle and are not compared.
        depth: the number of sets around the value.
    """
    hashed = hashlib.sha256()
    for name, leaf in flatten_nested(nest).items():
        hashed.update(name.encode())
        hashed.update(
            serialize_tensor(leaf) if isinstance(leaf, Tensor) else serialize_object(leaf, unhashed_types, depth)
        )
    return hashed.hexdigest()[:16]


def is_dense(value: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor a NestedTensor. Both lack most operations."""
    return value.layout is torch.strided and not value.is_nested


def serialize_tensor(value: Tensor) -> bytes:
    """Return the dtype, shape and numbers of a tensor as bytes.

    A NestedTensor gives those of its rows, and a sparse tensor gives those of its indices and values.
    """
    value, shape = value.detach(), ""
    if value.is_nested:  # its shape has a symbol that differs between equal tensors
        parts = list(value.unbind())
    elif is_dense(value):
        parts = [value]
    else:
        shape = f"{value.layout} {tuple(value.shape)}"
        entries = value.to_sparse_coo().coalesce()
        parts = [entries.indices(), entries.values()]
    content = shape.encode()
    for part in parts:
        data = part.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        content += f" {data.dtype} {tuple(data.shape)}".encode() + data.flatten().view(torch.uint8).numpy().tobytes()
    return content


class ContentPickler(pickle.Pickler):
    """Gives equal objects of two processes the same bytes.

    Pickles of equal tensors, arrays, texts and sets may differ. They depend on memory, on the texts that are one object
    in Python, and on the order of insertion. A hash of the content takes their place, wherever an object holds them.
    """

    unhashed_types: set[str]  # the names of the types that are left out
    depth: int

    def persistent_id(self, value: Any) -> int | None:
        content = None
        if isinstance(value, Tensor):
            content = serialize_tensor(value)
        elif isinstance(value, str):
            content = value.encode(errors="surrogatepass")
        elif isinstance(value, bytes):
            content = value
        elif isinstance(value, type | FunctionType):  # even if no module names it
            content = f"{value.__module__}.{value.__qualname__}".encode()
            if getattr(value, "__closure__", None):
                self.unhashed_types.add(value.__qualname__)
        elif isinstance(value, set | frozenset):
            content = b"%d" % len(value)
            if self.depth < MAX_SET_DEPTH:  # a set may hold objects that have the set
                content = "".join(
                    sorted(hash_nested(item, self.unhashed_types, self.depth + 1) for item in value)
                ).encode()
        elif is_numpy_array(value):
            content = f"{value.dtype} {value.shape}".encode() + value.tobytes()
        if content is None:
            return None
        hashed = hashlib.sha256(type(value).__name__.encode() + content)
        return int.from_bytes(hashed.digest(), "big")  # this is a number, since equal texts may be one object or two

    def reducer_override(self, value: Any) -> Any:
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            return reduce(value) if reduce else copy_without_cache(value).__reduce_ex__(4)
        except Exception:
            self.unhashed_types.add(type(value).__qualname__)
            return str, (type(value).__qualname__,)


def is_numpy_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy without references to objects."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject


def serialize_object(value: Any, unhashed_types: set[str] | None = None, depth: int = 0) -> bytes:
    """Return the pickle of a value. The name of its type replaces an object without a pickle, such as an open file."""
    stream = io.BytesIO()
    pickler = ContentPickler(stream)
    pickler.unhashed_types, pickler.depth = set() if unhashed_types is None else unhashed_types, depth
    try:
        pickler.dump(value)
    except (pickle.PicklingError, RecursionError):  # the value may be nested too deeply
        pickler.unhashed_types.add(type(value).__qualname__)
        return type(value).__qualname__.encode()
    return stream.getvalue()


def pad_rows(nested: Tensor) -> Tensor:
    """Return the rows of a NestedTensor in a dense one, with zeros after them. Torch's function rejects holes."""
    rows = nested.unbind()
    if not rows:
        return torch.zeros(0)
    result = rows[0].new_zeros(len(rows), *map(max, zip(*(row.shape for row in rows), strict=True)))
    for row, padded_row in zip(rows, result, strict=True):
        padded_row[tuple(map(slice, row.shape))] = row
    return result


def hash_rng_states() -> dict[str, str]:
    """Return digests of the states of the global generators, by name."""
    states = {"torch's": [torch.get_rng_state()], "Python's": repr(random.getstate())}
    if torch.cuda.is_initialized():
        states["torch's on CUDA"] = [torch.cuda.get_rng_state()]
    if "numpy" in sys.modules:
        states["numpy's"] = repr(sys.modules["numpy"].random.get_state(legacy=False)["state"])
    return {name: hash_nested(state) for name, state in states.items()}


def spread_rows(count: int, size: int) -> Tensor:
    """Return up to `count` numbers of rows, spread from the first row to the last of `size`."""
    count = min(count, size)
    return torch.arange(count) * (size - 1) // max(1, count - 1)


def error_text(error: BaseException) -> str:
    """Return an error's type and text. For an error from a worker, whose text is a traceback, it is the last line."""
    lines = (str(error).strip() or "no text").splitlines()
    return lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"


def join_first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def format_plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def join_batches(batches: list[Any], size: int) -> Any:
    """Join nested batches of `size` samples into one.

    Raises:
        RuntimeError, ValueError: if the batches hold other things than rows, or do not fit.
    """
    values: list[Any] = []
    map_leaves(values.append, batches)
    if not all(isinstance(leaf, Tensor) and is_dense(leaf) and leaf.ndim and len(leaf) == size for leaf in values):
        raise ValueError("not all are tensors with a row for each sample")
    rows = iter([torch.cat(parts) for parts in zip(*map(list_tensors, batches), strict=True)])
    return map_tensors(lambda _: next(rows), batches[0])


def find_shared_memory(net: nn.Module) -> str:
    """Return the names of two parameters whose memory overlaps, if there are any."""
    spans = []
    for name, p in net.named_parameters():
        last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
        if p.numel():
            end = p.data_ptr() + (last + 1) * p.element_size()
            spans.append((str(p.device), p.data_ptr(), end, name))
    pairs = pairwise(sorted(spans))
    return next((f"{a[-1]}, {b[-1]}" for a, b in pairs if a[0] == b[0] and b[1] < a[2]), "")


def format_tensor(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else f"{value.double().sum().item():.6g} in total"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def compute_sums(hooks: ModelHooks, net: nn.Module, batch: Any, is_training: bool) -> dict[str, Tensor]:
    """Compute all sums and counts of a micro-batch, without dropout and batch statistics.

    Otherwise they are computed as in training or evaluation.
    """
    net.eval()
    net.training = is_training
    with torch.set_grad_enabled(is_training):
        return collect_sums(hooks, hooks.compute_loss(net, batch), batch)


def collect_sums(hooks: ModelHooks, metrics: Metrics, batch: Any) -> dict[str, Tensor]:
    """Return all sums and counts of metrics in their dtypes, flat, on the CPU. Raises UserError if loss_counts lies."""
    metrics = check_metrics(metrics)
    terms_of_loss = hooks.find_part(LossTerms)
    if terms_of_loss:
        total, count, means = metrics["loss"]
        terms = {f"loss/{name}": (total[k], count[k]) for k, name in enumerate(means.names)}
        if torch.is_grad_enabled():  # an evaluation may count in another way
            terms_of_loss.check_counts(terms_of_loss.count_terms(batch), count)
        metrics = terms | metrics  # terms come first, since one may be a mean while the others are sums
    parts = {f"{name}'s {part}": entry[k] for name, entry in metrics.items() for k, part in enumerate(("sum", "count"))}
    return {name: torch.as_tensor(value).detach().cpu().flatten() for name, value in parts.items()}


def comparable_state(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the state in a checkpoint. Optimizer state is by parameter name, since the order of groups may differ."""
    optimizer = payload["optimizer"]
    by_name = {name: optimizer["state"].get(number, {}) for number, name in enumerate(optimizer["names"])}
    return {key: payload[key] for key in STATE_KEYS} | {"optimizer": by_name}
